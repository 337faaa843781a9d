"""What a publisher tells of one version: how much of it there was, and what took how long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from rose.units import NS_PER_MS, WeightVersion
from rose.weights.inspection import Change, changes
from rose.weights.manifest import Manifest

_T = TypeVar("_T")


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one `publish` did."""

    version: WeightVersion
    base_version: WeightVersion | None
    """None: an anchor."""
    changed: int
    """Elements that differ from the version before, by their bits."""
    elements: int
    delta_bytes: int
    dense_bytes: int
    kinds: tuple[Change, ...]
    """What changed, and what it takes, by kind of tensor."""
    buckets: int
    encode_ms: float
    """Comparing, encoding and hashing; with several ranks, of the slowest."""
    verify_ms: float
    """Decoding it again and comparing with what the trainer gave; with several ranks, of the slowest."""
    push_ms: float
    stateful_ms: float = 0.0
    """Encoding, checking and pushing the stateful delta, if asked for."""
    stateful_bytes: int = 0
    """Its size; 0 where none was offered."""
    repeated: bool = False
    """The version was published before with the same bytes."""

    @property
    def density(self) -> float:
        """Share of elements that changed."""
        return self.changed / self.elements if self.elements else 0.0

    @property
    def bytes_per_changed(self) -> float:
        """Bytes on the wire per changed element."""
        return self.delta_bytes / max(1, self.changed)


def report_of(
    manifest: Manifest, *, encode_ms: float, verify_ms: float, push_ms: float, repeated: bool = False
) -> PublishReport:
    """The report of a version that was published as `manifest`."""
    return PublishReport(
        version=manifest.version,
        base_version=manifest.base_version,
        changed=manifest.changed,
        elements=manifest.elements,
        delta_bytes=manifest.delta_bytes,
        dense_bytes=manifest.dense_bytes,
        kinds=changes(manifest),
        buckets=len(manifest.buckets),
        encode_ms=encode_ms,
        verify_ms=verify_ms,
        push_ms=push_ms,
        repeated=repeated,
    )


def timed_ms(call: Callable[[], _T]) -> tuple[float, _T]:
    """How long the call took, and what it answered."""
    began_ns = time.monotonic_ns()
    outcome = call()
    return (time.monotonic_ns() - began_ns) / NS_PER_MS, outcome
