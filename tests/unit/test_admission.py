"""The gate: closed for whatever is not known, open only while serving provably idles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.core.admission import LEASE_NS_MAX, TOKENS_FLOOR, AdmissionGate
from rose.core.readings import NEVER, GateMode, GatePolicy, GateReason, SlackReading, Unknown
from rose.units import NS_PER_S, ms_to_ns

NOW_NS = 100 * NS_PER_S
ALIVE_NS = NOW_NS + NS_PER_S
IDLE = SlackReading(**dict.fromkeys(SlackReading._fields, 0))._replace(
    stamp_ns=NOW_NS, ttft_deadline_ns=NEVER, tpot_deadline_ns=NEVER
)
STRICT = GatePolicy(
    revision=1,
    mode=GateMode.STRICT,
    token_cap=512,
    kv_budget_blocks=0,
    rl_step=1,
    alive_until_ns=ALIVE_NS,
    ttft_slo_ns=ms_to_ns(250),
    tpot_slo_ns=ms_to_ns(60),
    margin_ns=ms_to_ns(5),
)
SLACK = STRICT._replace(mode=GateMode.SLACK)
unknowns = st.builds(Unknown, st.text(max_size=12), st.none() | st.integers())
modes_that_obey_serving = st.sampled_from([GateMode.CLOSED, GateMode.STRICT, GateMode.SLACK])


def gate() -> AdmissionGate:
    return AdmissionGate(step_tokens_max=2048)


def calibrated(token_ms: float, base_ms: float = 0) -> AdmissionGate:
    made = gate()
    for tokens in (1, 2, 8, 32, 64, 128, 256, 512):
        made.observe_step(tokens, ms_to_ns(base_ms + tokens * token_ms))
    return made


@pytest.mark.parametrize("mode", [GateMode.STRICT, GateMode.SLACK])
def test_opens_beside_an_idle_serving_engine(mode: GateMode) -> None:
    admission = gate().decide(IDLE, STRICT._replace(mode=mode), NOW_NS)
    assert admission == (512, ALIVE_NS, GateReason.OPEN_IDLE)
    assert admission.open


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"waiting": 1}, GateReason.SERVING_WAITING),
        ({"waiting": 1, "running": 3}, GateReason.SERVING_WAITING),
        ({"running": 1}, GateReason.SERVING_RUNNING),
        ({"in_step": 1}, GateReason.SERVING_RUNNING),
        ({"waiting": -1}, GateReason.BOARD_UNKNOWN),
        ({"running": -1}, GateReason.BOARD_UNKNOWN),
        ({"in_step": 7}, GateReason.BOARD_UNKNOWN),
        ({"stamp_ns": NOW_NS + 5 * NS_PER_S}, GateReason.CLOCK_JUMPED),
    ],
)
def test_serving_with_anything_to_do_closes_the_gate(change: dict[str, int], reason: GateReason) -> None:
    admission = gate().decide(IDLE._replace(**change), STRICT, NOW_NS)
    assert admission.reason == reason
    assert not admission.open


@given(unknowns, modes_that_obey_serving, st.integers(0, 1 << 60))
def test_an_unknown_board_closes_the_gate(unknown: Unknown, mode: GateMode, now_ns: int) -> None:
    policy = STRICT._replace(mode=mode, alive_until_ns=now_ns + NS_PER_S)
    assert not gate().decide(unknown, policy, now_ns).open


@given(unknowns, st.sampled_from([IDLE, Unknown("board_missing")]))
def test_an_unknown_policy_closes_the_gate(unknown: Unknown, slack: SlackReading | Unknown) -> None:
    asked = gate()
    asked.decide(IDLE, STRICT, NOW_NS)
    assert asked.decide(slack, unknown, NOW_NS) == (0, NEVER, GateReason.POLICY_UNKNOWN)


@pytest.mark.parametrize("change", [{"mode": 4}, {"mode": -1}, {"token_cap": -1}])
def test_a_policy_nobody_understands_closes_the_gate(change: dict[str, int]) -> None:
    assert gate().decide(IDLE, STRICT._replace(**change), NOW_NS).reason == GateReason.POLICY_UNKNOWN


@pytest.mark.parametrize("mode", [GateMode.STRICT, GateMode.SLACK, GateMode.OPEN])
def test_a_dead_rosed_closes_the_gate_beside_serving(mode: GateMode) -> None:
    asked, policy = gate(), STRICT._replace(mode=mode)
    assert asked.decide(IDLE, policy, ALIVE_NS - 1).open
    assert asked.decide(IDLE, policy, ALIVE_NS).reason == GateReason.ROSED_GONE


@pytest.mark.parametrize("mode", [GateMode.STRICT, GateMode.SLACK, GateMode.OPEN])
def test_a_lease_longer_than_any_rosed_gives_means_that_the_clock_moved(mode: GateMode) -> None:
    policy = STRICT._replace(mode=mode, alive_until_ns=NOW_NS + LEASE_NS_MAX + 1)
    admission = gate().decide(IDLE, policy, NOW_NS)
    assert admission == (0, NOW_NS + 1, GateReason.CLOCK_JUMPED)
    assert gate().decide(IDLE, policy, admission.valid_until_ns).open


def test_open_mode_ignores_serving() -> None:
    policy = STRICT._replace(mode=GateMode.OPEN)
    for slack in (IDLE._replace(waiting=5, running=9), Unknown("board_stale")):
        assert gate().decide(slack, policy, NOW_NS) == (512, ALIVE_NS, GateReason.OPEN_FORCED)


def test_the_operator_closes_any_replica() -> None:
    policy = STRICT._replace(mode=GateMode.CLOSED)
    for slack in (IDLE, None, Unknown("board_missing")):
        assert gate().decide(slack, policy, NOW_NS).reason == GateReason.CLOSED_BY_OPERATOR


@pytest.mark.parametrize("mode", [GateMode.STRICT, GateMode.SLACK, GateMode.OPEN])
def test_a_dedicated_replica_outlives_its_rosed(mode: GateMode) -> None:
    asked = gate()
    assert asked.decide(None, Unknown("board_missing"), NOW_NS).reason == GateReason.POLICY_UNKNOWN
    assert asked.decide(None, STRICT._replace(mode=mode), NOW_NS).open
    assert asked.decide(None, STRICT._replace(mode=mode), ALIVE_NS + NS_PER_S).open
    assert asked.decide(None, Unknown("owner_gone"), ALIVE_NS + NS_PER_S).open


def test_a_dedicated_replica_closed_by_the_operator_stays_closed_without_rosed() -> None:
    asked = gate()
    asked.decide(None, STRICT._replace(mode=GateMode.CLOSED), NOW_NS)
    assert not asked.decide(None, Unknown("owner_gone"), NOW_NS).open


def test_without_a_cap_the_engine_s_own_limit_applies() -> None:
    assert gate().decide(IDLE, STRICT._replace(token_cap=0), NOW_NS).tokens == 2048
    assert gate().decide(IDLE, STRICT._replace(token_cap=9999), NOW_NS).tokens == 2048


def test_steps_are_no_longer_than_a_new_arrival_could_bear() -> None:
    """250 ms budget - 100 ms prefill - 5 ms margin leaves 145 ms, at 1 ms a token."""
    slack = IDLE._replace(prefill_p99_ns=ms_to_ns(100))
    assert calibrated(token_ms=1).decide(slack, SLACK, NOW_NS).tokens in {144, 145}
    predicted = slack._replace(prefill_predicted_ns=ms_to_ns(200))
    assert calibrated(token_ms=1).decide(predicted, SLACK, NOW_NS).tokens in {44, 45}


def test_strict_steps_are_felt_less_than_the_budget_would_allow() -> None:
    """12% of 250 ms, whatever the steps' error; what is predicted counts, not what was suffered."""
    assert calibrated(token_ms=0.1).decide(IDLE, STRICT, NOW_NS).tokens in range(295, 305)
    suffered = IDLE._replace(prefill_p99_ns=ms_to_ns(281), prefill_predicted_ns=ms_to_ns(60))
    assert calibrated(token_ms=0.1).decide(suffered, STRICT, NOW_NS).tokens in range(295, 305)
    assert calibrated(token_ms=0.1).decide(suffered, SLACK, NOW_NS).tokens == 512
    late = IDLE._replace(prefill_predicted_ns=ms_to_ns(235))
    assert calibrated(token_ms=0.1).decide(late, STRICT, NOW_NS).tokens in range(95, 105)


def test_the_margin_follows_what_steps_outlast_their_prediction_by() -> None:
    unsteady = calibrated(token_ms=1)
    steady_tokens = unsteady.decide(IDLE, SLACK, NOW_NS).tokens
    for index in range(300):
        for tokens in (1, 8, 64, 512):
            unsteady.observe_step(tokens, ms_to_ns(tokens + (100 if index % 5 == 0 else 0)))
    assert unsteady.decide(IDLE, SLACK, NOW_NS).tokens < steady_tokens - 50


def test_the_bound_never_falls_below_the_floor_but_the_policy_s_cap_may() -> None:
    slow = calibrated(token_ms=50)
    assert slow.decide(IDLE, STRICT, NOW_NS).tokens == TOKENS_FLOOR
    assert slow.decide(IDLE._replace(prefill_p99_ns=NS_PER_S), STRICT, NOW_NS).tokens == TOKENS_FLOOR
    assert slow.decide(IDLE, STRICT._replace(token_cap=4), NOW_NS).tokens == 4


def test_a_dedicated_replica_is_not_bounded_by_a_ttft_that_is_not_its_own() -> None:
    assert calibrated(token_ms=50).decide(None, STRICT, NOW_NS).tokens == 512


@pytest.mark.parametrize("limits", [{"step_tokens_max": 0}, {"step_tokens_max": 9, "tokens_floor": 0}])
def test_limits_must_be_positive(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        AdmissionGate(**limits)


@given(
    st.builds(
        SlackReading, *[st.integers(-2, 3) | st.integers(-(1 << 62), 1 << 62) for _ in SlackReading._fields]
    ),
    st.builds(
        GatePolicy, *[st.integers(-2, 3) | st.integers(-(1 << 62), 1 << 62) for _ in GatePolicy._fields]
    ),
    st.integers(0, 1 << 62),
)
def test_beside_serving_an_open_gate_means_provably_idle(
    slack: SlackReading, policy: GatePolicy, now_ns: int
) -> None:
    admission = gate().decide(slack, policy, now_ns)
    assert 0 <= admission.tokens <= 2048
    if admission.open:
        assert now_ns < policy.alive_until_ns <= now_ns + LEASE_NS_MAX
        assert policy.mode == GateMode.OPEN or (slack.waiting, slack.running, slack.in_step) == (0, 0, 0)


@pytest.mark.parametrize("reason", [GateReason.MEMORY_UNKNOWN, GateReason.DEVICE_TROUBLE])
@pytest.mark.parametrize("slack", [IDLE, None])
def test_a_gate_that_rosed_closed_says_why(reason: GateReason, slack: SlackReading | None) -> None:
    policy = STRICT._replace(mode=GateMode.CLOSED, closed_reason=reason)
    assert gate().decide(slack, policy, NOW_NS) == (0, NEVER, reason)
    later = policy._replace(closed_reason=999)
    assert gate().decide(slack, later, NOW_NS).reason is GateReason.CLOSED_BY_OPERATOR
