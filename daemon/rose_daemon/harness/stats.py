"""Percentiles and intervals of what was measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def percentile(values: Sequence[float] | NDArray[np.float64], percent: float) -> float | None:
    """Percentile by linear interpolation; None without values."""
    return float(np.percentile(values, percent)) if len(values) else None


def percentiles(values: Sequence[float] | NDArray[np.float64], *percents: float) -> dict[str, float | None]:
    """`{"p50": ..., "p99": ...}`, rounded to a thousandth."""
    return {f"p{percent:g}": rounded(percentile(values, percent)) for percent in percents}


def rounded(value: float | None, digits: int = 3) -> float | None:
    """Round what is there."""
    return None if value is None else round(value, digits)


def wilson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson, 1927); (0, 1) without trials."""
    from scipy.stats import binomtest  # noqa: PLC0415 - takes a second to import

    if trials == 0:
        return 0.0, 1.0
    interval = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)
