"""Scheduler of a rollout engine (`--scheduler-cls`): vLLM's own behind a gate, within a KV budget.

Before each step it asks the gate how many tokens may run; while the gate is closed it waits, bounded, for
a bell.  Scheduling itself stays vLLM's: a cap is set around its `schedule`, and nothing is ever skipped (an
empty step still has to flush finished requests, or asynchronous scheduling breaks).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from rose.core.readings import GateMode, GatePolicy, GateReason, Unknown
from rose.engines.vllm.kv_elastic import ElasticKv
from rose.engines.vllm.replica_board import ReplicaBoard
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.step_gate import StepGate, StepInFlight
from rose.errors import ConfigError, RoseError
from rose.units import NS_PER_MS

KV_BUDGET_CUT = "rose:kv_budget_cut"
"""stop_reason of a request whose blocks a budget cut took."""
OVER_BUDGET = "rose:over_budget"
"""stop_reason of a request that the present budget could never hold."""

_IDLE_STATS_NS = 100 * NS_PER_MS
_GROW_NS = 100 * NS_PER_MS
"""How often a replica looks for more of the memory that it shares."""


class RolloutMixin:
    """Goes before a vLLM scheduler class among the bases.

    The lock orders the core loop's thread and the heartbeat of the replica's board, which applies budgets
    while there is no request, hence no step to do it.
    """

    waiting: Any
    kv_holding_waiting: Any
    running: list[Any]
    requests: dict[str, Any]
    finished_req_ids: set[str]
    kv_cache_manager: Any
    max_num_scheduled_tokens: int
    max_model_len: int
    connector: Any
    pause_state: PauseState
    vllm_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = PluginSettings.require("rollout")
        self._rose_lock = threading.RLock()
        self._rose_gate = StepGate(settings, step_tokens_max=self.max_num_scheduled_tokens)
        if (profile := settings.profile(self.vllm_config)) is not None:
            self._rose_gate.start_from(profile)
        self._rose_elastic = ElasticKv(self, settings)
        self._rose_kv = self._rose_elastic.budget
        self._rose_ended: list[tuple[Any, str]] = []
        self._rose_steps: deque[StepInFlight] = deque()
        self._rose_rotation = 0
        self._rose_stats_ns = 0
        self._rose_slept_ns = 0
        self._rose_version = "0"
        self._rose_budget_of: GatePolicy | None = None
        if self.connector is not None:
            raise ConfigError("a rollout engine cannot have a KV connector", "leave --kv-transfer-config out")
        if not self._rose_kv.fits(self.max_model_len, self._rose_kv.total_blocks):
            raise ConfigError(
                f"{self._rose_kv.total_blocks} KV blocks cannot hold {self.max_model_len} tokens",
                "raise kv_blocks or lower context_tokens_max of the replica",
            )
        self._rose_elastic.begin(self._rose_kv.total_blocks)
        self._rose_tried_ns = time.monotonic_ns()
        self._rose_board = ReplicaBoard(settings, self._rose_heartbeat)

    # ---- each step --------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """As vLLM, with at most the tokens that the gate admits."""
        board = self._rose_board
        entered_ns, entered_cpu_ns = time.monotonic_ns(), board.cpu_clock()
        tokens_max = self._rose_admitted(entered_ns)
        with self._rose_lock:
            limit = self.max_num_scheduled_tokens
            self.max_num_scheduled_tokens = min(limit, tokens_max)
            if 0 < tokens_max < len(self.running):
                self._rose_rotate(tokens_max)
            asked_ns, asked_cpu_ns = time.monotonic_ns(), board.cpu_clock()
            try:
                output = super().schedule(throttle_prefills)  # type: ignore[misc]
            finally:
                self.max_num_scheduled_tokens = limit
            scheduled_ns, scheduled_cpu_ns = time.monotonic_ns(), board.cpu_clock()
            if output.preempted_req_ids:
                self._rose_end_those_too_large(output.preempted_req_ids)
            board.scheduled(output.total_num_scheduled_tokens, scheduled_ns)
            if output.total_num_scheduled_tokens:
                step = self._rose_gate.step_began(output.total_num_scheduled_tokens, scheduled_ns)
                self._rose_steps.append(step)
            elif self._rose_slept_ns:
                self._rose_publish()  # vLLM may not ask for a bitmask of an empty step
        if not self._rose_slept_ns:  # who waited for the gate has no hurry, and woke up with cold caches
            spent_ns = time.monotonic_ns() - scheduled_ns + asked_ns - entered_ns
            board.overhead(spent_ns, board.cpu_clock() - scheduled_cpu_ns + asked_cpu_ns - entered_cpu_ns)
        return output

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """As vLLM, which asks for it once the step has been given to the device: time to tell and learn."""
        bitmask = super().get_grammar_bitmask(scheduler_output)  # type: ignore[misc]
        with self._rose_lock:
            self._rose_board.close_account()
            self._rose_gate.settle(time.monotonic_ns())
            self._rose_publish()
        return bitmask

    def _rose_admitted(self, now_ns: int) -> int:
        """Tokens that the next step may take; sleeps, bounded, while that is none and nothing else to do."""
        self._rose_slept_ns = 0
        with self._rose_lock:
            admission = self._rose_gate.decide(now_ns, self._rose_steps)
            self._rose_apply_budget()
            idle = not (self._rose_ended or self.finished_req_ids) and self.pause_state == PauseState.UNPAUSED
        if not admission.open and idle:
            admission, self._rose_slept_ns = self._rose_gate.wait_until_open(admission, self._rose_steps)
            with self._rose_lock:
                self._rose_apply_budget()
        return admission.tokens

    def _rose_rotate(self, tokens_max: int) -> None:
        """Let others than the head of the list have the few tokens there are: vLLM serves in list order."""
        self._rose_rotation %= len(self.running)
        self.running = self.running[self._rose_rotation :] + self.running[: self._rose_rotation]
        self._rose_rotation = tokens_max

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM; also tells clients of the requests that a budget ended."""
        entered_ns = time.monotonic_ns()
        with self._rose_lock:
            outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
            updated_ns, updated_cpu_ns = time.monotonic_ns(), self._rose_board.cpu_clock()
            if scheduler_output.total_num_scheduled_tokens and self._rose_steps:
                step = self._rose_steps.popleft()
                self._rose_elastic.memory.step_ended()
                duration_ns = self._rose_board.step_ended(step.started_ns, entered_ns, step.tokens)
                self._rose_gate.step_ended(step, duration_ns)
            if self._rose_ended:
                self._rose_tell_ended(outputs)
            if not self.running:  # no step follows at once, after which to tell
                self._rose_gate.settle(updated_ns)
                self._rose_publish()
        cpu_ns = self._rose_board.cpu_clock() - updated_cpu_ns
        self._rose_board.overhead(time.monotonic_ns() - updated_ns, cpu_ns)
        return outputs

    def _rose_tell_ended(self, outputs: dict[int, Any]) -> None:
        ended, self._rose_ended = self._rose_ended, []
        for request, reason in ended:
            client = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            client.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ABORT,
                    stop_reason=reason,
                    events=request.take_events(),
                )
            )

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM, but at most ten times a second while nothing runs (it would report every empty step)."""
        now_ns = time.monotonic_ns()
        if (
            not self._rose_steps
            and not self._rose_board.stepped
            and now_ns - self._rose_stats_ns < _IDLE_STATS_NS
        ):
            return None
        self._rose_stats_ns = now_ns
        return super().make_stats(*args, **kwargs)  # type: ignore[misc]

    # ---- requests ---------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """As vLLM; keys the prefix by weight version, and ends a request that the budget cannot hold."""
        with self._rose_lock:
            new = request.request_id not in self.requests
            if new:
                self._rose_salt(request, f"v{self._rose_version}")
            super().add_request(request)  # type: ignore[misc]
            if new and self._rose_inactive:
                self._rose_end([request.request_id], OVER_BUDGET)
            elif new and not self._rose_kv.fits(request.num_prompt_tokens + 1):
                self._rose_gate.decide(time.monotonic_ns())  # the budget may have grown since the last step
                self._rose_apply_budget()
                self._rose_end_those_too_large([request.request_id])

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        """As vLLM."""
        with self._rose_lock:
            return super().finish_requests(request_ids, finished_status)  # type: ignore[misc]

    def _rose_end(self, request_ids: Iterable[str], reason: str) -> None:
        """End requests on our own account; their clients hear of it with the next output."""
        ended = self.finish_requests(set(request_ids), RequestStatus.FINISHED_ABORTED)
        self._rose_ended += [(request, reason) for request in ended]
        if reason == KV_BUDGET_CUT:
            self._rose_board.aborted += len(ended)
        else:
            self._rose_board.rejected += len(ended)

    @staticmethod
    def _rose_salt(request: Any, salt: str) -> None:
        """Re-root the hashes of the request's blocks, so that they match only blocks of the same salt."""
        client_salt = (request.cache_salt or "").partition("|rose:")[0]
        request.cache_salt = f"{client_salt}|rose:{salt}"
        request.block_hashes = []
        request.update_block_hashes()

    # ---- weights ----------------------------------------------------------------------------------

    def rose_set_weight_version(self, version: str) -> None:
        """New weights are in place (generation is paused): KV of the old ones must not be reused.

        A request that already has KV of the old version goes on with a mix, which nobody else may match.
        """
        if not version.isdecimal():
            raise RoseError(f"weight version {version!r} is not a number")
        with self._rose_lock:
            if version == self._rose_version:
                return
            self._rose_version = version
            for request in self.requests.values():
                mixed = f"-mixed-{request.request_id}" if request.num_computed_tokens else ""
                self._rose_salt(request, f"v{version}{mixed}")
            self._rose_publish()

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM, with the parked blocks given back for its check that all are free."""
        with self._rose_lock, self._rose_kv.all_unparked():
            return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]

    # ---- KV budget and board ------------------------------------------------------------------------

    def _rose_apply_budget(self) -> None:
        """Bring the budget to what the accepted policy says; ends the requests that stand in the way."""
        policy = self._rose_gate.policy
        if policy is self._rose_budget_of and self._rose_board.budget_complete:
            return
        if isinstance(policy, Unknown):
            return
        if self._rose_inactive and self.requests:
            self._rose_end(list(self.requests), KV_BUDGET_CUT)
        wanted = min(policy.kv_budget_blocks or self._rose_kv.total_blocks, self._rose_kv.total_blocks)
        if wanted == self._rose_kv.budget_blocks and self._rose_board.budget_complete:
            self._rose_budget_of = policy
            return
        if wanted > self._rose_kv.budget_blocks:
            if (wanted := self._rose_affordable(wanted)) == self._rose_kv.budget_blocks:
                return
        elif wanted < self._rose_kv.budget_blocks:
            self._rose_end(self._rose_kv.victims(wanted), KV_BUDGET_CUT)
        self._rose_board.budget_complete = self._rose_elastic.resize(wanted, len(self._rose_steps))
        self._rose_end_those_too_large(list(self.requests))

    @property
    def _rose_inactive(self) -> bool:
        """Whether the replica has given its memory back, or is about to: then it has no requests."""
        policy = self._rose_gate.policy
        if isinstance(policy, Unknown) or policy.mode != GateMode.CLOSED:
            return False
        return policy.closed_reason == GateReason.INACTIVE

    def _rose_affordable(self, wanted: int) -> int:
        """How far the budget can grow: where memory is shared there may be less, now."""
        now_ns = time.monotonic_ns()
        if self._rose_elastic.pages is not None:
            if now_ns - self._rose_tried_ns < _GROW_NS:
                return self._rose_kv.budget_blocks
            self._rose_tried_ns = now_ns
        return self._rose_elastic.affordable(wanted)

    def _rose_end_those_too_large(self, request_ids: Iterable[str]) -> None:
        """A request that the whole budget cannot hold would preempt itself for ever."""
        present = [self.requests[each] for each in request_ids if each in self.requests]
        too_large = [each.request_id for each in present if not self._rose_kv.fits(each.num_tokens + 1)]
        if too_large:
            self._rose_end(too_large, OVER_BUDGET)

    def _rose_publish(self) -> None:
        self._rose_board.publish(
            self._rose_gate,
            self._rose_elastic,
            running=len(self.running),
            waiting=len(self.waiting) + len(self.kv_holding_waiting),
            weight_version=int(self._rose_version),
        )

    def _rose_heartbeat(self) -> None:
        """Called by the board's thread: nothing may have been scheduled for a while."""
        with self._rose_lock:
            self._rose_gate.decide(time.monotonic_ns())
            if not self.requests:
                self._rose_apply_budget()
            self._rose_publish()


class RolloutScheduler(RolloutMixin, Scheduler):
    """For engines with one step in flight (CPU)."""


class RolloutAsyncScheduler(RolloutMixin, AsyncScheduler):
    """For engines that schedule ahead (GPU)."""
