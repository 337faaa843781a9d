"""Replicas that get no turns for a while, since their attempts only fail or nothing comes from them.

A replica that fails at once is always the least loaded one, and would draw turn after turn, whatever its
health says.  After a pause it is tried again: one that hung, or that was left out before the scheduler's
restart, by one turn at a time, as it would cost each turn its patience.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rose.core.cluster_settings import ClusterSettings
from rose.core.readings import NEVER
from rose.units import JobId, ReplicaId

SUSPENDED = "replica_suspended"
"""Code of what is said when a replica begins to be left out."""


@dataclass(slots=True)
class Tally:
    """What ended on one replica since it came."""

    turns_finished: int = 0
    tokens: int = 0
    """Tokens of all attempts."""
    failures: int = 0
    """Attempts in a row that failed here without a token."""
    progress_open_ns: int = 0
    """Its open-gate clock when it last produced a token of any turn, or began one."""


class _Suspension(NamedTuple):
    job: JobId
    """That leases it."""
    until_ns: int
    hung: bool


class Over(NamedTuple):
    """A suspension that is over; the replica may run so many turns (None: up to the job's cap)."""

    replica: ReplicaId
    job: JobId
    most: int | None


class Suspensions:
    """Those of all jobs."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._suspended: dict[ReplicaId, _Suspension] = {}
        self._distrusted: set[ReplicaId] = set()
        """Left out before the scheduler's restart, and not leased since."""

    def __contains__(self, replica: ReplicaId) -> bool:
        return replica in self._suspended

    def next_deadline_ns(self) -> int:
        """When the next one is over, or NEVER."""
        return min((one.until_ns for one in self._suspended.values()), default=NEVER)

    def failed(self, replica: ReplicaId, job: JobId, tally: Tally, now_ns: int, *, hung: bool) -> str | None:
        """An attempt failed without a token: why to leave the replica out now, empty if that was said before.

        None: it stays in use, or is out already.  One that is `hung` has produced nothing for any turn; that
        once is enough.
        """
        if replica in self._suspended:
            return None  # sent before that: it was one fault that ended them all
        settings = self._settings
        tally.failures = max(tally.failures + 1, settings.failures_max if hung else 0)
        excess = tally.failures - settings.failures_max
        if excess < 0:
            return None
        pause_ns = min(settings.suspension_max_ns, settings.suspension_ns << min(excess, 16))
        self._suspended[replica] = _Suspension(job, now_ns + pause_ns, hung)
        if excess:
            return ""
        return (
            "nothing comes from it" if hung else f"{tally.failures} attempts in a row failed without a token"
        )

    def works(self, replica: ReplicaId, tally: Tally) -> bool:
        """Tokens came from it: whatever was wrong is over; whether it may be trusted with turns again."""
        if not tally.failures:
            return False
        tally.failures = 0
        return replica not in self._suspended

    def pop_over(self, now_ns: int) -> Iterator[Over]:
        """Those that are over by now."""
        for replica, one in list(self._suspended.items()):
            if now_ns >= one.until_ns:
                del self._suspended[replica]
                yield Over(replica, one.job, 1 if one.hung else None)

    def forget(self, replica: ReplicaId) -> None:
        """It left."""
        self._suspended.pop(replica, None)

    def distrust(self, replica: ReplicaId) -> None:
        """It was left out before the scheduler's restart."""
        self._distrusted.add(replica)

    def tried_again(self, replica: ReplicaId, tally: Tally) -> bool:
        """It was leased; whether by one turn at a time, as what was wrong before a restart may still be."""
        if replica not in self._distrusted:
            return False
        self._distrusted.discard(replica)
        tally.failures = self._settings.failures_max
        return True
