"""The board of a serving engine: what rollout engines and rosed see of it.

No vLLM in here: the scheduler tells it what happened.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

from rose.boards import BoardWriter
from rose.core.readings import HEARTBEAT_MS, NEVER, ServedRequest, SlackReading
from rose.core.slo import SlackTracker
from rose.engines.vllm.neighbours import Neighbours
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.step_gate import GateBells
from rose.engines.vllm.step_log import StepLog
from rose.profile import Profile
from rose.rings import RingWriter

_LEARN_DECODES_EVERY = 8
"""One decode step in so many calibrates: neighbouring ones are alike, and each costs some microseconds."""
_CO_RUNNING_SHARE = 16
"""A step beside which rollout ran for more than one part in so many did not have the device alone."""


class _Step(NamedTuple):
    """A step in flight."""

    started_ns: int
    prompt_tokens: int
    decodes: int
    """0 if the step is of a kind the models know nothing of (a preempted request starts anew)."""
    neighbours_ns: int
    """Their time on the device when it began."""


class RankShape(NamedTuple):
    """Which part of a serving deployment one scheduler is."""

    rank: int = 0
    """Among the data-parallel ranks."""
    prefills: bool = True
    """False for a decode rank of a disaggregated engine: its requests come with their first token."""
    decodes: bool = True
    """False for a prefill rank: its requests leave with their first token."""

    @classmethod
    def of(cls, vllm_config: Any) -> RankShape:
        """As vLLM's configuration says."""
        rank = vllm_config.parallel_config.data_parallel_index
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.is_kv_producer == transfer.is_kv_consumer:
            return cls(rank)
        return cls(rank, prefills=transfer.is_kv_producer, decodes=transfer.is_kv_consumer)

    def board_name(self, name: str) -> str:
        """Every rank has a board of its own; the first one's is that of the engine."""
        return f"{name}-dp{self.rank}" if self.rank else name


WHOLE_ENGINE = RankShape()


class KvShare(NamedTuple):
    """What a serving engine lends of its KV memory (`elastic_serving`)."""

    parked_blocks: int = 0
    shortages: int = 0
    resident_bytes: int = -1


NOTHING_LENT = KvShare()


class SlackBoard:
    """Keeps the slack of all requests, calibrates the latency models, and writes the board."""

    def __init__(
        self,
        settings: PluginSettings,
        kv_total_blocks: int,
        step_tokens_max: int,
        shape: RankShape = WHOLE_ENGINE,
    ) -> None:
        boards = settings.boards
        boards.run_dir.mkdir(parents=True, exist_ok=True)
        self._shape = shape
        name = shape.board_name(settings.name)
        self._writer = BoardWriter(boards.slack(name), SlackReading)
        self._log = StepLog(settings, name)
        self._served = RingWriter(boards.served(name), ServedRequest)
        self._served_number = 0
        self._bells = GateBells(boards.run_dir)
        self._neighbours = Neighbours(boards.run_dir)
        self._kv_total_blocks = kv_total_blocks
        self._lock = threading.Lock()
        self._last: SlackReading | None = None
        slo = settings.slo_table
        self._ttft_budget_ns = slo.tightest_ttft_ns
        self.tracker = SlackTracker(slo.default, step_tokens_max, overlaps=settings.overlaps)
        self._steps: deque[_Step] = deque()
        self.overhead_ns = 0
        """What the plugin cost since the latest step began, while the device waited."""
        self.deferred_ns = 0
        """What it cost besides, while the device worked."""
        self.step_start_ns = self.step_end_ns = self.steps = self.busy_ns = 0
        self.arrivals = self.preemptions = self._step_overhead_ns = self._step_deferred_ns = 0
        threading.Thread(target=self._beat, name="rose-slack", daemon=True).start()

    def start_from(self, profile: Profile) -> None:
        """Let the latency models begin with what was measured beforehand."""
        for step in profile.prefill:
            self.tracker.observe_step(step.load, 0, step.duration_ns)
        for step in profile.decode:
            self.tracker.observe_step(0, step.load, step.duration_ns)

    def neighbours_ns(self, now_ns: int) -> int:
        """Time that rollout engines had work on the device; for `step_began` and `step_ended`."""
        return self._neighbours.busy_ns(now_ns)

    def step_began(self, at_ns: int, neighbours_ns: int, prompt_tokens: int, decodes: int) -> None:
        """A step with tokens was scheduled at `at_ns`."""
        self._steps.append(_Step(at_ns, prompt_tokens, decodes, neighbours_ns))
        self.steps += 1
        self.step_start_ns = at_ns
        self._step_overhead_ns, self.overhead_ns = self.overhead_ns, 0
        self._step_deferred_ns, self.deferred_ns = self.deferred_ns, 0

    def step_ended(self, at_ns: int, neighbours_ns: int) -> None:
        """The oldest step in flight gave its tokens at `at_ns`."""
        if not self._steps:
            return
        step = self._steps.popleft()
        began_ns = max(step.started_ns, self.step_end_ns)
        duration_ns = at_ns - began_ns
        self.busy_ns += duration_ns
        self.step_end_ns = at_ns
        self._log.ended(began_ns, at_ns, step.prompt_tokens + step.decodes)
        if step.prompt_tokens or self.steps % _LEARN_DECODES_EVERY == 0:
            shared = int(_CO_RUNNING_SHARE * (neighbours_ns - step.neighbours_ns) > duration_ns)
            self.tracker.observe_step(step.prompt_tokens, step.decodes, duration_ns, co_running=shared)

    def finished(self, request_id: str) -> None:
        """The request ended, in whatever way: log what it got."""
        if (served := self.tracker.finished(request_id)) is not None:
            self._served_number += 1
            self._served.write(served._replace(number=self._served_number))

    def publish(self, waiting: int, running: int, kv_free_blocks: int, kv: KvShare = NOTHING_LENT) -> None:
        """Write the board; tells rollout engines when serving falls idle, or only decodes go on."""
        tracker = self.tracker
        slack = tracker.slack()
        now_ns = time.monotonic_ns()
        reading = SlackReading(  # by position: keywords cost a microsecond more, twice a step
            now_ns,  # stamp_ns
            waiting,
            running,
            tracker.pending_prefill_tokens if self._shape.prefills else 0,  # pending_prefill_tokens
            self._kv_total_blocks - kv_free_blocks - kv.parked_blocks,  # kv_used_blocks
            self._kv_total_blocks,  # kv_total_blocks
            slack.ttft_deadline_ns if self._shape.prefills else NEVER,  # ttft_deadline_ns
            slack.tpot_deadline_ns if self._shape.decodes else NEVER,  # tpot_deadline_ns
            int(bool(self._steps)),  # in_step
            self.step_start_ns,
            self.step_end_ns,
            self.steps,
            self.busy_ns,
            tracker.prefill_p99_ns(),
            self.arrivals,
            self.preemptions,
            self._step_overhead_ns,  # overhead_ns
            slack.prefill_predicted_ns,
            slack.decode_predicted_ns,
            slack.drift_permille,
            self._ttft_budget_ns,
            self._step_deferred_ns,
            *kv,
        )
        with self._lock:
            last, self._last = self._last, reading
            self._writer.publish(reading)
        if _idle(reading) and not (last is not None and _idle(last)):
            self._bells.ring(now_ns)
        elif last is not None and reading.step_end_ns != last.step_end_ns and not tracker.awaiting:
            self._bells.nudge()  # tokens came: whoever found the slack too small may look again

    def _beat(self) -> None:
        """An idle engine says so again and again: silence means that it hangs or is gone."""
        while True:
            now_ns = time.monotonic_ns()
            self._neighbours.refresh(now_ns)
            self._bells.refresh(now_ns)
            time.sleep(HEARTBEAT_MS / 1e3)
            with self._lock:
                if self._last is not None and _idle(self._last):
                    self._last = self._last._replace(stamp_ns=time.monotonic_ns())
                    self._writer.publish(self._last)


def _idle(reading: SlackReading) -> bool:
    return not (reading.waiting or reading.running or reading.in_step)
