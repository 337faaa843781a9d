"""What a serving engine lends: never what a step may need, never what it used a moment ago."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.core.lending import LendingPolicy, LendingSettings

SETTINGS = LendingSettings(total_blocks=1000, step_blocks=20, keep_blocks=100, window_ns=1000)
RESERVE = 20 + 40 + 100


def test_a_step_that_cannot_run_short_takes_nothing_back() -> None:
    assert LendingPolicy(SETTINGS).wanted(20, 800) == 0


def test_memory_is_taken_back_in_chunks() -> None:
    policy = LendingPolicy(SETTINGS)
    assert policy.wanted(19, 800) == 40
    assert policy.wanted(19, 30) == 30  # no more than is lent
    assert policy.wanted(0, 0) == 0


def test_whole_prompts_that_wait_must_fit_too() -> None:
    policy = LendingPolicy(SETTINGS)
    assert policy.wanted(100, 800, waiting_blocks=80) == 0
    assert policy.wanted(100, 800, waiting_blocks=200) == 120


def test_what_is_unused_all_through_a_window_is_lent() -> None:
    policy = LendingPolicy(SETTINGS)
    assert policy.surplus(900, 0) == 0
    assert policy.surplus(500, 600) == 0
    assert policy.surplus(900, 1000) == 500 - RESERVE
    assert policy.surplus(900, 1500) == 0
    assert policy.surplus(900 - 500 + RESERVE, 2000) == 900 - 500 + RESERVE - RESERVE


def test_a_burst_within_the_window_keeps_the_memory() -> None:
    policy = LendingPolicy(SETTINGS)
    policy.surplus(900, 0)
    policy.surplus(10, 500)
    assert policy.surplus(900, 1000) == 0


@pytest.mark.parametrize(
    "change", [{"total_blocks": 0}, {"step_blocks": 0}, {"keep_blocks": -1}, {"window_ns": 0}]
)
def test_senseless_settings_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="senseless"):
        LendingSettings(**({"total_blocks": 10, "step_blocks": 1} | change))


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 700)), min_size=1, max_size=40))
def test_the_reserve_is_never_lent(looks: list[tuple[int, int]]) -> None:
    policy, now_ns, parked = LendingPolicy(SETTINGS), 0, 0
    for free, pause_ns in looks:
        now_ns += pause_ns
        left = min(free, 1000 - parked)
        lent = policy.surplus(left, now_ns)
        assert lent >= 0
        assert lent == 0 or left - lent >= RESERVE
        parked += lent
        parked -= policy.wanted(left - lent, parked)
        assert 0 <= parked <= 1000
