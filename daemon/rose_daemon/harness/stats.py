"""Percentiles and intervals of what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Statistic = Callable[[NDArray[np.float64]], float]


def percentile(values: Sequence[float] | NDArray[np.float64], percent: float) -> float | None:
    """Percentile by linear interpolation; None without values."""
    return float(np.percentile(values, percent)) if len(values) else None


def percentiles(values: Sequence[float], *percents: float) -> dict[str, float | None]:
    """`{"p50": ..., "p99": ...}`, rounded to a thousandth."""
    return {f"p{percent:g}": rounded(percentile(values, percent)) for percent in percents}


def rounded(value: float | None, digits: int = 3) -> float | None:
    """Round what is there."""
    return None if value is None else round(value, digits)


def wilson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson, 1927); (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # At the ends the interval reaches the end exactly; rounding must not leave it a hair short.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high


def bootstrap(
    rounds: Sequence[Sequence[float]],
    statistic: Statistic,
    rng: np.random.Generator,
    *,
    resamples: int = 2000,
    confidence: float = 0.95,
) -> tuple[float, float] | None:
    """Percentile-bootstrap interval of a statistic of the pooled rounds; None without values.

    Values are drawn again within their round, as rounds differ in more than chance.
    """
    groups = [np.asarray(values, dtype=np.float64) for values in rounds if len(values)]
    if not groups:
        return None
    drawn = [
        statistic(np.concatenate([rng.choice(group, size=len(group)) for group in groups]))
        for _ in range(resamples)
    ]
    tail = 50 * (1 - confidence)
    low, high = np.percentile(drawn, (tail, 100 - tail))
    return float(low), float(high)
