"""Writes journals: one line for each event, or for whatever else happens often."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import structlog

from rose.core.effects import NodeEffect
from rose.core.events import NodeEvent
from rose.journals import Entry, files_of

log = structlog.get_logger("rosed")


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
                former, present = files_of(self._path)
                present.replace(former)
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
