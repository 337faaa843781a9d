"""The relay: where trainers put weight versions, and hosts take them from.

A version is staged bucket by bucket and becomes visible, whole and for good, when its manifest is committed.
Committed versions are never evicted: a relay without room says so, and the trainer decides what goes.  All
operations may be repeated without harm.  A relay keeps versions in memory; after a restart it has a new epoch
and no versions, and the trainer publishes again.

Every relay implementation passes tests/conformance/test_relay.py.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

import msgspec

from rose.errors import NotFound, NotReady, RoseError
from rose.units import JobId, WeightVersion
from rose.weights.manifest import Manifest


class RelayFull(RoseError):
    """The relay has no room; nothing was evicted, nothing was stored."""


class RelayDenied(RoseError):
    """The relay does not accept our token."""


class RelayUnavailable(NotReady):
    """The relay did not answer before the deadline."""


class EpochChanged(NotReady):
    """The relay was restarted meanwhile: fetch the manifest again, once the trainer has republished."""


class VersionGone(NotFound):
    """No such committed version, or no such bucket in it."""


class VersionStat(msgspec.Struct, frozen=True, kw_only=True):
    """One committed version of a job."""

    version: WeightVersion
    base_version: WeightVersion | None
    bytes: int
    """Sum of its buckets."""
    encode_ms: float | None = None
    """What its trainer took to make and check it, if that was told."""
    push_ms: float | None = None
    """From the first byte until it was committed, as the relay saw it."""


class JobStat(msgspec.Struct, frozen=True, kw_only=True):
    """What a relay holds of a job."""

    epoch: str
    capacity_bytes: int
    used_bytes: int
    """Of all jobs, staged buckets and bookkeeping included."""
    committed: tuple[VersionStat, ...]
    """In order of version."""
    staged: tuple[WeightVersion, ...]

    @property
    def versions(self) -> tuple[WeightVersion, ...]:
        """The committed versions, in order."""
        return tuple(stat.version for stat in self.committed)


class Committed(msgspec.Struct, frozen=True):
    """A committed version's manifest, and the relay's epoch at that moment."""

    manifest: Manifest
    epoch: str


class Relay(Protocol):
    """What every relay offers.  All calls end by a deadline of the implementation: RelayUnavailable."""

    async def put_bucket(
        self, job: JobId, version: WeightVersion, bucket: str, data: bytes | memoryview, digest: str
    ) -> None:
        """Stage a bucket; once it returns, the relay holds these very bytes.  Idempotent.

        Raises VersionConflict if the bucket is staged with other bytes or the version is committed with
        another one, RelayFull, CorruptDelta if other bytes arrived than `digest` says.
        """

    async def commit(
        self, job: JobId, version: WeightVersion, manifest: Manifest, *, encode_ms: float | None = None
    ) -> tuple[str, ...]:
        """Make the version visible, whole and immutable.  Answers the missing buckets; none: it is committed.

        `encode_ms` is shown to those who ask what an update took (`VersionStat`), and means nothing else.
        Idempotent.  Raises VersionConflict if it is committed with another manifest, RelayFull.
        """

    async def abort(self, job: JobId, version: WeightVersion) -> None:
        """Drop what is staged of a version, if anything.  Committed versions stay."""

    async def stat(self, job: JobId) -> JobStat:
        """What the relay holds of the job; empty for one it does not know."""

    async def latest(self, job: JobId, after: WeightVersion, wait_s: float) -> WeightVersion | None:
        """The newest committed version above `after`; waits up to `wait_s` for one, then answers None."""

    async def manifest(self, job: JobId, version: WeightVersion) -> Committed:
        """Raises VersionGone, or CorruptDelta if the manifest does not decode."""

    async def get_into(
        self,
        job: JobId,
        version: WeightVersion,
        bucket: str,
        destination: memoryview,
        *,
        offset: int = 0,
        epoch: str | None = None,
    ) -> None:
        """Fill `destination` with the bucket's bytes from `offset`, resuming where a connection broke.

        The bytes are not verified.  Raises VersionGone, EpochChanged (also when the epoch is not
        `epoch`), CorruptDelta if the bucket is shorter.
        """

    async def delete(self, job: JobId, version: WeightVersion) -> bool:
        """Delete a committed version; answers whether there was one.  Readers at work finish first."""

    async def aclose(self) -> None:
        """Close connections."""

    async def __aenter__(self) -> Self:
        """Nothing happens until the first call."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close connections."""
