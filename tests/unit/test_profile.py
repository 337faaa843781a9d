"""Latency profiles: only those of this very hardware and model are taken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rose_daemon.profile.command import _cores, _kind, summary
from rose_daemon.profile.measure import step_between

from rose.core.readings import ReplicaReading
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.slack_board import SlackBoard
from rose.engines.vllm.step_gate import StepGate
from rose.errors import ConfigError
from rose.profile import Fingerprint, Profile, Step, load
from rose.units import ms_to_ns

MS = ms_to_ns(1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 64}')
    return directory


def made(model: Path) -> Profile:
    loads = (1, 2, 4, 8, 16, 64, 256, 448)
    return Profile(
        fingerprint=Fingerprint.here("cpu", 1, model),
        prefill=tuple(Step(load, 10 * MS + load * MS // 10) for load in loads),
        decode=tuple(Step(load, 5 * MS + load * MS // 10) for load in loads),
    )


def test_a_profile_comes_back_from_its_file(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "deep" / "profile.json"
    made(model).save(path)
    assert load(path, Fingerprint.here("cpu", 1, model)) == made(model)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"processor": "abacus"}, "processor 'abacus' instead of"),
        ({"cores": 4}, "cores 4 instead of 1"),
        ({"device": "cuda"}, "device 'cuda'"),
        ({"model": "other"}, "model 'other'"),
    ],
)
def test_a_foreign_profile_is_refused(tmp_path: Path, model: Path, change: Any, said: str) -> None:
    path = tmp_path / "profile.json"
    made(model).save(path)
    here = msgspec.structs.replace(Fingerprint.here("cpu", 1, model), **change)
    with pytest.raises(ConfigError, match=f"something else: {said}") as caught:
        load(path, here)
    assert "rose profile" in caught.value.hint


def test_another_shape_is_another_model_and_other_weights_are_not(model: Path) -> None:
    before = Fingerprint.here("cpu", 1, model)
    (model / "model.safetensors").write_bytes(b"weights")
    assert Fingerprint.here("cpu", 1, model) == before
    (model / "config.json").write_text('{"hidden_size": 128}')
    assert Fingerprint.here("cpu", 1, model).differences(before)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a latency profile"),
        (b"[]", "not a latency profile"),
        (b'{"schema": 1}', "not a latency profile"),
        (b"SCHEMA", "schema 2 is not supported"),
        (b"STEP", "cannot be"),
        (None, "No such file"),
    ],
)
def test_a_damaged_profile_is_refused(tmp_path: Path, model: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "profile.json"
    if content == b"SCHEMA":
        msgspec.structs.replace(made(model), schema=2).save(path)
    elif content == b"STEP":
        msgspec.structs.replace(made(model), decode=(Step(0, 5),)).save(path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        load(path, Fingerprint.here("cpu", 1, model))


def test_what_cannot_be_told_is_an_error(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        Fingerprint.here("cpu", 1, tmp_path / "nothing")
    if not Path("/proc/driver/nvidia/gpus").exists():
        with pytest.raises(ConfigError, match="no NVIDIA GPU"):
            Fingerprint.here("cuda", 0, model)
    with pytest.raises(ConfigError, match=r"Not a directory|File exists"):
        made(model).save(model / "config.json" / "profile.json")


# ---- in the engines -----------------------------------------------------------------------------


def settings(tmp_path: Path, **more: Any) -> PluginSettings:
    fields: dict[str, Any] = {"role": "rollout", "name": "r0", "token_file": "t", "worker_cpus": "0"}
    return PluginSettings(run_dir=str(tmp_path / "run"), **(fields | more))


def vllm_config(model: Path) -> Any:
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"), model_config=SimpleNamespace(model=str(model))
    )


def test_an_engine_takes_the_profile_it_was_given(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "profile.json"
    made(model).save(path)
    assert settings(tmp_path).profile(vllm_config(model)) is None
    assert settings(tmp_path, profile_file=str(path)).profile(vllm_config(model)) == made(model)
    with pytest.raises(ConfigError, match="cores"):
        settings(tmp_path, profile_file=str(path), worker_cpus="0,1").profile(vllm_config(model))


def test_models_start_from_a_profile(tmp_path: Path, model: Path) -> None:
    gate = StepGate(settings(tmp_path), step_tokens_max=512)
    assert not gate._admission.latency.calibrated
    gate.start_from(made(model))
    assert gate._admission.latency.calibrated
    board = SlackBoard(settings(tmp_path, role="serving"), 100, 512)
    board.start_from(made(model))
    latency = board.tracker.latency
    assert abs(latency.prefill_ns(100) - 20 * MS) < MS // 100
    assert abs(latency.decode_ns(10) - 6 * MS) < MS // 100


# ---- measuring ----------------------------------------------------------------------------------


def reading(steps: int, tokens: int, busy_ns: int) -> ReplicaReading:
    zeros = ReplicaReading(*[0] * len(ReplicaReading._fields))
    return zeros._replace(steps=steps, tokens=tokens, busy_ns=busy_ns)


def test_steps_are_read_off_the_board() -> None:
    first = reading(10, 100, 50)
    assert step_between(first, reading(11, 164, 90)) == Step(64, 40)
    assert step_between(first, reading(14, 108, 90)) == Step(2, 10)
    assert step_between(first, first) is None
    assert step_between(first, reading(12, 165, 90)) is None  # not of one size


def test_the_summary_names_medians(model: Path) -> None:
    text = summary(
        msgspec.structs.replace(made(model), decode=(Step(1, MS), Step(1, 9 * MS), Step(1, 2 * MS)))
    )
    assert "prefill ms by tokens: 1: 10.1" in text
    assert "decode ms by sequences: 1: 2.0" in text


def test_options_are_checked() -> None:
    assert (_kind("cuda"), _cores("0,3")) == ("cuda", (0, 3))
    with pytest.raises(ConfigError, match="--device"):
        _kind("tpu")
    with pytest.raises(ConfigError, match="--cpus"):
        _cores("0-3")
