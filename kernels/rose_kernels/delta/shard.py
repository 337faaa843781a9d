"""The blob of one shard: a header with a directory of its chunks, then their payloads.

A header names everything that follows by its digest, so that one digest of the header vouches for the shard
and a reader may fetch only the chunks it needs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from rose_kernels.delta.buffers import Cursor, varint
from rose_kernels.delta.elements import BY_CODE, ElementFormat
from rose_kernels.delta.errors import CorruptDelta
from rose_kernels.delta.tables import CHUNK_ELEMENTS_MAX

SHARD_MAGIC = b"RDS1"
_FIXED = struct.Struct("<4sBBBBQQQI")
_CHUNK_LOG2_MAX = CHUNK_ELEMENTS_MAX.bit_length() - 1
HEADER_BYTES_FIXED = _FIXED.size


class Mode(IntEnum):
    """How a shard's chunks are coded."""

    WHOLE = 0
    """Dense, by itself: no base is needed."""
    STEPS = 1
    """Dense, as steps from the base."""
    SPARSE = 2
    """The changed elements by exponent class, with the group's tables."""


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where a chunk's elements and its payload lie; `offset` counts from the shard's first byte."""

    first: int
    last: int
    offset: int
    length: int
    digest: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """A shard's header: mode, format, sizes, digests, and the directory of its chunks.

    `tables` is the identity of the group's tables (0 if dense), `changed` the number of elements that differ
    from the base (of all elements if there is none).  Digests are xxh3-128 of the shard's base and target
    bytes, or None if the sender left them to the manifest.
    """

    mode: Mode
    element: ElementFormat
    chunk_log2: int
    elements: int
    changed: int
    tables: int
    base_digest: bytes | None
    target_digest: bytes | None
    length: int
    chunks: tuple[ChunkPlace, ...]

    @property
    def chunk_elements(self) -> int:
        """Elements of every chunk but the last."""
        return 1 << self.chunk_log2


def write_shard(
    mode: Mode,
    element: ElementFormat,
    chunk_log2: int,
    elements: int,
    changed: int,
    tables: int,
    digests: tuple[bytes | None, bytes | None],
    payloads: Sequence[bytes],
) -> bytes:
    """Header and payloads of a shard."""
    flags = sum(1 << bit for bit, digest in enumerate(digests) if digest is not None)
    directory = b"".join(
        varint(len(item)) + (xxhash.xxh3_64_intdigest(item).to_bytes(8, "little") if item else b"")
        for item in payloads
    )
    rest = b"".join(digest for digest in digests if digest is not None) + directory
    header_bytes = _FIXED.size + len(rest) + 8
    fixed = _FIXED.pack(
        SHARD_MAGIC, mode, element.code, chunk_log2, flags, elements, changed, tables, header_bytes
    )
    header = fixed + rest
    return header + xxhash.xxh3_64_intdigest(header).to_bytes(8, "little") + b"".join(payloads)


def header_length(data: bytes | memoryview) -> int:
    """Bytes of the header, from its first `HEADER_BYTES_FIXED` bytes.  Raises CorruptDelta."""
    if len(data) < _FIXED.size or bytes(data[:4]) != SHARD_MAGIC:
        raise CorruptDelta("not a shard of a delta")
    length = int(_FIXED.unpack(data[: _FIXED.size])[-1])
    if length < _FIXED.size + 8:
        raise CorruptDelta("a header shorter than its fixed part")
    return length


def read_header(data: bytes | memoryview) -> ShardHeader:
    """Read and check a shard's header; `data` is the shard or at least its header.  Raises CorruptDelta."""
    length = header_length(data)
    if length > len(data):
        raise CorruptDelta(f"a header of {length} bytes in {len(data)}")
    header = bytes(data[:length])
    if xxhash.xxh3_64_intdigest(header[:-8]) != int.from_bytes(header[-8:], "little"):
        raise CorruptDelta("a header does not match its digest")
    _, mode, code, chunk_log2, flags, elements, changed, tables, _ = _FIXED.unpack(header[: _FIXED.size])
    element = _require_known(mode, code, chunk_log2, flags)
    if changed > elements:
        raise CorruptDelta(f"{changed} of {elements} elements changed")
    cursor = Cursor(memoryview(header)[:-8], _FIXED.size)
    digests = [bytes(cursor.take(16)) if flags >> bit & 1 else None for bit in range(2)]
    chunk_elements = 1 << chunk_log2
    if -(-elements // chunk_elements) > cursor.left:
        raise CorruptDelta(f"a directory of {cursor.left} bytes for {elements} elements")
    chunks = []
    offset = length
    for first in range(0, elements, chunk_elements):
        size = cursor.varint()
        digest = cursor.uint(8) if size else 0
        chunks.append(ChunkPlace(first, min(first + chunk_elements, elements), offset, size, digest))
        offset += size
    if cursor.left:
        raise CorruptDelta(f"{cursor.left} bytes after the directory")
    return ShardHeader(
        Mode(mode),
        element,
        chunk_log2,
        elements,
        changed,
        tables,
        digests[0],
        digests[1],
        offset,
        tuple(chunks),
    )


def _require_known(mode: int, code: int, chunk_log2: int, flags: int) -> ElementFormat:
    element = BY_CODE.get(code)
    if element is None or mode not in set(Mode) or chunk_log2 > _CHUNK_LOG2_MAX or flags > 3:
        raise CorruptDelta(f"unknown mode {mode}, format {code}, chunks of 2^{chunk_log2} or flags {flags}")
    if mode == Mode.SPARSE and not element.can_be_sparse:
        raise CorruptDelta(f"{element.name} cannot be sparse")
    return element
