"""Where a relay keeps the bytes of buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from rose.weights.bits import empty_buffer
from rose_daemon.relay.vault import Block, Key

B = TypeVar("B", bound=Block)


class Pool(Protocol[B]):
    """Makes blocks, and takes their memory back."""

    def allocate(self, key: Key, bucket: str, size: int) -> B:
        """A block of `size` bytes for a bucket.  Raises RelayFull."""

    async def release(self, block: B) -> bool:
        """Take a block's memory back; False while somebody outside this process may still read it."""


@dataclass(frozen=True, eq=False)
class MemoryBlock:
    """Memory of this process."""

    data: memoryview
    """Not cleared: whoever stores it has filled all of it."""
    offset: int = 0
    """Where it begins in the arena, header page included (`ArenaPool`)."""
    tag: bytes = b""
    """By which readers know it in the arena."""

    @property
    def size(self) -> int:
        """Bytes of the bucket."""
        return len(self.data)


class HeapPool:
    """Blocks in this process' own memory."""

    def allocate(self, _key: Key, _bucket: str, size: int) -> MemoryBlock:
        """See `Pool.allocate`."""
        return MemoryBlock(empty_buffer(size))

    async def release(self, _block: MemoryBlock) -> bool:
        """See `Pool.release`: the memory goes with the last reference to it."""
        return True
