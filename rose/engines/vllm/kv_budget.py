"""The KV budget of a rollout engine: blocks above it are parked, so that nobody can use them.

Blocks are numbered; 0 is vLLM's null block, so a budget of n leaves the blocks 1..n in use.  A cut takes the
highest numbers, because physical memory (an arena under the cache) is given back from the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

_WINDOW = 64
"""How many of the next blocks to evict compete for being taken by their low number."""


class LowIdFreeQueue(FreeKVCacheBlockQueue):
    """vLLM's free list, which takes low-numbered blocks where it makes little difference.

    Least recently used order scatters a request over all numbers, and a cut would then hit every request.
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
    """How many blocks of one engine may be used, and the blocks kept out of its pool."""

    def __init__(self, scheduler: Scheduler) -> None:
        manager = scheduler.kv_cache_manager
        self._pool = manager.block_pool
        self._managers = manager.coordinator.single_type_managers
        self._block_tokens: int = scheduler.block_size
        self._parked: dict[int, KVCacheBlock] = {}
        self.total_blocks: int = self._pool.num_gpu_blocks - 1
        self.budget_blocks = self.total_blocks
        # The list is linked through the blocks themselves: only the order of taking changes.
        self._pool.free_block_queue.__class__ = LowIdFreeQueue

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        free: int = self._pool.get_num_free_blocks()
        return self.total_blocks - free - len(self._parked)

    def fits(self, tokens: int, budget_blocks: int | None = None) -> bool:
        """Whether one request of that many tokens fits the budget (the present one by default) on its own."""
        budget = self.budget_blocks if budget_blocks is None else budget_blocks
        return -(-tokens // self._block_tokens) <= budget

    def holders_above(self, budget_blocks: int) -> set[str]:
        """Ids of the requests that hold a block above a budget."""
        return {
            request_id
            for manager in self._managers
            for request_id, blocks in manager.req_to_blocks.items()
            if any(block.block_id > budget_blocks and not block.is_null for block in blocks)
        }

    def set(self, budget_blocks: int) -> bool:
        """Park what lies above the budget and give back what lies below; idempotent.

        False while some block above is still held: its holders must be ended first, then set again.
        """
        assert 0 < budget_blocks <= self.total_blocks
        self.budget_blocks = budget_blocks
        back = [self._parked.pop(number) for number in sorted(self._parked) if number <= budget_blocks]
        # Freeing puts unhashed blocks at the front of the list, low numbers first.
        self._pool.free_blocks(back)
        complete = True
        for number in range(budget_blocks + 1, self.total_blocks + 1):
            if number not in self._parked and not self._park(self._pool.blocks[number]):
                complete = False
        return complete

    def _park(self, block: Any) -> bool:
        if block.ref_cnt != 0:
            return False
        self._pool.free_block_queue.remove(block)
        self._pool._maybe_evict_cached_block(block)
        block.ref_cnt = 1
        self._parked[block.block_id] = block
        return True

    def unpark_all(self) -> int:
        """Give every block back for a moment (vLLM resets its prefix cache only if all are free).

        Returns the budget to `set` again.
        """
        budget_blocks = self.budget_blocks
        self.set(self.total_blocks)
        return budget_blocks
