"""A serving engine that lends the KV memory it does not use, and takes it back inside its own `schedule`.

It never waits: what the ledger has free is taken before the step that needs it, and if that is not enough
vLLM preempts as it always does when its cache is full.  Nothing here runs unless `kv_shared_bytes` is set.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rose.core.lending import LendingPolicy, LendingSettings
from rose.engines.vllm.kv_elastic import ElasticKv
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.slack_board import NOTHING_LENT, KvShare
from rose.errors import RoseError

log = logging.getLogger(__name__)

_KEEP_PARTS = 8
"""One part in so many of the cache stays with serving while it is idle, for its prefixes."""
_LOOK_S = 0.05


class Lender:
    """What a serving engine lends.  The caller's lock orders its calls."""

    def __init__(self, scheduler: Any, settings: PluginSettings) -> None:
        self._kv = ElasticKv(scheduler, settings)
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        total = self._kv.budget.total_blocks
        tokens = -(-scheduler.max_num_scheduled_tokens // scheduler.block_size)
        step = tokens + scheduler.max_num_running_reqs  # every request may begin a block
        step = min(total, step + scheduler.kv_cache_manager.watermark_blocks)
        self._policy = LendingPolicy(
            LendingSettings(total_blocks=total, step_blocks=step, keep_blocks=total // _KEEP_PARTS)
        )
        self._steps = 0
        self.shortages = 0
        """Steps before which less memory could be had than they might have needed."""
        self._kv.begin(min(total, self._policy.settings.reserve_blocks))

    @property
    def parked_blocks(self) -> int:
        """Blocks that are lent, or could be."""
        return self._kv.budget.total_blocks - self._kv.budget.budget_blocks

    @property
    def resident_bytes(self) -> int:
        """Physical memory of the KV cache; -1 if not known."""
        return self._kv.memory.resident_bytes

    def before_step(self) -> None:
        """Take back what the next step may need."""
        parked = self.parked_blocks
        if not parked:
            return
        needed = self._waiting_blocks()
        wanted = self._policy.wanted(self._pool.get_num_free_blocks(), parked, needed)
        if not wanted:
            return
        budget = self._kv.budget.budget_blocks
        granted = self._kv.affordable(budget + wanted)
        if granted > budget:
            self._kv.resize(granted, self._steps)
        if granted < budget + wanted:
            self.shortages += 1

    def _waiting_blocks(self) -> int:
        """What the requests need that the next step may admit, whole prompts."""
        tokens = blocks = 0
        for request in self._scheduler.waiting:
            tokens += request.num_tokens
            blocks += -(-request.num_tokens // self._scheduler.block_size)
            if tokens >= self._scheduler.max_num_scheduled_tokens:
                break
        return blocks

    def step_began(self) -> None:
        """A step with tokens was given out."""
        self._steps += 1

    def step_ended(self) -> None:
        """A step with tokens is done."""
        self._steps -= 1
        self._kv.memory.step_ended()

    def look(self, now_ns: int) -> None:
        """Lend what was unused for a while; account for what the worker gave back."""
        self._kv.look(now_ns)
        surplus = self._policy.surplus(self._pool.get_num_free_blocks(), now_ns)
        if surplus:
            self._kv.resize(self._kv.budget.budget_blocks - surplus, self._steps)

    def all_unparked(self) -> AbstractContextManager[None]:
        """See KvBudget."""
        return self._kv.budget.all_unparked()


class ElasticServingMixin:
    """Goes between `ServingMixin` and a vLLM scheduler class among the bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rose_kv_lock = threading.RLock()
        self._rose_lender: Lender | None = None
        settings = PluginSettings.require("serving")
        if not settings.kv_shared_bytes:
            return
        try:
            self._rose_lender = Lender(self, settings)
        except RoseError as error:  # serving goes on, whatever it is that cannot be shared
            log.error("KV memory is not shared: %s", error)
            return
        threading.Thread(target=self._rose_look, name="rose-lender", daemon=True).start()

    @property
    def rose_kv_share(self) -> KvShare:
        """What of its memory the engine lends, for its board."""
        lender = self._rose_lender
        if lender is None:
            return NOTHING_LENT
        return KvShare(lender.parked_blocks, lender.shortages, lender.resident_bytes)

    def _rose_look(self) -> None:
        assert self._rose_lender is not None
        while True:
            time.sleep(_LOOK_S)
            with self._rose_kv_lock:
                self._rose_lender.look(time.monotonic_ns())

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """As vLLM, with memory for whatever it schedules as far as there is any."""
        if self._rose_lender is None:
            return super().schedule(throttle_prefills)  # type: ignore[misc]
        with self._rose_kv_lock:
            self._rose_lender.before_step()
            output = super().schedule(throttle_prefills)  # type: ignore[misc]
            if output.total_num_scheduled_tokens:
                self._rose_lender.step_began()
            return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM."""
        if self._rose_lender is None:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        with self._rose_kv_lock:
            outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
            if scheduler_output.total_num_scheduled_tokens:
                self._rose_lender.step_ended()
            return outputs

    def add_request(self, request: Any) -> None:
        """As vLLM."""
        with self._rose_kv_lock:
            super().add_request(request)  # type: ignore[misc]

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        """As vLLM."""
        with self._rose_kv_lock:
            return super().finish_requests(request_ids, finished_status)  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM, with the parked blocks given back for its check that all are free."""
        unparked = self._rose_lender.all_unparked() if self._rose_lender else nullcontext()
        with self._rose_kv_lock, unparked:
            return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM; a block that is lent is not in use."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None and self._rose_lender is not None:
            pool = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
            free = pool.get_num_free_blocks() + self._rose_lender.parked_blocks
            stats.kv_cache_usage = 1.0 - free / (pool.num_gpu_blocks - 1)
        return stats
