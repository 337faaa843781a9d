"""The embedded relay's arena: memory that readers of this host map is not used anew before they are done."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rose_daemon.relay.arena import ArenaPool
from rose_daemon.relay.pools import MemoryBlock

from rose.units import JobId, WeightVersion
from rose.weights.relay import RelayFull
from rose.weights.relay.shared import HEADER_BYTES, SharedReader, lock_range

KEY = (JobId("job-1"), WeightVersion(1))
CAPACITY_BYTES = 1 << 20


@pytest.fixture
def pool() -> ArenaPool:
    return ArenaPool(CAPACITY_BYTES)


def block_of(pool: ArenaPool, data: bytes) -> MemoryBlock:
    block = pool.allocate(KEY, "bucket", len(data))
    block.data[:] = data
    return block


def reader_of(pool: ArenaPool, block: MemoryBlock) -> SharedReader:
    reader = SharedReader.open(pool.placement(block))
    assert reader is not None
    return reader


async def test_a_reader_gets_the_bytes_of_its_bucket(pool: ArenaPool) -> None:
    block_of(pool, b"x" * 5000)
    block = block_of(pool, bytes(range(256)) * 40)
    reader = reader_of(pool, block)
    destination = bytearray(300)
    assert reader.read_into(pool.placement(block), memoryview(destination), 250)
    assert destination == (bytes(range(256)) * 40)[250:550]


async def test_memory_under_a_reader_is_not_given_back(pool: ArenaPool) -> None:
    block = block_of(pool, b"x" * 5000)
    placement = pool.placement(block)
    reading = os.open(f"/proc/{placement.pid}/fd/{placement.fd}", os.O_RDONLY)
    assert lock_range(reading, fcntl.F_RDLCK, placement.offset, HEADER_BYTES + placement.size)
    assert not await pool.release(block)
    os.close(reading)
    assert await pool.release(block)


READER = """
import fcntl, os, sys
from rose.weights.relay.shared import lock_range
file = os.open(f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}", os.O_RDONLY)
assert lock_range(file, fcntl.F_RDLCK, int(sys.argv[3]), 9096)
print("reading", flush=True)
sys.stdin.read()
"""


async def test_a_killed_reader_holds_nothing(pool: ArenaPool) -> None:
    block = block_of(pool, b"x" * 5000)
    placement = pool.placement(block)
    arguments = [str(value) for value in (placement.pid, placement.fd, placement.offset)]
    process = subprocess.Popen(  # noqa: ASYNC220 - there is nothing else to do meanwhile
        [sys.executable, "-c", READER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"reading\n"
    assert not await pool.release(block)
    process.kill()
    process.communicate()
    assert await pool.release(block)


async def test_a_bucket_that_is_gone_is_not_read(pool: ArenaPool) -> None:
    block = block_of(pool, b"x" * 5000)
    placement, reader = pool.placement(block), reader_of(pool, block)
    destination = bytearray(10)
    assert await pool.release(block)
    assert not reader.read_into(placement, memoryview(destination), 0)
    other = block_of(pool, b"y" * 5000)
    assert pool.placement(other).offset == placement.offset
    assert not reader.read_into(placement, memoryview(destination), 0)
    assert destination == bytes(10)


async def test_a_placement_that_lies_is_not_followed(pool: ArenaPool) -> None:
    """Whatever a relay answers: other descriptors, pipes, places beyond the arena."""
    block = block_of(pool, b"x" * 5000)
    placement, reader = pool.placement(block), reader_of(pool, block)
    ends = os.pipe()
    for lie in (
        {"pid": 0},
        {"pid": 2**31},
        {"fd": 10_000},
        {"fd": ends[0]},
        {"fd": ends[1]},
        {"offset": CAPACITY_BYTES},
    ):
        assert SharedReader.open(msgspec.structs.replace(placement, **lie)) is None
    destination = memoryview(bytearray(10))
    for lie in ({"offset": -4096}, {"offset": 8192}, {"size": CAPACITY_BYTES}, {"tag": "00" * 16}):
        assert not reader.read_into(msgspec.structs.replace(placement, **lie), destination, 0)
    for end in ends:
        os.close(end)


async def test_others_can_neither_write_nor_resize_it(pool: ArenaPool) -> None:
    block = block_of(pool, b"x" * 5000)
    placement = pool.placement(block)
    file = os.open(f"/proc/{placement.pid}/fd/{placement.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(file, b"y", placement.offset)
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(file, 0)
    os.close(file)
    assert block.data == b"x" * 5000


async def test_a_full_arena_refuses_and_freed_parts_join(pool: ArenaPool) -> None:
    blocks = [block_of(pool, bytes([number]) * 60_000) for number in range(16)]
    with pytest.raises(RelayFull):
        pool.allocate(KEY, "bucket", 60_000)
    for block in blocks[3:6:2]:
        assert await pool.release(block)
    with pytest.raises(RelayFull, match="in one piece"):
        pool.allocate(KEY, "bucket", 120_000)
    assert await pool.release(blocks[4])
    large = pool.allocate(KEY, "bucket", 3 * 61_440 - HEADER_BYTES)
    large.data[:] = b"z" * large.size
    kept = [block for block in blocks if block not in blocks[3:6]]
    assert all(block.data == bytes([blocks.index(block)]) * 60_000 for block in kept)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 200_000)), max_size=60))
def test_blocks_never_overlap_and_everything_comes_back(steps: list[tuple[bool, int]]) -> None:
    pool = ArenaPool(CAPACITY_BYTES)
    held: list[tuple[MemoryBlock, int]] = []
    for number, (release, size) in enumerate(steps):
        if release and held:
            _run(pool.release(held.pop(size % len(held))[0]))
            continue
        try:
            block = pool.allocate(KEY, "bucket", size)
        except RelayFull:
            continue
        np.frombuffer(block.data, np.uint8)[:] = number
        held.append((block, number))
        for each, mark in held:
            assert (np.frombuffer(each.data, np.uint8) == mark).all()
    for block, _ in held:
        _run(pool.release(block))
    assert pool.allocate(KEY, "bucket", CAPACITY_BYTES - HEADER_BYTES).size == CAPACITY_BYTES - HEADER_BYTES


def _run(call: object) -> None:
    """Drive a coroutine that never waits."""
    with pytest.raises(StopIteration) as end:
        call.send(None)  # type: ignore[attr-defined]
    assert end.value.value is True
