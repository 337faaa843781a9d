"""The node machine against a small model of its world: engines, relay and disk that fail, then heal.

Safety holds throughout: an engine never writes a delta onto another base than the delta's, and what the
node reports as ready is what the engine runs.  Liveness holds after healing: every replica comes to run
the newest version, and budgets are whole again after an RL step.
"""

from __future__ import annotations

import random
from collections import deque

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rose.core.effects import ApplyVersion, NodeEffect, PublishGate, PullVersion, StartEngine, StopEngine
from rose.core.events import (
    EngineExited,
    EngineReady,
    EngineStarted,
    MemoryObserved,
    NodeEvent,
    PinRequested,
    ReclaimRequested,
    ReplicaObserved,
    ServingObserved,
    StepBegan,
    Tick,
    UndoReady,
    VersionAvailable,
    VersionStaged,
    VersionStageFailed,
    WeightsApplied,
    WeightsRefused,
)
from rose.core.memory import MemorySettings
from rose.core.node import NodeMachine, NodeSettings
from rose.core.nodeview import ReplicaSettings
from rose.core.readings import NEVER, GatePolicy, LimitStatus, ReplicaReading, SlackReading, Unknown
from rose.units import NS_PER_MS, NS_PER_S, JobId, NodeId, ReplicaId, WeightVersion

JOB = JobId("job-0")
IDLE = SlackReading(**dict.fromkeys(SlackReading._fields, 0))._replace(
    ttft_deadline_ns=NEVER, tpot_deadline_ns=NEVER
)
BOARD = ReplicaReading(**dict.fromkeys(ReplicaReading._fields, 0))
TICK_NS = 50 * NS_PER_MS


class Engine:
    """One engine process."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.ready = False
        self.version = WeightVersion(0)
        self.policy: GatePolicy | None = None


class World:
    """The driver's side.  `chance` decides what fails; `faulty` turns all faults on or off."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.faulty = True
        self.now_ns = 0
        replicas = tuple(
            ReplicaSettings(
                replica=ReplicaId(name),
                kind="opportunistic" if name == "opp" else "dedicated",
                url="http://127.0.0.1:1",
                model="rollout",
                block_tokens=32,
                context_tokens_max=2048,
            )
            for name in ("opp", "ded")
        )
        self.machine = NodeMachine(
            NodeSettings(
                node=NodeId("n"),
                job=JOB,
                replicas=replicas,
                serving="serving",
                ttft_slo_ns=250 * NS_PER_MS,
                tpot_slo_ns=60 * NS_PER_MS,
                memory=MemorySettings(settle_ns=NS_PER_S),
            )
        )
        self.engines: dict[ReplicaId, Engine] = {}
        self.boards: dict[ReplicaId, GatePolicy] = {}
        self.published = 0
        self.rl_step = 0
        self.errands: list[NodeEffect] = []
        self.queue: deque[NodeEvent] = deque()

    def happens(self, share: float) -> bool:
        return self.faulty and self.chance.random() < share

    def tick(self) -> None:
        """A tick of the driver: observe, let something happen, carry out some of what is pending."""
        self.now_ns += TICK_NS if not self.happens(0.05) else self.chance.randrange(20 * NS_PER_S)
        if self.happens(0.06):
            self._something_happens()
        free = 0 if self.happens(0.05) else 100 if self.faulty else 900
        self.queue.append(MemoryObserved(100, Unknown("x") if self.happens(0.2) else free, 1000))
        self.queue.append(ServingObserved(IDLE, not self.happens(0.1)))
        for replica in self.machine.replicas:
            self.queue.append(ReplicaObserved(replica, self._board(replica)))
        self.queue.append(Tick())
        self.chance.shuffle(self.errands)
        while self.errands and (not self.faulty or self.chance.random() < 0.5):
            self._carry_out(self.errands.pop())
        while self.queue:
            for effect in self.machine.step(self.queue.popleft(), self.now_ns):
                self._take(effect)
        self._check_reports()

    def _something_happens(self) -> None:
        match self.chance.randrange(5):
            case 0:
                self.publish()
            case 1:
                self.rl_step += 1
                self.queue.append(StepBegan(JOB, self.rl_step, WeightVersion(self.published)))
            case 2:
                self.queue.append(ReclaimRequested(ReplicaId("opp"), "drill"))
            case 3:
                pin = self.chance.randrange(self.published + 1)
                self.queue.append(PinRequested(JOB, None if self.happens(0.5) else WeightVersion(pin)))
            case _:
                for replica in list(self.engines):
                    self._crash(replica)

    def publish(self) -> None:
        self.published += 1
        self.queue.append(VersionAvailable(JOB, WeightVersion(self.published)))

    def _base(self, version: int) -> WeightVersion | None:
        """Every fifth version is an anchor."""
        return None if version % 5 == 0 else WeightVersion(version - 1)

    def _board(self, replica: ReplicaId) -> ReplicaReading | Unknown:
        engine = self.engines.get(replica)
        if engine is None or not engine.ready or self.happens(0.1):
            return Unknown("owner_gone")
        if not self.happens(0.3):
            engine.policy = self.boards[replica]
        status = LimitStatus.DEFERRED if self.happens(0.2) else LimitStatus.APPLIED
        policy = engine.policy
        return BOARD._replace(
            kv_total_blocks=100, policy_revision=policy.revision if policy else 0, limit_status=status
        )

    def _take(self, effect: NodeEffect) -> None:
        match effect:
            case PublishGate(replica=replica, policy=policy):
                self.boards[replica] = policy
            case StartEngine(replica=replica, attempt=attempt):
                assert replica not in self.engines, "two engines for one replica"
                assert replica in self.boards, "an engine starts without a gate"
                self.engines[replica] = Engine(attempt)
                self.queue.append(EngineStarted(replica, 1000 + attempt))
                self.errands.append(effect)
            case StopEngine() | PullVersion() | ApplyVersion():
                self.errands.append(effect)
            case _:
                pass

    def _carry_out(self, effect: NodeEffect) -> None:
        match effect:
            case StartEngine(replica=replica, attempt=attempt):
                engine = self.engines.get(replica)
                if engine is None or engine.attempt != attempt:
                    return
                if self.happens(0.2):
                    self._crash(replica)
                    return
                engine.ready = True
                self.queue.append(EngineReady(replica, WeightVersion(0)))
            case StopEngine(replica=replica):
                self._crash(replica)
            case PullVersion(job=job, version=version):
                if self.happens(0.3):
                    self.queue.append(VersionStageFailed(job, version, "relay_gone"))
                else:
                    self.queue.append(VersionStaged(job, version, self._base(version), f"/v{version}"))
                    if not self.happens(0.3):
                        self.queue.append(UndoReady(job, WeightVersion(version - 1), version, "/undo"))
            case ApplyVersion():
                self._apply(effect)

    def _apply(self, order: ApplyVersion) -> None:
        engine = self.engines.get(order.replica)
        if engine is None or not engine.ready:
            self.queue.append(WeightsRefused(order.replica, order.version, None, "engine_gone"))
            return
        back = order.path == "/undo"
        base = WeightVersion(order.version + 1) if back else self._base(order.version)
        if engine.version != order.base_version or base not in {None, engine.version}:
            verified = engine.version == order.version
            self.queue.append(
                WeightsApplied(order.replica, order.version)
                if verified
                else WeightsRefused(order.replica, order.version, engine.version, "wrong_base")
            )
            return
        if self.happens(0.2):
            self.queue.append(WeightsRefused(order.replica, order.version, engine.version, "corrupt_delta"))
            return
        engine.version = order.version
        lost = self.happens(0.2)
        self.queue.append(
            WeightsRefused(order.replica, order.version, None, "timeout")
            if lost
            else WeightsApplied(order.replica, order.version)
        )

    def _crash(self, replica: ReplicaId) -> None:
        if self.engines.pop(replica, None) is not None:
            self.queue.append(EngineExited(replica, 137, "killed"))

    def _check_reports(self) -> None:
        for report in self.machine.reports():
            if report.state == "ready":
                engine = self.engines[report.replica]
                assert engine.ready
                assert engine.version == report.weight_version, "reported weights are not those in use"


def restore_failed(world: World) -> None:
    """What an operator does once the cause is gone."""
    for hosted in world.machine.replicas.values():
        if hosted.life.failed:
            hosted.drain(False)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(50, 250))
@example(414684, 175)
def test_safe_under_faults_and_whole_again_after_them(seed: int, ticks: int) -> None:
    world = World(random.Random(seed))
    for _ in range(ticks):
        world.tick()
    world.faulty = False
    world.queue.append(PinRequested(JOB, None))
    world.publish()
    world.tick()
    restore_failed(world)
    world.now_ns += 120 * NS_PER_S
    for _ in range(4 * (world.published + 10)):
        world.tick()
        world.now_ns += NS_PER_S
    world.rl_step += 1
    world.queue.append(StepBegan(JOB, world.rl_step, WeightVersion(world.published)))
    world.tick()
    world.tick()
    reports = world.machine.reports()
    assert [(report.state, report.weight_version) for report in reports] == [("ready", world.published)] * 2
    view = world.machine.view()
    assert view.healthy
    assert view.memory is not None
    assert (view.memory.state, view.memory.budget_blocks) == ("normal", 100)
