"""Which weight versions a job's turns may run on.

The trainer names a `required_version` when a step begins.  With the staleness bound
`staleness_max` = 0 (on-policy) replicas must run exactly that version; with a bound above 0 they must lie in

    required - staleness_max  <=  version  <=  latest published

so that one that has already taken the next version may go on serving the job.

A version nobody has announced is never in the window: what such weights are is unknown.  A replica may run a
version that it does not tell: only jobs that say so run on it.  A turn may ask for a higher floor
(`version_min`), never for a lower one.
"""

from __future__ import annotations

from typing import NamedTuple

from rose.units import WeightVersion


class VersionWindow(NamedTuple):
    """Versions that a job's turns may run on, both ends included."""

    floor: int
    ceiling: int
    unknown_ok: bool = False
    """A version that is not known will do."""

    def admits(self, version: int | None, version_min: int | None = None) -> bool:
        """Whether a replica on `version` may run a turn that asks for at least `version_min`."""
        if version is None:
            return self.unknown_ok and version_min is None
        floor = self.floor if version_min is None else max(self.floor, version_min)
        return floor <= version <= self.ceiling


class VersionWish(NamedTuple):
    """What one turn asks for, beside what its job requires."""

    minimum: int | None = None
    exact: int | None = None

    def __bool__(self) -> bool:
        return self.minimum is not None or self.exact is not None

    def __str__(self) -> str:
        parts = (("at least", self.minimum), ("exactly", self.exact))
        return " and ".join(f"{word} {version}" for word, version in parts if version is not None)

    def admits(self, version: int | None) -> bool:
        """Whether a replica on `version` will do."""
        if version is None:
            return not self
        return (self.minimum is None or version >= self.minimum) and self.exact in {None, version}


ANY_VERSION = VersionWish()
"""The wish of a turn that has none: most of them, so that it is worth being told apart at a glance."""


class JobVersions:
    """One job's published and required versions."""

    def __init__(
        self, staleness_max: int, unknown_ok: bool = False, trajectory_staleness_max: int | None = None
    ) -> None:
        self.bound(staleness_max, unknown_ok, trajectory_staleness_max)
        self.required = WeightVersion(0)
        self.latest = WeightVersion(0)
        """Highest version published or required so far."""
        self.rl_step: int | None = None
        """None until the first step began."""

    def bound(self, staleness_max: int, unknown_ok: bool, trajectory_staleness_max: int | None) -> None:
        """New terms of the job; without a `trajectory_staleness_max` trajectories may be of any age."""
        self.staleness_max = staleness_max
        self.unknown_ok = unknown_ok
        self.trajectory_staleness_max = trajectory_staleness_max

    @property
    def window(self) -> VersionWindow:
        """The versions that are fit now."""
        ceiling = self.latest if self.staleness_max else self.required
        return VersionWindow(self.required - self.staleness_max, ceiling, self.unknown_ok)

    @property
    def birth_floor(self) -> int | None:
        """Trajectories that began on an older version are over-stale; None: none ever is."""
        most = self.trajectory_staleness_max
        return None if most is None else self.required - most

    def unmet(self, wish: VersionWish) -> str:
        """A wish that no replica meets, and what there is."""
        window = self.window
        return (
            f"version {wish}; the job's turns run on {window.floor} to {window.ceiling}, "
            f"the latest published is {self.latest}"
        )

    def publish(self, version: WeightVersion) -> bool:
        """The trainer committed `version`; False if that was known or overtaken."""
        if version <= self.latest:
            return False
        self.latest = version
        return True

    def begin_step(self, rl_step: int, required: WeightVersion) -> bool:
        """A step began; False for a repeat or a late message of an earlier step, which changes nothing.

        `required` may be lower than before: a trainer that rolls back does so with a new step.
        """
        if self.rl_step is not None and rl_step <= self.rl_step:
            return False
        self.rl_step = rl_step
        self.required = required
        self.latest = max(self.latest, required)
        return True
