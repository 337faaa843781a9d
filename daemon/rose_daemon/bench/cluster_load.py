"""What `rose bench cluster` asks of the scheduler's machine: hosts, and multi-turn trajectories in groups.

Everything is drawn from one seed and happens at virtual instants, so that two runs meet the same events.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import msgspec

from rose.core.events import JobSubmitted, NodeHeartbeat, NodeRegistered, ReplicaReport
from rose.core.membership import DEDICATED, OPPORTUNISTIC, READY
from rose.units import NS_PER_S, JobId, NodeId, ReplicaId, TrajectoryId, WeightVersion

JOB = JobId("bench")
MODEL = "policy"
KV_BUDGET_TOKENS = 16 * 32_768
"""Of a replica: the paper's 16 trajectories of 32k context."""


class ClusterLoad(NamedTuple):
    """Size of the benchmark and shape of its episodes."""

    replicas: int = 1_000
    """Each on a host of its own; every fourth is dedicated."""
    trajectories: int = 16_000
    """In flight: in a turn, or in their environment between two."""
    decisions: int = 100_000
    """Routing decisions to measure, after a third as many to warm up."""
    group: int = 8
    """Trajectories that begin with the same prompt (GRPO)."""
    turns_mean: float = 6.0
    prompt_tokens: int = 1_000
    observation_tokens: int = 200
    output_tokens_median: int = 200
    output_sigma: float = 0.8
    """Of the logarithm of output lengths: a long tail."""
    environment_s: float = 2.0
    interrupted_share: float = 0.01
    """Attempts that their engine cuts short."""
    prefill_tokens_per_s: float = 10_000.0
    decode_tokens_per_s: float = 40.0
    heartbeat_s: float = 1.0
    seed: int = 1


@dataclass(slots=True)
class Trajectory:
    """One episode."""

    id: TrajectoryId
    group: str
    turns_left: int
    context_tokens: int
    """Of its next prompt."""
    turns_done: int = 0


class Episodes:
    """Makes trajectories and draws what their turns do."""

    def __init__(self, load: ClusterLoad, rng: Random) -> None:
        self._load = load
        self._rng = rng
        self._made = 0

    def begin(self) -> Trajectory:
        """A new trajectory; groups fill up in order."""
        number, self._made = self._made, self._made + 1
        stop = 1 / self._load.turns_mean
        turns = 1 + int(math.log(1 - self._rng.random()) / math.log(1 - stop))
        group = number // self._load.group
        return Trajectory(TrajectoryId(f"t-{number}"), f"g-{group}", turns, self._load.prompt_tokens)

    def output_tokens(self) -> int:
        """Length of a turn's answer."""
        drawn = self._rng.lognormvariate(math.log(self._load.output_tokens_median), self._load.output_sigma)
        return 1 + min(int(drawn), 4096)

    def environment_ns(self) -> int:
        """How long the environment takes after a turn."""
        return int(self._rng.expovariate(1 / self._load.environment_s) * NS_PER_S)

    def turn_ns(self, fresh_tokens: int, output_tokens: int) -> int:
        """How long an engine takes for a turn of which it has all but `fresh_tokens` of the prompt."""
        prefill_s = fresh_tokens / self._load.prefill_tokens_per_s
        return int((prefill_s + output_tokens / self._load.decode_tokens_per_s) * NS_PER_S)


@dataclass(slots=True)
class Cache:
    """Prefixes that a replica holds: least recently used first to go when its KV budget is full."""

    budget_tokens: int
    held: OrderedDict[TrajectoryId, int] = field(default_factory=OrderedDict)
    tokens: int = 0

    def use(self, trajectory: TrajectoryId) -> int:
        """Tokens held of the trajectory, which is used now."""
        if trajectory in self.held:
            self.held.move_to_end(trajectory)
        return self.held.get(trajectory, 0)

    def keep(self, trajectory: TrajectoryId, tokens: int) -> None:
        """The replica computed a prefix of that length."""
        self.drop(trajectory)
        self.held[trajectory] = tokens
        self.tokens += tokens
        while self.tokens > self.budget_tokens and len(self.held) > 1:
            _, freed = self.held.popitem(last=False)
            self.tokens -= freed

    def drop(self, trajectory: TrajectoryId) -> None:
        """Forget the trajectory."""
        self.tokens -= self.held.pop(trajectory, 0)


class Hosts:
    """Nodes with one replica each, and what they say."""

    def __init__(self, load: ClusterLoad, rng: Random) -> None:
        self._rng = rng
        self._sequence = 0
        self.nodes = [NodeId(f"host-{number}") for number in range(load.replicas)]
        self.reports = [_report(number) for number in range(load.replicas)]
        self.dedicated = sum(report.kind == DEDICATED for report in self.reports)
        self.caches = {report.replica: Cache(KV_BUDGET_TOKENS) for report in self.reports}

    def registration(self, number: int) -> NodeRegistered:
        """The first message of a host."""
        return NodeRegistered(self.nodes[number], "s", (self.reports[number],))

    def job(self) -> JobSubmitted:
        """A job that wants all of them."""
        return JobSubmitted(JOB, MODEL, self.dedicated, len(self.reports) - self.dedicated)

    def heartbeat(self, number: int) -> NodeHeartbeat:
        """Its next message: serving is a little busier or idler, and the gate may have moved."""
        report = self.reports[number]
        if report.kind == OPPORTUNISTIC:
            kv = (report.serving_kv_used_share or 0.0) + self._rng.uniform(-0.02, 0.02)
            report = self.reports[number] = msgspec.structs.replace(
                report, gate_open=self._rng.random() < 0.7, serving_kv_used_share=min(0.7, max(0.05, kv))
            )
        self._sequence += 1
        return NodeHeartbeat(self.nodes[number], "s", self._sequence, (report,))


def _report(number: int) -> ReplicaReport:
    dedicated = number % 4 == 0
    return ReplicaReport(
        replica=ReplicaId(f"host-{number}-0"),
        kind=DEDICATED if dedicated else OPPORTUNISTIC,
        state=READY,
        url=f"http://host-{number}:8001",
        model=MODEL,
        weight_version=WeightVersion(0),
        gate_open=True,
        kv_budget_tokens=KV_BUDGET_TOKENS,
        context_tokens_max=32_768,
        serving_kv_used_share=None if dedicated else 0.3,
        device="" if dedicated else "gpu-0",
        hardware="compute" if number % 2 else "bandwidth",
    )
