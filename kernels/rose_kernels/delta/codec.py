"""Encode a group of shards, and decode one of them: what other packages call.

group = encode_group([Shard("BF16", base, target), ...])
reader = ShardReader(group.shards[0].data, GroupTables.read(group.tables))
indices, values = reader.decode(base)      # absolute bits, verified, nothing written
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import xxhash

from rose_kernels.delta import planes
from rose_kernels.delta.choice import Pair, Sampled, choose_plan, runs
from rose_kernels.delta.elements import BY_NAME, Bytes, ElementFormat, Indices, Words
from rose_kernels.delta.errors import CorruptDelta
from rose_kernels.delta.kernel import Changes, Histograms, Kernels, SpanSymbols
from rose_kernels.delta.plan import CLASSES_MAX, Plan
from rose_kernels.delta.select import kernels as selected_kernels
from rose_kernels.delta.shard import Mode, ShardHeader, read_header, write_shard
from rose_kernels.delta.tables import CHUNK_ELEMENTS_MAX, GroupTables, frequencies

_In = TypeVar("_In")
_Out = TypeVar("_Out")

_SPAN_CHUNKS = 16
"""Chunks handed to a kernel in one call: enough to make the call's price small, few enough to share out."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One shard to encode: safetensors dtype name, its bits before (None for an anchor) and after.

    `history` is what `history.advance` made of it, or None.  `digests` are xxh3-128 of the base's and the
    target's bytes, to be carried along if the manifest does not.
    """

    dtype: str
    base: Words | None
    target: Words
    history: Bytes | None = None
    digests: tuple[bytes | None, bytes | None] = (None, None)

    def __post_init__(self) -> None:
        word = self.element.word
        for words in (self.target, self.target if self.base is None else self.base):
            if words.dtype != word or words.shape != self.target.shape or words.ndim != 1:
                raise ValueError(f"{self.dtype} wants flat {word} of equal sizes")

    @property
    def element(self) -> ElementFormat:
        """Its row of the table of formats."""
        return BY_NAME[self.dtype]

    @property
    def elements(self) -> int:
        """How many there are."""
        return self.target.size

    @property
    def stateful(self) -> bool:
        """Whether it comes with a history."""
        return self.history is not None

    @property
    def can_be_sparse(self) -> bool:
        """Whether changes can be coded by exponent class."""
        return self.base is not None and self.element.can_be_sparse

    def runs(self, every: int) -> Pair:
        """See `choice.Sampled`."""
        assert self.base is not None
        history = None if self.history is None else runs(self.history, every)
        return runs(self.base, every), runs(self.target, every), history

    def on_host(self) -> Shard:
        """Itself."""
        return self


class DistantShard(Sampled, Protocol):
    """A shard with a base whose elements are not in host memory, such as `device.DeviceShard`.

    It is compared where it lies, once the plan is known; only what changed comes to the host.
    """

    @property
    def dtype(self) -> str:
        """Safetensors dtype name."""
        ...

    @property
    def digests(self) -> tuple[bytes | None, bytes | None]:
        """See `Shard`."""
        ...

    @property
    def element(self) -> ElementFormat:
        """Its row of the table of formats."""
        ...

    @property
    def can_be_sparse(self) -> bool:
        """Whether changes can be coded by exponent class."""
        ...

    def changes(self, plan: Plan, chunk_elements: int) -> Changes:
        """What differs."""
        ...

    def on_host(self) -> Shard:
        """All of it, for what is coded dense."""
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """How to encode.  `classes` is K: 1 for fast links, 4 to 8 else; `threads` share out the work.

    `chunk_log2` is 18 but in tests.  The outcome does not depend on `threads`.
    """

    classes: int = 8
    value_classes: int = CLASSES_MAX
    chunk_log2: int = CHUNK_ELEMENTS_MAX.bit_length() - 1
    threads: int = 1

    def __post_init__(self) -> None:
        if not (1 <= self.classes <= CLASSES_MAX and 1 <= self.value_classes <= CLASSES_MAX):
            raise ValueError(f"1 to {CLASSES_MAX} classes")
        if not 0 <= self.chunk_log2 < CHUNK_ELEMENTS_MAX.bit_length() or self.threads < 1:
            raise ValueError("chunks of at most 2^18 elements, and at least one thread")


@dataclass(frozen=True, slots=True)
class EncodedShard:
    """A shard's blob, how it is coded, and how many elements changed."""

    data: bytes
    mode: Mode
    changed: int


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """The blobs of shards that share tables; `tables` is empty if none of them is sparse."""

    tables: bytes
    shards: tuple[EncodedShard, ...]

    @property
    def nbytes(self) -> int:
        """All of it, as sent."""
        return len(self.tables) + sum(len(shard.data) for shard in self.shards)


# ---- encode -------------------------------------------------------------------------------------


def encode_group(
    shards: Sequence[Shard | DistantShard],
    settings: Settings = Settings(),
    *,
    kernels: Kernels | None = None,
) -> EncodedGroup:
    """Encode shards that share tables: all of one dtype, all with a history or all without.

    Shards of floats of 8 or 16 bits with a base are coded sparse unless dense is smaller; everything else is
    dense.  The outcome depends on the arguments alone, not on threads, kernels, or where shards lie.
    """
    kernels = kernels or selected_kernels()
    sparse = [i for i, item in enumerate(shards) if item.can_be_sparse]
    if len({(shards[i].dtype, shards[i].stateful) for i in sparse}) > 1:
        raise ValueError("the shards of a group are of one dtype, and all have a history or none has")
    encoded: dict[int, EncodedShard] = {}
    blob = b""
    if any(shards[i].elements for i in sparse):
        tables, payloads = _encode_sparse([shards[i] for i in sparse], settings, kernels)
        for i, (changed, chunk_payloads) in zip(sparse, payloads, strict=True):
            encoded[i] = _finish_sparse(shards[i], settings, kernels, tables, changed, chunk_payloads)
        blob = tables.blob if any(item.mode == Mode.SPARSE for item in encoded.values()) else b""
    for i, shard in enumerate(shards):
        if i not in encoded:
            encoded[i] = _encode_dense(shard.on_host(), settings, kernels)
    return EncodedGroup(blob, tuple(encoded[i] for i in range(len(shards))))


_Scan = Callable[[], tuple[SpanSymbols, Histograms]]


def _encode_sparse(
    shards: Sequence[Shard | DistantShard], settings: Settings, kernels: Kernels
) -> tuple[GroupTables, list[tuple[int, list[bytes]]]]:
    """Tables of the group, and per shard the number of changes and the payloads of its chunks."""
    plan = choose_plan(shards[0].element, shards, settings.classes, settings.value_classes)
    scans = [
        (i, scan)
        for i, shard in enumerate(shards)
        for scan in _scans(shard, plan, 1 << settings.chunk_log2, kernels)
    ]
    scanned = list(_share_out(lambda scan: scan[1](), scans, settings.threads))
    tables = _tables(plan, [symbols for symbols, _ in scanned], [histograms for _, histograms in scanned])
    packer = kernels.packer(tables)
    packed = _share_out(packer.pack, [symbols for symbols, _ in scanned], settings.threads)
    changed = [0] * len(shards)
    payloads: list[list[bytes]] = [[] for _ in shards]
    for (i, _), (symbols, _), chunks in zip(scans, scanned, packed, strict=True):
        changed[i] += symbols.changed
        payloads[i].extend(chunks)
    return tables, list(zip(changed, payloads, strict=True))


def _scans(shard: Shard | DistantShard, plan: Plan, chunk_elements: int, kernels: Kernels) -> Iterator[_Scan]:
    """What finds the symbols of each span of a shard: a few chunks, the unit of work."""
    if not isinstance(shard, Shard):
        changes = shard.changes(plan, chunk_elements)
        for part in _parts(changes.ends.size, _SPAN_CHUNKS):
            yield partial(kernels.symbolise, plan, changes.of_chunks(part))
        return
    base, target, history = shard.base, shard.target, shard.history
    assert base is not None
    for part in _spans(shard.elements, chunk_elements):
        past = None if history is None else history[part]
        yield partial(kernels.scan, plan, base[part], target[part], past, chunk_elements)


def _tables(plan: Plan, symbols: Sequence[SpanSymbols], histograms: Sequence[Histograms]) -> GroupTables:
    counts = np.concatenate([item.counts for item in symbols])
    return GroupTables(
        plan,
        frequencies(np.sum([item.gaps for item in histograms], axis=0)),
        frequencies(np.sum([item.values for item in histograms], axis=0)),
        (counts.sum(axis=0, dtype=np.int64) // len(counts)).astype(np.uint32),
    )


def _finish_sparse(
    shard: Shard | DistantShard,
    settings: Settings,
    kernels: Kernels,
    tables: GroupTables,
    changed: int,
    payloads: list[bytes],
) -> EncodedShard:
    """The sparse shard, or a dense one if that is smaller.  Dense is not tried where it can hardly win."""
    data = write_shard(
        Mode.SPARSE, shard.element, settings.chunk_log2, shard.elements, changed, tables.identity,
        shard.digests, payloads,
    )  # fmt: skip
    if 2 * len(data) > shard.elements * shard.element.itemsize:
        dense = _encode_dense(shard.on_host(), settings, kernels)
        if len(dense.data) < len(data):
            return dense
    return EncodedShard(data, Mode.SPARSE, changed)


def _encode_dense(shard: Shard, settings: Settings, kernels: Kernels) -> EncodedShard:
    """The smaller of the dense modes."""
    parts = _parts(shard.target.size, 1 << settings.chunk_log2)

    def encode(base: Words | None) -> list[bytes]:
        def chunk(part: slice) -> bytes:
            before = None if base is None else base[part]
            return planes.encode(kernels, shard.element, before, shard.target[part])

        return list(_share_out(chunk, parts, settings.threads))

    changed = shard.target.size if shard.base is None else int(np.count_nonzero(shard.base != shard.target))
    choices = [(Mode.WHOLE, encode(None))]
    if shard.base is not None:
        choices.append((Mode.STEPS, encode(shard.base)))
    mode, payloads = min(choices, key=lambda choice: sum(map(len, choice[1])))
    data = write_shard(
        mode, shard.element, settings.chunk_log2, shard.target.size, changed, 0, shard.digests, payloads
    )
    return EncodedShard(data, mode, changed)


def _parts(n: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]


def _spans(n: int, chunk_elements: int) -> list[slice]:
    return _parts(n, _SPAN_CHUNKS * chunk_elements)


def _share_out(work: Callable[[_In], _Out], items: Iterable[_In], threads: int) -> Iterator[_Out]:
    """`map` on several threads, in order."""
    if threads == 1:
        return map(work, items)
    with ThreadPoolExecutor(threads) as pool:
        return iter(list(pool.map(work, items)))


# ---- decode -------------------------------------------------------------------------------------


class ShardReader:
    """Decodes one shard, or with `only` some of its chunks, by their numbers, rising.

    `data` is as long as the shard; of it the header and the payloads of those chunks are read.  `tables` are
    needed if it is sparse.  Header and digests of payloads are checked here.  Raises CorruptDelta.
    """

    def __init__(
        self,
        data: bytes | memoryview,
        tables: GroupTables | None = None,
        *,
        kernels: Kernels | None = None,
        only: Sequence[int] | None = None,
    ) -> None:
        self.header: ShardHeader = read_header(data)
        self._kernels = kernels or selected_kernels()
        self._unpacker = None
        if self.header.length != len(data):
            raise CorruptDelta(f"a shard of {self.header.length} bytes in {len(data)}")
        view = memoryview(data)
        self._payloads = [view[item.offset : item.offset + item.length] for item in self.header.chunks]
        self._only = only
        for number in range(len(self._payloads)) if only is None else only:
            place, payload = self.header.chunks[number], self._payloads[number]
            if payload and xxhash.xxh3_64_intdigest(payload) != place.digest:
                raise CorruptDelta(f"the chunk at element {place.first} does not match its digest")
        if self.header.mode == Mode.SPARSE:
            if tables is None or tables.identity != self.header.tables:
                raise CorruptDelta("the shard was coded with other tables")
            if tables.plan.element != self.header.element:
                raise CorruptDelta("shard and tables are of different formats")
            self._plan = tables.plan
            self._unpacker = self._kernels.unpacker(tables)

    def decode(
        self, base: Words | None, history: Bytes | None = None, *, threads: int = 1
    ) -> tuple[Indices | None, Words]:
        """The changed elements' indices, rising, and new bits; or (None, all bits) if the shard is dense.

        Everything is decoded and checked before anything is returned, and nothing of `base` is written.
        Raises CorruptDelta, also where base or history are not those the shard was made with and it shows.
        """
        self._require_base(base, history)
        if self._unpacker is None or base is None:
            if self._only is not None:
                return self._decode_dense_chunks(base, self._only)
            return None, self._decode_dense(base, threads)
        unpacker, element_count = self._unpacker, self.header.chunk_elements

        def unpack(part: slice) -> tuple[Indices, Words]:
            past = None if history is None else history[part]
            return unpacker.unpack(self._of(part), base[part], past, element_count, part.start)

        if self._only is None:
            found = list(_share_out(unpack, _spans(base.size, element_count), threads))
            if sum(indices.size for indices, _ in found) != self.header.changed:
                raise CorruptDelta("another number of changes than promised")
        else:
            places = (self.header.chunks[number] for number in self._only)
            found = list(_share_out(unpack, (slice(each.first, each.last) for each in places), threads))
        if len(found) == 1:
            return found[0]
        empty = np.zeros(0, np.int64), np.zeros(0, base.dtype)
        parts = [empty, *found]
        return np.concatenate([item[0] for item in parts]), np.concatenate([item[1] for item in parts])

    def apply(self, base: Words, history: Bytes | None = None, *, threads: int = 1) -> int:
        """Turn `base` into the target in place, and return the number of changed elements.

        Only for a base whose digest is known to be right and that may be lost: every chunk is checked by its
        digest beforehand and decoded whole before it is written, but a base of another version can be found
        out when some chunks are already written.  Raises CorruptDelta.
        """
        self._require_base(base, history)
        if self._only is not None:
            raise ValueError("a base is never turned into a mixture: decode chunks instead")
        if self._unpacker is None:
            base[:] = self._decode_dense(base, threads)
            return self.header.changed
        unpacker, element_count = self._unpacker, self.header.chunk_elements

        def apply(part: slice) -> int:
            past = None if history is None else history[part]
            return unpacker.apply(self._of(part), base[part], past, element_count)

        return sum(_share_out(apply, _spans(base.size, element_count), threads))

    def _of(self, part: slice) -> list[memoryview]:
        size = self.header.chunk_elements
        return self._payloads[part.start // size : -(-part.stop // size)]

    def _decode_dense(self, base: Words | None, threads: int) -> Words:
        out = np.empty(self.header.elements, self.header.element.word)

        def decode(number: int) -> None:
            place = self.header.chunks[number]
            out[place.first : place.last] = self._dense_chunk(base, number)

        for _ in _share_out(decode, range(len(self.header.chunks)), threads):
            pass
        return out

    def _decode_dense_chunks(self, base: Words | None, numbers: Sequence[int]) -> tuple[Indices, Words]:
        places = [self.header.chunks[number] for number in numbers]
        indices = [np.arange(each.first, each.last, dtype=np.int64) for each in places]
        values = [self._dense_chunk(base, number) for number in numbers]
        empty = np.zeros(0, np.int64), np.zeros(0, self.header.element.word)
        return np.concatenate([empty[0], *indices]), np.concatenate([empty[1], *values])

    def _dense_chunk(self, base: Words | None, number: int) -> Words:
        place, before = self.header.chunks[number], base if self.header.mode == Mode.STEPS else None
        return planes.decode(
            self._kernels,
            self.header.element,
            None if before is None else before[place.first : place.last],
            self._payloads[number],
            place.last - place.first,
        )

    def _require_base(self, base: Words | None, history: Bytes | None) -> None:
        header = self.header
        if base is None:
            if header.mode != Mode.WHOLE:
                raise CorruptDelta("the shard is a delta and needs its base")
            return
        if base.shape != (header.elements,) or base.dtype != header.element.word:
            raise CorruptDelta(
                f"a base of {base.size} {base.dtype} for {header.elements} {header.element.name}"
            )
        if header.mode == Mode.SPARSE and self._plan.stateful != (history is not None):
            raise CorruptDelta("a history is needed exactly for a stateful delta")
