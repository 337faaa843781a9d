"""Which nodes are there, and what their replicas last said.

A node speaks in sessions.  Within a session heartbeats carry a growing sequence number; what is old,
doubled or reordered is dropped, and so is everything from a session that a later one replaced.

    alive --silent stall_after--> stalled --suspect_after--> suspect --dead_after--> dead
      ^-------------------------- newer heartbeat of the session ----------------------'

stalled and suspect: no new turns, those in flight go on.  dead: the replicas are gone, and their turns run
elsewhere.  A dead node that speaks again is alive again; a node silent for `forget_after` is forgotten.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from rose.core.effects import Say
from rose.core.events import (
    NodeHeartbeat,
    NodeLeft,
    NodeRegistered,
    ReplicaDrainRequested,
    ReplicaReport,
)
from rose.core.readings import NEVER
from rose.units import NS_PER_S, NodeId, ReplicaId

# Values of `rose.core.lifecycle.ReplicaState`, as they come over the wire.
READY = "ready"
"""The only replica state that gets turns."""
UPDATING = "updating"
INACTIVE = "inactive"
"""A lease activates it."""
DEDICATED = "dedicated"
OPPORTUNISTIC = "opportunistic"

_KV_RECENT_NS = 30 * NS_PER_S
_SESSIONS_REMEMBERED = 16
"""Replaced sessions kept per node, to recognise their late messages."""


class NodeState(StrEnum):
    """How recently a node was heard."""

    ALIVE = "alive"
    STALLED = "stalled"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(slots=True)
class Replica:
    """What is known of one replica of a node that is not dead."""

    id: ReplicaId
    node: NodeId
    report: ReplicaReport
    reported_ns: int
    gate_open_seen_ns: int
    """Latest instant at which the gate was reported open; at first, when the replica came."""
    unfit_since_ns: int | None = None
    """Since when it has been unable to take turns (not ready, silent or drained); None while it can."""
    node_alive: bool = True
    drained: bool = False
    """The operator took it out of use."""
    gate_held: bool = False
    """The gate has not been seen open for `gate_patience_ns`."""
    kv_recent: float | None = None
    """KV use of the serving engine, smoothed over half a minute; None while it is not known."""
    _open_ns: int = 0

    @property
    def serving(self) -> bool:
        """Whether it runs on a borrowed serving device."""
        return self.report.kind == OPPORTUNISTIC

    @property
    def fit(self) -> bool:
        """Whether it is in use at all; an update of its weights does not make it unfit."""
        return self.node_alive and not self.drained and self.report.state in {READY, UPDATING, INACTIVE}

    @property
    def takes_turns(self) -> bool:
        """Whether new turns may be sent to it, whatever their job and version."""
        return self.fit and self.report.state == READY and not self.report.updating

    @property
    def gate_open(self) -> bool:
        """The gate as last reported; a dedicated replica that says nothing is open, others are closed."""
        return not self.serving if self.report.gate_open is None else self.report.gate_open

    def open_ns(self, now_ns: int) -> int:
        """Nanoseconds with an open gate since the replica came: a clock that stands while it is closed."""
        return self._open_ns + (now_ns - self.reported_ns if self.gate_open else 0)

    def observe(self, report: ReplicaReport, now_ns: int, gate_patience_ns: int) -> None:
        """Take in a newer report."""
        self._open_ns = self.open_ns(now_ns)
        self.kv_recent = _smoothed(self.kv_recent, report.serving_kv_used_share, now_ns - self.reported_ns)
        self.report = report
        self.reported_ns = now_ns
        if self.gate_open:
            self.gate_open_seen_ns = now_ns
        self.gate_held = now_ns - self.gate_open_seen_ns > gate_patience_ns
        self.note_fitness(now_ns)

    def note_fitness(self, now_ns: int) -> None:
        """Keep `unfit_since_ns` after a change."""
        if self.fit:
            self.unfit_since_ns = None
        elif self.unfit_since_ns is None:
            self.unfit_since_ns = now_ns


@dataclass(slots=True)
class Node:
    """One host's daemon."""

    id: NodeId
    session: str | None
    """None once the node said goodbye."""
    heard_ns: int
    sequence: int = -1
    state: NodeState = NodeState.ALIVE
    replicas: dict[ReplicaId, None] = field(default_factory=dict)
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=_SESSIONS_REMEMBERED))
    conflicts: set[ReplicaId] = field(default_factory=set)
    """Replicas it claims that another node owns; each is complained about once."""


@dataclass(slots=True)
class Change:
    """What one message or the passing of time changed; `gone` is to be handled first."""

    gone: list[tuple[Replica, str]] = field(default_factory=list)
    """Replicas that left, with the reason code."""
    seen: list[Replica] = field(default_factory=list)
    """Replicas that came, or whose report or node state is new."""
    says: list[Say] = field(default_factory=list)


class Membership:
    """Nodes and replicas by name."""

    def __init__(
        self,
        stall_after_ns: int,
        suspect_after_ns: int,
        dead_after_ns: int,
        forget_after_ns: int,
        gate_patience_ns: int,
    ) -> None:
        self._stages = (
            (NodeState.ALIVE, stall_after_ns),
            (NodeState.STALLED, suspect_after_ns),
            (NodeState.SUSPECT, dead_after_ns),
            (NodeState.DEAD, forget_after_ns),
        )
        self._gate_patience_ns = gate_patience_ns
        self.nodes: dict[NodeId, Node] = {}
        self.replicas: dict[ReplicaId, Replica] = {}
        self._drained: set[ReplicaId] = set()
        self._check_ns = NEVER

    def next_deadline_ns(self) -> int:
        """No node can change state before this instant, or NEVER."""
        return self._check_ns

    def knows(self, node: NodeId, session: str) -> bool:
        """Whether heartbeats of this session are taken; if not, the node must register (again)."""
        known = self.nodes.get(node)
        return known is not None and known.session == session

    def replaced(self, node: NodeId, session: str) -> bool:
        """Whether a later session took this one's place, or it said goodbye: it is not let in again."""
        known = self.nodes.get(node)
        return known is not None and session in known.retired

    def register(self, event: NodeRegistered, now_ns: int) -> Change:
        """A node came.  A new session replaces the old one: its replicas leave before the new ones come."""
        change = Change()
        node = self.nodes.get(event.node)
        if self.replaced(event.node, event.session):
            return change
        if node is not None and node.session == event.session and node.sequence >= 0:
            return change  # a late copy: heartbeats have told more since
        if node is None:
            node = self.nodes[event.node] = Node(event.node, event.session, now_ns)
            change.says.append(Say("info", "node_registered", "a node joined", node.id))
        elif node.session != event.session:
            self._drop_all(node, "node_restarted", change)
            _retire(node)
            node.session, node.sequence = event.session, -1
            change.says.append(Say("info", "node_restarted", "a node came back with a new session", node.id))
        self._heard(node, event.replicas, now_ns, change)
        return change

    def heartbeat(self, event: NodeHeartbeat, now_ns: int) -> Change:
        """A node's report; ignored unless it is the newest of the node's present session."""
        change = Change()
        node = self.nodes.get(event.node)
        if node is None or node.session != event.session or event.sequence <= node.sequence:
            return change
        node.sequence = event.sequence
        self._heard(node, event.replicas, now_ns, change)
        return change

    def leave(self, event: NodeLeft) -> Change:
        """A node said goodbye in its present session."""
        change = Change()
        node = self.nodes.get(event.node)
        if node is None or node.session != event.session:
            return change
        self._drop_all(node, "node_left", change)
        # The record stays until it is forgotten, so that late messages of the session stay dropped.
        _retire(node)
        node.state = NodeState.DEAD
        change.says.append(Say("info", "node_left", "a node left", node.id))
        return change

    def expire(self, now_ns: int) -> Change:
        """Advance the states of silent nodes."""
        change = Change()
        if now_ns < self._check_ns:
            return change
        self._check_ns = NEVER
        for node in list(self.nodes.values()):
            self._age(node, now_ns, change)
        return change

    def drain(self, event: ReplicaDrainRequested, now_ns: int) -> Change:
        """The operator takes a known replica out of use, or back; kept while its node comes and goes."""
        change = Change()
        replica, drain = event.replica, event.drain
        known = self.replicas.get(replica)
        if known is None and not event.restored and not (replica in self._drained and not drain):
            change.says.append(
                Say("warning", "replica_unknown", "cannot drain a replica that is not there", replica)
            )
            return change
        (self._drained.add if drain else self._drained.discard)(replica)
        if known is not None and known.drained != drain:
            known.drained = drain
            known.note_fitness(now_ns)
            change.seen.append(known)
        return change

    # ---- inside ------------------------------------------------------------------------------------

    def _heard(self, node: Node, reports: Iterable[ReplicaReport], now_ns: int, change: Change) -> None:
        if node.state is not NodeState.ALIVE:
            change.says.append(Say("info", "node_alive", f"heard again after being {node.state}", node.id))
        node.state, node.heard_ns = NodeState.ALIVE, now_ns
        self._check_ns = min(self._check_ns, now_ns + self._stages[0][1])
        named = {report.replica: report for report in reports}
        for replica in [known for known in node.replicas if known not in named]:
            self._drop(node, replica, "replica_gone", change)
        for report in named.values():
            self._take(node, report, now_ns, change)

    def _take(self, node: Node, report: ReplicaReport, now_ns: int, change: Change) -> None:
        known = self.replicas.get(report.replica)
        if known is not None and known.node != node.id:
            if report.replica not in node.conflicts:
                node.conflicts.add(report.replica)
                text = f"claimed by {node.id} but owned by {known.node}; the claim is ignored"
                change.says.append(Say("error", "replica_conflict", text, report.replica))
            return
        if known is not None and _identity(known.report) != _identity(report):
            self._drop(node, known.id, "replica_changed", change)
            known = None
        if known is None:
            known = Replica(report.replica, node.id, report, now_ns, now_ns)
            known.drained = report.replica in self._drained
            self.replicas[report.replica] = known
            node.replicas[report.replica] = None
            node.conflicts.discard(report.replica)
        known.node_alive = True
        known.observe(report, now_ns, self._gate_patience_ns)
        change.seen.append(known)

    def _age(self, node: Node, now_ns: int, change: Change) -> None:
        silent_ns = now_ns - node.heard_ns
        state: NodeState | None = NodeState.ALIVE
        for stage, end_ns in self._stages:
            state = stage
            if silent_ns < end_ns:
                self._check_ns = min(self._check_ns, node.heard_ns + end_ns)
                break
        else:
            state = None
        if state is None:
            self._drop_all(node, "node_dead", change)
            del self.nodes[node.id]
        elif state is not node.state and node.state is not NodeState.DEAD:
            self._silence(node, state, silent_ns, now_ns, change)

    def _silence(self, node: Node, state: NodeState, silent_ns: int, now_ns: int, change: Change) -> None:
        text = f"silent for {silent_ns / 1e9:.1f} s"
        change.says.append(Say("warning", f"node_{state}", text, node.id))
        was_alive, node.state = node.state is NodeState.ALIVE, state
        if state is NodeState.DEAD:
            self._drop_all(node, "node_dead", change)
        elif was_alive:
            for replica in node.replicas:
                known = self.replicas[replica]
                known.node_alive = False
                known.note_fitness(now_ns)
                change.seen.append(known)

    def _drop_all(self, node: Node, reason: str, change: Change) -> None:
        for replica in list(node.replicas):
            self._drop(node, replica, reason, change)

    def _drop(self, node: Node, replica: ReplicaId, reason: str, change: Change) -> None:
        del node.replicas[replica]
        change.gone.append((self.replicas.pop(replica), reason))


def _smoothed(recent: float | None, newest: float | None, elapsed_ns: int) -> float | None:
    """An unknown makes the average unknown, and what follows begins anew."""
    if recent is None or newest is None:
        return newest
    return recent + (newest - recent) * (1 - math.exp(-elapsed_ns / _KV_RECENT_NS))


def _retire(node: Node) -> None:
    if node.session is not None:
        node.retired.append(node.session)
        node.session = None


def _identity(report: ReplicaReport) -> tuple[str, str, str, str]:
    """What a replica cannot change and still be the same one."""
    return (report.kind, report.model, report.device, report.url)
