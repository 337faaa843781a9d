"""Admission: how many rollout tokens may run in the next step (paper: dual-SLO admission).

The gate is asked by the rollout engine before every step, so an answer costs a few microseconds.  Unknown
is not idle: whatever cannot be read closes the gate, never serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rose.core.latency import SharedStepLatency, StepLatency
from rose.core.readings import NEVER, GateMode, GatePolicy, GateReason, SlackReading, Unknown
from rose.units import NS_PER_S

TOKENS_FLOOR = 32
"""The bound from the latency model never falls below this: tiny steps cost 3x throughput, bring nothing."""
SLACK_TOKENS_MIN = 8
"""Beside running requests a smaller cap than this counts as none, for the same reason."""
STRICT_DELAY_SHARE = 0.12
"""In STRICT, the share of its TTFT budget that an arrival may have to wait for a rollout step in flight."""
_MODE_MIN, _MODE_MAX = int(min(GateMode)), int(max(GateMode))
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
    nothing runs, no step is in flight.  SLACK also opens beside decoding requests, for as many tokens as are
    predicted to fit in every slack; it is closed while a prefill waits or runs, and decides as STRICT does
    beside an idle engine, or where either engine's latency model is not calibrated.  OPEN ignores serving.

    A step admitted to an idle device can still delay a request that arrives the moment after.  STRICT and
    SLACK therefore bound it to T_rollout(n) <= B_TTFT - T_prefill(p99) - margin (paper), with the latency
    model calibrated by `observe_step`; before that, only the policy's cap applies.  Steps of this engine that
    are in flight (asynchronous scheduling) count: the arrival waits for them too.  T_prefill is predicted,
    and observed only where it cannot be: what was observed contains waits that rollout itself caused.  STRICT
    also bounds the step to STRICT_DELAY_SHARE of the budget: it is to be felt less than what the budget would
    allow.  Beside an idle engine the
    bound has a floor, or else a model that once was too pessimistic would never see a step that corrects it.

    Beside a serving engine, every mode ends with the lease: when rosed stops renewing `alive_until_ns`
    nobody watches memory or serving any more, so even OPEN closes.  A dedicated replica (`slack` None) has
    nobody to harm, and closing it would only lose rollouts: the last policy it knew stands when rosed dies
    or its board goes away.  It is closed by the operator alone, or while no policy was ever seen.
    """

    def __init__(
        self, *, step_tokens_max: int, tokens_floor: int = TOKENS_FLOOR, overlaps: bool = False
    ) -> None:
        if step_tokens_max <= 0 or tokens_floor <= 0:
            raise ValueError(f"token limits must be above 0: {step_tokens_max=}, {tokens_floor=}")
        self._step_tokens_max = step_tokens_max
        self._tokens_floor = tokens_floor
        self._overlaps = overlaps
        self._last_policy: GatePolicy | None = None
        self._shared_latency = SharedStepLatency()
        self.lessons = 0
        """Steps observed so far: answers from before the latest one may not stand any more."""

    @property
    def latency(self) -> StepLatency:
        """T_rollout of steps that have the device alone."""
        return self._shared_latency.model()

    @property
    def latency_beside(self) -> StepLatency:
        """T_rollout of steps beside serving.

        Engines that take turns need as long as alone, as the other's time is counted apart; engines that
        overlap (MPS) slow each other down, and it is what such steps were seen to take.
        """
        return self._shared_latency.model(co_running=1) if self._overlaps else self.latency

    def observe_step(self, tokens: int, duration_ns: int, *, co_running: int = 0) -> None:
        """A rollout step took `duration_ns`, beside serving of that load; empty steps teach nothing."""
        self.lessons += 1
        self._shared_latency.observe(tokens, duration_ns, co_running=co_running)

    def decide(
        self,
        slack: SlackReading | Unknown | None,
        policy: GatePolicy | Unknown,
        now_ns: int,
        *,
        in_flight_ns: int = 0,
    ) -> Admission:
        """The answer for a step that would be given out at `now_ns`.

        `slack` is None if there is no serving engine; see `strictest` for several.  `in_flight_ns` is the
        time that this engine's steps already in flight still need (asynchronous scheduling).
        """
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
        if isinstance(slack, Unknown):
            return Admission(0, NEVER, GateReason.BOARD_UNKNOWN)
        return (
            _why_board_forbids(slack, now_ns)
            or self._beside_decodes(slack, known, now_ns, in_flight_ns)
            or _why_serving_forbids(slack)
            or self._beside_idle(slack, known, in_flight_ns)
        )

    def _beside_idle(self, slack: SlackReading, policy: GatePolicy, in_flight_ns: int) -> Admission:
        budget_ns = _arrival_budget_ns(slack, policy)
        # Whoever arrives now waits for the steps ahead of this one as well.
        bearable_ns = budget_ns - _prefill_ns(slack) - self._margin_ns(policy) - max(0, in_flight_ns)
        if policy.mode == GateMode.STRICT:
            bearable_ns = min(bearable_ns, round(STRICT_DELAY_SHARE * budget_ns))
        tokens = self._idle_cap(bearable_ns, policy)
        return Admission(tokens, policy.alive_until_ns, GateReason.OPEN_IDLE)

    def _beside_decodes(
        self, slack: SlackReading, policy: GatePolicy, now_ns: int, in_flight_ns: int
    ) -> Admission | None:
        """As many tokens as fit in the slack and in what an arrival could bear; None where STRICT decides."""
        if not _only_decodes(slack, policy) or slack.decode_predicted_ns <= 0:
            return None
        latency = self.latency_beside
        if not latency.calibrated:
            return None
        margin_ns = max(policy.margin_ns, latency.margin_ns())
        # Whoever arrives now waits for the decode step in flight as well (ours).
        waits_ns = slack.decode_predicted_ns + _prefill_ns(slack)
        bearable_ns = _arrival_budget_ns(slack, policy) - waits_ns - margin_ns
        end_ns = slack.tpot_deadline_ns - margin_ns
        left_ns = min(end_ns - now_ns, bearable_ns) - max(0, in_flight_ns)
        tokens = latency.largest_within(left_ns, self._policy_cap(policy))
        if tokens < min(SLACK_TOKENS_MIN, self._policy_cap(policy)):
            return Admission(0, NEVER, GateReason.SLACK_TOO_SMALL)  # time alone only makes it smaller
        latest_start_ns = end_ns - latency.predict_ns(tokens) - max(0, in_flight_ns)
        return Admission(tokens, min(policy.alive_until_ns, latest_start_ns), GateReason.OPEN_SLACK)

    def _dedicated(self, known: GatePolicy | None) -> Admission:
        policy = self._last_policy = known or self._last_policy
        if policy is None:
            return Admission(0, NEVER, GateReason.POLICY_UNKNOWN)
        if policy.mode == GateMode.CLOSED:
            return Admission(0, NEVER, _closed_reason(policy))
        reason = GateReason.OPEN_FORCED if policy.mode == GateMode.OPEN else GateReason.OPEN_IDLE
        return Admission(self._policy_cap(policy), NEVER, reason)

    def _policy_cap(self, policy: GatePolicy) -> int:
        return min(policy.token_cap or self._step_tokens_max, self._step_tokens_max)

    def _margin_ns(self, policy: GatePolicy) -> int:
        return max(policy.margin_ns, self.latency.margin_ns())

    def _idle_cap(self, bearable_ns: int, policy: GatePolicy) -> int:
        """The policy's cap, less what an unlucky new arrival could not bear."""
        cap, latency = self._policy_cap(policy), self.latency
        if not latency.calibrated:
            return cap
        return min(cap, max(self._tokens_floor, latency.largest_within(bearable_ns, cap)))


def _plausible(policy: GatePolicy) -> bool:
    """Whether a policy says something we understand; a mode of a later release closes the gate."""
    return _MODE_MIN <= policy.mode <= _MODE_MAX and policy.token_cap >= 0


def _arrival_budget_ns(slack: SlackReading, policy: GatePolicy) -> int:
    """B_TTFT of the most demanding request that may arrive now."""
    budget_ns = slack.ttft_budget_ns
    return min(policy.ttft_slo_ns, budget_ns) if budget_ns > 0 else policy.ttft_slo_ns


def _prefill_ns(slack: SlackReading) -> int:
    """T_prefill of such a request: predicted, or else observed."""
    return slack.prefill_predicted_ns or slack.prefill_p99_ns


def _closed_reason(policy: GatePolicy) -> GateReason:
    """Why rosed closed the gate; a reason of a later release counts as the operator's."""
    known = policy.closed_reason in GateReason._value2member_map_
    return GateReason(policy.closed_reason) if known else GateReason.CLOSED_BY_OPERATOR


def _why_policy_forbids(policy: GatePolicy, now_ns: int) -> Admission | None:
    """The closed answer that holds whatever serving does, or None."""
    if policy.mode == GateMode.CLOSED:
        return Admission(0, NEVER, _closed_reason(policy))
    if policy.alive_until_ns <= now_ns:
        return Admission(0, NEVER, GateReason.ROSED_GONE)
    if policy.alive_until_ns - now_ns > LEASE_NS_MAX:
        return Admission(0, policy.alive_until_ns - LEASE_NS_MAX, GateReason.CLOCK_JUMPED)
    return None


def _why_board_forbids(slack: SlackReading, now_ns: int) -> Admission | None:
    """The closed answer to a board that contradicts itself or the clock, or None."""
    if slack.stamp_ns > now_ns + CLOCK_AHEAD_NS_MAX:
        return Admission(0, slack.stamp_ns - CLOCK_AHEAD_NS_MAX, GateReason.CLOCK_JUMPED)
    if slack.waiting < 0 or slack.running < 0 or slack.in_step not in {0, 1}:
        return Admission(0, NEVER, GateReason.BOARD_UNKNOWN)
    return None


def _why_serving_forbids(slack: SlackReading) -> Admission | None:
    """The closed answer, or None when the serving engine is provably idle."""
    if slack.waiting:
        return Admission(0, NEVER, GateReason.SERVING_WAITING)
    if slack.running or slack.in_step:
        return Admission(0, NEVER, GateReason.SERVING_RUNNING)
    return None


def _only_decodes(slack: SlackReading, policy: GatePolicy) -> bool:
    """Whether slack is to be used, and serving has decoding requests and no prefill, begun or not."""
    return (
        policy.mode == GateMode.SLACK
        and slack.waiting == 0
        and slack.running > 0
        and slack.pending_prefill_tokens == 0
        and slack.ttft_deadline_ns == NEVER
        and slack.tpot_deadline_ns != NEVER
    )


def strictest(readings: Sequence[SlackReading | Unknown]) -> SlackReading | Unknown:
    """What a replica over several devices, or beside several ranks, has to obey: the worst of each word.

    Unknown if any board is.  A prediction is 0 (not known) if it is for a rank that needs it.  Words that say
    nothing about slack are those of the first board.  Raises ValueError when there is no reading.
    """
    if not readings:
        raise ValueError("no board to obey")
    known: list[SlackReading] = []
    for reading in readings:
        if isinstance(reading, Unknown):
            return reading
        known.append(reading)
    first = known[0]
    if len(known) == 1:
        return first
    if any(each.waiting < 0 or each.running < 0 or each.in_step not in {0, 1} for each in known):
        return Unknown("board_contradictory")
    budgets = [each.ttft_budget_ns for each in known if each.ttft_budget_ns > 0]
    decoding = [each.decode_predicted_ns for each in known if each.running]
    return first._replace(
        stamp_ns=max(each.stamp_ns for each in known),
        waiting=sum(each.waiting for each in known),
        running=sum(each.running for each in known),
        pending_prefill_tokens=max(each.pending_prefill_tokens for each in known),
        ttft_deadline_ns=min(each.ttft_deadline_ns for each in known),
        tpot_deadline_ns=min(each.tpot_deadline_ns for each in known),
        in_step=max(each.in_step for each in known),
        steps=sum(each.steps for each in known),
        prefill_p99_ns=max(each.prefill_p99_ns for each in known),
        prefill_predicted_ns=max(map(_prefill_ns, known)),  # a rank that predicts none hides behind no other
        ttft_budget_ns=min(budgets, default=0),
        decode_predicted_ns=0 if min(decoding, default=0) <= 0 else max(decoding),
    )
