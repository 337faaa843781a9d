"""Inactive replicas: the engine lives, its memory is given back, and one change at a time on a device."""

from __future__ import annotations

import pytest

from rose.core.dormancy import CHANGE_NS_MAX
from rose.core.effects import NodeEffect, PublishGate, Say, StartEngine
from rose.core.events import (
    ActivityRequested,
    EngineExited,
    EngineReady,
    LeaseChanged,
    MemoryObserved,
    NodeEvent,
    ReclaimRequested,
    ReplicaObserved,
    StepBegan,
    Tick,
)
from rose.core.lifecycle import ReplicaState
from rose.core.node import NodeMachine, NodeSettings
from rose.core.nodeview import ReplicaSettings, ReplicaView
from rose.core.readings import GateMode, GatePolicy, GateReason, LimitStatus, ReplicaReading
from rose.units import NS_PER_MS, JobId, NodeId, ReplicaId, WeightVersion

ONE, TWO, DED = ReplicaId("one"), ReplicaId("two"), ReplicaId("ded")
ZEROS = ReplicaReading(*[0] * len(ReplicaReading._fields))


class Host:
    """A machine whose engines obey when told to."""

    def __init__(self, *, follows_leases: bool = False, two: str = "cpu-0", block_bytes: int = 0) -> None:
        common = {
            "url": "",
            "model": "m",
            "block_tokens": 32,
            "context_tokens_max": 2048,
            "block_bytes": block_bytes,
        }
        lent = {"kind": "opportunistic", "follows_leases": follows_leases, **common}
        replicas = (
            ReplicaSettings(replica=ONE, device="cpu-0", **lent),  # type: ignore[arg-type]
            ReplicaSettings(replica=TWO, device=two, **lent),  # type: ignore[arg-type]
            ReplicaSettings(replica=DED, kind="dedicated", **common),  # type: ignore[arg-type]
        )
        self.machine = NodeMachine(
            NodeSettings(
                node=NodeId("n"), job=JobId("j"), replicas=replicas, ttft_slo_ns=10**8, tpot_slo_ns=10**7
            )
        )
        self.now_ns = 0
        self.policies: dict[ReplicaId, GatePolicy] = {}
        self.started: list[ReplicaId] = []

    def __call__(self, *events: NodeEvent, ms: float = 1) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        for event in events:
            self.now_ns += int(ms * NS_PER_MS)
            effects += self.machine.step(event, self.now_ns)
        for effect in effects:
            if isinstance(effect, PublishGate):
                self.policies[effect.replica] = effect.policy
            if isinstance(effect, StartEngine):
                self.started.append(effect.replica)
        return effects

    def run(self, *replicas: ReplicaId) -> None:
        """Engines up, and obeying."""
        self(MemoryObserved(100, 800, 1000), Tick())
        for replica in replicas:
            self(EngineReady(replica, WeightVersion(0)))
        for replica in replicas:
            self.obey(replica)

    def obey(self, replica: ReplicaId, **more: int) -> None:
        policy = self.policies[replica]
        budget = policy.kv_budget_blocks or 100
        reading = ZEROS._replace(
            policy_revision=policy.revision,
            limit_status=LimitStatus.APPLIED,
            kv_total_blocks=100,
            kv_budget_blocks=budget,
            **more,
        )
        self(ReplicaObserved(replica, reading))

    def view(self, replica: ReplicaId) -> ReplicaView:
        return next(view for view in self.machine.view().replicas if view.id == replica)


def test_by_default_a_replica_is_active_whoever_holds_leases() -> None:
    host = Host()
    host.run(ONE, TWO, DED)
    host(LeaseChanged(ONE, False))
    assert host.view(ONE).state == ReplicaState.READY
    assert host.policies[ONE].kv_budget_blocks == 0


def test_switched_off_it_gives_its_memory_back_and_keeps_its_engine() -> None:
    host = Host()
    host.run(ONE, TWO, DED)
    host(ActivityRequested(ONE, active=False))
    policy = host.policies[ONE]
    assert (policy.mode, policy.closed_reason) == (GateMode.CLOSED, GateReason.INACTIVE)
    assert policy.kv_budget_blocks == 1
    assert host.view(ONE).state == ReplicaState.DRAINING
    host.obey(ONE, kv_resident_bytes=4096)
    view = host.view(ONE)
    assert (view.active, view.kv_resident_bytes) == (False, 4096)
    assert host.started.count(ONE) == 1
    assert host.view(TWO).state == ReplicaState.READY


def test_an_activation_is_over_when_the_engine_obeys() -> None:
    host = Host()
    host.run(ONE, TWO, DED)
    host(ActivityRequested(ONE, active=False))
    host.obey(ONE)
    host(ActivityRequested(ONE, active=True))
    assert host.policies[ONE].kv_budget_blocks == 0
    assert host.view(ONE).state == ReplicaState.INACTIVE
    host(Tick(), ms=200)
    host.obey(ONE)
    view = host.view(ONE)
    assert (view.state, view.active, view.activation_ms) == (ReplicaState.READY, True, 201.0)


def test_without_a_lease_it_is_inactive_from_the_start_where_policy_says_so() -> None:
    host = Host(follows_leases=True)
    host.run(ONE, TWO, DED)
    assert host.view(ONE).state == host.view(TWO).state == ReplicaState.INACTIVE
    assert host.machine.view().healthy
    host(LeaseChanged(ONE, True))
    host.obey(ONE)
    assert host.view(ONE).state == ReplicaState.READY
    assert host.view(TWO).state == ReplicaState.INACTIVE
    host(LeaseChanged(ONE, False))
    assert host.view(ONE).state == ReplicaState.INACTIVE
    assert host.policies[ONE].closed_reason == GateReason.INACTIVE


def test_engines_of_one_device_start_one_at_a_time() -> None:
    host = Host()
    host(MemoryObserved(100, 800, 1000), Tick(), Tick())
    assert host.started == [ONE, DED]
    host(EngineReady(ONE, WeightVersion(0)))
    assert host.started == [ONE, DED, TWO]


def test_an_engine_that_dies_while_it_starts_lets_the_next_one_start() -> None:
    host = Host()
    host(MemoryObserved(100, 800, 1000), Tick(), EngineExited(ONE, 1, "crashed"))
    assert host.started == [ONE, DED, TWO]


def test_engines_of_two_devices_do_not_wait_for_each_other() -> None:
    host = Host(two="cpu-1")
    host(MemoryObserved(100, 800, 1000), Tick())
    assert host.started == [ONE, TWO, DED]


def test_changes_on_one_device_are_made_one_after_the_other() -> None:
    host = Host(follows_leases=True)
    host.run(ONE, TWO, DED)
    host(LeaseChanged(ONE, True), LeaseChanged(TWO, True))
    assert host.policies[ONE].kv_budget_blocks == 0
    assert host.policies[TWO].kv_budget_blocks == 1
    host.obey(ONE)
    assert host.policies[TWO].kv_budget_blocks == 0


def test_a_change_that_is_never_confirmed_does_not_hold_up_others_for_ever() -> None:
    host = Host(follows_leases=True)
    host.run(ONE, TWO, DED)
    host(LeaseChanged(ONE, True), LeaseChanged(TWO, True))
    host(MemoryObserved(100, 800, 1000), ms=CHANGE_NS_MAX / NS_PER_MS + 1)
    assert host.policies[TWO].kv_budget_blocks == 0


def test_an_engine_that_dies_in_a_change_ends_it() -> None:
    host = Host(follows_leases=True)
    host.run(ONE, TWO, DED)
    host(LeaseChanged(ONE, True), LeaseChanged(TWO, True), EngineExited(ONE, 1, "crashed"))
    assert host.policies[TWO].kv_budget_blocks == 0


def test_an_emergency_cut_does_not_wait_for_a_change() -> None:
    host = Host()
    host.run(ONE, TWO, DED)
    host(ActivityRequested(ONE, active=False), ReclaimRequested(TWO, "drill"))
    assert host.policies[TWO].kv_budget_blocks == 50


def cut_and_thawed(**more: int) -> Host:
    """Two replicas whose budgets were halved, and are to grow again."""
    host = Host(**more)
    host.run(ONE, TWO, DED)
    host(ReclaimRequested(ONE, "drill"), ReclaimRequested(TWO, "drill"))
    host.obey(ONE)
    host.obey(TWO)
    host(StepBegan(JobId("j"), 1, WeightVersion(0)))
    return host


def budgets(host: Host) -> list[int]:
    return [host.policies[each].kv_budget_blocks or 100 for each in (ONE, TWO)]


@pytest.mark.parametrize(
    ("spare_bytes", "grown"), [(800, (100, 80)), (600, (100, 60)), (500, (100, 50)), (300, (80, 50))]
)
def test_budgets_that_grow_at_once_share_what_is_spare(spare_bytes: int, grown: tuple[int, int]) -> None:
    """One reading says what is free for all of them together, not for each."""
    host = cut_and_thawed(block_bytes=10)
    host(MemoryObserved(0, 200 + spare_bytes, 1000))
    assert tuple(budgets(host)) == grown


def test_a_budget_grows_after_a_change_on_its_device_and_not_meanwhile() -> None:
    host = cut_and_thawed()
    host(EngineExited(ONE, -9, "killed"))
    host(Tick(), ms=60_000)
    assert host.view(ONE).state == ReplicaState.STARTING
    host(MemoryObserved(100, 800, 1000))
    assert budgets(host)[1] == 50, "the engine that starts has not taken its memory yet"
    host(EngineReady(ONE, WeightVersion(0)), MemoryObserved(100, 800, 1000))
    assert budgets(host)[1] == 100


def test_an_inactive_replica_has_nothing_to_reclaim() -> None:
    host = Host()
    host.run(ONE, TWO, DED)
    host(ActivityRequested(ONE, active=False))
    effects = host(ReclaimRequested(ONE, "drill"))
    assert [each.code for each in effects if isinstance(each, Say)] == ["reclaim_ignored"]


@pytest.mark.parametrize("active", [True, False])
def test_a_dedicated_replica_stays_active(active: bool) -> None:
    host = Host()
    host.run(ONE, TWO, DED)
    effects = host(ActivityRequested(DED, active=active))
    assert [each.code for each in effects if isinstance(each, Say)] == ["activity_ignored"]
    assert host.view(DED).state == ReplicaState.READY
