"""Shares of late requests and their intervals."""

from __future__ import annotations

import numpy as np
import pytest
from rose_sim.loop import PS_PER_S
from rose_sim.risk import BLOCK_S, Lateness, added_share, clopper_pearson, late_share

BLOCKS, EACH = 100, 50


def lateness(late: dict[int, int]) -> Lateness:
    """`EACH` requests a block, so many of them late."""
    found = Lateness(100.0, 10.0)
    for block in range(BLOCKS):
        for number in range(EACH):
            ttft_ms = 200.0 if number < late.get(block, 0) else 50.0
            found.answered((block * BLOCK_S) * PS_PER_S + number, ttft_ms, 5.0)
    return found


def test_a_request_is_late_by_either_budget() -> None:
    found = Lateness(100.0, 10.0)
    for ttft_ms, tpot_ms in ((99.0, 9.0), (100.0, 10.0), (101.0, 0.0), (1.0, 11.0)):
        found.answered(0, ttft_ms, tpot_ms)
    assert late_share(found, 1).share == 0.5


def test_clustered_late_requests_give_a_wider_interval_than_scattered_ones() -> None:
    clustered = late_share(lateness({3: 25, 70: 25}), 1)
    scattered = late_share(lateness(dict.fromkeys(range(50), 1)), 1)
    assert clustered.share == scattered.share == 50 / (BLOCKS * EACH)
    assert clustered.high - clustered.low > 2 * (scattered.high - scattered.low)
    assert clustered.low <= clustered.share <= clustered.high


def test_the_interval_is_never_narrower_than_the_exact_one() -> None:
    for late in ({}, {5: 1}, dict.fromkeys(range(BLOCKS), 1)):
        found = late_share(lateness(late), 1)
        low, high = clopper_pearson(sum(late.values()), BLOCKS * EACH)
        assert found.low <= low
        assert found.high >= high


def test_what_was_late_alone_too_is_not_added() -> None:
    """Serving's own bad minutes vary much more than what lending adds to them."""
    bad = {3: 25, 70: 25}
    alone, beside = lateness(bad), lateness(bad | {10: 1, 20: 1})
    added = added_share(beside, alone, 1)
    assert added.share == pytest.approx(2 / (BLOCKS * EACH))
    assert added.low >= 0
    assert added.high < late_share(beside, 1).high - late_share(alone, 1).share
    same = added_share(alone, alone, 1)
    assert (same.share, same.low) == (0.0, 0.0)
    assert same.high == clopper_pearson(0, BLOCKS * EACH)[1], "none was seen, which is not never"


def test_lending_may_also_make_fewer_late() -> None:
    assert added_share(lateness({}), lateness({3: 25}), 1).share < 0


def test_without_requests_nothing_is_known() -> None:
    empty = Lateness(1.0, 1.0)
    assert late_share(empty, 1) == added_share(empty, empty, 1) == (0.0, 0.0, 1.0)


def test_the_interval_depends_on_the_seed_alone() -> None:
    late = lateness({3: 25, 70: 9})
    assert late_share(late, 7) == late_share(late, 7)
    highs = [late_share(late, seed).high for seed in range(5)]
    assert np.std(highs) < 0.1 * np.mean(highs)
