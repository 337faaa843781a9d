"""An engine's share of the KV memory of a device, kept in the page ledger.  Imports no vLLM.

Order of events: pages are acquired in the ledger, then blocks are unparked; blocks are parked, their memory
is given back, and when the worker says so the pages are released.  The account is that of the process that
schedules, which can acquire without waiting for anybody.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
from rose_kernels.arena.base import PAGE_BYTES, pages_for

from rose.engines.vllm.kv_orders import Blocks
from rose.engines.vllm.settings import PluginSettings
from rose.errors import ConfigError


class Account(Protocol):
    """What is needed of `rose_kernels.arena.ledger.Account`."""

    def acquire(self, pages: int) -> int:
        """Take all of them, or none and answer 0."""

    def release(self, pages: int) -> None:
        """Give them back."""


class PageLedger(Protocol):
    """What is needed of `rose_kernels.arena.ledger.Ledger`."""

    capacity_pages: int

    @property
    def free_pages(self) -> int:
        """Pages of nobody."""


class SharedPages:
    """Pages that this engine holds in the ledger of its device; `leave_share` of all is not for it."""

    def __init__(
        self,
        ledger: PageLedger,
        account: Account,
        *,
        block_bytes: int,
        group_blocks: int = 1,
        leave_share: float = 0.0,
    ) -> None:
        self._ledger = ledger
        self._account = account
        self._block_bytes = block_bytes
        self._group_blocks = group_blocks
        self._leave_pages = math.ceil(leave_share * ledger.capacity_pages)
        self.held = 0

    @classmethod
    def join(cls, settings: PluginSettings, block_bytes: int, group_blocks: int) -> SharedPages:
        """Join the ledger, and make it if there is none.

        Raises ConfigError when there is one of another size, or none can be had.
        """
        try:
            from rose_kernels.arena.ledger import Ledger, LedgerError, Role  # noqa: PLC0415 (needs the C library)
        except ImportError as error:
            raise ConfigError(f"KV memory cannot be shared: {error}", "set kv_shared_bytes to 0") from error
        role = Role.SERVING if settings.role == "serving" else Role.ROLLOUT
        capacity = settings.kv_shared_bytes // PAGE_BYTES
        settings.boards.run_dir.mkdir(parents=True, exist_ok=True)
        try:
            ledger = Ledger.create(settings.boards.ledger, capacity)
            ledger.reclaim()
            account = ledger.join(role, capacity)
        except (OSError, LedgerError) as error:
            hint = "all engines of a device share the same number of bytes"
            raise ConfigError(f"KV memory cannot be shared: {error}", hint) from error
        leave = settings.kv_headroom_share if role is Role.ROLLOUT else 0.0
        return cls(ledger, account, block_bytes=block_bytes, group_blocks=group_blocks, leave_share=leave)

    def charge(self, without_memory: Blocks) -> int:
        """Pages behind all other blocks: a group of blocks counts whole if one of it has memory."""
        starts = np.arange(0, without_memory.size, self._group_blocks)
        groups = int(np.count_nonzero(~np.logical_and.reduceat(without_memory, starts)))
        blocks = min(groups * self._group_blocks, without_memory.size)
        return pages_for(blocks * self._block_bytes)

    @property
    def available(self) -> int:
        """Pages that could be acquired now; a rollout engine leaves the headroom to serving."""
        return max(0, self._ledger.free_pages - self._leave_pages)

    def acquire_for(self, wanted: int, without_memory: Callable[[int], Blocks], budget: int) -> int:
        """The largest budget from `budget` to `wanted` for which pages could be had; they are held then.

        `without_memory(blocks)` tells which blocks need no pages under a budget.
        """
        while True:
            wanted = self._within(self.held + self.available, without_memory, budget, wanted)
            missing = self.charge(without_memory(wanted)) - self.held if wanted > budget else 0
            if missing <= 0:
                return wanted
            if self._account.acquire(missing):
                self.held += missing
                return wanted
            # Somebody was quicker: look again at what is left.

    def _within(self, pages: int, without_memory: Callable[[int], Blocks], low: int, high: int) -> int:
        """The largest budget from `low` to `high` that is charged no more than `pages`; `low` if none is."""
        if self.charge(without_memory(high)) <= pages:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if self.charge(without_memory(middle)) <= pages:
                low = middle
            else:
                high = middle
        return low

    def settle(self, without_memory: Blocks) -> None:
        """Release what is held beyond the blocks that have memory."""
        surplus = self.held - self.charge(without_memory)
        if surplus > 0:
            self._account.release(surplus)
            self.held -= surplus
