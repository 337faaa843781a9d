"""`rose bench cluster`: what one core of scheduling costs, and how well turns are placed.

The scheduler's machine, the one that `rose scheduler` drives, meets a large cluster in virtual time: only the
calls into it are timed, in CPU time of their thread.  HTTP, SQLite and ZeroMQ are not part of it; decoding of
heartbeats and encoding of their answers are.  Speeds are taken in ten slices: the best of them is what the
code can do on this machine, the median what it did beside all else that ran there.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from random import Random
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rose import wire
from rose.core.cluster import ClusterMachine, ClusterSettings
from rose.core.effects import ClusterEffect, DispatchTurn, FailTurn, StopTurn
from rose.core.events import (
    ClusterEvent,
    JobStepBegan,
    NodeHeartbeat,
    Tick,
    TrajectoryEnded,
    TurnArrived,
    TurnFinished,
    TurnInterrupted,
    TurnProgressed,
)
from rose.units import NS_PER_S, ReplicaId, TurnId, WeightVersion
from rose_daemon.bench.cluster_load import JOB, ClusterLoad, Episodes, Hosts, Trajectory
from rose_daemon.harness.stats import rounded
from rose_daemon.harness.summary import head

DECISIONS_PER_S_GOAL = 20_000
P99_MS_GOAL = 1.0
HEARTBEAT_CORE_SHARE_GOAL = 0.2
PREFIX_HIT_SHARE_GOAL = 0.95
LOAD_SPREAD_GOAL = 1.5

_WARM_UP_SHARE = 1 / 3
_SLICES = 10
_DECIDING = ("TurnArrived", "TurnFinished", "TurnInterrupted", "TrajectoryEnded")
_PROGRESS_NS = 2 * NS_PER_S
_SAMPLE_NS = NS_PER_S // 2


@dataclass(slots=True)
class Costs:
    """What calls into the machine took, by kind of event."""

    cpu_ns: Counter[str] = field(default_factory=Counter)
    """CPU time."""
    calls: Counter[str] = field(default_factory=Counter)
    decision_ns: list[int] = field(default_factory=list)
    """CPU time of each call that sent a turn somewhere."""
    why: Counter[str] = field(default_factory=Counter)
    """Decisions by the rule that made them."""

    def add(self, other: Costs) -> None:
        """Count the other's calls as well."""
        self.cpu_ns += other.cpu_ns
        self.calls += other.calls
        self.decision_ns += other.decision_ns
        self.why += other.why

    def per_s(self) -> float:
        """Decisions a second of CPU time; each pays for its turn's arrival, end and interruptions."""
        return sum(self.why.values()) / sum(self.cpu_ns[kind] for kind in _DECIDING) * 1e9


@dataclass(slots=True)
class Placed:
    """Where turns and their prefixes met."""

    hit_tokens: int = 0
    ideal_tokens: int = 0
    """Tokens that a turn's trajectory has had computed before, wherever."""
    work_ns: Counter[ReplicaId] = field(default_factory=Counter)
    """Engine time by replica."""
    spreads: list[float] = field(default_factory=list)
    """Turns in flight on the fullest replica over their mean, sampled in virtual time."""


@dataclass(slots=True)
class _Running:
    """A turn that was accepted."""

    trajectory: Trajectory
    output_tokens: int
    attempt: int = 0
    replica: ReplicaId | None = None


class ClusterBench:
    """The cluster around one machine."""

    def __init__(self, load: ClusterLoad) -> None:
        rng = Random(load.seed)
        self.load = load
        self._rng = rng
        self._episodes = Episodes(load, rng)
        self.hosts = Hosts(load, rng)
        self.machine = ClusterMachine(ClusterSettings(queue_max=load.trajectories))
        self._now_ns = 0
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._entries = 0
        self._turns: dict[TurnId, _Running] = {}
        self._in_flight: Counter[ReplicaId] = Counter()
        self._made = 0
        self.decisions = 0
        self.costs, self.placed = Costs(), Placed()
        self.slices_per_s: list[float] = []
        """Decisions a second in each tenth of the measurement."""

    def run(self) -> None:
        """Begin, warm up, measure."""
        self._begin()
        self._until(int(self.load.decisions * _WARM_UP_SHARE))
        self.placed = Placed()
        whole = Costs()
        # Most of what the garbage collector would look at belongs to the benchmark.
        collects = gc.isenabled()
        gc.disable()
        try:
            for _ in range(_SLICES):
                self.costs = Costs()
                self._until(self.decisions + max(1, self.load.decisions // _SLICES))
                self.slices_per_s.append(self.costs.per_s())
                whole.add(self.costs)
        finally:
            if collects:
                gc.enable()
        self.costs = whole

    def _begin(self) -> None:
        for number in range(self.load.replicas):
            self._step(self.hosts.registration(number))
        self._step(self.hosts.job())
        self._step(JobStepBegan(JOB, 0, WeightVersion(0)))
        period_ns = int(self.load.heartbeat_s * NS_PER_S)
        for number in range(self.load.replicas):
            self._at(self._rng.randrange(period_ns), partial(self._beat, number))
        for _ in range(self.load.trajectories):
            self._at(self._rng.randrange(10 * NS_PER_S), partial(self._arrive, self._episodes.begin()))
        self._at(0, self._sample)

    def _until(self, decisions: int) -> None:
        while self.decisions < decisions:
            due_ns, _, act = heapq.heappop(self._agenda)
            while (deadline_ns := self.machine.next_deadline_ns()) <= due_ns:
                self._now_ns = max(self._now_ns, deadline_ns)
                self._step(Tick())
            self._now_ns = due_ns
            act()

    def _at(self, delay_ns: int, act: Callable[[], None]) -> None:
        self._entries += 1
        heapq.heappush(self._agenda, (self._now_ns + delay_ns, self._entries, act))

    # ---- calls into the machine ----------------------------------------------------------------------

    def _step(self, event: ClusterEvent) -> None:
        began_ns = time.thread_time_ns()
        effects = self.machine.step(event, self._now_ns)
        cpu_ns = time.thread_time_ns() - began_ns
        self._note(type(event).__name__, cpu_ns)
        self._perform(effects, cpu_ns)

    def _beat(self, number: int) -> None:
        """A heartbeat, as it comes over the wire."""
        beat = self.hosts.heartbeat(number)
        data = wire.pack(wire.Heartbeat(beat.node, beat.session, beat.sequence, beat.replicas))
        cpu_ns = time.thread_time_ns()
        message = wire.unpack_to_scheduler(data)
        assert isinstance(message, wire.Heartbeat), message
        event = NodeHeartbeat(message.node, message.session, message.sequence, message.replicas)
        effects = self.machine.step(event, self._now_ns)
        ack = wire.HeartbeatAck(message.sequence, self.machine.turns_in_flight(message.node))
        wire.pack(ack)
        for step in self.machine.steps(message.node):
            wire.pack(wire.Step(step.job, step.rl_step, step.required_version))
        self._note("NodeHeartbeat", time.thread_time_ns() - cpu_ns)
        self._perform(effects, None)
        self._at(int(self.load.heartbeat_s * NS_PER_S), partial(self._beat, number))

    def _note(self, kind: str, cpu_ns: int) -> None:
        self.costs.cpu_ns[kind] += cpu_ns
        self.costs.calls[kind] += 1

    def _perform(self, effects: list[ClusterEffect], cpu_ns: int | None) -> None:
        """Play the gateway."""
        sent = 0
        for effect in effects:
            match effect:
                case DispatchTurn():
                    sent += 1
                    self._dispatch(effect)
                case StopTurn():
                    self._let_go(self._turns[effect.turn])
                case FailTurn():
                    self._turns.pop(effect.turn, None)
                case _:
                    pass
        if sent and cpu_ns is not None:
            self.costs.decision_ns.append(cpu_ns)

    # ---- the life of a trajectory --------------------------------------------------------------------

    def _arrive(self, trajectory: Trajectory) -> None:
        self._made += 1
        turn = TurnId(f"x-{self._made}")
        self._turns[turn] = _Running(trajectory, self._episodes.output_tokens())
        event = TurnArrived(
            turn, JOB, trajectory.id, trajectory.context_tokens, 1024, group=trajectory.group, task="game"
        )
        self._step(event)

    def _dispatch(self, effect: DispatchTurn) -> None:
        turn = self._turns[effect.turn]
        trajectory = turn.trajectory
        turn.attempt, turn.replica = effect.attempt, effect.replica
        self.decisions += 1
        self.costs.why[effect.why] += 1
        self._in_flight[effect.replica] += 1
        held = min(self.hosts.caches[effect.replica].use(trajectory.id), trajectory.context_tokens)
        if trajectory.turns_done and effect.attempt == 1:
            self.placed.ideal_tokens += trajectory.context_tokens - self.load.observation_tokens
            self.placed.hit_tokens += held
        takes_ns = self._episodes.turn_ns(trajectory.context_tokens - held, turn.output_tokens)
        self.placed.work_ns[effect.replica] += takes_ns
        if self._rng.random() < self.load.interrupted_share:
            self._at(takes_ns // 2, partial(self._interrupt, effect))
        else:
            self._at(takes_ns, partial(self._finish, effect))
        if takes_ns > _PROGRESS_NS:
            self._at(_PROGRESS_NS, partial(self._progress, effect, 1))

    def _progress(self, effect: DispatchTurn, times: int) -> None:
        if self._is_over(effect):
            return
        tokens = times * int(self.load.decode_tokens_per_s * _PROGRESS_NS / NS_PER_S)
        self._step(TurnProgressed(effect.turn, effect.replica, tokens, effect.attempt))
        self._at(_PROGRESS_NS, partial(self._progress, effect, times + 1))

    def _interrupt(self, effect: DispatchTurn) -> None:
        if self._is_over(effect):
            return
        self._let_go(self._turns[effect.turn])
        self._step(TurnInterrupted(effect.turn, effect.replica, "budget_cut", 1, effect.attempt))

    def _finish(self, effect: DispatchTurn) -> None:
        if self._is_over(effect):
            return
        turn = self._turns.pop(effect.turn)
        trajectory = turn.trajectory
        self._let_go(turn)
        self._step(TurnFinished(effect.turn, effect.replica, turn.output_tokens, effect.attempt))
        length = trajectory.context_tokens + turn.output_tokens
        self.hosts.caches[effect.replica].keep(trajectory.id, length)
        trajectory.context_tokens = length + self.load.observation_tokens
        trajectory.turns_done += 1
        trajectory.turns_left -= 1
        if trajectory.turns_left == 0:
            self._step(TrajectoryEnded(JOB, trajectory.id))
            self.hosts.caches[effect.replica].drop(trajectory.id)
            trajectory = self._episodes.begin()
        self._at(self._episodes.environment_ns(), partial(self._arrive, trajectory))

    def _is_over(self, effect: DispatchTurn) -> bool:
        turn = self._turns.get(effect.turn)
        return turn is None or turn.attempt != effect.attempt or turn.replica is None

    def _let_go(self, turn: _Running) -> None:
        if turn.replica is not None:
            self._in_flight[turn.replica] -= 1
            turn.replica = None

    def _sample(self) -> None:
        mean = sum(self._in_flight.values()) / self.load.replicas
        if mean:
            self.placed.spreads.append(max(self._in_flight.values()) / mean)
        self._at(_SAMPLE_NS, self._sample)


def measure(load: ClusterLoad) -> dict[str, Any]:
    """Run the benchmark; its report."""
    started_at = datetime.now(UTC)
    bench = ClusterBench(load)
    bench.run()
    return head("bench cluster", started_at) | {"setup": load._asdict()} | _figures(bench)


def _figures(bench: ClusterBench) -> dict[str, Any]:
    costs, placed = bench.costs, bench.placed
    per_s = max(bench.slices_per_s)
    p50_ms, p99_ms = (float(ns) / 1e6 for ns in np.percentile(costs.decision_ns, (50, 99)))
    work = [placed.work_ns[report.replica] for report in bench.hosts.reports]
    beat_ns = costs.cpu_ns["NodeHeartbeat"] / max(1, costs.calls["NodeHeartbeat"])
    core_share = beat_ns * len(work) / (bench.load.heartbeat_s * NS_PER_S)
    hit_share = placed.hit_tokens / max(1, placed.ideal_tokens)
    spread = float(np.mean(placed.spreads)) if placed.spreads else 0.0
    figures = {
        "decisions_per_s": round(per_s),
        "decisions_per_s_median": round(float(np.median(bench.slices_per_s))),
        "decision_ms": {"p50": rounded(p50_ms, 4), "p99": rounded(p99_ms, 4)},
        "heartbeat_core_share": rounded(core_share, 4),
        "prefix_hit_share": rounded(hit_share, 4),
        "in_flight_max_over_mean": rounded(spread),
        "work_max_over_mean": rounded(max(work) * len(work) / sum(work)),
    }
    goals = {
        "decisions_per_s": per_s >= DECISIONS_PER_S_GOAL,
        "decision_ms": p99_ms <= P99_MS_GOAL,
        "heartbeat_core_share": core_share <= HEARTBEAT_CORE_SHARE_GOAL,
        "prefix_hit_share": hit_share >= PREFIX_HIT_SHARE_GOAL,
        "in_flight_max_over_mean": 0 < spread <= LOAD_SPREAD_GOAL,
    }
    counts = bench.machine.counts()
    return figures | {
        "cpu_us_by_event": {
            kind: rounded(costs.cpu_ns[kind] / calls / 1e3, 2) for kind, calls in costs.calls.items()
        },
        "events": dict(costs.calls),
        "decisions_by_rule": dict(costs.why.most_common()),
        "turns": {"arrived": counts.arrived, "finished": counts.finished, "failed": counts.failed},
        "goals": goals,
        "ok": all(goals.values()) and counts.failed == 0,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """The figures that have goals, and where the time went."""
    figures = Table("", "measured", "goal", "met", title="rose bench cluster", title_justify="left")
    met = {True: "yes", False: "NO"}
    goals = report["goals"]
    rows = {
        "decisions_per_s": (
            f"{report['decisions_per_s']:,}, median {report['decisions_per_s_median']:,}",
            f">= {DECISIONS_PER_S_GOAL:,}",
        ),
        "decision_ms": (f"p99 {report['decision_ms']['p99']:.3f}", f"p99 <= {P99_MS_GOAL:g}"),
        "heartbeat_core_share": (
            f"{report['heartbeat_core_share']:.1%}",
            f"<= {HEARTBEAT_CORE_SHARE_GOAL:.0%}",
        ),
        "prefix_hit_share": (f"{report['prefix_hit_share']:.1%}", f">= {PREFIX_HIT_SHARE_GOAL:.0%}"),
        "in_flight_max_over_mean": (f"{report['in_flight_max_over_mean']}", f"<= {LOAD_SPREAD_GOAL:g}"),
    }
    for name, (measured, goal) in rows.items():
        figures.add_row(name, measured, goal, met[goals[name]])
    console.print(figures)
    for name in ("cpu_us_by_event", "decisions_by_rule", "turns"):
        console.print(f"{name}: " + ", ".join(f"{key} {value:,}" for key, value in report[name].items()))
