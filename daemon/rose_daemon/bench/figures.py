"""Latencies of every mode, request by request, with intervals and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose_daemon.bench.intervals import Draws, Floats, interval
from rose_daemon.bench.runs import Mode, Run, of_mode
from rose_daemon.harness.load import RequestRecord
from rose_daemon.harness.stats import percentiles, rounded

BASELINES = (Mode.ALONE, Mode.NAIVE)
"""Modes that all others are held against."""


class Latencies:
    """What the requests of one mode met, in the order of `keys` (round, index); NaN for what is not known."""

    def __init__(self, runs: Sequence[Run], keys: Sequence[tuple[int, int]]) -> None:
        found = {(run.round, record.index): record for run in runs for record in run.records}
        records = [found.get(key) for key in keys]
        self.ttft_ms = _values(records, lambda record: record.ttft_ms)
        self.tpot_ms = _values(records, lambda record: record.tpot_ms)
        gaps = [[] if record is None else record.gaps_ms for record in records]
        self.itl_ms: Floats = np.array([gap for each in gaps for gap in each], dtype=np.float64)
        self.itl_owners: NDArray[np.int64] = np.repeat(np.arange(len(gaps)), [len(each) for each in gaps])


def _values(
    records: Sequence[RequestRecord | None], value: Callable[[RequestRecord], float | None]
) -> Floats:
    known = (None if record is None else value(record) for record in records)
    return np.array([np.nan if each is None else each for each in known], dtype=np.float64)


class Comparison:
    """The modes of a benchmark side by side, on the same requests and the same resamples."""

    def __init__(self, runs: Sequence[Run], seed: int) -> None:
        keys = sorted({(run.round, record.index) for run in runs for record in run.records})
        self._draws = Draws([index for index, _ in keys], np.random.default_rng(seed))
        self._latencies: Mapping[Mode, Latencies] = {
            mode: Latencies(of_mode(runs, mode), keys) for mode in dict.fromkeys(run.mode for run in runs)
        }
        self._p99: dict[tuple[Mode, str], Floats] = {}

    def latencies(self, mode: Mode) -> dict[str, Any]:
        """Quantiles of a mode in milliseconds, each with its 95% interval."""
        seen = self._latencies[mode]
        return {
            "ttft_ms": self._quantiles(seen.ttft_ms),
            "tpot_ms": self._quantiles(seen.tpot_ms),
            "itl_ms": percentiles(seen.itl_ms, 99)
            | {
                "p99_ci": _rounded(interval(self._draws.quantiles(seen.itl_ms, 99, seen.itl_owners))),
                "max": rounded(float(seen.itl_ms.max())) if len(seen.itl_ms) else None,
            },
        }

    def _quantiles(self, values: Floats) -> dict[str, Any]:
        known = values[~np.isnan(values)]
        figures: dict[str, Any] = dict(percentiles(known, 50, 99))
        for percent in (50, 99):
            figures[f"p{percent}_ci"] = _rounded(interval(self._draws.quantiles(values, percent)))
        return figures

    def against(self, mode: Mode, baseline: Mode) -> dict[str, Any] | None:
        """Ratio of the p99 and median difference by request, `mode` over `baseline`; None without either."""
        if mode is baseline or not {mode, baseline} <= self._latencies.keys():
            return None
        figures = {}
        for name in ("ttft_ms", "tpot_ms"):
            ours = getattr(self._latencies[mode], name)
            theirs = getattr(self._latencies[baseline], name)
            if np.isnan(ours - theirs).all():
                continue
            figures[name] = {
                "p99_ratio": rounded(float(np.nanpercentile(ours, 99) / np.nanpercentile(theirs, 99))),
                "p99_ratio_ci": _rounded(interval(self._tail(mode, name) / self._tail(baseline, name))),
                "paired_median_difference": rounded(float(np.nanmedian(ours - theirs))),
                "paired_median_difference_ci": _rounded(interval(self._draws.quantiles(ours - theirs, 50))),
            }
        return figures or None

    def _tail(self, mode: Mode, name: str) -> Floats:
        """The resampled p99; asked for again by each comparison."""
        key = (mode, name)
        if key not in self._p99:
            self._p99[key] = self._draws.quantiles(getattr(self._latencies[mode], name), 99)
        return self._p99[key]


def _rounded(ends: tuple[float, float] | None) -> list[float] | None:
    return None if ends is None else [round(end, 3) for end in ends]
