"""Windows without rollout: drawn at random, counted with care."""

from __future__ import annotations

import random

import pytest

from rose.core.switchback import Switchback, SwitchbackSettings
from rose.units import NS_PER_S

W = 10 * NS_PER_S
SETTLE = 2 * NS_PER_S


def switchback(off_share: float = 0.25, seed: int = 0) -> Switchback:
    settings = SwitchbackSettings(off_share=off_share, window_ns=W)
    return Switchback(settings, random.Random(seed), SETTLE)


@pytest.mark.parametrize("seed", range(20))
def test_each_block_has_one_window_without_rollout_and_the_first_is_with(seed: int) -> None:
    subject, drawn = switchback(seed=seed), []
    for number in range(40):
        subject.advance(number * W, lending=True)
        drawn.append(subject.off)
    assert not drawn[0]
    assert [sum(drawn[start : start + 4]) for start in range(0, 40, 4)] == [1] * 10


def test_where_they_fall_is_chance() -> None:
    places = set()
    for seed in range(50):
        subject = switchback(seed=seed)
        for number in range(8):
            subject.advance(number * W, lending=True)
            if number >= 4 and subject.off:
                places.add(number)
    assert places == {4, 5, 6, 7}


def test_without_a_share_every_window_has_rollout() -> None:
    subject = switchback(off_share=0)
    for number in range(100):
        subject.advance(number * W, lending=True)
        assert not subject.off


def test_a_request_counts_where_all_of_its_life_was() -> None:
    subject = switchback()
    subject.advance(0, lending=True)
    subject.advance(W, lending=True)
    subject.judged(1, W - 1, late=True)
    subject.judged(W + 1, 2 * W, late=False)
    subject.judged(W - 1, W + 1, late=True)
    assert subject.advance(W + SETTLE - 1, lending=True) == [], "some may not be judged yet"
    (first,) = subject.advance(W + SETTLE, lending=True)
    assert (first.requests, first.late, first.off) == (1, 1, False)
    subject.advance(2 * W, lending=True)
    (second,) = subject.advance(2 * W + SETTLE, lending=True)
    assert (second.requests, second.late) == (1, 0)


def test_a_window_that_lending_did_not_last_through_counts_for_nothing() -> None:
    subject = switchback()
    subject.advance(0, lending=True)
    subject.judged(1, 2, late=True)
    subject.advance(W // 2, lending=False)
    assert not subject.off
    subject.judged(W // 2 + 1, W // 2 + 2, late=True)
    for second in range(100):
        assert subject.advance(W + second * NS_PER_S, lending=False) == []
    subject.advance(200 * NS_PER_S, lending=True)
    assert not subject.off, "the first window after a start has rollout"


def test_other_settings_begin_a_block_of_their_own() -> None:
    subject = switchback()
    subject.advance(0, lending=True)
    subject.judged(1, 2, late=True)
    subject.reconfigure(SwitchbackSettings(off_share=0.5, window_ns=W // 3))
    assert not subject.off
    assert subject.advance(10, lending=True) == [], "the window under way counts for nothing"
    subject.judged(11, 12, late=False)
    offs, now_ns = [], 10
    for _ in range(20):
        offs.append(subject.off)
        now_ns += W // 3
        subject.advance(now_ns, lending=True)
    assert offs[0] is False, "the first window after a start has rollout"
    assert sum(offs) == 10
    before = subject.off
    subject.reconfigure(SwitchbackSettings(off_share=0.5, window_ns=W // 3))
    assert subject.off == before, "the same settings change nothing"


def test_it_compares_what_was_counted() -> None:
    subject, rng = switchback(), random.Random(3)
    for number in range(400):
        begin = number * W
        subject.advance(begin, lending=True)
        for _ in range(50):
            late = rng.random() < (0.0 if subject.off else 0.1)
            subject.judged(begin + 1, begin + 2, late=late)
    assert subject.estimate is not None
    assert subject.proof is not None
    assert subject.estimate.difference == pytest.approx(0.1, abs=0.02)
    assert 0.05 < subject.proof.interval.low < subject.estimate.interval.low
    kept = list(subject.closed)
    subject.forget()
    assert subject.estimate is None
    subject.restore(kept)
    assert subject.estimate is not None


@pytest.mark.parametrize("fields", [{"off_share": -0.1}, {"off_share": 0.6}, {"window_ns": 0}])
def test_senseless_settings_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        SwitchbackSettings(**fields)  # type: ignore[arg-type]
