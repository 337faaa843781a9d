"""What the machines observe: shared-memory records, and `Unknown` for what could not be observed.

Unknown is not idle.  A reading that is missing, stale, torn or contradictory is `Unknown(reason)`,
never zero; admission treats it as no headroom.

The records live on shared-memory boards (`rose.boards`), one writer each.  They are
NamedTuples of plain ints (64-bit signed words), so that publishing one is a single pack.
Instants are CLOCK_MONOTONIC nanoseconds; `NEVER` stands for "no such deadline".
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import msgspec

NEVER = 1 << 62
"""A deadline that does not exist (no request waits for it)."""


HEARTBEAT_MS = 100
"""An idle engine says so on its board this often."""
BOARD_STALE_MS_MIN = 3 * HEARTBEAT_MS
"""A board may be this old before it is stale: a heartbeat may come late, and gates must not flap for it."""


class Unknown(msgspec.Struct, frozen=True):
    """A reading that could not be had.

    `reason` is a stable snake_case code (`board_missing`, `board_stale`, `board_torn`,
    `serving_gone`, `metrics_missing`, ...); `age_ns` is the age of the last good reading, if any.
    """

    reason: str
    age_ns: int | None = None

    def __str__(self) -> str:
        return self.reason if self.age_ns is None else f"{self.reason} age={self.age_ns / 1e9:.1f}s"


class GateMode(IntEnum):
    """How a replica's gate decides; set by rosed, obeyed by the rollout engine."""

    CLOSED = 0
    STRICT = 1
    """Open only while the serving engine is idle."""
    SLACK = 2
    """Open while no prefill waits and the next rollout step fits in every slack."""
    OPEN = 3
    """Always open: a dedicated replica, or the `naive` mode of the benchmark."""


class GateReason(IntEnum):
    """Why the gate is as it is.  Names are stable: `rose status` prints them in lower case."""

    OPEN_IDLE = 0
    OPEN_FORCED = 1
    OPEN_SLACK = 2
    CLOSED_BY_OPERATOR = 10
    SERVING_WAITING = 11
    """A serving request waits for its prefill."""
    SERVING_RUNNING = 12
    SLACK_TOO_SMALL = 13
    BOARD_UNKNOWN = 20
    """The serving board is missing, torn, stale, or its owner is gone."""
    ROSED_GONE = 21
    """rosed stopped renewing `GatePolicy.alive_until_ns`."""
    POLICY_UNKNOWN = 22
    CLOCK_JUMPED = 23
    MEMORY_UNKNOWN = 24
    """The memory of the shared device cannot be read, so nobody knows what serving needs."""
    DEVICE_TROUBLE = 25
    """The shared device is lost, out of reach or recovering; `rose status` says which."""
    INACTIVE = 26
    """The replica has given its KV memory back: no job holds it, or the operator switched it off."""
    LENDING_OFF = 27
    """The operator switched lending off on this host (`rose lend off`)."""
    ERROR_BUDGET_SPENT = 28
    """Rollout made more serving requests late than it may."""
    OUTSIDE_HOURS = 29
    """Lending is for other hours of the week (`lending.hours`)."""
    ROLLOUT_OFF_WINDOW = 30
    """A randomised window without rollout, to compare serving with and without it."""


class SlackReading(NamedTuple):
    """Serving engine -> everybody: how much time its requests have left.  Source: paper section on slack."""

    stamp_ns: int
    waiting: int
    """Requests that wait for their first scheduling."""
    running: int
    pending_prefill_tokens: int
    kv_used_blocks: int
    kv_total_blocks: int
    ttft_deadline_ns: int
    """Latest instant to begin with the waiting prefills so that each keeps its TTFT budget, or NEVER.
    Already reduced by the predicted time of the queue and its margin."""
    tpot_deadline_ns: int
    """Latest instant to begin the next decode step so that each request keeps its TPOT budget, or NEVER.
    Already reduced by the predicted time of the step and its margin."""
    in_step: int
    """1 between `schedule` and `update_from_output` of a non-empty step."""
    step_start_ns: int
    step_end_ns: int
    steps: int
    busy_ns: int
    """Sum of the durations of all non-empty steps."""
    prefill_p99_ns: int
    """Upper quantile of observed time from first schedule to first token; 0 until one was seen."""
    arrivals: int
    preemptions: int
    overhead_ns: int
    """What the plugin added to the latest step: its time before the device was given work, and after."""
    prefill_predicted_ns: int
    """T_prefill of the p99 prompt with its margin; 0 while the model is not calibrated."""
    decode_predicted_ns: int
    """T_decode of the running batch; 0 while the model is not calibrated, or nothing decodes."""
    drift_permille: int
    """Measured over predicted time of recent serving steps, times 1000."""
    ttft_budget_ns: int = 0
    """Tightest TTFT budget of any request class: what the next arrival may ask for; 0 if not known."""
    deferred_ns: int = 0
    """What the plugin did for the latest step while the device worked, besides `overhead_ns`."""
    kv_parked_blocks: int = 0
    """Blocks that the engine does not use now and lends, or could lend; neither used nor free."""
    kv_shortages: int = 0
    """Steps before which less lent memory could be had back than the step might have needed."""
    kv_resident_bytes: int = -1
    """Physical memory behind the KV cache, as its worker measured it; -1 if unknown, or not elastic."""


class GatePolicy(NamedTuple):
    """rosed -> one rollout engine: what it may do."""

    revision: int
    mode: int
    """A GateMode."""
    token_cap: int
    """Most tokens a step may schedule while the gate is open; 0 means the engine's own limit."""
    kv_budget_blocks: int
    """Blocks the engine may hold; 0 means all it has."""
    rl_step: int
    alive_until_ns: int
    """The gate closes by itself past this instant, unless rosed renews it."""
    ttft_slo_ns: int
    tpot_slo_ns: int
    margin_ns: int
    closed_reason: int = GateReason.CLOSED_BY_OPERATOR
    """Why the mode is CLOSED: a GateReason."""


class LimitStatus(IntEnum):
    """Answer of a rollout engine to the revision it was asked to obey."""

    APPLIED = 0
    DEFERRED = 1
    STALE = 2
    CONFLICT = 3


class ReplicaReading(NamedTuple):
    """One rollout engine -> rosed: what it does."""

    stamp_ns: int
    policy_revision: int
    """Latest GatePolicy revision obeyed."""
    limit_status: int
    gate_open: int
    gate_reason: int
    token_cap: int
    kv_total_blocks: int
    kv_budget_blocks: int
    kv_used_blocks: int
    running: int
    waiting: int
    steps: int
    empty_steps: int
    tokens: int
    """Tokens scheduled since start (prefill and decode)."""
    aborted_requests: int
    """Requests ended by KV budget cuts since start."""
    rejected_requests: int
    gate_transitions: int
    open_ns: int
    closed_ns: int
    step_start_ns: int
    step_end_ns: int
    busy_ns: int
    overhead_p50_ns: int
    """What the plugin added to a step, with the device waiting, by the clock on the wall."""
    overhead_p99_ns: int
    weight_version: int
    """Version of the weights in use, as set by the last committed update."""
    drift_permille: int
    """Measured over predicted time of recent rollout steps, times 1000."""
    margin_ns: int
    """Margin on the predicted duration of a step, from the quantile of the model's errors."""
    journal_dropped: int
    """Gate transitions that were lost because rosed did not fetch them in time."""
    kv_resident_bytes: int
    """Physical memory behind the KV cache, as its worker measured it; -1 if unknown, or not elastic."""
    overhead_cpu_p50_ns: int = 0
    """The same in processor time of the thread: without waiting for a core, or for the interpreter's lock."""
    overhead_cpu_p99_ns: int = 0


class KvOrderReading(NamedTuple):
    """Scheduler of an engine -> its worker: there is a new list of parked blocks (engines.vllm.kv_orders)."""

    stamp_ns: int
    revision: int


class KvHolding(NamedTuple):
    """Worker of an engine -> its scheduler and everybody: what its KV cache holds of the device's memory."""

    stamp_ns: int
    revision: int
    """Latest order of the scheduler that is carried out: what it parked is given back."""
    page_bytes: int
    """The unit in which memory is given and taken."""
    arena_bytes: int
    """Size of the whole KV cache."""
    mapped_bytes: int
    """What blocks in use may touch: the most that can become resident."""
    resident_bytes: int
    """Physical memory, as measured."""
    released_bytes: int
    """Given back since start: the measured fall of the resident memory."""
    release_ns: int
    """How long the latest giving back took."""


class GateTransition(NamedTuple):
    """A gate changed its answer or the reason for it, and what it went by.  Kept in a ring (`rose.rings`)."""

    at_ns: int
    number: int
    """Counts the transitions of one engine; a gap means that some were dropped."""
    tokens: int
    """The answer, with the next two."""
    valid_until_ns: int
    reason: int
    """A GateReason."""
    in_flight_ns: int
    mode: int
    """The policy, with the next four; -1 if it was unknown."""
    policy_revision: int
    token_cap: int
    alive_until_ns: int
    policy_margin_ns: int
    board_known: int
    """0 if the serving board was unknown (then the words of it are 0), -1 for a dedicated replica."""
    stamp_ns: int
    waiting: int
    running: int
    in_step: int
    pending_prefill_tokens: int
    ttft_deadline_ns: int
    tpot_deadline_ns: int
    prefill_p99_ns: int
    prefill_predicted_ns: int
    decode_predicted_ns: int
    step_ns: int
    """T_rollout of a step of one token, and of 512 tokens: the two determine the affine model."""
    step_512_ns: int
    margin_ns: int
    """The model's own margin."""


class StepRecord(NamedTuple):
    """One step that an engine took.  Kept in a ring (`rose.rings`) where the step log is on."""

    number: int
    """Counts the steps of one engine; a gap means that some were dropped."""
    start_ns: int
    """When it had the device: given to the worker, and the step before it done."""
    end_ns: int
    tokens: int
    """0 where they were not counted."""


class ServedRequest(NamedTuple):
    """One request that a serving engine ended.  Kept in a ring (`rose.rings`), for rosed's SLO guard."""

    number: int
    """Counts the requests of one engine; a gap means that some were dropped."""
    arrival_ns: int
    first_ns: int
    """When its first token was there; 0 if it never was."""
    last_ns: int
    """When its latest token was there; without any, when it was given up."""
    tokens: int
    ttft_budget_ns: int
    tpot_budget_ns: int
