"""`rose sim fidelity`: the calibrated simulator against a run that it was not calibrated on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rose.errors import ConfigError
from rose_sim.calibration import Calibration
from rose_sim.coserving import MODES, Prediction, predict
from rose_sim.loop import stream
from rose_sim.measured import ALONE, ROLLOUT_ALONE, Measured, MeasuredRun
from rose_sim.reports import SCHEMA, costs

MEDIAN_TOLERANCE = 0.15
TAIL_TOLERANCE = 0.30
THROUGHPUT_TOLERANCE = 0.10
SEEDS = 5
"""Predictions are pooled over so many draws of the time in the API server."""
RESAMPLES = 1000


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one mode."""

    mode: str
    figure: str
    measured: float
    predicted: float
    low: float
    high: float
    """Where the prediction has to lie."""
    ok: bool


def fidelity(
    found: Calibration, measured: Measured, source: Path, seed: int = 1, *, same_speed: bool = False
) -> dict[str, Any]:
    """Hold predictions against measurements.  Raises ConfigError when no mode is known to both.

    With `same_speed` steps are scaled to the speed that `rollout-alone` of the predicted run shows.
    """
    started = time.perf_counter()
    speed = _speed(found, measured, source, seed) if same_speed else 1.0
    if same_speed:
        serving, rollout = (
            cost.scaled(prefill=speed, decode=speed) for cost in (found.serving, found.rollout)
        )
        found = msgspec.structs.replace(found, serving=serving, rollout=rollout)
    modes = [mode for mode in measured.modes if mode in MODES and mode in found.modes]
    if same_speed:
        modes.remove(ROLLOUT_ALONE)
    if not modes:
        raise ConfigError(f"{source}: no mode that {found.source} is a calibration of")
    rows: list[Row] = []
    requests = {}
    for mode in modes:
        runs = measured.of(mode)
        requests[mode] = sum(len(run.answered) for run in runs)
        rows += _rows(mode, runs, [_pooled(found, run, measured, seed) for run in runs], seed)
    return {
        "schema": SCHEMA,
        "command": "sim fidelity",
        "calibration": {"source": found.source, "rounds": list(found.rounds), "errors": found.errors},
        "measured": {
            "source": str(source),
            "rounds": sorted({run.round for run in measured.runs}),
            "requests": requests,
        },
        "step_time_factor": round(speed, 4),
        "left_out": [mode for mode in measured.modes if mode not in modes],
        "rows": msgspec.to_builtins(rows),
        "ok": all(row.ok for row in rows),
        **costs(started),
    }


def _speed(found: Calibration, measured: Measured, source: Path, seed: int) -> float:
    """By how much steps of the reference are shorter or longer than the calibration says."""
    runs = measured.of(ROLLOUT_ALONE)
    if not runs:
        raise ConfigError(f"{source}: mode {ROLLOUT_ALONE} was not measured, which would tell the speed")
    expected = sum(_pooled(found, run, measured, seed).rollout_tokens_per_s * run.elapsed_s for run in runs)
    return expected / sum(run.rollout_tokens for run in runs)


def _pooled(found: Calibration, run: MeasuredRun, measured: Measured, seed: int) -> Prediction:
    each = [predict(found, run, measured.options, seed + number) for number in range(SEEDS)]
    return Prediction(
        [value for one in each for value in one.ttft_ms],
        [value for one in each for value in one.tpot_ms],
        float(np.mean([one.rollout_tokens_per_s for one in each])),
    )


def _rows(mode: str, runs: list[MeasuredRun], predictions: list[Prediction], seed: int) -> list[Row]:
    rows: list[Row] = []
    if mode != ROLLOUT_ALONE:
        answered = [record for run in runs for record in run.answered]
        seen = {
            "TTFT": [record.ttft_ms for record in answered],
            "TPOT": [each for record in answered if (each := record.tpot_ms) is not None],
        }
        expected = {
            "TTFT": [value for each in predictions for value in each.ttft_ms],
            "TPOT": [value for each in predictions for value in each.tpot_ms],
        }
        for name, values in seen.items():
            rows += _latency_rows(mode, name, np.array(values), np.array(expected[name]), seed)
    if mode != ALONE:
        elapsed_s = sum(run.elapsed_s for run in runs)
        tokens = sum(
            each.rollout_tokens_per_s * run.elapsed_s for each, run in zip(predictions, runs, strict=True)
        )
        now = sum(run.rollout_tokens for run in runs) / elapsed_s
        rows.append(_row(mode, "rollout tokens/s", now, tokens / elapsed_s, THROUGHPUT_TOLERANCE))
    return rows


def _latency_rows(
    mode: str, name: str, seen: NDArray[np.float64], expected: NDArray[np.float64], seed: int
) -> list[Row]:
    if not len(seen) or not len(expected):
        return []
    p50, p99 = (float(value) for value in np.percentile(seen, (50, 99)))
    predicted_p50, predicted_p99 = (float(value) for value in np.percentile(expected, (50, 99)))
    rng = stream(seed, "bootstrap", mode, name)
    drawn = rng.integers(len(seen), size=(RESAMPLES, len(seen)))
    low, high = np.percentile(np.percentile(seen[drawn], 99, axis=1), (2.5, 97.5))
    interval = (min(float(low), p99 * (1 - TAIL_TOLERANCE)), max(float(high), p99 * (1 + TAIL_TOLERANCE)))
    return [
        _row(mode, f"{name} p50, ms", p50, predicted_p50, MEDIAN_TOLERANCE),
        _within(mode, f"{name} p99, ms", p99, predicted_p99, interval),
    ]


def _row(mode: str, figure: str, measured: float, predicted: float, share: float) -> Row:
    return _within(mode, figure, measured, predicted, (measured * (1 - share), measured * (1 + share)))


def _within(mode: str, figure: str, measured: float, predicted: float, interval: tuple[float, float]) -> Row:
    low, high = interval
    return Row(
        mode=mode,
        figure=figure,
        measured=round(measured, 3),
        predicted=round(predicted, 3),
        low=round(low, 3),
        high=round(high, 3),
        ok=low <= predicted <= high,
    )
