"""Turns that the scheduler has accepted and not yet ended, and the order in which waiting ones run."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from rose.core.readings import NEVER
from rose.core.routing import Router
from rose.core.staleness import Births
from rose.core.versions import JobVersions, VersionWish
from rose.units import JobId, ReplicaId, TrajectoryId, TurnId


@dataclass(slots=True)
class Turn:
    """One LLM call that waits (`replica` None) or runs."""

    id: TurnId
    job: JobId
    trajectory: TrajectoryId
    weight: int
    """Prompt tokens and most output tokens: its share of a replica's load."""
    versions: VersionWish
    hint: bool
    """Its trajectory is a guess."""
    resumes: bool
    """Its trajectory has run before, or it has itself: such turns go first."""
    group: str = ""
    task: str = ""
    prompt_tokens: int = 0
    replica: ReplicaId | None = None
    attempt: int = 0
    tokens: int = 0
    """Tokens of the present attempt."""
    fruitless: int = 0
    """Attempts in a row that ended without a token."""
    avoid: ReplicaId | None = None
    avoid_until_ns: int = 0
    progress_ns: int = 0
    """When the present attempt began or last produced a token."""
    progress_open_ns: int = 0
    """The replica's open-gate clock at `progress_ns`."""


class TurnCounts(msgspec.Struct):
    """Since start, but for `queued` and `in_flight`.

    arrived = finished + failed + cancelled + queued + in_flight.
    """

    arrived: int = 0
    finished: int = 0
    interrupted: int = 0
    """Attempts that ended before their turn did."""
    rerouted: int = 0
    """Dispatches after a turn's first one."""
    failed: int = 0
    cancelled: int = 0
    queued: int = 0
    in_flight: int = 0


class TurnQueue:
    """One job's waiting turns: those whose trajectory has run go first, each lane in order of arrival.

    A turn that no open replica suits steps aside until something changes, so that it holds up nobody.
    """

    def __init__(self) -> None:
        self._resuming: OrderedDict[TurnId, Turn] = OrderedDict()
        self._fresh: OrderedDict[TurnId, Turn] = OrderedDict()
        self._aside: OrderedDict[TurnId, Turn] = OrderedDict()
        self.wake_ns = NEVER
        """When a turn that stepped aside should be tried again at the latest."""

    def __len__(self) -> int:
        return len(self._resuming) + len(self._fresh) + len(self._aside)

    def __bool__(self) -> bool:
        return bool(self._fresh or self._resuming or self._aside)

    def push(self, turn: Turn) -> None:
        """Append to its lane."""
        self._lane(turn)[turn.id] = turn

    def head(self) -> Turn | None:
        """The turn to be tried next."""
        for lane in (self._resuming, self._fresh):
            for turn in lane.values():
                return turn
        return None

    def set_aside(self, turn: Turn, until_ns: int) -> None:
        """Take the turn out of the way until `wake`, to be called at `until_ns` if not before."""
        del self._lane(turn)[turn.id]
        self._aside[turn.id] = turn
        self.wake_ns = min(self.wake_ns, until_ns)

    def wake(self) -> None:
        """Put turns that stepped aside back to the heads of their lanes."""
        for turn in reversed(self._aside.values()):
            lane = self._lane(turn)
            lane[turn.id] = turn
            lane.move_to_end(turn.id, last=False)
        self._aside.clear()
        self.wake_ns = NEVER

    def discard(self, turn: Turn) -> None:
        """Remove the turn wherever it waits."""
        if self._lane(turn).pop(turn.id, None) is None:
            del self._aside[turn.id]

    def _lane(self, turn: Turn) -> OrderedDict[TurnId, Turn]:
        return self._resuming if turn.resumes else self._fresh


@dataclass(slots=True)
class JobTurns:
    """One job's live turns, and where they run."""

    job: JobId
    router: Router
    versions: JobVersions
    births: Births
    queue: TurnQueue = field(default_factory=TurnQueue)
    live: dict[TurnId, Turn] = field(default_factory=dict)
    rolling: bool = False
    """A step's rollouts are under way, so that few turns left means its tail."""
    paused: bool = False
    """The client holds its turns back."""
    tokens_ended: int = 0
    """Of attempts that have ended."""
    stale: int = 0
    """Trajectories that were over-stale so far."""
