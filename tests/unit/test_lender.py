"""The lender: harm by replay, its error budget, and what stops lending."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.core.attribution import Cause, Span
from rose.core.harm import BUCKET_NS, JUDGE_AFTER_NS, STEPS_KEPT_NS, BudgetSettings, Counts, ErrorBudget, Jury
from rose.core.hours import Hours
from rose.core.lender import Lender, LenderSettings, Mode
from rose.core.readings import GateReason, ServedRequest, StepRecord
from rose.core.switchback import SwitchbackSettings, Window
from rose.core.takeback import DrillSettings
from rose.units import NS_PER_MS, NS_PER_S

MS = NS_PER_MS
TTFT, TPOT = 100 * MS, 10 * MS
MONDAY_NOON = 12 * 60
_numbers = count(1)


def request(arrival: int, first: int, last: int, tokens: int = 1) -> ServedRequest:
    """Times in milliseconds; budgets of 100 ms and 10 ms a token."""
    return ServedRequest(next(_numbers), arrival * MS, first * MS, last * MS, tokens, TTFT, TPOT)


def step(start: int, end: int) -> StepRecord:
    return StepRecord(0, start * MS, end * MS, 1)


IN_TIME = (100, 150, 240, 10)
LATE_FIRST = (100, 220, 230, 2)
"""20 ms over."""
LATE_TOKENS = (100, 150, 250, 10)
"""10 ms over."""
NO_TOKEN = (100, 0, 220, 0)
"""Given up after 120 ms."""


@pytest.mark.parametrize(
    ("times", "steps", "cause", "budget"),
    [
        (IN_TIME, [(100, 240)], None, ""),
        ((100, 0, 199, 0), [(100, 199)], None, ""),
        (LATE_FIRST, [], Cause.SERVING, "ttft"),
        (LATE_FIRST, [(90, 119), (230, 300)], Cause.SERVING, "ttft"),
        (LATE_FIRST, [(90, 120)], Cause.ROLLOUT, "ttft"),
        (LATE_FIRST, [(110, 118), (150, 162)], Cause.ROLLOUT, "ttft"),
        (LATE_TOKENS, [(100, 150)], Cause.SERVING, "tpot"),
        (LATE_TOKENS, [(200, 210)], Cause.ROLLOUT, "tpot"),
        (NO_TOKEN, [(110, 130)], Cause.ROLLOUT, "ttft"),
        ((100, 220, 400, 10), [(300, 390)], Cause.ROLLOUT, "tpot"),
    ],
)
def test_who_made_a_request_late(
    times: tuple[int, int, int, int], steps: list[tuple[int, int]], cause: Cause | None, budget: str
) -> None:
    jury = Jury(0)
    jury.logged(step(*each) for each in steps)
    jury.served([request(*times)], times[2] * MS)
    assert jury.judge(times[2] * MS + JUDGE_AFTER_NS - 1) == [], "a step beside it may not be logged yet"
    (judged,) = jury.judge(times[2] * MS + JUDGE_AFTER_NS)
    assert (judged.blame.cause if judged.blame else None, judged.budget) == (cause, budget)
    assert jury.judge(10**15) == []


def test_what_nobody_logged_may_be_rollouts_fault() -> None:
    jury = Jury(0)
    jury.gap(Span(150 * MS, 160 * MS))
    jury.gap(Span(160 * MS, 170 * MS))
    jury.served([request(*LATE_FIRST), request(500, 620, 630, 2)], NS_PER_S)
    here, elsewhere = jury.judge(NS_PER_S * 10)
    assert here.blame is not None
    assert elsewhere.blame is not None
    assert (here.blame.cause, here.harmed) == (Cause.UNKNOWN, True)
    assert (elsewhere.blame.cause, elsewhere.harmed) == (Cause.SERVING, False)


def test_requests_from_before_are_nobodys() -> None:
    jury = Jury(101 * MS)
    jury.served([request(*LATE_FIRST), request(*IN_TIME)], NS_PER_S)
    assert jury.judge(NS_PER_S * 10) == []


def test_steps_are_known_for_a_while_only() -> None:
    jury, end = Jury(0), STEPS_KEPT_NS // MS + 10_000
    jury.served([request(100, end, end, 1)._replace(ttft_budget_ns=(end - 1000) * MS)], end * MS)
    (judged,) = jury.judge((end + 5000) * MS)
    assert judged.blame is not None
    assert judged.blame.cause is Cause.UNKNOWN


def test_ranks_count_their_requests_alike() -> None:
    jury = Jury(0)
    late, in_time = (request(*times)._replace(number=7) for times in (LATE_FIRST, IN_TIME))
    jury.served([late, in_time], NS_PER_S)
    first, second = jury.judge(10 * NS_PER_S)
    assert first.blame is not None
    assert second.blame is None


def test_a_request_that_ends_in_the_future_holds_up_no_other() -> None:
    jury = Jury(0)
    jury.served([request(100, 10**9, 10**9), request(*IN_TIME)], NS_PER_S)
    assert [each.request.tokens for each in jury.judge(10 * NS_PER_S)] == [10]
    assert jury.dropped == 1


# ---- the error budget ---------------------------------------------------------------------------


def budget(**fields: float) -> ErrorBudget:
    return ErrorBudget(BudgetSettings(**fields))  # type: ignore[arg-type]


def test_a_few_are_allowed_in_any_case_and_then_the_share() -> None:
    subject = budget(share_max=0.01, requests_min=3)
    subject.add(Counts(10, rollout=2, unknown=1), 0)
    assert (subject.allowed, subject.spent) == (3, False)
    subject.add(Counts(1, rollout=1), 1)
    assert subject.spent
    subject.add(Counts(389), 2)
    assert (subject.allowed, subject.spent) == (4, False)
    subject.add(Counts(400, serving=300), 3)
    assert not subject.spent, "serving's own faults cost nothing"


def test_harm_is_forgotten_when_its_window_is_over() -> None:
    subject = budget(window_ns=10 * BUCKET_NS, requests_min=0)
    subject.add(Counts(1, rollout=1), 0)
    subject.advance(10 * BUCKET_NS - 1)
    assert subject.spent
    subject.advance(10 * BUCKET_NS)
    assert not subject.spent
    assert subject.counts == Counts()


def test_a_share_of_one_only_measures() -> None:
    subject = budget(share_max=1.0, requests_min=0)
    subject.add(Counts(10, rollout=10), 0)
    assert not subject.spent


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 4 * BUCKET_NS)), max_size=50))
def test_the_window_counts_what_is_in_it(history: list[tuple[int, int, int]]) -> None:
    subject, now_ns = budget(window_ns=10 * BUCKET_NS), 0
    seen: list[tuple[int, Counts]] = []
    for requests, rollout, elapsed_ns in history:
        now_ns += elapsed_ns
        counts = Counts(requests + rollout, rollout=rollout)
        seen.append((now_ns, counts))
        subject.add(counts, now_ns)
        inside = [each for at, each in seen if at // BUCKET_NS > (now_ns - 10 * BUCKET_NS) // BUCKET_NS]
        assert subject.counts.requests == sum(each.requests for each in inside)
        assert subject.counts.rollout == sum(each.rollout for each in inside)


# ---- what stops lending -------------------------------------------------------------------------


def lender(**fields: object) -> Lender:
    quiet = {"switchback": SwitchbackSettings(off_share=0), "drill": DrillSettings(period_ns=0)}
    return Lender(LenderSettings(**(quiet | fields)), random.Random(0), 0)  # type: ignore[arg-type]


def closed(subject: Lender, now_ns: int, minute: int = MONDAY_NOON) -> GateReason | None:
    return subject.decide(now_ns, minute)[0].closed


def harm(subject: Lender, requests: int, at_ms: int) -> int:
    """So many requests that rollout made late; answers when they are judged."""
    subject.steps([step(at_ms, at_ms + 120)])
    ended_ns = (at_ms + 120) * MS
    subject.served((request(at_ms, at_ms + 120, at_ms + 120) for _ in range(requests)), ended_ns)
    now_ns = (at_ms + 120) * MS + JUDGE_AFTER_NS
    assert sum(each.harmed for each in subject.judge(now_ns)) == requests
    return now_ns


def test_it_lends_until_the_budget_is_spent_and_again_when_it_is_not() -> None:
    subject = lender(budget=BudgetSettings(requests_min=3, window_ns=3600 * NS_PER_S))
    assert closed(subject, 0) is None
    assert closed(subject, harm(subject, 3, 1000)) is None
    spent_ns = harm(subject, 1, 2000)
    decision, _ = subject.decide(spent_ns, MONDAY_NOON)
    assert decision.closed is GateReason.ERROR_BUDGET_SPENT
    assert "4 were late because of rollout" in decision.text
    view = subject.view()
    assert (view.closed, view.late_by_rollout, view.budget_left_share) == ("error_budget_spent", 4, 0.0)
    assert closed(subject, spent_ns + 3500 * NS_PER_S) is GateReason.ERROR_BUDGET_SPENT
    assert closed(subject, spent_ns + 3700 * NS_PER_S) is None


def test_an_operator_who_knows_may_refill_it() -> None:
    subject = lender()
    now_ns = harm(subject, 50, 1000)
    assert closed(subject, now_ns) is GateReason.ERROR_BUDGET_SPENT
    subject.reset()
    assert closed(subject, now_ns) is None


def test_harm_that_no_log_tells_of_is_found_by_comparison() -> None:
    subject = lender()
    windows = [Window(at, at % 10 == 0, 100, 0 if at % 10 == 0 else 5) for at in range(500)]
    subject.switchback.restore(windows)
    decision, _ = subject.decide(0, MONDAY_NOON)
    assert decision.closed is GateReason.ERROR_BUDGET_SPENT
    assert "than in windows without" in decision.text
    watching = lender(budget=BudgetSettings(share_max=1.0))
    watching.switchback.restore(windows)
    assert closed(watching, 0) is None
    assert watching.view().late_more_with_rollout == pytest.approx(0.05)


def test_hours() -> None:
    subject = lender(hours=(Hours.parse("Mon-Fri 20:00-07:00"), Hours.parse("Sat 10:00-12:00")))
    assert closed(subject, 0, MONDAY_NOON) is GateReason.OUTSIDE_HOURS
    assert closed(subject, 1, 21 * 60) is None
    assert closed(subject, 2, 5 * 24 * 60 + 11 * 60) is None


def test_the_operators_switch_goes_before_everything() -> None:
    subject = lender(hours=(Hours.parse("00:00-01:00"),))
    subject.switched_off = True
    decision, _ = subject.decide(0, MONDAY_NOON)
    assert decision.closed is GateReason.LENDING_OFF
    assert "rose lend on" in decision.text


def test_who_observes_lends_nothing_and_measures() -> None:
    subject = lender(mode=Mode.OBSERVE, drill=DrillSettings(period_ns=1))
    for second in range(100):
        assert closed(subject, second * NS_PER_S) is GateReason.LENDING_OFF
        assert not subject.drill_due(second * NS_PER_S)
    harm(subject, 2, 200_000)
    assert subject.view().late_by_rollout == 2


def test_a_window_without_rollout_closes_for_its_time() -> None:
    window_ns = 10 * NS_PER_S
    subject = lender(switchback=SwitchbackSettings(off_share=0.5, window_ns=window_ns))
    reasons = [closed(subject, number * window_ns) for number in range(20)]
    assert reasons[0] is None
    assert reasons.count(GateReason.ROLLOUT_OFF_WINDOW) == 10


def test_windows_pass_only_while_somebody_is_lent_to() -> None:
    window_ns = 10 * NS_PER_S
    subject = lender(switchback=SwitchbackSettings(off_share=0.5, window_ns=window_ns))
    for number in range(20):
        decision, windows = subject.decide(number * window_ns, MONDAY_NOON, occupied=False)
        assert decision.lends, "it would"
        assert windows == []
    view = subject.view()
    assert (view.on_windows, view.off_windows) == (0, 0)


def test_other_settings_count_at_once_and_what_was_counted_stays() -> None:
    subject = lender()
    now_ns = harm(subject, 4, 1000)
    assert closed(subject, now_ns) is GateReason.ERROR_BUDGET_SPENT
    quiet = {"switchback": SwitchbackSettings(off_share=0), "drill": DrillSettings(period_ns=0)}
    subject.reconfigure(LenderSettings(budget=BudgetSettings(requests_min=4), **quiet))
    assert closed(subject, now_ns) is None
    assert subject.view().late_by_rollout == 4
    subject.reconfigure(LenderSettings(hours=(Hours.parse("00:00-01:00"),), **quiet))
    assert closed(subject, now_ns) is GateReason.ERROR_BUDGET_SPENT
    subject.reset()
    assert closed(subject, now_ns) is GateReason.OUTSIDE_HOURS
    subject.reconfigure(LenderSettings(mode=Mode.OBSERVE, **quiet))
    assert closed(subject, now_ns) is GateReason.LENDING_OFF


inputs = st.one_of(
    st.tuples(st.just("served"), st.integers(0, 400), st.integers(0, 400)),
    st.tuples(st.just("steps"), st.integers(0, 300), st.integers(1, 300)),
    st.tuples(st.just("gap"), st.integers(0, 300), st.integers(0, 300)),
    st.tuples(st.sampled_from(["off", "on", "reset", "drill"]), st.just(0), st.just(0)),
    st.tuples(st.just("wait"), st.integers(0, 100_000), st.just(0)),
)


@given(st.lists(inputs, max_size=60), st.integers(0, 2**32))
def test_it_never_lends_against_the_operator_or_beyond_the_budget(
    history: list[tuple[str, int, int]], seed: int
) -> None:
    settings = LenderSettings(
        budget=BudgetSettings(requests_min=1, window_ns=600 * NS_PER_S),
        switchback=SwitchbackSettings(off_share=0.5, window_ns=NS_PER_S),
        drill=DrillSettings(period_ns=NS_PER_S),
    )
    subject, now_ms = Lender(settings, random.Random(seed), 0), 0
    for what, one, other in history:
        now_ms += 500
        match what:
            case "served":
                first = now_ms - 500 + one
                subject.served([request(now_ms - 500, first, first + other, 5)], now_ms * MS)
            case "steps":
                subject.steps([step(now_ms - one, now_ms - one + other)])
            case "gap":
                subject.gap(Span((now_ms - one) * MS, (now_ms - one + other) * MS))
            case "off" | "on":
                subject.switched_off = what == "off"
            case "reset":
                subject.reset()
            case "drill":
                subject.take_back.measured(1, NS_PER_MS)
            case _:
                now_ms += one
        subject.judge(now_ms * MS)
        decision, _ = subject.decide(now_ms * MS, MONDAY_NOON)
        if decision.lends:
            assert not subject.switched_off
            assert subject.budget.counts.harmed <= subject.budget.allowed
            assert not subject.switchback.off
        else:
            assert not subject.drill_due(now_ms * MS)
        view = subject.view()
        late = view.late_by_rollout + view.late_by_unknown + view.late_by_serving
        assert 0 <= late <= view.requests


@pytest.mark.parametrize("fields", [{"share_max": 1.1}, {"requests_min": -1}, {"window_ns": NS_PER_S}])
def test_senseless_budgets_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="senseless"):
        budget(**fields)
