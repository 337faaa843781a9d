"""The KV budget of an engine: blocks beyond it are parked, so that nobody can use them.

Blocks are numbered; 0 is vLLM's null block.  A cut parks free blocks wherever they lie, and ends requests
only for what is missing then; the memory of parked blocks is given back by the worker (`kv_arena`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from rose.core.victims import Holder, choose_victims
from rose.engines.vllm.kv_orders import Blocks

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

_WINDOW = 64
"""How many of the next blocks to evict compete for being taken by their low number."""


class LowIdFreeQueue(FreeKVCacheBlockQueue):
    """vLLM's free list, which takes low-numbered blocks where it makes little difference.

    Least recently used order scatters requests over all numbers, and no whole page would ever be free.
    Among the blocks next in line, unused ones go first, then low numbers; what was used recently stays.
    """

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take `n` blocks."""
        window: list[KVCacheBlock] = []
        block = self.fake_free_list_head.next_free_block
        while block is not self.fake_free_list_tail and len(window) < max(_WINDOW, n):
            window.append(block)
            block = block.next_free_block
        window.sort(key=lambda free: (free.block_hash is not None, free.block_id))
        taken = window[:n]
        assert len(taken) == n
        for chosen in taken:
            self.remove(chosen)
        return taken


class KvBudget:
    """How many blocks of one engine may be used, and the blocks kept out of its pool.

    Blocks are parked in groups of `group_blocks` neighbours where possible, as that many fill whole pages.
    """

    def __init__(self, scheduler: Scheduler, group_blocks: int = 1) -> None:
        manager = scheduler.kv_cache_manager
        self._scheduler = scheduler
        self._pool = manager.block_pool
        self._managers = manager.coordinator.single_type_managers
        self._block_tokens: int = scheduler.block_size
        self._group_blocks = group_blocks
        self.total_blocks: int = self._pool.num_gpu_blocks - 1
        self.budget_blocks = self.total_blocks
        self.parked: Blocks = np.zeros(self.total_blocks + 1, np.bool_)
        """By block number, whether the block is kept out of the pool."""
        # The list is linked through the blocks themselves: only the order of taking changes.
        self._pool.free_block_queue.__class__ = LowIdFreeQueue

    @property
    def parked_blocks(self) -> int:
        """How many blocks are parked."""
        return int(np.count_nonzero(self.parked))

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        free: int = self._pool.get_num_free_blocks()
        return self.total_blocks - free - self.parked_blocks

    def fits(self, tokens: int, budget_blocks: int | None = None) -> bool:
        """Whether one request of that many tokens fits the budget (the present one by default) on its own."""
        budget = self.budget_blocks if budget_blocks is None else budget_blocks
        return -(-tokens // self._block_tokens) <= budget

    def victims(self, budget_blocks: int) -> list[str]:
        """Requests to end before the budget can be set: the cheapest to compute anew, no more."""
        missing = self.total_blocks - budget_blocks - self.parked_blocks
        group_blocks: Counter[int] = Counter()
        held: set[int] = set()
        for block in self._pool.blocks[1:]:
            if not self.parked[block.block_id]:
                group = block.block_id // self._group_blocks
                group_blocks[group] += 1
                if block.ref_cnt:
                    held.add(group)
        missing -= sum(blocks for group, blocks in group_blocks.items() if group not in held)
        return choose_victims(self._holders(), group_blocks, missing) if missing > 0 else []

    def _holders(self) -> list[Holder]:
        holders = []
        for request_id in sorted({each for manager in self._managers for each in manager.req_to_blocks}):
            tables = [manager.req_to_blocks.get(request_id, ()) for manager in self._managers]
            own = [[block for block in table if not block.is_null] for table in tables]
            groups = {block.block_id // self._group_blocks for table in own for block in table}
            if groups:
                holders.append(Holder(request_id, self._cost_tokens(request_id, own), groups))
        return holders

    def _cost_tokens(self, request_id: str, tables: list[list[Any]]) -> int:
        """Tokens to compute anew if the request ends.

        A block that other requests hold too stays, and whoever takes the request over probably has that
        prefix as well: the members of a group start from the same prompt.
        """
        request = self._scheduler.requests.get(request_id)
        if request is None:
            return 0
        shared = min((sum(block.ref_cnt > 1 for block in table) for table in tables if table), default=0)
        return max(0, int(request.num_computed_tokens) - shared * self._block_tokens)

    def set(self, budget_blocks: int) -> bool:
        """Park as many blocks as lie beyond the budget, or give some back; idempotent.

        False while too few are free: requests must be ended first, then set again.
        """
        assert 0 < budget_blocks <= self.total_blocks
        self.budget_blocks = budget_blocks
        parked = self.parked_at(budget_blocks)
        back = np.flatnonzero(self.parked & ~parked)
        self.parked[back] = False
        # Freeing puts unhashed blocks at the front of the list, low numbers first.
        self._pool.free_blocks([self._pool.blocks[number] for number in back])
        for number in np.flatnonzero(parked & ~self.parked):
            self._park(self._pool.blocks[number])
        return self.parked_blocks == self.total_blocks - budget_blocks

    def parked_at(self, budget_blocks: int) -> Blocks:
        """What would be parked under a budget, as far as free blocks allow."""
        parked = self.parked.copy()
        surplus = self.parked_blocks - (self.total_blocks - budget_blocks)
        if surplus > 0:
            parked[np.flatnonzero(parked)[:surplus]] = False
        elif surplus < 0:
            parked[[block.block_id for block in self._to_park(-surplus)]] = True
        return parked

    def _to_park(self, wanted: int) -> list[Any]:
        """Free blocks: whole groups first, of these the ones that cache least, then high numbers."""
        free: dict[int, list[Any]] = {}
        held: set[int] = set()
        for block in self._pool.blocks[1:]:
            group = block.block_id // self._group_blocks
            if block.ref_cnt == 0:
                free.setdefault(group, []).append(block)
            elif not self.parked[block.block_id]:
                held.add(group)

        def place(group: int) -> tuple[bool, int, int]:
            cached = sum(block.block_hash is not None for block in free[group])
            return group in held, cached, -group

        order = sorted(free, key=place)
        return [block for group in order for block in reversed(free[group])][:wanted]

    def _park(self, block: Any) -> None:
        self._pool.free_block_queue.remove(block)
        self._pool._maybe_evict_cached_block(block)
        block.ref_cnt = 1
        self.parked[block.block_id] = True

    @contextmanager
    def all_unparked(self) -> Iterator[None]:
        """Every block back for a moment: vLLM resets its prefix cache only if all are free.

        The same ones are parked again, as their memory is gone.  Nothing may be scheduled meanwhile.
        """
        parked = np.flatnonzero(self.parked)
        self.parked[parked] = False
        self._pool.free_blocks([self._pool.blocks[number] for number in parked])
        try:
            yield
        finally:
            for number in parked:
                self._park(self._pool.blocks[number])
