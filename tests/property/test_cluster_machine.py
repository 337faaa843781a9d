"""Safety of the scheduler's machine under any sequence of events, and liveness once all has healed.

The model here plays the world: nodes with a network that loses, doubles, reorders and cuts off their
messages, a scheduler that is killed and started again from what it stored, and a gateway that carries out
dispatches.  It re-derives on its own which reports count, and checks each effect.

`make sim-chaos SEEDS=200` runs more seeds than `make test` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rose.core import events as ev
from rose.core.cluster import ClusterMachine, ClusterSettings
from rose.core.effects import ClusterEffect, DispatchTurn, FailTurn, GrantLease, RevokeLease, StopTurn
from rose.units import NS_PER_MS, NS_PER_S, JobId, NodeId, ReplicaId, TrajectoryId, TurnId, WeightVersion

S = NS_PER_S
SETTINGS = ClusterSettings(
    turn_stall_ns=8 * S, turn_held_ns=20 * S, queue_max=6, attempts_max=4, gate_patience_ns=3 * S,
    lease_grace_ns=4 * S, forget_node_after_ns=30 * S, pins_max=4, pin_ttl_ns=15 * S,
    failures_max=2, suspension_max_ns=8 * S,
)  # fmt: skip
# Names that are prefixes of each other, on purpose.
NODES = ("n", "n1", "n11")
JOBS = {
    "j": ev.JobSubmitted(JobId("j"), "m", 1, 1, staleness_max=0, trajectories_per_replica_max=2),
    "j1": ev.JobSubmitted(
        JobId("j1"), "m", 2, 2, staleness_max=1, trajectories_per_replica_max=3, trajectory_staleness_max=1
    ),
}
TRAJECTORIES = ("t-1", "t-12", "t-123", "t-2")
FATES = ("deliver", "deliver", "deliver", "double", "lose")
KINDS = {"ded": "dedicated", "opp": "opportunistic", "opp2": "opportunistic"}
"""Each node's replicas; the two opportunistic ones share a device."""

node_names = st.sampled_from(NODES)
job_names = st.sampled_from(sorted(JOBS))
asks = st.sampled_from((None, None, 0, 1))
"""How far above the required version a turn's `version_min` lies."""
picks = st.integers(0, 1 << 16)


@dataclass
class Host:
    """A node as it really is, and what the scheduler ought to believe of it."""

    name: str
    session: int = 0
    sequence: int = 0
    reports: dict[str, ev.ReplicaReport] = field(default_factory=dict)
    known_session: str = ""
    known_sequence: int = -1
    heard_ns: int = 0
    takes_turns: bool = False
    """As of the latest tick, it was heard lately enough for new turns."""
    retired: set[str] = field(default_factory=set)
    cut_off: bool = False
    held: list[ev.NodeRegistered | ev.NodeHeartbeat] = field(default_factory=list)
    """What it said while it was cut off: its socket sends that later."""

    def __post_init__(self) -> None:
        for suffix, kind in KINDS.items():
            name = ReplicaId(f"{self.name}-{suffix}")
            self.reports[name] = ev.ReplicaReport(
                name, kind, "ready", f"http://{name}", "m", WeightVersion(0), gate_open=True,
                serving_kv_used_share=None if kind == "dedicated" else 0.5,
                device="" if kind == "dedicated" else "gpu0",
            )  # fmt: skip


class ClusterWorld(RuleBasedStateMachine):
    """Drives a machine and checks every effect."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = ClusterMachine(SETTINGS)
        self.now = 0
        self.hosts = {name: Host(name) for name in NODES}
        self.network: list[ev.NodeRegistered | ev.NodeHeartbeat] = []
        self.delivered: list[ev.NodeRegistered | ev.NodeHeartbeat] = []
        self.believed: dict[str, ev.ReplicaReport] = {}
        self.owner: dict[str, str] = {}
        self.drained: set[str] = set()
        self.jobs: dict[str, ev.JobSubmitted] = {}
        self.required: dict[str, int] = {}
        self.latest: dict[str, int] = {}
        self.rl_step: dict[str, int] = {}
        self.leases: dict[str, GrantLease] = {}
        self.lease_ids: set[int] = set()
        self.turns: dict[TurnId, ev.TurnArrived] = {}
        self.attempts: dict[str, int] = {}
        self.running: dict[TurnId, ReplicaId] = {}
        self.ended: list[tuple[TurnId, ReplicaId, int]] = []
        """Attempts that are over, for late messages."""
        self.made = 0
        self.pins: dict[tuple[str, str], ReplicaId] = {}
        """Where trajectories ran last, as the journal tells."""
        self.born: dict[tuple[str, str], tuple[int, TurnId | None]] = {}
        """The oldest version that each trajectory ran on, and the turn that began it."""
        self.dispatched: dict[tuple[str, str], int] = {}
        """The same as the journal tells it, which knows of no attempt that brought no token."""
        self.finished = 0
        self.answered = 0
        """Turns that were over before the scheduler was started last."""
        self.journal: list[tuple[ev.ClusterEvent, int, list[ClusterEffect]]] = []

    # ---- the gateway: carries out effects and checks them --------------------------------------------

    def feed(self, event: ev.ClusterEvent) -> list[ClusterEffect]:
        effects = self.machine.step(event, self.now)
        self.journal.append((event, self.now, effects))
        for effect in effects:
            match effect:
                case DispatchTurn():
                    self.check_dispatch(effect)
                case StopTurn():
                    self.check_stop(effect)
                case FailTurn():
                    assert effect.turn not in self.running, "an attempt must be stopped first"
                    turn = self.turns.pop(effect.turn)
                    stale = effect.code == "trajectory_stale"
                    assert not stale or self.over_stale(turn.job, turn.trajectory)
                case GrantLease():
                    self.check_grant(effect)
                case RevokeLease():
                    assert self.leases.pop(effect.replica).lease == effect.lease
                    assert effect.replica not in self.running.values(), "turns must be moved first"
        return effects

    def check_dispatch(self, effect: DispatchTurn) -> None:
        turn = self.turns[effect.turn]
        assert effect.turn not in self.running, "a turn runs twice"
        attempt = self.attempts[effect.turn] = self.attempts.get(effect.turn, 0) + 1
        assert effect.attempt == attempt
        report = self.believed[effect.replica]
        job = self.jobs[turn.job]
        assert self.leases[effect.replica].job == turn.job
        assert report.state == "ready"
        assert not report.updating
        assert effect.replica not in self.drained
        assert self.hosts[self.owner[effect.replica]].takes_turns
        assert self.version_fits(turn, report), "a turn is sent to a wrong version"
        load = sum(replica == effect.replica for replica in self.running.values())
        assert load < job.trajectories_per_replica_max
        self.running[effect.turn] = effect.replica
        key = (str(turn.job), str(turn.trajectory))
        self.pins[key] = effect.replica
        if job.trajectory_staleness_max is None:
            assert effect.version is None
            return
        assert effect.version is not None
        assert effect.version == report.weight_version
        assert not self.over_stale(*key), "a turn of an over-stale trajectory runs"
        version, first = self.born.get(key, (effect.version, turn.turn))
        self.born[key] = min(version, effect.version), first
        self.dispatched[key] = min(self.dispatched.get(key, effect.version), effect.version)

    def over_stale(self, job: str, trajectory: str) -> bool:
        most, born = self.jobs[job].trajectory_staleness_max, self.born.get((job, trajectory))
        return most is not None and born is not None and self.required[job] - born[0] > most

    def version_fits(self, turn: ev.TurnArrived, report: ev.ReplicaReport) -> bool:
        required, staleness_max = self.required[turn.job], self.jobs[turn.job].staleness_max
        ceiling = self.latest[turn.job] if staleness_max else required
        floor = max(required - staleness_max, turn.version_min or 0)
        exact = turn.version_exact in {None, report.weight_version}
        return exact and floor <= report.weight_version <= ceiling

    def check_stop(self, effect: StopTurn) -> None:
        assert self.running.pop(effect.turn) == effect.replica
        assert self.attempts[effect.turn] == effect.attempt
        self.ended.append((effect.turn, effect.replica, effect.attempt))
        if effect.reason == "client_gone":
            del self.turns[effect.turn]

    def check_grant(self, effect: GrantLease) -> None:
        assert effect.lease not in self.lease_ids
        self.lease_ids.add(effect.lease)
        assert effect.replica not in self.leases
        self.leases[effect.replica] = effect
        assert self.owner[effect.replica] == effect.node
        assert self.believed[effect.replica].model == self.jobs[effect.job].model

    @initialize(jobs=st.sets(job_names, min_size=1), nodes=st.sets(node_names, min_size=1))
    def a_working_cluster(self, jobs: set[str], nodes: set[str]) -> None:
        for name in sorted(nodes):
            self.node_registers(name)
        self.network_delivers_all()
        for job in sorted(jobs):
            self.job_submits(job, 1, 1)

    # ---- nodes and their network ---------------------------------------------------------------------

    @rule(name=node_names)
    def node_registers(self, name: str) -> None:
        host = self.hosts[name]
        host.session += 1
        host.sequence = 0
        self.send(host, self.registration(host))

    def registration(self, host: Host) -> ev.NodeRegistered:
        return ev.NodeRegistered(NodeId(host.name), f"s{host.session}", tuple(host.reports.values()))

    def send(self, host: Host, message: ev.NodeRegistered | ev.NodeHeartbeat) -> None:
        (host.held if host.cut_off else self.network).append(message)

    @rule(name=node_names, cut_off=st.booleans(), order=st.randoms(use_true_random=False))
    def network_parts(self, name: str, cut_off: bool, order: Random) -> None:
        """A node is cut off, or is back: what it said meanwhile comes at once, in any order."""
        host = self.hosts[name]
        host.cut_off = cut_off
        if not cut_off:
            order.shuffle(host.held)
            self.network += host.held
            host.held.clear()

    @rule()
    def all_nodes_speak(self) -> None:
        for name in NODES:
            self.node_speaks(name)

    @rule(name=node_names)
    def node_speaks(self, name: str) -> None:
        host = self.hosts[name]
        host.sequence += 1
        beat = ev.NodeHeartbeat(NodeId(name), f"s{host.session}", host.sequence, tuple(host.reports.values()))
        self.send(host, beat)

    @precondition(lambda self: self.network)
    @rule(which=picks, fate=st.sampled_from(FATES))
    def network_moves(self, which: int, fate: str) -> None:
        message = self.network[which % len(self.network)]
        if fate != "double":
            self.network.remove(message)
        if fate != "lose":
            self.deliver(message)

    @precondition(lambda self: self.delivered)
    @rule(which=picks)
    def network_repeats_the_past(self, which: int) -> None:
        self.deliver(self.delivered[which % len(self.delivered)])

    @precondition(lambda self: self.network)
    @rule()
    def network_delivers_all(self) -> None:
        while self.network:
            message = self.network.pop(0)
            self.deliver(message)
            self.delivered.append(message)

    def deliver(self, message: ev.NodeRegistered | ev.NodeHeartbeat) -> None:
        host = self.hosts[message.node]
        if self.takes(host, message):
            host.heard_ns, host.takes_turns = self.now, True
            self.believed.update({report.replica: report for report in message.replicas})
            self.owner.update({report.replica: message.node for report in message.replicas})
        self.feed(message)
        known = self.machine.knows(message.node, message.session)
        over = known or self.machine.replaced(message.node, message.session)
        if message.session == f"s{host.session}" and not over:
            self.send(host, self.registration(host))  # as the node does when it is told so

    def takes(self, host: Host, message: ev.NodeRegistered | ev.NodeHeartbeat) -> bool:
        """Whether the scheduler ought to believe the message; keeps the sessions of the model."""
        if isinstance(message, ev.NodeHeartbeat):
            fresh = message.session == host.known_session and message.sequence > host.known_sequence
            if fresh:
                host.known_sequence = message.sequence
            return fresh
        if message.session in host.retired:
            return False
        if message.session == host.known_session:
            return host.known_sequence < 0
        if host.known_session:
            host.retired.add(host.known_session)
        host.known_session, host.known_sequence = message.session, -1
        return True

    @rule(name=node_names, really=st.sampled_from((False, False, True)))
    def node_leaves(self, name: str, really: bool) -> None:
        if not really:
            return
        host = self.hosts[name]
        session = f"s{host.session}"
        if session == host.known_session:
            host.retired.add(session)
            host.known_session = ""
            host.takes_turns = False
        self.feed(ev.NodeLeft(NodeId(name), session))

    @rule(
        name=node_names,
        suffix=st.sampled_from(sorted(KINDS)),
        state=st.sampled_from(("ready", "ready", "ready", "starting", "updating", "failed", "draining")),
        version=st.integers(0, 4),
        updating=st.sampled_from((False, False, True)),
        gate_open=st.sampled_from((True, False, None)),
        budget=st.sampled_from((0, 100, 400)),
        kv=st.sampled_from((None, 0.1, 0.9)),
    )
    def replica_changes(
        self, name: str, suffix: str, state: str, version: int, updating: bool,
        gate_open: bool | None, budget: int, kv: float | None,
    ) -> None:  # fmt: skip
        reports = self.hosts[name].reports
        replica = f"{name}-{suffix}"
        reports[replica] = msgspec.structs.replace(
            reports[replica], state=state, weight_version=WeightVersion(version), updating=updating,
            gate_open=gate_open, kv_budget_tokens=budget,
            serving_kv_used_share=None if suffix == "ded" else kv,
        )  # fmt: skip

    @rule(name=node_names, suffix=st.sampled_from(sorted(KINDS)), drain=st.booleans())
    def operator_drains(self, name: str, suffix: str, drain: bool) -> None:
        replica = ReplicaId(f"{name}-{suffix}")
        known = self.machine.replica(replica) is not None
        if not drain:
            self.drained.discard(replica)
        elif known:
            self.drained.add(replica)
        self.feed(ev.ReplicaDrainRequested(replica, drain))

    @rule(ms=st.sampled_from((0, 100, 500, 1000, 1000, 2500, 7000, 31000)))
    def time_passes(self, ms: int) -> None:
        self.now += ms * NS_PER_MS
        for host in self.hosts.values():
            host.takes_turns &= self.now - host.heard_ns < SETTINGS.stall_after_ns
            if self.now - host.heard_ns >= SETTINGS.forget_node_after_ns:
                # Forgotten: even an old session may register again, as after a restart of the scheduler.
                host.known_session, host.known_sequence, host.retired = "", -1, set()
        self.feed(ev.Tick())

    @rule(really=st.sampled_from((False, False, True)))
    def scheduler_is_killed(self, really: bool) -> None:
        """All that is left is what was stored; clients send turns that were not answered again."""
        if not really:
            return
        self.check_replay()
        self.machine, self.journal = ClusterMachine(SETTINGS), []
        for host in self.hosts.values():
            host.known_session, host.known_sequence, host.retired = "", -1, set()
            host.takes_turns = False
        for forgotten in (self.believed, self.owner, self.leases, self.attempts, self.running):
            forgotten.clear()
        self.lease_ids.clear()
        self.ended.clear()
        unanswered = list(self.turns.values())
        self.answered = self.made - len(unanswered)
        for job, spec in self.jobs.items():
            self.feed(spec)
            self.feed(ev.VersionPublished(spec.job, WeightVersion(self.latest[job])))
            if self.rl_step[job]:
                step = ev.JobStepBegan(spec.job, self.rl_step[job], WeightVersion(self.required[job]))
                self.feed(step)
        for drained in sorted(self.drained):
            self.feed(ev.ReplicaDrainRequested(ReplicaId(drained), True, restored=True))
        self.born = {key: (version, None) for key, version in self.dispatched.items()}
        for (name, trajectory), replica in self.pins.items():
            version = self.dispatched.get((name, trajectory))
            born = None if version is None else WeightVersion(version)
            self.feed(ev.TrajectoryPinned(JobId(name), TrajectoryId(trajectory), replica, born))
        for turn in unanswered:
            self.feed(turn)

    # ---- jobs ----------------------------------------------------------------------------------------

    @rule(job=job_names, n_rl=st.integers(0, 2), n_serving=st.integers(0, 2))
    def job_submits(self, job: str, n_rl: int, n_serving: int) -> None:
        spec = msgspec.structs.replace(JOBS[job], n_rl=n_rl, n_serving_max=n_serving)
        if job not in self.jobs:
            self.required[job] = self.latest[job] = self.rl_step[job] = 0
        self.jobs[job] = spec
        self.feed(spec)

    @precondition(lambda self: self.jobs)
    @rule(which=picks, really=st.sampled_from((False, False, True)))
    def job_ends(self, which: int, really: bool) -> None:
        if not really:
            return
        job = sorted(self.jobs)[which % len(self.jobs)]
        self.feed(ev.JobEnded(JobId(job)))
        del self.jobs[job]
        for told in (self.pins, self.born, self.dispatched):
            for key in [key for key in told if key[0] == job]:
                del told[key]
        assert not [turn for turn in self.turns.values() if turn.job == job]

    @precondition(lambda self: self.jobs)
    @rule(which=picks, jump=st.integers(0, 1), again=st.booleans())
    def job_steps(self, which: int, jump: int, again: bool) -> None:
        job = sorted(self.jobs)[which % len(self.jobs)]
        if not again or not self.rl_step[job]:
            self.rl_step[job] += 1
            self.required[job] += jump
            self.latest[job] = max(self.latest[job], self.required[job])
        step = ev.JobStepBegan(JobId(job), self.rl_step[job], WeightVersion(self.required[job]))
        self.feed(step)

    @precondition(lambda self: self.jobs)
    @rule(which=picks)
    def version_is_published(self, which: int) -> None:
        job = sorted(self.jobs)[which % len(self.jobs)]
        self.latest[job] += 1
        self.feed(ev.VersionPublished(JobId(job), WeightVersion(self.latest[job])))

    # ---- turns ---------------------------------------------------------------------------------------

    @rule(
        job=job_names, trajectories=st.lists(st.sampled_from(TRAJECTORIES), min_size=1, max_size=5), asks=asks
    )
    def turns_arrive(self, job: str, trajectories: list[str], asks: int | None) -> None:
        for trajectory in trajectories:
            self.turn_arrives(job, trajectory, asks)

    def turn_arrives(self, job: str, trajectory: str, asks: int | None) -> None:
        self.made += 1
        name = TurnId(f"x{self.made}")
        version_min = None if asks is None else WeightVersion(self.required.get(job, 0) + asks)
        turn = ev.TurnArrived(name, JobId(job), TrajectoryId(trajectory), 60, 20, version_min=version_min)
        self.turns[name] = turn
        self.feed(turn)
        if name in self.turns:
            assert self.feed(turn) == [], "a resend of a live turn changes nothing"

    def some_running(self, which: int) -> tuple[TurnId, ReplicaId, int]:
        turn = sorted(self.running)[which % len(self.running)]
        return turn, self.running[turn], self.attempts[turn]

    @precondition(lambda self: self.running)
    @rule(which=picks)
    def turn_finishes(self, which: int) -> None:
        turn, replica, attempt = self.some_running(which)
        del self.running[turn], self.turns[turn]
        self.finished += 1
        self.ended.append((turn, replica, attempt))
        self.feed(ev.TurnFinished(turn, replica, 7, attempt))

    @precondition(lambda self: self.running)
    @rule(which=picks, tokens=st.integers(1, 9))
    def turn_progresses(self, which: int, tokens: int) -> None:
        turn, replica, attempt = self.some_running(which)
        self.feed(ev.TurnProgressed(turn, replica, tokens, attempt))

    @precondition(lambda self: self.running)
    @rule(which=picks, tokens=st.sampled_from((0, 0, 3)), failed=st.booleans())
    def turn_is_interrupted(self, which: int, tokens: int, failed: bool) -> None:
        turn, replica, attempt = self.some_running(which)
        del self.running[turn]
        self.ended.append((turn, replica, attempt))
        self.brought(turn, attempt, tokens)
        effects = self.feed(ev.TurnInterrupted(turn, replica, "cut", tokens, attempt, failed))
        back = [e for e in effects if isinstance(e, DispatchTurn) and (e.turn, e.replica) == (turn, replica)]
        assert not back, "a turn goes straight back to where it was interrupted"

    @precondition(lambda self: self.running)
    @rule(which=picks, tokens=st.sampled_from((0, 3)))
    def budget_is_cut(self, which: int, tokens: int) -> None:
        """Serving takes memory back: all that runs on a replica ends at once."""
        _, replica, _ = self.some_running(which)
        for turn in sorted(turn for turn, where in self.running.items() if where == replica):
            attempt = self.attempts[turn]
            del self.running[turn]
            self.ended.append((turn, replica, attempt))
            self.brought(turn, attempt, tokens)
            self.feed(ev.TurnInterrupted(turn, replica, "budget_cut", tokens, attempt))

    def brought(self, turn: TurnId, attempt: int, tokens: int) -> None:
        """An attempt ended early: without a token its turn has not begun a trajectory."""
        arrived = self.turns[turn]
        key = (str(arrived.job), str(arrived.trajectory))
        if attempt == 1 and not tokens and self.born.get(key, (0, None))[1] == turn:
            del self.born[key]

    @precondition(lambda self: self.running)
    @rule(which=picks)
    def turn_is_refused(self, which: int) -> None:
        turn, replica, attempt = self.some_running(which)
        del self.running[turn], self.turns[turn]
        self.feed(ev.TurnRefused(turn, replica, "too_long", attempt))

    @precondition(lambda self: self.turns)
    @rule(which=picks)
    def client_goes_away(self, which: int) -> None:
        turn = sorted(self.turns)[which % len(self.turns)]
        if turn not in self.running:
            del self.turns[turn]
        self.feed(ev.TurnCancelled(turn))
        assert turn not in self.turns

    @precondition(lambda self: self.ended)
    @rule(which=picks, kind=st.sampled_from(("finished", "interrupted", "progressed")))
    def late_message(self, which: int, kind: str) -> None:
        turn, replica, attempt = self.ended[which % len(self.ended)]
        before = self.machine.counts()
        late: dict[str, ev.ClusterEvent] = {
            "finished": ev.TurnFinished(turn, replica, 1, attempt),
            "interrupted": ev.TurnInterrupted(turn, replica, "late", 1, attempt),
            "progressed": ev.TurnProgressed(turn, replica, 1, attempt),
        }
        assert self.feed(late[kind]) == []
        assert self.machine.counts() == before

    # ---- what always holds ---------------------------------------------------------------------------

    @invariant()
    def no_turn_is_lost(self) -> None:
        counts = self.machine.counts()
        assert counts.in_flight == len(self.running)
        assert counts.queued == len(self.turns) - len(self.running)
        over = counts.finished + counts.failed + counts.cancelled
        assert counts.arrived == over + counts.queued + counts.in_flight == self.made - self.answered

    @invariant()
    def no_turn_runs_on_a_version_that_no_longer_fits(self) -> None:
        for turn, replica in self.running.items():
            assert self.version_fits(self.turns[turn], self.believed[replica])

    @invariant()
    def load_is_what_was_sent(self) -> None:
        for name in NODES:
            for replica, count in self.machine.turns_in_flight(NodeId(name)).items():
                assert count == sum(where == replica for where in self.running.values())

    @invariant()
    def leases_are_within_what_is_asked_and_lent_once(self) -> None:
        devices = [(lease.node, "gpu0") for lease in self.leases.values() if "opp" in lease.replica]
        assert len(set(devices)) == len(devices), "a serving device is lent twice"
        for job, spec in self.jobs.items():
            held = [lease.replica for lease in self.leases.values() if lease.job == job]
            assert sum("ded" in replica for replica in held) <= spec.n_rl
            assert sum("opp" in replica for replica in held) <= spec.n_serving_max
            view = self.machine.job_view(JobId(job))
            assert view is not None
            assert sorted(replica.replica for replica in view.replicas) == sorted(held)

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.machine.view(self.now).pins <= SETTINGS.pins_max
        assert self.machine.next_deadline_ns() >= 0

    @invariant()
    def no_turn_of_an_over_stale_trajectory_lives(self) -> None:
        for turn in self.turns.values():
            assert not self.over_stale(turn.job, turn.trajectory)

    # ---- in the end ----------------------------------------------------------------------------------

    def teardown(self) -> None:
        self.heal()
        self.check_replay()

    def check_replay(self) -> None:
        other = ClusterMachine(SETTINGS)
        for event, now, effects in self.journal:
            assert other.step(event, now) == effects, "a replay differs"

    def heal(self) -> None:
        """All nodes come back healthy; in the end no turn is left."""
        self.network.clear()
        for host in self.hosts.values():
            host.cut_off = False
            host.held.clear()
        for replica in sorted(self.drained):
            self.drained.discard(replica)
            self.feed(ev.ReplicaDrainRequested(ReplicaId(replica), False))
        for job in JOBS:
            self.job_submits(job, 1, 1)
            self.required[job] = self.latest[job]
            self.job_steps(sorted(self.jobs).index(job) if job in self.jobs else 0, 0, False)
        for name in NODES:
            self.node_registers(name)
        for _ in range(40):
            for name, host in self.hosts.items():
                for replica, report in host.reports.items():
                    lease = self.leases.get(replica)
                    version = report.weight_version if lease is None else self.required[lease.job]
                    host.reports[replica] = msgspec.structs.replace(
                        report, state="ready", updating=False, gate_open=True,
                        weight_version=WeightVersion(version),
                        serving_kv_used_share=None if "ded" in replica else 0.5,
                    )  # fmt: skip
                self.node_speaks(name)
            self.network_delivers_all()
            self.time_passes(1000)
            while self.running:
                self.turn_finishes(0)
        assert not self.turns, f"{len(self.turns)} turns are left though all is well"


KNOBS = {
    "state": ("ready", "ready", "ready", "ready", "starting", "updating", "failed", "draining"),
    "updating": (False, False, False, True),
    "gate_open": (True, False, None),
    "budget": (0, 100, 400),
    "kv": (None, 0.1, 0.9),
}


def chaos(seed: int, steps: int) -> ClusterWorld:
    """A long run with odds that keep the cluster busy, which rules chosen evenly seldom do."""
    rng = Random(seed)
    world = ClusterWorld()
    version = WeightVersion(0)

    def change() -> None:
        knobs = {knob: rng.choice(values) for knob, values in KNOBS.items()}
        lag = rng.choice((0, 0, 0, 0, 1, -1))
        world.replica_changes(
            rng.choice(NODES), rng.choice(list(KINDS)), version=max(0, version - lag), **knobs
        )

    def new_version() -> None:
        nonlocal version
        version = WeightVersion(version + 1)
        for job in sorted(world.jobs):
            while world.latest[job] < version:
                world.version_is_published(sorted(world.jobs).index(job))
            if rng.random() < 0.7:
                world.job_steps(sorted(world.jobs).index(job), int(world.required[job] < version), False)

    def arrive() -> None:
        trajectories = rng.choices(TRAJECTORIES, k=rng.randint(1, 4))
        world.turns_arrive(rng.choice(list(JOBS)), trajectories, rng.choice((None, None, None, 0, 1)))

    def on_running(act: Callable[[int], None]) -> Callable[[], None]:
        return lambda: act(rng.randrange(1 << 16)) if world.running else None

    odds: list[tuple[int, Callable[[], None]]] = [
        (30, arrive),
        (20, on_running(world.turn_finishes)),
        (8, on_running(lambda which: world.turn_progresses(which, rng.randint(1, 9)))),
        (
            12,
            on_running(
                lambda which: world.turn_is_interrupted(which, rng.choice((0, 0, 3)), rng.random() < 0.3)
            ),
        ),
        (1, on_running(world.turn_is_refused)),
        (2, lambda: world.client_goes_away(rng.randrange(1 << 16)) if world.turns else None),
        (6, lambda: world.late_message(rng.randrange(1 << 16), "finished") if world.ended else None),
        (6, lambda: world.late_message(rng.randrange(1 << 16), "interrupted") if world.ended else None),
        (8, change),
        (30, world.all_nodes_speak),
        (
            40,
            lambda: world.network_moves(rng.randrange(1 << 16), rng.choice(FATES)) if world.network else None,
        ),
        (20, world.network_delivers_all),
        (2, lambda: world.network_parts(rng.choice(NODES), True, rng)),
        (4, lambda: world.network_parts(rng.choice(NODES), False, rng)),
        (1, lambda: world.scheduler_is_killed(True)),
        (3, on_running(lambda which: world.budget_is_cut(which, rng.choice((0, 3))))),
        (3, lambda: world.network_repeats_the_past(rng.randrange(1 << 16)) if world.delivered else None),
        (30, lambda: world.time_passes(rng.choice((100, 300, 1000)))),
        (2, lambda: world.time_passes(rng.choice((2500, 7000)))),
        (1, lambda: world.node_registers(rng.choice(NODES))),
        (1, lambda: world.node_leaves(rng.choice(NODES), True)),
        (2, lambda: world.operator_drains(rng.choice(NODES), rng.choice(list(KINDS)), rng.random() < 0.3)),
        (2, new_version),
        (1, lambda: world.job_submits(rng.choice(list(JOBS)), rng.randint(0, 2), rng.randint(0, 2))),
    ]
    world.a_working_cluster(set(JOBS), set(NODES))
    weights, acts = [weight for weight, _ in odds], [act for _, act in odds]
    for act in rng.choices(acts, weights, k=steps):
        act()
        world.no_turn_is_lost()
        world.no_turn_runs_on_a_version_that_no_longer_fits()
        world.load_is_what_was_sent()
        world.leases_are_within_what_is_asked_and_lent_once()
        world.memory_is_bounded()
    return world


@pytest.mark.parametrize("seed", range(int(os.environ.get("ROSE_CHAOS_SEEDS", "200"))))
def test_chaos_then_healing(seed: int) -> None:
    world = chaos(seed, steps=400)
    world.teardown()
    assert world.finished > 0


ClusterWorld.TestCase.settings = settings(
    max_examples=50, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestClusterWorld = ClusterWorld.TestCase
