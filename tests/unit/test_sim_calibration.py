"""The fit to a measured run: known costs come back, and what is missing is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rose_sim import calibration
from rose_sim.command import app
from rose_sim.coserving import Timing, predict, with_throughput
from rose_sim.fidelity import fidelity
from rose_sim.loop import stream
from rose_sim.measured import Measured, MeasuredRequest, MeasuredRun, Options, read_measured
from typer.testing import CliRunner

from rose.core.readings import StepRecord
from rose.errors import ConfigError

MS = 1_000_000
GAP_NS = MS // 5
WAY_IN_NS, WAY_OUT_NS = 4 * MS, 2 * MS
OPTIONS = Options(8, 640, 64, 64, 512, (250.0, 60.0), 1)
runner = CliRunner()


def prefill_ns(tokens: int) -> int:
    return round((3 + 0.06 * tokens) * MS)


def decode_ns(batch: int) -> int:
    return round((4.5 + 0.5 * batch) * MS)


def serving_run(seed: int, *, requests: int = 60, first: int = 1) -> MeasuredRun:
    """Requests one at a time on an engine of known costs; the first decode takes `first` times as long."""
    rng = stream(seed, "made")
    now, records, steps = 0, [], []
    for index in range(requests):
        prompt, output = int(rng.integers(40, 500)), int(rng.integers(2, 20))
        sent = now
        now += WAY_IN_NS
        tokens: list[int] = []
        for number in range(output):
            scheduled = 1 if number else prompt
            took = decode_ns(1) if number else prefill_ns(prompt)
            took *= first if number == 1 else 1
            steps.append(StepRecord(len(steps), now, now + took, scheduled))
            tokens.append(now + took + WAY_OUT_NS)
            now += took + GAP_NS
        records.append(MeasuredRequest(index, prompt, output, sent, tokens))
        now += int(rng.integers(20, 80)) * MS
    return MeasuredRun("alone", seed, now / 1e9, records, 0, 0, now, steps, [])


def rollout_run(seed: int) -> MeasuredRun:
    """Waves of eight: prefills in chunks of 512, then decodes of the eight together."""
    now, steps, tokens = 0, [], 0
    for _ in range(12):
        for _ in range(10):
            steps.append(StepRecord(len(steps), now, now + prefill_ns(512), 512))
            now += prefill_ns(512) + GAP_NS
        for _ in range(64):
            steps.append(StepRecord(len(steps), now, now + decode_ns(8), 8))
            now += decode_ns(8) + GAP_NS
            tokens += 8
    # Fewer tokens than the steps could give: the clients take their time between answer and next request.
    return MeasuredRun("rollout-alone", seed, now / 1e9, [], tokens * 3 // 4, 0, now, [], steps)


def measured(*seeds: int) -> Measured:
    return Measured(OPTIONS, [run for seed in seeds for run in (serving_run(seed), rollout_run(seed))])


@pytest.fixture(scope="module")
def found() -> calibration.Calibration:
    made = measured(0)
    fitted = calibration.calibrate(made, Path("made"))
    return with_throughput(fitted, made)


def test_known_costs_come_back(found: calibration.Calibration) -> None:
    assert found.errors["serving"] < 0.01
    for tokens in (64, 200, 400):
        step_ms = (found.serving.prefill_ps(tokens) - found.serving.overhead) / 1e9
        assert step_ms == pytest.approx(prefill_ns(tokens) / MS, rel=0.03)
    assert (found.rollout.decode_ps(8, 0) - found.rollout.overhead) / 1e9 == pytest.approx(8.5, rel=0.01)
    assert found.serving.overhead / 1e9 == pytest.approx(GAP_NS / MS, rel=0.01)
    fit = found.modes["alone"]
    assert np.median(fit.api_in_ms) == pytest.approx(WAY_IN_NS / MS)
    assert np.median(fit.api_out_ms) == pytest.approx(WAY_OUT_NS / MS)


def test_another_run_is_predicted_and_a_wrong_model_is_found_out(found: calibration.Calibration) -> None:
    other = measured(7)
    report = fidelity(found, other, Path("other"))
    assert report["ok"], report["rows"]
    assert {row["mode"] for row in report["rows"]} == {"alone", "rollout-alone"}
    slow_day = msgspec.structs.replace(found, rollout=found.rollout.scaled(prefill=1.3, decode=1.3))
    report = fidelity(slow_day, other, Path("other"), same_speed=True)
    assert report["step_time_factor"] < 0.95  # steps are shorter than it says
    assert {row["mode"] for row in report["rows"]} == {"alone"}
    slower = msgspec.structs.replace(found, serving=found.serving.scaled(prefill=1.5, decode=1.5))
    report = fidelity(slower, other, Path("other"))
    missed = {row["figure"] for row in report["rows"] if not row["ok"]}
    assert {"TTFT p50, ms", "TPOT p50, ms"} <= missed
    assert not report["ok"]


def test_a_prediction_looks_at_what_was_sent_and_not_at_what_came_of_it(
    found: calibration.Calibration,
) -> None:
    run = serving_run(3)
    blind = msgspec.structs.replace(
        run,
        records=[msgspec.structs.replace(each, token_ns=[each.sent_ns] * 2) for each in run.records],
        serving_steps=[],
    )
    assert predict(found, run, OPTIONS, 1) == predict(found, blind, OPTIONS, 1)


@pytest.mark.parametrize("mode", ["naive", "static", "rose-strict", "rose-slack"])
def test_modes_with_both_engines_are_predicted(found: calibration.Calibration, mode: str) -> None:
    """Rollout gets less than alone, and serving is slower than alone, by the real gate where there is one."""
    modes = found.modes | {mode: found.modes["alone"]}
    shared = msgspec.structs.replace(found, modes=modes)
    alone = predict(shared, serving_run(2), OPTIONS, 1)
    run = msgspec.structs.replace(serving_run(2), mode=mode)
    beside = predict(shared, run, OPTIONS, 1)
    assert len(beside.ttft_ms) == len(alone.ttft_ms) == 60
    assert beside.rollout_tokens_per_s > 0
    assert beside == predict(shared, run, OPTIONS, 1)
    if mode == "rose-strict":
        assert np.median(beside.ttft_ms) >= np.median(alone.ttft_ms)


def test_a_mode_that_is_needed_and_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="rollout-alone was not measured"):
        calibration.calibrate(Measured(OPTIONS, [serving_run(0)]), Path("made"))
    with pytest.raises(ConfigError, match="too few to fit"):
        calibration.calibrate(Measured(OPTIONS, [serving_run(0, requests=2), rollout_run(0)]), Path("made"))


def test_the_commands_go_from_a_report_to_a_verdict(tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_bytes(msgspec.json.encode(measured(0, 1)))
    out, report = tmp_path / "c.json", tmp_path / "f.json"
    source = ["--from", str(tmp_path / "report.json")]
    result = runner.invoke(app, ["calibrate", *source, "--rounds", "0", "--out", str(out)])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "median error" in result.output
    compare = ["fidelity", *source, "--calibration", str(out), "--rounds", "1", "--json", str(report)]
    result = runner.invoke(app, compare)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "figures within tolerance" in result.output
    assert json.loads(report.read_text())["measured"]["requests"]["alone"] == 60
    assert isinstance(runner.invoke(app, [*compare, "--rounds", "9"]).exception, ConfigError)
    assert isinstance(runner.invoke(app, [*compare, "--rounds", "x"]).exception, ConfigError)


def test_files_that_are_no_measurement_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_measured(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="was not written by"):
        read_measured(tmp_path)
    path.write_bytes(msgspec.json.encode(Measured(OPTIONS, [])))
    with pytest.raises(ConfigError, match="has no run"):
        read_measured(path)
    with pytest.raises(ConfigError, match="is no calibration"):
        calibration.read(path)


def test_decodes_right_after_a_prefill_are_told_apart() -> None:
    """Short answers are made of them: without that their time per token would be predicted too short."""
    runs = [serving_run(seed, requests=200, first=3) for seed in (1, 2)]
    made = Measured(OPTIONS, [runs[0], rollout_run(1)])
    fitted = with_throughput(calibration.calibrate(made, Path("made")), made)
    times = fitted.modes["alone"].serving_alone
    assert np.median(times.after) == pytest.approx(3 * np.median(times.decode), rel=0.02)
    tpot_ms = [
        (record.token_ns[-1] - record.token_ns[0]) / (record.output_tokens - 1) / 1e6
        for record in runs[1].answered
    ]
    predicted = predict(fitted, runs[1], OPTIONS, 1).tpot_ms
    assert np.median(predicted) == pytest.approx(np.median(tpot_ms), rel=0.05)
    blind = {
        mode: msgspec.structs.replace(fit, serving_alone=msgspec.structs.replace(fit.serving_alone, after=()))
        for mode, fit in fitted.modes.items()
    }
    missed = predict(msgspec.structs.replace(fitted, modes=blind), runs[1], OPTIONS, 1).tpot_ms
    assert np.median(missed) < 0.95 * np.median(tpot_ms)


def test_slow_steps_come_in_spells_and_are_not_more_for_it(found: calibration.Calibration) -> None:
    quantiles = tuple(np.arange(1, 101) / 100)

    def draws(persistence: float) -> np.ndarray[Any, Any]:
        fit = msgspec.structs.replace(found.modes["alone"], persistence=persistence)
        timing = Timing(msgspec.structs.replace(found, modes={"alone": fit}), "alone", stream(1, "spells"))
        return np.array([timing._serving_stretch(quantiles) for _ in range(20_000)])

    for persistence in (calibration.SLOW_SHARE, 0.5):
        values = draws(persistence)
        slow = values > 1 - calibration.SLOW_SHARE
        assert slow.mean() == pytest.approx(calibration.SLOW_SHARE, abs=0.015)
        assert values.mean() == pytest.approx(np.mean(quantiles), abs=0.01)
        assert slow[1:][slow[:-1]].mean() == pytest.approx(persistence, abs=0.05)
