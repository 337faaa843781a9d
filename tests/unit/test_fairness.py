"""Max-min fair shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.core.fairness import fair_shares
from rose.units import JobId


@pytest.mark.parametrize(
    ("wanted", "supply", "shares"),
    [
        ([], 5, []),
        ([4], 2, [2]),
        ([4, 4], 4, [2, 2]),
        ([1, 4], 4, [1, 3]),
        ([4, 4], 5, [3, 2]),
        ([0, 3], 2, [0, 2]),
        ([9, 9, 9], 2, [1, 1, 0]),
        ([2, 8, 10], 20, [2, 8, 10]),
        ([2, 8, 10], 15, [2, 7, 6]),
    ],
)
def test_shares(wanted: list[int], supply: int, shares: list[int]) -> None:
    given_to = fair_shares({JobId(str(job)): most for job, most in enumerate(wanted)}, supply)
    assert list(given_to.values()) == shares


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(0, 60))
def test_shares_are_max_min_fair(wanted: list[int], supply: int) -> None:
    jobs = {JobId(str(job)): most for job, most in enumerate(wanted)}
    shares = fair_shares(jobs, supply)
    assert sum(shares.values()) == min(supply, sum(wanted))
    assert all(0 <= shares[job] <= most for job, most in jobs.items())
    largest = max(shares.values(), default=0)
    for job, most in jobs.items():
        if shares[job] < most:  # who goes short has no less than anybody, but for what cannot be divided
            assert shares[job] >= largest - 1
