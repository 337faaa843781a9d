"""SLACK admission against any readings: closed for what is unknown, never more than fits, monotone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.core.admission import SLACK_TOKENS_MIN, TOKENS_FLOOR, AdmissionGate, strictest
from rose.core.readings import NEVER, GateMode, GatePolicy, GateReason, SlackReading, Unknown
from rose.units import NS_PER_S, ms_to_ns

NOW_NS = 100 * NS_PER_S
STEP_TOKENS_MAX = 1024
ZEROS = SlackReading(**dict.fromkeys(SlackReading._fields, 0))
IDLE = ZEROS._replace(stamp_ns=NOW_NS, ttft_deadline_ns=NEVER, tpot_deadline_ns=NEVER)
DECODING = IDLE._replace(
    running=4,
    tpot_deadline_ns=NOW_NS + ms_to_ns(80),
    decode_predicted_ns=ms_to_ns(15),
    prefill_predicted_ns=ms_to_ns(60),
)
SLACK = GatePolicy(
    revision=1,
    mode=GateMode.SLACK,
    token_cap=512,
    kv_budget_blocks=0,
    rl_step=1,
    alive_until_ns=NOW_NS + NS_PER_S,
    ttft_slo_ns=ms_to_ns(250),
    tpot_slo_ns=ms_to_ns(60),
    margin_ns=ms_to_ns(5),
)

words = st.integers(-2, 3) | st.integers(NOW_NS - NS_PER_S, NOW_NS + NS_PER_S) | st.just(NEVER)
readings = st.builds(SlackReading, *[words for _ in SlackReading._fields])
decoding_readings = st.builds(
    lambda running, in_step, slack_ms, decode_ms, prefill_ms, observed_ms: DECODING._replace(
        running=running,
        in_step=in_step,
        tpot_deadline_ns=NOW_NS + ms_to_ns(slack_ms),
        decode_predicted_ns=ms_to_ns(decode_ms),
        prefill_predicted_ns=ms_to_ns(prefill_ms),
        prefill_p99_ns=ms_to_ns(observed_ms),
    ),
    st.integers(1, 64),
    st.integers(0, 1),
    st.floats(-100, 300),
    st.floats(0.1, 50),
    st.just(0) | st.floats(0, 300),
    st.just(0) | st.floats(0, 300),
)
idle_readings = st.builds(
    lambda prefill_ms, observed_ms: IDLE._replace(
        prefill_predicted_ns=ms_to_ns(prefill_ms), prefill_p99_ns=ms_to_ns(observed_ms)
    ),
    st.just(0) | st.floats(0, 300),
    st.just(0) | st.floats(0, 300),
)
policies = st.builds(
    lambda cap, margin_ms, ttft_ms: SLACK._replace(
        token_cap=cap, margin_ns=ms_to_ns(margin_ms), ttft_slo_ns=ms_to_ns(ttft_ms)
    ),
    st.integers(0, 2048),
    st.floats(0, 40),
    st.floats(1, 1000),
)


def calibrated(base_ms: float = 5, token_ms: float = 0.5, jitter_ms: float = 0) -> AdmissionGate:
    gate = AdmissionGate(step_tokens_max=STEP_TOKENS_MAX)
    for _ in range(4):
        for tokens in (1, 2, 8, 32, 64, 128, 256, 512):
            gate.observe_step(tokens, ms_to_ns(base_ms + tokens * token_ms))
            gate.observe_step(tokens, ms_to_ns(base_ms + tokens * token_ms + jitter_ms))
    return gate


gates = st.builds(calibrated, st.floats(0, 30), st.floats(0.01, 3), st.floats(0, 30))


# ---- examples -----------------------------------------------------------------------------------


def test_a_step_that_fits_in_the_slack_runs_beside_decodes() -> None:
    """80 ms of slack - 5 ms margin at 5 ms + 0.5 ms a token."""
    admission = calibrated().decide(DECODING, SLACK, NOW_NS)
    assert admission.reason == GateReason.OPEN_SLACK
    assert admission.tokens in {139, 140}
    assert NOW_NS <= admission.valid_until_ns <= NOW_NS + ms_to_ns(1)


def test_an_arrival_that_is_not_there_yet_bounds_the_step_too() -> None:
    """250 ms - 185 ms for its prefill - 15 ms for the decode in flight - 5 ms margin: 45 ms, 80 tokens."""
    slack = DECODING._replace(prefill_predicted_ns=ms_to_ns(185), tpot_deadline_ns=NOW_NS + NS_PER_S)
    admission = calibrated().decide(slack, SLACK, NOW_NS)
    assert admission.tokens in {79, 80}
    assert admission.valid_until_ns > NOW_NS + ms_to_ns(900)


def test_an_observed_prefill_stands_in_for_a_predicted_one() -> None:
    slack = DECODING._replace(
        prefill_predicted_ns=0, prefill_p99_ns=ms_to_ns(185), tpot_deadline_ns=NOW_NS + NS_PER_S
    )
    assert calibrated().decide(slack, SLACK, NOW_NS).tokens in {79, 80}


def test_steps_in_flight_use_up_slack() -> None:
    admission = calibrated().decide(DECODING, SLACK, NOW_NS, in_flight_ns=ms_to_ns(50))
    assert admission.tokens in {39, 40}


@pytest.mark.parametrize("mode", [GateMode.STRICT, GateMode.SLACK])
def test_beside_an_idle_engine_an_arrival_waits_for_the_steps_in_flight_too(mode: GateMode) -> None:
    """250 ms - 60 ms for its prefill - 5 ms margin - 160 ms in flight: 25 ms, 40 tokens."""
    idle, policy = IDLE._replace(prefill_predicted_ns=ms_to_ns(60)), SLACK._replace(mode=mode)
    admission = calibrated().decide(idle, policy, NOW_NS, in_flight_ns=ms_to_ns(160))
    assert admission.reason == GateReason.OPEN_IDLE
    assert admission.tokens in {39, 40}
    assert calibrated().decide(idle, policy, NOW_NS).tokens > admission.tokens


def test_the_engine_s_own_margin_counts_where_it_is_larger() -> None:
    unsteady = calibrated(jitter_ms=20)
    assert unsteady.latency.margin_ns() > ms_to_ns(8)
    assert unsteady.decide(DECODING, SLACK, NOW_NS).tokens < 120


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"waiting": 1}, GateReason.SERVING_WAITING),
        ({"pending_prefill_tokens": 300, "ttft_deadline_ns": NOW_NS + NS_PER_S}, GateReason.SERVING_RUNNING),
        ({"ttft_deadline_ns": NOW_NS + NS_PER_S}, GateReason.SERVING_RUNNING),
        ({"decode_predicted_ns": 0}, GateReason.SERVING_RUNNING),
        ({"tpot_deadline_ns": NEVER}, GateReason.SERVING_RUNNING),
        ({"running": 0, "in_step": 1}, GateReason.SERVING_RUNNING),
        ({"tpot_deadline_ns": NOW_NS + ms_to_ns(12)}, GateReason.SLACK_TOO_SMALL),
        ({"tpot_deadline_ns": NOW_NS - NS_PER_S}, GateReason.SLACK_TOO_SMALL),
        ({"prefill_predicted_ns": ms_to_ns(245)}, GateReason.SLACK_TOO_SMALL),
        ({"running": -1}, GateReason.BOARD_UNKNOWN),
        ({"stamp_ns": NOW_NS + 5 * NS_PER_S}, GateReason.CLOCK_JUMPED),
    ],
)
def test_what_closes_it(change: dict[str, int], reason: GateReason) -> None:
    admission = calibrated().decide(DECODING._replace(**change), SLACK, NOW_NS)
    assert (admission.open, admission.reason) == (False, reason)


def test_without_a_model_it_decides_as_strict_does() -> None:
    fresh = AdmissionGate(step_tokens_max=STEP_TOKENS_MAX)
    assert fresh.decide(DECODING, SLACK, NOW_NS).reason == GateReason.SERVING_RUNNING
    assert fresh.decide(IDLE, SLACK, NOW_NS).reason == GateReason.OPEN_IDLE


def test_steps_beside_serving_do_not_count_as_what_a_step_takes_alone() -> None:
    gate = calibrated()
    for _ in range(100):
        gate.observe_step(64, NS_PER_S, co_running=1)
    assert gate.decide(DECODING, SLACK, NOW_NS).tokens in {139, 140}


def test_a_gate_that_only_ever_ran_beside_serving_is_cautious() -> None:
    gate = AdmissionGate(step_tokens_max=STEP_TOKENS_MAX)
    for tokens in (1, 2, 8, 32, 64, 128, 256, 512):
        gate.observe_step(tokens, ms_to_ns(10 + tokens), co_running=1)
    assert gate.decide(DECODING, SLACK, NOW_NS).tokens in {64, 65}


def test_engines_that_overlap_decide_by_steps_that_ran_together() -> None:
    """Alone a token takes 0.5 ms, together 1 ms.  Before that was seen, SLACK decides as STRICT does."""
    gate = AdmissionGate(step_tokens_max=STEP_TOKENS_MAX, overlaps=True)
    for tokens in (1, 2, 8, 32, 64, 128, 256, 512):
        gate.observe_step(tokens, ms_to_ns(5 + tokens * 0.5))
    assert gate.decide(DECODING, SLACK, NOW_NS).reason == GateReason.SERVING_RUNNING
    assert gate.decide(IDLE, SLACK, NOW_NS).reason == GateReason.OPEN_IDLE
    for tokens in (1, 2, 8, 32, 64, 128, 256, 512):
        gate.observe_step(tokens, ms_to_ns(10 + tokens), co_running=1)
    assert gate.decide(DECODING, SLACK, NOW_NS).tokens in {64, 65}
    assert gate.latency.predict_ns(100) < gate.latency_beside.predict_ns(100)


# ---- properties ---------------------------------------------------------------------------------


@given(gates, st.builds(Unknown, st.text(max_size=8), st.none() | st.integers()), policies)
def test_closed_for_every_unknown_board(gate: AdmissionGate, unknown: Unknown, policy: GatePolicy) -> None:
    assert gate.decide(unknown, policy, NOW_NS) == (0, NEVER, GateReason.BOARD_UNKNOWN)
    assert not gate.decide(strictest([DECODING, unknown]), policy, NOW_NS).open
    assert not gate.decide(DECODING, unknown, NOW_NS).open


@settings(deadline=None)
@given(gates, readings | decoding_readings | idle_readings, policies, st.integers(0, ms_to_ns(100)))
def test_never_more_than_fits(
    gate: AdmissionGate, slack: SlackReading, policy: GatePolicy, in_flight_ns: int
) -> None:
    admission = gate.decide(slack, policy, NOW_NS, in_flight_ns=in_flight_ns)
    assert 0 <= admission.tokens <= min(policy.token_cap or STEP_TOKENS_MAX, STEP_TOKENS_MAX)
    if not admission.open:
        return
    assert slack.waiting == 0
    if admission.reason == GateReason.OPEN_IDLE:
        assert (slack.running, slack.in_step) == (0, 0)
        if admission.tokens > TOKENS_FLOOR:
            margin_ns = max(policy.margin_ns, gate.latency.margin_ns())
            needed_ns = gate.latency.predict_ns(admission.tokens) + margin_ns + in_flight_ns
            needed_ns += slack.prefill_predicted_ns or slack.prefill_p99_ns
            assert needed_ns <= policy.ttft_slo_ns
        return
    assert admission.reason == GateReason.OPEN_SLACK
    assert slack.pending_prefill_tokens == 0
    assert slack.ttft_deadline_ns == NEVER
    margin_ns = max(policy.margin_ns, gate.latency.margin_ns())
    needed_ns = gate.latency.predict_ns(admission.tokens) + margin_ns + in_flight_ns
    assert NOW_NS + needed_ns <= slack.tpot_deadline_ns
    prefill_ns = slack.prefill_predicted_ns or slack.prefill_p99_ns
    needed_by_arrival_ns = needed_ns + slack.decode_predicted_ns + prefill_ns
    assert needed_by_arrival_ns <= policy.ttft_slo_ns
    assert slack.ttft_budget_ns <= 0 or needed_by_arrival_ns <= slack.ttft_budget_ns
    assert NOW_NS <= admission.valid_until_ns <= policy.alive_until_ns
    # The answer does stand until then, for that many tokens.
    later_ns = admission.valid_until_ns
    if later_ns < policy.alive_until_ns:
        assert gate.decide(slack, policy, later_ns, in_flight_ns=in_flight_ns).tokens >= admission.tokens


@settings(deadline=None)
@given(gates, decoding_readings, policies, st.floats(0, 200))
def test_more_slack_never_admits_less(
    gate: AdmissionGate, slack: SlackReading, policy: GatePolicy, more_ms: float
) -> None:
    some = gate.decide(slack, policy, NOW_NS).tokens
    later = slack._replace(tpot_deadline_ns=slack.tpot_deadline_ns + ms_to_ns(more_ms))
    assert gate.decide(later, policy, NOW_NS).tokens >= some
    shorter = slack._replace(prefill_predicted_ns=max(1, slack.prefill_predicted_ns - ms_to_ns(more_ms)))
    assert gate.decide(shorter, policy, NOW_NS).tokens >= some
    earlier = gate.decide(slack, policy, NOW_NS - ms_to_ns(more_ms)).tokens
    assert earlier >= some


@settings(deadline=None)
@given(gates, decoding_readings, policies)
def test_no_tiny_steps_beside_requests(gate: AdmissionGate, slack: SlackReading, policy: GatePolicy) -> None:
    tokens = gate.decide(slack, policy, NOW_NS).tokens
    assert tokens == 0 or tokens >= min(SLACK_TOKENS_MIN, policy.token_cap or STEP_TOKENS_MAX)


@settings(deadline=None)
@given(gates, readings | decoding_readings | idle_readings, policies, st.integers(0, ms_to_ns(100)))
def test_strict_knows_nothing_of_slack(
    gate: AdmissionGate, slack: SlackReading, policy: GatePolicy, in_flight_ns: int
) -> None:
    """Deadlines and decodes do not change what STRICT answers; it opens only beside an idle engine."""
    strict = policy._replace(mode=GateMode.STRICT)
    admission = gate.decide(slack, strict, NOW_NS, in_flight_ns=in_flight_ns)
    blank = slack._replace(ttft_deadline_ns=NEVER, tpot_deadline_ns=NEVER, decode_predicted_ns=0)
    assert admission == gate.decide(blank, strict, NOW_NS, in_flight_ns=in_flight_ns)
    assert not admission.open or (slack.waiting, slack.running, slack.in_step) == (0, 0, 0)


@settings(deadline=None)
@given(gates, st.lists(readings | decoding_readings | idle_readings, min_size=1, max_size=4), policies)
def test_several_boards_admit_no_more_than_the_strictest_of_them(
    gate: AdmissionGate, boards: list[SlackReading], policy: GatePolicy
) -> None:
    each = [gate.decide(board, policy, NOW_NS) for board in boards]
    together = gate.decide(strictest(boards), policy, NOW_NS)
    assert together.tokens <= min(one.tokens for one in each)


@pytest.mark.parametrize("board", [DECODING, IDLE])
def test_a_rank_that_only_observed_its_prefills_hides_behind_none_that_predicts_them(
    board: SlackReading,
) -> None:
    """One rank expects 60 ms, the other has seen 205 ms, and has no model yet."""
    one = board._replace(prefill_predicted_ns=ms_to_ns(60), tpot_deadline_ns=NOW_NS + NS_PER_S)
    other = one._replace(prefill_predicted_ns=0, prefill_p99_ns=ms_to_ns(205))
    gate = calibrated()
    assert gate.decide(one, SLACK, NOW_NS).tokens > gate.decide(other, SLACK, NOW_NS).tokens
    for boards in ([one, other], [other, one]):
        assert gate.decide(strictest(boards), SLACK, NOW_NS) == gate.decide(other, SLACK, NOW_NS)


def test_no_board_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="no board"):
        strictest([])


@pytest.mark.parametrize("changes", [{"running": 3, "tpot_deadline_ns": NEVER}, {"running": 1}])
def test_a_rank_whose_slack_is_not_known_decides_for_all(changes: dict[str, Any]) -> None:
    together = strictest([DECODING, DECODING._replace(decode_predicted_ns=0, **changes)])
    assert calibrated().decide(together, SLACK, NOW_NS).reason == GateReason.SERVING_RUNNING
