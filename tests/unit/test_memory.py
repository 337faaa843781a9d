"""Serving-first memory: one cut, then frozen, but never at serving's expense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.core.invariants import check_memory, check_memory_step
from rose.core.memory import Cut, MemoryPolicy, MemoryReading, MemorySettings, MemoryState
from rose.core.readings import Unknown
from rose.units import NS_PER_S

SETTINGS = MemorySettings(
    headroom_share=0.2, cut_share=0.5, budget_blocks_min=4, settle_ns=NS_PER_S, block_bytes=10
)
ROOMY = MemoryReading(serving_bytes=300, free_bytes=500, total_bytes=1000)
SHORT = MemoryReading(serving_bytes=800, free_bytes=100, total_bytes=1000)


def sized(total_blocks: int = 100, settings: MemorySettings = SETTINGS) -> MemoryPolicy:
    policy = MemoryPolicy(settings)
    policy.sized(total_blocks)
    return policy


def frozen(total_blocks: int = 100) -> MemoryPolicy:
    policy = sized(total_blocks)
    policy.reclaim("drill")
    policy.applied(0)
    assert policy.state is MemoryState.FROZEN
    return policy


def test_an_uncut_replica_may_use_all_it_has() -> None:
    policy = sized()
    assert policy.budget_blocks == 100
    assert policy.limit_blocks == 0


def test_serving_in_the_headroom_cuts_once() -> None:
    policy = sized()
    assert policy.observed(ROOMY, 0) is None
    assert policy.observed(SHORT, 1) == Cut(100, 50, "headroom_entered")
    assert policy.state is MemoryState.PRESSURE
    assert policy.limit_blocks == 50
    for now_ns in range(2, 100):
        assert policy.observed(SHORT, now_ns * NS_PER_S) is None
    policy.applied(100 * NS_PER_S)
    assert policy.state is MemoryState.FROZEN


def test_exactly_the_headroom_free_is_enough() -> None:
    assert sized().observed(MemoryReading(0, 200, 1000), 0) is None
    assert sized().observed(MemoryReading(0, 199, 1000), 0) is not None


def test_a_cut_keeps_the_minimum() -> None:
    policy = sized(6)
    assert policy.reclaim("drill") == Cut(6, 4, "drill")
    at_minimum = sized(4)
    assert at_minimum.reclaim("drill") is None
    assert at_minimum.observed(SHORT, 0) is None
    assert at_minimum.state is MemoryState.NORMAL


def test_there_is_nothing_to_cut_before_the_engine_told_its_size() -> None:
    policy = MemoryPolicy(SETTINGS)
    assert policy.reclaim("drill") is None
    assert policy.observed(SHORT, 0) is None
    assert policy.limit_blocks == 0


def test_a_second_reclaim_in_the_same_rl_step_cuts_nothing() -> None:
    policy = frozen()
    assert policy.reclaim("drill") is None
    assert policy.budget_blocks == 50


def short_by(spare_bytes: int) -> MemoryReading:
    """The headroom is 200 bytes."""
    return MemoryReading(serving_bytes=800, free_bytes=200 - spare_bytes, total_bytes=1000)


def cut_and_settled(first: MemoryReading) -> MemoryPolicy:
    """Cut at 0, applied at 5 s: what is read from 6 s on is what the cut has brought."""
    policy = sized()
    assert policy.observed(first, 0) == Cut(100, 50, "headroom_entered")
    policy.applied(5 * NS_PER_S)
    assert policy.observed(short_by(199), 6 * NS_PER_S - 1) is None, "memory had no time to come back"
    return policy


@pytest.mark.parametrize("spare_bytes", [1, 60, 130])
def test_a_shortage_that_stands_still_is_cut_for_once(spare_bytes: int) -> None:
    policy = cut_and_settled(short_by(spare_bytes))
    for second in range(6, 600):
        assert policy.observed(short_by(spare_bytes + second % 20), second * NS_PER_S) is None
    assert (policy.budget_blocks, policy.state) == (50, MemoryState.FROZEN)


def test_serving_that_goes_on_growing_is_cut_for_as_it_grows() -> None:
    policy = cut_and_settled(short_by(40))
    assert policy.observed(short_by(40), 6 * NS_PER_S) is None
    assert policy.observed(short_by(60), 7 * NS_PER_S) is None, "a tenth of the headroom is noise"
    assert policy.observed(short_by(61), 8 * NS_PER_S) == Cut(50, 25, "headroom_entered")
    assert policy.observed(short_by(199), 60 * NS_PER_S) is None, "the second cut is not applied yet"
    policy.applied(60 * NS_PER_S)
    assert policy.observed(short_by(61), 61 * NS_PER_S) is None, "its own floor"
    assert policy.observed(short_by(81), 62 * NS_PER_S) is None
    assert policy.observed(short_by(82), 63 * NS_PER_S) == Cut(25, 12, "headroom_entered")


def test_memory_that_comes_back_slowly_raises_the_floor() -> None:
    policy = cut_and_settled(short_by(100))
    for second, spare in enumerate((100, 80, 50, 20), start=6):
        assert policy.observed(short_by(spare), second * NS_PER_S) is None
    assert policy.observed(short_by(41), 20 * NS_PER_S) == Cut(50, 25, "headroom_entered")


def test_serving_that_comes_back_into_the_headroom_is_cut_for_again() -> None:
    policy = cut_and_settled(short_by(100))
    assert policy.observed(ROOMY, 7 * NS_PER_S) is None
    assert policy.observed(short_by(20), 8 * NS_PER_S) is None
    assert policy.observed(short_by(21), 9 * NS_PER_S) == Cut(50, 25, "headroom_entered")


def test_next_to_nothing_free_is_cut_for_until_there_is_something() -> None:
    """Serving that wants more than there is cannot show it in what is free."""
    policy, second = cut_and_settled(short_by(200)), 6
    while policy.budget_blocks > SETTINGS.budget_blocks_min:
        before = policy.budget_blocks
        assert policy.observed(short_by(199), second * NS_PER_S) is not None
        assert policy.budget_blocks < before
        policy.applied(second * NS_PER_S)
        second += 1
    assert policy.observed(short_by(199), second * NS_PER_S) is None, "there is nothing left to cut"


def test_memory_that_came_back_is_not_cut_for_again() -> None:
    policy = sized()
    policy.observed(SHORT, 0)
    policy.applied(NS_PER_S)
    for second in range(2, 50):
        assert policy.observed(ROOMY, second * NS_PER_S) is None
    assert policy.budget_blocks == 50


def test_an_rl_step_thaws_and_grows_by_what_is_spare() -> None:
    policy = frozen()
    policy.step_began()
    assert policy.state is MemoryState.NORMAL
    assert policy.budget_blocks == 50
    policy.observed(MemoryReading(0, 400, 1000), 1)
    assert policy.budget_blocks == 70, "200 spare bytes are 20 blocks"
    policy.observed(ROOMY, 2)
    assert policy.budget_blocks == 70, "it grows once a step"
    policy.step_began()
    policy.observed(ROOMY, 3)
    assert policy.budget_blocks == 100


def test_without_a_block_size_a_thaw_gives_everything_back_or_nothing() -> None:
    policy = sized(settings=MemorySettings())
    policy.reclaim("drill")
    policy.applied(0)
    policy.step_began()
    policy.observed(ROOMY, 1)
    assert policy.limit_blocks == 0


def test_a_thaw_while_serving_is_short_cuts_again_and_does_not_grow() -> None:
    policy = frozen()
    policy.step_began()
    assert policy.observed(SHORT, 1) == Cut(50, 25, "headroom_entered")


def test_a_step_that_begins_during_a_cut_thaws_when_the_cut_has_landed() -> None:
    policy = sized()
    policy.reclaim("drill")
    policy.step_began()
    policy.observed(ROOMY, 1)
    assert policy.state is MemoryState.PRESSURE
    assert policy.budget_blocks == 50
    policy.applied(2)
    assert policy.state is MemoryState.NORMAL
    policy.observed(ROOMY, 3)
    assert policy.budget_blocks == 80


def test_an_engine_that_died_during_a_cut_has_given_everything_back() -> None:
    policy = sized()
    policy.reclaim("drill")
    policy.engine_gone(1)
    assert policy.state is MemoryState.FROZEN


def test_a_restart_does_not_undo_a_cut() -> None:
    policy = frozen()
    policy.sized(400)
    assert policy.limit_blocks == 50
    policy.sized(30)
    assert policy.budget_blocks == 30
    uncut = sized()
    uncut.sized(400)
    assert uncut.budget_blocks == 400


@pytest.mark.parametrize(
    "reading",
    [
        MemoryReading(Unknown("x"), Unknown("nvml_missing"), 1000),
        MemoryReading(Unknown("x"), 500, Unknown("nvml_missing")),
        MemoryReading(0, 2000, 1000),
        MemoryReading(0, -1, 1000),
        MemoryReading(0, 0, 0),
    ],
)
def test_an_unknown_or_contradictory_reading_changes_nothing(reading: MemoryReading) -> None:
    policy = frozen()
    policy.step_began()
    assert policy.observed(reading, 1) is None
    assert policy.budget_blocks == 50
    assert policy.state is MemoryState.NORMAL
    policy.observed(ROOMY, 2)
    assert policy.budget_blocks > 50, "the growth still stands out"


@pytest.mark.parametrize(
    "fields",
    [
        {"headroom_share": 1.0},
        {"headroom_share": -0.1},
        {"cut_share": 0.0},
        {"cut_share": 1.0},
        {"budget_blocks_min": 0},
        {"settle_ns": -1},
        {"fall_share": -0.1},
        {"critical_share": 1.1},
        {"block_bytes": -1},
    ],
)
def test_settings_out_of_range_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        MemorySettings(**fields)


amounts = st.integers(-10, 1200) | st.builds(Unknown, st.just("x"))
actions = st.one_of(
    st.tuples(st.just("observed"), st.builds(MemoryReading, amounts, amounts, amounts)),
    st.tuples(st.just("sized"), st.integers(-1, 200)),
    st.tuples(st.sampled_from(["reclaim", "applied", "gone", "step"]), st.none()),
)


@given(st.lists(st.tuples(actions, st.integers(0, NS_PER_S)), max_size=60))
def test_a_budget_never_grows_while_frozen(
    history: list[tuple[tuple[str, MemoryReading | int | None], int]],
) -> None:
    policy, now_ns = MemoryPolicy(SETTINGS), 0
    for (action, argument), elapsed_ns in history:
        now_ns += elapsed_ns
        before = policy.state, policy.budget_blocks
        match action:
            case "observed":
                assert isinstance(argument, MemoryReading)
                policy.observed(argument, now_ns)
            case "sized":
                assert isinstance(argument, int)
                policy.sized(argument)
            case "reclaim":
                policy.reclaim("drill")
            case "applied":
                policy.applied(now_ns)
            case "gone":
                policy.engine_gone(now_ns)
            case _:
                policy.step_began()
        check_memory(policy)
        check_memory_step(*before, policy)
        if action == "observed" and policy.budget_blocks > before[1]:
            assert isinstance(argument, MemoryReading)
            assert not isinstance(argument.spare_bytes(0.2), Unknown)


def test_a_cut_halves_what_the_engine_has_not_what_it_might_have() -> None:
    policy = sized(100)
    policy.sized(100, granted_blocks=40)
    assert policy.usable_blocks == 40
    assert policy.reclaim("drill") == Cut(40, 20, "drill")
    assert policy.budget_blocks == policy.limit_blocks == 20


def test_an_engine_that_says_more_than_its_budget_has_its_budget() -> None:
    policy = frozen(100)
    policy.sized(100, granted_blocks=100)
    assert policy.usable_blocks == policy.budget_blocks == 50
