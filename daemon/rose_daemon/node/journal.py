"""The journal of decisions: one line (now, event, effects) for each event."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import structlog

from rose.core.effects import NodeEffect
from rose.core.events import NodeEvent
from rose.core.readings import GateReason, GateTransition
from rose.units import ReplicaId

log = structlog.get_logger("rosed")

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


E = TypeVar("E")

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

    def append(self, entry: msgspec.Struct) -> None:
        """Append one line."""
        # After a loss what was written last may have been cut short: a new line has to begin.
        line = (b"" if self._file else b"\n") + self._encoder.encode(entry) + b"\n"
        try:
            file = self._file = self._file or self._path.open("ab")
            if file.tell() + len(line) > self._bytes_max:
                file.close()
                self._path.replace(self._path.with_name(self._path.name + ROTATED))
                file = self._file = self._path.open("ab")
            file.write(line)
        except OSError as error:
            self._lose(error)

    def flush(self) -> None:
        """Hand buffered lines to the system."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        # What the file still holds in its buffer goes with it, or every later flush would fail anew.
        self.lost += 1
        text = "entries are lost: the disk does not take them"
        log.error(text, code="journal_lost", subject=self._path.name, lost=self.lost, error=error.strerror)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def close(self) -> None:
        """Flush and close."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def read(path: Path) -> list[Entry]:
    """All entries of a journal file; lines that were cut short are left out."""
    return _decoded(_decoder, path)


def read_gates(path: Path, replica: ReplicaId) -> list[GateTransition]:
    """All transitions of a replica in a gates' journal; lines that were cut short are left out."""
    entries = _decoded(_gate_decoder, path)
    return [GateTransition(**entry.transition) for entry in entries if entry.replica == replica]


def _decoded(decoder: msgspec.json.Decoder[E], path: Path) -> list[E]:
    entries = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(msgspec.DecodeError):
            entries.append(decoder.decode(line))
    return entries
