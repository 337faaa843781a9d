"""Which requests a KV budget cut ends: those that are cheapest to compute anew, and no more than needed.

Blocks are parked in groups (a page of memory holds a whole number of blocks), so a request is only worth
ending if groups come free by it.  Ours: the paper names the criterion, not the choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple


class Holder(NamedTuple):
    """A request that holds KV blocks."""

    request_id: str
    cost_tokens: int
    """Tokens to compute anew elsewhere if it ends; what others share with it is not counted."""
    groups: Set[int]
    """Groups in which it holds a block."""


def choose_victims(
    holders: Sequence[Holder], group_blocks: Mapping[int, int], wanted_blocks: int
) -> list[str]:
    """Requests to end so that groups of at least `wanted_blocks` blocks together come free; cheapest first.

    `group_blocks` tells the usable blocks of every held group (groups that nobody holds do not count).  All
    holders, if even that is not enough.  Requests are taken in order of cost; then those that turn out not
    to be needed are spared, the dearest first.
    """
    if wanted_blocks <= 0:
        return []
    held_by = Counter(group for holder in holders for group in holder.groups)
    freed = 0
    victims: list[Holder] = []
    for holder in sorted(holders, key=_by_cost):
        if freed >= wanted_blocks:
            break
        victims.append(holder)
        freed += _let_go(holder, held_by, group_blocks)
    for holder in reversed(list(victims)):
        lost = sum(group_blocks[group] for group in holder.groups if held_by[group] == 0)
        if freed - lost >= wanted_blocks:
            victims.remove(holder)
            freed -= lost
            held_by.update(holder.groups)
    return [holder.request_id for holder in victims]


def _let_go(holder: Holder, held_by: Counter[int], group_blocks: Mapping[int, int]) -> int:
    """Take the holder away; blocks of the groups that nobody holds any more."""
    freed = 0
    for group in holder.groups:
        held_by[group] -= 1
        if held_by[group] == 0:
            freed += group_blocks[group]
    return freed


def _by_cost(holder: Holder) -> tuple[int, str]:
    return holder.cost_tokens, holder.request_id
