"""Measured engines in scenarios: what comes of a profile, and which files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rose_sim.calibration import Calibration
from rose_sim.calibration import write as write_calibration
from rose_sim.costs import BATCH_MAX, StepCost, step_cost
from rose_sim.hardware import gpu, model
from rose_sim.profiled import engines_of
from rose_sim.reports import run_report
from rose_sim.world import simulate
from sim_world import small

from rose.errors import ConfigError
from rose.profile import Fingerprint, Profile, Step

ROOFLINE = step_cost(model("Qwen3-8B"), gpu("H800"), 1)
LENGTHS = (16, 64, 256, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def profile_of(cost: StepCost, slower: float = 1.0) -> Profile:
    """What `rose profile` would have measured on an engine of that cost."""

    def step(load: int, time_ps: int) -> Step:
        return Step(load, round((time_ps - cost.overhead) * slower / 1000))

    return Profile(
        fingerprint=Fingerprint("cuda", "NVIDIA H800", 0, "0" * 32),
        prefill=tuple(step(tokens, cost.prefill_ps(tokens)) for tokens in LENGTHS),
        decode=tuple(step(batch, cost.decode_ps(batch, 0)) for batch in BATCHES),
    )


def saved(path: Path, slower: float = 1.0, cost: StepCost = ROOFLINE) -> str:
    profile_of(cost, slower).save(path)
    return str(path)


def measured(**profiles: str) -> Any:
    return small(**{f"{role}__profile": path for role, path in profiles.items()})


def test_a_profile_of_the_cost_model_s_engine_gives_its_run(tmp_path: Path) -> None:
    base = small(rollout__model="Qwen3-8B")
    path = saved(tmp_path / "p.json")
    _, rollout = engines_of(msgspec.structs.replace(base, rollout=measured(rollout=path).rollout))
    for tokens in LENGTHS:
        assert rollout.cost.prefill_ps(tokens) == pytest.approx(ROOFLINE.prefill_ps(tokens), rel=0.05)
    for batch in BATCHES:
        assert rollout.cost.decode_ps(batch, 9000) == pytest.approx(ROOFLINE.decode_ps(batch, 9000), rel=0.02)
    assert "profile of NVIDIA H800" in rollout.source
    expected, found = simulate(base, "rose"), simulate(measured(rollout=path), "rose")
    assert found.rollout_s == pytest.approx(expected.rollout_s, rel=0.05)


def test_an_engine_measured_half_as_fast_is_half_as_fast(tmp_path: Path) -> None:
    path = saved(tmp_path / "p.json", slower=2.0)
    serving, rollout = engines_of(measured(rollout=path))
    assert serving.source.startswith("cost model")
    plain = rollout.cost.decode_ps(8, 0) - rollout.cost.overhead
    assert plain == pytest.approx(2 * (ROOFLINE.decode_ps(8, 0) - ROOFLINE.overhead), rel=0.02)
    assert simulate(measured(rollout=path), "rose").rollout_s > simulate(small(), "rose").rollout_s * 1.1


def test_a_calibration_has_both_engines(tmp_path: Path) -> None:
    serving, rollout = ROOFLINE.scaled(prefill=2, decode=2), ROOFLINE.scaled(prefill=3, decode=3)
    found = Calibration(
        source="a run", rounds=(0,), serving=serving, rollout=rollout, turnaround_ms=1.0, modes={},
        serving_steps=(), rollout_steps=(), errors={},
    )  # fmt: skip
    path = tmp_path / "calibration.json"
    write_calibration(path, found)
    engines = engines_of(measured(serving=str(path), rollout=str(path)))
    assert [each.cost for each in engines] == [serving, rollout]
    assert all(each.source.endswith("calibrated by a run") for each in engines)


def test_a_report_says_which_engines_were_measured(tmp_path: Path) -> None:
    path = saved(tmp_path / "p.json")
    text = Path("tests/sim/tiny.toml").read_text(encoding="utf-8")
    scenario = tmp_path / "s.toml"
    scenario.write_text(text.replace("[rollout]", f'[rollout]\nprofile = "{path}"'), encoding="utf-8")
    engines = run_report(scenario, ["rose"], None)["engines"]
    assert engines["serving"].startswith("cost model: ")
    assert engines["rollout"].startswith(f"{path}: profile of ")


def damaged(path: Path, **changes: Any) -> str:
    document = json.loads(Path(saved(path)).read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": 9}, "schema 9"),
        ({"decode": []}, "too few"),
        ({"prefill": [[16, 1000]]}, "too few"),
        ({"prefill": [[16, 1000], [32, 0]]}, "cannot be"),
        ({"prefill": "none"}, "not a latency profile"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = damaged(tmp_path / "p.json", **changes)
    with pytest.raises(ConfigError, match=reason) as error:
        engines_of(measured(serving=path))
    assert path in str(error.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "not JSON"), ("[]", "neither"), ("{}", "neither"), ('{"serving_steps": []}', "no calibration")],
)
def test_other_files_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=reason):
        engines_of(measured(rollout=str(path)))
    with pytest.raises(ConfigError, match="cannot be read"):
        engines_of(measured(rollout=str(tmp_path / "none.json")))


def test_costs_reach_as_far_as_batches_do(tmp_path: Path) -> None:
    _, rollout = engines_of(measured(rollout=saved(tmp_path / "p.json")))
    times = [rollout.cost.decode_ps(batch, 0) for batch in range(1, BATCH_MAX + 1)]
    assert times == sorted(times)
    assert times[-1] >= times[255]
