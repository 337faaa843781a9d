"""Blame for late requests: by the rule, and against worlds where the culprit is known."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.core.attribution import (
    Agreement,
    Cause,
    Coverage,
    Span,
    StepHistory,
    Wait,
    decode_wait,
    first_token_wait,
)
from rose.core.readings import StepRecord
from rose.units import NS_PER_MS

TTFT_NS, TPOT_NS = 250 * NS_PER_MS, 60 * NS_PER_MS


def steps(*spans: tuple[int, int]) -> list[StepRecord]:
    return [StepRecord(number, start, end, 1) for number, (start, end) in enumerate(spans)]


# ---- the rule -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overshoot", "cause"), [(30, Cause.ROLLOUT), (50, Cause.ROLLOUT), (51, Cause.SERVING)]
)
def test_rollout_is_blamed_for_what_its_steps_explain(overshoot: int, cause: Cause) -> None:
    history = StepHistory(steps((0, 20), (30, 60), (90, 200)))
    verdict = history.blame(Wait(10, 100, overshoot))
    assert verdict.rollout_ns == 10 + 30 + 10
    assert verdict.cause is cause


def test_a_gap_in_the_log_blames_nobody() -> None:
    history = StepHistory(steps((0, 20)), [Span(15, 50)])
    assert history.blame(Wait(0, 100, 20)).cause is Cause.ROLLOUT
    assert history.blame(Wait(0, 100, 50)).cause is Cause.UNKNOWN
    assert history.blame(Wait(0, 100, 51)).cause is Cause.SERVING, "even if rollout had all of the gap"
    assert history.blame(Wait(60, 100, 1)).cause is Cause.SERVING


def test_steps_of_several_engines_at_once_count_once() -> None:
    history = StepHistory([*steps((0, 50), (60, 70)), *steps((10, 40), (40, 65))])
    assert history.blame(Wait(0, 100, 70)).rollout_ns == 70


def test_waits_are_those_beyond_a_budget() -> None:
    assert first_token_wait(100, 100 + TTFT_NS, TTFT_NS) is None
    assert first_token_wait(100, 101 + TTFT_NS, TTFT_NS) == Wait(100, 101 + TTFT_NS, 1)
    assert decode_wait(7, 7 + 2 * TPOT_NS, 3, TPOT_NS) is None
    assert decode_wait(7, 12 + 2 * TPOT_NS, 3, TPOT_NS) == Wait(7, 12 + 2 * TPOT_NS, 5)
    assert decode_wait(7, 7, 1, TPOT_NS) is None
    with pytest.raises(ValueError, match="within its budget"):
        StepHistory([]).blame(Wait(0, 10, 0))


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda ends: Span(*ends)), max_size=8)


@given(spans, st.integers(-5, 65), st.integers(-5, 65))
def test_coverage_counts_every_instant_once(covered: list[Span], start: int, end: int) -> None:
    instants = {at for span in covered for at in range(span.start_ns, span.end_ns)}
    assert Coverage(covered).within_ns(start, end) == len(instants & set(range(start, end)))


# ---- worlds with a known culprit ----------------------------------------------------------------


class Request(NamedTuple):
    """A request of a made-up day."""

    arrival_ms: float
    prefill_ms: float
    decodes: int
    stall_ms: float
    """By this much serving itself holds up the step of its prefill."""


class Seen(NamedTuple):
    """What its client saw."""

    first_ms: float
    last_ms: float


def a_day(rng: random.Random) -> list[Request]:
    requests, now_ms = [], 0.0
    while len(requests) < 300:
        now_ms += rng.expovariate(1 / 220)
        stall_ms = rng.uniform(150, 700) if rng.random() < 0.02 else 0.0
        requests.append(Request(now_ms, rng.uniform(8, 40), rng.randint(1, 12), stall_ms))
    return requests


def serve(requests: list[Request], hogs: Iterable[float] | None) -> tuple[list[Seen], list[StepRecord]]:
    """One device, a step at a time: prefills first, then decodes, and rollout when serving is idle.

    `hogs` are the lengths of the rollout steps, one after the other; None runs no rollout.
    """
    rollout = iter(hogs) if hogs is not None else None
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    waiting = deque(range(len(requests)))
    left: dict[int, int] = {}
    log: list[StepRecord] = []
    now_ms = 0.0
    while waiting or left:
        if waiting and requests[waiting[0]].arrival_ms <= now_ms:
            one = waiting.popleft()
            now_ms += requests[one].prefill_ms + requests[one].stall_ms
            first[one] = last[one] = now_ms
            left[one] = requests[one].decodes
        elif left:
            now_ms += 5 + 0.2 * len(left)
            for one in list(left):
                last[one] = now_ms
                left[one] -= 1
                if not left[one]:
                    del left[one]
        elif rollout is not None:
            start_ms, now_ms = now_ms, now_ms + next(rollout)
            log.append(StepRecord(len(log), round(start_ms * NS_PER_MS), round(now_ms * NS_PER_MS), 1))
        else:
            now_ms = requests[waiting[0]].arrival_ms
    return [Seen(first[one], last[one]) for one in range(len(requests))], log


def waits(request: Request, seen: Seen) -> list[Wait]:
    arrival, first, last = (round(ms * NS_PER_MS) for ms in (request.arrival_ms, *seen))
    both = first_token_wait(arrival, first, TTFT_NS), decode_wait(first, last, request.decodes + 1, TPOT_NS)
    return [wait for wait in both if wait is not None]


def verdicts(seed: int) -> list[tuple[bool, bool]]:
    """(blamed on rollout, late only because of rollout) of each late request of one world."""
    rng = random.Random(seed)
    requests = a_day(rng)
    hogs = (rng.uniform(150, 800) if rng.random() < 0.004 else rng.uniform(5, 25) for _ in iter(int, 1))
    shared, log = serve(requests, hogs)
    alone, _ = serve(requests, None)
    history = StepHistory(log)
    pairs = []
    for request, beside, without in zip(requests, shared, alone, strict=True):
        if late := waits(request, beside):
            blamed = any(history.blame(wait).cause is Cause.ROLLOUT for wait in late)
            pairs.append((blamed, not waits(request, without)))
    return pairs


def test_blame_agrees_with_worlds_where_delays_were_injected() -> None:
    pairs = [pair for seed in range(20) for pair in verdicts(seed)]
    agreement = Agreement.of(pairs)
    assert agreement.rightly + agreement.missed >= 100, "too few were late because of rollout"
    assert agreement.wrongly + agreement.others >= 100, "too few were late by themselves"
    assert agreement.precision is not None
    assert agreement.recall is not None
    assert agreement.precision >= 0.9, agreement
    assert agreement.recall >= 0.9, agreement


def test_agreement_counts() -> None:
    found = Agreement.of([(True, True)] * 3 + [(True, False)] + [(False, True)] * 2 + [(False, False)] * 4)
    assert found == (3, 1, 2, 4)
    assert (found.precision, found.recall) == (0.75, 0.6)
    nothing = Agreement.of([])
    assert (nothing.precision, nothing.recall) == (None, None)
