"""The embedded relay's memory: one arena, which readers of this host may map.

The arena is an anonymous file (memfd).  A reader of the same user opens it through /proc, locks the part that
a bucket lies in, and copies from its own mapping.  The kernel drops the lock when the reader closes or dies:
memory goes back when nobody reads it, and not before.  Sealed: others can neither write nor resize it.
Nothing is left behind when the relay is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from bisect import insort

from rose.errors import RoseError
from rose.weights.relay import RelayFull
from rose.weights.relay.http import SharedPlacement
from rose.weights.relay.shared import HEADER_BYTES, TAG_BYTES, lock_range
from rose_daemon.relay.pools import MemoryBlock
from rose_daemon.relay.vault import Key

_PAGE_BYTES = 4096
_F_SEAL_FUTURE_WRITE = 0x0010
"""Linux 5.1; the fcntl module has no name for it before Python 3.13."""


class ArenaPool:
    """Blocks within one arena of `capacity_bytes`; memory is taken from the system as it is first used.

    Memory that was used once stays with the arena: writing into it again costs no page faults.
    """

    def __init__(self, capacity_bytes: int) -> None:
        size = _pages(capacity_bytes)
        try:
            self._file = os.memfd_create("rose-relay", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._file, size)
            self._map = mmap.mmap(self._file, size)
        except OSError as error:
            raise RoseError(
                f"the relay cannot reserve {size} bytes: {error.strerror}", "lower relay.capacity_bytes"
            ) from None
        with contextlib.suppress(OSError):  # of a kernel without large pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
        self._view = memoryview(self._map)
        self._taken = 0
        self._free: list[tuple[int, int]] = [(0, size)]
        """Offset and length of what is free, in order of offset, adjacent parts joined."""

    def allocate(self, _key: Key, _bucket: str, size: int) -> MemoryBlock:
        """See `Pool.allocate`.  Raises RelayFull also where the system has no memory left."""
        span = _pages(HEADER_BYTES + size)
        index = next((at for at, (_, length) in enumerate(self._free) if length >= span), None)
        if index is None:
            raise RelayFull(
                f"no {span} bytes in one piece are free in the relay's arena",
                "delete versions, or raise relay.capacity_bytes",
            )
        offset, length = self._free[index]
        self._take(offset + span)
        self._free[index : index + 1] = [(offset + span, length - span)] if length > span else []
        tag = secrets.token_bytes(TAG_BYTES)
        self._view[offset : offset + TAG_BYTES] = tag
        start = offset + HEADER_BYTES
        return MemoryBlock(self._view[start : start + size], offset, tag)

    async def release(self, block: MemoryBlock) -> bool:
        """See `Pool.release`."""
        span = _pages(HEADER_BYTES + block.size)
        if not lock_range(self._file, fcntl.F_WRLCK, block.offset, span):
            return False
        # A reader that comes now finds another tag, or none, and lets go.
        self._view[block.offset : block.offset + TAG_BYTES] = bytes(TAG_BYTES)
        lock_range(self._file, fcntl.F_UNLCK, block.offset, span)
        insort(self._free, (block.offset, span))
        self._join_free()
        return True

    def placement(self, block: MemoryBlock) -> SharedPlacement:
        """Where a reader of this host finds a block."""
        return SharedPlacement(os.getpid(), self._file, block.offset, block.size, block.tag.hex())

    def close(self) -> None:
        """Hide it from further readers; the memory goes with the last reference or mapping."""
        os.close(self._file)

    def _take(self, stop: int) -> None:
        """Take memory from the system up to here, or a write would be ended by SIGBUS.  Raises RelayFull."""
        if stop <= self._taken:
            return
        try:
            os.posix_fallocate(self._file, self._taken, stop - self._taken)
        except OSError as error:
            raise RelayFull(f"the system has no more memory for the arena: {error.strerror}") from None
        self._taken = stop

    def _join_free(self) -> None:
        joined: list[tuple[int, int]] = []
        for offset, length in self._free:
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((offset, length))
        self._free = joined


def _pages(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES
