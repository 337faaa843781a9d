"""The scheduler's machine: ties membership, placement, versions and routing together.

`step(event, now_ns) -> effects`, to be carried out in order.  What a driver has to keep to:

- Carry out `DispatchTurn` by sending the turn, with all tokens kept so far, to `replica(...).url`.  Report
  the end of every attempt with exactly one of TurnFinished, TurnInterrupted and TurnRefused, unless a
  StopTurn ended the attempt first.  Echo the attempt number.
- Send `Tick` no later than `next_deadline_ns()`, after the messages that already wait: else a scheduler
  that was itself held up takes its nodes for dead.
- Have a node whose session the machine does not know (`knows`) register again, with a new session.  A node
  that merely heard nothing for a while registers again in the session it has, which moves no turn.
- Turn ids are unique among live turns: an arrival with the id of a live turn is ignored.  Replaying the
  answer of a finished turn is the driver's affair.

Accepted turns are never shed; new ones are refused (429) while `queue_max` wait already.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from rose.core.cluster_settings import ClusterSettings
from rose.core.cluster_view import ClusterView, JobView, NodeView, ReplicaView, TrajectoryView
from rose.core.dispatch import Dispatcher
from rose.core.effects import ClusterEffect, GrantLease, RevokeLease, Say, TellStep
from rose.core.events import (
    ClusterEvent,
    ClusterJobEvent,
    ClusterNodeEvent,
    ClusterTurnEvent,
    JobEnded,
    JobPaused,
    JobStepBegan,
    JobStepEnded,
    JobSubmitted,
    NodeHeartbeat,
    NodeLeft,
    NodeRegistered,
    ReplicaDistrusted,
    ReplicaDrainRequested,
    ReplicaReport,
    Tick,
    TrajectoryEnded,
    TrajectoryPinned,
    TurnArrived,
    TurnCancelled,
    TurnFinished,
    TurnInterrupted,
    TurnProgressed,
    TurnRefused,
    VersionPublished,
)
from rose.core.forecast import Capacity
from rose.core.membership import Change, Membership, Replica
from rose.core.placement import Around, Lease, Placement
from rose.core.routing import Condition, Router
from rose.core.switching import SwitchCost
from rose.core.turns import JobTurns, TurnCounts
from rose.core.versions import JobVersions
from rose.units import NS_PER_MS, JobId, NodeId, ReplicaId

__all__ = ["ClusterMachine", "ClusterSettings"]


@dataclass(slots=True)
class _Job:
    """One RL run."""

    spec: JobSubmitted
    versions: JobVersions
    router: Router
    turns: JobTurns
    switching: SwitchCost
    told: dict[NodeId, tuple[str | None, int]] = field(default_factory=dict)
    """Session and RL step that each node was told last."""


class ClusterMachine:
    """Decides which replicas a job gets and where every turn runs."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._membership = Membership(
            settings.stall_after_ns,
            settings.suspect_after_ns,
            settings.dead_after_ns,
            settings.forget_node_after_ns,
            settings.gate_patience_ns,
        )
        self._settings = settings
        self._placement = Placement(
            settings.lease_grace_ns, settings.lease_min_ns, settings.borrow_kv_share_max
        )
        self._effects: list[ClusterEffect] = []
        """Of the step being taken; shared with the dispatcher."""
        self._dispatcher = Dispatcher(settings, self._effects, self._open_ns)
        self._jobs: dict[JobId, _Job] = {}
        self._offers: dict[ReplicaId, tuple[bool, bool, bool]] = {}
        """Per replica, what placement goes by; a change calls for a new plan."""
        self._replan = False

    # ---- for the driver ----------------------------------------------------------------------------

    def step(self, event: ClusterEvent, now_ns: int) -> list[ClusterEffect]:
        """Take in one event; answers what to do, in order."""
        if isinstance(event, ClusterTurnEvent):
            self._turn_event(event, now_ns)
        elif isinstance(event, ClusterNodeEvent):
            self._node_event(event, now_ns)
        elif isinstance(event, ClusterJobEvent):
            self._job_event(event, now_ns)
        elif isinstance(event, Tick):
            self._tick(now_ns)
        else:
            assert_never(event)
        if self._replan:
            self._place(now_ns)
        self._dispatcher.drain(now_ns)
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    def next_deadline_ns(self) -> int:
        """The latest instant for the next Tick, or NEVER."""
        return min(
            self._membership.next_deadline_ns(),
            self._placement.next_deadline_ns(),
            self._dispatcher.next_deadline_ns(),
        )

    def knows(self, node: NodeId, session: str) -> bool:
        """Whether the node's session is registered; if not, tell the node to register."""
        return self._membership.knows(node, session)

    def replaced(self, node: NodeId, session: str) -> bool:
        """Whether the session is over for good: a registration of it is ignored."""
        return self._membership.replaced(node, session)

    def replica(self, replica: ReplicaId) -> ReplicaReport | None:
        """The latest report of a replica, None if it is gone."""
        known = self._membership.replicas.get(replica)
        return None if known is None else known.report

    def jobs(self) -> list[JobId]:
        """Running jobs, in order of submission."""
        return list(self._jobs)

    def turns_in_flight(self, node: NodeId) -> dict[ReplicaId, int]:
        """Turns in flight on each replica of a node, for the answer to its heartbeat."""
        known = self._membership.nodes.get(node)
        return {} if known is None else {replica: self._count_on(replica) for replica in known.replicas}

    def steps(self, node: NodeId) -> list[TellStep]:
        """The present steps of the jobs that hold replicas of a node.

        To be sent with the answer to each of its heartbeats: a message that told of a step may be lost.
        """
        jobs = dict.fromkeys(lease.job for lease in self.leases(node))
        told = ((job, self._jobs[job].versions) for job in jobs)
        return [
            TellStep(node, job, versions.rl_step, versions.required)
            for job, versions in told
            if versions.rl_step is not None
        ]

    def leases(self, node: NodeId) -> list[GrantLease]:
        """The leases on a node's replicas, as they were granted.

        To be sent to one that registers once more in its session: it was cut off, and may have missed some.
        """
        known = self._membership.nodes.get(node)
        held = [self._placement.leases.get(replica) for replica in known.replicas] if known else []
        return [GrantLease(lease.node, lease.replica, lease.job, lease.lease) for lease in held if lease]

    def counts(self) -> TurnCounts:
        """A copy of the turn counters."""
        return msgspec.structs.replace(self._dispatcher.counts)

    def job_view(self, job: JobId) -> JobView | None:
        """One job, None if it is not running."""
        known = self._jobs.get(job)
        return None if known is None else self._view_job(known)

    def capacity(self, job: JobId) -> Capacity | None:
        """What the job may use now, None if it is not running."""
        known = self._jobs.get(job)
        if known is None:
            return None
        turns = known.turns
        tokens = turns.tokens_ended + sum(turn.tokens for turn in turns.live.values())
        return Capacity(*known.router.slots(), len(turns.live) - len(turns.queue), tokens)

    def trajectories(self, now_ns: int, most: int, job: JobId | None = None) -> list[TrajectoryView]:
        """Those that ran last, newest first."""
        return [
            TrajectoryView(trajectory, owner, replica, tokens, (now_ns - used_ns) / NS_PER_MS)
            for owner, trajectory, replica, tokens, used_ns in self._dispatcher.pins.latest(most, job)
        ]

    def view(self, now_ns: int) -> ClusterView:
        """Everything, for `rose status`."""
        nodes = tuple(
            NodeView(node.id, node.state, node.session, (now_ns - node.heard_ns) / NS_PER_MS)
            for node in self._membership.nodes.values()
        )
        replicas = tuple(self._view_replica(replica) for replica in self._membership.replicas.values())
        jobs = tuple(self._view_job(job) for job in self._jobs.values())
        return ClusterView(self.counts(), len(self._dispatcher.pins), nodes, replicas, jobs)

    # ---- events ------------------------------------------------------------------------------------

    def _turn_event(self, event: ClusterTurnEvent, now_ns: int) -> None:
        match event:
            case TurnArrived():
                self._dispatcher.arrived(event, now_ns)
            case TurnFinished():
                self._dispatcher.finished(event)
            case TurnProgressed():
                self._dispatcher.progressed(event, now_ns)
            case TurnInterrupted():
                self._dispatcher.interrupted(event, now_ns)
            case TurnRefused():
                self._dispatcher.refused(event)
            case TurnCancelled():
                self._dispatcher.cancelled(event.turn)
            case TrajectoryPinned():
                self._dispatcher.pinned(event, now_ns)
            case TrajectoryEnded():
                self._dispatcher.forget_trajectory(event)
            case _:
                assert_never(event)

    def _node_event(self, event: ClusterNodeEvent, now_ns: int) -> None:
        match event:
            case NodeHeartbeat():
                self._apply(self._membership.heartbeat(event, now_ns), now_ns)
            case NodeRegistered():
                self._apply(self._membership.register(event, now_ns), now_ns)
            case NodeLeft():
                self._apply(self._membership.leave(event), now_ns)
            case ReplicaDrainRequested():
                self._apply(self._membership.drain(event, now_ns), now_ns)
            case ReplicaDistrusted():
                self._dispatcher.distrust(event)
            case _:
                assert_never(event)

    def _job_event(self, event: ClusterJobEvent, now_ns: int) -> None:
        if isinstance(event, JobSubmitted):
            self._submitted(event)
            return
        job = self._jobs.get(event.job)
        if job is None:
            text = f"{type(event).__name__} of a job that is not running"
            self._effects.append(Say("warning", "job_unknown", text, event.job))
            return
        match event:
            case JobEnded():
                self._ended(job)
            case JobPaused():
                self._dispatcher.pause(job.turns, event)
            case JobStepBegan():
                self._step_began(job, event, now_ns)
            case JobStepEnded():
                self._step_ended(job, event, now_ns)
            case VersionPublished():
                if job.versions.publish(event.version):
                    self._reconfigure(job)
            case _:
                assert_never(event)

    def _tick(self, now_ns: int) -> None:
        self._apply(self._membership.expire(now_ns), now_ns)
        self._replan |= now_ns >= self._placement.next_deadline_ns()
        self._dispatcher.tick(now_ns)

    # ---- nodes and leases --------------------------------------------------------------------------

    def _apply(self, change: Change, now_ns: int) -> None:
        self._effects.extend(change.says)
        for replica, reason in change.gone:
            self._gone(replica.id, reason)
        for replica in change.seen:
            self._seen(replica, now_ns)

    def _gone(self, replica: ReplicaId, reason: str) -> None:
        lease = self._placement.release(replica)
        if lease is not None:
            self._unlease(lease, reason)
        self._dispatcher.replica_left(replica)
        del self._offers[replica]
        self._replan = True

    def _seen(self, replica: Replica, now_ns: int) -> None:
        offer = self._placement.offers(replica)
        if self._offers.get(replica.id) != offer:
            self._offers[replica.id] = offer
            self._dispatcher.replica_came(replica.id)
            self._replan = True
        lease = self._placement.leases.get(replica.id)
        if lease is not None:
            job = self._jobs[lease.job]
            job.router.update(replica.id, Condition.of(replica))
            if job.router.is_open(replica.id):
                job.switching.usable(replica.id, now_ns)
            self._move_misfits(job, replica.id)
            self._dispatcher.touch(job.turns)

    def _place(self, now_ns: int) -> None:
        self._replan = False
        quotas = {name: job.spec for name, job in self._jobs.items()}
        around = Around(
            self._membership.replicas,
            self._count_on,
            lambda job: self._jobs[job].switching.pays(now_ns, len(self._jobs[job].turns.queue) > 0),
            now_ns,
        )
        plan = self._placement.plan(quotas, around)
        for lease, reason in plan.revoked:
            self._unlease(lease, reason)
        for lease in plan.granted:
            self._lease(lease, now_ns)

    def _lease(self, lease: Lease, now_ns: int) -> None:
        """Carry out a grant."""
        job = self._jobs[lease.job]
        replica = self._membership.replicas[lease.replica]
        job.router.add(lease.replica, replica.serving, Condition.of(replica))
        if replica.serving:
            job.switching.granted(lease.replica, now_ns)
            if job.router.is_open(lease.replica):
                job.switching.usable(lease.replica, now_ns)
        self._effects.append(GrantLease(lease.node, lease.replica, lease.job, lease.lease))
        self._tell_step(job, lease.node)
        self._dispatcher.replica_leased(job.turns, lease.replica)

    def _unlease(self, lease: Lease, reason: str) -> None:
        """Carry out the end of a lease: its turns move."""
        job = self._jobs[lease.job]
        self._dispatcher.move_all(job.turns, lease.replica, reason)
        job.router.remove(lease.replica)
        job.switching.ended(lease.replica)
        self._effects.append(RevokeLease(lease.node, lease.replica, lease.job, lease.lease, reason))

    # ---- jobs --------------------------------------------------------------------------------------

    def _submitted(self, event: JobSubmitted) -> None:
        """A new job, or new terms for a running one."""
        counts = (event.n_rl, event.n_serving_max, event.staleness_max, event.trajectory_staleness_max or 0)
        if min(*counts, event.trajectories_per_replica_max - 1) < 0:
            text = "a job needs n_rl, n_serving_max, staleness >= 0 and trajectories_per_replica_max >= 1"
            self._effects.append(Say("error", "job_invalid", text, event.job))
            return
        job = self._jobs.get(event.job)
        terms = (event.staleness_max, event.unknown_version_ok, event.trajectory_staleness_max)
        if job is None:
            versions = JobVersions(*terms)
            settings = self._settings
            router = Router(event.trajectories_per_replica_max, versions.window, settings.slack)
            turns = self._dispatcher.add_job(event.job, router, versions)
            switching = SwitchCost(settings.switch_cost_ns, settings.switch_gain_min)
            self._jobs[event.job] = _Job(event, versions, router, turns, switching)
        else:
            job.spec = event
            job.versions.bound(*terms)
            self._reconfigure(job)
        self._replan = True

    def _ended(self, job: _Job) -> None:
        name = job.spec.job
        self._dispatcher.end_job(job.turns)
        for replica in self._placement.held_by(name):
            lease = self._placement.release(replica)
            assert lease is not None, f"{replica} is held without a lease"
            self._unlease(lease, "job_ended")
        del self._jobs[name]
        self._replan = True

    def _step_ended(self, job: _Job, event: JobStepEnded, now_ns: int) -> None:
        if job.turns.rolling and job.versions.rl_step == event.rl_step:
            job.turns.rolling = False
            job.switching.step_ended(now_ns)
            self._replan = True  # there is time now for what did not pay before

    def _step_began(self, job: _Job, event: JobStepBegan, now_ns: int) -> None:
        if not job.versions.begin_step(event.rl_step, event.required_version):
            return
        job.turns.rolling = True
        job.switching.step_began(now_ns)
        self._replan = True
        for replica in self._placement.held_by(event.job):
            self._tell_step(job, self._placement.leases[replica].node)
        self._reconfigure(job)

    def _reconfigure(self, job: _Job) -> None:
        """The job's cap or versions changed."""
        job.router.configure(job.spec.trajectories_per_replica_max, job.versions.window)
        self._dispatcher.abort_stale(job.turns)
        for replica in job.router.busy():
            self._move_misfits(job, replica)
        self._dispatcher.touch(job.turns)

    def _move_misfits(self, job: _Job, replica: ReplicaId) -> None:
        """Attempts on a version that no longer fits move."""
        if not job.versions.window.admits(self._membership.replicas[replica].report.weight_version):
            self._dispatcher.move_all(job.turns, replica, "version_unfit")
        else:
            self._dispatcher.move_unsuited(job.turns, replica)

    def _tell_step(self, job: _Job, node: NodeId) -> None:
        """Tell the node of the job's step, once a session."""
        rl_step = job.versions.rl_step
        if rl_step is None:
            return
        news = (self._membership.nodes[node].session, rl_step)
        if job.told.get(node) != news:
            job.told[node] = news
            self._effects.append(TellStep(node, job.spec.job, rl_step, job.versions.required))

    # ---- look-ups ----------------------------------------------------------------------------------

    def _open_ns(self, replica: ReplicaId, now_ns: int) -> int:
        return self._membership.replicas[replica].open_ns(now_ns)

    def _count_on(self, replica: ReplicaId) -> int:
        lease = self._placement.leases.get(replica)
        return 0 if lease is None else self._jobs[lease.job].router.count_on(replica)

    def _view_job(self, job: _Job) -> JobView:
        held = [self._membership.replicas[replica] for replica in self._placement.held_by(job.spec.job)]
        replicas = tuple(self._view_replica(replica) for replica in held)
        queued = len(job.turns.queue)
        in_flight = len(job.turns.live) - queued
        return JobView.of(job.spec, job.versions, job.turns, queued, in_flight, replicas)

    def _view_replica(self, replica: Replica) -> ReplicaView:
        lease = self._placement.leases.get(replica.id)
        eligible = lease is not None and self._jobs[lease.job].router.is_open(replica.id)
        node_state = self._membership.nodes[replica.node].state
        tally = self._dispatcher.tallies[replica.id]
        return ReplicaView.of(replica, node_state, lease, eligible, self._count_on(replica.id), tally)
