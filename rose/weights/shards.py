"""How parameters are laid out over buckets.

A shard is a run of a parameter's stored entries inside one bucket; it ends only where its bucket is full.
Coded versions have slices instead (`rose.weights.coding`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rose.weights.manifest import BUCKET_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Demand:
    """What one parameter needs: `entries` entries of `entry_bytes` each, and `header_bytes` per shard."""

    name: str
    entries: int
    entry_bytes: int
    header_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Entries [first, last) of a parameter."""

    name: str
    first: int
    last: int


def plan_buckets(
    demands: Iterable[Demand], *, reserved_bytes: int, limit_bytes: int = BUCKET_BYTES_MAX
) -> Iterator[list[Placement]]:
    """Fill buckets in order; each keeps `reserved_bytes` free and stays within `limit_bytes`.

    A parameter has at most one shard in a bucket.  Raises ValueError if one entry cannot fit an empty bucket.
    """
    bucket: list[Placement] = []
    room = limit_bytes - reserved_bytes
    for demand in demands:
        first = 0
        while first < demand.entries:
            fit = (room - demand.header_bytes) // demand.entry_bytes
            if fit > 0:
                last = min(first + fit, demand.entries)
                bucket.append(Placement(demand.name, first, last))
                room -= demand.header_bytes + (last - first) * demand.entry_bytes
                first = last
                continue
            if not bucket:
                raise ValueError(f"{demand.name}: not one entry fits a bucket of {limit_bytes} bytes")
            yield bucket
            bucket, room = [], limit_bytes - reserved_bytes
    if bucket:
        yield bucket
