"""Bounded shared-memory rings: records that an engine writes in passing, and rosed fetches.

A ring is a file under /dev/shm with one writer and one reader.  A full ring drops what comes next and
counts it: the writer is in the middle of a step and waits for nobody.  Each record carries a checksum over
itself and its number, so that the reader skips what a dying writer left half done.  A ring that is cut short
is made whole again by its writer, at the price of what was in it (see `rose.boards`).

Layout, little-endian: magic u64 | layout u32 | records u32 | written u64 | fetched u64 | dropped u64 | ... |
records from 64 on.  Record: words i64 x n, crc32 u64.  `written` and `dropped` are the writer's words,
`fetched` is the reader's.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import Generic, TypeVar

from rose.boards import SharedFile

RECORDS = 512
"""Room of a ring: ten seconds of a gate that changes fifty times a second."""
_MAGIC = 0x3147_4E52_4553_4F52  # "ROSERNG1"
_HEADER = struct.Struct("<QII")
_U64 = struct.Struct("<Q")
_WRITTEN_AT, _FETCHED_AT, _DROPPED_AT, _RECORDS_AT = 16, 24, 32, 64

RecordT = TypeVar("RecordT", bound=tuple[int, ...])


class _Shape(Generic[RecordT]):
    """Sizes of a ring of one kind of record (a NamedTuple of ints)."""

    def __init__(self, kind: type[RecordT]) -> None:
        self.kind = kind
        fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
        self.words = struct.Struct(f"<{len(fields)}q")
        self.layout = zlib.crc32(",".join((kind.__name__, *fields)).encode())
        self.stride = self.words.size + _U64.size
        self.size = _RECORDS_AT + RECORDS * self.stride

    def offset(self, number: int) -> int:
        return _RECORDS_AT + number % RECORDS * self.stride

    def checksum(self, image: bytes, number: int) -> int:
        return zlib.crc32(image, number & 0xFFFF_FFFF)

    def matches(self, page: mmap.mmap) -> bool:
        return _HEADER.unpack_from(page, 0) == (_MAGIC, self.layout, RECORDS)


class RingWriter(Generic[RecordT]):
    """The one writer.  Goes on where a former one stopped; a file of another kind is made anew.

    Raises OSError when the file cannot be made.
    """

    def __init__(self, path: Path, kind: type[RecordT]) -> None:
        self._shape = _Shape(kind)
        if path.exists() and path.stat().st_size != self._shape.size:
            path.unlink()  # never cut a file that a reader may have mapped
        self._file = SharedFile(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), self._shape.size)
        if not self._file.whole():
            os.ftruncate(self._file.descriptor, self._shape.size)
        self._page = mmap.mmap(self._file.descriptor, self._shape.size)
        if not self._shape.matches(self._page):
            self._clear()
        self._written = self._word(_WRITTEN_AT)
        self.dropped = self._word(_DROPPED_AT)
        """Records that found no room, since the ring was made; what was in one that was cut counts as one."""

    def _clear(self) -> None:
        self._page[:] = bytes(self._shape.size)
        _HEADER.pack_into(self._page, 0, _MAGIC, self._shape.layout, RECORDS)

    def _make_whole(self) -> None:
        """Begin anew after somebody cut the file short: nobody knows what of it had been fetched."""
        os.ftruncate(self._file.descriptor, self._shape.size)
        self._clear()
        self.dropped += 1
        for offset, word in (
            (_WRITTEN_AT, self._written),
            (_FETCHED_AT, self._written),
            (_DROPPED_AT, self.dropped),
        ):
            _U64.pack_into(self._page, offset, word)

    def _word(self, offset: int) -> int:
        return int(_U64.unpack_from(self._page, offset)[0])

    def write(self, record: RecordT) -> bool:
        """Add a record; False if the ring was full, and it is lost."""
        if not self._file.whole():  # to touch what lies past its end would end this process
            self._make_whole()
        if self._written - self._word(_FETCHED_AT) >= RECORDS:
            self.dropped += 1
            _U64.pack_into(self._page, _DROPPED_AT, self.dropped)
            return False
        offset = self._shape.offset(self._written)
        end = offset + self._shape.words.size
        self._shape.words.pack_into(self._page, offset, *record)
        crc = self._shape.checksum(self._page[offset:end], self._written)
        _U64.pack_into(self._page, end, crc)
        self._written += 1
        _U64.pack_into(self._page, _WRITTEN_AT, self._written)
        return True


class RingReader(Generic[RecordT]):
    """The one reader.  A ring that is not there yet, is cut short or foreign has no records."""

    def __init__(self, path: Path, kind: type[RecordT]) -> None:
        self.path = path
        self._shape = _Shape(kind)
        self._page: mmap.mmap | None = None
        self._inode = 0
        self.torn = 0
        """Records that were skipped, as their checksum was wrong."""
        self.dropped = 0
        """Records that the writer could not place, as of the latest `fetch`."""

    def fetch(self) -> list[RecordT]:
        """All records since the last call, oldest first; makes room for further ones."""
        page = self._page = self._open()
        if page is None:
            self.dropped = 0
            return []
        (self.dropped,) = _U64.unpack_from(page, _DROPPED_AT)
        (written,) = _U64.unpack_from(page, _WRITTEN_AT)
        (fetched,) = _U64.unpack_from(page, _FETCHED_AT)
        if not written - RECORDS <= fetched <= written:  # nobody we know wrote that
            self.torn += 1
            fetched = written
        records = []
        for number in range(fetched, written):
            offset = self._shape.offset(number)
            image = page[offset : offset + self._shape.words.size]
            (crc,) = _U64.unpack_from(page, offset + self._shape.words.size)
            if crc == self._shape.checksum(image, number):
                records.append(self._shape.kind(*self._shape.words.unpack(image)))
            else:
                self.torn += 1
        _U64.pack_into(page, _FETCHED_AT, written)
        return records

    def _open(self) -> mmap.mmap | None:
        """The ring as it is now: a later engine may have made it anew."""
        try:
            status = self.path.stat()
            if status.st_size != self._shape.size:
                return None
            if self._page is None or status.st_ino != self._inode:
                with self.path.open("r+b") as file:
                    self._page, self._inode = mmap.mmap(file.fileno(), self._shape.size), status.st_ino
        except (OSError, ValueError):
            return None
        return self._page if self._shape.matches(self._page) else None
