"""Intervals of what was counted: how sure one can be that rollout made serving requests late.

Late requests come in bursts, so requests of one window are not independent.  A count over windows is
therefore reduced to its *effective* size, by its design effect: how much more it varies from window to window
than independent requests would (Kish, 1965).  Shares get Wilson's interval (1927), differences of shares
Newcombe's hybrid of two of them (1998, method 10).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import NamedTuple

Z_95 = 1.959963984540054
"""Quantile of the normal distribution for intervals of 95%."""


class Interval(NamedTuple):
    """Of 95% confidence, unless another quantile was asked for."""

    low: float
    high: float


class Tally(NamedTuple):
    """Requests of one window, and how many of them were late."""

    requests: int
    late: int


class Share(NamedTuple):
    """A share of requests with its interval."""

    share: float
    interval: Interval
    requests: int


class Difference(NamedTuple):
    """By how much one share is above another."""

    on: Share
    off: Share
    difference: float
    interval: Interval


def wilson(successes: float, trials: float, z: float = Z_95) -> Interval:
    """Wilson's score interval of a proportion; (0, 1) without trials.  Counts need not be whole."""
    if trials <= 0:
        return Interval(0.0, 1.0)
    share, square = successes / trials, z * z
    middle = (share + square / (2 * trials)) / (1 + square / trials)
    half = z / (1 + square / trials) * sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    low = 0.0 if successes <= 0 else max(0.0, middle - half)
    high = 1.0 if successes >= trials else min(1.0, middle + half)
    return Interval(low, high)


def design_effect(tallies: Sequence[Tally]) -> float:
    """Variance of the late share over that of independent requests, at least 1.

    The variance is that of a ratio of sums over windows (linearised); 1 where there are too few windows, or
    nothing varies.
    """
    requests = sum(tally.requests for tally in tallies)
    late = sum(tally.late for tally in tallies)
    windows = sum(tally.requests > 0 for tally in tallies)
    if windows < 2 or not 0 < late < requests:
        return 1.0
    share = late / requests
    spread = sum((tally.late - share * tally.requests) ** 2 for tally in tallies)
    variance = spread * windows / (windows - 1) / requests**2
    return max(1.0, variance / (share * (1 - share) / requests))


def late_share(tallies: Iterable[Tally], z: float = Z_95) -> Share:
    """The share of late requests over all windows."""
    kept = list(tallies)
    requests, late = sum(tally.requests for tally in kept), sum(tally.late for tally in kept)
    shrunk = design_effect(kept)
    share = late / requests if requests else 0.0
    return Share(share, wilson(late / shrunk, requests / shrunk, z), requests)


def difference(on: Iterable[Tally], off: Iterable[Tally], z: float = Z_95) -> Difference | None:
    """How many more requests are late in `on` windows than in `off` ones; None without requests in both."""
    with_it, without = late_share(on, z), late_share(off, z)
    if not with_it.requests or not without.requests:
        return None
    delta = with_it.share - without.share
    (on_low, on_high), (off_low, off_high) = with_it.interval, without.interval
    low = delta - sqrt((with_it.share - on_low) ** 2 + (off_high - without.share) ** 2)
    high = delta + sqrt((on_high - with_it.share) ** 2 + (without.share - off_low) ** 2)
    return Difference(with_it, without, delta, Interval(max(-1.0, low), min(1.0, high)))
