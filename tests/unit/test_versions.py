"""Which weight versions a job's turns may run on."""

from __future__ import annotations

import pytest

from rose.core.versions import JobVersions, VersionWindow, VersionWish
from rose.units import WeightVersion


def versions(staleness_max: int, required: int, latest: int) -> JobVersions:
    made = JobVersions(staleness_max)
    made.begin_step(1, WeightVersion(required))
    made.publish(WeightVersion(latest))
    return made


@pytest.mark.parametrize(
    ("staleness_max", "required", "latest", "admitted"),
    [
        (0, 3, 3, {3}),
        (0, 3, 4, {3}),  # on-policy: a replica that runs ahead has to wait for the step
        (1, 3, 3, {2, 3}),
        (1, 3, 4, {2, 3, 4}),
        (2, 3, 5, {1, 2, 3, 4, 5}),
        (5, 3, 3, {0, 1, 2, 3}),
    ],
)
def test_window(staleness_max: int, required: int, latest: int, admitted: set[int]) -> None:
    window = versions(staleness_max, required, latest).window
    assert {version for version in range(10) if window.admits(version)} == admitted


def test_a_turn_may_raise_the_floor_but_never_lower_it() -> None:
    window = versions(2, 3, 5).window
    assert [version for version in range(7) if window.admits(version, version_min=4)] == [4, 5]
    assert not window.admits(0, version_min=0)


def test_a_version_nobody_announced_is_not_admitted() -> None:
    made = JobVersions(1)
    assert made.window.admits(0)
    assert not made.window.admits(1)
    made.publish(WeightVersion(1))
    assert made.window.admits(1)


def test_steps_are_idempotent_and_late_ones_change_nothing() -> None:
    made = JobVersions(0)
    assert made.begin_step(5, WeightVersion(4))
    assert not made.begin_step(5, WeightVersion(9))
    assert not made.begin_step(4, WeightVersion(3))
    assert (made.rl_step, made.required, made.latest) == (5, 4, 4)


def test_a_trainer_rolls_back_with_a_new_step() -> None:
    made = versions(0, 7, 7)
    assert made.begin_step(2, WeightVersion(5))
    assert made.window == VersionWindow(5, 5)
    assert made.latest == 7


def test_publishing_is_idempotent_and_monotonic() -> None:
    made = JobVersions(0)
    assert made.publish(WeightVersion(2))
    assert not made.publish(WeightVersion(2))
    assert not made.publish(WeightVersion(1))
    assert made.latest == 2


def test_an_unknown_version_is_fit_only_where_that_is_said() -> None:
    assert not VersionWindow(0, 9).admits(None)
    assert VersionWindow(0, 9, unknown_ok=True).admits(None)
    assert VersionWish().admits(None)
    assert not VersionWish(minimum=0).admits(None)
    assert not VersionWish(exact=0).admits(None)
