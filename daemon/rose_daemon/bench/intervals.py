"""Bootstrap intervals of what was measured on the same requests under different modes.

Requests are drawn with replacement within their round, as rounds differ in more than chance, and the same
draw serves every mode: whatever two modes have in common cancels in their ratio.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Interval = tuple[float, float]

RESAMPLES = 1000
CONFIDENCE = 0.95


class Draws:
    """How often each bootstrap resample holds each request."""

    def __init__(self, rounds: Sequence[int], rng: np.random.Generator, resamples: int = RESAMPLES) -> None:
        """`rounds` is the round of each request, in the order of all arrays given to the methods."""
        groups = np.asarray(rounds)
        self.counts: NDArray[np.int64] = np.zeros((resamples, len(groups)), dtype=np.int64)
        for group in np.unique(groups):
            members = np.flatnonzero(groups == group)
            drawn = rng.integers(len(members), size=(resamples, len(members)))
            for row, picks in enumerate(drawn):
                self.counts[row, members] = np.bincount(picks, minlength=len(members))

    def quantiles(self, values: Floats, percent: float, owners: NDArray[np.int64] | None = None) -> Floats:
        """The percentile of each resample (linear interpolation); NaN values are left out.

        `owners` says to which request each value belongs, where requests have several or none.
        """
        owners = np.arange(len(values)) if owners is None else owners
        here = ~np.isnan(values)
        values, owners = values[here], owners[here]
        if not len(values):
            return np.full(len(self.counts), np.nan)
        order = np.argsort(values)
        values, owners = values[order], owners[order]
        return np.array([_weighted(values, counts[owners], percent) for counts in self.counts])


def _weighted(values: Floats, counts: NDArray[np.int64], percent: float) -> float:
    """numpy.percentile of `values` (ascending), each repeated so many times; NaN if none is."""
    ends = np.cumsum(counts)
    if not ends[-1]:
        return float("nan")
    position = percent / 100 * (ends[-1] - 1)
    below = int(position)
    low, high = np.searchsorted(ends, (below, min(below + 1, ends[-1] - 1)), side="right")
    return float(values[low] + (position - below) * (values[high] - values[low]))


def interval(resampled: Floats) -> Interval | None:
    """The middle 95% of a statistic over the resamples; None where it never had a value."""
    known = resampled[~np.isnan(resampled)]
    if not len(known):
        return None
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(known, (tail, 100 - tail))
    return float(low), float(high)
