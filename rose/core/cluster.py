"""The scheduler's machine: ties membership, placement, versions and routing together.

`step(event, now_ns) -> effects`, to be carried out in order.  What a driver has to keep to:

- Carry out `DispatchTurn` by sending the turn, with all tokens kept so far, to `replica(...).url`; report the
  outcome of every attempt with exactly one of TurnFinished, TurnInterrupted, TurnRefused, unless StopTurn
  ended the attempt first.  Echo the attempt number.
- Send `Tick` no later than `next_deadline_ns()`, after the messages that already wait: else a scheduler
  that was itself held up takes its nodes for dead.
- Tell a node whose session is not `knows`n to register again.
- Turn ids are unique among live turns: an arrival with the id of a live turn is ignored.  Replaying the
  answer of a finished turn is the driver's affair.

A turn is queued or in flight until it is finished, failed or cancelled; then it is forgotten.  An attempt that
ends early for any reason puts its turn back into the queue, so no turn is lost.  Turns are never shed for
lack of capacity once accepted; new ones are refused (429) while more than `queue_max` wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from rose.core.cluster_view import ClusterView, JobView, NodeView, ReplicaView
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
from rose.core.events import (
    ClusterEvent,
    JobEnded,
    JobStepBegan,
    JobStepEnded,
    JobSubmitted,
    NodeHeartbeat,
    NodeLeft,
    NodeRegistered,
    ReplicaDrainRequested,
    ReplicaReport,
    Tick,
    TurnArrived,
    TurnCancelled,
    TurnFinished,
    TurnInterrupted,
    TurnProgressed,
    TurnRefused,
    VersionPublished,
)
from rose.core.membership import Change, Membership, Replica
from rose.core.placement import Lease, Placement
from rose.core.readings import NEVER
from rose.core.routing import Condition, Pick, Pins, Router, Want
from rose.core.turns import Turn, TurnCounts, TurnQueue
from rose.core.versions import JobVersions
from rose.units import NS_PER_MS, NS_PER_S, JobId, NodeId, ReplicaId, TrajectoryId, TurnId


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times and bounds; the first five come from `[scheduler]` of rose.toml."""

    stall_after_ns: int = 2 * NS_PER_S
    suspect_after_ns: int = 3 * NS_PER_S
    dead_after_ns: int = 6 * NS_PER_S
    turn_stall_ns: int = 120 * NS_PER_S
    """An attempt without a token for this long, counted while the gate is reported open, is moved."""
    queue_max: int = 4096
    """Most turns that wait, over all jobs."""
    turn_held_ns: int = 600 * NS_PER_S
    """An attempt without a token for this long is moved even from behind a closed gate."""
    attempts_max: int = 16
    """Attempts in a row without a token after which a turn fails."""
    backoff_ns: int = 250 * NS_PER_MS
    """How long a turn stays away from the replica that interrupted it; doubles with each fruitless attempt."""
    backoff_max_ns: int = 5 * NS_PER_S
    gate_patience_ns: int = 10 * NS_PER_S
    """A gate not seen open for this long counts against its replica (see `rose.core.routing`)."""
    lease_grace_ns: int = 30 * NS_PER_S
    """A leased replica may be unfit for this long before another takes its place."""
    forget_node_after_ns: int = 3600 * NS_PER_S
    pins_max: int = 100_000
    pin_ttl_ns: int = 1800 * NS_PER_S


@dataclass(slots=True)
class _Job:
    """One RL run."""

    spec: JobSubmitted
    versions: JobVersions
    router: Router
    queue: TurnQueue = field(default_factory=TurnQueue)
    turns: dict[TurnId, Turn] = field(default_factory=dict)
    rolling: bool = False
    told: dict[NodeId, tuple[str | None, int]] = field(default_factory=dict)
    """Session and RL step that each node was told last."""


@dataclass(slots=True)
class _Tally:
    """What the scheduler counts of one replica."""

    offer: tuple[bool, bool] | None = None
    """What placement goes by; a change calls for a new plan."""
    turns_finished: int = 0
    tokens: int = 0


class ClusterMachine:
    """Decides which replicas a job gets and where every turn runs."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._membership = Membership(
            settings.stall_after_ns,
            settings.suspect_after_ns,
            settings.dead_after_ns,
            settings.forget_node_after_ns,
            settings.gate_patience_ns,
        )
        self._placement = Placement(settings.lease_grace_ns)
        self._pins = Pins(settings.pins_max, settings.pin_ttl_ns)
        self._jobs: dict[JobId, _Job] = {}
        self._turns: dict[TurnId, Turn] = {}
        self._counts = TurnCounts()
        self._tallies: dict[ReplicaId, _Tally] = {}
        self._sweep_ns = NEVER
        """When to look for stalled attempts next."""
        self._replan = False
        self._touched: dict[JobId, None] = {}
        """Jobs whose queue may move in this step."""
        self._effects: list[ClusterEffect] = []

    # ---- for the driver ----------------------------------------------------------------------------

    def step(self, event: ClusterEvent, now_ns: int) -> list[ClusterEffect]:
        """Take in one event; answers what to do, in order."""
        self._effects = []
        self._handle(event, now_ns)
        self._settle(now_ns)
        return self._effects

    def next_deadline_ns(self) -> int:
        """The latest instant for the next Tick, or NEVER."""
        wakes = (job.queue.wake_ns for job in self._jobs.values())
        return min(
            self._membership.next_deadline_ns(),
            self._placement.next_deadline_ns(),
            self._pins.next_deadline_ns() or NEVER,
            self._sweep_ns,
            *wakes,
        )

    def knows(self, node: NodeId, session: str) -> bool:
        """Whether the node's session is registered; if not, tell the node to register."""
        return self._membership.knows(node, session)

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

    def counts(self) -> TurnCounts:
        """A copy of the turn counters."""
        return msgspec.structs.replace(self._counts)

    def job_view(self, job: JobId) -> JobView | None:
        """One job, None if it is not running."""
        known = self._jobs.get(job)
        return None if known is None else self._view_job(known)

    def view(self, now_ns: int) -> ClusterView:
        """Everything, for `rose status`."""
        nodes = tuple(
            NodeView(node.id, node.state, node.session, (now_ns - node.heard_ns) / NS_PER_MS)
            for node in self._membership.nodes.values()
        )
        replicas = tuple(self._view_replica(replica) for replica in self._membership.replicas.values())
        jobs = tuple(self._view_job(job) for job in self._jobs.values())
        return ClusterView(self.counts(), len(self._pins), nodes, replicas, jobs)

    # ---- events ------------------------------------------------------------------------------------

    def _handle(self, event: ClusterEvent, now_ns: int) -> None:
        match event:
            case TurnProgressed():
                self._progressed(event, now_ns)
            case TurnArrived():
                self._arrived(event, now_ns)
            case TurnFinished():
                self._finished(event)
            case TurnInterrupted():
                self._interrupted(event, now_ns)
            case TurnRefused():
                self._refused(event)
            case TurnCancelled():
                self._cancelled(event)
            case NodeHeartbeat():
                self._apply(self._membership.heartbeat(event, now_ns), now_ns)
            case NodeRegistered():
                self._apply(self._membership.register(event, now_ns), now_ns)
            case NodeLeft():
                self._apply(self._membership.leave(event), now_ns)
            case ReplicaDrainRequested():
                self._apply(self._membership.drain(event.replica, event.drain, now_ns), now_ns)
            case Tick():
                self._tick(now_ns)
            case JobSubmitted():
                self._submitted(event, now_ns)
            case JobEnded():
                self._job_ended(event)
            case JobStepBegan():
                self._step_began(event, now_ns)
            case JobStepEnded():
                self._step_ended(event)
            case VersionPublished():
                self._published(event, now_ns)
            case _:
                assert_never(event)

    def _tick(self, now_ns: int) -> None:
        self._apply(self._membership.expire(now_ns), now_ns)
        self._replan |= now_ns >= self._placement.next_deadline_ns()
        self._forget(self._pins.expire(now_ns))
        if now_ns >= self._sweep_ns:
            self._sweep(now_ns)
        for job in self._jobs.values():
            if now_ns >= job.queue.wake_ns:
                job.queue.wake()
                self._touch(job)

    def _sweep(self, now_ns: int) -> None:
        """Move attempts that make no progress.  Rare, so that progress itself costs next to nothing."""
        running = [turn for turn in self._turns.values() if turn.replica is not None]
        for turn in running:
            assert turn.replica is not None
            silent_ns = now_ns - turn.progress_ns
            open_ns = self._open_ns(turn.replica, now_ns) - turn.progress_open_ns
            if open_ns >= self._settings.turn_stall_ns or silent_ns >= self._settings.turn_held_ns:
                self._shun(turn, now_ns)
                self._move(turn, "turn_stalled", now_ns)
        self._sweep_ns = now_ns + self._settings.turn_stall_ns // 8 if self._counts.in_flight else NEVER

    # ---- turns -------------------------------------------------------------------------------------

    def _arrived(self, event: TurnArrived, now_ns: int) -> None:
        if event.turn in self._turns:
            return
        self._counts.arrived += 1
        job = self._jobs.get(event.job)
        if job is None:
            self._fail(event.turn, 404, "job_unknown", f"no job {event.job!r} is running")
            return
        if event.version_min is not None and event.version_min > job.versions.latest:
            text = f"version {event.version_min} is not published; the latest is {job.versions.latest}"
            self._fail(event.turn, 409, "version_unavailable", text)
            return
        resumes = self._pins.get(event.job, event.trajectory) is not None
        weight = event.prompt_tokens + event.tokens_max
        turn = Turn(event.turn, event.job, event.trajectory, weight, event.version_min, resumes)
        self._turns[turn.id] = job.turns[turn.id] = turn
        self._enqueue(job, turn)
        self._drain(job, now_ns)
        if turn.replica is None and self._counts.queued > self._settings.queue_max:
            self._close(job, turn)
            self._fail(turn.id, 429, "queue_full", f"{self._settings.queue_max} turns wait already")

    def _current(self, event: TurnProgressed | TurnFinished | TurnInterrupted | TurnRefused) -> Turn | None:
        """The turn, if the event is about its present attempt."""
        turn = self._turns.get(event.turn)
        if turn is None or turn.replica != event.replica or event.attempt not in (0, turn.attempt):
            return None
        return turn

    def _progressed(self, event: TurnProgressed, now_ns: int) -> None:
        turn = self._current(event)
        if turn is not None and event.tokens > turn.tokens:
            turn.tokens = event.tokens
            turn.progress_ns = now_ns
            turn.progress_open_ns = self._open_ns(event.replica, now_ns)

    def _finished(self, event: TurnFinished) -> None:
        turn = self._current(event)
        if turn is None:
            return
        turn.tokens = event.tokens
        self._tallies[event.replica].turns_finished += 1
        self._close(self._jobs[turn.job], turn)
        self._counts.finished += 1

    def _interrupted(self, event: TurnInterrupted, now_ns: int) -> None:
        turn = self._current(event)
        if turn is None:
            return
        turn.tokens = event.tokens
        self._shun(turn, now_ns)
        self._requeue(turn, now_ns)

    def _refused(self, event: TurnRefused) -> None:
        turn = self._current(event)
        if turn is not None:
            self._close(self._jobs[turn.job], turn)
            self._counts.failed += 1

    def _cancelled(self, event: TurnCancelled) -> None:
        turn = self._turns.get(event.turn)
        if turn is None:
            return
        if turn.replica is not None:
            self._effects.append(StopTurn(turn.id, turn.replica, "client_gone", turn.attempt))
        self._close(self._jobs[turn.job], turn)
        self._counts.cancelled += 1

    def _shun(self, turn: Turn, now_ns: int) -> None:
        """Keep the turn away from its replica for a while."""
        doublings = turn.fruitless if turn.tokens == 0 else 0
        backoff_ns = min(self._settings.backoff_max_ns, self._settings.backoff_ns << min(doublings, 16))
        turn.avoid, turn.avoid_until_ns = turn.replica, now_ns + backoff_ns

    def _move(self, turn: Turn, reason: str, now_ns: int) -> None:
        """End the present attempt ourselves; the turn goes on elsewhere."""
        assert turn.replica is not None
        self._effects.append(StopTurn(turn.id, turn.replica, reason, turn.attempt))
        self._requeue(turn, now_ns)

    def _requeue(self, turn: Turn, now_ns: int) -> None:
        job = self._jobs[turn.job]
        self._counts.interrupted += 1
        turn.fruitless = 0 if turn.tokens else turn.fruitless + 1
        if turn.fruitless >= self._settings.attempts_max:
            self._close(job, turn)
            text = f"{turn.fruitless} attempts in a row ended without a token"
            self._fail(turn.id, 503, "attempts_exhausted", text)
            return
        self._release(job, turn)
        turn.resumes = True
        self._enqueue(job, turn)

    def _enqueue(self, job: _Job, turn: Turn) -> None:
        job.queue.push(turn)
        self._counts.queued += 1
        self._touch(job)

    def _release(self, job: _Job, turn: Turn) -> None:
        """End the turn's attempt, or its wait."""
        if turn.replica is None:
            job.queue.discard(turn)
            self._counts.queued -= 1
            return
        job.router.end(turn.replica, turn.id)
        self._tallies[turn.replica].tokens += turn.tokens
        turn.replica, turn.tokens = None, 0
        self._counts.in_flight -= 1
        self._touch(job)

    def _close(self, job: _Job, turn: Turn) -> None:
        """The turn is over."""
        self._release(job, turn)
        del self._turns[turn.id], job.turns[turn.id]

    def _fail(self, turn: TurnId, status: int, code: str, text: str) -> None:
        self._counts.failed += 1
        self._effects.append(FailTurn(turn, status, code, text))

    def _drain(self, job: _Job, now_ns: int) -> None:
        """Dispatch what waits, as far as there is room."""
        if job.router.pop_opened():
            job.queue.wake()
        while job.router.has_room() and (turn := job.queue.head()) is not None:
            strictly = now_ns < turn.avoid_until_ns
            pin = self._pins.get(turn.job, turn.trajectory)
            pick = job.router.pick(Want(turn.weight, pin, turn.avoid, strictly, turn.version_min))
            if pick is None:
                job.queue.set_aside(turn, turn.avoid_until_ns if strictly else NEVER)
            else:
                self._dispatch(job, turn, pick, now_ns)

    def _dispatch(self, job: _Job, turn: Turn, pick: Pick, now_ns: int) -> None:
        self._release(job, turn)
        job.router.begin(pick.replica, turn.id, turn.weight)
        turn.replica, turn.tokens = pick.replica, 0
        turn.attempt += 1
        turn.progress_ns, turn.progress_open_ns = now_ns, self._open_ns(pick.replica, now_ns)
        self._counts.in_flight += 1
        self._counts.rerouted += turn.attempt > 1
        self._sweep_ns = min(self._sweep_ns, now_ns + self._settings.turn_stall_ns)
        why = pick.why if turn.attempt == 1 else f"rerouted:{pick.why}"
        self._effects.append(DispatchTurn(turn.id, pick.replica, turn.attempt, why))
        self._forget(self._pins.put(turn.job, turn.trajectory, pick.replica, now_ns))

    # ---- nodes and leases --------------------------------------------------------------------------

    def _apply(self, change: Change, now_ns: int) -> None:
        self._effects.extend(change.says)
        for replica, reason in change.gone:
            self._gone(replica, reason, now_ns)
        for replica in change.seen:
            self._seen(replica, now_ns)

    def _gone(self, replica: Replica, reason: str, now_ns: int) -> None:
        lease = self._placement.release(replica.id)
        if lease is not None:
            self._unlease(lease, reason, now_ns)
        self._forget(self._pins.drop_replica(replica.id))
        del self._tallies[replica.id]
        self._replan = True

    def _seen(self, replica: Replica, now_ns: int) -> None:
        offer = (replica.fit, replica.report.serving_kv_used_share is not None)
        tally = self._tallies.setdefault(replica.id, _Tally())
        if tally.offer != offer:
            tally.offer = offer
            self._replan = True
        lease = self._placement.leases.get(replica.id)
        if lease is not None:
            job = self._jobs[lease.job]
            job.router.update(replica.id, _condition(replica))
            self._move_misfits(job, [replica.id], now_ns)
            self._touch(job)

    def _settle(self, now_ns: int) -> None:
        if self._replan:
            self._replan = False
            quotas = {name: job.spec for name, job in self._jobs.items()}
            plan = self._placement.plan(quotas, self._membership.replicas, self._count_on, now_ns)
            for lease, reason in plan.revoked:
                self._unlease(lease, reason, now_ns)
            for lease in plan.granted:
                self._lease(lease)
        while self._touched:
            name = next(iter(self._touched))
            del self._touched[name]
            if (job := self._jobs.get(name)) is not None:
                self._drain(job, now_ns)

    def _lease(self, lease: Lease) -> None:
        job = self._jobs[lease.job]
        replica = self._membership.replicas[lease.replica]
        job.router.add(lease.replica, replica.serving, _condition(replica))
        self._effects.append(GrantLease(lease.node, lease.replica, lease.job, lease.lease))
        self._tell_step(job, lease.node)
        self._touch(job)

    def _unlease(self, lease: Lease, reason: str, now_ns: int) -> None:
        """Carry out the end of a lease: its turns move."""
        job = self._jobs[lease.job]
        for turn in job.router.turns_on(lease.replica):
            self._move(self._turns[turn], reason, now_ns)
        job.router.remove(lease.replica)
        self._effects.append(RevokeLease(lease.node, lease.replica, lease.job, lease.lease, reason))

    def _forget(self, trajectories: Iterable[TrajectoryId]) -> None:
        self._effects.extend(ForgetTrajectory(trajectory) for trajectory in trajectories)

    def _open_ns(self, replica: ReplicaId, now_ns: int) -> int:
        return self._membership.replicas[replica].open_ns(now_ns)

    def _count_on(self, replica: ReplicaId) -> int:
        lease = self._placement.leases.get(replica)
        return 0 if lease is None else self._jobs[lease.job].router.count_on(replica)

    # ---- jobs --------------------------------------------------------------------------------------

    def _submitted(self, event: JobSubmitted, now_ns: int) -> None:
        job = self._jobs.get(event.job)
        if job is None:
            versions = JobVersions(event.staleness_max)
            router = Router(event.trajectories_per_replica_max, versions.window)
            self._jobs[event.job] = _Job(event, versions, router)
        elif job.spec != event:
            job.spec = event
            job.versions.staleness_max = event.staleness_max
            self._reconfigure(job, now_ns)
        self._replan = True

    def _job_ended(self, event: JobEnded) -> None:
        job = self._jobs.get(event.job)
        if job is None:
            return
        for turn in list(job.turns.values()):
            if turn.replica is not None:
                self._effects.append(StopTurn(turn.id, turn.replica, "job_ended", turn.attempt))
            self._close(job, turn)
            self._fail(turn.id, 410, "job_ended", f"job {event.job!r} ended")
        for replica in self._placement.held_by(event.job):
            lease = self._placement.release(replica)
            assert lease is not None
            self._effects.append(RevokeLease(lease.node, replica, lease.job, lease.lease, "job_ended"))
        self._forget(self._pins.drop_job(event.job))
        del self._jobs[event.job]
        self._replan = True

    def _step_began(self, event: JobStepBegan, now_ns: int) -> None:
        job = self._jobs.get(event.job)
        if job is None:
            self._effects.append(
                Say("warning", "job_unknown", "a step of a job that is not running", event.job)
            )
            return
        if not job.versions.begin_step(event.rl_step, event.required_version):
            return
        job.rolling = True
        leases = (self._placement.leases[replica] for replica in self._placement.held_by(event.job))
        for lease in leases:
            self._tell_step(job, lease.node)
        self._reconfigure(job, now_ns)

    def _step_ended(self, event: JobStepEnded) -> None:
        job = self._jobs.get(event.job)
        if job is not None and job.versions.rl_step == event.rl_step:
            job.rolling = False

    def _published(self, event: VersionPublished, now_ns: int) -> None:
        job = self._jobs.get(event.job)
        if job is not None and job.versions.publish(event.version):
            self._reconfigure(job, now_ns)

    def _reconfigure(self, job: _Job, now_ns: int) -> None:
        """The job's cap or versions changed: attempts on a version that no longer fits move."""
        job.router.configure(job.spec.trajectories_per_replica_max, job.versions.window)
        self._move_misfits(job, job.router.busy(), now_ns)
        self._touch(job)

    def _move_misfits(self, job: _Job, replicas: Iterable[ReplicaId], now_ns: int) -> None:
        for replica in replicas:
            if not job.versions.window.admits(self._membership.replicas[replica].report.weight_version):
                for turn in job.router.turns_on(replica):
                    self._move(self._turns[turn], "version_unfit", now_ns)

    def _tell_step(self, job: _Job, node: NodeId) -> None:
        """Tell the node of the job's step, once a session."""
        rl_step = job.versions.rl_step
        if rl_step is None:
            return
        news = (self._membership.nodes[node].session, rl_step)
        if job.told.get(node) != news:
            job.told[node] = news
            self._effects.append(TellStep(node, job.spec.job, rl_step, job.versions.required))

    def _touch(self, job: _Job) -> None:
        self._touched[job.spec.job] = None

    # ---- views -------------------------------------------------------------------------------------

    def _view_job(self, job: _Job) -> JobView:
        replicas = [self._membership.replicas[replica] for replica in self._placement.held_by(job.spec.job)]
        return JobView(
            job=job.spec.job,
            model=job.spec.model,
            required_version=job.versions.required,
            latest_version=job.versions.latest,
            rl_step=job.versions.rl_step,
            rolling=job.rolling,
            staleness_max=job.spec.staleness_max,
            n_rl=job.spec.n_rl,
            n_serving_max=job.spec.n_serving_max,
            trajectories_per_replica_max=job.spec.trajectories_per_replica_max,
            turns_queued=len(job.queue),
            turns_in_flight=len(job.turns) - len(job.queue),
            replicas=tuple(self._view_replica(replica) for replica in replicas),
        )

    def _view_replica(self, replica: Replica) -> ReplicaView:
        lease = self._placement.leases.get(replica.id)
        return ReplicaView(
            replica=replica.id,
            node=replica.node,
            kind=replica.report.kind,
            state=replica.report.state,
            node_state=self._membership.nodes[replica.node].state,
            url=replica.report.url,
            weight_version=replica.report.weight_version,
            updating=replica.report.updating,
            drained=replica.drained,
            gate_open=replica.gate_open,
            gate_held=replica.gate_held,
            job=None if lease is None else lease.job,
            lease=None if lease is None else lease.lease,
            eligible=lease is not None and self._jobs[lease.job].router.is_open(replica.id),
            turns_in_flight=self._count_on(replica.id),
            turns_finished=self._tallies[replica.id].turns_finished,
            tokens=self._tallies[replica.id].tokens,
        )


def _condition(replica: Replica) -> Condition:
    report = replica.report
    return Condition(
        replica.takes_turns,
        report.weight_version,
        replica.gate_open,
        replica.gate_held,
        report.kv_budget_tokens,
    )
