"""The step latency model: sane from the first sample, whatever it is fed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.core.latency import (
    DRIFT_PERMILLE,
    DRIFT_WINDOW,
    OUTLIER_FACTOR,
    ServingLatency,
    SharedStepLatency,
    StepLatency,
    WindowQuantile,
)
from rose.units import NS_PER_S, ms_to_ns

steps = st.lists(st.tuples(st.integers(-2, 4096), st.integers(-5, 40 * NS_PER_S)), max_size=100)


def fed(*samples: tuple[int, int]) -> StepLatency:
    latency = StepLatency()
    for tokens, duration_ns in samples:
        latency.observe(tokens, duration_ns)
    return latency


def affine(tokens: int) -> int:
    return ms_to_ns(8) + tokens * ms_to_ns(0.1)


def test_nothing_is_predicted_before_anything_was_seen() -> None:
    latency = StepLatency()
    assert not latency.calibrated
    assert latency.predict_ns(100) == 0
    assert latency.margin_ns() == 0


def test_an_affine_engine_is_learnt_exactly() -> None:
    latency = fed(*((n, affine(n)) for n in (1, 4, 16, 64, 256, 512, 3, 5)))
    assert latency.calibrated
    assert abs(latency.predict_ns(100) - affine(100)) < 1000
    assert latency.largest_within(affine(100) + 1000, 512) == 100


def test_constant_sizes_charge_everything_to_the_tokens() -> None:
    latency = fed(*((16, ms_to_ns(10)) for _ in range(500)))
    assert abs(latency.predict_ns(16) - ms_to_ns(10)) <= 1
    assert latency.predict_ns(512) >= ms_to_ns(300)


def test_long_decoding_does_not_forget_what_a_prefill_costs() -> None:
    latency = fed(
        *((512, affine(512)) for _ in range(8)), *((1 + i % 4, affine(1 + i % 4)) for i in range(5000))
    )
    assert abs(latency.predict_ns(512) - affine(512)) < ms_to_ns(1)


def test_a_slower_engine_is_followed() -> None:
    latency = fed(*((n, affine(n)) for n in (1, 8, 64, 512) for _ in range(40)))
    for _ in range(40):
        for tokens in (1, 8, 64, 512):
            latency.observe(tokens, 2 * affine(tokens))
    assert abs(latency.predict_ns(512) - 2 * affine(512)) < ms_to_ns(2)


def test_steps_that_take_less_the_larger_they_are_leave_a_flat_model() -> None:
    latency = fed(*((1, ms_to_ns(50)) for _ in range(8)), *((512, ms_to_ns(10)) for _ in range(8)))
    assert latency.predict_ns(1) == latency.predict_ns(512) == ms_to_ns(30)


def test_a_compilation_of_half_a_minute_does_not_close_the_gate_for_long() -> None:
    latency = fed(*((n, affine(n)) for n in (1, 16, 128, 512) for _ in range(32)))
    latency.observe(16, 30 * NS_PER_S)
    assert latency.predict_ns(16) < 2 * affine(16)
    assert latency.margin_ns() <= OUTLIER_FACTOR * affine(512)


def test_the_margin_is_what_steps_outlast_their_prediction_by() -> None:
    latency = fed(*((n, affine(n)) for n in (1, 16, 128, 512) for _ in range(32)))
    assert latency.margin_ns() < 1000
    for index in range(400):
        latency.observe(16, affine(16) + (ms_to_ns(5) if index % 5 == 0 else 0))
    assert ms_to_ns(3) < latency.margin_ns() < ms_to_ns(6)


def test_too_small_a_budget_admits_nothing_and_a_huge_one_is_capped() -> None:
    latency = fed(*((n, affine(n)) for n in (1, 4, 16, 64, 256, 512, 3, 5)))
    assert latency.largest_within(ms_to_ns(1), 512) == 0
    assert latency.largest_within(-1, 512) == 0
    assert latency.largest_within(60 * NS_PER_S, 512) == 512
    assert latency.largest_within(60 * NS_PER_S, 0) == 0


def test_a_sudden_change_is_reported_as_drift_and_widens_the_margin() -> None:
    latency = fed(*((n, affine(n)) for n in (1, 8, 64, 512) for _ in range(40)))
    assert (latency.drift_permille, latency.drifting) == (1000, False)
    before_ns = latency.margin_ns()
    for _ in range(DRIFT_WINDOW // 2):
        latency.observe(64, 3 * affine(64))
    assert latency.drifting
    assert latency.drift_permille > DRIFT_PERMILLE[1]
    assert latency.margin_ns() > before_ns + affine(64)


def test_drift_ends_once_the_model_has_followed() -> None:
    latency = fed(*((n, affine(n)) for n in (1, 8, 64, 512) for _ in range(40)))
    for _ in range(60):
        for tokens in (1, 8, 64, 512):
            latency.observe(tokens, 2 * affine(tokens))
    assert not latency.drifting
    assert abs(latency.predict_ns(64) - 2 * affine(64)) < ms_to_ns(1)


def test_an_engine_that_became_faster_drifts_too() -> None:
    latency = fed(*((n, affine(n)) for n in (1, 8, 64, 512) for _ in range(40)))
    for _ in range(DRIFT_WINDOW):
        latency.observe(64, affine(64) // 3)
    assert latency.drift_permille < DRIFT_PERMILLE[0]


def test_steps_beside_the_other_engine_are_a_model_of_their_own() -> None:
    latency = SharedStepLatency()
    for tokens in (1, 4, 16, 64, 256, 512, 3, 5):
        latency.observe(tokens, affine(tokens))
    assert not latency.model(co_running=3).calibrated
    for tokens in (1, 4, 16, 64, 256, 512, 3, 5):
        latency.observe(tokens, 2 * affine(tokens), co_running=3)
    assert abs(latency.model().predict_ns(100) - affine(100)) < 1000
    assert abs(latency.model(co_running=1).predict_ns(100) - 2 * affine(100)) < 2000


def test_what_was_seen_beside_the_other_stands_in_for_alone_but_not_the_other_way_round() -> None:
    latency = SharedStepLatency()
    for tokens in (1, 4, 16, 64, 256, 512, 3, 5):
        latency.observe(tokens, 2 * affine(tokens), co_running=1)
    assert abs(latency.model().predict_ns(100) - 2 * affine(100)) < 2000


def test_serving_has_models_of_prefill_and_of_decode() -> None:
    latency = ServingLatency(256)
    assert (latency.prefill_ns(100), latency.decode_ns(4)) == (0, 0)
    for load in (1, 4, 16, 64, 256, 128, 3, 5):
        latency.observe(load, 9, affine(load))
        latency.observe(0, load, ms_to_ns(20) + load)
    assert abs(latency.prefill_ns(100) - affine(100)) < 1000
    assert abs(latency.prefill_ns(612) - 2 * affine(256) - affine(100)) < 3000
    assert abs(latency.decode_ns(4) - ms_to_ns(20)) < 1000
    assert latency.prefill_ns(0) == latency.decode_ns(0) == 0
    latency.observe(0, 0, ms_to_ns(500))  # of a kind nobody knows
    assert latency.drift_permille == 1000


def test_engines_that_overlap_are_predicted_as_they_run_together_once_that_was_seen() -> None:
    turns, overlap = ServingLatency(256), ServingLatency(256, overlaps=True)
    for load in (1, 4, 16, 64, 256, 128, 3, 5):
        for latency in (turns, overlap):
            latency.observe(load, 9, affine(load))
            latency.observe(0, load, affine(load))
    assert overlap.prefill_ns(100) == turns.prefill_ns(100)
    for load in (1, 4, 16, 64, 256, 128, 3, 5):
        for latency in (turns, overlap):
            latency.observe(load, 9, 3 * affine(load), co_running=1)
            latency.observe(0, load, 2 * affine(load), co_running=1)
    assert abs(overlap.prefill_ns(100) - 3 * turns.prefill_ns(100)) < 3000
    assert abs(overlap.decode_ns(16) - 2 * turns.decode_ns(16)) < 3000
    assert abs(turns.prefill_ns(100, co_running=1) - 3 * turns.prefill_ns(100)) < 3000
    assert overlap.prefill_margin_ns() < 3000
    for load in [*range(1, 60)] * 3:  # ever longer together
        overlap.observe(load, 9, 6 * affine(load), co_running=1)
    assert overlap.prefill_margin_ns() > affine(20)
    assert overlap.drift_permille > 1000 or overlap.prefill_ns(100) > 5 * turns.prefill_ns(100)


def test_a_step_that_takes_nothing_is_no_engine() -> None:
    with pytest.raises(ValueError, match="must take a token"):
        ServingLatency(0)


@settings(deadline=None)
@given(steps)
def test_predictions_are_finite_monotone_and_not_negative(samples: list[tuple[int, int]]) -> None:
    latency = fed(*samples)
    predicted = [latency.predict_ns(n) for n in (0, 1, 2, 100, 4096, 10**6)]
    assert all(math.isfinite(p) and p >= 0 for p in predicted)
    assert predicted == sorted(predicted)
    assert latency.margin_ns() >= 0


@settings(deadline=None)
@given(steps, st.integers(-(10**9), 10**12), st.integers(0, 4096))
def test_largest_within_is_the_largest(
    samples: list[tuple[int, int]], budget_ns: int, tokens_max: int
) -> None:
    latency = fed(*samples)
    tokens = latency.largest_within(budget_ns, tokens_max)
    assert 0 <= tokens <= tokens_max
    assert tokens == 0 or latency.predict_ns(tokens) <= budget_ns
    assert tokens == tokens_max or latency.predict_ns(tokens + 1) > budget_ns


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 20))
def test_window_quantile_equals_sorting_the_window(values: list[int], window: int) -> None:
    quantile = WindowQuantile(window, 0.9)
    for value in values:
        quantile.add(value)
    recent = sorted(values[-window:])
    assert len(quantile) == len(recent)
    assert quantile.value() == recent[math.ceil(0.9 * len(recent)) - 1]
