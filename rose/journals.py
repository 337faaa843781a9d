"""rosed's journals: their lines, and how they are read from its state directory.

Decisions are in `journal.jsonl` beside every observation, so lines without effects are passed over unread.
Instants are CLOCK_MONOTONIC; they become times of day by the clocks of this boot, and those of an earlier
boot, which have no place on this one's clock, are told apart where they can be.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from rose.core.effects import NodeEffect
from rose.core.events import NodeEvent
from rose.core.readings import GateReason, GateTransition
from rose.errors import NotFound, RoseError
from rose.units import NS_PER_S, ReplicaId

DECISIONS = "journal.jsonl"
GATES = "gates.jsonl"
ROTATED = ".1"
"""What the former file of each has behind its name: see `files_of`."""
_NO_EFFECTS = b'"effects":[]}'


class Entry(msgspec.Struct, frozen=True):
    """A line of the journal of decisions: what the machine was told, and what it decided."""

    now_ns: int
    event: NodeEvent
    effects: tuple[NodeEffect, ...]


class GateEntry(msgspec.Struct, frozen=True):
    """A line of the gates' journal: a transition, fetched from the ring of a rollout engine."""

    replica: ReplicaId
    reason: str
    transition: dict[str, int]
    """The words of a GateTransition."""

    @classmethod
    def of(cls, replica: ReplicaId, transition: GateTransition) -> GateEntry:
        """A transition for the journal."""
        return cls(replica, GateReason(transition.reason).name.lower(), transition._asdict())

    def as_transition(self) -> GateTransition:
        """The transition again."""
        return GateTransition(**self.transition)


class _Line(msgspec.Struct, frozen=True):
    """An `Entry` of any release, as far as it is shown."""

    now_ns: int
    event: dict[str, Any]
    effects: list[dict[str, Any]]


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, as `rose events` shows it."""

    at_s: float
    """Unix time."""
    level: str
    code: str
    """Stable: that of the log line, or the effect's name in snake_case."""
    subject: str
    text: str
    cause: str
    """The event that led to it."""


class GateChange(NamedTuple):
    """A gate changed its answer or the reason for it."""

    at_s: float
    replica: str
    tokens: int
    reason: str
    waiting: int
    running: int


_line = msgspec.json.Decoder(_Line)
_entry = msgspec.json.Decoder(Entry)
_gate_entry = msgspec.json.Decoder(GateEntry)
_SILENT = {"ReportNow"}
E = TypeVar("E")


def files_of(path: Path) -> tuple[Path, Path]:
    """The former file, which is there once it was rotated, and the present one."""
    return path.with_name(path.name + ROTATED), path


def decoded(decoder: msgspec.json.Decoder[E], lines: Iterable[bytes]) -> Iterator[E]:
    """The lines that can be decoded: others were cut short, lost with a disk, or are of another release."""
    for line in lines:
        try:
            entry = decoder.decode(line)
        except msgspec.DecodeError:
            continue
        yield entry


def read(path: Path) -> tuple[list[Entry], list[int]]:
    """All entries of a file, and the numbers of lines that are none: cut short, or lost with a disk.

    Raises OSError.
    """
    entries, damaged = [], []
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                entries.append(_entry.decode(line))
            except msgspec.DecodeError:
                damaged.append(number)
    return entries, damaged


def read_gates(path: Path, replica: ReplicaId) -> list[GateEntry]:
    """All transitions of a replica in a file; lines that cannot be read are left out.  Raises OSError."""
    with path.open("rb") as stream:
        return [entry for entry in decoded(_gate_entry, stream) if entry.replica == replica]


def happenings(state_dir: Path, since_s: float) -> Iterator[Happening]:
    """What rosed decided since a Unix time, oldest first.  Raises NotFound, RoseError."""
    offset_s = time.time() - time.monotonic()
    told = (text for text in _lines(state_dir, DECISIONS) if not text.rstrip().endswith(_NO_EFFECTS))
    for line in decoded(_line, told):
        at_s = _time(line.now_ns, offset_s)
        if at_s is None or at_s < since_s:
            continue
        for effect in line.effects:
            if effect.get("type") not in _SILENT:
                yield _happening(at_s, effect, str(line.event.get("type", "")))


def gate_changes(state_dir: Path, since_s: float) -> Iterator[GateChange]:
    """Transitions of the gates since a Unix time, oldest first.  Raises NotFound, RoseError."""
    offset_s = time.time() - time.monotonic()
    for line in decoded(_gate_entry, _lines(state_dir, GATES)):
        words = line.transition
        at_s = _time(words.get("at_ns", 0), offset_s)
        if at_s is not None and at_s >= since_s:
            counts = (words.get(name, 0) for name in ("waiting", "running"))
            yield GateChange(at_s, line.replica, words.get("tokens", 0), line.reason, *counts)


def _time(at_ns: int, offset_s: float) -> float | None:
    """Unix time; None for an instant that this boot has not seen yet: it is of an earlier one."""
    at_s = at_ns / NS_PER_S
    return at_s + offset_s if at_s <= time.monotonic() else None


def _lines(state_dir: Path, name: str) -> Iterator[bytes]:
    path = state_dir / name
    found = False
    for file in files_of(path):
        try:
            with file.open("rb") as stream:
                found = True
                yield from stream
        except FileNotFoundError:
            continue
        except OSError as error:
            raise RoseError(f"{file}: {error.strerror}", "run as the user that rosed runs as") from None
    if not found:
        raise NotFound(f"{path}: there is no journal", "has rosed run here?  see node.state_dir")


def _happening(at_s: float, effect: dict[str, Any], cause: str) -> Happening:
    kind = str(effect.get("type", ""))
    if kind == "Say":
        level, code = str(effect.get("level", "info")), str(effect.get("code", ""))
        subject, text = str(effect.get("subject", "")), str(effect.get("text", ""))
    else:
        level, code = "info", _snake(kind)
        subject, text = str(effect.get("replica", effect.get("job", ""))), _text(kind, effect)
    return Happening(at_s=at_s, level=level, code=code, subject=subject, text=text, cause=cause)


def _text(kind: str, effect: dict[str, Any]) -> str:
    match kind:
        case "StartEngine":
            return f"attempt {effect.get('attempt')}"
        case "StopEngine":
            return str(effect.get("reason", ""))
        case "PublishGate":
            policy = effect.get("policy") or []
            names = ("revision", "mode", "token_cap", "kv_budget_blocks", "rl_step")
            return ", ".join(f"{name} {value}" for name, value in zip(names, policy, strict=False))
        case "PullVersion" | "ApplyVersion":
            return f"version {effect.get('version')} on {effect.get('base_version')}"
        case "TakeBackMeasured":
            return f"{effect.get('blocks')} blocks in {effect.get('duration_ns', 0) / 1e6:.0f} ms"
        case _:
            rest = {name: value for name, value in effect.items() if name not in ("type", "replica", "job")}
            return ", ".join(f"{name} {value}" for name, value in rest.items())


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
