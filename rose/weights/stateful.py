"""Stateful deltas on the wire: a version once more, in some percent fewer bytes, for hosts that remember.

Coded with what changed in the versions before (`rose.weights.history`).  They lie at the relay as versions of
a job of their own, beside the job they belong to, and are an offer: whoever does not remember, or finds none,
or one that is damaged or promises other weights, takes the version itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from rose.errors import CorruptDelta
from rose.units import JobId
from rose.weights import container, encoding
from rose.weights.bits import State
from rose.weights.coding import Coding
from rose.weights.container import EncodedVersion
from rose.weights.history import ChangeHistory, Notes
from rose.weights.manifest import Manifest, identity, stateful_job
from rose.weights.offers import offer
from rose.weights.patches import Patch
from rose.weights.relay.blocking import BlockingRelay

_KEPT = 2
"""Of the newest: a host may be fetching one while the next is published."""


class StatefulDeltas:
    """Offers every version in stateful form, from the second after an anchor or the start on.

    Takes a byte of host memory per element.
    """

    def __init__(self, relay: BlockingRelay, job: JobId, how: Coding) -> None:
        self._relay = relay
        self._job = stateful_job(job)
        self._how = how
        self._history = ChangeHistory()

    def offer(self, plain: EncodedVersion, base: State, target: State) -> int:
        """Offer a version that is about to be committed; answers the bytes of the offer, or 0.

        None is made that saves nothing, or for which the relay has no room.  Raises CorruptDelta if it does
        not decode to the target.
        """
        manifest = plain.manifest
        history = self._history
        if manifest.base_version is None or history.version != manifest.base_version or not history.span:
            return 0
        known = {each.name: each.base_digest for each in manifest.parameters if each.base_digest is not None}
        stateful = encoding.encode_coded(
            self._job,
            manifest.version,
            manifest.base_version,
            base,
            target,
            base_digests=known,
            target_digests=manifest.target_digests,
            how=self._how,
            history=history,
        )
        if stateful.manifest.delta_bytes >= manifest.delta_bytes:
            return 0
        container.decode_patches(
            stateful.manifest, stateful.buckets, base, threads=self._how.threads, history=history
        )
        return stateful.manifest.delta_bytes if offer(self._relay, stateful, keep=_KEPT) else 0

    def published(self, manifest: Manifest, patches: Iterable[Patch], base: State) -> None:
        """A version is committed: `patches` lead to it from `base`."""
        notes = Notes()
        if manifest.base_version is not None:
            for patch in patches:
                notes.add(patch, base[patch.name])
        self._history.arrived(manifest, notes)


def require_same_weights(offered: Manifest, version: Manifest) -> None:
    """Check that an offer leads from the same weights to the same weights as the version.

    The version's manifest is what its trainer stands by; an offer may be left over from an attempt that never
    became a version.  Raises CorruptDelta.
    """
    if identity(offered) != identity(version):
        raise CorruptDelta(f"an offer of version {version.version} promises other weights than the version")
