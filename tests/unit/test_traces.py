"""Reading, generating and cutting request traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rose.errors import ConfigError
from rose.traces import Trace, TraceRequest, Window, generate, read_azure, window
from rose.units import NS_PER_S

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.fixture
def trace_file(tmp_path: Path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "trace.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_2023_rows_keep_their_100_ns(trace_file) -> None:
    trace = read_azure(
        trace_file(f"{HEADER}\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951691,396,109")
    )
    assert trace.at_ns.tolist() == [0, 4_314_579_100]
    assert trace.prompt_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]
    assert trace.notes == ()


@pytest.mark.parametrize(
    ("first", "second", "gap_ns"),
    [
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01+00:00", 990_070_000),
        ("2024-05-10 00:00:00+00:00", "2024-05-10 02:00:00+02:00", 0),
        ("2024-05-10T00:00:00Z", "2024-05-10T00:00:00.5Z", 500_000_000),
        ("2024-02-29 23:59:59", "2024-03-01 00:00:00", NS_PER_S),
        ("2023-11-16 18:15:46", "2023-11-16 18:15:46.0000001", 100),
    ],
)
def test_time_formats(trace_file, first: str, second: str, gap_ns: int) -> None:
    trace = read_azure(trace_file(f"{HEADER}\n{first},1,2\n{second},3,4\n"))
    assert trace.span_ns == gap_ns


def test_byte_order_mark_more_columns_and_blank_lines(trace_file) -> None:
    text = "\ufeffRegion,GeneratedTokens,ContextTokens,TIMESTAMP\n\nx,2,1,2023-11-16 18:15:46\n\n"
    trace = read_azure(trace_file(text))
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([1], [2])


def test_unsorted_rows_are_sorted_and_said(trace_file) -> None:
    trace = read_azure(
        trace_file(f"{HEADER}\n2023-11-16 18:00:02,2,2\n2023-11-16 18:00:01,1,1\n2023-11-16 18:00:03,3,3\n")
    )
    assert trace.prompt_tokens.tolist() == [1, 2, 3]
    assert trace.at_ns.tolist() == [0, NS_PER_S, 2 * NS_PER_S]
    assert trace.notes == ("1 of 3 rows were earlier than the row before them; sorted",)


GOOD = "2023-11-16 18:15:46,1,1"


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", "", "empty file"),
        (f"{HEADER}\n", "", "no rows"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,1\n", ":1", "no column GeneratedTokens"),
        ("a,b,c\n1,2,3\n", ":1", "no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        (f"{HEADER}\n{GOOD}\n2023-11-16 18:15:46,1\n", ":3", "2 fields"),
        (f"{HEADER}\n{GOOD}\n2023-11-16 18:15:46,1,2,3\n", ":3", "4 fields"),
        (f"{HEADER}\n{GOOD}\nyesterday,1,1\n", ":3", "TIMESTAMP 'yesterday' is not a time"),
        (f"{HEADER}\n2023-02-30 18:15:46,1,1\n", ":2", "not a time: day is out of range"),
        (f"{HEADER}\n2023-11-16 18:15:60,1,1\n", ":2", "second 60"),
        (f"{HEADER}\n2023-11-16 25:15:46,1,1\n", ":2", "not a time: hour"),
        (f"{HEADER}\n2023-11-16 18:15:46.1234567890,1,1\n", ":2", "is not a time"),
        (f"{HEADER}\n\u0662023-11-16 18:15:46,1,1\n", ":2", "is not a time"),
        (f"{HEADER}\n2023-11-16 18:15:46,1.5,1\n", ":2", "ContextTokens '1.5' is not a whole number"),
        (f"{HEADER}\n2023-11-16 18:15:46,1,-1\n", ":2", "GeneratedTokens '-1' is not a whole number"),
        (f"{HEADER}\n2023-11-16 18:15:46,1,\n", ":2", "GeneratedTokens '' is not a whole number"),
        (f"{HEADER}\n2023-11-16 18:15:46,99999999,1\n", ":2", "ContextTokens 99999999 is above"),
        (f"{HEADER}\n{GOOD}\n2023-11-16 18:15:46Z,1,1\n", ":3", "has an offset, the rows before have none"),
        (f"{HEADER}\n2023-11-16 18:15:46Z,1,1\n{GOOD}\n", ":3", "has no offset, the rows before have one"),
        (f'{HEADER}\n"2023-11-16 18:15:46,1,1\n', ":2", "malformed CSV"),
        (b"\xff\xfe\x00", "", "not a text file"),
    ],
)
def test_bad_files_name_line_and_reason(trace_file, text: str | bytes, line: str, reason: str) -> None:
    path = trace_file(text)
    with pytest.raises(ConfigError) as caught:
        read_azure(path)
    assert caught.value.what.startswith(f"{path}{line}: ")
    assert reason in caught.value.what


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_azure(tmp_path / "none.csv")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_azure(tmp_path)


def test_generated_trace_is_seeded_and_as_bursty_as_the_paper_says() -> None:
    trace = generate(rng(), duration_s=86_400)
    again = generate(rng(), duration_s=86_400)
    assert (trace.at_ns == again.at_ns).all()
    assert (trace.output_tokens == again.output_tokens).all()
    seconds = np.bincount(trace.at_ns // NS_PER_S)
    minutes = np.bincount(trace.at_ns // (60 * NS_PER_S))
    assert minutes.max() / minutes.mean() == pytest.approx(1.7, rel=0.05)
    assert seconds.max() / seconds.mean() == pytest.approx(4.22, rel=0.15)
    assert trace.prompt_tokens.mean() == pytest.approx(1155, rel=0.05)
    assert trace.output_tokens.mean() == pytest.approx(211, rel=0.05)


@pytest.mark.parametrize(
    "bad", [{"duration_s": 0}, {"duration_s": 1, "rate_rps": 0}, {"duration_s": 1, "amplitude": 2}]
)
def test_generated_trace_refuses_figures_out_of_range(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        generate(rng(), **bad)


def straight(count: int) -> Trace:
    return Trace("straight", np.arange(count) * NS_PER_S, np.full(count, 1000), np.arange(count))


def test_window_cuts_scales_and_clamps() -> None:
    cut = Window(
        offset_s=2,
        duration_s=3,
        size_divisor=2,
        prompt_tokens_max=300,
        output_tokens_min=2,
        output_tokens_max=9,
    )
    assert window(straight(10), cut, rng()) == [
        TraceRequest(0, 300, 2),
        TraceRequest(NS_PER_S, 300, 2),
        TraceRequest(2 * NS_PER_S, 300, 2),
    ]


def test_speed_shortens_the_waits_only() -> None:
    assert window(straight(10), Window(offset_s=2, duration_s=3, speed=2), rng()) == [
        TraceRequest(0, 1000, 2),
        TraceRequest(NS_PER_S // 2, 1000, 3),
        TraceRequest(NS_PER_S, 1000, 4),
    ]


def test_window_to_the_end_keeps_everything() -> None:
    assert len(window(straight(10), Window(), rng())) == 10


def test_thinning_keeps_the_share_and_is_seeded() -> None:
    kept = window(straight(10_000), Window(rate_scale=0.3), rng())
    assert len(kept) == pytest.approx(3000, rel=0.1)
    assert kept == window(straight(10_000), Window(rate_scale=0.3), rng())


def test_window_beyond_the_trace_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"no request left between 60 s.*\(the trace is 9 s long\)"
    ) as caught:
        window(straight(10), Window(offset_s=60), rng())
    assert str(caught.value)


@pytest.mark.parametrize(
    "bad",
    [
        {"offset_s": -1},
        {"offset_s": float("nan")},
        {"duration_s": 0},
        {"rate_scale": 0},
        {"rate_scale": 1.5},
        {"speed": 0},
        {"size_divisor": 0},
        {"prompt_tokens_min": 0},
        {"output_tokens_min": 5, "output_tokens_max": 4},
    ],
)
def test_window_refuses_figures_out_of_range(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        Window(**bad)
