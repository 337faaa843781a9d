"""The slots of a board's page: used by C code with atomic words where that was built, else by Python.

Both write and read the same bytes (the format is in `rose.boards`).  Python's plain accesses lean on the
checksum: on a machine that reorders stores a reader finds a board torn more often, but never a wrong number.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
import zlib
from typing import Any, Protocol

from rose_kernels.shared import shared_library

MAGIC = 0x3144_5242_4553_4F52  # "ROSEBRD1"
HEADER = struct.Struct("<QIIqqQ")
SEQUENCE_AT = 32
SLOTS_AT = (64, 1024)
WORDS_MAX = 118
_ATTEMPTS = 3
_U64 = struct.Struct("<Q")
_DESK = struct.Struct("=QQQ")  # of C's rose_board: the page's address, layout, words; then comes the record
_TROUBLE = ("", "board_empty", "board_torn", "board_foreign")  # as ROSE_BOARD_* in kernels/csrc/boards.h


class Slots(Protocol):
    """The records of one page."""

    def publish(self, record: tuple[int, ...]) -> None:
        """Make `record` what every reader sees; struct.error and no change if a word is too large."""

    def read(self) -> tuple[int, ...] | str:
        """The latest record, or why there is none."""


def slots_of(page: mmap.mmap, layout: int, words: int) -> Slots:
    """The best way to use the records of `words` words on a mapped page."""
    library = shared_library()
    if library is None or sys.byteorder != "little":
        return PlainSlots(page, layout, words)
    return AtomicSlots(library, page, layout, words)


class PlainSlots:
    """In Python."""

    def __init__(self, page: mmap.mmap, layout: int, words: int) -> None:
        self._page = page
        self._view = memoryview(page)
        self._layout = layout
        self._slot = struct.Struct(f"<Q{words}q")

    def publish(self, record: tuple[int, ...]) -> None:
        """See `Slots`."""
        sequence = int(_U64.unpack_from(self._page, SEQUENCE_AT)[0]) + 1
        offset = SLOTS_AT[sequence & 1]
        end = offset + self._slot.size
        self._slot.pack_into(self._page, offset, sequence, *record)
        _U64.pack_into(self._page, end, zlib.crc32(self._view[offset:end]))
        _U64.pack_into(self._page, SEQUENCE_AT, sequence)

    def read(self) -> tuple[int, ...] | str:
        """See `Slots`."""
        magic, layout, _, _, _, sequence = HEADER.unpack_from(self._page, 0)
        if magic != MAGIC or layout != self._layout:
            return "board_foreign"
        for _ in range(_ATTEMPTS):
            if sequence == 0:
                return "board_empty"
            offset = SLOTS_AT[sequence & 1]
            image = self._page[offset : offset + self._slot.size + 8]
            if zlib.crc32(image[:-8]) == int.from_bytes(image[-8:], "little"):
                seen, *words = self._slot.unpack_from(image)
                if seen == sequence:
                    return tuple(words)
            (sequence,) = _U64.unpack_from(self._page, SEQUENCE_AT)
        return "board_torn"


class AtomicSlots:
    """In C, see kernels/csrc/boards.h.  Several threads may read, as a call keeps the GIL."""

    def __init__(self, library: Any, page: mmap.mmap, layout: int, words: int) -> None:
        self._mapped = ctypes.c_char.from_buffer(page)  # keeps the page mapped
        self._words = struct.Struct(f"<{words}q")
        self._desk = bytearray(_DESK.size + 8 * WORDS_MAX)
        _DESK.pack_into(self._desk, 0, ctypes.addressof(self._mapped), layout, words)
        self._pinned = ctypes.c_char.from_buffer(self._desk)  # keeps the desk where it is
        self._address = ctypes.addressof(self._pinned)
        self._publish, self._read = library.rose_board_publish, library.rose_board_read

    def publish(self, record: tuple[int, ...]) -> None:
        """See `Slots`."""
        self._words.pack_into(self._desk, _DESK.size, *record)
        self._publish(self._address)

    def read(self) -> tuple[int, ...] | str:
        """See `Slots`."""
        if trouble := self._read(self._address):
            return _TROUBLE[trouble]
        return self._words.unpack_from(self._desk, _DESK.size)
