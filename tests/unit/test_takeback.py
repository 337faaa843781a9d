"""Reclaim drills: when, how much, and what they mean for what may be lent."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from rose.core.takeback import GROWTH_KEPT_NS, DrillSettings, TakeBack
from rose.units import NS_PER_MS, NS_PER_S

PERIOD = 600 * NS_PER_S


def take_back(seed: int = 0, **fields: float) -> TakeBack:
    return TakeBack(DrillSettings(**fields), random.Random(seed))  # type: ignore[arg-type]


def test_drills_come_at_random_with_the_mean_that_was_asked_for() -> None:
    subject = take_back()
    times = [second for second in range(600_000) if subject.due(second * NS_PER_S)]
    assert times[0] >= 600, "none right after a start"
    assert len(times) == pytest.approx(1000, rel=0.15)
    pauses = [after - before for before, after in pairwise(times)]
    assert min(pauses) < 60
    assert max(pauses) > 1500


def test_without_a_period_there_are_none() -> None:
    subject = take_back(period_ns=0)
    assert not any(subject.due(second * 1000 * NS_PER_S) for second in range(1000))


def test_another_period_counts_from_now_on() -> None:
    subject = take_back()
    assert not subject.due(0)
    subject.reconfigure(DrillSettings(period_ns=NS_PER_S))
    assert any(subject.due(second * NS_PER_S) for second in range(60))
    subject.reconfigure(DrillSettings(period_ns=0))
    assert not any(subject.due(second * NS_PER_S) for second in range(60, 6000))


def test_a_drill_takes_little_and_leaves_something() -> None:
    subject = take_back(share_max=0.05)
    assert {subject.blocks(100) for _ in range(500)} == {1, 2, 3, 4, 5}
    assert subject.blocks(0) == subject.blocks(1) == subject.blocks(10) == 0
    greedy = take_back(share_max=1.0)
    assert {greedy.blocks(3) for _ in range(100)} == {1, 2}


def test_the_p99_of_a_few_is_the_slowest() -> None:
    subject = take_back()
    assert subject.quantile_ns(0.99) is None
    for duration_ms in range(1, 51):
        subject.measured(2, duration_ms * NS_PER_MS)
    assert subject.quantile_ns(0.99) == 50 * NS_PER_MS
    assert subject.quantile_ns(0.5) == 26 * NS_PER_MS
    for _ in range(200):
        subject.measured(2, NS_PER_MS)
    assert subject.quantile_ns(0.99) == 49 * NS_PER_MS


def test_what_serving_grows_by_meanwhile_stays_free() -> None:
    subject = take_back()
    for second, held in enumerate((1000, 1000, 1500, 1200, 1300)):
        subject.serving_holds(held, second * NS_PER_S)
    assert subject.growth_bytes_per_s == 500
    assert subject.reserve_bytes == 0, "nobody knows yet how long it takes"
    subject.measured(1, 200 * NS_PER_MS)
    assert subject.reserve_bytes == 100
    later_ns = 10 * NS_PER_S + GROWTH_KEPT_NS
    subject.serving_holds(1300, later_ns)
    subject.serving_holds(1310, later_ns + 2 * NS_PER_S)
    assert subject.growth_bytes_per_s == 5, "a burst is forgotten after an hour"


def test_readings_in_quick_succession_are_one() -> None:
    subject = take_back()
    subject.serving_holds(0, 0)
    subject.serving_holds(1000, NS_PER_MS)
    assert subject.growth_bytes_per_s == 0
    subject.serving_holds(1000, NS_PER_S)
    assert subject.growth_bytes_per_s == 1000


def test_a_serving_engine_that_loads_does_not_grow() -> None:
    subject = take_back()
    subject.serving_holds(0, 0)
    subject.serving_unseen()
    subject.serving_holds(10**10, NS_PER_S)
    assert subject.growth_bytes_per_s == 0


@pytest.mark.parametrize("fields", [{"period_ns": -1}, {"share_max": 0.0}, {"share_max": 1.5}])
def test_senseless_settings_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        DrillSettings(**fields)  # type: ignore[arg-type]
