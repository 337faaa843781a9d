"""The latest weight updates of this host's engines, as `rose status` and the metrics show them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from rose.units import ReplicaId, WeightVersion

KEPT = 64


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to bring an engine to a version."""

    replica: ReplicaId
    version: WeightVersion
    base_version: WeightVersion
    ok: bool
    reason: str = ""
    at_ns: int
    """When it ended."""
    total_ms: float
    """From request to verified digests, as rosed saw it."""
    engine_ms: dict[str, float] = msgspec.field(default_factory=dict)
    """Phases as the engine measured them: stage, pause, apply, total."""
    changed: int = 0
    """Elements that the engine changed."""
    delta_bytes: int = 0
    dense_bytes: int = 0
    parameters_verified: int = 0
    """Parameters whose digest, computed from live memory, equals the trainer's."""


class UpdateHistory:
    """The last updates, newest last; older ones only count."""

    def __init__(self) -> None:
        self._kept: deque[Update] = deque(maxlen=KEPT)
        self.applied = 0
        self.refused = 0

    def add(self, update: Update) -> None:
        """Note an attempt."""
        self._kept.append(update)
        if update.ok:
            self.applied += 1
        else:
            self.refused += 1

    def __iter__(self) -> Iterator[Update]:
        return iter(self._kept)

    def latest(self, replica: ReplicaId | None = None) -> Update | None:
        """The newest attempt, of one replica or of any."""
        for update in reversed(self._kept):
            if replica is None or update.replica == replica:
                return update
        return None
