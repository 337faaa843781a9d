"""What happened to each turn and why, for `rose explain`: the last ones, in memory.

Everything is in the scheduler's journal too; this keeps the words of the last `turns_max` turns at hand.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rose.core.effects import ClusterEffect, DispatchTurn, FailTurn, StopTurn
from rose.core.events import (
    ClusterEvent,
    TurnArrived,
    TurnCancelled,
    TurnFinished,
    TurnInterrupted,
    TurnRefused,
)
from rose.core.routing import AFFINITY, GROUP, LEAST_LOADED, RETURNED, SERVING, TAIL
from rose.units import TurnId

_REASONS = {
    AFFINITY: "it holds the trajectory's prefix",
    GROUP: "it holds the prompt of the turn's group, and is not much more loaded than the best",
    TAIL: "few trajectories are left in the step, and this dedicated replica is idle",
    SERVING: "a borrowed replica, loaded no more than the best dedicated one",
    LEAST_LOADED: "the least loaded dedicated replica",
    RETURNED: "the replica that interrupted it last; its back-off is over and no other takes the turn",
}
_REROUTED = "rerouted:"


class Line(msgspec.Struct, frozen=True):
    """One thing that happened."""

    at_s: float
    """Seconds since 1970."""
    code: str
    text: str


class Record(msgspec.Struct):
    """One run of a turn id."""

    turn: str
    job: str
    trajectory: str
    lines: list[Line] = msgspec.field(default_factory=list)


class Chronicle:
    """Fed with every event and its effects."""

    def __init__(self, clock_s: Callable[[], float], turns_max: int = 10_000) -> None:
        self._clock_s = clock_s
        self._turns_max = turns_max
        self._records: OrderedDict[TurnId, Record] = OrderedDict()

    def note(self, event: ClusterEvent, effects: Sequence[ClusterEffect]) -> None:
        """Keep what concerns turns."""
        if isinstance(event, TurnArrived):
            self._begin(event)
        elif isinstance(event, TurnFinished | TurnInterrupted | TurnRefused | TurnCancelled):
            self._add(event.turn, *_of_event(event))
        for effect in effects:
            if isinstance(effect, DispatchTurn | StopTurn | FailTurn):
                self._add(effect.turn, *_of_effect(effect))
        if isinstance(event, TurnArrived) and not any(_concerns(effect, event.turn) for effect in effects):
            self._add(event.turn, "queued", "no replica takes a turn of its job now")

    def find(self, turn: str) -> list[dict[str, Any]]:
        """The runs of a turn id, oldest first; none if it is not known (any more)."""
        found = [record for key, record in self._records.items() if _name(key) == turn]
        return [msgspec.to_builtins(record) for record in found]

    def _begin(self, event: TurnArrived) -> None:
        if event.turn in self._records:
            return
        record = Record(_name(event.turn), event.job, event.trajectory)
        self._records[event.turn] = record
        wants = f"{event.prompt_tokens} prompt tokens, at most {event.tokens_max} more"
        if event.version_min is not None:
            wants += f", version {event.version_min} or later"
        self._add(event.turn, "arrived", wants)
        if len(self._records) > self._turns_max:
            self._records.popitem(last=False)

    def _add(self, turn: TurnId, code: str, text: str) -> None:
        if (record := self._records.get(turn)) is not None:
            record.lines.append(Line(self._clock_s(), code, text))


def _of_event(event: TurnFinished | TurnInterrupted | TurnRefused | TurnCancelled) -> tuple[str, str]:
    match event:
        case TurnFinished():
            return "finished", f"on {event.replica} with {event.tokens} tokens in this attempt"
        case TurnInterrupted():
            kept = f"{event.tokens} tokens of this attempt are kept"
            return "interrupted", f"on {event.replica}: {event.reason}; {kept}"
        case TurnRefused():
            return "refused", f"by {event.replica}: no engine would run the request"
        case TurnCancelled():
            return "cancelled", "the client went away"


def _of_effect(effect: DispatchTurn | StopTurn | FailTurn) -> tuple[str, str]:
    match effect:
        case DispatchTurn():
            why = effect.why.removeprefix(_REROUTED)
            return "sent", f"to {effect.replica}, attempt {effect.attempt}: {_REASONS.get(why, why)}"
        case StopTurn():
            return "stopped", f"on {effect.replica}: {effect.reason}"
        case FailTurn():
            return "failed", f"{effect.status} {effect.code}: {effect.text}"


def _concerns(effect: ClusterEffect, turn: TurnId) -> bool:
    return isinstance(effect, DispatchTurn | StopTurn | FailTurn) and effect.turn == turn


def _name(turn: TurnId) -> str:
    """The id that the client knows: the key is `<job>/<turn id>/<run>`."""
    return turn.partition("/")[2].rpartition("/")[0] or turn
