"""On which terms a replica is lent memory and time of the serving device now.

They come from the lender (`rose.core.lender`), hold for all lent replicas of a host, and go before whatever
the gate's policy or an operator's override says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, assert_never

from rose.core.effects import NodeEffect, Say, TakeBackMeasured
from rose.core.events import DrillRequested, LendingDecided
from rose.core.readings import GateReason
from rose.units import NS_PER_MS, NS_PER_S, ReplicaId

if TYPE_CHECKING:
    from rose.core.hosted import HostedReplica
    from rose.core.memory import MemoryPolicy

DRILL_NS_MAX = 30 * NS_PER_S
"""A drill whose memory is not back by then counts with this time, and is ended."""
_BRIEF = {GateReason.ROLLOUT_OFF_WINDOW}
"""A stop for these closes the gate and no more: turns wait it out, and memory stays lent."""


class Drill:
    """Blocks taken from a replica to see how long that takes."""

    def __init__(self, blocks: int, allowed_blocks: int, now_ns: int) -> None:
        self.blocks = blocks
        self.allowed_blocks = allowed_blocks
        """What the replica may use meanwhile."""
        self.began_ns = now_ns
        self.revision = 0
        """Policy revision that says so; 0 until it is published."""


class Terms:
    """Those of one replica."""

    def __init__(self, kv_share_max: float) -> None:
        self._kv_share_max = kv_share_max
        self.closed: GateReason | None = None
        """Why nothing is lent now."""
        self.drill: Drill | None = None

    @property
    def suspended(self) -> bool:
        """Whether memory is wanted back too."""
        return self.closed is not None and self.closed not in _BRIEF

    def limit_blocks(self, memory: MemoryPolicy) -> int:
        """What to write into `GatePolicy.kv_budget_blocks`: 0 while the engine may use all it has."""
        if not memory.total_blocks:
            return 0
        allowed = min(memory.budget_blocks, self.cap_blocks(memory))
        if self.drill is not None:
            allowed = min(allowed, self.drill.allowed_blocks)
        return 0 if allowed == memory.total_blocks else allowed

    def cap_blocks(self, memory: MemoryPolicy) -> int:
        """Most blocks that it is ever lent."""
        return max(1, int(self._kv_share_max * memory.total_blocks))

    def told(self, revision: int) -> None:
        """The engine was sent this revision."""
        if self.drill is not None and not self.drill.revision:
            self.drill.revision = revision

    def obeyed(self, revision: int, replica: ReplicaId, now_ns: int) -> list[NodeEffect]:
        """The engine obeys this revision: its memory is back.  Ends a drill that this is about."""
        drill = self.drill
        if drill is None or not 0 < drill.revision <= revision:
            return []
        self.drill = None
        duration_ns = now_ns - drill.began_ns
        text = f"{drill.blocks} blocks were back after {duration_ns / NS_PER_MS:.0f} ms"
        return [
            TakeBackMeasured(replica, drill.blocks, duration_ns),
            Say("info", "take_back_measured", text, replica),
        ]

    def overdue(self, replica: ReplicaId, now_ns: int) -> list[NodeEffect]:
        """End a drill that takes too long."""
        drill = self.drill
        if drill is None or now_ns - drill.began_ns < DRILL_NS_MAX:
            return []
        self.drill = None
        text = f"{drill.blocks} blocks were not given back within {DRILL_NS_MAX // NS_PER_S} s"
        return [
            TakeBackMeasured(replica, drill.blocks, DRILL_NS_MAX),
            Say("warning", "take_back_failed", text, replica),
        ]


def set_terms(
    replicas: Mapping[ReplicaId, HostedReplica], event: LendingDecided | DrillRequested, now_ns: int
) -> list[NodeEffect]:
    """The lender decided; what follows is published with the gates."""
    lent = {name: hosted for name, hosted in replicas.items() if hosted.memory is not None}
    match event:
        case LendingDecided(closed=closed, text=text, reserve_bytes=reserve_bytes):
            known = closed in GateReason._value2member_map_
            reason = None if closed is None else GateReason(closed) if known else GateReason.LENDING_OFF
            changed = False
            for hosted in lent.values():
                changed = changed or hosted.terms.closed is not reason
                hosted.set_terms(reason, reserve_bytes)
            if not changed or reason in _BRIEF:
                return []
            level = "info" if reason in {None, GateReason.OUTSIDE_HOURS} else "warning"
            return [Say(level, reason.name.lower() if reason else "lending", text)]
        case DrillRequested(replica=replica, blocks=blocks):
            return lent[replica].drill(blocks, now_ns) if replica in lent else []
        case _:
            assert_never(event)
