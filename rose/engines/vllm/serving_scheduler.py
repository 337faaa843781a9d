"""Scheduler of a serving engine (`--scheduler-cls`): vLLM's own, which also publishes how much slack is left.

It decides nothing: the order and size of steps are vLLM's.  Nor does it hold them up: what a step did is only
noted while the device waits, and worked out and published when the next step has been given to the device.
Until then the board shows what was before the tokens came, which is never later than what it should show.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from rose.engines.vllm.elastic_serving import ElasticServingMixin
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.slack_board import RankShape, SlackBoard
from rose.engines.vllm.slo_class import budgets_of
from rose.units import NS_PER_S

_ARRIVAL_AGE_NS_MAX = 60 * NS_PER_S
"""Arrival times are wall clock; one that looks older than this means that the clock was set."""


class _Begun(NamedTuple):
    """A step was scheduled."""

    at_ns: int
    neighbours_ns: int
    output: Any


class _Ended(NamedTuple):
    """A step gave its tokens."""

    at_ns: int
    neighbours_ns: int
    scheduled: Any
    outputs: dict[int, Any]
    finished: set[str]
    """Grows while the engine finishes requests, until the next step is scheduled; then there is a new set."""


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
        self._rose_slo = settings.slo_table
        self._rose_board = SlackBoard(settings, kv_blocks, self.max_num_scheduled_tokens, shape)
        self._rose_unsettled: list[_Begun | _Ended] = []
        if (profile := settings.profile(self.vllm_config)) is not None:
            self._rose_board.start_from(profile)
        self._rose_settle()

    # ---- steps ------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """As vLLM."""
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        board = self._rose_board
        now_ns = time.monotonic_ns()
        self._rose_unsettled.append(_Begun(now_ns, board.neighbours_ns(now_ns), output))
        if not output.total_num_scheduled_tokens:
            self._rose_settle()  # no work for the device, so nothing to hide behind
        board.overhead_ns += time.monotonic_ns() - now_ns
        return output

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """As vLLM, which asks for it once the step has been given to the device: time to write the board."""
        bitmask = super().get_grammar_bitmask(scheduler_output)  # type: ignore[misc]
        started_ns = time.monotonic_ns()
        self._rose_settle()
        self._rose_board.deferred_ns += time.monotonic_ns() - started_ns
        return bitmask

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM."""
        if self._rose_unsettled:  # vLLM did not ask for the bitmask of the latest step yet
            self._rose_settle()
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        board = self._rose_board
        now_ns = time.monotonic_ns()
        self._rose_unsettled.append(
            _Ended(now_ns, board.neighbours_ns(now_ns), scheduler_output, outputs, self.finished_req_ids)
        )
        if not self.running:
            self._rose_settle()  # no step follows at once, after which to tell
        board.overhead_ns += time.monotonic_ns() - now_ns
        return outputs

    def _rose_settle(self) -> None:
        """Work out what the steps did since the last time, and write the board."""
        unsettled, self._rose_unsettled = self._rose_unsettled, []
        for step in unsettled:
            if isinstance(step, _Begun):
                self._rose_begun(step)
            else:
                self._rose_ended(step)
        self._rose_board.publish(
            len(self.waiting) + len(self.kv_holding_waiting),
            len(self.running),
            self.kv_cache_manager.block_pool.get_num_free_blocks(),
            self.rose_kv_share,  # type: ignore[attr-defined]
        )

    def _rose_begun(self, step: _Begun) -> None:
        output, board = step.output, self._rose_board
        board.preemptions += len(output.preempted_req_ids or ())
        if not output.total_num_scheduled_tokens:
            return
        for new in output.scheduled_new_reqs:
            board.tracker.scheduled(new.req_id, step.at_ns, new.num_computed_tokens)
        tokens = output.num_scheduled_tokens
        prompt_tokens = sum(tokens.get(each, 0) for each in board.tracker.prefilling)
        decodes = output.total_num_scheduled_tokens - prompt_tokens
        if output.scheduled_cached_reqs.resumed_req_ids:
            prompt_tokens = decodes = 0  # computes old tokens anew: neither a prefill nor a decode step
        board.step_began(step.at_ns, step.neighbours_ns, prompt_tokens, decodes)

    def _rose_ended(self, step: _Ended) -> None:
        board = self._rose_board
        tracker = board.tracker
        if step.scheduled.total_num_scheduled_tokens:
            board.step_ended(step.at_ns, step.neighbours_ns)
            tokens = step.scheduled.num_scheduled_tokens
            for each in tracker.prefilling:
                tracker.prefilled(each, tokens.get(each, 0))
        if self._rose_all_got_one(step):
            tracker.round_produced(step.at_ns)
        else:
            for client_outputs in step.outputs.values():
                for output in client_outputs.outputs:
                    tracker.produced(output.request_id, step.at_ns, len(output.new_token_ids))
        for request_id in step.finished:
            board.finished(request_id)

    def _rose_all_got_one(self, step: _Ended) -> bool:
        """Whether every decoding request, and no other, had one token scheduled and has one output."""
        tracker = self._rose_board.tracker
        answered = sum(len(client_outputs.outputs) for client_outputs in step.outputs.values())
        scheduled = len(step.scheduled.num_scheduled_tokens)
        return (
            step.scheduled.total_num_scheduled_tokens == scheduled == answered == tracker.decoding
            and not tracker.awaiting
        )

    # ---- requests ---------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """As vLLM; the request's TTFT budget runs from its arrival at the API server."""
        self._rose_settle()
        if request.request_id not in self.requests:
            now_ns = time.monotonic_ns()
            age_ns = time.time_ns() - round(request.arrival_time * NS_PER_S)
            if not 0 <= age_ns <= _ARRIVAL_AGE_NS_MAX:
                age_ns = 0
            board = self._rose_board
            board.arrivals += 1
            budgets = budgets_of(request, self._rose_slo)
            board.tracker.arrived(request.request_id, now_ns - age_ns, request.num_prompt_tokens, budgets)
        super().add_request(request)  # type: ignore[misc]
        self._rose_settle()

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        """As vLLM."""
        self._rose_settle()
        finished = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for request in finished:
            self._rose_board.finished(request.request_id)
        self._rose_settle()
        return finished


class ServingScheduler(ServingMixin, ElasticServingMixin, Scheduler):
    """For engines with one step in flight (CPU)."""


class ServingAsyncScheduler(ServingMixin, ElasticServingMixin, AsyncScheduler):
    """For engines that schedule ahead (GPU)."""
