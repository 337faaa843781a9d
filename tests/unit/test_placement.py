"""Which replicas a job borrows, and when it gives them back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rose.core.events import JobSubmitted, ReplicaReport
from rose.core.membership import Replica
from rose.core.placement import Around, Placement, Plan
from rose.core.readings import NEVER
from rose.units import NS_PER_S, JobId, NodeId, ReplicaId, WeightVersion

S = NS_PER_S
GRACE = 30 * S
LEASE_MIN = 60 * S


class World:
    """Replicas and jobs to plan for."""

    def __init__(self) -> None:
        self.placement = Placement(GRACE, LEASE_MIN, 0.8)
        self.replicas: dict[ReplicaId, Replica] = {}
        self.jobs: dict[JobId, JobSubmitted] = {}
        self.busy: set[str] = set()
        self.sated: set[str] = set()
        """Jobs that would not gain by another borrowed replica."""

    def serving(self, name: str, kv: float | None, device: str = "", node: str = "", **changes: Any) -> None:
        self._add(
            name, node or f"node-{name}", "opportunistic", serving_kv_used_share=kv, device=device, **changes
        )

    def dedicated(self, name: str, **changes: Any) -> None:
        self._add(name, f"node-{name}", "dedicated", **changes)

    def _add(self, name: str, node: str, kind: str, **changes: Any) -> None:
        report = ReplicaReport(ReplicaId(name), kind, "ready", "http://h", "m", WeightVersion(0))
        replica = Replica(ReplicaId(name), NodeId(node), msgspec.structs.replace(report, **changes), 0, 0)
        replica.observe(replica.report, 0, 10 * S)
        self.replicas[replica.id] = replica

    def job(self, name: str, n_rl: int, n_serving_max: int, model: str = "m") -> None:
        self.jobs[JobId(name)] = JobSubmitted(JobId(name), model, n_rl, n_serving_max)

    def report(self, name: str, now_s: int = 0, **changes: Any) -> None:
        replica = self.replicas[ReplicaId(name)]
        replica.observe(msgspec.structs.replace(replica.report, **changes), now_s * S, 10 * S)

    def plan(self, now_s: int = 0) -> Plan:
        around = Around(
            self.replicas, lambda name: int(name in self.busy), lambda job: job not in self.sated, now_s * S
        )
        return self.placement.plan(self.jobs, around)

    def held(self, job: str = "j") -> list[str]:
        return [str(replica) for replica in self.placement.held_by(JobId(job))]


@pytest.fixture
def world() -> World:
    return World()


def test_the_idlest_serving_devices_are_borrowed(world: World) -> None:
    for name, kv in (("a", 0.9), ("b", 0.2), ("c", 0.5), ("d", 0.1)):
        world.serving(name, kv)
    world.job("j", 0, 2)
    world.plan()
    assert world.held() == ["d", "b"]


def test_a_device_of_unknown_use_is_not_borrowed(world: World) -> None:
    world.serving("a", None)
    world.job("j", 0, 1)
    assert not world.plan().granted
    world.report("a", serving_kv_used_share=0.79)
    world.plan()
    assert world.held() == ["a"]
    # A lease that works does not end because a reading went missing; the gate guards serving.
    world.report("a", serving_kv_used_share=None)
    assert world.plan() == Plan()


def test_a_job_gets_what_it_asks_of_each_kind(world: World) -> None:
    for name in ("d1", "d2", "d3"):
        world.dedicated(name)
    for name in ("o1", "o2", "o3"):
        world.serving(name, 0.5)
    world.job("j", 2, 1)
    world.plan()
    assert world.held() == ["d1", "d2", "o1"]


def test_only_fit_replicas_of_the_right_model_are_leased(world: World) -> None:
    world.dedicated("other", model="m2")
    world.dedicated("starting", state="starting")
    world.report("starting")
    world.dedicated("drained")
    world.replicas[ReplicaId("drained")].drained = True
    world.dedicated("silent")
    world.replicas[ReplicaId("silent")].node_alive = False
    world.dedicated("odd")
    world.replicas[ReplicaId("odd")].report = msgspec.structs.replace(
        world.replicas[ReplicaId("odd")].report, kind="?"
    )
    world.job("j", 9, 9)
    assert not world.plan().granted


def test_a_serving_device_is_lent_once(world: World) -> None:
    world.serving("a1", 0.1, device="gpu0", node="n")
    world.serving("a2", 0.1, device="gpu0", node="n")
    world.serving("b1", 0.2, device="gpu0", node="elsewhere")  # ids are unique on a host only
    world.serving("b2", 0.2, device="gpu00", node="n")
    world.job("j", 0, 2)
    world.job("k", 0, 4)
    world.plan()
    assert world.held("j") == ["a1", "b1"]
    assert world.held("k") == ["b2"]
    world.placement.release(ReplicaId("a1"))
    world.jobs.pop(JobId("j"))
    world.plan()
    assert world.held("k") == ["b2", "a1"]


def test_replicas_that_name_no_device_have_one_each(world: World) -> None:
    world.serving("a", 0.1, node="n")
    world.serving("b", 0.1, node="n")
    world.job("j", 0, 2)
    world.plan()
    assert world.held() == ["a", "b"]


def test_leases_are_sticky_and_ids_are_never_used_twice(world: World) -> None:
    world.serving("a", 0.1)
    world.serving("b", 0.5)
    world.job("j", 0, 1)
    (first,) = world.plan().granted
    world.report("a", 60, serving_kv_used_share=0.9)
    assert world.plan(60) == Plan()
    world.placement.release(first.replica)
    (second,) = world.plan().granted
    assert second.replica == "b"
    assert second.lease > first.lease


def test_jobs_are_served_in_order_of_submission(world: World) -> None:
    world.dedicated("a")
    world.job("j", 1, 0)
    world.job("k", 1, 0)
    world.plan()
    assert (world.held("j"), world.held("k")) == (["a"], [])


def test_a_shrinking_job_gives_back_the_unfit_and_the_busiest(world: World) -> None:
    for name, kv in (("a", 0.1), ("b", 0.7), ("c", 0.3)):
        world.serving(name, kv)
    world.job("j", 0, 3)
    world.plan()
    world.report("a", state="stopped")
    world.job("j", 0, 2)
    assert [(lease.replica, why) for lease, why in world.plan().revoked] == [("a", "job_shrank")]
    world.job("j", 0, 1)
    assert [(lease.replica, why) for lease, why in world.plan().revoked] == [("b", "job_shrank")]
    world.job("j", 0, 1, model="m2")
    assert [(lease.replica, why) for lease, why in world.plan().revoked] == [("c", "model_changed")]


def test_an_unfit_replica_gives_way_after_a_grace_and_only_when_it_runs_nothing(world: World) -> None:
    world.dedicated("a")
    world.job("j", 1, 0)
    world.plan()
    world.report("a", now_s=10, state="failed")
    world.dedicated("b")
    world.busy = {"a"}
    assert world.plan(now_s=10) == Plan()
    assert world.placement.next_deadline_ns() == 10 * S + GRACE
    assert world.plan(now_s=40) == Plan()
    assert 40 * S < world.placement.next_deadline_ns() < NEVER
    world.busy = set()
    plan = world.plan(now_s=50)
    assert [(lease.replica, why) for lease, why in plan.revoked] == [("a", "replaced")]
    assert [lease.replica for lease in plan.granted] == ["b"]
    world.plan(now_s=50)
    assert world.placement.next_deadline_ns() == NEVER


def test_an_unfit_replica_keeps_its_lease_while_nothing_can_replace_it(world: World) -> None:
    world.dedicated("a")
    world.job("j", 1, 0)
    world.plan()
    world.report("a", state="failed")
    assert world.plan(now_s=100) == Plan()
    world.report("a", now_s=101, state="ready")
    assert world.plan(now_s=101) == Plan()
    assert world.placement.next_deadline_ns() == NEVER


# ---- hysteresis ------------------------------------------------------------------------------------------


def test_a_busy_device_is_not_borrowed_but_a_lent_one_is_kept(world: World) -> None:
    world.serving("a", 0.1)
    world.serving("b", 0.85)
    world.job("j", 0, 2)
    world.plan()
    assert world.held() == ["a"]
    world.report("a", 600, serving_kv_used_share=0.95)
    assert world.plan(600) == Plan()
    assert world.held() == ["a"]


def test_recent_use_counts_and_not_the_moment(world: World) -> None:
    """One idle heartbeat of a busy device, or one busy one of an idle device, says little."""
    for name, kv in (("busy", 0.79), ("idle", 0.1)):
        world.serving(name, kv)
    world.report("busy", 1, serving_kv_used_share=0.0)
    world.report("idle", 1, serving_kv_used_share=0.7)
    world.job("j", 0, 1)
    world.plan(1)
    assert world.held() == ["idle"]


def test_unknown_use_ends_what_was_known(world: World) -> None:
    world.serving("a", 0.1)
    world.report("a", 1, serving_kv_used_share=None)
    world.job("j", 0, 1)
    assert not world.plan(1).granted


# ---- fairness and the switch-cost gate ------------------------------------------------------------------


def shared_out(world: World, borrowed: int) -> None:
    for number in range(borrowed):
        world.serving(f"s{number}", 0.1)
    world.job("first", 0, borrowed)
    world.plan()
    assert len(world.held("first")) == borrowed


def test_a_second_job_gets_its_share_once_the_least_lend_time_is_over(world: World) -> None:
    shared_out(world, 4)
    world.job("second", 0, 4)
    assert world.plan(10) == Plan()
    assert world.placement.next_deadline_ns() == LEASE_MIN
    world.busy = {"s0", "s1"}
    plan = world.plan(60)
    assert {(lease.replica, reason) for lease, reason in plan.revoked} == {
        ("s2", "fair_share"),
        ("s3", "fair_share"),
    }
    assert world.held("second") == ["s2", "s3"]
    assert world.plan(600) == Plan()


def test_a_job_that_wants_less_leaves_the_rest(world: World) -> None:
    shared_out(world, 4)
    world.job("second", 0, 1)
    world.plan(60)
    assert (len(world.held("first")), len(world.held("second"))) == (3, 1)


def test_free_replicas_go_before_those_of_others(world: World) -> None:
    shared_out(world, 2)
    world.serving("s9", 0.5)
    world.serving("s8", 0.5)
    world.job("second", 0, 2)
    assert not world.plan(600).revoked
    assert sorted(world.held("second")) == ["s8", "s9"]


def test_jobs_of_other_models_are_no_rivals(world: World) -> None:
    shared_out(world, 2)
    world.job("second", 0, 2, model="other")
    assert world.plan(600) == Plan()


def test_dedicated_replicas_are_shared_too(world: World) -> None:
    for number in range(4):
        world.dedicated(f"d{number}")
    world.job("first", 4, 0)
    world.plan()
    world.job("second", 4, 0)
    world.plan(60)
    assert (len(world.held("first")), len(world.held("second"))) == (2, 2)


def test_nothing_is_taken_for_a_job_that_would_not_gain(world: World) -> None:
    shared_out(world, 4)
    world.job("second", 0, 4)
    world.sated = {"second"}
    assert world.plan(600) == Plan()
    world.sated = set()
    assert len(world.plan(600).granted) == 2


def test_nothing_is_borrowed_that_does_not_pay(world: World) -> None:
    world.serving("s0", 0.1)
    world.dedicated("d0")
    world.job("j", 1, 1)
    world.sated = {"j"}
    world.plan()
    assert world.held() == ["d0"]


def test_two_replicas_on_one_device_are_one_in_the_supply(world: World) -> None:
    for name in ("s0", "s1"):
        world.serving(name, 0.1, device="gpu-0", node="n")
    world.job("first", 0, 2)
    world.job("second", 0, 2)
    world.plan()
    world.plan(600)
    assert (len(world.held("first")), len(world.held("second"))) == (1, 0)
