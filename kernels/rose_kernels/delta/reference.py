"""The codec in NumPy and plain Python: the oracle of the C kernels, and what runs where no compiler did.

It follows docs/delta-format.md line by line and is written to be read; the C kernels give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rose_kernels.delta.buffers import Cursor, unzigzag, varint, zigzag
from rose_kernels.delta.elements import Bytes, ElementFormat, Indices, Words, order
from rose_kernels.delta.errors import CorruptDelta
from rose_kernels.delta.kernel import Changes, Histograms, SpanSymbols
from rose_kernels.delta.plan import Plan
from rose_kernels.delta.tables import GAP_SYMBOLS, SLOTS, VALUE_SYMBOLS, Frequencies, GroupTables

_STATE_LOW = 1 << 15
_STATE_HIGH = 1 << 31

RawBits = tuple[int, int]
"""A number and how many bits it takes."""


# ---- symbols ------------------------------------------------------------------------------------


def gap_symbol(gap: int) -> tuple[int, RawBits]:
    """0 to 7 stand for themselves; above, an exponent e >= 3 and the next two bits, the other e - 2 raw."""
    if gap < 8:
        return gap, (0, 0)
    e = gap.bit_length() - 1
    return 8 + 4 * (e - 3) + (gap >> (e - 2) & 3), (gap & (1 << (e - 2)) - 1, e - 2)


def gap_range(symbol: int) -> tuple[int, int]:
    """The smallest gap of a symbol, and its number of raw bits."""
    if symbol < 8:
        return symbol, 0
    e = 3 + (symbol - 8) // 4
    return (4 + (symbol - 8) % 4) << (e - 2), e - 2


def value_symbol(step: int) -> tuple[int, RawBits]:
    """`step` is 2 * (|s| - 1) + (s < 0): the sign, and |s| - 1 like a gap but with one bit after e."""
    magnitude, negative = step >> 1, step & 1
    if magnitude < 8:
        return 2 * magnitude + negative, (0, 0)
    e = magnitude.bit_length() - 1
    bucket = 8 + 2 * (e - 3) + (magnitude >> (e - 1) & 1)
    return 2 * bucket + negative, (magnitude & (1 << (e - 1)) - 1, e - 1)


def value_range(symbol: int) -> tuple[int, int]:
    """The smallest |s| - 1 of a symbol, and its number of raw bits."""
    bucket = symbol >> 1
    if bucket < 8:
        return bucket, 0
    e = 3 + (bucket - 8) // 2
    return (2 + (bucket - 8) % 2) << (e - 1), e - 1


def steps(base: Words, target: Words, element: ElementFormat) -> npt.NDArray[np.int64]:
    """2 * (|s| - 1) + (s < 0) for the signed distance s from each base to its (different) target."""
    width = 8 * element.itemsize
    distance = (order(target, element).astype(np.int64) - order(base, element)) & (1 << width) - 1
    negative = distance >> (width - 1)
    return np.where(negative == 0, 2 * (distance - 1), 2 * ((1 << width) - distance - 1) + 1)


def stepped(base: Words, step: npt.NDArray[np.int64], element: ElementFormat) -> Words:
    """Where these steps lead from each base."""
    size = (step >> 1) + 1
    moved = order(base, element).astype(np.int64) + np.where(step & 1, -size, size)
    return order((moved & (1 << 8 * element.itemsize) - 1).astype(element.word), element)


# ---- bits and symbols to bytes ------------------------------------------------------------------


def write_bits(fields: Iterable[RawBits]) -> bytes:
    """Numbers one after the other, least significant bit first, padded with zeros to whole bytes."""
    out = bytearray()
    held = count = 0
    for value, bits in fields:
        held |= value << count
        count += bits
        while count >= 8:
            out.append(held & 0xFF)
            held >>= 8
            count -= 8
    if count:
        out.append(held)
    return bytes(out)


class BitReader:
    """Reads what `write_bits` wrote."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def take(self, bits: int) -> int:
        """The next number.  Raises CorruptDelta at the end."""
        start, self._position = self._position, self._position + bits
        if self._position > 8 * len(self._data):
            raise CorruptDelta("the raw bits end too early")
        window = int.from_bytes(self._data[start // 8 : (self._position + 7) // 8], "little")
        return window >> start % 8 & (1 << bits) - 1

    def finish(self) -> None:
        """All must have been read, but for less than a byte of zeros."""
        padding = 8 * len(self._data) - self._position
        if padding >= 8 or (padding and self._data[-1] >> 8 - padding):
            raise CorruptDelta("raw bits are left over")


Slot = tuple[int, Frequencies]
"""A symbol and the table it is coded with."""


def encode_symbols(slots: Sequence[Slot]) -> tuple[int, int, bytes]:
    """rANS: the two final states and the words.  Symbol j moves state j % 2; encoded last to first."""
    states = [_STATE_LOW, _STATE_LOW]
    words: list[int] = []
    starts = {id(table): np.cumsum(table, dtype=np.int64) - table for _, table in slots}
    for j in range(len(slots) - 1, -1, -1):
        symbol, table = slots[j]
        frequency, start = int(table[symbol]), int(starts[id(table)][symbol])
        x = states[j % 2]
        if x >= frequency << 19:
            words.append(x & 0xFFFF)
            x >>= 16
        states[j % 2] = x // frequency * SLOTS + x % frequency + start
    return states[0], states[1], np.array(words[::-1], "<u2").tobytes()


class SymbolReader:
    """Decodes what `encode_symbols` wrote."""

    def __init__(self, first: int, second: int, words: memoryview) -> None:
        if not all(_STATE_LOW <= state < _STATE_HIGH for state in (first, second)):
            raise CorruptDelta("a coder's state is out of range")
        self._states = [first, second]
        self._words = np.frombuffer(words, "<u2")
        self._used = 0
        self._count = 0
        self._tables: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def take(self, table: Frequencies) -> int:
        """The next symbol.  Raises CorruptDelta."""
        owners, starts = self._lookup(table)
        if owners.size == 0:
            raise CorruptDelta("a symbol of a context that has none")
        turn = self._count % 2
        x = self._states[turn]
        slot = x % SLOTS
        symbol = int(owners[slot])
        x = int(table[symbol]) * (x // SLOTS) + slot - int(starts[symbol])
        if x < _STATE_LOW:
            if self._used == self._words.size:
                raise CorruptDelta("the words end too early")
            x = x << 16 | int(self._words[self._used])
            self._used += 1
        self._states[turn] = x
        self._count += 1
        return symbol

    def finish(self) -> None:
        """The states must be back where encoding began, and all words read."""
        if self._states != [_STATE_LOW, _STATE_LOW] or self._used != self._words.size:
            raise CorruptDelta("the symbols do not end where they should")

    def _lookup(self, table: Frequencies) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        known = self._tables.get(id(table))
        if known is None:
            owners = np.repeat(np.arange(table.size), table)
            known = self._tables[id(table)] = (owners, np.cumsum(table, dtype=np.int64) - table)
        return known


# ---- chunks -------------------------------------------------------------------------------------


def contexts_of(plan: Plan, base: Words, history: Bytes | None) -> tuple[Bytes, Bytes, Bytes]:
    """Position context, value context, and whether the sign is coded inverted, of every element."""
    exponents = (base >> plan.element.exponent_shift) & plan.element.exponent_mask
    past = np.zeros(base.size, np.uint8) if history is None else history & 15
    group = plan.group_of[past]
    flip = np.where(group > 0, past & 1, 0).astype(np.uint8)
    position = plan.class_of[exponents] * plan.groups + group
    value = plan.value_class_of[exponents] * plan.groups + group
    return position.astype(np.uint8), value.astype(np.uint8), flip


def _scan_chunk(plan: Plan, base: Words, target: Words, history: Bytes | None) -> SpanSymbols:
    positions, values, flips = contexts_of(plan, base, history)
    changed = base != target
    ranks = [np.flatnonzero(changed[positions == context]) for context in range(plan.contexts)]
    at = np.flatnonzero(changed)
    return _symbols(ranks, values[at], steps(base[at], target[at], plan.element) ^ flips[at])


def _symbols(
    ranks: Sequence[npt.NDArray[np.integer]], value_contexts: Bytes, directed: npt.NDArray[np.integer]
) -> SpanSymbols:
    """One chunk's: ranks of changes by context; contexts and steps of values, flips made, by index."""
    gap_symbols: list[int] = []
    raw: list[RawBits] = []
    for of_context in ranks:
        for gap in (np.diff(of_context, prepend=-1) - 1).tolist():
            symbol, bits = gap_symbol(gap)
            gap_symbols.append(symbol)
            raw.append(bits)
    value_symbols: list[int] = []
    for step in directed.tolist():
        symbol, bits = value_symbol(step)
        value_symbols.append(symbol)
        raw.append(bits)
    packed = np.frombuffer(write_bits(raw), np.uint8)
    return SpanSymbols(
        np.array([[of_context.size for of_context in ranks]], np.uint32),
        np.array(gap_symbols, np.uint8),
        np.array(value_symbols, np.uint8),
        value_contexts,
        packed,
        np.array([packed.size], np.int64),
    )


def _listed_chunk(
    plan: Plan, places: npt.NDArray[np.uint32], directed: npt.NDArray[np.uint16]
) -> SpanSymbols:
    all_ranks, contexts, value_contexts = places & 0x3FFFF, places >> 18 & 31, places >> 23
    ranks = [all_ranks[contexts == context].astype(np.int64) for context in range(plan.contexts)]
    whole = sum(of_context.size for of_context in ranks) == places.size
    if not (
        whole
        and np.all(value_contexts < plan.value_contexts)
        and np.all(directed < 1 << 8 * plan.element.itemsize)
        and all(np.all(np.diff(of_context) > 0) for of_context in ranks)
    ):
        raise ValueError("no elements have such changes under this plan")
    return _symbols(ranks, value_contexts.astype(np.uint8), directed)


def _joined(plan: Plan, parts: Sequence[SpanSymbols]) -> tuple[SpanSymbols, Histograms]:
    """One span of several chunks."""
    symbols = SpanSymbols(
        np.concatenate([part.counts for part in parts]),
        np.concatenate([part.gap_symbols for part in parts]),
        np.concatenate([part.value_symbols for part in parts]),
        np.concatenate([part.value_contexts for part in parts]),
        np.concatenate([part.raw for part in parts]),
        np.cumsum([part.raw.size for part in parts]),
    )
    return symbols, _histograms(plan, symbols)


def _histograms(plan: Plan, symbols: SpanSymbols) -> Histograms:
    gaps = np.zeros((plan.contexts, GAP_SYMBOLS), np.int64)
    values = np.zeros((plan.value_contexts, VALUE_SYMBOLS), np.int64)
    contexts = np.tile(np.arange(plan.contexts), len(symbols.counts))
    np.add.at(gaps, (np.repeat(contexts, symbols.counts.ravel()), symbols.gap_symbols), 1)
    np.add.at(values, (symbols.value_contexts, symbols.value_symbols), 1)
    return Histograms(gaps, values)


def _chunks(n: int, chunk_elements: int) -> Iterator[slice]:
    for start in range(0, n, chunk_elements):
        yield slice(start, min(start + chunk_elements, n))


class _Packer:
    def __init__(self, tables: GroupTables) -> None:
        self._tables = tables
        self._gaps, self._values = list(tables.gaps), list(tables.values)

    def pack(self, symbols: SpanSymbols) -> list[bytes]:
        payloads = []
        start = raw_start = 0
        for counts, raw_end in zip(symbols.counts.tolist(), symbols.raw_ends.tolist(), strict=True):
            end = start + sum(counts)
            payloads.append(self._payload(symbols, counts, slice(start, end), slice(raw_start, raw_end)))
            start, raw_start = end, raw_end
        return payloads

    def _payload(self, symbols: SpanSymbols, counts: list[int], part: slice, raw: slice) -> bytes:
        if part.start == part.stop:
            return b""
        gap_tables = [table for table, count in zip(self._gaps, counts, strict=True) for _ in range(count)]
        value_tables = [self._values[context] for context in symbols.value_contexts[part].tolist()]
        slots = [*zip(symbols.gap_symbols[part].tolist(), gap_tables, strict=True),
                 *zip(symbols.value_symbols[part].tolist(), value_tables, strict=True)]  # fmt: skip
        first, second, words = encode_symbols(slots)
        expected = self._tables.expected.tolist()
        head = b"".join(varint(zigzag(count - usual)) for count, usual in zip(counts, expected, strict=True))
        states = first.to_bytes(4, "little") + second.to_bytes(4, "little")
        return head + varint(len(words) // 2) + states + words + symbols.raw[raw].tobytes()


class _Unpacker:
    def __init__(self, tables: GroupTables) -> None:
        self._tables = tables
        self._gaps, self._values = list(tables.gaps), list(tables.values)

    def unpack(
        self,
        payloads: Sequence[memoryview],
        base: Words,
        history: Bytes | None,
        chunk_elements: int,
        first: int,
    ) -> tuple[Indices, Words]:
        found = [np.zeros(0, np.int64)]
        values: list[Words] = [np.zeros(0, base.dtype)]
        for payload, part in zip(payloads, _chunks(base.size, chunk_elements), strict=True):
            if payload:
                past = None if history is None else history[part]
                at, new = self._chunk(payload, base[part], past)
                found.append(at + first + part.start)
                values.append(new)
        return np.concatenate(found), np.concatenate(values)

    def apply(
        self, payloads: Sequence[memoryview], base: Words, history: Bytes | None, chunk_elements: int
    ) -> int:
        indices, values = self.unpack(payloads, base, history, chunk_elements, 0)
        base[indices] = values
        return indices.size

    def _chunk(self, payload: memoryview, base: Words, history: Bytes | None) -> tuple[Indices, Words]:
        plan = self._tables.plan
        cursor = Cursor(payload)
        counts = [unzigzag(cursor.varint()) + usual for usual in self._tables.expected.tolist()]
        if min(counts) < 0 or sum(counts) > base.size:
            raise CorruptDelta("more changes than elements, or fewer than none")
        words = cursor.varint()
        states = cursor.uint(4), cursor.uint(4)
        symbols = SymbolReader(*states, cursor.take(2 * words))
        bits = BitReader(cursor.take(cursor.left))
        positions, contexts, flips = contexts_of(plan, base, history)
        found = [np.zeros(0, np.int64)]
        for context, count in enumerate(counts):
            members = np.flatnonzero(positions == context)
            found.append(members[self._ranks(context, count, members.size, symbols, bits)])
        at = np.sort(np.concatenate(found))
        values = [self._step(context, symbols, bits) for context in contexts[at].tolist()]
        symbols.finish()
        bits.finish()
        return at, stepped(base[at], np.array(values, np.int64) ^ flips[at], plan.element)

    def _ranks(self, context: int, count: int, size: int, symbols: SymbolReader, bits: BitReader) -> Indices:
        ranks = np.empty(count, np.int64)
        following = 0
        for k in range(count):
            smallest, width = gap_range(symbols.take(self._gaps[context]))
            rank = following + smallest + bits.take(width)
            if rank >= size:
                raise CorruptDelta("a change lies after the last element of its class")
            ranks[k] = rank
            following = rank + 1
        return ranks

    def _step(self, context: int, symbols: SymbolReader, bits: BitReader) -> int:
        symbol = symbols.take(self._values[context])
        smallest, width = value_range(symbol)
        magnitude = smallest | bits.take(width)
        if magnitude >= 1 << (8 * self._tables.plan.element.itemsize - 1):
            raise CorruptDelta("a step is longer than its format is wide")
        return 2 * magnitude + (symbol & 1)


class ReferenceKernels:
    """See `kernel.Kernels`."""

    name = "numpy"

    def scan(
        self, plan: Plan, base: Words, target: Words, history: Bytes | None, chunk_elements: int
    ) -> tuple[SpanSymbols, Histograms]:
        """See `kernel.Kernels`."""
        parts = [
            _scan_chunk(plan, base[part], target[part], None if history is None else history[part])
            for part in _chunks(base.size, chunk_elements)
        ]
        return _joined(plan, parts)

    def symbolise(self, plan: Plan, changes: Changes) -> tuple[SpanSymbols, Histograms]:
        """See `kernel.Kernels`."""
        ends = changes.ends.tolist()
        parts = [slice(start, end) for start, end in pairwise([0, *ends])]
        return _joined(
            plan, [_listed_chunk(plan, changes.places[part], changes.steps[part]) for part in parts]
        )

    def packer(self, tables: GroupTables) -> _Packer:
        """See `kernel.Kernels`."""
        return _Packer(tables)

    def unpacker(self, tables: GroupTables) -> _Unpacker:
        """See `kernel.Kernels`."""
        return _Unpacker(tables)

    def scatter(self, target: Words, indices: Indices, values: Words) -> None:
        """See `kernel.Kernels`."""
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < target.size:
            raise IndexError("an index lies outside the tensor")
        target[indices] = values

    def exchange(self, target: Words, indices: Indices, values: Words) -> tuple[Words, bool]:
        """See `kernel.Kernels`."""
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < target.size:
            raise IndexError("an index lies outside the tensor")
        before = target[indices]
        target[indices] = values
        return before, np.array_equal(target[indices], values)

    def pack_plane(self, plane: Bytes, table: Frequencies) -> bytes:
        """See `kernel.Kernels`."""
        first, second, words = encode_symbols([(symbol, table) for symbol in plane.tolist()])
        return first.to_bytes(4, "little") + second.to_bytes(4, "little") + words

    def unpack_plane(self, coded: memoryview, table: Frequencies, count: int) -> Bytes:
        """See `kernel.Kernels`."""
        cursor = Cursor(coded)
        states = cursor.uint(4), cursor.uint(4)
        if cursor.left % 2:
            raise CorruptDelta("half a word")
        symbols = SymbolReader(*states, cursor.take(cursor.left))
        plane = np.array([symbols.take(table) for _ in range(count)], np.uint8)
        symbols.finish()
        return plane
