"""The arena on a GPU, over a driver that knows the rules and fails wherever it is told to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from fake_cuda import GRANULE, CUresult, FakeCuda
from rose_kernels.arena import Arena, ArenaError, ArenaExhausted
from rose_kernels.arena.cuda import CudaArena, CudaError

PAGES = 8


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    cuda = FakeCuda()
    yield cuda
    assert cuda.contexts == []


def arena_of(cuda: FakeCuda, pages: int = PAGES) -> CudaArena:
    return CudaArena(pages * GRANULE, driver=cuda)


def resident(arena: CudaArena, cuda: FakeCuda) -> set[int]:
    """Pages that can be touched."""
    return {(address - arena.address) // arena.page_bytes for address in cuda.accessible}


def test_it_is_an_arena(cuda: FakeCuda) -> None:
    arena: Arena = arena_of(cuda)
    assert (arena.size_bytes, arena.page_bytes) == (PAGES * GRANULE, GRANULE)
    assert arena.resident_bytes() == 0
    assert arena.address in cuda.ranges


def test_pages_get_memory_and_lose_it(cuda: FakeCuda) -> None:
    with arena_of(cuda) as arena:
        arena.ensure(1, 3)
        assert resident(arena, cuda) == {1, 2, 3}
        arena.release(2, 1)
        assert resident(arena, cuda) == {1, 3}
        assert arena.resident_bytes() == cuda.used_bytes == 2 * GRANULE
        arena.ensure(0, 5)
        assert resident(arena, cuda) == {0, 1, 2, 3, 4}
    cuda.require_nothing_left()


def test_new_pages_are_zeros_and_old_ones_are_left_alone(cuda: FakeCuda) -> None:
    arena = arena_of(cuda)
    arena.ensure(2, 2)
    assert cuda.zeroed == cuda.accessible
    cuda.zeroed.clear()  # somebody writes there
    cuda.busy = True
    arena.ensure(0, PAGES)
    assert {(address - arena.address) // GRANULE for address in cuda.zeroed} == set(range(PAGES)) - {2, 3}
    assert not any(cuda.streams.values())  # and they are zeros now, not soon
    assert cuda.busy  # nor was a kernel waited for


def test_pages_that_have_memory_keep_it(cuda: FakeCuda) -> None:
    arena = arena_of(cuda)
    arena.ensure(2, 2)
    before = dict(cuda.mapped)
    arena.ensure(0, PAGES)
    assert before.items() <= cuda.mapped.items()
    calls = len(cuda.calls)
    arena.ensure(0, PAGES)
    assert "cuMemCreate" not in cuda.calls[calls:]


def test_neighbours_share_calls(cuda: FakeCuda) -> None:
    arena = arena_of(cuda)
    arena.ensure(0, PAGES)
    assert cuda.calls.count("cuMemSetAccess") == 1
    arena.release(0, PAGES)
    assert cuda.calls.count("cuMemUnmap") == 1
    arena.ensure(3, 2)
    arena.ensure(0, PAGES)  # on both sides of them
    assert cuda.calls.count("cuMemSetAccess") == 4


def test_nothing_is_unmapped_under_a_running_kernel(cuda: FakeCuda) -> None:
    arena = arena_of(cuda)
    arena.ensure(0, 4)
    cuda.busy = True
    arena.release(0, 2)
    cuda.busy = True
    arena.close()


def test_releasing_nothing_or_twice_is_no_error(cuda: FakeCuda) -> None:
    arena = arena_of(cuda)
    arena.release(0, PAGES)
    arena.ensure(0, 0)
    arena.ensure(0, 2)
    arena.release(0, 2)
    arena.release(0, 2)
    assert cuda.used_bytes == 0


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (0, PAGES + 1), (PAGES, 1), (2, -1)])
def test_pages_outside_are_refused(cuda: FakeCuda, first: int, count: int) -> None:
    arena = arena_of(cuda)
    for call in (arena.ensure, arena.release):
        with pytest.raises(IndexError):
            call(first, count)
    assert cuda.mapped == {}


def test_a_full_device_gives_nothing_rather_than_a_part(cuda: FakeCuda) -> None:
    cuda.memory_bytes = 5 * GRANULE
    arena = arena_of(cuda)
    arena.ensure(0, 2)
    with pytest.raises(ArenaExhausted, match="cuMemCreate answered CUDA_ERROR_OUT_OF_MEMORY"):
        arena.ensure(0, PAGES)
    assert resident(arena, cuda) == {0, 1}
    assert arena.resident_bytes() == cuda.used_bytes == 2 * GRANULE
    arena.ensure(4, 3)
    arena.close()
    cuda.require_nothing_left()


def test_sizes_are_rounded_up_to_pages() -> None:
    assert CudaArena(3 * GRANULE + 1, driver=FakeCuda()).size_bytes == 4 * GRANULE
    assert CudaArena(1, page_bytes=4 * GRANULE, driver=FakeCuda()).size_bytes == 4 * GRANULE
    assert CudaArena(1, driver=FakeCuda(granule=64 << 10)).page_bytes == GRANULE
    assert CudaArena(1, driver=FakeCuda(granule=3 << 20)).page_bytes == 3 << 20


@pytest.mark.parametrize("page_bytes", [0, 1, GRANULE + 4096, GRANULE // 2])
def test_a_page_that_the_driver_cannot_map_is_refused(cuda: FakeCuda, page_bytes: int) -> None:
    with pytest.raises(ArenaError, match="multiple"):
        CudaArena(GRANULE, page_bytes=page_bytes, driver=cuda)
    cuda.require_nothing_left()


@pytest.mark.parametrize("size", [0, -5])
def test_an_empty_arena_is_refused(cuda: FakeCuda, size: int) -> None:
    with pytest.raises(ArenaError):
        CudaArena(size, driver=cuda)


def test_a_device_without_virtual_memory_is_refused() -> None:
    with pytest.raises(ArenaError, match="page by page"):
        CudaArena(GRANULE, driver=FakeCuda(virtual_memory=False))


def test_a_closed_arena_says_so(cuda: FakeCuda) -> None:
    arena = arena_of(cuda)
    arena.ensure(0, 1)
    arena.close()
    arena.close()
    for call in (lambda: arena.ensure(0, 1), lambda: arena.release(0, 1), lambda: arena.address):
        with pytest.raises(ArenaError, match="closed"):
            call()
    cuda.require_nothing_left()


def test_frameworks_see_the_whole_range(cuda: FakeCuda) -> None:
    arena = arena_of(cuda)
    interface = arena.__cuda_array_interface__
    assert interface["data"] == (arena.address, False)
    assert interface["shape"] == (PAGES * GRANULE,)
    assert interface["typestr"] == "|u1"


# ---- failures -------------------------------------------------------------------------------------


def life(arena: CudaArena) -> list[Callable[[], None]]:
    """What is done with an arena, in pieces."""
    return [
        lambda: arena.ensure(1, 2),
        lambda: arena.ensure(0, 6),
        lambda: arena.release(2, 2),
        lambda: arena.ensure(0, PAGES),
        lambda: arena.release(1, PAGES - 1),
        arena.close,
    ]


def calls_of_a_life() -> list[str]:
    cuda = FakeCuda()
    for piece in life(arena_of(cuda)):
        piece()
    return cuda.calls


EVERY_CALL = range(1, len(calls_of_a_life()) + 1)
ERRORS = [CUresult.CUDA_ERROR_UNKNOWN, CUresult.CUDA_ERROR_OUT_OF_MEMORY, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
@pytest.mark.parametrize("number", EVERY_CALL)
def test_a_failure_at_any_call_is_undone_or_told(number: int, error: CUresult) -> None:
    cuda = FakeCuda()
    cuda.fails = lambda at, function: error if at == number and "Pop" not in function else 0
    failure, began, before = None, 0, set()
    try:
        arena = arena_of(cuda)
    except CudaError:
        cuda.require_nothing_left()
        return
    for piece in life(arena):
        before, began = set(cuda.accessible), len(cuda.calls)
        try:
            piece()
        except CudaError as raised:
            failure = raised
            break
    if failure is not None:
        assert failure.code == error
        assert isinstance(failure, ArenaExhausted) == (error == CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        assert arena.resident_bytes() == cuda.used_bytes
        assert set(cuda.mapped) == cuda.accessible  # no page is half there
        if "cuMemCreate" in cuda.calls[began:]:  # it was to grow
            assert cuda.accessible == before
        if cuda.ranges:
            arena.ensure(0, PAGES)
            assert len(cuda.accessible) == PAGES
    arena.close()
    cuda.require_nothing_left()


@pytest.mark.parametrize("number", EVERY_CALL)
def test_a_driver_that_fails_for_long_leaves_nothing_behind_once_it_works(number: int) -> None:
    """Even undoing fails: the arena says that it is of no use any more, and closing it gives all back."""
    cuda = FakeCuda()
    arena = arena_of(cuda)
    cuda.fails = lambda at, function: 999 if at >= number and "Pop" not in function else 0
    with suppress(CudaError):
        for piece in life(arena):
            piece()
    assert arena.resident_bytes() == cuda.used_bytes
    cuda.fails = lambda at, function: 0
    with suppress(ArenaError):  # it cannot be used any more, or is closed but for its context
        arena.ensure(0, PAGES)
        assert resident(arena, cuda) == set(range(PAGES))
    arena.close()
    cuda.require_nothing_left()


def test_an_arena_that_cannot_undo_refuses_to_go_on(cuda: FakeCuda) -> None:
    arena = arena_of(cuda)
    cuda.fails = lambda at, function: 999 if function in ("cuMemSetAccess", "cuMemUnmap") else 0
    with pytest.raises(CudaError, match="cuMemSetAccess"):
        arena.ensure(0, 2)
    cuda.fails = lambda at, function: 0
    for call in (arena.ensure, arena.release):
        with pytest.raises(ArenaError, match="cuMemUnmap answered CUDA_ERROR_UNKNOWN"):
            call(0, 1)
    assert arena.resident_bytes() == 2 * GRANULE
    arena.close()
    cuda.require_nothing_left()


def test_memory_that_the_driver_does_not_take_back_is_counted_and_offered_again(cuda: FakeCuda) -> None:
    arena = arena_of(cuda)
    arena.ensure(0, 4)
    cuda.fails = lambda at, function: 999 if function == "cuMemRelease" else 0
    with pytest.raises(CudaError, match="cuMemRelease"):
        arena.release(0, 3)
    assert resident(arena, cuda) == {3}
    assert arena.resident_bytes() == cuda.used_bytes == 4 * GRANULE
    cuda.fails = lambda at, function: 0
    arena.release(0, 3)
    assert arena.resident_bytes() == cuda.used_bytes == GRANULE


# ---- the bindings themselves ---------------------------------------------------------------------------


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ArenaError, match="cuda-bindings"):
        CudaArena(GRANULE)


def test_without_a_driver_the_error_says_so(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(flags: int) -> None:
        raise RuntimeError('"cuda" can only be found via system search')

    monkeypatch.setattr(cuda, "_init", missing)
    with pytest.raises(ArenaError, match="no usable NVIDIA driver"):
        CudaArena(GRANULE, driver=cuda)


def test_the_real_bindings_have_all_that_is_used() -> None:
    real = pytest.importorskip("cuda.bindings.driver")
    assert not [name for name in set(calls_of_a_life()) if not hasattr(real, name)]
    for record in (real.CUmemAllocationProp(), real.CUmemAccessDesc()):
        record.location.type = real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        record.location.id = 0
    assert int(real.CUresult.CUDA_ERROR_OUT_OF_MEMORY) == CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert int(real.CUstream_flags.CU_STREAM_NON_BLOCKING) == 1
    assert int(real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE) == 3
    assert real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    assert hasattr(real.CUmemAllocationGranularity_flags, "CU_MEM_ALLOC_GRANULARITY_MINIMUM")
    assert hasattr(real.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")
