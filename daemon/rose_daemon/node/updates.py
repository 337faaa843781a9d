"""The latest weight updates of this host's engines, as `rose status` and the metrics show them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from rose.units import ReplicaId, WeightVersion
from rose.weights.inspection import Change, total

KEPT = 64
STAGING_PHASES = ("encode", "push", "pull", "verify", "decode")
"""Of a `Staging`, in their order; each has a field `<phase>_ms`."""


class Staging(msgspec.Struct, frozen=True, kw_only=True):
    """One version that was brought to this host, verified and decoded."""

    version: WeightVersion
    base_version: WeightVersion | None
    at_ns: int
    """When engines could have it."""
    encode_ms: float | None
    """What the trainer took to make and check it, as the relay was told; None if it was not."""
    push_ms: float | None
    """From the first bucket at the relay to the commit; None if the relay did not say."""
    pull_ms: float
    verify_ms: float
    decode_ms: float
    """Against the base, to patches on the disk."""
    delta_bytes: int
    """As it travelled."""
    kinds: tuple[Change, ...]
    """What it changes, by kind of tensor."""

    @property
    def change(self) -> Change:
        """What it changes in all."""
        return total(self.kinds)


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
    """The last updates and stagings, newest last; older ones only count."""

    def __init__(self) -> None:
        self._kept: deque[Update] = deque(maxlen=KEPT)
        self.stagings: deque[Staging] = deque(maxlen=KEPT)
        self.applied = 0
        self.refused = 0
        self.staged = 0
        self.staged_bytes = 0

    def add_staging(self, staging: Staging) -> None:
        """Note a version that lies ready."""
        self.stagings.append(staging)
        self.staged += 1
        self.staged_bytes += staging.delta_bytes

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

    def latest_applied(self) -> dict[ReplicaId, Update]:
        """The newest update of each replica that went well, of those kept."""
        return {update.replica: update for update in self._kept if update.ok}
