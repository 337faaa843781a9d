"""Scheduler of a serving engine (`--scheduler-cls`): vLLM's own, which also publishes how much slack is left.

It decides nothing: the order and size of steps are vLLM's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from rose.boards import BoardWriter
from rose.core.readings import SlackReading
from rose.core.slo import SlackTracker, SloBudgets
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.step_gate import GateBells
from rose.units import NS_PER_S, ms_to_ns

_ARRIVAL_AGE_NS_MAX = 60 * NS_PER_S
"""Arrival times are wall clock; one that looks older than this means that the clock was set."""


class SlackBoard:
    """Keeps the slack of all requests, and writes the board."""

    def __init__(self, settings: PluginSettings, kv_total_blocks: int) -> None:
        boards = settings.boards
        boards.run_dir.mkdir(parents=True, exist_ok=True)
        self._writer = BoardWriter(boards.slack(settings.name), SlackReading)
        self._bells = GateBells(boards.run_dir)
        self._kv_total_blocks = kv_total_blocks
        self._lock = threading.Lock()
        self._last: SlackReading | None = None
        self.tracker = SlackTracker(
            SloBudgets(ms_to_ns(settings.ttft_slo_ms), ms_to_ns(settings.tpot_slo_ms))
        )
        self.steps_in_flight = 0
        self.step_start_ns = self.step_end_ns = self.steps = self.busy_ns = 0
        self.arrivals = self.preemptions = self._overhead_ns = 0
        beat = threading.Thread(
            target=self._beat, args=(ms_to_ns(settings.board_stale_ms) / 4e9,), name="rose-slack", daemon=True
        )
        beat.start()

    def step_began(self, now_ns: int) -> None:
        """A step with tokens was scheduled."""
        self.steps_in_flight += 1
        self.steps += 1
        self.step_start_ns = now_ns

    def step_ended(self, now_ns: int) -> None:
        """The oldest step in flight gave its tokens."""
        self.steps_in_flight = max(0, self.steps_in_flight - 1)
        self.busy_ns += now_ns - max(self.step_start_ns, self.step_end_ns)
        self.step_end_ns = now_ns

    def publish(self, waiting: int, running: int, kv_free_blocks: int) -> None:
        """Write the board; rings the rollout engines' bells when serving falls idle."""
        now_ns = time.monotonic_ns()
        reading = SlackReading(
            stamp_ns=now_ns,
            waiting=waiting,
            running=running,
            pending_prefill_tokens=self.tracker.pending_prefill_tokens,
            kv_used_blocks=self._kv_total_blocks - kv_free_blocks,
            kv_total_blocks=self._kv_total_blocks,
            ttft_deadline_ns=self.tracker.ttft_deadline_ns(),
            tpot_deadline_ns=self.tracker.tpot_deadline_ns(),
            in_step=min(1, self.steps_in_flight),
            step_start_ns=self.step_start_ns,
            step_end_ns=self.step_end_ns,
            steps=self.steps,
            busy_ns=self.busy_ns,
            prefill_p99_ns=self.tracker.prefill_p99_ns(),
            arrivals=self.arrivals,
            preemptions=self.preemptions,
            overhead_ns=self._overhead_ns,
        )
        with self._lock:
            was_idle = self._last is not None and _idle(self._last)
            self._writer.publish(reading)
            self._last = reading
        if _idle(reading) and not was_idle:
            self._bells.ring(now_ns)
        self._overhead_ns = time.monotonic_ns() - now_ns

    def _beat(self, period_s: float) -> None:
        """An idle engine says so again and again: silence means that it hangs or is gone."""
        while True:
            time.sleep(period_s)
            with self._lock:
                if self._last is not None and _idle(self._last):
                    self._last = self._last._replace(stamp_ns=time.monotonic_ns())
                    self._writer.publish(self._last)


def _idle(reading: SlackReading) -> bool:
    return not (reading.waiting or reading.running or reading.in_step)


class ServingMixin:
    """Goes before a vLLM scheduler class among the bases."""

    waiting: Any
    kv_holding_waiting: Any
    running: Any
    requests: dict[str, Any]
    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = PluginSettings.require("serving")
        self._rose_board = SlackBoard(settings, self.kv_cache_manager.block_pool.num_gpu_blocks - 1)
        self._rose_publish()

    def _rose_publish(self) -> None:
        self._rose_board.publish(
            len(self.waiting) + len(self.kv_holding_waiting),
            len(self.running),
            self.kv_cache_manager.block_pool.get_num_free_blocks(),
        )

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
        self._rose_publish()

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """As vLLM."""
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        board = self._rose_board
        board.preemptions += len(output.preempted_req_ids or ())
        if output.total_num_scheduled_tokens:
            now_ns = time.monotonic_ns()
            for new in output.scheduled_new_reqs:
                board.tracker.scheduled(new.req_id, now_ns)
            board.step_began(now_ns)
        self._rose_publish()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        board = self._rose_board
        now_ns = time.monotonic_ns()
        if scheduler_output.total_num_scheduled_tokens:
            board.step_ended(now_ns)
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                board.tracker.produced(output.request_id, now_ns, len(output.new_token_ids))
                if output.finish_reason is not None:
                    board.tracker.finished(output.request_id)
        self._rose_publish()
        return outputs

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        """As vLLM."""
        finished = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for request in finished:
            self._rose_board.tracker.finished(request.request_id)
        self._rose_publish()
        return finished


class ServingScheduler(ServingMixin, Scheduler):
    """For engines with one step in flight (CPU)."""


class ServingAsyncScheduler(ServingMixin, AsyncScheduler):
    """For engines that schedule ahead (GPU)."""
