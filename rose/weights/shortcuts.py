"""Squashed deltas on the wire: what a late host takes instead of a chain of versions.

    v8 ── v9 ── v10 ── ... ── v16        the versions, each a delta on the one before
     └───────────────────────▶ v16       the same in one step, in fewer bytes

Elements that changed in several of the versions travel once.  Only the trainer can make it in the coded form,
as coding takes the bytes of the base: it keeps those of one earlier version for it.  At the relay squashed
deltas are the versions of a job of their own, beside the job they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping

from rose.units import JobId, WeightVersion
from rose.weights import encoding
from rose.weights.bits import State
from rose.weights.coding import Coding
from rose.weights.manifest import Manifest, squashed_job
from rose.weights.offers import offer
from rose.weights.relay.blocking import BlockingRelay


class Shortcuts:
    """Offers, for every version divisible by `every`, a delta on the last such version (or the first state).

    It keeps a copy of that state: as much host memory as the model takes.
    """

    def __init__(self, relay: BlockingRelay, job: JobId, every: int, how: Coding) -> None:
        if every < 2:
            raise ValueError("squash_every must be at least 2")
        self._relay = relay
        self._job = squashed_job(job)
        self._every = every
        self._how = how

    def begin(self, version: WeightVersion, state: State, digests: Mapping[str, str]) -> None:
        """The next shortcut leads from here."""
        self._version = version
        self._state = {name: bits.copy() for name, bits in state.items()}
        self._digests = digests
        self._steps = self._chain_bytes = 0

    def published(self, manifest: Manifest, state: State, digests: Mapping[str, str]) -> int:
        """A version is committed, and this is its state; answers the bytes of a shortcut offered to it, or 0.

        None is offered that is larger than the way it shortens, or for which the relay has no room.  A relay
        that is gone meanwhile raises nothing either: the version itself is safe.
        """
        anchor = manifest.base_version is None
        self._steps = 1 if anchor else self._steps + 1
        self._chain_bytes = manifest.delta_bytes + (0 if anchor else self._chain_bytes)
        if manifest.version % self._every:
            return 0
        offered = 0
        if self._steps > 1:
            squashed = encoding.encode_coded(
                self._job,
                manifest.version,
                self._version,
                self._state,
                state,
                base_digests=self._digests,
                target_digests=digests,
                how=self._how,
            )
            if squashed.manifest.delta_bytes < self._chain_bytes and offer(self._relay, squashed):
                offered = squashed.manifest.delta_bytes
        self.begin(manifest.version, state, digests)
        return offered
