"""The KV memory of one engine: the blocks it may use, what lies behind them, the pages they count as."""

from __future__ import annotations

from typing import Any

from rose.core.readings import Unknown
from rose.engines.vllm.kv_budget import KvBudget
from rose.engines.vllm.kv_layout import KvLayout
from rose.engines.vllm.kv_orders import Blocks, KvMemory
from rose.engines.vllm.kv_pages import SharedPages
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.slack_board import RankShape
from rose.errors import ConfigError


class ElasticKv:
    """Budget, memory and pages together.  Not for several threads at once.

    Where `kv_shared_bytes` is set, it begins with as many blocks as pages can be had for.  Raises ConfigError
    if that is not one, or if memory is to be shared and the KV cache is not elastic.
    """

    def __init__(self, scheduler: Any, settings: PluginSettings) -> None:
        engine = RankShape.of(scheduler.vllm_config).board_name(settings.name)
        blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        ranks = scheduler.vllm_config.parallel_config.tensor_parallel_size
        self.memory = KvMemory(settings.boards, engine, blocks, ranks)
        layout = KvLayout.of(scheduler.kv_cache_config)
        holding = self.memory.holding
        group_blocks = 1
        if layout is not None and not isinstance(holding, Unknown):
            group_blocks = layout.group_blocks(holding.page_bytes)
        self.budget = KvBudget(scheduler, group_blocks)
        self.pages: SharedPages | None = None
        if settings.kv_shared_bytes:
            if layout is None or not self.memory.elastic:
                raise ConfigError(
                    "KV memory cannot be shared: it is not elastic here", "set kv_shared_bytes to 0"
                )
            self.pages = SharedPages.join(settings, layout.block_bytes, group_blocks)

    def begin(self, wanted_blocks: int) -> int:
        """Take pages for the first time, nothing being in flight; the budget."""
        if self.pages is not None:
            granted = self.pages.acquire_for(wanted_blocks, self.budget.parked_at, 0)
            if not granted:
                raise ConfigError("no page of the shared KV memory is free", "wait, or raise kv_shared_bytes")
            self.resize(granted, 0)
        return self.budget.budget_blocks

    def affordable(self, wanted_blocks: int) -> int:
        """What of a larger budget there are pages for; they are held from now on.

        Parked blocks whose memory is not gone yet still count.
        """
        budget = self.budget.budget_blocks
        if self.pages is None or wanted_blocks <= budget:
            return wanted_blocks

        def without_memory(blocks: int) -> Blocks:
            gone: Blocks = self.budget.parked_at(blocks) & self.memory.given_back
            return gone

        return self.pages.acquire_for(wanted_blocks, without_memory, budget)

    def resize(self, budget_blocks: int, steps_in_flight: int) -> bool:
        """Set an affordable budget; False while too few blocks are free to park."""
        complete = self.budget.set(budget_blocks)
        self.memory.order(self.budget.parked, steps_in_flight)
        return complete

    def look(self, now_ns: int) -> None:
        """See what the worker did, and release the pages of what it gave back."""
        self.memory.look(now_ns)
        if self.pages is not None:
            self.pages.settle(self.memory.given_back)
