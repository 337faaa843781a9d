"""Budgets and the slack tracker: every deadline equals what a full scan would say."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.core.readings import NEVER
from rose.core.slo import QUEUE_SCAN_MAX, SlackTracker, SloBudgets, SloTable
from rose.units import ms_to_ns

BUDGETS = SloBudgets(ttft_ns=ms_to_ns(250), tpot_ns=ms_to_ns(60))
PREMIUM = SloBudgets(ttft_ns=ms_to_ns(100), tpot_ns=ms_to_ns(30))
SMALL_PREMIUM = SloBudgets(ttft_ns=ms_to_ns(150), tpot_ns=ms_to_ns(40))
BATCH = SloBudgets(ttft_ns=ms_to_ns(2000), tpot_ns=ms_to_ns(200))


def ms(value: float) -> int:
    return ms_to_ns(value)


def tracker_with(*request_ids: str, at_ns: int = 0) -> SlackTracker:
    tracker = SlackTracker(BUDGETS)
    for request_id in request_ids:
        tracker.arrived(request_id, at_ns, 10)
    return tracker


@pytest.mark.parametrize(("ttft_ns", "tpot_ns"), [(0, 1), (1, 0), (-5, 1)])
def test_budgets_must_be_positive(ttft_ns: int, tpot_ns: int) -> None:
    with pytest.raises(ValueError, match="above 0"):
        SloBudgets(ttft_ns, tpot_ns)


def test_no_request_has_no_deadline() -> None:
    tracker = SlackTracker(BUDGETS)
    assert tracker.ttft_deadline_ns() == NEVER
    assert tracker.tpot_deadline_ns() == NEVER
    assert tracker.prefill_p99_ns() == 0


def test_first_token_is_due_a_budget_after_the_earliest_arrival() -> None:
    tracker = SlackTracker(BUDGETS)
    tracker.arrived("late", ms(40), 10)
    tracker.arrived("early", ms(10), 10)
    assert tracker.ttft_deadline_ns() == ms(260)
    tracker.produced("early", ms(100), 1)
    assert tracker.ttft_deadline_ns() == ms(290)


def test_scheduling_a_prefill_does_not_end_its_ttft_deadline() -> None:
    tracker = tracker_with("a")
    tracker.scheduled("a", ms(5))
    assert tracker.ttft_deadline_ns() == ms(250)


def test_decode_is_due_by_the_mean_pace() -> None:
    tracker = tracker_with("a")
    tracker.produced("a", ms(100), 1)
    assert tracker.tpot_deadline_ns() == ms(160)
    tracker.produced("a", ms(150), 1)
    assert tracker.tpot_deadline_ns() == ms(220)


def test_saved_time_never_excuses_a_gap_beyond_two_budgets() -> None:
    tracker = tracker_with("a")
    for step in range(20):
        tracker.produced("a", ms(100 + step), 1)
    assert tracker.tpot_deadline_ns() == ms(119 + 120)


def test_the_longest_silent_of_fast_requests_is_due_first() -> None:
    tracker = tracker_with("a", "b")
    tracker.produced("a", ms(100), 1)
    tracker.produced("b", ms(100), 1)
    for name, at_ms in (("b", 101), ("a", 102), ("b", 103), ("a", 140)):
        tracker.produced(name, ms(at_ms), 10)
    assert tracker.tpot_deadline_ns() == ms(103 + 120)


def test_several_tokens_of_one_step_all_count() -> None:
    tracker = tracker_with("a")
    tracker.produced("a", ms(100), 1)
    tracker.produced("a", ms(130), 2)
    assert tracker.tpot_deadline_ns() == min(ms(100 + 3 * 60), ms(130 + 120))


def test_finished_requests_leave_no_deadline_behind() -> None:
    tracker = tracker_with("a", "b")
    tracker.produced("a", ms(10), 1)
    tracker.finished("a")
    tracker.finished("b")
    assert tracker.ttft_deadline_ns() == NEVER
    assert tracker.tpot_deadline_ns() == NEVER
    assert len(tracker) == 0
    assert tracker.pending_prefill_tokens == 0


def test_unknown_requests_and_repeated_calls_change_nothing() -> None:
    tracker = tracker_with("a")
    tracker.scheduled("ghost", ms(1))
    tracker.produced("ghost", ms(1), 1)
    tracker.finished("ghost")
    tracker.arrived("a", ms(99), 500)
    tracker.scheduled("a", ms(10))
    tracker.scheduled("a", ms(90))
    tracker.produced("a", ms(100), 0)
    assert tracker.ttft_deadline_ns() == ms(250)
    assert tracker.pending_prefill_tokens == 10
    tracker.produced("a", ms(110), 1)
    assert tracker.prefill_p99_ns() == ms(100)


def test_prefill_quantile_forgets_the_distant_past() -> None:
    tracker = SlackTracker(BUDGETS)
    for index in range(300):
        name, start_ns = f"r{index}", ms(1000 * index)
        tracker.arrived(name, start_ns, 1)
        tracker.scheduled(name, start_ns)
        tracker.produced(name, start_ns + ms(900 if index == 0 else 20), 1)
        tracker.finished(name)
        assert tracker.prefill_p99_ns() == ms(900 if index < 99 else 20)


def test_a_clock_that_runs_backwards_does_not_move_deadlines_back() -> None:
    tracker = tracker_with("a", "b")
    tracker.produced("a", ms(100), 1)
    tracker.produced("b", ms(50), 1)
    assert tracker.tpot_deadline_ns() == ms(160)


def test_a_reused_id_is_a_new_request() -> None:
    tracker = tracker_with("a")
    for step in range(50):
        tracker.produced("a", ms(step), 1)
    tracker.finished("a")
    tracker.arrived("a", ms(100), 10)
    assert tracker.ttft_deadline_ns() == ms(350)
    tracker.produced("a", ms(120), 1)
    assert tracker.tpot_deadline_ns() == ms(180)


def test_memory_stays_bounded_while_one_request_waits_for_ever() -> None:
    tracker = tracker_with("waits")
    tracker.arrived("decodes", 0, 1)
    tracker.produced("decodes", 0, 1)
    for index in range(5000):
        tracker.arrived(f"r{index}", ms(index + 1), 1)
        tracker.produced(f"r{index}", ms(index + 2), 1)
        tracker.finished(f"r{index}")
    assert tracker.ttft_deadline_ns() == ms(250)
    assert len(tracker._ttft_heap) < 200
    assert len(tracker._paces[BUDGETS.tpot_ns]._heap) < 200


# ---- deadlines reduced by predicted time ----------------------------------------------------------


def steady(tracker: SlackTracker) -> SlackTracker:
    """A prefill token takes 1 ms, a decode step 10 ms and 1 ms a sequence, both to the nanosecond."""
    for tokens in (1, 2, 8, 32, 64, 128, 256, 512):
        tracker.observe_step(tokens, 0, ms(tokens))
        tracker.observe_step(0, tokens, ms(10 + tokens))
    return tracker


def near(value_ns: int, expected_ms: float) -> bool:
    return abs(value_ns - ms(expected_ms)) < 1000


def test_a_prefill_s_deadline_is_reduced_by_the_whole_queue_ahead() -> None:
    tracker = steady(SlackTracker(BUDGETS))
    for number, (arrival_ms, tokens) in enumerate([(0, 30), (1, 40), (2, 50)]):
        tracker.arrived(f"r{number}", ms(arrival_ms), tokens)
    assert near(tracker.ttft_deadline_ns(), 2 + 250 - (30 + 40 + 50))
    tracker.finished("r1")
    assert near(tracker.ttft_deadline_ns(), 2 + 250 - (30 + 50))
    tracker.produced("r0", ms(40), 1)
    assert near(tracker.ttft_deadline_ns(), 2 + 250 - 50)


def test_what_is_cached_or_computed_no_longer_counts() -> None:
    tracker = steady(SlackTracker(BUDGETS))
    tracker.arrived("a", 0, 100)
    tracker.scheduled("a", ms(1), 30)
    assert tracker.pending_prefill_tokens == 70
    tracker.scheduled("a", ms(1), 30)
    tracker.prefilled("a", 50)
    assert (tracker.pending_prefill_tokens, list(tracker.prefilling)) == (20, ["a"])
    assert near(tracker.ttft_deadline_ns(), 250 - 20)
    tracker.prefilled("a", 999)
    assert tracker.pending_prefill_tokens == 0
    tracker.produced("a", ms(60), 1)
    tracker.prefilled("a", 5)
    assert (tracker.pending_prefill_tokens, len(tracker.prefilling)) == (0, 0)


def test_prompts_longer_than_a_step_take_several() -> None:
    tracker = steady(SlackTracker(BUDGETS, step_tokens_max=64))
    for tokens in (1, 2, 8, 32, 64):
        tracker.observe_step(tokens, 0, ms(20 + tokens))
    predicted_ns = tracker.latency.prefill_ns(150)
    model = tracker.latency.prefill.model()
    assert predicted_ns == 2 * model.predict_ns(64) + model.predict_ns(22)


def test_a_decode_s_deadline_is_reduced_by_the_step_of_the_batch() -> None:
    tracker = steady(tracker_with("a", "b"))
    tracker.produced("a", ms(100), 1)
    assert near(tracker.tpot_deadline_ns(), 160 - 11)
    tracker.produced("b", ms(110), 1)
    assert near(tracker.tpot_deadline_ns(), 160 - 12)
    assert near(tracker.slack().decode_predicted_ns, 12)


def test_a_new_arrival_is_expected_to_have_a_long_prompt() -> None:
    tracker = steady(SlackTracker(BUDGETS))
    assert tracker.prefill_p99_predicted_ns() == 0
    for number in range(200):
        tracker.arrived(f"r{number}", 0, 90 if number == 7 else 20)
    assert near(tracker.prefill_p99_predicted_ns(), 20)
    for number in range(2):
        tracker.arrived(f"long{number}", 0, 90)
    assert near(tracker.prefill_p99_predicted_ns(), 90)


def test_the_models_margins_are_taken_off_too() -> None:
    tracker = steady(tracker_with("a", "waits"))
    tracker.produced("a", ms(100), 1)
    steady_ns = tracker.slack()
    for number in range(200):
        tracker.observe_step(0, 1, ms(11 + (9 if number % 5 == 0 else 0)))
        tracker.observe_step(10, 0, ms(10 + (9 if number % 5 == 0 else 0)))
    assert tracker.latency.decode.model().margin_ns() > ms(3)
    assert tracker.slack().tpot_deadline_ns < steady_ns.tpot_deadline_ns - ms(3)
    assert tracker.slack().ttft_deadline_ns < steady_ns.ttft_deadline_ns - ms(3)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, ms(400)), st.integers(0, 600)), min_size=1, max_size=60),
    st.integers(1, 512),
)
def test_the_queue_s_deadline_is_never_later_than_the_exact_one(
    queue: list[tuple[int, int]], step_tokens_max: int
) -> None:
    tracker = steady(SlackTracker(BUDGETS, step_tokens_max))
    exact_ns, ahead = NEVER, 0
    for number, (arrival_ns, tokens) in enumerate(queue):
        tracker.arrived(f"r{number}", arrival_ns, tokens)
        ahead += tokens
        exact_ns = min(exact_ns, arrival_ns + BUDGETS.ttft_ns - tracker.latency.prefill_ns(ahead))
    exact_ns -= tracker.latency.prefill.model().margin_ns()
    assert tracker.ttft_deadline_ns() <= exact_ns
    assert len(queue) > QUEUE_SCAN_MAX or tracker.ttft_deadline_ns() == exact_ns


@settings(deadline=None)
@given(st.lists(st.sampled_from(["round", "one", "new", "end", "several"]), max_size=80), st.randoms())
def test_a_round_equals_a_token_for_each(calls: list[str], chance: random.Random) -> None:
    by_round, one_by_one = SlackTracker(BUDGETS), SlackTracker(BUDGETS)
    decoding: list[str] = []
    now_ns = 0
    for number, call in enumerate(calls):
        now_ns += chance.randrange(ms(100))
        if call == "round":
            by_round.round_produced(now_ns)
            for each in decoding:
                one_by_one.produced(each, now_ns, 1)
            continue
        name = chance.choice(decoding) if decoding else "none"
        if call == "new":
            name = f"r{number}"
            decoding.append(name)
        elif call == "end" and decoding:
            decoding.remove(name)
        budgets = (BUDGETS, PREMIUM, BATCH)[number % 3]
        for tracker in (by_round, one_by_one):
            if call == "end":
                tracker.finished(name)
                continue
            if call == "new":
                tracker.arrived(name, now_ns, 1, budgets)
            tracker.produced(name, now_ns, 5 if call == "several" else 1)
        assert by_round.tpot_deadline_ns() == one_by_one.tpot_deadline_ns()
    assert by_round.tpot_deadline_ns() == one_by_one.tpot_deadline_ns()
    assert by_round.slack() == one_by_one.slack()


class ScanningTracker:
    """The same rules by a full scan: the oracle."""

    def __init__(self) -> None:
        self.requests: dict[str, list[int]] = {}  # arrival, first, last, tokens
        self.budgets: dict[str, SloBudgets] = {}

    def ttft_deadline_ns(self) -> int:
        waiting = {name: r[0] for name, r in self.requests.items() if not r[3]}
        return min((at_ns + self.budgets[name].ttft_ns for name, at_ns in waiting.items()), default=NEVER)

    def tpot_deadline_ns(self) -> int:
        return min(
            (
                min(r[1] + r[3] * self.budgets[name].tpot_ns, r[2] + 2 * self.budgets[name].tpot_ns)
                for name, r in self.requests.items()
                if r[3]
            ),
            default=NEVER,
        )


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("apppf"),
            st.integers(0, 6),
            st.integers(0, ms(200)) | st.integers(0, ms(2)),
            st.integers(1, 4) | st.just(50),
        ),
        max_size=120,
    )
)
def test_deadlines_equal_a_full_scan(calls: list[tuple[str, int, int, int]]) -> None:
    tracker, oracle, now_ns = SlackTracker(BUDGETS), ScanningTracker(), 0
    for call, number, elapsed_ns, tokens in calls:
        name = f"r{number}"
        now_ns += elapsed_ns
        if call == "a":
            budgets = (BUDGETS, PREMIUM, BATCH)[(number + tokens) % 3]
            tracker.arrived(name, now_ns - elapsed_ns // 2, tokens, budgets)
            if name not in oracle.requests:
                oracle.budgets[name] = budgets
            oracle.requests.setdefault(name, [now_ns - elapsed_ns // 2, 0, 0, 0])
        elif call == "p":
            tracker.produced(name, now_ns, tokens)
            if name in oracle.requests:
                known = oracle.requests[name]
                known[1:] = [known[1] if known[3] else now_ns, now_ns, known[3] + tokens]
        else:
            tracker.finished(name)
            oracle.requests.pop(name, None)
        assert tracker.ttft_deadline_ns() == oracle.ttft_deadline_ns()
        assert tracker.tpot_deadline_ns() == oracle.tpot_deadline_ns()


# ---- request classes ------------------------------------------------------------------------------

TABLE = SloTable(
    BUDGETS, {"premium": PREMIUM, "batch": BATCH, "small/": BATCH, "small/premium": SMALL_PREMIUM}
)


@pytest.mark.parametrize(
    ("slo_class", "model", "budgets"),
    [
        ("", "", BUDGETS),
        ("premium", "", PREMIUM),
        ("premium", "large", PREMIUM),
        ("premium", "small", SMALL_PREMIUM),
        ("batch", "small", BATCH),
        ("", "small", BATCH),
        ("unknown", "small", BATCH),
        ("unknown", "", BUDGETS),
        ("small/premium", "", BUDGETS),
        ("", "premium", BUDGETS),
    ],
)
def test_budgets_by_class_and_model(slo_class: str, model: str, budgets: SloBudgets) -> None:
    assert TABLE.budgets(slo_class, model) == budgets


def test_only_configured_classes_are_known() -> None:
    known = [
        name for name in ("", "premium", "batch", "small", "small/premium", "Premium") if TABLE.knows(name)
    ]
    assert known == ["premium", "batch"]
    assert not SloTable(BUDGETS).knows("premium")


def test_an_arrival_may_be_of_the_most_demanding_class() -> None:
    assert SloTable(BUDGETS).tightest_ttft_ns == ms(250)
    assert TABLE.tightest_ttft_ns == ms(100)


def test_a_demanding_request_makes_the_deadlines_and_a_patient_one_does_not() -> None:
    tracker = tracker_with("default")
    tracker.arrived("batch", 0, 10, BATCH)
    assert tracker.ttft_deadline_ns() == ms(250)
    tracker.arrived("premium", ms(20), 10, PREMIUM)
    assert tracker.ttft_deadline_ns() == ms(120)
    for name in ("default", "batch", "premium"):
        tracker.produced(name, ms(100), 1)
    assert tracker.tpot_deadline_ns() == ms(130)
    tracker.finished("premium")
    assert tracker.tpot_deadline_ns() == ms(160)
    tracker.finished("default")
    assert (tracker.tpot_deadline_ns(), tracker.decoding) == (ms(300), 1)
    tracker.finished("batch")
    assert (tracker.tpot_deadline_ns(), tracker.decoding) == (NEVER, 0)
