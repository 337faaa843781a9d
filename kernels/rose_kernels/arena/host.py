"""The arena of a CPU engine: anonymous memory whose pages the kernel is asked to take back."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from rose_kernels.arena.base import ArenaError, pages_for, require_range

SLICE_BYTES = 16 << 20
"""Most that one system call gives back: a whole GiB takes the kernel 100 ms, in which others wait."""
_RESIDENT = 1


class HostArena:
    """Private anonymous memory; see `rose_kernels.arena.base.Arena` for what it promises.

    A page without memory reads as zeros, and writing to it gives it memory again: nothing faults.
    """

    def __init__(self, size_bytes: int) -> None:
        """Reserve addresses for `size_bytes`, rounded up to whole pages; no memory yet.

        Raises ValueError for a size that is not above 0, ArenaError where the host has no such range.
        """
        if size_bytes <= 0:
            raise ValueError(f"an arena of {size_bytes} bytes")
        self._size_bytes = pages_for(size_bytes, self.page_bytes) * self.page_bytes
        try:
            self._memory = mmap.mmap(-1, self._size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ArenaError(f"no address range of {self._size_bytes} bytes: {error}") from error
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._memory)
        self._address = ctypes.addressof(self._anchor)
        # Through ctypes, as it lets other Python threads run meanwhile; mmap's own `madvise` does not.
        self._libc = ctypes.CDLL(None, use_errno=True)

    @property
    def size_bytes(self) -> int:
        """Length of the address range, in whole pages."""
        return self._size_bytes

    @property
    def page_bytes(self) -> int:
        """The host's page size."""
        return mmap.PAGESIZE

    @property
    def address(self) -> int:
        """Where the range begins in this process."""
        return self._address

    @property
    def memory(self) -> mmap.mmap:
        """The range as a writable buffer, to lay arrays and tensors over; they must not outlive the arena."""
        return self._memory

    def resident_bytes(self) -> int:
        """Bytes of the range in physical memory now (mincore); what is swapped out does not count."""
        pages = np.zeros(self._size_bytes // self.page_bytes, np.uint8)
        self._call("mincore", 0, self._size_bytes, pages.ctypes.data)
        return int(np.count_nonzero(pages & _RESIDENT)) * self.page_bytes

    def ensure(self, first_page: int, count: int) -> None:
        """Nothing to do but to check the range: the kernel adds memory when a page is written to."""
        require_range(first_page, count, self._size_bytes // self.page_bytes)

    def release(self, first_page: int, count: int) -> None:
        """Give the memory of these pages back, in slices of at most SLICE_BYTES."""
        require_range(first_page, count, self._size_bytes // self.page_bytes)
        start, end = first_page * self.page_bytes, (first_page + count) * self.page_bytes
        for offset in range(start, end, SLICE_BYTES):
            self._call("madvise", offset, min(SLICE_BYTES, end - offset), mmap.MADV_DONTNEED)

    def _call(self, name: str, offset: int, length: int, argument: int) -> None:
        if self._anchor is None:
            raise ArenaError("the arena is closed")
        call = getattr(self._libc, name)
        address, size = ctypes.c_void_p(self._address + offset), ctypes.c_size_t(length)
        third = ctypes.c_int(argument) if name == "madvise" else ctypes.c_void_p(argument)
        if call(address, size, third):
            raise ArenaError(f"{name} of {length} bytes: {os.strerror(ctypes.get_errno())}")

    def close(self) -> None:
        """Give everything back.  While an array or tensor lies over the range, its addresses stay taken."""
        if self._anchor is None:
            return
        self.release(0, self._size_bytes // self.page_bytes)
        self._anchor = None
        try:
            self._memory.close()
        except BufferError:
            return  # the range goes with the last array over it
