"""Intervals: Wilson's against scipy's, and that those of bursty windows are honest."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from rose.core.evidence import Tally, design_effect, difference, late_share, wilson


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_wilson_is_scipys(trials: int, successes: int) -> None:
    successes = min(successes, trials)
    low, high = wilson(successes, trials)
    theirs = binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    assert low == pytest.approx(theirs.low, abs=1e-9)
    assert high == pytest.approx(theirs.high, abs=1e-9)


def test_without_requests_nothing_is_known() -> None:
    assert tuple(wilson(0, 0)) == (0, 1)
    assert difference([Tally(10, 1)], []) is None
    assert difference([], [Tally(10, 1)]) is None


tallies = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)).map(lambda t: Tally(t[0], min(t))))


@given(tallies, tallies)
def test_an_interval_holds_what_was_counted(on: list[Tally], off: list[Tally]) -> None:
    share = late_share(on)
    assert 0 <= share.interval.low <= share.share <= share.interval.high <= 1 or not share.requests
    assert design_effect(on) >= 1
    found = difference(on, off)
    if found is not None:
        assert -1 <= found.interval.low <= found.difference <= found.interval.high <= 1
        wider = difference(on, off, z=3.5)
        assert wider is not None
        assert wider.interval.low <= found.interval.low
        assert wider.interval.high >= found.interval.high


def windows(rng: random.Random, count: int, quiet: float, burst: float) -> list[Tally]:
    """Windows of 40 requests; in one of five, lateness comes in a burst."""
    made = []
    for _ in range(count):
        chance = burst if rng.random() < 0.2 else quiet
        made.append(Tally(40, sum(rng.random() < chance for _ in range(40))))
    return made


def test_the_interval_of_a_difference_covers_it_also_where_lateness_comes_in_bursts() -> None:
    rng, covered, naive = random.Random(1), 0, 0
    truth = 0.0  # both sides are drawn alike
    for _ in range(300):
        on, off = windows(rng, 60, 0.005, 0.3), windows(rng, 30, 0.005, 0.3)
        found = difference(on, off)
        assert found is not None
        covered += found.interval.low <= truth <= found.interval.high
        pooled = [Tally(sum(t.requests for t in side), sum(t.late for t in side)) for side in (on, off)]
        alone = difference(pooled[:1], pooled[1:])
        assert alone is not None
        naive += alone.interval.low <= truth <= alone.interval.high
    assert covered >= 0.9 * 300
    assert naive < 0.8 * 300, "the bursts are such that independent requests would be a wrong assumption"


def test_real_harm_shows() -> None:
    rng = random.Random(2)
    found = difference(windows(rng, 400, 0.03, 0.03), windows(rng, 40, 0.001, 0.001))
    assert found is not None
    assert found.interval.low > 0.01
