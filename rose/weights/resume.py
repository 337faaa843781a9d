"""Where a job stands at the relay: its newest version, rebuilt from the checkpoint and what lies there."""

from __future__ import annotations

from dataclasses import dataclass

from rose.errors import CorruptDelta, WrongBase
from rose.units import JobId, WeightVersion
from rose.weights import container
from rose.weights.bits import Bits, State
from rose.weights.container import EncodedVersion
from rose.weights.digests import digest_state
from rose.weights.patches import apply_to_state, check_base, check_target
from rose.weights.relay.blocking import BlockingRelay


@dataclass(frozen=True, slots=True)
class Standing:
    """A job's newest version."""

    version: WeightVersion
    state: dict[str, Bits]
    chain: tuple[EncodedVersion, ...]
    """The versions that lead to it, oldest first."""
    epoch: str


def newest(relay: BlockingRelay, job: JobId, base_state: State, base_version: WeightVersion) -> Standing:
    """Fetch what leads from `base_state` (or from an anchor) to the newest version, and verify every byte.

    Raises WrongBase if the versions there do not follow from `base_state`, CorruptDelta, RelayUnavailable.
    """
    stat = relay.stat(job)
    bases = {each.version: each.base_version for each in stat.committed}
    version = max(bases, default=base_version)
    path: list[WeightVersion] = []
    at: WeightVersion | None = version
    while at is not None and at != base_version:
        if at not in bases:
            raise WrongBase(
                f"version {version} of {job} does not lead back to version {base_version}: {at} is gone",
                "delete the job's versions, or start from a later checkpoint",
            )
        path.append(at)
        at = bases[at]
    state = dict(base_state)
    digests = digest_state(state)
    chain = []
    for step in reversed(path):
        encoded = _fetch(relay, job, step)
        check_base(encoded.manifest, digests)
        patches = container.decode_patches(encoded.manifest, encoded.buckets, state)
        state = apply_to_state(state, patches)
        digests |= digest_state({patch.name: state[patch.name] for patch in patches})
        check_target(encoded.manifest, digests)
        chain.append(encoded)
    return Standing(version, state, tuple(chain), stat.epoch)


def _fetch(relay: BlockingRelay, job: JobId, version: WeightVersion) -> EncodedVersion:
    committed = relay.manifest(job, version)
    manifest = committed.manifest
    if (manifest.job, manifest.version) != (job, version) or manifest.undo:
        raise CorruptDelta(f"the relay answered version {manifest.version} of {manifest.job}")
    buckets: dict[str, bytes] = {}
    for bucket in manifest.buckets:
        data = bytearray(bucket.size)
        relay.get_into(job, version, bucket.name, memoryview(data), epoch=committed.epoch)
        buckets[bucket.name] = bytes(data)
    return EncodedVersion(manifest, buckets)
