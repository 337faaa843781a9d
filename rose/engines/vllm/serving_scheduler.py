"""Scheduler of a serving engine (`--scheduler-cls`): vLLM's own, which also publishes how much slack is left.

It decides nothing: the order and size of steps are vLLM's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.slack_board import RankShape, SlackBoard
from rose.units import NS_PER_S

_ARRIVAL_AGE_NS_MAX = 60 * NS_PER_S
"""Arrival times are wall clock; one that looks older than this means that the clock was set."""


class ServingMixin:
    """Goes before a vLLM scheduler class among the bases."""

    waiting: Any
    kv_holding_waiting: Any
    running: Any
    requests: dict[str, Any]
    finished_req_ids: set[str]
    kv_cache_manager: Any
    max_num_scheduled_tokens: int
    vllm_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = PluginSettings.require("serving")
        kv_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks - 1
        shape = RankShape.of(self.vllm_config)
        self._rose_board = SlackBoard(settings, kv_blocks, self.max_num_scheduled_tokens, shape)
        if (profile := settings.profile(self.vllm_config)) is not None:
            self._rose_board.start_from(profile)
        self._rose_publish(time.monotonic_ns())

    def _rose_publish(self, since_ns: int) -> None:
        """Write the board, and count what we cost since `since_ns`."""
        self._rose_board.publish(
            len(self.waiting) + len(self.kv_holding_waiting),
            len(self.running),
            self.kv_cache_manager.block_pool.get_num_free_blocks(),
        )
        self._rose_board.overhead_ns += time.monotonic_ns() - since_ns

    def add_request(self, request: Any) -> None:
        """As vLLM; the request's TTFT budget runs from its arrival at the API server."""
        if request.request_id not in self.requests:
            now_ns = time.monotonic_ns()
            age_ns = time.time_ns() - round(request.arrival_time * NS_PER_S)
            if not 0 <= age_ns <= _ARRIVAL_AGE_NS_MAX:
                age_ns = 0
            self._rose_board.arrivals += 1
            self._rose_board.tracker.arrived(request.request_id, now_ns - age_ns, request.num_prompt_tokens)
        super().add_request(request)  # type: ignore[misc]
        self._rose_publish(time.monotonic_ns())

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """As vLLM."""
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        board = self._rose_board
        now_ns = time.monotonic_ns()
        board.preemptions += len(output.preempted_req_ids or ())
        if output.total_num_scheduled_tokens:
            for new in output.scheduled_new_reqs:
                board.tracker.scheduled(new.req_id, now_ns, new.num_computed_tokens)
            tokens = output.num_scheduled_tokens
            prompt_tokens = sum(tokens.get(each, 0) for each in board.tracker.prefilling)
            decodes = output.total_num_scheduled_tokens - prompt_tokens
            if output.scheduled_cached_reqs.resumed_req_ids:
                prompt_tokens = decodes = 0  # computes old tokens anew: neither a prefill nor a decode step
            board.step_began(now_ns, prompt_tokens, decodes)
        self._rose_publish(now_ns)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        board = self._rose_board
        now_ns = time.monotonic_ns()
        if scheduler_output.total_num_scheduled_tokens:
            board.step_ended(now_ns)
            tokens = scheduler_output.num_scheduled_tokens
            for each in board.tracker.prefilling:
                board.tracker.prefilled(each, tokens.get(each, 0))
        if self._rose_all_got_one(scheduler_output, outputs):
            board.tracker.round_produced(now_ns)
        else:
            for client_outputs in outputs.values():
                for output in client_outputs.outputs:
                    board.tracker.produced(output.request_id, now_ns, len(output.new_token_ids))
        for request_id in self.finished_req_ids:
            board.tracker.finished(request_id)
        self._rose_publish(now_ns)
        return outputs

    def _rose_all_got_one(self, scheduler_output: Any, outputs: dict[int, Any]) -> bool:
        """Whether every decoding request, and no other, had one token scheduled and has one output."""
        decoding = self._rose_board.tracker.decoding
        answered = sum(len(client_outputs.outputs) for client_outputs in outputs.values())
        scheduled = len(scheduler_output.num_scheduled_tokens)
        return (
            scheduler_output.total_num_scheduled_tokens == scheduled == answered == decoding
            and not self._rose_board.tracker.awaiting
        )

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        """As vLLM."""
        finished = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        now_ns = time.monotonic_ns()
        for request in finished:
            self._rose_board.tracker.finished(request.request_id)
        self._rose_publish(now_ns)
        return finished


class ServingScheduler(ServingMixin, Scheduler):
    """For engines with one step in flight (CPU)."""


class ServingAsyncScheduler(ServingMixin, AsyncScheduler):
    """For engines that schedule ahead (GPU)."""
