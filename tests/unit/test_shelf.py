"""Which version to fetch and which to apply next."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.core.shelf import RETRY_NS, RETRY_NS_MAX, UNDOS_MAX, VERSIONS_MAX, Pull, Staged, VersionShelf


def shelf_of(available: Iterable[int] = (), staged: Iterable[tuple[int, int | None]] = ()) -> VersionShelf:
    shelf = VersionShelf()
    for version in available:
        shelf.available(version)
    for version, base in staged:
        shelf.arrived(Staged(version, base, f"/v{version}"))
    return shelf


def test_an_empty_shelf_leads_nowhere() -> None:
    shelf = VersionShelf()
    assert shelf.newest == 0
    assert shelf.next_step(0) is None
    assert shelf.next_pull([0], 0) is None
    assert not shelf.dead_end(0)


def test_versions_are_fetched_in_order_one_at_a_time() -> None:
    shelf = shelf_of([3, 1, 2])
    assert shelf.newest == 3
    assert shelf.next_pull([0], 0) == Pull(1, 0)
    assert shelf.next_pull([0], 0) is None
    shelf.arrived(Staged(1, 0, "/v1"))
    assert shelf.next_pull([0], 0) == Pull(2, 1), "fetched ahead, while version 1 is applied"


def test_nothing_is_fetched_that_nobody_needs() -> None:
    assert shelf_of([1, 2]).next_pull([2, 5], 0) is None
    assert shelf_of([1, 2]).next_pull([], 0) is None


def test_an_engine_that_restarted_needs_the_versions_before() -> None:
    shelf = shelf_of([1, 2, 3], [(3, 2)])
    assert shelf.next_pull([2, 0], 0) == Pull(1, 0)


def test_steps_follow_deltas_whose_base_is_held() -> None:
    shelf = shelf_of(staged=[(1, 0), (2, 1), (3, 2)])
    assert shelf.next_step(0) == (1, 0, "/v1")
    assert shelf.next_step(1) == (2, 1, "/v2")
    assert shelf.next_step(3) is None


def test_a_squashed_delta_that_leads_further_is_taken() -> None:
    assert shelf_of(staged=[(1, 0), (5, 0)]).next_step(0) == (5, 0, "/v5")


def test_an_anchor_follows_any_older_version_but_no_newer_one() -> None:
    shelf = shelf_of(staged=[(7, None), (4, None)])
    assert shelf.next_step(2) == (7, None, "/v7")
    assert shelf.next_step(7) is None
    assert shelf.next_step(9) is None


def test_a_missing_version_is_retried_with_growing_pauses_and_an_anchor_looked_for_meanwhile() -> None:
    shelf = shelf_of([1, 2])
    assert shelf.next_pull([0], 0) == Pull(1, 0)
    assert shelf.failed(1, 0) == RETRY_NS
    assert shelf.next_pull([0], 0) == Pull(2, 0)
    assert shelf.failed(2, 0) == RETRY_NS
    assert shelf.next_pull([0], RETRY_NS - 1) is None
    assert shelf.next_pull([0], RETRY_NS) == Pull(1, 0)
    assert [shelf.failed(1, 0) for _ in range(9)][-1] == RETRY_NS_MAX


def test_staged_versions_that_cannot_follow_are_a_dead_end() -> None:
    shelf = shelf_of(staged=[(3, 2)])
    assert shelf.dead_end(0)
    assert not shelf.dead_end(2)
    shelf.available(2)
    assert not shelf.dead_end(0), "version 2 can still be fetched"


def test_files_an_engine_refused_are_fetched_again() -> None:
    shelf = shelf_of(staged=[(1, 0)])
    shelf.distrust(1)
    assert shelf.next_step(0) is None
    assert shelf.next_pull([0], 0) == Pull(1, 0)


@pytest.mark.parametrize(("version", "base"), [(0, None), (-1, None), (3, 3), (3, 4)])
def test_a_version_that_cannot_be_is_not_taken_in(version: int, base: int | None) -> None:
    shelf = VersionShelf()
    assert not shelf.arrived(Staged(version, base, "/x"))
    assert shelf.staged == ()


def test_telling_a_version_twice_changes_nothing() -> None:
    shelf = VersionShelf()
    assert shelf.available(1)
    assert not shelf.available(1)
    assert not shelf.available(0)


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    shelf = shelf_of(range(1, VERSIONS_MAX + 100), [(5, 4)])
    assert shelf.newest == VERSIONS_MAX + 99
    assert shelf.staged == ()
    assert shelf.next_pull([0], 0) == Pull(100, 0)


@given(st.lists(st.tuples(st.integers(1, 9), st.none() | st.integers(0, 8)), max_size=12), st.integers(0, 9))
def test_steps_always_lead_up_from_a_base_that_is_held(
    staged: list[tuple[int, int | None]], held: int
) -> None:
    shelf = shelf_of(staged=staged)
    while (step := shelf.next_step(held)) is not None:
        assert step.version > held
        assert step.base in {None, held}
        held = step.version


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.none() | st.integers(0, 8), st.booleans()),
        max_size=20,
    )
)
def test_steps_are_those_of_what_lies_here_now(changes: list[tuple[int, int | None, bool]]) -> None:
    """However often a version came, with another base, or was thrown away."""
    shelf, here = VersionShelf(), dict[int, int | None]()
    for version, base, trusted in changes:
        if shelf.arrived(Staged(version, base, f"/v{version}")):
            here[version] = base
        if not trusted:
            shelf.distrust(version)
            here.pop(version, None)
    for held in range(10):
        deltas = [version for version, base in here.items() if base == held]
        anchors = [version for version, base in here.items() if base is None and version > held]
        step = shelf.next_step(held)
        assert (step.version if step else None) == max(deltas or anchors, default=None)


def test_the_longest_chain_is_followed_without_holding_up_the_node() -> None:
    shelf = shelf_of(staged=[(version, version - 1) for version in range(1, VERSIONS_MAX + 1)])
    began_s = time.process_time()
    for _ in range(20):  # the node asks at every event
        assert shelf.next_pull([0], 0) is None
    assert time.process_time() - began_s < 5  # a scan of all versions at each step of the way takes 20 s


# ---- pin and undo -----------------------------------------------------------------------------------


def pinned(
    pin: int, undos: Iterable[tuple[int, int]], staged: Iterable[tuple[int, int | None]]
) -> VersionShelf:
    shelf = shelf_of(staged=staged)
    for base, version in undos:
        assert shelf.undo_ready(Staged(version, base, f"/undo/v{base}"))
    shelf.pin = pin
    return shelf


def test_an_engine_beyond_the_pin_goes_back_step_by_step_and_no_further() -> None:
    shelf = pinned(2, [(4, 3), (3, 2), (2, 1)], [(1, 0), (2, 1), (3, 2), (4, 3)])
    assert shelf.next_step(4) == (3, 4, "/undo/v4")
    assert shelf.next_step(3) == (2, 3, "/undo/v3")
    assert shelf.next_step(2) is None
    assert shelf.next_step(0) == (1, 0, "/v1"), "one that lags behind comes up to the pin"
    shelf.pin = None
    assert shelf.next_step(2) == (3, 2, "/v3")


def test_nothing_beyond_the_pin_is_fetched_or_missed() -> None:
    shelf = shelf_of([1, 2, 3])
    shelf.pin = 1
    assert shelf.next_pull([1], 0) is None
    assert not shelf.dead_end(1)
    assert shelf.next_pull([0], 0) == Pull(1, 0)


def test_an_anchor_beyond_the_pin_is_not_taken() -> None:
    assert pinned(3, [], [(5, None), (2, 0)]).next_step(0) == (2, 0, "/v2")
    assert pinned(1, [], [(5, None), (2, 0)]).next_step(0) is None


@pytest.mark.parametrize(
    ("held", "version", "leads"), [(4, 2, True), (4, 4, True), (4, 1, False), (3, 2, True), (1, 2, True)]
)
def test_what_can_be_taken_back(held: int, version: int, leads: bool) -> None:
    """4 goes back to 2 by way of 3; an engine below the version has nothing to take back."""
    assert pinned(0, [(4, 3), (3, 2)], []).leads_back(held, version) is leads


def test_a_way_over_the_version_is_no_way_to_it() -> None:
    """Version 3 was never held here: an anchor took the engines from 2 to 4."""
    assert not pinned(0, [(4, 2)], []).leads_back(4, 3)


def test_ways_that_do_not_lead_back_are_refused_and_the_number_is_bounded() -> None:
    shelf = VersionShelf()
    assert not shelf.undo_ready(Staged(3, 3, "/"))
    assert not shelf.undo_ready(Staged(4, 3, "/"))
    assert not shelf.undo_ready(Staged(-1, 3, "/"))
    assert not shelf.undo_ready(Staged(3, None, "/"))
    for version in range(UNDOS_MAX + 5):
        shelf.undo_ready(Staged(version, version + 1, "/"))
    assert len(shelf._undos) == UNDOS_MAX
    shelf.forget_undo(UNDOS_MAX + 5)
    shelf.pin = 0
    assert shelf.next_step(UNDOS_MAX + 5) is None


# ---- the way of fewest bytes ----


def offered(*bases: tuple[int, int | None]) -> VersionShelf:
    shelf = VersionShelf()
    for version, base in bases:
        shelf.available(version, base, anchor=base is None)
    return shelf


def pulls(shelf: VersionShelf, held: int) -> list[int]:
    """What is fetched, one after the other, until nothing is left to fetch."""
    found = []
    while (pull := shelf.next_pull([held], 0)) is not None:
        found.append(pull.version)
        base = shelf._bases[pull.version]
        shelf.arrived(Staged(pull.version, base, f"/v{pull.version}"))
    return found


@pytest.mark.parametrize(
    ("bases", "held", "wanted"),
    [
        ([(1, 0), (2, 1), (3, 2)], 0, [1, 2, 3]),
        ([(1, 0), (2, 1), (3, None), (4, 3)], 0, [3, 4]),
        ([(1, 0), (2, None), (3, 2), (4, None), (5, 4)], 0, [4, 5]),
        ([(1, 0), (2, None), (3, 2)], 2, [3]),
        ([(1, 0), (3, 1), (4, 3)], 1, [3, 4]),
        ([(5, None), (6, 5)], 0, [5, 6]),
    ],
)
def test_what_an_anchor_saves_is_not_fetched(
    bases: list[tuple[int, int | None]], held: int, wanted: list[int]
) -> None:
    assert pulls(offered(*bases), held) == wanted


def test_where_the_way_is_blocked_versions_are_taken_in_order() -> None:
    shelf = offered((1, 0), (2, 1), (3, None))
    assert shelf.next_pull([0], 0) == Pull(3, 0)
    shelf.failed(3, 0)
    assert shelf.next_pull([0], 0) == Pull(1, 0)


def test_a_way_that_is_not_known_is_taken_in_order() -> None:
    shelf = offered((3, 2), (4, 3))
    shelf.available(1)
    assert shelf.next_pull([0], 0) == Pull(1, 0)


def test_a_base_that_cannot_be_is_not_believed() -> None:
    shelf = offered((1, 0), (2, 3), (3, 2))
    assert pulls(offered((1, 0)), 0) == [1]
    assert shelf.next_pull([0], 0) == Pull(1, 0)


def test_what_was_deleted_here_can_be_fetched_again() -> None:
    shelf = offered((1, 0), (2, 1))
    assert pulls(shelf, 0) == [1, 2]
    shelf.pruned(1)
    assert shelf.staged == (2,)
    assert shelf.next_pull([2], 0) is None
    assert shelf.next_pull([0], 0) == Pull(1, 0)


# ---- squashed deltas ----

CHAIN = [(version, version - 1, 100) for version in range(1, 9)]


def with_squashed(*squashed: tuple[int, int, int]) -> VersionShelf:
    """Versions 1 to 8 of 100 bytes each, and squashed deltas (version, base, bytes)."""
    shelf = VersionShelf()
    for version, base, nbytes in CHAIN:
        shelf.available(version, base, nbytes=nbytes)
    for version, base, nbytes in squashed:
        shelf.offered_squashed(version, base, nbytes)
    return shelf


def fetched(shelf: VersionShelf, *held: int) -> list[tuple[int, bool]]:
    """What is fetched, one after the other, while engines stay where they are."""
    found = []
    while (pull := shelf.next_pull(held, 0)) is not None:
        assert len(found) < 20, "the same is fetched again and again"
        found.append((pull.version, pull.squashed))
        base = pull.held if pull.squashed else shelf._bases[pull.version]
        shelf.arrived(Staged(pull.version, base, f"/v{pull.version}"))
    return found


def plain(*versions: int) -> list[tuple[int, bool]]:
    return [(version, False) for version in versions]


def test_a_late_host_takes_squashed_deltas_where_they_are_fewer_bytes() -> None:
    assert fetched(with_squashed((4, 0, 250), (8, 4, 250)), 0) == [(4, True), (8, True)]
    assert fetched(with_squashed((4, 0, 250), (8, 4, 450)), 0) == [(4, True), *plain(5, 6, 7, 8)]
    assert fetched(with_squashed((4, 0, 450)), 0) == plain(1, 2, 3, 4, 5, 6, 7, 8)


def test_a_host_between_two_squashed_deltas_comes_to_the_next_one_by_versions() -> None:
    assert fetched(with_squashed((4, 0, 250), (8, 4, 250)), 2) == [*plain(3, 4), (8, True)]


def test_an_anchor_is_taken_where_it_is_fewer_bytes_than_what_is_squashed() -> None:
    shelf = with_squashed((7, 0, 650))
    shelf.available(8, None, anchor=True, nbytes=600)
    assert fetched(shelf, 0) == plain(8)


def test_no_squashed_delta_is_taken_over_the_head_of_another_engine() -> None:
    """It would need the same version on another base; a version lies on this host once."""
    shelf = with_squashed((8, 0, 250))
    assert fetched(shelf, 0, 6) == plain(1, 2, 3, 4, 5, 6, 7, 8)
    assert fetched(with_squashed((8, 0, 250)), 0, 8) == [(8, True)]


def test_an_engine_that_restarts_between_gets_the_version_in_its_own_form() -> None:
    shelf = with_squashed((8, 0, 250))
    assert fetched(shelf, 0) == [(8, True)]
    assert fetched(shelf, 5, 8) == plain(6, 7, 8)
    assert shelf.next_step(7) == (8, 7, "/v8")
    assert shelf.next_pull([8, 5], 0) is None


def test_where_a_squashed_delta_is_not_to_be_had_versions_are_taken_in_order() -> None:
    shelf = with_squashed((8, 0, 250))
    assert shelf.next_pull([0], 0) == Pull(8, 0, squashed=True)
    shelf.failed(8, 0)
    assert shelf.next_pull([0], 0) == Pull(1, 0)


@pytest.mark.parametrize(("version", "base"), [(9, 0), (4, 4), (4, 5), (4, -1)])
def test_a_squashed_delta_that_makes_no_sense_is_not_believed(version: int, base: int) -> None:
    assert fetched(with_squashed((version, base, 1)), 0) == plain(*range(1, 9))


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 7), st.integers(1, 400)), max_size=6),
    st.lists(st.integers(0, 8), min_size=1, max_size=3),
)
def test_with_any_squashed_deltas_every_engine_arrives(
    squashed: list[tuple[int, int, int]], held: list[int]
) -> None:
    shelf, engines = with_squashed(*squashed), list(held)
    for _ in range(40):
        if (pull := shelf.next_pull(engines, 0)) is not None:
            base = pull.held if pull.squashed else shelf._bases[pull.version]
            shelf.arrived(Staged(pull.version, base, f"/v{pull.version}"))
        for number, version in enumerate(engines):
            if (step := shelf.next_step(version)) is not None:
                engines[number] = step.version
    assert engines == [8] * len(held)
