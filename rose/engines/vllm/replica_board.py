"""The board of a rollout engine: what rosed sees of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rose.boards import BoardWriter
from rose.core.latency import WindowQuantile
from rose.core.readings import HEARTBEAT_MS, LimitStatus, ReplicaReading, Unknown
from rose.engines.vllm.kv_elastic import ElasticKv
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.step_gate import StepGate
from rose.engines.vllm.step_log import StepLog
from rose.units import ms_to_ns

_OVERHEAD_WINDOW = 512
_CPU_CLOCK_EVERY = 8
"""The clock of a thread's processor time costs a system call: one step in so many is measured by it."""


def _no_clock() -> int:
    return 0


class ReplicaBoard:
    """Counts steps and writes the board; a thread calls `heartbeat` after a while without a step."""

    def __init__(self, settings: PluginSettings, heartbeat: Callable[[], None]) -> None:
        boards = settings.boards
        boards.run_dir.mkdir(parents=True, exist_ok=True)
        self._writer = BoardWriter(boards.replica(settings.name), ReplicaReading)
        self._log = StepLog(settings, settings.name)
        self._overhead = WindowQuantile(_OVERHEAD_WINDOW, 0.99)
        self._overhead_cpu = WindowQuantile(_OVERHEAD_WINDOW, 0.99)
        self._overhead_ns = self._overhead_cpu_ns = self._overheads = 0
        self.cpu_clock = time.thread_time_ns
        """For the present step: processor time of this thread, or always 0."""
        self._published_ns = 0
        self._step_start_ns = self._step_end_ns = self._busy_ns = 0
        self._steps = self._empty_steps = self._tokens = 0
        self.stepped = False
        """Whether the latest step had tokens."""
        self.aborted = 0
        self.rejected = 0
        self.budget_complete = True
        """Whether all blocks above the budget are parked."""
        self._shares_device = bool(settings.serving_names)
        self._in_flight = 0
        self._period_ns = ms_to_ns(HEARTBEAT_MS)
        self._heartbeat = heartbeat
        threading.Thread(target=self._beat, name="rose-replica", daemon=True).start()

    def scheduled(self, tokens: int, now_ns: int) -> None:
        """A step was scheduled, perhaps an empty one."""
        self.stepped = tokens > 0
        if tokens:
            self._steps += 1
            self._tokens += tokens
            self._step_start_ns = now_ns
            self._in_flight += 1
            if self._shares_device:
                self._writer.activity.begin(now_ns)
        else:
            self._empty_steps += 1

    def step_ended(self, started_ns: int, now_ns: int, tokens: int) -> int:
        """The oldest step in flight is done; returns how long it had the device."""
        began_ns = max(started_ns, self._step_end_ns)
        duration_ns = now_ns - began_ns
        self._log.ended(began_ns, now_ns, tokens)
        self._busy_ns += duration_ns
        self._step_end_ns = now_ns
        self._in_flight -= 1
        if self._shares_device:
            self._writer.activity.end(now_ns, more=self._in_flight > 0)
        return duration_ns

    def overhead(self, spent_ns: int, cpu_ns: int) -> None:
        """What a part of the plugin cost since the account was closed."""
        self._overhead_ns += spent_ns
        self._overhead_cpu_ns += cpu_ns

    def close_account(self) -> None:
        """Once a step: what was spent since the last time is what it cost."""
        if self._overhead_ns:
            self._overhead.add(self._overhead_ns)
        if self._overhead_cpu_ns:
            self._overhead_cpu.add(self._overhead_cpu_ns)
        self._overhead_ns = self._overhead_cpu_ns = 0
        self._overheads += 1
        self.cpu_clock = _no_clock if self._overheads % _CPU_CLOCK_EVERY else time.thread_time_ns

    def publish(
        self,
        gate: StepGate,
        elastic: ElasticKv,
        *,
        running: int,
        waiting: int,
        weight_version: int,
    ) -> None:
        """Write the board.  A budget is applied when the memory beyond it has been given back."""
        self._published_ns = time.monotonic_ns()
        elastic.look(self._published_ns)
        kv, memory = elastic.budget, elastic.memory
        policy, admission = gate.policy, gate.last
        limit_status = gate.limit_status
        if limit_status == LimitStatus.APPLIED and not (self.budget_complete and memory.settled):
            limit_status = LimitStatus.DEFERRED
        self._writer.publish(
            ReplicaReading(
                stamp_ns=self._published_ns,
                policy_revision=0 if isinstance(policy, Unknown) else policy.revision,
                limit_status=limit_status,
                gate_open=int(admission is not None and admission.open),
                gate_reason=admission.reason if admission is not None else 0,
                token_cap=admission.tokens if admission is not None else 0,
                kv_total_blocks=kv.total_blocks,
                kv_budget_blocks=kv.budget_blocks,
                kv_used_blocks=kv.used_blocks,
                running=running,
                waiting=waiting,
                steps=self._steps,
                empty_steps=self._empty_steps,
                tokens=self._tokens,
                aborted_requests=self.aborted,
                rejected_requests=self.rejected,
                gate_transitions=gate.transitions,
                open_ns=gate.open_ns,
                closed_ns=gate.closed_ns,
                step_start_ns=self._step_start_ns,
                step_end_ns=self._step_end_ns,
                busy_ns=self._busy_ns,
                overhead_p50_ns=self._overhead.at(0.5),
                overhead_p99_ns=self._overhead.value(),
                weight_version=weight_version,
                drift_permille=gate.drift_permille,
                margin_ns=gate.margin_ns,
                journal_dropped=gate.journal_dropped,
                kv_resident_bytes=memory.resident_bytes,
                overhead_cpu_p50_ns=self._overhead_cpu.at(0.5),
                overhead_cpu_p99_ns=self._overhead_cpu.value(),
            )
        )

    def _beat(self) -> None:
        while True:
            time.sleep(self._period_ns / 1e9)
            if time.monotonic_ns() - self._published_ns >= self._period_ns:
                self._heartbeat()
