"""Whatever is done to the bytes of a delta: CorruptDelta or a decode in range, no crash and no write."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from delta_cases import Words, history_of, updated, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from rose_kernels.delta import CorruptDelta, GroupTables, Mode, Settings, Shard, ShardReader, encode_group
from rose_kernels.delta.shard import HEADER_BYTES_FIXED, header_length, read_header

RNG = np.random.default_rng(21)
BASE = weights(RNG, "BF16", 3000)
TARGET = updated(RNG, "BF16", BASE, 0.05)
HISTORY = history_of(RNG, 3000)
SPARSE = encode_group([Shard("BF16", BASE, TARGET)], Settings(chunk_log2=10))
STATEFUL = encode_group([Shard("BF16", BASE, TARGET, HISTORY)], Settings(chunk_log2=10))
DENSE = encode_group(
    [Shard("F32", BASE.astype(np.uint32), TARGET.astype(np.uint32))], Settings(chunk_log2=10)
)

damage = st.lists(
    st.tuples(
        st.sampled_from(["flip", "set", "cut", "drop", "copy"]),
        st.integers(0, 1 << 16),
        st.integers(0, 1 << 16),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=4,
)


def damaged(data: bytes, changes: list[tuple[str, int, int, int]]) -> bytes:
    out = bytearray(data)
    for kind, place, other, value in changes:
        at = place % max(1, len(out))
        if not out:
            break
        if kind == "flip":
            out[at] ^= 1 << value % 8
        elif kind == "set":
            out[at] = value
        elif kind == "cut":
            del out[at:]
        elif kind == "drop":
            del out[at : at + value % 16]
        else:
            source = other % len(out)
            out[at:at] = out[source : source + value % 16]
    return bytes(out)


def signed(shard: bytes) -> bytes:
    """The shard with the digests its damaged header and payloads should have, as a hostile sender would."""
    try:
        length = header_length(shard)
        body = bytearray(shard)
        end = length - 8
        body[end:length] = xxhash.xxh3_64_intdigest(bytes(body[:end])).to_bytes(8, "little")
        header = read_header(bytes(body))
    except (CorruptDelta, IndexError):
        return shard
    rebuilt = body[
        : HEADER_BYTES_FIXED + 16 * sum(d is not None for d in (header.base_digest, header.target_digest))
    ]
    for chunk in header.chunks:
        payload = bytes(body[chunk.offset : chunk.offset + chunk.length])
        size = chunk.length
        while size >= 0x80:
            rebuilt.append(size & 0x7F | 0x80)
            size >>= 7
        rebuilt.append(size)
        if chunk.length:
            rebuilt += xxhash.xxh3_64_intdigest(payload).to_bytes(8, "little")
    if len(rebuilt) != end:
        return bytes(body)
    rebuilt += xxhash.xxh3_64_intdigest(bytes(rebuilt)).to_bytes(8, "little")
    return bytes(rebuilt + body[length:])


def attempt(shard: bytes, tables: bytes, base: Words, history: Words | None) -> None:
    before = base.copy()
    try:
        reader = ShardReader(shard, GroupTables.read(tables) if tables else None)
        indices, values = reader.decode(base, history)
    except CorruptDelta:
        pass
    else:
        if indices is None:
            assert values.size == base.size
        elif indices.size:
            assert 0 <= int(indices[0]) <= int(indices[-1]) < base.size
            assert np.all(np.diff(indices) > 0)
    assert np.array_equal(base, before)


@settings(max_examples=300, deadline=None)
@given(damage)
def test_damage_is_found_by_the_digests(changes: list[tuple[str, int, int, int]]) -> None:
    for group in (SPARSE, STATEFUL, DENSE):
        data = group.shards[0].data
        hurt = damaged(data, changes)
        if hurt == data:
            continue
        with pytest.raises(CorruptDelta):
            ShardReader(hurt, GroupTables.read(group.tables) if group.tables else None)


@settings(max_examples=300, deadline=None)
@given(damage)
def test_damage_with_right_digests_stays_in_range(changes: list[tuple[str, int, int, int]]) -> None:
    attempt(signed(damaged(SPARSE.shards[0].data, changes)), SPARSE.tables, BASE.copy(), None)
    attempt(signed(damaged(STATEFUL.shards[0].data, changes)), STATEFUL.tables, BASE.copy(), HISTORY)
    attempt(signed(damaged(DENSE.shards[0].data, changes)), b"", BASE.astype(np.uint32), None)


@settings(max_examples=300, deadline=None)
@given(damage)
def test_damaged_payloads_behind_a_whole_header(changes: list[tuple[str, int, int, int]]) -> None:
    for group, history in ((SPARSE, None), (STATEFUL, HISTORY)):
        data = group.shards[0].data
        length = header_length(data)
        kept = damaged(data[length:], [item for item in changes if item[0] in ("flip", "set")])
        attempt(signed(data[:length] + kept), group.tables, BASE.copy(), history)


@settings(max_examples=300, deadline=None)
@given(damage)
def test_damaged_tables_with_a_right_digest(changes: list[tuple[str, int, int, int]]) -> None:
    hurt = damaged(SPARSE.tables[:-8], changes)
    hurt += xxhash.xxh3_64_intdigest(hurt).to_bytes(8, "little")
    try:
        tables = GroupTables.read(hurt)
    except CorruptDelta:
        return
    assert tables.gaps.sum(axis=1).max() <= 4096
    shard = bytearray(SPARSE.shards[0].data)
    shard[24:32] = tables.identity.to_bytes(8, "little")
    attempt(signed(bytes(shard)), hurt, BASE.copy(), None)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_noise_is_refused(noise: bytes) -> None:
    for data in (noise, b"RDS1" + noise, b"RDT1" + noise):
        with pytest.raises(CorruptDelta):
            read_header(data)
        with pytest.raises(CorruptDelta):
            GroupTables.read(data)


def test_lengths_that_promise_too_much() -> None:
    data = bytearray(SPARSE.shards[0].data)
    length = header_length(bytes(data))
    for place, size in ((8, 8), (16, 8)):  # elements, changed
        huge = bytearray(data)
        huge[place : place + size] = b"\xff" * size
        huge[length - 8 : length] = xxhash.xxh3_64_intdigest(bytes(huge[: length - 8])).to_bytes(8, "little")
        with pytest.raises(CorruptDelta):
            read_header(bytes(huge))
    data[32:36] = b"\xff" * 4
    with pytest.raises(CorruptDelta):
        read_header(bytes(data))


def test_reordered_and_duplicated_chunks_are_refused() -> None:
    data = SPARSE.shards[0].data
    header = read_header(data)
    first, second = (data[c.offset : c.offset + c.length] for c in header.chunks[:2])
    start = header.chunks[0].offset
    rest = data[start + len(first) + len(second) :]
    tables = GroupTables.read(SPARSE.tables)
    for middle in (second + first, first + first, second + second):
        with pytest.raises(CorruptDelta):
            ShardReader(data[:start] + middle + rest, tables)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_pair_round_trips(data: st.DataObject) -> None:
    dtype, word = data.draw(
        st.sampled_from([("BF16", "<u2"), ("F16", "<u2"), ("F8_E4M3", "u1"), ("F8_E5M2", "u1")])
    )
    n = data.draw(st.integers(1, 300))
    size = n * np.dtype(word).itemsize
    base = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), word)
    target = base.copy()
    places = data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, 255)), max_size=40))
    for at, value in places:
        target[at] ^= value
    history = data.draw(st.none() | st.just(np.arange(n, dtype=np.uint8) % 15))
    chosen = Settings(classes=data.draw(st.integers(1, 8)), chunk_log2=data.draw(st.integers(4, 9)))
    group = encode_group([Shard(dtype, base, target, history)], chosen)
    reader = ShardReader(group.shards[0].data, GroupTables.read(group.tables) if group.tables else None)
    indices, values = reader.decode(base, history)
    result = base.copy()
    if indices is None:
        result = values
    else:
        assert group.shards[0].mode == Mode.SPARSE
        result[indices] = values
    assert np.array_equal(result, target)
