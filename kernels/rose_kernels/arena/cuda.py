"""An arena on a GPU: an address range reserved once, with physical allocations mapped into it as pages.

Uses the virtual memory calls of the CUDA driver through cuda-bindings, imported when an arena is made.  A
page is one allocation, as the driver unmaps whole allocations only; neighbouring pages share the calls that
take a range (access, unmapping).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from rose_kernels.arena.base import PAGE_BYTES, ArenaError, ArenaExhausted, pages_for, require_range

_OUT_OF_MEMORY = 2


class CudaError(ArenaError):
    """A call of the CUDA driver failed.

    `code` and `name` are the driver's (700, "CUDA_ERROR_ILLEGAL_ADDRESS"), `call` is the function.
    """

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} answered {name} ({code})")
        self.call, self.code, self.name = call, code, name


class CudaExhausted(CudaError, ArenaExhausted):
    """The device has no memory for the pages asked."""


class _Driver:
    """The calls of `cuda.bindings.driver`, with exceptions in place of codes."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @classmethod
    def find(cls) -> _Driver:
        try:
            return cls(importlib.import_module("cuda.bindings.driver"))
        except ImportError as error:
            raise ArenaError(f"memory of a GPU needs the package cuda-bindings ({error})") from None

    def __call__(self, function: str, *arguments: Any) -> Any:
        """The function's value, or None if it has none."""
        try:
            code, *values = getattr(self.module, function)(*arguments)
        except RuntimeError as error:  # the bindings look for the driver's library at the first call
            raise ArenaError(f"no usable NVIDIA driver: {error}") from None
        if int(code) != 0:
            kind = CudaExhausted if int(code) == _OUT_OF_MEMORY else CudaError
            raise kind(function, int(code), getattr(code, "name", str(code)))
        return values[0] if values else None


class CudaArena:
    """See `base.Arena`.

    `size_bytes` is rounded up to pages; `page_bytes` is a multiple of what the driver can map (2 MiB on every
    device so far), and by default the smallest.  Frameworks take the range without a copy from
    `__cuda_array_interface__`; some ask the driver whose address it is, so give the first page memory before.

    Raises ArenaError where there is no driver or the device cannot map memory, and CudaError for what the
    driver says.
    """

    def __init__(
        self, size_bytes: int, *, device: int = 0, page_bytes: int | None = None, driver: Any = None
    ) -> None:
        self._cu = _Driver(driver) if driver is not None else _Driver.find()
        self._cu("cuInit", 0)
        self._device = self._cu("cuDeviceGet", device)
        self._require_virtual_memory(device)
        self._allocation, self._access = self._descriptions(device)
        self._page_bytes = self._fitting(page_bytes)
        pages = pages_for(size_bytes, self._page_bytes)
        if pages < 1:
            raise ArenaError("an arena has at least a page")
        self._handles: list[Any] = [None] * pages
        self._unreleased: list[Any] = []
        """Allocations that are mapped nowhere, and that the driver would not take back: it is asked again."""
        self._broken = ""
        self._context_handle = self._cu("cuDevicePrimaryCtxRetain", self._device)
        self._retained = True
        self._address: int | None = None
        self._stream: Any = None
        try:
            with self._context():
                self._address = int(self._cu("cuMemAddressReserve", self.size_bytes, 0, 0, 0))
                self._stream = self._cu(
                    "cuStreamCreate", self._cu.module.CUstream_flags.CU_STREAM_NON_BLOCKING
                )
        except CudaError:
            self.close()
            raise

    def _require_virtual_memory(self, device: int) -> None:
        attribute = self._cu.module.CUdevice_attribute
        supported = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._cu("cuDeviceGetAttribute", supported, self._device):
            raise ArenaError(f"GPU {device} cannot map memory page by page")

    def _descriptions(self, device: int) -> tuple[Any, Any]:
        """What an allocation is (memory of this device), and who may access it (this device, all of it)."""
        module = self._cu.module
        allocation, access = module.CUmemAllocationProp(), module.CUmemAccessDesc()
        allocation.type = module.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        for description in (allocation, access):
            description.location.type = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            description.location.id = device
        access.flags = module.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return allocation, access

    def _fitting(self, page_bytes: int | None) -> int:
        """The page size asked for, if the driver can map it."""
        option = self._cu.module.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granule = int(self._cu("cuMemGetAllocationGranularity", self._allocation, option))
        if page_bytes is None:
            return pages_for(PAGE_BYTES, granule) * granule
        if page_bytes < 1 or page_bytes % granule:
            raise ArenaError(f"a page of {page_bytes} bytes is not a multiple of {granule}")
        return page_bytes

    # ---- what it is ------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Length of the address range."""
        return len(self._handles) * self._page_bytes

    @property
    def page_bytes(self) -> int:
        """Size of a page."""
        return self._page_bytes

    @property
    def address(self) -> int:
        """Where the range begins on the device; raises ArenaError once it is closed."""
        if self._address is None:
            raise ArenaError("the arena is closed")
        return self._address

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "strides": None,
            "version": 3,
        }  # fmt: skip

    def resident_bytes(self) -> int:
        """Physical memory that the driver has given for the range and not taken back."""
        held = sum(handle is not None for handle in self._handles) + len(self._unreleased)
        return held * self._page_bytes

    # ---- giving and taking -----------------------------------------------------------------------

    def ensure(self, first_page: int, count: int) -> None:
        """See `base.Arena.ensure`: all of the pages, or none and an exception."""
        self._require_usable(first_page, count)
        added: list[tuple[int, int]] = []
        with self._context():
            try:
                for first, length in self._runs(first_page, count, resident=False):
                    self._map(first, length)
                    added.append((first, length))
            except CudaError as error:
                self._undo(error, added)
                raise

    def release(self, first_page: int, count: int) -> None:
        """See `base.Arena.release`.  After an exception, `resident_bytes` says what is still there."""
        self._require_usable(first_page, count)
        with self._context():
            self._cu("cuCtxSynchronize")  # nothing that runs may lose its memory
            for first, length in self._runs(first_page, count, resident=True):
                self._unmap(first, length)
            self._retry_unreleased()
            self._cu("cuCtxSynchronize")  # and the memory is gone from the device before others are told

    def close(self) -> None:
        """See `base.Arena.close`.  After an exception it can be called again."""
        if self._address is not None:
            with self._context():
                self._cu("cuCtxSynchronize")
                for first, length in self._runs(0, len(self._handles), resident=True):
                    self._unmap(first, length)
                self._retry_unreleased()
                self._cu("cuMemAddressFree", self._address, self.size_bytes)
                self._address = None
        if self._stream is not None:
            with self._context():
                self._cu("cuStreamDestroy", self._stream)
                self._stream = None
        if self._retained:
            self._cu("cuDevicePrimaryCtxRelease", self._device)
            self._retained = False

    def __enter__(self) -> CudaArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- steps -----------------------------------------------------------------------------------

    def _require_usable(self, first_page: int, count: int) -> None:
        require_range(first_page, count, len(self._handles))
        if self._address is None:
            raise ArenaError("the arena is closed")
        if self._broken:
            raise ArenaError(f"the arena can only be closed: {self._broken}")

    @contextmanager
    def _context(self) -> Iterator[None]:
        """The device's context on this thread, which need not be one that computes."""
        self._cu("cuCtxPushCurrent", self._context_handle)
        try:
            yield
        finally:
            self._cu("cuCtxPopCurrent")

    def _runs(self, first_page: int, count: int, *, resident: bool) -> list[tuple[int, int]]:
        """(first page, length) of the neighbouring pages that have memory, or that have none."""
        pages = range(first_page, first_page + count)
        chosen = [page for page in pages if (self._handles[page] is not None) == resident]
        groups = groupby(enumerate(chosen), key=lambda item: item[1] - item[0])
        runs = [[page for _, page in group] for _, group in groups]
        return [(run[0], len(run)) for run in runs]

    def _at(self, page: int) -> int:
        return self.address + page * self._page_bytes

    def _map(self, first: int, length: int) -> None:
        """Memory behind a run of pages without any; after a CudaError they have none again."""
        handles: list[Any] = []
        mapped = 0
        try:
            for page in range(first, first + length):
                handles.append(self._cu("cuMemCreate", self._page_bytes, self._allocation, 0))
                self._cu("cuMemMap", self._at(page), self._page_bytes, 0, handles[-1], 0)
                mapped += 1
            self._cu("cuMemSetAccess", self._at(first), length * self._page_bytes, [self._access], 1)
            self._zero(first, length)
        except CudaError as error:
            self._handles[first : first + mapped] = handles[:mapped]
            self._unreleased += handles[mapped:]
            self._undo(error, [(first, mapped)] if mapped else [])
            raise
        self._handles[first : first + length] = handles

    def _zero(self, first: int, length: int) -> None:
        """Zeros, on a stream of its own: no kernel that runs is waited for."""
        self._cu("cuMemsetD8Async", self._at(first), 0, length * self._page_bytes, self._stream)
        self._cu("cuStreamSynchronize", self._stream)

    def _undo(self, error: CudaError, runs: list[tuple[int, int]]) -> None:
        """Take the memory away again that was given before `error`; what cannot be undone ends the arena."""
        try:
            for first, length in runs:
                self._unmap(first, length)
            self._retry_unreleased()
        except CudaError as second:
            self._broken = f"{error}, and undoing it: {second}"

    def _unmap(self, first: int, length: int) -> None:
        self._cu("cuMemUnmap", self._at(first), length * self._page_bytes)
        self._unreleased += self._handles[first : first + length]
        self._handles[first : first + length] = [None] * length

    def _retry_unreleased(self) -> None:
        """Give unmapped memory back to the device."""
        while self._unreleased:
            self._cu("cuMemRelease", self._unreleased[-1])
            self._unreleased.pop()
