"""The CPU arena: what is given back is gone from the process, what stays is untouched."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rose_kernels.arena.base import Arena, ArenaError
from rose_kernels.arena.host import SLICE_BYTES, HostArena

PAGE = mmap.PAGESIZE


def resident_of_process() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def bytes_over(arena: HostArena) -> np.ndarray:
    return np.frombuffer(arena.memory, np.uint8)


def test_a_fresh_arena_holds_no_memory() -> None:
    arena: Arena = HostArena(1 << 30)
    assert (arena.size_bytes, arena.page_bytes) == (1 << 30, PAGE)
    assert arena.resident_bytes() == 0
    arena.close()


def test_sizes_are_whole_pages_and_above_nothing() -> None:
    arena = HostArena(1)
    assert arena.size_bytes == PAGE
    arena.close()
    for size in (0, -1):
        with pytest.raises(ValueError, match="bytes"):
            HostArena(size)
    with pytest.raises(ArenaError, match="address range"):
        HostArena(1 << 60)


def test_released_memory_leaves_the_process_and_comes_back_as_zeros() -> None:
    size = 5 * SLICE_BYTES
    arena = HostArena(size)
    data = bytes_over(arena)
    data[:] = 7
    full = resident_of_process()
    assert arena.resident_bytes() == size
    kept = size // 5
    arena.release(kept // PAGE, (size - kept) // PAGE)
    assert arena.resident_bytes() == kept
    assert full - resident_of_process() > 0.95 * (size - kept)
    assert (data[:kept] == 7).all()
    assert not data[kept:].any()
    arena.ensure(kept // PAGE, (size - kept) // PAGE)
    data[kept:] = 9
    assert arena.resident_bytes() == size
    assert (data[:kept] == 7).all()
    del data
    arena.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 63), st.integers(0, 20)), max_size=25))
def test_any_order_of_writing_and_releasing(steps: list[tuple[bool, int, int]]) -> None:
    arena = HostArena(64 * PAGE)
    data = bytes_over(arena).reshape(64, PAGE)
    model = np.zeros(64, np.uint8)
    for number, (write, first, wanted) in enumerate(steps):
        count = min(wanted, 64 - first)
        if write:
            arena.ensure(first, count)
            data[first : first + count] = number + 1
            model[first : first + count] = number + 1
        else:
            arena.release(first, count)
            model[first : first + count] = 0
        assert arena.resident_bytes() == np.count_nonzero(model) * PAGE
    assert (data == model[:, None]).all()
    del data
    arena.close()


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 5), (4, 1), (1, -1)])
def test_pages_outside_the_range_are_refused(first: int, count: int) -> None:
    arena = HostArena(4 * PAGE)
    bytes_over(arena)[:] = 1
    for call in (arena.ensure, arena.release):
        with pytest.raises(IndexError):
            call(first, count)
    assert arena.resident_bytes() == 4 * PAGE
    arena.close()


def test_a_closed_arena_is_closed_for_good() -> None:
    arena = HostArena(4 * PAGE)
    data = bytes_over(arena)
    data[:] = 3
    arena.close()
    assert not data.any()  # an array that outlives the arena finds zeros, not another's memory
    arena.close()
    with pytest.raises(ArenaError, match="closed"):
        arena.release(0, 1)
