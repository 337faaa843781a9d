"""How many KV blocks a serving engine lends: what it left unused for a while, down to a reserve (ours).

The reserve covers whatever one step can take, so that a step never waits for memory, and the blocks that the
engine keeps for its prefix cache.  Growing is at once and in chunks; lending is slow: only what was unused
all through a window is lent, so that serving does not hand the same memory out and back in.
"""

from __future__ import annotations

import msgspec

from rose.units import NS_PER_S


class LendingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of one engine."""

    total_blocks: int
    step_blocks: int
    """Most blocks that one step can take."""
    keep_blocks: int = 0
    """Free blocks to keep besides; the prefix cache lives in them."""
    window_ns: int = NS_PER_S

    def __post_init__(self) -> None:
        if self.total_blocks < 1 or self.step_blocks < 1 or self.keep_blocks < 0 or self.window_ns < 1:
            raise ValueError(f"senseless settings: {self}")

    @property
    def chunk_blocks(self) -> int:
        """By how much it grows at a time, at the least."""
        return 2 * self.step_blocks

    @property
    def reserve_blocks(self) -> int:
        """Free blocks that are never lent."""
        return self.step_blocks + self.chunk_blocks + self.keep_blocks


class LendingPolicy:
    """Watches the free blocks of an engine; answers what to take back and what to lend."""

    def __init__(self, settings: LendingSettings) -> None:
        self.settings = settings
        self._window_began_ns: int | None = None
        self._free_min = 0

    def wanted(self, free_blocks: int, parked_blocks: int, waiting_blocks: int = 0) -> int:
        """Blocks to take back before the next step; 0 if it cannot run short.

        `waiting_blocks` is what requests need that the step may admit: an engine admits none of which the
        whole prompt does not fit.
        """
        missing = self.settings.step_blocks + waiting_blocks - free_blocks
        return min(parked_blocks, max(self.settings.chunk_blocks, missing)) if missing > 0 else 0

    def surplus(self, free_blocks: int, now_ns: int) -> int:
        """Blocks to lend now: at the end of each window, what was beyond the reserve all through it."""
        if self._window_began_ns is None:
            self._window_began_ns, self._free_min = now_ns, free_blocks
        self._free_min = min(self._free_min, free_blocks)
        if now_ns - self._window_began_ns < self.settings.window_ns:
            return 0
        surplus = max(0, self._free_min - self.settings.reserve_blocks)
        self._window_began_ns, self._free_min = now_ns, free_blocks - surplus
        return surplus
