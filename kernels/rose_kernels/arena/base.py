"""What every arena offers, on CPU and GPU: one address range, of which any pages may be without memory."""

from __future__ import annotations

from typing import Protocol

PAGE_BYTES = 2 << 20
"""Page size the arenas and the ledger count in, unless told otherwise: what a GPU maps at the least."""


class ArenaError(Exception):
    """An arena or a ledger could not do what it was asked."""


class ArenaExhausted(ArenaError):
    """The device or the host has no memory for the pages asked; none of them was added."""


class Arena(Protocol):
    """A contiguous address range whose pages get and lose physical memory while it is in use.

    Addresses never change, so a tensor over the range stays valid; touching a page without memory is an
    error of the caller (a fault on a GPU, silent zeros on a CPU).  One thread calls at a time.

    With a ledger: acquire there, then `ensure`; `release`, then `Ledger.release`.  `release` waits for the
    device itself, but the caller has to know that no step to come uses the pages.
    """

    @property
    def size_bytes(self) -> int:
        """Length of the address range, a multiple of `page_bytes`."""

    @property
    def page_bytes(self) -> int:
        """Size of a page: what is given and taken."""

    @property
    def address(self) -> int:
        """Where the range begins: an address of this process, or of the device."""

    def resident_bytes(self) -> int:
        """Physical memory behind the range now, as measured where that can be measured."""

    def ensure(self, first_page: int, count: int) -> None:
        """Put memory behind these pages; those that have some keep it, with what is in them.

        New pages are zeros: what another process left there is nobody's business, and a KV cache may not hold
        NaN where nothing was written.  Raises ArenaExhausted when there is none, ArenaError for
        anything else (the range as before in both cases), and IndexError outside the range.
        """

    def release(self, first_page: int, count: int) -> None:
        """Give the memory of these pages back, with what is in them; those without memory are left alone.

        It is free for others on return.  Raises ArenaError (`resident_bytes` says what is still there, and
        the call can be made again), and IndexError outside the range.
        """

    def close(self) -> None:
        """Give everything back, addresses too: the arena and all tensors over it are dead.  Idempotent."""


def require_range(first_page: int, count: int, pages: int) -> None:
    """Raise IndexError unless `count` pages from `first_page` on lie within an arena of `pages` pages."""
    if first_page < 0 or count < 0 or first_page + count > pages:
        raise IndexError(f"pages {first_page} to {first_page + count} are not within 0 to {pages}")


def pages_for(size_bytes: int, page_bytes: int = PAGE_BYTES) -> int:
    """How many pages hold `size_bytes`."""
    return -(-size_bytes // page_bytes)
