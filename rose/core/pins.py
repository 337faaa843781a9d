"""Which replica holds a trajectory's prefix, or the prompt of a group."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rose.units import JobId, ReplicaId, TrajectoryId


@dataclass(slots=True)
class _Pin:
    """Where a prefix is."""

    replica: ReplicaId
    used_ns: int
    tokens: int


class Pins:
    """Which replica holds a trajectory's prefix; bounded, least recently used first to go."""

    def __init__(self, pins_max: int, ttl_ns: int) -> None:
        self._pins_max = pins_max
        self._ttl_ns = ttl_ns
        self._pins: OrderedDict[tuple[JobId, TrajectoryId], _Pin] = OrderedDict()
        self._on: dict[ReplicaId, dict[tuple[JobId, TrajectoryId], None]] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def next_deadline_ns(self) -> int | None:
        """When the oldest pin expires."""
        for pin in self._pins.values():
            return pin.used_ns + self._ttl_ns
        return None

    def get(self, job: JobId, trajectory: TrajectoryId) -> ReplicaId | None:
        """The replica that the trajectory last ran on."""
        pin = self._pins.get((job, trajectory))
        return None if pin is None else pin.replica

    def latest(
        self, most: int, job: JobId | None = None
    ) -> list[tuple[JobId, TrajectoryId, ReplicaId, int, int]]:
        """Trajectories by their latest turn, newest first: job, name, replica, tokens, when (ns)."""
        found: list[tuple[JobId, TrajectoryId, ReplicaId, int, int]] = []
        for (owner, trajectory), pin in reversed(self._pins.items()):
            if len(found) == most:
                break
            if job is None or job == owner:
                found.append((owner, trajectory, pin.replica, pin.tokens, pin.used_ns))
        return found

    def tokens(self, job: JobId, trajectory: TrajectoryId) -> int:
        """How long the prefix is that its replica holds; 0 if there is none, or it is not known."""
        pin = self._pins.get((job, trajectory))
        return 0 if pin is None else pin.tokens

    def grew(self, job: JobId, trajectory: TrajectoryId, tokens: int) -> None:
        """A turn of the trajectory finished: its prefix is that long now."""
        if (pin := self._pins.get((job, trajectory))) is not None:
            pin.tokens = tokens

    def put(
        self, job: JobId, trajectory: TrajectoryId, replica: ReplicaId, now_ns: int
    ) -> list[TrajectoryId]:
        """The trajectory runs on `replica` now; answers the trajectories forgotten for it."""
        key = (job, trajectory)
        pin = self._pins.get(key)
        if pin is not None and pin.replica == replica:
            pin.used_ns = now_ns
            self._pins.move_to_end(key)
            return []
        self._forget(key)
        self._pins[key] = _Pin(replica, now_ns, 0)
        self._on.setdefault(replica, {})[key] = None
        if len(self._pins) <= self._pins_max:
            return []
        return [self._forget(next(iter(self._pins)))]

    def expire(self, now_ns: int) -> list[TrajectoryId]:
        """Forget the trajectories that have not run for the time to live."""
        forgotten = []
        while (due_ns := self.next_deadline_ns()) is not None and due_ns <= now_ns:
            forgotten.append(self._forget(next(iter(self._pins))))
        return forgotten

    def drop(self, job: JobId, trajectory: TrajectoryId) -> list[TrajectoryId]:
        """The trajectory is over."""
        return [self._forget((job, trajectory))] if (job, trajectory) in self._pins else []

    def drop_replica(self, replica: ReplicaId) -> list[TrajectoryId]:
        """The replica left: its prefixes are gone."""
        return [self._forget(key) for key in list(self._on.get(replica, ()))]

    def drop_job(self, job: JobId) -> list[TrajectoryId]:
        """The job is over."""
        return [self._forget(key) for key in [key for key in self._pins if key[0] == job]]

    def _forget(self, key: tuple[JobId, TrajectoryId]) -> TrajectoryId:
        pin = self._pins.pop(key, None)
        if pin is not None:
            held = self._on[pin.replica]
            del held[key]
            if not held:
                del self._on[pin.replica]
        return key[1]
