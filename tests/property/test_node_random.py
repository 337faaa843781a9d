"""The node machine under any order of events, sensible or not: it never raises, and what must hold holds."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.core.effects import ApplyVersion, NodeEffect, PublishGate, StartEngine
from rose.core.events import (
    ActivityRequested,
    DeviceObserved,
    DrainRequested,
    EngineExited,
    EngineReady,
    EngineStarted,
    GateOverridden,
    LeaseChanged,
    MemoryObserved,
    NodeEvent,
    PinRequested,
    ReclaimRequested,
    ReplicaObserved,
    SchedulerConnected,
    SchedulerLost,
    ServingObserved,
    ShutdownRequested,
    StepBegan,
    Tick,
    UndoReady,
    VersionAvailable,
    VersionsPruned,
    VersionStaged,
    VersionStageFailed,
    WeightsApplied,
    WeightsRefused,
)
from rose.core.invariants import check_memory_step
from rose.core.memory import MemorySettings
from rose.core.node import NodeMachine, NodeSettings
from rose.core.nodeview import ReplicaSettings
from rose.core.readings import GateMode, ReplicaReading, SlackReading, Unknown
from rose.units import NS_PER_S, JobId, NodeId, ReplicaId

JOB = JobId("job-0")
SETTINGS = NodeSettings(
    node=NodeId("node-0"),
    job=JOB,
    replicas=tuple(
        ReplicaSettings(
            replica=ReplicaId(name),
            kind="dedicated" if name == "ded" else "opportunistic",
            url="http://127.0.0.1:1",
            model="rollout",
            block_tokens=32,
            context_tokens_max=2048,
            block_bytes=1,
            device="" if name == "ded" else "cpu-0",
            follows_leases=name == "opp-2",
        )
        for name in ("opp", "ded", "opp-2")
    ),
    ttft_slo_ns=250_000_000,
    tpot_slo_ns=60_000_000,
    serving="serving",
    memory=MemorySettings(settle_ns=NS_PER_S),
)

replicas = st.sampled_from(["opp", "ded", "opp-2", "stranger"])
jobs = st.sampled_from([JOB, JOB, JOB, "other"])
versions = st.integers(0, 6)
reasons = st.sampled_from(["crashed", "timeout", "corrupt_delta"])
unknowns = st.builds(
    Unknown, st.sampled_from(["board_missing", "board_stale"]), st.none() | st.integers(0, 9)
)
amounts = st.integers(-5, 400) | unknowns
words = st.integers(0, 4) | st.integers(-3, 300)
slacks = st.builds(SlackReading, *[words for _ in SlackReading._fields])
boards = st.builds(ReplicaReading, *[words for _ in ReplicaReading._fields])

events: st.SearchStrategy[NodeEvent] = st.one_of(
    st.builds(Tick),
    st.builds(Tick),
    st.builds(ServingObserved, slacks | unknowns, st.booleans() | unknowns),
    st.builds(ReplicaObserved, replicas, boards | unknowns),
    st.builds(MemoryObserved, amounts, amounts, amounts | st.just(400), st.booleans()),
    st.builds(DeviceObserved, st.sampled_from(["", "", "gpu_lost", "mps_recovering"]), st.booleans()),
    st.builds(EngineStarted, replicas, st.integers(1, 99)),
    st.builds(EngineReady, replicas, versions, st.booleans()),
    st.builds(EngineReady, replicas, versions, st.just(False)),
    st.builds(EngineExited, replicas, st.none() | st.integers(-9, 255), reasons),
    st.builds(VersionAvailable, jobs, versions),
    st.builds(VersionAvailable, jobs, versions, st.none() | versions, st.booleans()),
    st.builds(VersionsPruned, jobs, st.lists(versions, max_size=3).map(tuple)),
    st.builds(VersionStaged, jobs, versions, st.none() | versions, st.just("/store")),
    st.integers(1, 6).map(lambda v: VersionStaged(JOB, v, v - 1, "/store")),
    st.builds(VersionStageFailed, jobs, versions, reasons),
    st.builds(WeightsApplied, replicas, versions),
    st.builds(WeightsRefused, replicas, versions, st.none() | versions, reasons),
    st.builds(SchedulerConnected, st.sampled_from(["s1", "s2"])),
    st.builds(SchedulerLost),
    st.builds(StepBegan, jobs, st.integers(0, 3), versions),
    st.builds(ReclaimRequested, replicas, reasons),
    st.builds(GateOverridden, replicas, st.none() | st.integers(-1, 4), st.integers(-1, 600)),
    st.builds(DrainRequested, replicas, st.booleans()),
    st.builds(ActivityRequested, replicas, st.booleans()),
    st.builds(LeaseChanged, replicas, st.booleans()),
    st.builds(UndoReady, jobs, versions, versions, st.just("/undo")),
    st.integers(1, 6).map(lambda v: UndoReady(JOB, v - 1, v, "/undo")),
    st.builds(PinRequested, jobs, st.none() | st.integers(-1, 6)),
)
elapsed = st.integers(0, 3 * NS_PER_S) | st.just(70 * NS_PER_S) | st.just(-NS_PER_S)
histories = st.lists(st.tuples(events, elapsed), min_size=20, max_size=120)


class Witness:
    """Checks effects against what it was told itself, apart from the machine's own checks."""

    def __init__(self) -> None:
        self.machine = NodeMachine(SETTINGS)
        self.revisions = dict.fromkeys(self.machine.replicas, 0)
        self.overridden: set[str] = set()
        self.applying: dict[str, ApplyVersion] = {}
        self.applied: dict[str, int] = {}

    def step(self, event: NodeEvent, now_ns: int) -> list[NodeEffect]:
        memory = {
            name: (hosted.memory, hosted.memory.state, hosted.memory.budget_blocks)
            for name, hosted in self.machine.replicas.items()
            if hosted.memory
        }
        effects = self.machine.step(event, now_ns)
        self._heed(event)
        for effect in effects:
            self._check(effect)
        for policy, state, blocks in memory.values():
            check_memory_step(state, blocks, policy)
        self.machine.view()
        return effects

    def _heed(self, event: NodeEvent) -> None:
        match event:
            case GateOverridden(replica=replica, mode=mode) if mode in {None, *GateMode}:
                self.overridden.discard(replica) if mode is None else self.overridden.add(replica)
            case EngineExited(replica=replica) | EngineReady(replica=replica):
                self.applied.pop(replica, None)
                if (
                    self.machine.replicas.get(replica) is None
                    or not self.machine.replicas[replica].life.applying
                ):
                    self.applying.pop(replica, None)
            case WeightsApplied(replica=replica, version=version):
                order = self.applying.get(replica)
                if order is not None and order.version == version:
                    del self.applying[replica]
                    back = version < self.applied.get(replica, -1)
                    assert not back or order.path == "/undo", "versions went back"
                    self.applied[replica] = version
            case WeightsRefused(replica=replica, version=version):
                order = self.applying.get(replica)
                if order is not None and order.version == version:
                    del self.applying[replica]
                    self.applied.pop(replica, None)
            case _:
                pass

    def _check(self, effect: NodeEffect) -> None:
        match effect:
            case PublishGate(replica=replica, policy=policy):
                assert policy.revision > self.revisions[replica]
                self.revisions[replica] = policy.revision
                if replica == "ded":
                    assert policy.kv_budget_blocks == 0, "a dedicated replica was cut"
                    assert policy.mode == GateMode.OPEN or replica in self.overridden
            case ApplyVersion(replica=replica):
                assert replica not in self.applying, "two updates at a time"
                self.applying[replica] = effect
                assert effect.base_version == self.applied.get(replica, effect.base_version), "wrong base"
                if effect.version < effect.base_version:
                    assert self.machine.shelf.beyond_pin(effect.base_version), "taken back unasked"
                    assert effect.path == "/undo"
            case StartEngine(replica=replica):
                assert replica not in self.applying
            case _:
                pass


def run(history: list[tuple[NodeEvent, int]]) -> bytes:
    """The journal of a run: what happened and what was decided, as bytes."""
    witness, now_ns, journal = Witness(), 0, bytearray()
    for event, elapsed_ns in history:
        now_ns += elapsed_ns
        journal += msgspec.json.encode((now_ns, event, witness.step(event, now_ns))) + b"\n"
    return bytes(journal)


@settings(deadline=None, max_examples=300)
@given(histories)
def test_any_history_is_survived_and_replays_bit_for_bit(history: list[tuple[NodeEvent, int]]) -> None:
    journal = run(history)
    decoder = msgspec.json.Decoder(tuple[int, NodeEvent, list[NodeEffect]])
    machine = NodeMachine(SETTINGS)
    for line in journal.splitlines():
        now_ns, event, _ = decoder.decode(line)
        assert msgspec.json.encode((now_ns, event, machine.step(event, now_ns))) == line


@settings(deadline=None, max_examples=100)
@given(histories)
def test_after_a_shutdown_nothing_is_started_any_more(history: list[tuple[NodeEvent, int]]) -> None:
    machine, now_ns = NodeMachine(SETTINGS), 0
    machine.step(ShutdownRequested(), now_ns)
    for event, elapsed_ns in history:
        now_ns += elapsed_ns
        effects = machine.step(event, now_ns)
        assert not any(isinstance(effect, StartEngine | ApplyVersion) for effect in effects)
        assert all(
            effect.replica == "ded" or effect.policy.mode == GateMode.CLOSED
            for effect in effects
            if isinstance(effect, PublishGate)
        )
