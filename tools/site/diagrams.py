"""State diagrams for Mermaid, drawn from the machines of `rose.core` by trying all events in all states."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from rose.core.events import NodeHeartbeat, NodeRegistered, ReplicaReport
from rose.core.lifecycle import EngineLife, LifecycleSettings
from rose.core.membership import Membership
from rose.core.memory import MemoryPolicy, MemoryReading, MemorySettings
from rose.units import NS_PER_S, NodeId, ReplicaId, WeightVersion

Machine = TypeVar("Machine")
Event = tuple[str, Callable[[Machine, int], object]]
"""What it is called, and what it does to a machine at an instant."""
Edge = tuple[str, str, str]
"""From, label, to."""

_STATES_MAX = 2000
_COUNTERS = {"_settings", "attempts", "failures", "cuts", "budget_blocks"}
_LONG_NS = 1000 * NS_PER_S
"""Between two events: whatever waits for time to pass has waited long enough."""
_REPLICA = ReplicaId("replica")


def explore(begin: Machine, events: Iterable[Event[Machine]], state: Callable[[Machine], str]) -> list[Edge]:
    """Every transition between named states that is ever possible; of equal ones, one."""
    known = tuple(events)
    edges: dict[Edge, None] = {}
    seen: set[str] = set()
    waiting: deque[tuple[Machine, int]] = deque([(begin, 0)])
    while waiting:
        machine, steps = waiting.popleft()
        if (inside := _inside(machine)) in seen:
            continue
        seen.add(inside)
        assert len(seen) < _STATES_MAX, "the machine has no end of states: name what counts up in _COUNTERS"
        for label, act in known:
            after = copy.deepcopy(machine)
            act(after, (steps + 1) * _LONG_NS)
            if state(after) != state(machine):
                edges[state(machine), label, state(after)] = None
            waiting.append((after, steps + 1))
    return list(edges)


def _inside(machine: object) -> str:
    """All that a machine knows, but clocks and counters."""
    known = {
        name: value
        for name, value in vars(machine).items()
        if not name.endswith("_ns") and name not in _COUNTERS
    }
    return repr(known)


def engine() -> list[Edge]:
    """Phases of an engine's process."""
    return explore(_life(), _life_events(), lambda life: life.phase.name.lower())


def replica() -> list[Edge]:
    """What is reported of a running engine, and of one that is not."""

    def drain(wanted: bool) -> Callable[[EngineLife, int], None]:
        return lambda life, _: setattr(life, "draining", wanted)

    def unsure(value: bool) -> Callable[[EngineLife, int], None]:
        return lambda life, _: setattr(life, "unsure", value and life.phase.name == "RUNNING")

    def inactive(value: bool) -> Callable[[EngineLife, int], None]:
        return lambda life, _: setattr(life, "inactive", value)

    def fail(life: EngineLife, _: int) -> None:
        if life.phase.name == "RUNNING":
            life.fail("cannot follow")

    more: list[Event[EngineLife]] = [
        ("an update begins", unsure(True)),
        ("the engine says what it holds", unsure(False)),
        ("drain", drain(True)),
        ("undrain", lambda life, _: life.restore()),
        ("no lease", inactive(True)),
        ("a lease", inactive(False)),
        ("cannot follow the weights", fail),
    ]
    return explore(_life(), [*_life_events(), *more], lambda life: life.state.value)


def node() -> list[Edge]:
    """How recently a host was heard; each silence is as long as its label says."""
    membership = Membership(
        stall_ns := 2 * NS_PER_S, suspect_ns := 3 * NS_PER_S, dead_ns := 6 * NS_PER_S, 60 * NS_PER_S, NS_PER_S
    )
    name, reports = NodeId("host"), (_report(),)
    membership.register(NodeRegistered(name, "session", reports), 0)
    edges: list[Edge] = []
    before, now_ns = "alive", 0
    for silent_ns, key in (
        (stall_ns, "stall_timeout_ms"),
        (suspect_ns, "suspect_after_ms"),
        (dead_ns, "dead_after_ms"),
    ):
        membership.expire(now_ns := silent_ns)
        found = membership.nodes[name].state.value
        edges.append((before, f"silent for scheduler.{key}", found))
        before = found
        again = copy.deepcopy(membership)
        again.heartbeat(NodeHeartbeat(name, "session", 1, reports), now_ns)
        edges.append((found, "heartbeat", again.nodes[name].state.value))
    return edges


def memory() -> list[Edge]:
    """The KV budget of a lent replica."""
    policy = MemoryPolicy(MemorySettings(block_bytes=1))
    policy.sized(1 << 20)
    short = MemoryReading(serving_bytes=1000, free_bytes=0, total_bytes=1000)

    return explore(
        policy,
        [
            ("serving enters the headroom", lambda each, now_ns: each.observed(short, now_ns)),
            ("rose reclaim", lambda each, _: each.reclaim("operator")),
            ("the cut is applied", lambda each, now_ns: each.applied(now_ns)),
            ("the next RL step begins", lambda each, _: each.step_began()),
        ],
        lambda each: each.state.value,
    )


DIAGRAMS: dict[str, Callable[[], list[Edge]]] = {
    "engine": engine,
    "replica": replica,
    "node": node,
    "memory": memory,
}


def mermaid(edges: Iterable[Edge]) -> str:
    """A state diagram; edges between the same two states share one arrow."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for start, label, end in edges:
        arrows.setdefault((start, end), []).append(label)
    lines = [
        f"    {start} --> {end}: {', '.join(dict.fromkeys(labels))}"
        for (start, end), labels in arrows.items()
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def _life() -> EngineLife:
    return EngineLife(_REPLICA, LifecycleSettings(start_timeout_ns=3600 * NS_PER_S))


def _life_events() -> list[Event[EngineLife]]:
    return [
        ("start", lambda life, now_ns: life.advance(now_ns)),
        ("ready", lambda life, now_ns: life.ready(WeightVersion(0), now_ns, adopted=False)),
        ("adopted", lambda life, now_ns: life.ready(WeightVersion(0), now_ns, adopted=True)),
        ("stop", lambda life, now_ns: life.stop("stop", now_ns)),
        ("exited", lambda life, now_ns: life.exited("exited", now_ns, restart=True)),
        ("exited, at the end", lambda life, now_ns: life.exited("exited", now_ns, restart=False)),
    ]


def _report() -> ReplicaReport:
    return ReplicaReport(_REPLICA, "dedicated", "ready", "http://127.0.0.1:1", "model", WeightVersion(0))
