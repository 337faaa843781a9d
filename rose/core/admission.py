"""Admission: how many rollout tokens may run in the next step (paper: dual-SLO admission).

The gate is asked by the rollout engine before every step, so an answer costs a few microseconds.  Unknown
is not idle: whatever cannot be read closes the gate, never serving.
"""

from __future__ import annotations

from typing import NamedTuple

from rose.core.latency import StepLatency
from rose.core.readings import NEVER, GateMode, GatePolicy, GateReason, SlackReading, Unknown
from rose.units import NS_PER_S

TOKENS_FLOOR = 32
"""The bound from the latency model never falls below this: tiny steps cost 3x throughput, bring nothing."""
LEASE_NS_MAX = 60 * NS_PER_S
"""No rosed promises to live longer than this; a later `alive_until_ns` means that the clock moved."""
CLOCK_AHEAD_NS_MAX = NS_PER_S
"""A board stamped further in the future than this means that the clock moved."""


class Admission(NamedTuple):
    """The gate's answer."""

    tokens: int
    """Most tokens the next step may schedule; 0 while the gate is closed."""
    valid_until_ns: int
    """The answer stands until then unless a reading changes; NEVER where time alone changes nothing."""
    reason: GateReason

    @property
    def open(self) -> bool:
        """Whether rollout may run now."""
        return self.tokens > 0


class AdmissionGate:
    """The gate of one rollout engine.

    `step_tokens_max` is the engine's own limit for a step (it stands in for a policy without cap).

    CLOSED never opens.  STRICT opens while the serving engine provably has nothing to do: nothing waits,
    nothing runs, no step is in flight.  SLACK decides as STRICT does: fitting steps into the slack of
    running requests is not implemented yet, and the stricter answer is the safe one.  OPEN ignores serving.

    A step admitted to an idle device can still delay a request that arrives the moment after.  STRICT and
    SLACK therefore bound it to T_rollout(n) <= B_TTFT - T_prefill(p99) - margin (paper), with the latency
    model calibrated by `observe_step`; before that, only the policy's cap applies.

    Beside a serving engine, every mode ends with the lease: when rosed stops renewing `alive_until_ns`
    nobody watches memory or serving any more, so even OPEN closes.  A dedicated replica (`slack` None) has
    nobody to harm, and closing it would only lose rollouts: the last policy it knew stands when rosed dies
    or its board goes away.  It is closed by the operator alone, or while no policy was ever seen.
    """

    def __init__(self, *, step_tokens_max: int, tokens_floor: int = TOKENS_FLOOR) -> None:
        if step_tokens_max <= 0 or tokens_floor <= 0:
            raise ValueError(f"token limits must be above 0: {step_tokens_max=}, {tokens_floor=}")
        self._step_tokens_max = step_tokens_max
        self._tokens_floor = tokens_floor
        self._last_policy: GatePolicy | None = None
        self.latency = StepLatency()

    def observe_step(self, tokens: int, duration_ns: int) -> None:
        """A rollout step of `tokens` tokens took `duration_ns`; empty steps teach nothing."""
        self.latency.observe(tokens, duration_ns)

    def decide(
        self, slack: SlackReading | Unknown | None, policy: GatePolicy | Unknown, now_ns: int
    ) -> Admission:
        """The answer for a step that would start at `now_ns`; `slack` None if there is no serving engine."""
        known = None if isinstance(policy, Unknown) or not _plausible(policy) else policy
        if slack is None:
            return self._dedicated(known)
        if known is None:
            return Admission(0, NEVER, GateReason.POLICY_UNKNOWN)
        closed = _why_policy_forbids(known, now_ns)
        if closed is not None:
            return closed
        if known.mode == GateMode.OPEN:
            return Admission(self._policy_cap(known), known.alive_until_ns, GateReason.OPEN_FORCED)
        return self._beside_serving(slack, known, now_ns)

    def _beside_serving(self, slack: SlackReading | Unknown, policy: GatePolicy, now_ns: int) -> Admission:
        if isinstance(slack, Unknown):
            return Admission(0, NEVER, GateReason.BOARD_UNKNOWN)
        closed = _why_serving_forbids(slack, now_ns)
        if closed is not None:
            return closed
        return Admission(self._idle_cap(slack, policy), policy.alive_until_ns, GateReason.OPEN_IDLE)

    def _dedicated(self, known: GatePolicy | None) -> Admission:
        policy = self._last_policy = known or self._last_policy
        if policy is None:
            return Admission(0, NEVER, GateReason.POLICY_UNKNOWN)
        if policy.mode == GateMode.CLOSED:
            return Admission(0, NEVER, GateReason.CLOSED_BY_OPERATOR)
        reason = GateReason.OPEN_FORCED if policy.mode == GateMode.OPEN else GateReason.OPEN_IDLE
        return Admission(self._policy_cap(policy), NEVER, reason)

    def _policy_cap(self, policy: GatePolicy) -> int:
        return min(policy.token_cap or self._step_tokens_max, self._step_tokens_max)

    def _idle_cap(self, slack: SlackReading, policy: GatePolicy) -> int:
        """The policy's cap, less what an unlucky new arrival could not bear."""
        cap = self._policy_cap(policy)
        if not self.latency.calibrated:
            return cap
        margin_ns = max(policy.margin_ns, self.latency.margin_ns())
        bearable_ns = policy.ttft_slo_ns - slack.prefill_p99_ns - margin_ns
        return min(cap, max(self._tokens_floor, self.latency.largest_within(bearable_ns, cap)))


def _plausible(policy: GatePolicy) -> bool:
    """Whether a policy says something we understand; a mode of a later release closes the gate."""
    return GateMode.CLOSED <= policy.mode <= GateMode.OPEN and policy.token_cap >= 0


def _why_policy_forbids(policy: GatePolicy, now_ns: int) -> Admission | None:
    """The closed answer that holds whatever serving does, or None."""
    if policy.mode == GateMode.CLOSED:
        return Admission(0, NEVER, GateReason.CLOSED_BY_OPERATOR)
    if policy.alive_until_ns <= now_ns:
        return Admission(0, NEVER, GateReason.ROSED_GONE)
    if policy.alive_until_ns - now_ns > LEASE_NS_MAX:
        return Admission(0, policy.alive_until_ns - LEASE_NS_MAX, GateReason.CLOCK_JUMPED)
    return None


def _why_serving_forbids(slack: SlackReading, now_ns: int) -> Admission | None:
    """The closed answer, or None when the serving engine is provably idle."""
    if slack.stamp_ns > now_ns + CLOCK_AHEAD_NS_MAX:
        return Admission(0, slack.stamp_ns - CLOCK_AHEAD_NS_MAX, GateReason.CLOCK_JUMPED)
    if slack.waiting < 0 or slack.running < 0 or slack.in_step not in {0, 1}:
        return Admission(0, NEVER, GateReason.BOARD_UNKNOWN)
    if slack.waiting:
        return Admission(0, NEVER, GateReason.SERVING_WAITING)
    if slack.running or slack.in_step:
        return Admission(0, NEVER, GateReason.SERVING_RUNNING)
    return None
