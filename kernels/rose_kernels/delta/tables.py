"""Frequency tables of a group, and the blob that carries its plan and tables."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

from rose_kernels.delta.buffers import Cursor, varint
from rose_kernels.delta.elements import BY_CODE
from rose_kernels.delta.errors import CorruptDelta
from rose_kernels.delta.plan import Plan

Frequencies = npt.NDArray[np.uint16]

SLOTS = 4096
GAP_SYMBOLS = 68
VALUE_SYMBOLS = 64
CHUNK_ELEMENTS_MAX = 1 << 18
TABLES_MAGIC = b"RDT1"


def frequencies(histogram: npt.NDArray[np.int64]) -> Frequencies:
    """Scale each row of counts to sum to 4096 with no used symbol at 0; rows without counts stay 0."""
    out = np.zeros(histogram.shape, np.int64)
    for row, counts in zip(out, histogram.astype(np.int64), strict=True):
        total = int(counts.sum())
        if total == 0:
            continue
        row[:] = np.where(counts > 0, np.maximum((counts * SLOTS + total // 2) // total, 1), 0)
        over = int(row.sum()) - SLOTS
        while over > 0:  # from the most frequent, little by little
            top = int(row.argmax())
            cut = min(over, int(row[top]) // 16 + 1)
            row[top] -= cut
            over -= cut
        row[int(counts.argmax())] -= over
    return out.astype(np.uint16)


def put_frequencies(row: Frequencies) -> bytes:
    """One table: the symbols up to the last used one; a run of unused ones is 0 and its length."""
    used = np.flatnonzero(row)
    last = int(used[-1]) + 1 if used.size else 0
    out = bytearray(varint(last))
    at = 0
    for symbol in used.tolist():
        if symbol > at:
            out += b"\0" + varint(symbol - at)
        out += varint(int(row[symbol]))
        at = symbol + 1
    return bytes(out)


def get_frequencies(cursor: Cursor, symbols: int) -> Frequencies:
    """Read what `put_frequencies` wrote.  Raises CorruptDelta."""
    row = np.zeros(symbols, np.uint16)
    last = cursor.varint()
    if last > symbols:
        raise CorruptDelta(f"a table of {last} symbols, of {symbols}")
    at = total = 0
    while at < last:
        frequency = cursor.varint()
        if frequency == 0:
            at += cursor.varint()
        elif at < symbols and (total := total + frequency) <= SLOTS:
            row[at] = frequency
            at += 1
    if at != last or total != (SLOTS if last else 0):
        raise CorruptDelta(f"a table sums to {total} over {at} symbols")
    return row


@dataclass(frozen=True)
class GroupTables:
    """What the chunks of a group share: plan, frequencies by context, and expected counts by context."""

    plan: Plan
    gaps: Frequencies
    values: Frequencies
    expected: npt.NDArray[np.uint32]

    @cached_property
    def blob(self) -> bytes:
        """The group's header as sent, its xxh3-64 last."""
        plan = self.plan
        cuts = (plan.thresholds, plan.value_thresholds, plan.age_thresholds or ())
        out = bytearray(TABLES_MAGIC)
        out += struct.pack("<BBBB", plan.element.code, plan.groups, *(len(item) for item in cuts[:2]))
        for item in cuts:
            out += bytes(item)
        out += b"".join(varint(int(count)) for count in self.expected)
        out += b"".join(put_frequencies(row) for row in (*self.gaps, *self.values))
        return bytes(out) + xxhash.xxh3_64_intdigest(bytes(out)).to_bytes(8, "little")

    @property
    def identity(self) -> int:
        """The digest that shards name their tables by."""
        return int.from_bytes(self.blob[-8:], "little")

    @classmethod
    def read(cls, blob: bytes | memoryview) -> GroupTables:
        """Read a group's header.  Raises CorruptDelta."""
        data = bytes(blob)
        if data[:4] != TABLES_MAGIC or len(data) < 16:
            raise CorruptDelta("not the tables of a delta")
        if xxhash.xxh3_64_intdigest(data[:-8]) != int.from_bytes(data[-8:], "little"):
            raise CorruptDelta("the tables do not match their digest")
        cursor = Cursor(memoryview(data)[:-8], start=4)
        plan = _read_plan(cursor)
        expected = np.array([cursor.varint() for _ in range(plan.contexts)], np.uint32)
        if int(expected.max()) > CHUNK_ELEMENTS_MAX:
            raise CorruptDelta("a chunk is expected to change more elements than it has")
        gaps = np.stack([get_frequencies(cursor, GAP_SYMBOLS) for _ in range(plan.contexts)])
        values = np.stack([get_frequencies(cursor, VALUE_SYMBOLS) for _ in range(plan.value_contexts)])
        if cursor.left:
            raise CorruptDelta(f"{cursor.left} bytes after the tables")
        tables = cls(plan, gaps, values, expected)
        tables.__dict__["blob"] = data  # as another encoder may have written the same tables otherwise
        return tables


def _read_plan(cursor: Cursor) -> Plan:
    code, groups, cuts, value_cuts = cursor.take(4)
    if code not in BY_CODE or groups == 0:
        raise CorruptDelta(f"no element format {code} with {groups} groups")
    thresholds = tuple(cursor.take(cuts))
    values = tuple(cursor.take(value_cuts))
    ages = None if groups == 1 else tuple(cursor.take(groups - 2))
    try:
        return Plan(BY_CODE[code], thresholds, values, ages)
    except ValueError as error:
        raise CorruptDelta(f"the tables have an impossible plan: {error}") from None
