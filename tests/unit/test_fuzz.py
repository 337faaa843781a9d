"""A short run of every fuzz target (`make fuzz` is the long one), and the inputs that were findings once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from rose_daemon.telemetry import engine_metrics

from rose import config, wire
from rose.core.readings import Unknown
from rose.errors import ConfigError
from rose.traces import read_azure

FOLDER = Path(__file__).parents[1] / "fuzz"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_targets", FOLDER / "targets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_targets"] = module
    spec.loader.exec_module(module)
    return module


fuzz = load()
NAMES = [name for name, _ in fuzz.targets(Path())]


@pytest.mark.parametrize("name", NAMES)
def test_damaged_inputs_are_answered_in_words(name: str, tmp_path: Path) -> None:
    target = dict(fuzz.targets(tmp_path))[name]
    for seed in target.seeds:
        target.call(seed)  # a seed that is refused would test little
    fuzz.run(target, 1500, seed=7)


def test_a_finding_is_found() -> None:
    with pytest.raises(fuzz.Finding, match="KeyError"):
        fuzz.run(fuzz.Target((b"abc",), lambda data: {b"abc": 1}[data], ()), 50, seed=1)


@pytest.mark.parametrize("deep", [b"\x91", b"\x81\xa1a"])
def test_a_message_that_is_nested_deeply_is_garbage_and_no_more(deep: bytes) -> None:
    """It ended the scheduler: the error was none of those that garbage is known by."""
    goodbye = wire.pack(wire.Goodbye("host", "s"))  # type: ignore[arg-type]
    assert goodbye[0] == 0x83
    with pytest.raises(msgspec.DecodeError):
        wire.unpack_to_scheduler(b"\x84" + goodbye[1:] + b"\xa1z" + deep * 200_000)
    for unpack in (wire.unpack_request, wire.unpack_reply):
        with pytest.raises(msgspec.DecodeError):
            unpack(b'{"type":"Reply","body":{"a":' + b"[" * 200_000)


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("engine_chat", b"data: ", b"\n\n"),
        ("engine_completion", b"data: ", b"\n\n"),
        ("engine_sglang", b"", b""),
        ("relay_reply", b"", b""),
    ],
)
def test_an_answer_that_is_nested_deeply_is_garbage_and_no_more(
    name: str, begin: bytes, end: bytes, tmp_path: Path
) -> None:
    """An engine's failed its turn, instead of moving it."""
    target = dict(fuzz.targets(tmp_path))[name]
    with pytest.raises(target.answers):
        target.call(begin + b'{"z":' + b"[" * 200_000 + end)


def test_a_setting_that_is_nested_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rose.toml").write_text("schema = " + "[" * 5000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        config.load(tmp_path / "rose.toml", {})
    (tmp_path / "rose.toml").write_text("schema = 1\n")
    with pytest.raises(ConfigError, match="tick_ms"):
        config.load(tmp_path / "rose.toml", {"ROSE_NODE__TICK_MS": "[" * 5000})


@pytest.mark.parametrize("year", ["0001", "1969", "2201", "2263", "2823", "9999"])
def test_a_trace_of_another_age_is_refused(year: str, tmp_path: Path) -> None:
    """Nanoseconds of such years do not fit, or wrap around when they are subtracted."""
    path = tmp_path / "trace.csv"
    path.write_text(
        f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,5,5\n{year}-11-16 18:17:03.9,5,5\n"
    )
    with pytest.raises(ConfigError, match="is not of the years"):
        read_azure(path)


_BUCKET = "vllm:time_to_first_token_seconds_bucket{{{}}} {}\n"
_COUNTED = "vllm:time_to_first_token_seconds_count 4\nvllm:time_to_first_token_seconds_sum 1\n"


@pytest.mark.parametrize(
    "text",
    [
        _BUCKET.format('le="soon"', 1) + _COUNTED,
        _BUCKET.format('le="NaN"', 1) + _COUNTED,
        _BUCKET.format('le="0.1"', "NaN") + _COUNTED,
        _BUCKET.format('model="m"', 1) + _COUNTED,
        'vllm:num_requests_running{e="0"} +Inf\nvllm:num_requests_running{e="1"} -Inf\n',
        'vllm:num_requests_running{e="0"} 1e308\nvllm:num_requests_running{e="1"} 1e308\n',
    ],
)
def test_metrics_that_make_no_sense_are_unknown_and_end_nothing(text: str) -> None:
    """Such a page of the serving engine ended rosed."""
    found = engine_metrics.parse(text)
    assert isinstance(found, Unknown) or isinstance(found.running, Unknown)
