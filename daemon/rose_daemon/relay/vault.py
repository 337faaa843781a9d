"""What a relay holds: staged and committed versions within a fixed number of bytes.

No I/O, no clock: the HTTP server drives it.  Everything is charged against the capacity (buckets, manifests,
bookkeeping), so nothing here can grow without bound.  Where the bytes of a bucket lie is a matter of the pool
that makes its block; a block that is no longer wanted stays charged until the pool has its memory back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from rose.errors import VersionConflict
from rose.units import JobId, WeightVersion
from rose.weights import manifest as manifests
from rose.weights.manifest import Manifest
from rose.weights.relay import JobStat, RelayFull, VersionGone, VersionStat

Key = tuple[JobId, WeightVersion]

_MS_PER_S = 1000.0
_PAGE_BYTES = 4096
"""Granularity of charges: covers the bookkeeping of even the smallest bucket."""


class Block(Protocol):
    """Memory for one bucket."""

    @property
    def size(self) -> int:
        """Bytes of the bucket."""


B = TypeVar("B", bound=Block)


@dataclass(eq=False)
class _Bucket(Generic[B]):
    block: B
    digest: str

    @property
    def content(self) -> tuple[int, str]:
        return self.block.size, self.digest


@dataclass(eq=False)
class _Staged(Generic[B]):
    touched_s: float
    began_s: float
    buckets: dict[str, _Bucket[B]] = field(default_factory=dict)
    writers: int = 0


@dataclass(eq=False)
class _Committed(Generic[B]):
    manifest: Manifest
    encoded: bytes
    buckets: dict[str, _Bucket[B]]
    stat: VersionStat
    readers: int = 0
    deleted: bool = False


@dataclass(eq=False)
class Reservation(Generic[B]):
    """Room for one bucket that is on its way into `block`; end it with `Vault.store` or `Vault.cancel`."""

    key: Key
    bucket: str
    digest: str
    block: B
    _staged: _Staged[B]


class Vault(Generic[B]):
    """Versions of a relay.  Uncommitted ones are invisible, committed ones are never evicted.

    `allocate` makes a block of so many bytes for a bucket; it may raise RelayFull.  Blocks that are no longer
    wanted are in `doomed`; whoever took back the memory of one calls `freed`.
    """

    def __init__(
        self, capacity_bytes: int, stage_ttl_s: float, epoch: str, allocate: Callable[[Key, str, int], B]
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.epoch = epoch
        self.used_bytes = 0
        self._stage_ttl_s = stage_ttl_s
        self._allocate = allocate
        self._staged: dict[Key, _Staged[B]] = {}
        self._committed: dict[Key, _Committed[B]] = {}
        self._doomed: dict[int, B] = {}

    # ---- staging ----

    def reserve(self, key: Key, bucket: str, size: int, digest: str, now_s: float) -> Reservation[B] | None:
        """Room for a bucket of `size` bytes; None if these very bytes are here already.

        Raises VersionConflict if it is here with other bytes, RelayFull.
        """
        if self._known(key, bucket, size, digest):
            return None
        self.expire(now_s)
        charge = _charge(size)
        self._charge(charge)
        try:
            block = self._allocate(key, bucket, size)
        except RelayFull:
            self.used_bytes -= charge
            raise
        staged = self._staged.setdefault(key, _Staged(now_s, now_s))
        staged.writers += 1
        return Reservation(key, bucket, digest, block, staged)

    def store(self, reservation: Reservation[B], now_s: float) -> None:
        """Keep the bucket, whose bytes the caller has verified.  Of two writers the first one wins.

        Raises VersionConflict if other bytes came first, VersionGone if the version was aborted meanwhile.
        """
        staged, key, block = reservation._staged, reservation.key, reservation.block
        staged.writers -= 1
        staged.touched_s = now_s
        try:
            known = self._known(key, reservation.bucket, block.size, reservation.digest)
        except VersionConflict:
            self._doom(block)
            raise
        if known:
            self._doom(block)
        elif self._staged.get(key) is not staged:
            self._doom(block)
            raise VersionGone(f"version {key[1]} was aborted while {reservation.bucket} was on its way")
        else:
            staged.buckets[reservation.bucket] = _Bucket(block, reservation.digest)

    def cancel(self, reservation: Reservation[B], now_s: float) -> None:
        """Give the room back: the bucket did not arrive whole."""
        staged = reservation._staged
        staged.writers -= 1
        staged.touched_s = now_s
        self._doom(reservation.block)
        if not staged.buckets and not staged.writers and self._staged.get(reservation.key) is staged:
            del self._staged[reservation.key]

    def abort(self, key: Key) -> None:
        """Drop what is staged of a version, if anything."""
        if staged := self._staged.pop(key, None):
            self._doom_all(staged.buckets)

    def expire(self, now_s: float) -> None:
        """Drop staged versions that nobody has touched for the time to live."""
        for key, staged in list(self._staged.items()):
            if not staged.writers and now_s - staged.touched_s > self._stage_ttl_s:
                self.abort(key)

    # ---- committed versions ----

    def commit(
        self, key: Key, manifest: Manifest, now_s: float, *, encode_ms: float | None = None
    ) -> tuple[str, ...]:
        """Make a version visible; answers the buckets that are missing, in which case nothing changes.

        Raises VersionConflict if it is committed with another manifest, RelayFull.
        """
        if committed := self._committed.get(key):
            if committed.manifest != manifest:
                raise VersionConflict(f"version {key[1]} is committed with another manifest")
            return ()
        staged = self._staged.get(key, _Staged(now_s, now_s))
        missing = tuple(
            wanted.name
            for wanted in manifest.buckets
            if (held := staged.buckets.get(wanted.name)) is None
            or held.content != (wanted.size, wanted.digest)
        )
        if missing:
            return missing
        encoded = manifests.encode(manifest)
        self._charge(_charge(len(encoded)))
        wanted_names = {wanted.name for wanted in manifest.buckets}
        stat = VersionStat(
            version=key[1],
            base_version=manifest.base_version,
            bytes=manifest.delta_bytes,
            encode_ms=encode_ms,
            push_ms=(now_s - staged.began_s) * _MS_PER_S,
        )
        self._committed[key] = _Committed(
            manifest, encoded, {name: staged.buckets.pop(name) for name in wanted_names}, stat
        )
        self.abort(key)
        return ()

    def manifest(self, key: Key) -> bytes:
        """The encoded manifest.  Raises VersionGone."""
        return self._find(key).encoded

    def newest(self, job: JobId, after: WeightVersion) -> WeightVersion | None:
        """The newest committed version above `after`."""
        return max(
            (version for of, version in self._committed if of == job and version > after), default=None
        )

    def block(self, key: Key, bucket: str) -> B:
        """Where a bucket of a committed version lies.  Raises VersionGone."""
        buckets = self._find(key).buckets
        if bucket not in buckets:
            raise VersionGone(f"version {key[1]} of {key[0]} has no {bucket}")
        return buckets[bucket].block

    @contextmanager
    def reading(self, key: Key, bucket: str) -> Iterator[B]:
        """A bucket's block, which is not doomed before the reader is done.  Raises VersionGone."""
        block = self.block(key, bucket)
        committed = self._find(key)
        committed.readers += 1
        try:
            yield block
        finally:
            committed.readers -= 1
            self._doom_if_done(committed)

    def delete(self, key: Key) -> bool:
        """Delete a committed version; its blocks are doomed once its readers are done."""
        if (committed := self._committed.pop(key, None)) is None:
            return False
        committed.deleted = True
        self._doom_if_done(committed)
        return True

    def committed_blocks(self) -> list[B]:
        """The blocks of all committed versions."""
        return [
            bucket.block for committed in self._committed.values() for bucket in committed.buckets.values()
        ]

    def reset(self, epoch: str) -> None:
        """Forget everything and begin another epoch: the bytes are lost."""
        self.epoch = epoch
        for key in list(self._staged):
            self.abort(key)
        for key in list(self._committed):
            self.delete(key)

    def jobs(self) -> list[JobId]:
        """All jobs of which there are committed versions."""
        return sorted({job for job, _ in self._committed})

    def stat(self, job: JobId) -> JobStat:
        """What is held of a job."""
        return JobStat(
            epoch=self.epoch,
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.used_bytes,
            committed=tuple(
                committed.stat for key, committed in sorted(self._committed.items()) if key[0] == job
            ),
            staged=tuple(sorted(version for of, version in self._staged if of == job)),
        )

    # ---- memory that is to be taken back ----

    def doomed(self) -> list[B]:
        """Blocks that are no longer wanted, and still charged."""
        return list(self._doomed.values())

    def freed(self, block: B) -> None:
        """The memory of a doomed block was taken back."""
        if self._doomed.pop(id(block), None) is not None:
            self.used_bytes -= _charge(block.size)

    # ---- inside ----

    def _known(self, key: Key, bucket: str, size: int, digest: str) -> bool:
        """Whether the bucket is held with these bytes.  Raises VersionConflict."""
        committed = self._committed.get(key)
        buckets = committed.buckets if committed else self._staged[key].buckets if key in self._staged else {}
        held = buckets.get(bucket)
        if held is None and committed is None:
            return False
        if held is None or held.content != (size, digest):
            state = "committed" if committed else "staged"
            raise VersionConflict(f"version {key[1]} of {key[0]} is {state} with another {bucket}")
        return True

    def _find(self, key: Key) -> _Committed[B]:
        if (committed := self._committed.get(key)) is None:
            raise VersionGone(f"no version {key[1]} of {key[0]} here")
        return committed

    def _charge(self, charge_bytes: int) -> None:
        if self.used_bytes + charge_bytes > self.capacity_bytes:
            raise RelayFull(
                f"no room for {charge_bytes} bytes: {self.used_bytes} of {self.capacity_bytes} are in use",
                "delete versions, or raise relay.capacity_bytes",
            )
        self.used_bytes += charge_bytes

    def _doom_if_done(self, committed: _Committed[B]) -> None:
        if committed.deleted and not committed.readers:
            self._doom_all(committed.buckets)
            committed.buckets = {}
            committed.deleted = False
            self.used_bytes -= _charge(len(committed.encoded))

    def _doom_all(self, buckets: dict[str, _Bucket[B]]) -> None:
        for bucket in buckets.values():
            self._doom(bucket.block)

    def _doom(self, block: B) -> None:
        self._doomed[id(block)] = block


def _charge(size: int) -> int:
    """Bytes charged for an object of `size` bytes."""
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES + _PAGE_BYTES
