"""Which replicas of a host go from one weight version to the next together.

Engines that hold the same version take the next step in lock-step: they all stage it, all write it, and all
keep it, or all stay.  None of them begins before all can; one that is refused too often counts as failed and
is waited for no longer, one that starts later catches up by itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from rose.core.effects import NodeEffect
from rose.core.hosted import HostedReplica
from rose.core.shelf import VersionShelf
from rose.units import WeightVersion


def next_updates(replicas: Iterable[HostedReplica], shelf: VersionShelf, now_ns: int) -> list[NodeEffect]:
    """The next step along the staged versions (or back) of every group that can take one."""
    groups: dict[WeightVersion, list[HostedReplica]] = {}
    for hosted in replicas:
        if hosted.follows:
            groups.setdefault(hosted.life.held, []).append(hosted)
    effects: list[NodeEffect] = []
    for held, members in groups.items():
        step = shelf.next_step(held)
        if step is None:
            if shelf.beyond_pin(held):  # a fresh engine does not hold it: no need to wait for anybody
                for hosted in members:
                    effects += hosted.restart(now_ns)
            continue
        if not all(hosted.can_update(now_ns) for hosted in members):
            continue
        together = tuple(hosted.settings.replica for hosted in members) if len(members) > 1 else ()
        for hosted in members:
            effects += hosted.update(step, together, now_ns)
    return effects
