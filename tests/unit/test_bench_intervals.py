"""Bootstrap intervals over requests that several modes have in common."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rose_daemon.bench.figures import Comparison
from rose_daemon.bench.intervals import Draws, interval
from rose_daemon.bench.runs import Mode, Run
from rose_daemon.harness.load import RequestRecord

from rose.units import NS_PER_MS


def test_requests_are_drawn_within_their_round() -> None:
    draws = Draws([0, 0, 0, 1, 1], np.random.default_rng(0), resamples=50)
    assert draws.counts.shape == (50, 5)
    assert (draws.counts[:, :3].sum(axis=1) == 3).all()
    assert (draws.counts[:, 3:].sum(axis=1) == 2).all()


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20),
    st.lists(st.integers(0, 3), min_size=20, max_size=20),
    st.floats(0, 100),
)
def test_a_weighted_percentile_is_that_of_the_repeated_values(
    values: list[float], counts: list[int], percent: float
) -> None:
    draws = Draws([0] * len(values), np.random.default_rng(0), resamples=1)
    draws.counts[0] = counts[: len(values)]
    (found,) = draws.quantiles(np.array(values), percent)
    repeated = np.repeat(values, counts[: len(values)])
    if len(repeated):
        assert found == pytest.approx(np.percentile(repeated, percent), abs=1e-6)
    else:
        assert np.isnan(found)


def test_what_is_not_known_is_left_out_and_owners_weigh_their_values() -> None:
    draws = Draws([0, 0], np.random.default_rng(0), resamples=2)
    draws.counts[:] = [[2, 0], [0, 2]]
    assert draws.quantiles(np.array([np.nan, 7.0]), 50).tolist()[1] == 7
    gaps, owners = np.array([1.0, 1.0, 9.0]), np.array([0, 0, 1])
    assert draws.quantiles(gaps, 50, owners).tolist() == [1, 9]
    assert interval(np.array([np.nan, np.nan])) is None
    assert interval(Draws([], np.random.default_rng(0)).quantiles(np.array([]), 99)) is None


def test_intervals_cover_the_truth_and_are_seeded() -> None:
    covered = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        low, high = interval(
            Draws([0] * 100 + [1] * 100, rng, 200).quantiles(rng.normal(10, 1, 200), 50)
        ) or (
            0,
            0,
        )
        covered += low <= 10 <= high
    assert covered >= 50
    one, two = (Draws([0] * 9, np.random.default_rng(3)).counts for _ in range(2))
    assert (one == two).all()


def _run(mode: Mode, index: int, ttfts_ms: list[float]) -> Run:
    records = []
    for number, ttft_ms in enumerate(ttfts_ms):
        record = RequestRecord(number, planned_ns=0, prompt_tokens=1, output_tokens=1)
        record.token_ns = [round(ttft_ms * NS_PER_MS)]
        records.append(record)
    return Run(
        mode=mode, round=index, elapsed_s=1, records=records, rollout_tokens=0, rollout_errors=0,
        serving_busy_share=0, rollout_busy_share=0, gate_transitions=0, started_ns=0, ended_ns=1,
    )  # fmt: skip


def test_what_modes_have_in_common_cancels_in_their_ratio() -> None:
    """A mode that is twice as slow on every request is twice as slow, whatever is drawn."""
    rng = np.random.default_rng(5)
    alone = [rng.gamma(2, 20, 50).tolist() for _ in range(3)]
    runs = [_run(Mode.ALONE, index, each) for index, each in enumerate(alone)]
    runs += [_run(Mode.NAIVE, index, [2 * ms for ms in each]) for index, each in enumerate(alone)]
    comparison = Comparison(runs, seed=1)
    found = comparison.against(Mode.NAIVE, Mode.ALONE)
    assert found is not None
    assert found["ttft_ms"]["p99_ratio_ci"] == pytest.approx([2, 2], abs=1e-3)
    low, high = found["ttft_ms"]["paired_median_difference_ci"]
    assert low < found["ttft_ms"]["paired_median_difference"] < high
    assert comparison.against(Mode.ALONE, Mode.ALONE) is None
    assert comparison.against(Mode.STATIC, Mode.ALONE) is None
    assert comparison.latencies(Mode.NAIVE)["ttft_ms"]["p99_ci"][0] < max(map(max, alone)) * 2
