"""What the lender's decisions and drills do to a node's lent replicas."""

from __future__ import annotations

import pytest
from test_node import DED, OPP, SLACK, Bench, up

from rose.core.effects import PublishGate, Say, TakeBackMeasured
from rose.core.events import (
    ActivityRequested,
    DrillRequested,
    EngineExited,
    GateOverridden,
    LendingDecided,
    MemoryObserved,
    ReclaimRequested,
    ServingObserved,
    Tick,
)
from rose.core.node import ReplicaState
from rose.core.readings import GateMode, GateReason, LimitStatus
from rose.core.terms import DRILL_NS_MAX
from rose.units import NS_PER_S

ROOMY = MemoryObserved(300, 500, 1000)
LENDS = LendingDecided(None, "lends")


def lending(**changes: object) -> Bench:
    bench = up(**changes)
    bench(ROOMY, bench.board(), LENDS, Tick())
    bench(bench.board())
    assert bench.machine.replicas[OPP].gate_mode is not GateMode.CLOSED
    return bench


@pytest.mark.parametrize(
    "reason", [GateReason.LENDING_OFF, GateReason.ERROR_BUDGET_SPENT, GateReason.OUTSIDE_HOURS]
)
def test_a_stop_closes_the_gate_at_once_and_gives_the_memory_back(reason: GateReason) -> None:
    bench = lending()
    bench(LendingDecided(reason, "why"))
    policy = bench.policy(OPP)
    assert (policy.mode, policy.closed_reason, policy.kv_budget_blocks) == (GateMode.CLOSED, reason, 1)
    assert [effect.replica for effect in bench.all(PublishGate)] == [OPP], "the dedicated one goes on"
    assert reason.name.lower() in bench.said()
    bench(bench.board(), Tick())
    assert bench.replica(OPP).state == ReplicaState.INACTIVE
    assert bench.replica(DED).state == ReplicaState.READY
    assert bench.view.healthy

    bench(LENDS)
    assert bench.policy(OPP).mode == GateMode.STRICT
    assert "lending" in bench.said()
    bench(bench.board(), Tick())
    assert bench.replica(OPP).state == ReplicaState.READY


def test_it_goes_before_what_the_operator_forced() -> None:
    bench = lending()
    bench(GateOverridden(OPP, GateMode.OPEN))
    bench(LendingDecided(GateReason.LENDING_OFF, "why"))
    assert bench.policy(OPP).mode == GateMode.CLOSED
    bench(GateOverridden(OPP, GateMode.OPEN), Tick())
    assert bench.machine.replicas[OPP].gate_mode is GateMode.CLOSED
    bench(LENDS)
    assert bench.policy(OPP).mode == GateMode.OPEN


def test_it_does_not_undo_what_the_operator_switched_off() -> None:
    bench = lending()
    bench(ActivityRequested(OPP, active=False), bench.board())
    bench(LendingDecided(GateReason.OUTSIDE_HOURS, "why"), LENDS, bench.board(), Tick())
    assert bench.machine.replicas[OPP].gate_mode is GateMode.CLOSED


def test_a_window_without_rollout_leaves_turns_and_memory_where_they_are() -> None:
    bench = lending()
    bench(LendingDecided(GateReason.ROLLOUT_OFF_WINDOW, "why"))
    policy = bench.policy(OPP)
    assert (policy.mode, policy.closed_reason) == (GateMode.CLOSED, GateReason.ROLLOUT_OFF_WINDOW)
    assert policy.kv_budget_blocks == 0
    assert bench.said() == [], "twice an hour is no news"
    assert bench.replica(OPP).state == ReplicaState.READY


def test_a_reason_of_a_later_release_stops_lending_too() -> None:
    bench = lending()
    bench(LendingDecided(99, "why"))
    assert bench.policy(OPP).closed_reason == GateReason.LENDING_OFF


def test_a_drill_takes_blocks_waits_for_their_memory_and_gives_them_back() -> None:
    bench = lending()
    bench(DrillRequested(OPP, 5))
    assert bench.policy(OPP).kv_budget_blocks == 95
    bench(bench.board(limit_status=LimitStatus.DEFERRED, kv_budget_blocks=95))
    assert not bench.all(TakeBackMeasured), "the memory is not back yet"
    bench(bench.board(kv_budget_blocks=95))
    (measured,) = bench.all(TakeBackMeasured)
    assert (measured.replica, measured.blocks, measured.duration_ns) == (OPP, 5, 2 * NS_PER_S)
    assert bench.policy(OPP).kv_budget_blocks == 0
    assert bench.machine.replicas[OPP].memory is not None
    assert bench.machine.replicas[OPP].memory.cuts == 0


def test_an_answer_to_an_older_policy_ends_no_drill() -> None:
    bench = lending()
    bench(DrillRequested(OPP, 5))
    bench(bench.board(policy_revision=bench.machine.replicas[OPP].revision - 1))
    assert not bench.all(TakeBackMeasured)


def test_a_drill_that_brings_nothing_back_counts_as_that_long() -> None:
    bench = lending()
    bench(DrillRequested(OPP, 5))
    begun_ns = bench.now_ns
    while bench.now_ns < begun_ns + DRILL_NS_MAX:
        assert not bench.all(TakeBackMeasured)
        bench(ROOMY, bench.board(limit_status=LimitStatus.DEFERRED))
    (measured,) = bench.all(TakeBackMeasured)
    assert measured.duration_ns == DRILL_NS_MAX
    assert "take_back_failed" in bench.said()
    assert bench.policy(OPP).kv_budget_blocks == 0


def test_an_engine_that_ends_in_a_drill_ends_it() -> None:
    bench = lending()
    bench(DrillRequested(OPP, 5), EngineExited(OPP, 1, "boom"))
    assert bench.machine.replicas[OPP].terms.drill is None
    assert not bench.all(TakeBackMeasured)


def test_no_drill_while_something_else_is_under_way() -> None:
    bench = lending()
    bench(ReclaimRequested(OPP, "operator"))
    bench(DrillRequested(OPP, 5))
    assert not bench.all(PublishGate), "a cut is in flight"
    bench(bench.board(kv_budget_blocks=50))
    bench(DrillRequested(OPP, 5), DrillRequested(OPP, 7), DrillRequested(DED, 5))
    assert bench.policy(OPP).kv_budget_blocks == 45, "of what it has, and one at a time"
    off = lending()
    off(LendingDecided(GateReason.LENDING_OFF, "why"), off.board())
    off(DrillRequested(OPP, 5))
    assert not off.all(PublishGate)


def test_a_cap_on_what_is_lent() -> None:
    bench = lending(kv_share_max=0.3)
    assert bench.machine.replicas[OPP].published is not None
    assert bench.machine.replicas[OPP].published.kv_budget_blocks == 30


def test_a_reserve_beyond_the_headroom_is_kept_free() -> None:
    bench = lending()
    bench(MemoryObserved(300, 250, 1000))
    assert "kv_budget_cut" not in bench.said(), "the headroom is 200"
    bench(LendingDecided(None, "lends", reserve_bytes=260), MemoryObserved(300, 250, 1000))
    assert "kv_budget_cut" in bench.said()


def test_it_says_what_it_decided_once() -> None:
    bench, said = lending(), []
    for _ in range(3):
        bench(LendingDecided(GateReason.ERROR_BUDGET_SPENT, "why"), ServingObserved(SLACK, True))
        said += [effect.code for effect in bench.all(Say)]
    assert said.count("error_budget_spent") == 1
