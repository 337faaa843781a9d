"""What capacity a job may expect: the estimate, and whether its interval keeps what it promises."""

from __future__ import annotations

import random

import pytest

from rose.core.forecast import COVERAGE, SAMPLE_S, Capacity, CapacityHistory, Estimate, estimate
from rose.units import NS_PER_S, JobId

J = JobId("j")
STEP_NS = int(SAMPLE_S * NS_PER_S)


def lent(rng: random.Random, count: int, replicas: int = 6, stay: float = 0.98) -> list[float]:
    """Slots of replicas that serving lends and takes back, each by itself; 16 a replica."""
    up = [rng.random() < 0.5 for _ in range(replicas)]
    found = []
    for _ in range(count):
        up = [each if rng.random() < stay else not each for each in up]
        found.append(16.0 * sum(up))
    return found


def test_what_never_changes_is_expected_to_stay() -> None:
    assert estimate([32.0] * 200, 12, 64) == Estimate(32.0, 32.0, 32.0, pytest.approx(0.8))


@pytest.mark.parametrize("length", [1, 12, 40])
def test_intervals_hold_what_they_promise(length: int) -> None:
    rng = random.Random(7)
    held, promised, runs = 0, 0.0, 300
    for _ in range(runs):
        series = lent(rng, 720 + length)
        found = estimate(series[:720], length, 96)
        truth = sum(series[720:]) / length
        assert found.high is not None
        held += found.low <= truth <= found.high
        promised += found.coverage
    assert held / runs >= promised / runs - 0.08  # three standard errors of 300 runs


def test_a_short_history_promises_less_and_none_promises_only_what_can_be() -> None:
    rng = random.Random(3)
    series = lent(rng, 720)
    coverages = []
    for count in (0, 1, 12, 30, 60, 130, 720):
        found = estimate(series[720 - count :], 12, 96)
        coverages.append(found.coverage)
        assert found.expected is None or (
            found.high is not None and found.low <= found.expected <= found.high
        )
    assert estimate([], 12, 96) == Estimate(None, 0.0, 96, 1.0)
    assert coverages[:4] == [1.0, 1.0, 1.0, 1.0]  # bounds
    assert coverages[4] < coverages[5] <= coverages[6] == COVERAGE
    assert (estimate(series[:12], 12, 96).low, estimate(series[:12], 12, 96).high) == (0.0, 96)


def test_the_estimate_stays_within_what_the_job_asked_for() -> None:
    rising = [float(value) for value in range(100)]
    found = estimate(rising, 5, 99)
    assert found.expected == 99
    assert found.high == 99
    assert estimate(rising[::-1], 5, 99).low == 0


def test_idle_times_tell_nothing_of_the_pace() -> None:
    history = CapacityHistory()
    tokens = 0
    for number in range(200):
        busy = number % 40 < 30
        history.note(number * STEP_NS, [(J, Capacity(16, 0, 8 if busy else 0, tokens))])
        tokens += 500 if busy else 0
    found = history.forecast(J, 60, 16, 0)
    assert found.tokens_per_s.expected == pytest.approx(500 / SAMPLE_S)
    assert (found.tokens_per_s.low, found.tokens_per_s.high) == (pytest.approx(100), pytest.approx(100))
    assert found.history_s == 200 * SAMPLE_S
    assert found.slots.expected == 16
    assert found.borrowed_slots == Estimate(0.0, 0.0, 0.0, COVERAGE)


def test_times_at_which_nobody_looked_are_unseen() -> None:
    history = CapacityHistory()
    for second in (0, 5, 10, 600, 605, 610):
        history.note(second * NS_PER_S, [(J, Capacity(16, 16, 1, 10 * second))])
    found = history.forecast(J, 60, 32, 16)
    assert found.history_s == 123 * SAMPLE_S
    assert found.slots.expected == 32
    assert found.slots.coverage == 1.0  # no stretch of a minute was seen


def test_a_job_that_ended_is_forgotten_and_one_of_its_name_begins_anew() -> None:
    history = CapacityHistory()
    history.note(0, [(J, Capacity(16, 0, 1, 1000))])
    history.note(STEP_NS, [])
    assert history.forecast(J, 60, 16, 0).history_s == 0
    history.note(2 * STEP_NS, [(J, Capacity(16, 0, 1, 5))])
    history.note(3 * STEP_NS, [(J, Capacity(16, 0, 1, 1))])  # counted anew
    found = history.forecast(J, 60, 16, 0)
    assert (found.history_s, found.tokens_per_s.expected) == (10, None)
