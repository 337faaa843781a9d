"""Whom a KV budget cut ends: as cheap as possible, no more than needed, never too few."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rose.core.victims import Holder, choose_victims

ONE_BLOCK = dict.fromkeys(range(64), 1)


def test_nothing_is_ended_for_nothing() -> None:
    holders = [Holder("a", 10, {1, 2})]
    assert choose_victims(holders, ONE_BLOCK, 0) == []
    assert choose_victims(holders, ONE_BLOCK, -3) == []


def test_the_cheapest_goes_first() -> None:
    holders = [Holder("dear", 500, {1, 2}), Holder("cheap", 20, {3, 4}), Holder("middle", 100, {5, 6})]
    assert choose_victims(holders, ONE_BLOCK, 2) == ["cheap"]
    assert choose_victims(holders, ONE_BLOCK, 3) == ["cheap", "middle"]


def test_a_victim_that_turns_out_not_to_be_needed_is_spared() -> None:
    holders = [Holder("small", 10, {1}), Holder("large", 900, set(range(10, 20)))]
    assert choose_victims(holders, ONE_BLOCK, 10) == ["large"]
    assert choose_victims(holders, ONE_BLOCK, 11) == ["small", "large"]


def test_a_shared_prefix_comes_free_only_with_its_last_holder() -> None:
    prefix = {1, 2, 3}
    holders = [Holder("a", 10, prefix | {4}), Holder("b", 20, prefix | {5}), Holder("c", 90, {6, 7})]
    assert choose_victims(holders, ONE_BLOCK, 2) == ["a", "b"]  # 4 and 5; c would be dearer
    assert choose_victims(holders, ONE_BLOCK, 5) == ["a", "b"]


def test_blocks_that_share_a_page_come_free_together() -> None:
    holders = [Holder("a", 10, {1, 2}), Holder("b", 20, {2}), Holder("c", 30, {3})]
    assert choose_victims(holders, {1: 8, 2: 8, 3: 8}, 12) == ["a", "b"]


def test_all_go_where_even_that_is_not_enough() -> None:
    holders = [Holder("a", 10, {1}), Holder("b", 20, {2})]
    assert choose_victims(holders, ONE_BLOCK, 9) == ["a", "b"]


def freed(holders: list[Holder], victims: list[str], sizes: dict[int, int]) -> int:
    left = set().union(*(holder.groups for holder in holders if holder.request_id not in victims))
    return sum(sizes[group] for group in set().union(*(holder.groups for holder in holders)) - left)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sets(st.integers(0, 15), min_size=1)), min_size=1, max_size=8),
    st.lists(st.integers(1, 4), min_size=16, max_size=16),
    st.integers(1, 40),
)
def test_enough_comes_free_and_every_victim_is_needed(
    held: list[tuple[int, set[int]]], sizes: list[int], wanted: int
) -> None:
    holders = [Holder(str(number), cost, groups) for number, (cost, groups) in enumerate(held)]
    size_of = dict(enumerate(sizes))
    victims = choose_victims(holders, size_of, wanted)
    everything = freed(holders, [holder.request_id for holder in holders], size_of)
    assert len(set(victims)) == len(victims)
    assert freed(holders, victims, size_of) >= min(wanted, everything)
    if everything >= wanted:
        for victim in victims:
            others = [each for each in victims if each != victim]
            assert freed(holders, others, size_of) < wanted
