"""The journal of decisions: one line (now, event, effects) for each event."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from rose.core.effects import NodeEffect
from rose.core.events import NodeEvent
from rose.core.readings import GateReason, GateTransition
from rose.units import ReplicaId

ROTATED = ".1"
GATES_NAME = "gates.jsonl"
"""The gates' journal, in the state directory."""


class Entry(msgspec.Struct, frozen=True):
    """One line."""

    now_ns: int
    event: NodeEvent
    effects: tuple[NodeEffect, ...]


class GateEntry(msgspec.Struct, frozen=True):
    """One line of the gates' journal: a transition, fetched from the ring of a rollout engine."""

    replica: ReplicaId
    reason: str
    transition: dict[str, int]
    """The words of a GateTransition."""

    @classmethod
    def of(cls, replica: ReplicaId, transition: GateTransition) -> GateEntry:
        """A transition for the journal."""
        return cls(replica, GateReason(transition.reason).name.lower(), transition._asdict())


_decoder = msgspec.json.Decoder(Entry)
_gate_decoder = msgspec.json.Decoder(GateEntry)


class Journal:
    """Appends to a file that is rotated at `bytes_max`; one former file is kept.

    Every event is in it, observations included, so that replaying a journal from the start of rosed
    through a fresh machine gives the same effects.  That holds until the second rotation, after about an hour
    with two replicas at the default size and tick; later it is the record of the latest decisions.
    A disk that fails costs entries, counted in `lost`, and never a decision.
    """

    def __init__(self, path: Path, bytes_max: int) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._encoder = msgspec.json.Encoder()
        self.lost = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO | None = path.open("ab")

    def write(self, now_ns: int, event: NodeEvent, effects: Sequence[NodeEffect]) -> None:
        """Append what the machine was told, and what it decided."""
        self.append(Entry(now_ns, event, tuple(effects)))

    def append(self, entry: Entry | GateEntry) -> None:
        """Append one line."""
        line = self._encoder.encode(entry) + b"\n"
        try:
            file = self._file or self._path.open("ab")
            if file.tell() + len(line) > self._bytes_max:
                file.close()
                self._path.replace(self._path.with_name(self._path.name + ROTATED))
                file = self._path.open("ab")
            self._file = file
            file.write(line)
        except OSError:
            self.lost += 1
            self._file = None

    def flush(self) -> None:
        """Hand buffered lines to the system."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError:
                self.lost += 1

    def close(self) -> None:
        """Flush and close."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def read(path: Path) -> list[Entry]:
    """All entries of a journal file; a last line that was cut short is left out."""
    return [_decoder.decode(line) for line in _lines(path)]


def read_gates(path: Path, replica: ReplicaId) -> list[GateTransition]:
    """All transitions of a replica in a gates' journal; a last line that was cut short is left out."""
    entries = (_gate_decoder.decode(line) for line in _lines(path))
    return [GateTransition(**entry.transition) for entry in entries if entry.replica == replica]


def _lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
