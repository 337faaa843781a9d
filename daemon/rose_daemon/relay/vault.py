"""What the embedded relay holds: staged and committed versions within a fixed number of bytes.

No I/O, no clock: the HTTP server drives it.  Everything is charged against the capacity (buckets, manifests,
bookkeeping), so nothing here can grow without bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rose.errors import VersionConflict
from rose.units import JobId, WeightVersion
from rose.weights import manifest as manifests
from rose.weights.bits import empty_buffer
from rose.weights.manifest import Manifest
from rose.weights.relay import JobStat, RelayFull, VersionGone, VersionStat

Key = tuple[JobId, WeightVersion]

_PAGE_BYTES = 4096
"""Granularity of charges: covers the bookkeeping of even the smallest bucket."""


@dataclass(eq=False)
class _Bucket:
    data: memoryview
    digest: str

    @property
    def charge_bytes(self) -> int:
        return _charge(len(self.data))


@dataclass(eq=False)
class _Staged:
    touched_s: float
    buckets: dict[str, _Bucket] = field(default_factory=dict)
    writers: int = 0


@dataclass(eq=False)
class _Committed:
    manifest: Manifest
    encoded: bytes
    buckets: dict[str, _Bucket]
    readers: int = 0
    deleted: bool = False

    @property
    def charge_bytes(self) -> int:
        return _charge(len(self.encoded)) + sum(bucket.charge_bytes for bucket in self.buckets.values())


@dataclass(eq=False)
class Reservation:
    """Room for one bucket that is being received into `data`; end it with `Vault.store` or `Vault.cancel`."""

    key: Key
    bucket: str
    digest: str
    data: memoryview
    """Not cleared: whoever stores it has filled all of it."""
    _staged: _Staged


class Vault:
    """Versions in memory.  Uncommitted ones are invisible, committed ones are never evicted."""

    def __init__(self, capacity_bytes: int, stage_ttl_s: float, epoch: str) -> None:
        self.capacity_bytes = capacity_bytes
        self.epoch = epoch
        self.used_bytes = 0
        self._stage_ttl_s = stage_ttl_s
        self._staged: dict[Key, _Staged] = {}
        self._committed: dict[Key, _Committed] = {}

    # ---- staging ----

    def reserve(self, key: Key, bucket: str, size: int, digest: str, now_s: float) -> Reservation | None:
        """Room for a bucket of `size` bytes; None if these very bytes are here already.

        Raises VersionConflict if it is here with other bytes, RelayFull.
        """
        if self._known(key, bucket, size, digest):
            return None
        self.expire(now_s)
        self._charge(_charge(size))
        staged = self._staged.setdefault(key, _Staged(now_s))
        staged.writers += 1
        return Reservation(key, bucket, digest, empty_buffer(size), staged)

    def store(self, reservation: Reservation, now_s: float) -> None:
        """Keep the bucket, whose bytes the caller has verified.  Of two writers the first one wins.

        Raises VersionConflict if other bytes came first, VersionGone if the version was aborted meanwhile.
        """
        staged, key = reservation._staged, reservation.key
        charge = _charge(len(reservation.data))
        staged.writers -= 1
        staged.touched_s = now_s
        try:
            known = self._known(key, reservation.bucket, len(reservation.data), reservation.digest)
        except VersionConflict:
            self.used_bytes -= charge
            raise
        if known:
            self.used_bytes -= charge
        elif self._staged.get(key) is not staged:
            self.used_bytes -= charge
            raise VersionGone(f"version {key[1]} was aborted while {reservation.bucket} was on its way")
        else:
            staged.buckets[reservation.bucket] = _Bucket(reservation.data, reservation.digest)

    def cancel(self, reservation: Reservation, now_s: float) -> None:
        """Give the room back: the bucket did not arrive whole."""
        staged = reservation._staged
        staged.writers -= 1
        staged.touched_s = now_s
        self.used_bytes -= _charge(len(reservation.data))
        if not staged.buckets and not staged.writers and self._staged.get(reservation.key) is staged:
            del self._staged[reservation.key]

    def abort(self, key: Key) -> None:
        """Drop what is staged of a version, if anything."""
        if staged := self._staged.pop(key, None):
            self.used_bytes -= sum(bucket.charge_bytes for bucket in staged.buckets.values())

    def expire(self, now_s: float) -> None:
        """Drop staged versions that nobody has touched for the time to live."""
        for key, staged in list(self._staged.items()):
            if not staged.writers and now_s - staged.touched_s > self._stage_ttl_s:
                self.abort(key)

    # ---- committed versions ----

    def commit(self, key: Key, manifest: Manifest) -> tuple[str, ...]:
        """Make a version visible; answers the buckets that are missing, in which case nothing changes.

        Raises VersionConflict if it is committed with another manifest, RelayFull.
        """
        if committed := self._committed.get(key):
            if committed.manifest != manifest:
                raise VersionConflict(f"version {key[1]} is committed with another manifest")
            return ()
        staged = self._staged.get(key, _Staged(0))
        missing = tuple(
            wanted.name
            for wanted in manifest.buckets
            if (held := staged.buckets.get(wanted.name)) is None
            or (len(held.data), held.digest) != (wanted.size, wanted.digest)
        )
        if missing:
            return missing
        encoded = manifests.encode(manifest)
        self._charge(_charge(len(encoded)))
        wanted_names = {wanted.name for wanted in manifest.buckets}
        self._committed[key] = _Committed(
            manifest, encoded, {name: staged.buckets.pop(name) for name in wanted_names}
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

    @contextmanager
    def reading(self, key: Key, bucket: str) -> Iterator[memoryview]:
        """A bucket's bytes; they stay charged until the reader is done.  Raises VersionGone."""
        committed = self._find(key)
        if bucket not in committed.buckets:
            raise VersionGone(f"version {key[1]} of {key[0]} has no {bucket}")
        committed.readers += 1
        try:
            yield committed.buckets[bucket].data
        finally:
            committed.readers -= 1
            self._free_if_done(committed)

    def delete(self, key: Key) -> bool:
        """Delete a committed version; its room is free once its readers are done."""
        if (committed := self._committed.pop(key, None)) is None:
            return False
        committed.deleted = True
        self._free_if_done(committed)
        return True

    def stat(self, job: JobId) -> JobStat:
        """What is held of a job."""
        return JobStat(
            epoch=self.epoch,
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.used_bytes,
            committed=tuple(
                VersionStat(
                    version=key[1],
                    base_version=committed.manifest.base_version,
                    bytes=committed.manifest.delta_bytes,
                )
                for key, committed in sorted(self._committed.items())
                if key[0] == job
            ),
            staged=tuple(sorted(version for of, version in self._staged if of == job)),
        )

    # ---- inside ----

    def _known(self, key: Key, bucket: str, size: int, digest: str) -> bool:
        """Whether the bucket is held with these bytes.  Raises VersionConflict."""
        committed = self._committed.get(key)
        buckets = committed.buckets if committed else self._staged[key].buckets if key in self._staged else {}
        held = buckets.get(bucket)
        if held is None and committed is None:
            return False
        if held is None or (len(held.data), held.digest) != (size, digest):
            state = "committed" if committed else "staged"
            raise VersionConflict(f"version {key[1]} of {key[0]} is {state} with another {bucket}")
        return True

    def _find(self, key: Key) -> _Committed:
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

    def _free_if_done(self, committed: _Committed) -> None:
        if committed.deleted and not committed.readers:
            self.used_bytes -= committed.charge_bytes
            committed.buckets = {}
            committed.deleted = False


def _charge(size: int) -> int:
    """Bytes charged for an object of `size` bytes."""
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES + _PAGE_BYTES
