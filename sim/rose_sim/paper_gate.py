"""The paper's dual-slack admission by the simulator's own cost model.

`AdmissionGate` needs predictions of serving steps on the board for mode SLACK, and is STRICT without
them.  The simulator knows those durations exactly, and publishes none.  This class asks the real gate first;
only where that says no because serving runs, and the mode is SLACK, it applies the paper's rule: tokens are
admitted if both slacks stay positive after the rollout step.
"""

from __future__ import annotations

from rose.core.admission import Admission, AdmissionGate
from rose.core.readings import NEVER, GateMode, GatePolicy, GateReason, SlackReading, Unknown


class PaperGate(AdmissionGate):
    """Dual-slack admission: closed during prefills, else open while a step fits in the decode slack."""

    decode_step_ns = 0
    """Latest duration of a serving decode step (T-hat of decode), set by the device."""

    def decide(
        self,
        slack: SlackReading | Unknown | None,
        policy: GatePolicy | Unknown,
        now_ns: int,
        *,
        in_flight_ns: int = 0,
    ) -> Admission:
        """As `AdmissionGate.decide`, with the paper's rule for SLACK."""
        answer = super().decide(slack, policy, now_ns, in_flight_ns=in_flight_ns)
        if answer.reason is not GateReason.SERVING_RUNNING or isinstance(policy, Unknown):
            return answer
        if policy.mode != GateMode.SLACK or not isinstance(slack, SlackReading):
            return answer
        if slack.waiting or slack.pending_prefill_tokens or slack.tpot_deadline_ns >= NEVER:
            return Admission(0, NEVER, GateReason.SERVING_WAITING)
        margin_ns = max(policy.margin_ns, self.latency.margin_ns())
        left_ns = slack.tpot_deadline_ns - now_ns - self.decode_step_ns - margin_ns
        bearable_ns = policy.ttft_slo_ns - slack.prefill_p99_ns - margin_ns
        cap = policy.token_cap
        tokens = self.latency.largest_within(min(left_ns, bearable_ns), cap)
        if tokens <= 0:
            return Admission(0, NEVER, GateReason.SLACK_TOO_SMALL)
        until_ns = now_ns + left_ns - self.latency.predict_ns(tokens)
        return Admission(tokens, max(until_ns, now_ns), GateReason.OPEN_SLACK)
