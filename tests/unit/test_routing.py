"""Where one turn runs, rule by rule, and how long a trajectory's pin is kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rose.core.pins import Pins
from rose.core.routing import Condition, Pick, Router, Want
from rose.core.versions import VersionWindow, VersionWish
from rose.units import JobId, ReplicaId, TrajectoryId, TurnId, WeightVersion

OPP, DED = ReplicaId("opp"), ReplicaId("ded")
READY = Condition(True, WeightVersion(0), True, False, 0)


def make(cap: int = 16, **kinds: bool) -> Router:
    """A router over replicas by name, True for those on serving devices."""
    router = Router(cap, VersionWindow(0, 0))
    for name, serving in kinds.items():
        router.add(ReplicaId(name), serving, READY)
    return router


def send(router: Router, turn: str, tokens: int = 10, **want: Any) -> str | None:
    """Pick for a turn and send it; answers `replica:why`."""
    pick = router.pick(Want(tokens, **want))
    if pick is None:
        return None
    router.begin(pick.replica, TurnId(turn), tokens)
    return f"{pick.replica}:{pick.why}"


@pytest.fixture
def pair() -> Router:
    return make(opp=True, ded=False)


def test_the_replica_with_the_prefix_comes_first(pair: Router) -> None:
    for turn in range(5):
        pair.begin(DED, TurnId(f"t{turn}"), 10)
    assert pair.pick(Want(10, pin=DED)) == Pick(DED, "affinity")


def test_serving_comes_before_dedicated_while_it_is_loaded_no_more(pair: Router) -> None:
    assert [send(pair, f"t{turn}") for turn in range(4)] == [
        "opp:serving", "ded:least_loaded", "opp:serving", "ded:least_loaded",
    ]  # fmt: skip


def test_eight_trajectories_are_spread_evenly_over_one_of_each(pair: Router) -> None:
    sent = Counter(send(pair, f"t{turn}") for turn in range(8))
    assert sent == {"opp:serving": 4, "ded:least_loaded": 4}


def test_a_cut_kv_budget_sends_turns_elsewhere(pair: Router) -> None:
    pair.update(OPP, READY._replace(kv_budget_tokens=100))
    pair.update(DED, READY._replace(kv_budget_tokens=1000))
    sent = Counter(send(pair, f"t{turn}", tokens=50) for turn in range(11))
    assert sent["ded:least_loaded"] == 10


def test_the_cap_holds_for_every_rule() -> None:
    router = make(cap=2, a=True, b=False)
    sent = Counter(send(router, f"t{turn}", pin=ReplicaId("a")) for turn in range(6))
    assert sent == {"a:affinity": 2, "b:least_loaded": 2, None: 2}
    assert not router.has_room()
    router.end(ReplicaId("b"), router.turns_on(ReplicaId("b"))[0])
    assert router.has_room()
    assert router.pop_opened()


def test_a_gate_closed_for_the_moment_only_breaks_ties(pair: Router) -> None:
    pair.update(OPP, READY._replace(gate_open=False))
    assert pair.pick(Want(10, pin=OPP)) == Pick(OPP, "affinity")
    assert [send(pair, f"t{turn}") for turn in range(4)] == [
        "ded:least_loaded", "opp:serving", "ded:least_loaded", "opp:serving",
    ]  # fmt: skip


def test_a_held_gate_comes_last_but_before_the_queue() -> None:
    router = make(cap=2, opp=True, ded=False)
    router.update(OPP, READY._replace(gate_open=False, gate_held=True))
    assert [send(router, f"t{turn}", pin=OPP) for turn in range(5)] == [
        "ded:least_loaded", "ded:least_loaded", "opp:affinity", "opp:affinity", None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "closed",
    [
        READY._replace(takes_turns=False),
        READY._replace(weight_version=WeightVersion(1)),
        READY._replace(weight_version=WeightVersion(-1)),
    ],
)
def test_a_replica_that_takes_no_turns_gets_none_by_any_rule(pair: Router, closed: Condition) -> None:
    pair.update(OPP, closed)
    assert not pair.is_open(OPP)
    assert pair.pick(Want(10, pin=OPP)) == Pick(DED, "least_loaded")
    pair.update(DED, closed)
    assert pair.pick(Want(10, pin=OPP)) is None
    assert pair.pick(Want(10, avoid=OPP)) is None
    assert not pair.has_room()
    pair.update(OPP, READY)
    assert pair.pick(Want(10)) == Pick(OPP, "serving")


def test_a_rerouted_turn_goes_back_only_if_nothing_else_is_fit(pair: Router) -> None:
    for _ in range(3):
        assert pair.pick(Want(10, pin=OPP, avoid=OPP)) == Pick(DED, "least_loaded")
    pair.update(DED, READY._replace(takes_turns=False))
    assert pair.pick(Want(10, pin=OPP, avoid=OPP)) == Pick(OPP, "returned")
    assert pair.pick(Want(10, pin=OPP, avoid=OPP, avoid_strictly=True)) is None
    assert pair.pick(Want(10)) == Pick(OPP, "serving"), "the one avoided stays on offer for others"


def test_a_turn_may_ask_for_newer_weights() -> None:
    router = Router(4, VersionWindow(0, 2))
    for name, version in (("old", 0), ("new", 2)):
        router.add(ReplicaId(name), True, READY._replace(weight_version=WeightVersion(version)))
    assert router.pick(Want(10)) == Pick(ReplicaId("old"), "serving")
    asks = Want(10, pin=ReplicaId("old"), versions=VersionWish(minimum=1))
    assert router.pick(asks) == Pick(ReplicaId("new"), "serving")
    assert router.pick(Want(10, versions=VersionWish(minimum=3))) is None


def test_a_new_window_opens_and_closes_replicas(pair: Router) -> None:
    pair.update(OPP, READY._replace(weight_version=WeightVersion(1)))
    pair.pop_opened()
    pair.configure(16, VersionWindow(1, 1))
    assert (pair.is_open(OPP), pair.is_open(DED)) == (True, False)
    assert pair.pop_opened()


def test_load_is_spread_over_equals_and_counted_until_the_end() -> None:
    router = make(cap=4, **{f"r{index}": False for index in range(8)})
    for turn in range(32):
        assert send(router, f"t{turn}") is not None
        loads = [router.count_on(ReplicaId(f"r{index}")) for index in range(8)]
        assert max(loads) - min(loads) <= 1
    assert send(router, "one-too-many") is None
    for index in range(8):
        for turn_id in router.turns_on(ReplicaId(f"r{index}")):
            router.end(ReplicaId(f"r{index}"), turn_id)
    assert router.busy() == []


def test_heaps_do_not_grow_with_the_number_of_turns() -> None:
    router = make(a=True, b=False)
    for turn in range(5000):
        assert send(router, f"t{turn}") is not None
        for name in router.busy():
            if turn % 3:
                router.end(name, router.turns_on(name)[0])
        for name in router.busy():
            while router.count_on(name) > 8:
                router.end(name, router.turns_on(name)[0])
    assert sum(len(heap) for heap in router._heaps.values()) < 300


def test_a_replica_must_be_empty_when_it_leaves(pair: Router) -> None:
    send(pair, "t")
    with pytest.raises(AssertionError):
        pair.remove(OPP)
    pair.end(OPP, TurnId("t"))
    pair.remove(OPP)
    assert pair.pick(Want(10, pin=OPP, avoid=OPP)) == Pick(DED, "least_loaded")


# ---- pins -------------------------------------------------------------------------------------------

J = JobId("j")


def pins_of(pins: Pins, *trajectories: str) -> list[str | None]:
    return [pins.get(J, TrajectoryId(trajectory)) for trajectory in trajectories]


def test_pins_match_exactly() -> None:
    pins = Pins(10, 100)
    pins.put(J, TrajectoryId("session-1"), OPP, 0)
    pins.put(J, TrajectoryId("session-12"), DED, 0)
    assert pins_of(pins, "session-1", "session-12", "session-", "session-123") == [OPP, DED, None, None]
    assert pins.get(JobId("j2"), TrajectoryId("session-1")) is None


def test_the_least_recently_used_pin_goes_first() -> None:
    pins = Pins(2, 100)
    pins.put(J, TrajectoryId("a"), OPP, 0)
    pins.put(J, TrajectoryId("b"), OPP, 1)
    assert pins.put(J, TrajectoryId("a"), DED, 2) == []
    assert pins.put(J, TrajectoryId("c"), OPP, 3) == ["b"]
    assert len(pins) == 2
    assert pins_of(pins, "a", "b", "c") == [DED, None, OPP]


def test_pins_expire() -> None:
    pins = Pins(10, 100)
    assert pins.next_deadline_ns() is None
    pins.put(J, TrajectoryId("a"), OPP, 0)
    pins.put(J, TrajectoryId("b"), OPP, 10)
    pins.put(J, TrajectoryId("a"), OPP, 50)
    assert pins.next_deadline_ns() == 110
    assert pins.expire(109) == []
    assert pins.expire(110) == ["b"]
    assert pins.expire(150) == ["a"]
    assert len(pins) == 0


def test_pins_go_with_their_replica_and_their_job() -> None:
    pins = Pins(10, 100)
    pins.put(J, TrajectoryId("a"), OPP, 0)
    pins.put(J, TrajectoryId("b"), DED, 0)
    pins.put(JobId("k"), TrajectoryId("a"), DED, 0)
    assert pins.drop_replica(OPP) == ["a"]
    assert pins.drop_replica(OPP) == []
    assert pins.drop_job(JobId("k")) == ["a"]
    assert pins_of(pins, "a", "b") == [None, DED]


# ---- groups, hardware, the tail of a step --------------------------------------------


def test_a_group_stays_together_until_its_replica_is_much_more_loaded() -> None:
    router = make(a=False, b=False)
    sent = Counter(send(router, f"t{turn}", group_pin=ReplicaId("a")) for turn in range(16))
    # 3 of the cap of 16: a turn joins its group while that has no more than 3 turns more than the best.
    assert sent["a:group"] + sent.get("a:least_loaded", 0) == 10
    assert sent["b:least_loaded"] == 6


def test_many_turns_of_one_group_are_still_spread() -> None:
    """Case 23 of the public faults: 480 requests of one prefix over 8 replicas, max/mean at most 2."""
    router = make(cap=64, **{f"r{number}": False for number in range(8)})
    last: str | None = None
    sent: Counter[str] = Counter()
    for turn in range(480):
        told = send(router, f"t{turn}", group_pin=None if last is None else ReplicaId(last))
        assert told is not None
        last = told.partition(":")[0]
        sent[last] += 1
    assert max(sent.values()) <= 2 * 480 / 8


def test_a_group_does_not_wait_for_its_replica(pair: Router) -> None:
    pair.update(DED, READY._replace(takes_turns=False))
    assert pair.pick(Want(10, group_pin=DED)) == Pick(OPP, "serving")
    assert pair.pick(Want(10, group_pin=ReplicaId("gone"))) == Pick(OPP, "serving")
    assert pair.pick(Want(10, group_pin=OPP, avoid=OPP, avoid_strictly=True)) is None


def test_a_trajectory_s_own_prefix_goes_before_its_group(pair: Router) -> None:
    assert pair.pick(Want(10, pin=DED, group_pin=OPP)) == Pick(DED, "affinity")


def hardware_pair() -> Router:
    router = make(fast=False, wide=False)
    router.update(ReplicaId("fast"), READY._replace(hardware="compute"))
    router.update(ReplicaId("wide"), READY._replace(hardware="bandwidth"))
    return router


@pytest.mark.parametrize(("wanted", "first"), [("compute", "fast"), ("bandwidth", "wide")])
def test_a_task_goes_to_the_hardware_that_suits_it(wanted: str, first: str) -> None:
    router = hardware_pair()
    sent = [send(router, f"t{turn}", hardware=wanted) for turn in range(4)]
    assert sent == [f"{first}:least_loaded"] * 4


def test_hardware_affinity_does_not_leave_the_other_kind_idle() -> None:
    router = hardware_pair()
    sent = Counter(send(router, f"t{turn}", hardware="compute") for turn in range(16))
    assert sent["wide:least_loaded"] >= 4


def test_unknown_hardware_is_nobody_s_preference() -> None:
    router = make(a=False, b=False)
    router.update(ReplicaId("b"), READY._replace(hardware="bandwidth"))
    assert Counter(send(router, f"t{turn}", hardware="") for turn in range(8)) == {
        "a:least_loaded": 4, "b:least_loaded": 4,
    }  # fmt: skip


def test_in_the_tail_stragglers_leave_borrowed_replicas_for_idle_dedicated_ones(pair: Router) -> None:
    assert pair.pick(Want(10, pin=OPP)) == Pick(OPP, "affinity")
    assert send(pair, "t0", pin=OPP, tail=True) == "ded:tail"
    assert pair.pick(Want(10, pin=OPP, tail=True)) == Pick(OPP, "affinity")  # it is not idle any more
    assert pair.pick(Want(10, pin=DED, tail=True)) == Pick(DED, "affinity")


def test_open_dedicated_replicas_are_counted_through_all_changes() -> None:
    router = make(cap=1, opp=True, ded=False, more=False)
    assert router.open_dedicated == 2
    send(router, "t0", pin=DED)
    assert router.open_dedicated == 1
    router.throttle(ReplicaId("more"), 0)
    assert router.open_dedicated == 0
    router.end(DED, TurnId("t0"))
    router.throttle(ReplicaId("more"), None)
    router.remove(DED)
    router.remove(OPP)
    assert router.open_dedicated == 1


def test_a_pin_knows_how_long_its_prefix_is() -> None:
    pins = Pins(2, 100)
    job, trajectory = JobId("j"), TrajectoryId("t")
    pins.grew(job, trajectory, 10)
    assert pins.tokens(job, trajectory) == 0
    pins.put(job, trajectory, OPP, 0)
    pins.grew(job, trajectory, 10)
    pins.put(job, trajectory, OPP, 1)
    assert pins.tokens(job, trajectory) == 10
    pins.put(job, trajectory, DED, 2)
    assert pins.tokens(job, trajectory) == 0
