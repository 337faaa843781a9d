"""Arithmetic that all arenas share."""

from __future__ import annotations

import pytest
from rose_kernels.arena import PAGE_BYTES, pages_for, require_range


@pytest.mark.parametrize(("size", "pages"), [(0, 0), (1, 1), (PAGE_BYTES, 1), (PAGE_BYTES + 1, 2)])
def test_pages_hold_what_is_asked(size: int, pages: int) -> None:
    assert pages_for(size) == pages


@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 8), (8, 0), (7, 1)])
def test_a_range_within_the_arena_is_accepted(first: int, count: int) -> None:
    require_range(first, count, 8)


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 9), (8, 1), (3, -1)])
def test_a_range_beyond_the_arena_is_refused(first: int, count: int) -> None:
    with pytest.raises(IndexError):
        require_range(first, count, 8)
