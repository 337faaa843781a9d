"""Traces in the formats of the field: what is read, and what is refused with file, line and reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from rose_sim.traces import read_trace

from rose.errors import ConfigError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str | bytes, name: str = "trace") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("text", "at_ns", "prompts", "outputs"),
    [
        (f"{AZURE}\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951691,396,0\r\n",
         [0, 4_314_579_100], [374, 396], [44, 0]),
        (f"\ufeff{AZURE}\n2024-05-10 00:00:00.009930+00:00,10,2\n2024-05-09 17:00:01.009930-07:00,11,3\n",
         [0, 1_000_000_000], [10, 11], [2, 3]),
        (f"{BURST}\n5,,0.1,GPT-4,472,18,490,API log\n6.5,x,,ChatGPT,10,20,30,Conversation log\n",
         [0, 1_500_000_000], [472, 10], [18, 20]),
        (('{"timestamp": 3000, "input_length": 7, "output_length": 5, "hash_ids": [1]}\n'
         '{"timestamp": 0, "input_length": 6, "output_length": 4, "hash_ids": []}\n'),
         [0, 3_000_000_000], [6, 7], [4, 5]),
        (('{"arrival_time": 0.5, "prompt_len": 8, "output_len": 2}\n\n'
         '{"arrival_s": 1, "input_tokens": 9, "output_tokens": 3}\n'),
         [0, 500_000_000], [8, 9], [2, 3]),
    ],
    ids=["azure-2023", "azure-2024-bom-zones", "burstgpt", "mooncake-unsorted", "vllm-bench"],
)  # fmt: skip
def test_known_formats(file, text: str, at_ns: list[int], prompts: list[int], outputs: list[int]) -> None:
    trace = read_trace(file(text))
    assert trace.at_ns.tolist() == at_ns
    assert trace.prompt_tokens.tolist() == prompts
    assert trace.output_tokens.tolist() == outputs


def test_rows_out_of_order_are_counted(file) -> None:
    rows = "".join(f'{{"timestamp": {at}, "input_length": 1, "output_length": 1}}\n' for at in (5, 1, 7))
    assert read_trace(file(rows)).notes == ("1 of 3 rows were earlier than the row before them; sorted",)


@pytest.mark.parametrize(
    ("text", "where", "reason"),
    [
        ("", "", "empty file"),
        ("\n\n", "", "empty file"),
        ("a,b,c\n1,2,3\n", ":1", "columns of no known trace"),
        ("TIMESTAMP,ContextTokens\n", ":1", "no column GeneratedTokens"),
        (f"{AZURE}\n2023-11-16 18:15:46,-1,2\n", ":2", "not a whole number"),
        (f"{BURST}\n", "", "no rows"),
        (f"{BURST}\nx,,,,1,2,3,\n", ":2", "'x' is not a time"),
        (f"{BURST}\n1,,,,1\n", ":2", "fewer fields"),
        (f"{BURST}\n1,,,,1.5,2,3,\n", ":2", "not a whole number"),
        (f"{BURST}\n-1,,,,1,2,3,\n", ":2", "out of range"),
        (f'{BURST}\n1,"a\n', "", "malformed CSV"),
        ('{"timestamp": 0}\n', ":1", "none of"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{', ":2", "not a JSON object"),
        ('{"timestamp": 0, "input_length": 1, "output_length": null}\n', ":1", "not a whole number"),
        ('{"timestamp": "nan", "input_length": 1, "output_length": 1}\n', ":1", "out of range"),
        ('{"timestamp": 0, "input_length": 99999999999, "output_length": 1}\n', ":1", "more than"),
        ("[1, 2]\n", ":1", "columns of no known trace"),
        (b"\xff\xfe\x00", "", "not a text file"),
    ],
)  # fmt: skip
def test_what_is_malformed_is_named(file, text: str | bytes, where: str, reason: str) -> None:
    path = file(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_trace(path)
    assert caught.value.what.startswith(f"{path}{where}")


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_trace(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path)
