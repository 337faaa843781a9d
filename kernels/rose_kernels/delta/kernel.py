"""What a set of kernels offers: the NumPy reference and the C library are interchangeable behind this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rose_kernels.delta.elements import Bytes, Indices, Words
from rose_kernels.delta.plan import Plan
from rose_kernels.delta.tables import Frequencies, GroupTables


@dataclass(frozen=True, slots=True, eq=False)
class SpanSymbols:
    """The changes of a span of chunks as symbols, before tables are known.

    `counts` is [chunk, context]; symbols are in the order they are coded in, chunk after chunk; `raw` holds
    each chunk's raw bits, padded to bytes, `raw_ends` where each chunk's end.
    """

    counts: npt.NDArray[np.uint32]
    gap_symbols: Bytes
    value_symbols: Bytes
    value_contexts: Bytes
    raw: Bytes
    raw_ends: Indices

    @property
    def changed(self) -> int:
        """Elements that changed."""
        return self.gap_symbols.size


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """The changed elements of a span, as whoever holds the elements lists them: in order of index.

    `places` (uint32) hold the rank in the position context (18 bits), the position context (5) and the value
    context (5); `steps` (uint16) are 2 * (|s| - 1) + (s < 0), flips made; `ends` is where each
    chunk's end.  All contiguous.
    """

    places: npt.NDArray[np.uint32]
    steps: npt.NDArray[np.uint16]
    ends: Indices

    def __post_init__(self) -> None:
        if (
            self.places.shape != self.steps.shape
            or np.any(np.diff(self.ends, prepend=0) < 0)
            or self.places.size != (self.ends[-1] if self.ends.size else 0)
        ):
            raise ValueError("places, steps and ends do not belong together")

    def of_chunks(self, part: slice) -> Changes:
        """Those of some consecutive chunks."""
        start = int(self.ends[part.start - 1]) if part.start else 0
        ends = self.ends[part] - start
        here = slice(start, start + int(ends[-1]))
        return Changes(self.places[here], self.steps[here], ends)


@dataclass(frozen=True, slots=True, eq=False)
class Histograms:
    """How often each symbol was met, by context."""

    gaps: npt.NDArray[np.int64]
    values: npt.NDArray[np.int64]


class Packer(Protocol):
    """Entropy-codes spans with one group's tables."""

    def pack(self, symbols: SpanSymbols) -> list[bytes]:
        """One payload per chunk; empty where nothing changed."""
        ...


class Unpacker(Protocol):
    """Decodes spans with one group's tables."""

    def unpack(
        self,
        payloads: Sequence[memoryview],
        base: Words,
        history: Bytes | None,
        chunk_elements: int,
        first: int,
    ) -> tuple[Indices, Words]:
        """Indices, rising and counted from `first`, and new bits.  Raises CorruptDelta; writes nothing."""
        ...

    def apply(
        self, payloads: Sequence[memoryview], base: Words, history: Bytes | None, chunk_elements: int
    ) -> int:
        """Write the new bits into `base` itself; the number of them.  See `ShardReader.apply`."""
        ...


class Kernels(Protocol):
    """A complete set of kernels.

    Bases, targets and histories are contiguous and aligned; chunks have at most 2^18 elements; a span may
    have any number of them.  Every method may be called from several threads at once.
    """

    name: str

    def scan(
        self, plan: Plan, base: Words, target: Words, history: Bytes | None, chunk_elements: int
    ) -> tuple[SpanSymbols, Histograms]:
        """Find and describe what changed."""
        ...

    def symbolise(self, plan: Plan, changes: Changes) -> tuple[SpanSymbols, Histograms]:
        """What `scan` gives for the elements that have these changes.  Raises ValueError if none can."""
        ...

    def packer(self, tables: GroupTables) -> Packer:
        """Prepare tables for encoding."""
        ...

    def unpacker(self, tables: GroupTables) -> Unpacker:
        """Prepare tables for decoding."""
        ...

    def scatter(self, target: Words, indices: Indices, values: Words) -> None:
        """Write values at indices, all of them or (IndexError) none."""
        ...

    def exchange(self, target: Words, indices: Indices, values: Words) -> tuple[Words, bool]:
        """`scatter`, and what was there before; also whether all reads back as written."""
        ...

    def pack_plane(self, plane: Bytes, table: Frequencies) -> bytes:
        """Order-0 code of up to 2^18 bytes."""
        ...

    def unpack_plane(self, coded: memoryview, table: Frequencies, count: int) -> Bytes:
        """Decode what `pack_plane` wrote.  Raises CorruptDelta."""
        ...
