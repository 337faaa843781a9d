"""The scheduler's machine: from events to effects."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import pytest

from rose.core import events as ev
from rose.core.cluster import ClusterMachine, ClusterSettings
from rose.core.effects import (
    ClusterEffect,
    DispatchTurn,
    FailTurn,
    ForgetTrajectory,
    GrantLease,
    RevokeLease,
    Say,
    StopTurn,
    TellStep,
)
from rose.core.turns import TurnCounts
from rose.units import NS_PER_MS, NS_PER_S, JobId, NodeId, ReplicaId, TrajectoryId, TurnId, WeightVersion

S = NS_PER_S
J = JobId("j")
T = TypeVar("T")


class Scheduler:
    """A machine with one node of one borrowed and one dedicated replica; `now` moves by hand."""

    def __init__(self, **settings: Any) -> None:
        self.machine = ClusterMachine(ClusterSettings(**settings))
        self.now = 0
        self.sequence = 0
        self.reports = {
            name: _report(name, kind) for name, kind in (("opp", "opportunistic"), ("ded", "dedicated"))
        }

    def do(self, event: ev.ClusterEvent) -> list[ClusterEffect]:
        return self.machine.step(event, self.now)

    def register(self, session: str = "s1") -> list[ClusterEffect]:
        self.sequence = 0
        return self.do(ev.NodeRegistered(NodeId("n"), session, tuple(self.reports.values())))

    def beat(self, **changes: Any) -> list[ClusterEffect]:
        """A heartbeat, with changes to reports by name: `beat(opp={"updating": True})`."""
        for name, change in changes.items():
            self.reports[name] = msgspec.structs.replace(self.reports[name], **change)
        self.sequence += 1
        return self.do(ev.NodeHeartbeat(NodeId("n"), "s1", self.sequence, tuple(self.reports.values())))

    def submit(self, n_rl: int = 1, n_serving_max: int = 1, **terms: int) -> list[ClusterEffect]:
        return self.do(ev.JobSubmitted(J, "m", n_rl, n_serving_max, **terms))

    def turn(self, name: str, trajectory: str = "", **more: Any) -> list[ClusterEffect]:
        return self.do(
            ev.TurnArrived(TurnId(name), J, TrajectoryId(trajectory or f"of-{name}"), 100, 20, **more)
        )

    def interrupt(self, name: str, replica: str, tokens: int = 0, attempt: int = 0) -> list[ClusterEffect]:
        return self.do(ev.TurnInterrupted(TurnId(name), ReplicaId(replica), "cut", tokens, attempt))

    def finish(self, name: str, replica: str, tokens: int = 5, attempt: int = 0) -> list[ClusterEffect]:
        return self.do(ev.TurnFinished(TurnId(name), ReplicaId(replica), tokens, attempt))

    def step(self, rl_step: int, version: int) -> list[ClusterEffect]:
        return self.do(ev.JobStepBegan(J, rl_step, WeightVersion(version)))

    def tick(self, now: int) -> list[ClusterEffect]:
        self.now = now
        return self.do(ev.Tick())

    def live(self, until_s: float) -> list[ClusterEffect]:
        """Let time pass, with a heartbeat and a tick each second."""
        effects = []
        while self.now < until_s * S:
            self.now += S
            effects += self.beat() + self.do(ev.Tick())
        return effects

    @property
    def counts(self) -> TurnCounts:
        return self.machine.counts()


def _report(name: str, kind: str) -> ev.ReplicaReport:
    return ev.ReplicaReport(
        ReplicaId(name), kind, "ready", f"http://h/{name}", "m", WeightVersion(0),
        gate_open=True, serving_kv_used_share=0.1 if kind == "opportunistic" else None,
    )  # fmt: skip


def sent(effects: list[ClusterEffect]) -> list[tuple[str, str, int, str]]:
    return [(e.turn, e.replica, e.attempt, e.why) for e in effects if isinstance(e, DispatchTurn)]


def stopped(effects: list[ClusterEffect]) -> list[tuple[str, str, str]]:
    return [(e.turn, e.replica, e.reason) for e in effects if isinstance(e, StopTurn)]


def failed(effects: list[ClusterEffect]) -> list[tuple[str, int, str]]:
    return [(e.turn, e.status, e.code) for e in effects if isinstance(e, FailTurn)]


def of(effects: list[ClusterEffect], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


@pytest.fixture
def cluster() -> Scheduler:
    made = Scheduler()
    made.register()
    made.submit()
    return made


# ---- leases and steps -------------------------------------------------------------------------------


def test_leases_are_granted_in_whatever_order_node_and_job_come() -> None:
    node_first, job_first = Scheduler(), Scheduler()
    node_first.register()
    job_first.submit()
    grants = of(node_first.submit(), GrantLease)
    assert grants == of(job_first.register(), GrantLease)
    assert [(grant.replica, grant.job) for grant in grants] == [("ded", "j"), ("opp", "j")]


def test_nodes_are_told_of_a_step_once_and_those_that_join_later_too(cluster: Scheduler) -> None:
    assert of(cluster.step(1, 0), TellStep) == [TellStep(NodeId("n"), J, 1, WeightVersion(0))]
    assert cluster.step(1, 0) == []
    late = ev.NodeRegistered(NodeId("late"), "s", (_report("more", "dedicated"),))
    assert of(cluster.do(late), TellStep) == []
    assert of(cluster.submit(n_rl=2), TellStep) == [TellStep(NodeId("late"), J, 1, WeightVersion(0))]
    assert of(cluster.register("s2"), TellStep) == [TellStep(NodeId("n"), J, 1, WeightVersion(0))]


def test_a_node_that_registers_again_in_its_session_keeps_turns_and_leases(cluster: Scheduler) -> None:
    """It was cut off for a while, which is no reason to move anything."""
    cluster.step(1, 0)
    cluster.turn("a")
    cluster.beat()
    leases = cluster.machine.leases(NodeId("n"))
    assert [(lease.replica, lease.job) for lease in leases] == [("opp", "j"), ("ded", "j")]
    assert cluster.do(ev.NodeRegistered(NodeId("n"), "s1", tuple(cluster.reports.values()))) == []
    assert cluster.machine.leases(NodeId("n")) == leases
    assert cluster.machine.leases(NodeId("other")) == []


def test_a_late_registration_of_a_replaced_session_is_told_nothing(cluster: Scheduler) -> None:
    cluster.step(1, 0)
    cluster.register("s2")
    assert cluster.register("s1") == []


def test_the_end_of_a_job_fails_its_turns_and_revokes_its_leases() -> None:
    cluster = Scheduler()
    cluster.register()
    cluster.submit(trajectories_per_replica_max=1)
    for name in ("a", "b", "c"):
        cluster.turn(name)
    effects = cluster.do(ev.JobEnded(J))
    assert stopped(effects) == [("a", "opp", "job_ended"), ("b", "ded", "job_ended")]
    assert failed(effects) == [(name, 410, "job_ended") for name in "abc"]
    assert [(e.replica, e.reason) for e in of(effects, RevokeLease)] == [
        ("ded", "job_ended"),
        ("opp", "job_ended"),
    ]
    assert [e.trajectory for e in of(effects, ForgetTrajectory)] == ["of-a", "of-b"]
    assert cluster.machine.job_view(J) is None
    assert cluster.counts == TurnCounts(arrived=3, failed=3)
    assert failed(cluster.turn("d")) == [("d", 404, "job_unknown")]


@pytest.mark.parametrize(
    "terms",
    [{"n_rl": -1}, {"n_serving_max": -1}, {"staleness_max": -1}, {"trajectories_per_replica_max": 0}],
)
def test_a_job_with_terms_that_make_no_sense_is_not_taken(terms: dict[str, int]) -> None:
    cluster = Scheduler()
    assert [say.code for say in of(cluster.submit(**terms), Say)] == ["job_invalid"]
    assert cluster.machine.jobs() == []


@pytest.mark.parametrize(
    "event",
    [
        ev.JobEnded(J),
        ev.JobStepBegan(J, 1, WeightVersion(1)),
        ev.JobStepEnded(J, 1),
        ev.VersionPublished(J, WeightVersion(1)),
    ],
)
def test_events_of_unknown_jobs_are_reported(event: ev.ClusterEvent) -> None:
    assert [say.code for say in of(Scheduler().do(event), Say)] == ["job_unknown"]


# ---- turns ------------------------------------------------------------------------------------------


def test_turns_of_a_trajectory_stay_where_their_prefix_is(cluster: Scheduler) -> None:
    assert sent(cluster.turn("a1", "a")) == [("a1", "opp", 1, "serving")]
    assert sent(cluster.turn("b1", "b")) == [("b1", "ded", 1, "least_loaded")]
    cluster.finish("b1", "ded")
    assert sent(cluster.turn("b2", "b")) == [("b2", "ded", 1, "affinity")]
    cluster.finish("a1", "opp")
    assert sent(cluster.turn("a2", "a")) == [("a2", "opp", 1, "affinity")]


def test_an_arrival_with_the_id_of_a_live_turn_is_ignored(cluster: Scheduler) -> None:
    cluster.turn("a")
    assert cluster.turn("a") == []
    assert cluster.counts == TurnCounts(arrived=1, in_flight=1)


def test_an_interrupted_turn_runs_on_the_other_replica(cluster: Scheduler) -> None:
    cluster.turn("a")
    assert sent(cluster.interrupt("a", "opp", tokens=7)) == [("a", "ded", 2, "rerouted:least_loaded")]
    assert sent(cluster.interrupt("a", "ded", tokens=7)) == [("a", "opp", 3, "rerouted:serving")]
    cluster.finish("a", "opp")
    assert cluster.counts == TurnCounts(arrived=1, finished=1, interrupted=2, rerouted=2)


def test_late_messages_of_an_earlier_attempt_change_nothing(cluster: Scheduler) -> None:
    cluster.turn("a")
    cluster.interrupt("a", "opp", tokens=1, attempt=1)
    cluster.interrupt("a", "ded", tokens=1, attempt=2)
    before = cluster.counts
    assert cluster.interrupt("a", "opp", attempt=1) == []
    assert cluster.finish("a", "opp", attempt=1) == []
    assert cluster.finish("a", "ded") == []
    assert cluster.do(ev.TurnRefused(TurnId("a"), ReplicaId("opp"), "bad", 1)) == []
    assert cluster.counts == before
    cluster.finish("a", "opp", attempt=3)
    assert cluster.counts.finished == 1


def test_the_only_replica_gets_a_turn_back_after_a_growing_pause() -> None:
    cluster = Scheduler(attempts_max=4)
    cluster.register()
    cluster.submit(n_rl=0)
    cluster.turn("a")
    pauses = []
    for attempt in (2, 3, 4):
        assert sent(cluster.interrupt("a", "opp")) == []
        pauses.append(cluster.machine.next_deadline_ns() - cluster.now)
        assert sent(cluster.tick(cluster.now + pauses[-1] - 1)) == []
        assert sent(cluster.tick(cluster.now + 1)) == [("a", "opp", attempt, "rerouted:returned")]
    assert pauses == [250 * NS_PER_MS, 500 * NS_PER_MS, 1000 * NS_PER_MS]
    assert failed(cluster.interrupt("a", "opp")) == [("a", 503, "attempts_exhausted")]
    assert cluster.counts == TurnCounts(arrived=1, interrupted=4, rerouted=3, failed=1)


def test_attempts_that_bring_tokens_are_not_counted_against_a_turn() -> None:
    cluster = Scheduler(attempts_max=2)
    cluster.register()
    cluster.submit()
    cluster.turn("a")
    for attempt in range(10):
        replica = ("opp", "ded")[attempt % 2]
        assert failed(cluster.interrupt("a", replica, tokens=1)) == []
    assert cluster.counts.in_flight == 1


def test_a_refused_turn_is_over(cluster: Scheduler) -> None:
    cluster.turn("a")
    assert cluster.do(ev.TurnRefused(TurnId("a"), ReplicaId("opp"), "too_long", 1)) == []
    assert cluster.counts == TurnCounts(arrived=1, failed=1)


def test_the_cap_queues_and_an_end_dispatches_running_trajectories_first() -> None:
    cluster = Scheduler()
    cluster.register()
    cluster.submit(trajectories_per_replica_max=1)
    cluster.turn("a1", "a")
    cluster.turn("b1", "b")
    assert sent(cluster.turn("c1", "c")) == []
    assert sent(cluster.turn("d1", "d")) == []
    assert sent(cluster.turn("a2", "a")) == []
    assert cluster.counts.queued == 3
    assert sent(cluster.finish("b1", "ded")) == [("a2", "ded", 1, "least_loaded")]
    assert sent(cluster.finish("a1", "opp")) == [("c1", "opp", 1, "serving")]
    assert sent(cluster.finish("a2", "ded")) == [("d1", "ded", 1, "least_loaded")]


def test_a_full_queue_refuses_new_turns_but_keeps_rerouted_ones() -> None:
    cluster = Scheduler(queue_max=1)
    cluster.register()
    cluster.submit(trajectories_per_replica_max=1)
    for name in ("a", "b", "c"):
        assert failed(cluster.turn(name)) == []
    assert failed(cluster.turn("d")) == [("d", 429, "queue_full")]
    cluster.beat(opp={"state": "stopped"}, ded={"state": "stopped"})
    for name, replica in (("a", "opp"), ("b", "ded")):
        assert failed(cluster.interrupt(name, replica)) == []
    assert cluster.counts == TurnCounts(arrived=4, interrupted=2, failed=1, queued=3)


def test_a_cancelled_turn_is_stopped_where_it_runs(cluster: Scheduler) -> None:
    cluster.turn("a")
    assert stopped(cluster.do(ev.TurnCancelled(TurnId("a")))) == [("a", "opp", "client_gone")]
    cluster.beat(opp={"state": "stopped"}, ded={"state": "stopped"})
    cluster.turn("b")
    assert cluster.do(ev.TurnCancelled(TurnId("b"))) == []
    assert cluster.do(ev.TurnCancelled(TurnId("never-seen"))) == []
    assert cluster.counts == TurnCounts(arrived=2, cancelled=2)


# ---- versions ---------------------------------------------------------------------------------------


def test_on_policy_turns_wait_for_the_required_version(cluster: Scheduler) -> None:
    cluster.turn("a")
    cluster.do(ev.VersionPublished(J, WeightVersion(1)))
    assert stopped(cluster.step(1, 1)) == [("a", "opp", "version_unfit")]
    assert sent(cluster.turn("b")) == []
    assert sent(cluster.beat(ded={"weight_version": 1, "updating": True})) == []
    effects = cluster.beat(ded={"updating": False})
    assert sent(effects) == [("a", "ded", 2, "rerouted:least_loaded"), ("b", "ded", 1, "least_loaded")]


def test_a_replica_that_runs_ahead_waits_for_the_step(cluster: Scheduler) -> None:
    cluster.turn("a")
    cluster.do(ev.VersionPublished(J, WeightVersion(1)))
    effects = cluster.beat(opp={"weight_version": 1})
    assert stopped(effects) == [("a", "opp", "version_unfit")]
    assert sent(effects) == [("a", "ded", 2, "rerouted:least_loaded")]


def test_a_stale_replica_serves_within_the_bound(cluster: Scheduler) -> None:
    cluster.submit(staleness_max=1)
    cluster.turn("a")
    assert stopped(cluster.step(1, 1)) == []
    assert stopped(cluster.step(2, 2)) == [("a", "opp", "version_unfit")]


@pytest.mark.parametrize("wish", [{"version_min": 1}, {"version_exact": 1}])
def test_a_version_that_no_replica_runs_is_refused_at_once(cluster: Scheduler, wish: dict[str, int]) -> None:
    cluster.submit(staleness_max=1)
    assert failed(cluster.turn("a", **wish)) == [("a", 409, "version_unavailable")]
    cluster.do(ev.VersionPublished(J, WeightVersion(1)))
    assert failed(cluster.turn("b", **wish)) == [("b", 409, "version_unavailable")]
    assert sent(cluster.turn("c")) == [("c", "opp", 1, "serving")], "others are not held up"
    cluster.beat(ded={"weight_version": 1})
    assert sent(cluster.turn("d", **wish)) == [("d", "ded", 1, "least_loaded")]


def test_a_version_asked_for_is_waited_for_while_its_replica_is_busy(cluster: Scheduler) -> None:
    cluster.submit(staleness_max=1, trajectories_per_replica_max=1)
    cluster.do(ev.VersionPublished(J, WeightVersion(1)))
    cluster.beat(ded={"weight_version": 1})
    assert sent(cluster.turn("a", version_min=1)) == [("a", "ded", 1, "least_loaded")]
    assert cluster.turn("b", version_min=1) == []
    assert sent(cluster.finish("a", "ded")) == [("b", "ded", 1, "least_loaded")]


def test_a_turn_that_asks_for_one_version_leaves_a_replica_that_took_the_next(cluster: Scheduler) -> None:
    cluster.submit(staleness_max=1)
    assert sent(cluster.turn("a", version_exact=0)) == [("a", "opp", 1, "serving")]
    cluster.do(ev.VersionPublished(J, WeightVersion(1)))
    effects = cluster.beat(opp={"weight_version": 1})
    assert stopped(effects) == [("a", "opp", "version_unfit")]
    assert sent(effects) == [("a", "ded", 2, "rerouted:least_loaded")]
    assert failed(cluster.beat(ded={"weight_version": 1})) == [], "the job's bound still admits it"
    cluster.step(1, 2)
    assert failed(cluster.tick(cluster.now + S)) == []
    assert cluster.counts.failed == 1, "the job is past that version: it cannot come any more"


# ---- pauses -----------------------------------------------------------------------------------------


def test_a_paused_job_holds_its_turns_back(cluster: Scheduler) -> None:
    cluster.turn("a")
    assert cluster.do(ev.JobPaused(J, True)) == []
    assert cluster.turn("b") == []
    assert cluster.finish("a", "opp") == [], "what runs goes on, nothing new begins"
    assert sent(cluster.do(ev.JobPaused(J, False))) == [("b", "opp", 1, "serving")]


def test_a_pause_may_stop_what_runs_and_loses_nothing(cluster: Scheduler) -> None:
    cluster.turn("a")
    effects = cluster.do(ev.JobPaused(J, True, stop=True))
    assert stopped(effects) == [("a", "opp", "paused")]
    assert cluster.do(ev.JobPaused(J, True, stop=True)) == [], "a repeat changes nothing"
    assert cluster.machine.job_view(J).paused  # type: ignore[union-attr]
    assert sent(cluster.do(ev.JobPaused(J, False))) == [("a", "opp", 2, "rerouted:affinity")]


# ---- guesses at the trajectory ----------------------------------------------------------------------


def test_a_finished_trajectory_holds_no_pin(cluster: Scheduler) -> None:
    cluster.turn("a", "walk")
    cluster.finish("a", "opp")
    effects = cluster.do(ev.TrajectoryEnded(J, TrajectoryId("walk")))
    assert of(effects, ForgetTrajectory) == [ForgetTrajectory(TrajectoryId("walk"))]
    assert cluster.do(ev.TrajectoryEnded(J, TrajectoryId("walk"))) == []
    assert cluster.machine.view(0).pins == 0


def test_a_guess_follows_its_prefix_but_not_into_a_crowd(cluster: Scheduler) -> None:
    cluster.submit(trajectories_per_replica_max=100)
    for number in range(60):
        cluster.turn(f"t{number}", "same", hint=True)
    on = [cluster.machine.turns_in_flight(NodeId("n"))[ReplicaId(name)] for name in ("opp", "ded")]
    assert max(on) / (sum(on) / 2) < 1.3
    for number in range(60):
        cluster.finish(f"t{number}", "opp")
        cluster.finish(f"t{number}", "ded")
    (first,) = sent(cluster.turn("u0", "same", hint=True))
    cluster.finish("u0", first[1])
    (again,) = sent(cluster.turn("u1", "same", hint=True))
    assert again[1] == first[1], "while nobody waits, the prefix decides"


# ---- nodes ------------------------------------------------------------------------------------------


def test_a_stalled_node_gets_no_turns_and_a_dead_ones_move(cluster: Scheduler) -> None:
    other = ev.NodeRegistered(NodeId("n2"), "s", (_report("ded2", "dedicated"),))
    cluster.submit(n_rl=2)
    cluster.turn("a", "a")
    cluster.now = 2 * S
    cluster.do(other)
    cluster.tick(2 * S)
    assert sent(cluster.turn("b", "a")) == [("b", "ded2", 1, "least_loaded")], "though its prefix is on opp"
    cluster.now = 5 * S
    cluster.do(ev.NodeHeartbeat(NodeId("n2"), "s", 1, other.replicas))
    effects = cluster.tick(6 * S)
    assert stopped(effects) == [("a", "opp", "node_dead")]
    assert sent(effects) == [("a", "ded2", 2, "rerouted:affinity")]
    assert [lease.replica for lease in of(effects, RevokeLease)] == ["opp", "ded"]
    assert cluster.counts.in_flight == 2


def test_every_turn_of_a_restarted_node_is_stopped_before_it_runs_again(cluster: Scheduler) -> None:
    for name in "abcd":
        cluster.turn(name)
    effects = cluster.register("s2")
    order = [type(effect).__name__ for effect in effects if isinstance(effect, StopTurn | DispatchTurn)]
    assert order == ["StopTurn"] * 4 + ["DispatchTurn"] * 4
    assert {why for *_, why in sent(effects)} == {"rerouted:serving", "rerouted:least_loaded"}
    assert cluster.counts == TurnCounts(arrived=4, interrupted=4, rerouted=4, in_flight=4)


def test_turns_survive_without_any_node_and_run_when_one_is_back(cluster: Scheduler) -> None:
    cluster.turn("a")
    cluster.do(ev.NodeLeft(NodeId("n"), "s1"))
    cluster.turn("b")
    assert cluster.counts.queued == 2
    assert [turn for turn, *_ in sent(cluster.register("s2"))] == ["a", "b"]


def test_a_drained_replica_finishes_what_it_runs_and_gets_nothing_new(cluster: Scheduler) -> None:
    cluster.turn("a", "a")
    assert stopped(cluster.do(ev.ReplicaDrainRequested(ReplicaId("opp"), True))) == []
    assert sent(cluster.turn("b", "a")) == [("b", "ded", 1, "least_loaded")]
    cluster.finish("a", "opp")
    cluster.do(ev.ReplicaDrainRequested(ReplicaId("opp"), False))
    assert sent(cluster.turn("c")) == [("c", "opp", 1, "serving")]


# ---- stalls -----------------------------------------------------------------------------------------


def test_an_attempt_without_progress_is_moved() -> None:
    cluster = Scheduler(turn_stall_ns=8 * S)
    cluster.register()
    cluster.submit()
    cluster.turn("a")
    cluster.live(until_s=6)
    cluster.do(ev.TurnProgressed(TurnId("a"), ReplicaId("opp"), 1, 1))
    assert stopped(cluster.live(until_s=13)) == []
    cluster.do(ev.TurnProgressed(TurnId("a"), ReplicaId("opp"), 1, 1))  # a repeat is no progress
    effects = cluster.live(until_s=15)
    assert stopped(effects) == [("a", "opp", "turn_stalled")]
    assert sent(effects) == [("a", "ded", 2, "rerouted:least_loaded")]


def test_a_closed_gate_excuses_a_silent_attempt_for_a_while() -> None:
    cluster = Scheduler(turn_stall_ns=8 * S, turn_held_ns=40 * S)
    cluster.register()
    cluster.submit()
    cluster.turn("a")
    cluster.beat(opp={"gate_open": False})
    assert stopped(cluster.live(until_s=39)) == []
    assert stopped(cluster.live(until_s=42)) == [("a", "opp", "turn_stalled")]


def test_only_time_with_an_open_gate_counts_as_stalled() -> None:
    cluster = Scheduler(turn_stall_ns=8 * S, turn_held_ns=400 * S)
    cluster.register()
    cluster.submit()
    cluster.turn("a")
    moved_at = None
    for second in range(1, 40):
        cluster.now = second * S
        effects = cluster.beat(opp={"gate_open": second % 3 == 0}) + cluster.do(ev.Tick())
        if stopped(effects):
            moved_at = second
            break
    assert moved_at is not None
    assert 20 <= moved_at <= 28, "one second in three counts"


# ---- replicas that only fail ----------------------------------------------------------------------


def fail(cluster: Scheduler, *names: str, tokens: int = 0, failed: bool = True) -> list[ClusterEffect]:
    """Turns run on `opp` and are ended there; answers what the last end set off."""
    effects: list[ClusterEffect] = []
    for name in names:
        cluster.turn(name)
        event = ev.TurnInterrupted(TurnId(name), ReplicaId("opp"), "engine_status_500", tokens, 0, failed)
        effects = cluster.do(event)
        cluster.do(ev.TurnCancelled(TurnId(name)))
    return effects


def eligible(cluster: Scheduler) -> bool:
    view = cluster.machine.job_view(J)
    assert view is not None
    return {each.replica: each.eligible for each in view.replicas}[ReplicaId("opp")]


@pytest.mark.parametrize(
    ("how", "left_out"), [({}, True), ({"tokens": 3}, False), ({"failed": False}, False)]
)
def test_a_replica_that_only_fails_is_left_out_for_a_while(how: dict[str, Any], left_out: bool) -> None:
    cluster = Scheduler()
    cluster.register()
    cluster.submit(n_rl=0)
    fail(cluster, "a", "b", **how)
    assert eligible(cluster)
    effects = fail(cluster, "c", **how)
    assert [say.code for say in of(effects, Say)] == ["replica_suspended"] * left_out
    assert eligible(cluster) is not left_out
    cluster.live(until_s=2)
    assert eligible(cluster)


def test_each_further_failure_doubles_the_pause_and_a_token_ends_it() -> None:
    cluster = Scheduler()
    cluster.register()
    cluster.submit(n_rl=0)
    fail(cluster, "a", "b", "c")
    cluster.live(until_s=2)
    fail(cluster, "d")
    cluster.live(until_s=3)
    assert not eligible(cluster)
    cluster.live(until_s=5)
    assert eligible(cluster)
    cluster.turn("e")
    cluster.do(ev.TurnProgressed(TurnId("e"), ReplicaId("opp"), 1, 1))
    fail(cluster, "f", "g")
    assert eligible(cluster)


def test_one_fault_that_ends_many_attempts_counts_once() -> None:
    cluster = Scheduler()
    cluster.register()
    cluster.submit(n_rl=0)
    names = "abcdefgh"
    for name in names:
        cluster.turn(name)
    for name in names:
        cluster.do(ev.TurnInterrupted(TurnId(name), ReplicaId("opp"), "connection_lost", 0, 1, True))
    cluster.live(until_s=2)
    assert cluster.counts.in_flight == len(names)


@pytest.mark.parametrize("tokens", [0, 7])
def test_a_hung_replica_is_left_out_whatever_its_health_says(tokens: int) -> None:
    """Its node reports it ready; yet no turn gets a token any more."""
    cluster = Scheduler(turn_stall_ns=8 * S)
    cluster.register()
    cluster.submit(n_rl=0)
    for name in "abc":
        cluster.turn(name)
        if tokens:
            cluster.do(ev.TurnProgressed(TurnId(name), ReplicaId("opp"), tokens, 1))
    effects = cluster.live(until_s=8)
    assert [reason for *_, reason in stopped(effects)] == ["turn_stalled"] * 3
    assert [say.code for say in of(effects, Say)] == ["replica_suspended"]
    ((probe, _, attempt, _),) = sent(cluster.live(until_s=10))
    assert cluster.counts.in_flight == 1, "one turn finds out whether it works again"
    cluster.do(ev.TurnProgressed(TurnId(probe), ReplicaId("opp"), 1, attempt))
    assert cluster.counts.in_flight == 3


def test_a_turn_that_stalls_among_others_that_go_on_is_no_fault_of_the_replica() -> None:
    cluster = Scheduler(turn_stall_ns=8 * S)
    cluster.register()
    cluster.submit(n_rl=0)
    for name in "ab":
        cluster.turn(name)
        cluster.do(ev.TurnProgressed(TurnId(name), ReplicaId("opp"), 1, 1))
    for second in range(1, 11):
        cluster.live(until_s=second)
        cluster.do(ev.TurnProgressed(TurnId("b"), ReplicaId("opp"), 1 + second, 1))
    assert cluster.counts.interrupted == 1
    assert eligible(cluster)


def test_a_long_closed_gate_is_no_failure() -> None:
    cluster = Scheduler(turn_stall_ns=8 * S, turn_held_ns=40 * S)
    cluster.register()
    cluster.submit(n_rl=0)
    for name in "abcd":
        cluster.turn(name)
    cluster.beat(opp={"gate_open": False})
    effects = cluster.live(until_s=44)
    assert len(stopped(effects)) == 4
    assert [say for say in of(effects, Say) if say.code == "replica_suspended"] == []


# ---- views and bounds -------------------------------------------------------------------------------


def test_the_views_tell_what_runs_where(cluster: Scheduler) -> None:
    cluster.step(3, 0)
    for name in "abc":
        cluster.turn(name)
    cluster.finish("a", "opp", tokens=11)
    view = cluster.machine.job_view(J)
    assert view is not None
    assert (view.rl_step, view.required_version, view.rolling) == (3, 0, True)
    assert (view.turns_in_flight, view.turns_queued) == (2, 0)
    assert [(r.replica, r.turns_in_flight, r.eligible, r.tokens) for r in view.replicas] == [
        ("ded", 1, True, 0), ("opp", 1, True, 11),
    ]  # fmt: skip
    assert cluster.machine.turns_in_flight(NodeId("n")) == {"opp": 1, "ded": 1}
    whole = msgspec.json.decode(msgspec.json.encode(cluster.machine.view(S)))
    assert whole["turns"]["in_flight"] == 2
    assert whole["nodes"] == [{"node": "n", "state": "alive", "session": "s1", "silent_ms": 1000.0}]
    cluster.do(ev.JobStepEnded(J, 3))
    assert not msgspec.to_builtins(cluster.machine.job_view(J))["rolling"]


def test_nothing_grows_with_the_number_of_turns() -> None:
    cluster = Scheduler(pins_max=50)
    cluster.register()
    cluster.submit()
    for number in range(2000):
        ((_, replica, _, _),) = sent(cluster.turn(f"t{number}"))
        cluster.finish(f"t{number}", replica)
    assert cluster.counts == TurnCounts(arrived=2000, finished=2000)
    assert cluster.machine.view(0).pins == 50
    assert of(cluster.tick(2000 * S), ForgetTrajectory), "and pins expire"
    assert cluster.machine.view(0).pins == 0


def test_a_day_replays_bit_for_bit() -> None:
    """The same events give the same effects, whatever ids hash to."""

    def day() -> list[ClusterEffect]:
        cluster = Scheduler()
        effects = cluster.register() + cluster.submit(trajectories_per_replica_max=3)
        for name in "abcdefghij":
            effects += cluster.turn(name)
        return effects + cluster.register("s2") + cluster.live(until_s=5)

    assert msgspec.json.encode(day()) == msgspec.json.encode(day())


# ---- sharing between jobs, switch cost, groups, tasks, the tail --------------------------------------------


def test_a_second_job_gets_its_share_and_turns_move() -> None:
    cluster = Scheduler(lease_min_ns=10 * S)
    cluster.reports["more"] = _report("more", "opportunistic")
    cluster.register()
    cluster.submit(0, 2)
    cluster.turn("a"), cluster.turn("b")
    cluster.do(ev.JobSubmitted(JobId("other"), "m", 0, 2))
    assert not of(cluster.live(9), RevokeLease)
    effects = cluster.live(12)
    (revoked,) = of(effects, RevokeLease)
    assert revoked.reason == "fair_share"
    assert [grant.job for grant in of(effects, GrantLease)] == ["other"]
    assert len(sent(effects)) == 1  # its turn goes on where the job still has a replica


def test_a_replica_that_comes_too_late_in_a_step_is_borrowed_after_it() -> None:
    cluster = Scheduler(switch_cost_ns=10 * S)
    cluster.reports["opp"] = msgspec.structs.replace(cluster.reports["opp"], serving_kv_used_share=None)
    cluster.register()
    cluster.submit()
    cluster.step(0, 0)
    cluster.live(60)
    cluster.do(ev.JobStepEnded(J, 0))
    cluster.step(1, 0)
    cluster.live(105)  # 15 s are left of the 60 s that a step takes, too few for 2 x 10 s
    assert not of(cluster.beat(opp={"serving_kv_used_share": 0.1}), GrantLease)
    (grant,) = of(cluster.do(ev.JobStepEnded(J, 1)), GrantLease)
    assert grant.replica == "opp"


def test_a_group_s_turns_run_together(cluster: Scheduler) -> None:
    cluster.submit(1, 1, trajectories_per_replica_max=16)
    told = [sent(cluster.turn(f"t{turn}", group="g"))[0][1] for turn in range(4)]
    assert told == ["opp"] * 4
    assert sent(cluster.turn("x", group="h"))[0][1] == "ded"


def test_a_task_s_measured_mix_decides_its_hardware() -> None:
    cluster = Scheduler()
    cluster.reports = {
        name: msgspec.structs.replace(_report(name, "dedicated"), hardware=hardware)
        for name, hardware in (("fast", "compute"), ("wide", "bandwidth"))
    }
    cluster.register()
    cluster.submit(2, 0)
    for turn in range(16):
        ((_, replica, _, _),) = sent(cluster.turn(f"t{turn}", task="read"))
        cluster.finish(f"t{turn}", replica, tokens=1)
    assert {sent(cluster.turn(f"r{turn}", task="read"))[0][1] for turn in range(3)} == {"fast"}


def test_the_last_trajectories_of_a_step_leave_borrowed_replicas(cluster: Scheduler) -> None:
    cluster.step(0, 0)
    assert sent(cluster.turn("a", "long")) == [("a", "opp", 1, "serving")]
    cluster.finish("a", "opp")
    assert sent(cluster.turn("b", "long")) == [("b", "ded", 1, "tail")]
    cluster.finish("b", "ded")
    assert sent(cluster.turn("c", "long")) == [("c", "ded", 1, "affinity")]


def test_outside_a_step_there_is_no_tail(cluster: Scheduler) -> None:
    cluster.turn("a", "long")
    cluster.finish("a", "opp")
    assert sent(cluster.turn("b", "long")) == [("b", "opp", 1, "affinity")]


def test_what_a_job_may_use_now(cluster: Scheduler) -> None:
    assert cluster.machine.capacity(J) == (16, 16, 0, 0)
    cluster.turn("a")
    cluster.turn("b")
    cluster.do(ev.TurnProgressed(TurnId("a"), ReplicaId("opp"), 7))
    cluster.finish("b", "ded", tokens=5)
    assert cluster.machine.capacity(J) == (16, 16, 1, 12)
    cluster.interrupt("a", "opp", tokens=9)  # goes on elsewhere, and counts anew
    assert cluster.machine.capacity(J) == (16, 16, 1, 14)
    cluster.beat(opp={"gate_open": False})
    assert cluster.machine.capacity(J) == (16, 0, 1, 14)
    cluster.beat(ded={"state": "failed"})
    assert cluster.machine.capacity(J) == (0, 0, 1, 14)
    assert cluster.machine.capacity(JobId("nobody")) is None


# ---- the age of trajectories ------------------------------------------------------------------------


def test_an_over_stale_trajectory_is_aborted_counted_and_refused(cluster: Scheduler) -> None:
    """Its turns were on fit weights each; what it began with is too old."""
    cluster.submit(staleness_max=4, trajectory_staleness_max=1)
    cluster.turn("a", "old")
    cluster.finish("a", "opp")
    cluster.turn("w", "idle")
    cluster.finish("w", "opp")
    cluster.do(ev.VersionPublished(J, WeightVersion(1)))
    cluster.beat(opp={"weight_version": 1}, ded={"weight_version": 1})
    assert failed(cluster.step(1, 1)) == []
    ((_, replica, _, _),) = sent(cluster.turn("b", "old"))
    assert sent(cluster.turn("c", "young")) != []
    effects = cluster.step(2, 2)
    assert stopped(effects) == [("b", replica, "trajectory_stale")]
    assert failed(effects) == [("b", 409, "trajectory_stale")]
    (said,) = of(effects, Say)
    assert (said.code, said.text) == (
        "trajectory_stale",
        "aborted 1 that began before version 1",
    )
    assert failed(cluster.turn("d", "old")) == [("d", 409, "trajectory_stale")]
    assert failed(cluster.turn("e", "new")) == []
    view = cluster.machine.job_view(J)
    assert view is not None
    assert (view.trajectory_staleness_max, view.trajectories_stale) == (1, 1), "one that has ended is none"
    assert failed(cluster.step(3, 2)) == []
    assert failed(cluster.turn("f", "old")) == [("f", 409, "trajectory_stale")]
    assert failed(cluster.turn("g", "idle")) == [("g", 409, "trajectory_stale")]
    assert cluster.machine.job_view(J).trajectories_stale == 2, "none is counted twice"  # type: ignore[union-attr]


def test_a_trajectory_that_is_over_begins_anew_under_its_name(cluster: Scheduler) -> None:
    cluster.submit(staleness_max=4, trajectory_staleness_max=0)
    cluster.turn("a", "t")
    cluster.finish("a", "opp")
    cluster.step(1, 1)
    assert failed(cluster.turn("b", "t")) == [("b", 409, "trajectory_stale")]
    cluster.do(ev.TrajectoryEnded(J, TrajectoryId("t")))
    cluster.beat(opp={"weight_version": 1})
    assert sent(cluster.turn("c", "t")) == [("c", "opp", 1, "serving")]


@pytest.mark.parametrize(("tokens", "stale"), [(0, []), (3, [("a", 409, "trajectory_stale")])])
def test_only_tokens_age_a_trajectory(
    cluster: Scheduler, tokens: int, stale: list[tuple[str, int, str]]
) -> None:
    """An attempt that brought none has left nothing of its weights."""
    cluster.submit(staleness_max=4, trajectory_staleness_max=0)
    cluster.beat(ded={"state": "stopped"})
    cluster.turn("a", "t")
    cluster.interrupt("a", "opp", tokens, attempt=1)
    assert failed(cluster.step(1, 1)) == stale


def test_trajectories_may_be_of_any_age_unless_their_job_bounds_it(cluster: Scheduler) -> None:
    cluster.submit(staleness_max=9)
    cluster.turn("a", "t")
    cluster.finish("a", "opp")
    assert failed(cluster.step(1, 9)) == []
    assert len(sent(cluster.turn("b", "t"))) == 1
    view = cluster.machine.job_view(J)
    assert view is not None
    assert (view.trajectory_staleness_max, view.trajectories_stale) == (None, 0)


def test_guessed_trajectories_have_no_age(cluster: Scheduler) -> None:
    """Two agents may begin alike: one is not the past of the other."""
    cluster.submit(staleness_max=4, trajectory_staleness_max=0)
    cluster.turn("a", "t", hint=True)
    cluster.finish("a", "opp")
    assert failed(cluster.step(1, 1)) == []
    assert failed(cluster.turn("b", "t", hint=True)) == []


def test_the_age_of_trajectories_survives_a_restart(cluster: Scheduler) -> None:
    cluster.submit(staleness_max=4, trajectory_staleness_max=1)
    pin = ev.TrajectoryPinned(J, TrajectoryId("t"), ReplicaId("opp"), WeightVersion(0))
    cluster.step(1, 2)
    cluster.do(pin)
    assert failed(cluster.turn("a", "t")) == [("a", 409, "trajectory_stale")]
