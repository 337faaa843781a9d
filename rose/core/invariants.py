"""What must hold of a node at all times.  The machine asserts it after every step, the property tests too.

Each function raises AssertionError with the numbers that disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from rose.core.effects import ApplyVersion, NodeEffect, PublishGate, PullVersion, StartEngine, StopEngine
from rose.core.hosted import HostedReplica
from rose.core.lifecycle import Phase, ReplicaState
from rose.core.memory import MemoryPolicy, MemoryState
from rose.core.readings import GateMode
from rose.core.shelf import VersionShelf
from rose.units import ReplicaId, WeightVersion


def check_memory(policy: MemoryPolicy) -> None:
    """A budget lies between nothing and all there is, and is sized when it was cut."""
    assert 0 <= policy.budget_blocks <= policy.total_blocks, (policy.budget_blocks, policy.total_blocks)
    assert policy.state is MemoryState.NORMAL or policy.budget_blocks > 0, policy.state


def check_memory_step(state_before: MemoryState, blocks_before: int, policy: MemoryPolicy) -> None:
    """While cut or frozen, before and after, the budget did not grow."""
    if MemoryState.NORMAL not in {state_before, policy.state}:
        assert policy.budget_blocks <= blocks_before, (state_before, blocks_before, policy.budget_blocks)


def check_replica(hosted: HostedReplica, weight_attempts_max: int) -> None:
    """Parts of one replica agree with each other."""
    life = hosted.life
    if life.applying is not None:
        assert life.phase is Phase.RUNNING, life.phase
        assert life.applying.base_version == life.held, (life.applying, life.held)
        assert life.applying.version != life.held, (life.applying, life.held)
    assert hosted.refusals <= weight_attempts_max, hosted.refusals
    assert not life.failed or life.phase is Phase.RUNNING, life.phase
    if hosted.memory is None:
        assert hosted.override is not None or hosted.gate_mode is GateMode.OPEN
    else:
        check_memory(hosted.memory)
        if life.state is ReplicaState.FAILED:
            assert hosted.gate_mode is GateMode.CLOSED, hosted.gate_mode


def check_shelf(shelf: VersionShelf, held: Iterable[WeightVersion]) -> None:
    """Every step leads up, from a base that is held or onto an anchor; or back, from beyond the pin."""
    for version in held:
        step = shelf.next_step(version)
        if step is not None:
            assert _allowed(shelf, version, step.version), (step, version)
            assert step.base in {None, version}, (step, version)


def _allowed(shelf: VersionShelf, held: WeightVersion, version: WeightVersion) -> bool:
    """Up, but not beyond the pin; or back, from what is beyond it."""
    if shelf.beyond_pin(held):
        return version < held
    return version > held and not shelf.beyond_pin(version)


class Snapshot(msgspec.Struct, frozen=True):
    """What `check_effects` compares with: a node before a step."""

    held: dict[ReplicaId, WeightVersion]
    revisions: dict[ReplicaId, int]
    processes: frozenset[ReplicaId]
    pulling: bool


def snapshot(replicas: Sequence[HostedReplica], shelf: VersionShelf) -> Snapshot:
    """The node as it is now."""
    return Snapshot(
        held={each.settings.replica: each.life.held for each in replicas},
        revisions={each.settings.replica: each.revision for each in replicas},
        processes=frozenset(each.settings.replica for each in replicas if each.life.has_process),
        pulling=shelf.pulling is not None,
    )


def check_effects(
    before: Snapshot, replicas: Sequence[HostedReplica], shelf: VersionShelf, effects: Sequence[NodeEffect]
) -> None:
    """Effects say what the machine knows: right bases, growing revisions, no second engine process."""
    after = {each.settings.replica: each for each in replicas}
    for effect in effects:
        match effect:
            case ApplyVersion(replica=replica, version=version, base_version=base):
                assert base == after[replica].life.held, effect
                assert _allowed(shelf, base, version), effect
            case PublishGate(replica=replica, policy=policy):
                assert policy.revision > before.revisions[replica], effect
                assert policy == after[replica].published, effect
            case StartEngine(replica=replica):
                assert replica not in before.processes, effect
                assert after[replica].life.phase is Phase.STARTING, effect
            case StopEngine(replica=replica):
                assert after[replica].life.phase is Phase.STOPPING, effect
            case PullVersion(version=version, base_version=base):
                assert version > base, effect
            case _:
                pass


def check_devices(replicas: Sequence[HostedReplica]) -> None:
    """On one device at most one engine starts or changes its activity."""
    under_way: dict[str, ReplicaId] = {}
    for hosted in replicas:
        device = hosted.settings.device
        if hosted.memory and (hosted.life.phase is Phase.STARTING or hosted.dormancy.since_ns is not None):
            other = under_way.setdefault(device, hosted.settings.replica)
            assert other == hosted.settings.replica, (device, other, hosted.settings.replica)


def check_node(replicas: Sequence[HostedReplica], shelf: VersionShelf, weight_attempts_max: int) -> None:
    """Everything above that holds of a node at rest."""
    check_devices(replicas)
    for hosted in replicas:
        check_replica(hosted, weight_attempts_max)
    check_shelf(shelf, (hosted.life.held for hosted in replicas))
