"""How old a trajectory may be: the bound alpha on the weights its oldest tokens were sampled from.

`JobVersions.window` says what weights a turn may run on.  That alone does not bound a trajectory of many
turns, whose first ones may come from weights long past when its last one ends.  With a bound on trajectories
one is over-stale as soon as

    required - (version of its oldest tokens)  >  trajectory_staleness_max

Its turns in flight are then aborted, later ones refused, and it is counted: what it holds is no longer worth
training on.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rose.core.versions import JobVersions
from rose.units import TrajectoryId, TurnId, WeightVersion


@dataclass(slots=True)
class _Birth:
    """Where a trajectory began."""

    version: WeightVersion
    turn: TurnId | None
    """The turn that began it; None if the scheduler knows from before its restart."""
    counted: bool = False
    """As aborted."""


class Births:
    """The weights that one job's trajectories began on; bounded, those that ran least recently go first.

    One that is forgotten begins anew with its next turn.
    """

    def __init__(self, versions: JobVersions, trajectories_max: int) -> None:
        self._versions = versions
        self._most = trajectories_max
        self._births: OrderedDict[TrajectoryId, _Birth] = OrderedDict()

    def __len__(self) -> int:
        return len(self._births)

    def begun(
        self, trajectory: TrajectoryId, version: WeightVersion | None, turn: TurnId | None = None
    ) -> None:
        """A turn of it begins to run on `version`: where that is its first, it is born.  None says nothing.

        Taken at the beginning of an attempt, so that no token is older: one that runs through an update is as
        old as its first tokens.
        """
        if version is None:
            return
        birth = self._births.get(trajectory)
        if birth is None:
            self._births[trajectory] = _Birth(version, turn)
            if len(self._births) > self._most:
                self._births.popitem(last=False)
            return
        birth.version = min(birth.version, version)
        self._births.move_to_end(trajectory)

    def undo(self, trajectory: TrajectoryId, turn: TurnId) -> None:
        """The first attempt of `turn` brought no token: if it began the trajectory, that has not begun."""
        birth = self._births.get(trajectory)
        if birth is not None and birth.turn == turn:
            del self._births[trajectory]

    def over_stale(self, trajectory: TrajectoryId) -> str:
        """Why the trajectory may not go on; "" if it may, or has no tokens of known weights."""
        floor, birth = self._versions.birth_floor, self._births.get(trajectory)
        if floor is None or birth is None or birth.version >= floor:
            return ""
        return (
            f"trajectory {trajectory!r} began on version {birth.version}; the job is at "
            f"{self._versions.required} and lets one lie {self._versions.trajectory_staleness_max} behind"
        )

    def counts(self, trajectory: TrajectoryId) -> bool:
        """Whether an abort or refusal of it is the first one: trajectories are counted, not their turns.

        One that has ended, and nobody told so, grows old too; it is none that was aborted.
        """
        birth = self._births[trajectory]
        first, birth.counted = not birth.counted, True
        return first

    def drop(self, trajectory: TrajectoryId) -> None:
        """The trajectory is over; one of the same name is another."""
        self._births.pop(trajectory, None)
