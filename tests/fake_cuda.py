"""A CUDA driver that is not there: the virtual memory calls of `cuda.bindings.driver`, with their rules.

Breaking a rule that the real driver leaves undefined or punishes later fails the test at once.  Any call can
be made to fail, and what is left over at the end is known.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

GRANULE = 2 << 20
CONTEXT = "primary context"


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_UNKNOWN = 999


class FakeCuda:
    """Use an instance as the `driver` of an arena."""

    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="vmm")
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(
        self, *, memory_bytes: int = 1 << 40, granule: int = GRANULE, virtual_memory: bool = True
    ) -> None:
        self.memory_bytes = memory_bytes
        self.granule = granule
        self.virtual_memory = virtual_memory
        self.calls: list[str] = []
        self.fails: Callable[[int, str], int] = lambda number, function: 0
        """Given the number of a call and its function: the code it answers, 0 to do it."""
        self.ranges: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        """Allocations -> bytes, until released."""
        self.mapped: dict[int, tuple[int, int]] = {}
        """Address -> allocation and bytes."""
        self.accessible: set[int] = set()
        self.zeroed: set[int] = set()
        """Accessible pages that hold zeros since they were mapped."""
        self.streams: dict[int, bool] = {}
        """Stream -> whether work is left on it."""
        self.retained = 0
        self.contexts: list[str] = []
        self.busy = False
        """Whether a kernel runs that may touch any accessible page."""
        self._next = 1

    # ---- what is there -----------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Physical memory: what has a handle or a mapping."""
        sizes = dict(self.mapped.values()) | self.handles
        return sum(sizes.values())

    def require_nothing_left(self) -> None:
        """Fail unless everything that was taken has been given back."""
        left = (
            self.ranges,
            self.handles,
            self.mapped,
            self.accessible,
            self.streams,
            self.retained,
            self.contexts,
        )
        assert left == ({}, {}, {}, set(), {}, 0, []), left

    # ---- records ------------------------------------------------------------------------------------

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    @staticmethod
    def CUmemAccessDesc() -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(flags=None, location=SimpleNamespace(type=None, id=None))

    # ---- calls --------------------------------------------------------------------------------------

    def __getattr__(self, function: str) -> Callable[..., tuple[Any, ...]]:
        """`cuMemMap` and so on: `_mem_map` below, unless it is to fail."""
        if not function.startswith("cu"):
            raise AttributeError(function)
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in function.removeprefix("cu"))
        work = object.__getattribute__(self, name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(function)
            if code := self.fails(len(self.calls), function):
                return (CUresult(code), None)
            value = work(*arguments)
            if isinstance(value, CUresult):
                return (value, None)
            return (CUresult.CUDA_SUCCESS,) if value is None else (CUresult.CUDA_SUCCESS, value)

        return call

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _init(self, flags: int) -> None:
        assert flags == 0

    def _device_get(self, ordinal: int) -> str:
        return f"device {ordinal}"

    def _device_get_attribute(self, attribute: str, device: str) -> int:
        assert (attribute, device) == ("vmm", "device 0")
        return int(self.virtual_memory)

    def _device_primary_ctx_retain(self, device: str) -> str:
        self.retained += 1
        return CONTEXT

    def _device_primary_ctx_release(self, device: str) -> None:
        assert self.retained > 0
        self.retained -= 1

    def _ctx_push_current(self, context: str) -> None:
        assert context == CONTEXT
        assert self.retained
        self.contexts.append(context)

    def _ctx_pop_current(self) -> str:
        return self.contexts.pop()

    def _ctx_synchronize(self) -> None:
        assert self.contexts
        self.busy = False
        self.streams = dict.fromkeys(self.streams, False)

    def _mem_get_allocation_granularity(self, allocation: Any, option: int) -> int:
        assert option == 0
        assert (allocation.type, allocation.location.type) == (1, 1)
        return self.granule

    def _mem_address_reserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        assert size % self.granule == 0 < size
        assert (address, flags) == (0, 0)
        assert alignment & (alignment - 1) == 0
        start = self._new() << 44
        self.ranges[start] = size
        return start

    def _mem_address_free(self, address: int, size: int) -> None:
        assert self.ranges.pop(address) == size
        assert not [at for at in self.mapped if address <= at < address + size], "freed while mapped"

    def _mem_create(self, size: int, allocation: Any, flags: int) -> int | CUresult:
        assert size % self.granule == 0 < size
        assert (allocation.location.id, flags) == (0, 0)
        if self.used_bytes + size > self.memory_bytes:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY
        handle = self._new()
        self.handles[handle] = size
        return handle

    def _mem_map(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert (self.handles[handle], offset, flags) == (size, 0, 0)
        assert any(
            start <= address and address + size <= start + length for start, length in self.ranges.items()
        )
        assert not [
            at for at, (_, length) in self.mapped.items() if at < address + size and address < at + length
        ]
        self.mapped[address] = (handle, size)

    def _covered(self, address: int, size: int) -> list[int]:
        """Mappings that make up a range exactly."""
        found, at = [], address
        while at < address + size:
            assert at in self.mapped, "not a mapped range"
            found.append(at)
            at += self.mapped[at][1]
        assert at == address + size, "a part of an allocation"
        return found

    def _mem_set_access(self, address: int, size: int, descriptions: list[Any], count: int) -> None:
        assert len(descriptions) == count == 1
        assert (descriptions[0].flags, descriptions[0].location.id) == (3, 0)
        self.accessible.update(self._covered(address, size))

    def _mem_unmap(self, address: int, size: int) -> None:
        pages = self._covered(address, size)
        assert not self.busy or not self.accessible & set(pages), "unmapped under a running kernel"
        for page in pages:
            del self.mapped[page]
            self.accessible.discard(page)
            self.zeroed.discard(page)

    def _stream_create(self, flags: int) -> int:
        assert (flags, bool(self.contexts)) == (1, True)
        stream = self._new()
        self.streams[stream] = False
        return stream

    def _stream_synchronize(self, stream: int) -> None:
        self.streams[stream] = False

    def _stream_destroy(self, stream: int) -> None:
        assert not self.streams.pop(stream), "destroyed with work left on it"

    def _memset_d8_async(self, address: int, value: int, size: int, stream: int) -> None:
        pages = self._covered(address, size)
        assert value == 0
        assert set(pages) <= self.accessible
        self.zeroed.update(pages)
        self.streams[stream] = True

    def _mem_release(self, handle: int) -> None:
        assert handle in self.handles, "released twice"
        assert not [at for at, (held, _) in self.mapped.items() if held == handle], "released while mapped"
        del self.handles[handle]
