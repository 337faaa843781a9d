"""Memory that moves between engines while they run: arenas, whose pages come and go, and their ledger."""

from rose_kernels.arena.base import PAGE_BYTES, Arena, ArenaError, ArenaExhausted, pages_for, require_range

__all__ = ["PAGE_BYTES", "Arena", "ArenaError", "ArenaExhausted", "pages_for", "require_range"]
