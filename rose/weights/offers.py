"""Deltas that a publisher offers beside a job's versions, under other names: nobody has to take them.

A relay that has no room for an offer, or is gone meanwhile, raises nothing: the versions themselves are what
counts, and they come first.
"""

from __future__ import annotations

import contextlib

from rose.errors import RoseError
from rose.units import JobId, WeightVersion
from rose.weights.container import EncodedVersion
from rose.weights.relay import RelayFull
from rose.weights.relay.blocking import BlockingRelay


def offer(relay: BlockingRelay, encoded: EncodedVersion, *, keep: int | None = None) -> bool:
    """Push an offer, in place of one of that number; False if that was not to be.

    Of those before, the newest are kept so that there are `keep` with this one; None: all.
    """
    manifest = encoded.manifest
    try:
        lying = relay.stat(manifest.job).versions
        older = [version for version in lying if version < manifest.version]
        stale = [] if keep is None else older[: max(0, len(older) - keep + 1)]
        for version in (*stale, *(version for version in lying if version == manifest.version)):
            relay.delete(manifest.job, version)
        relay.abort(manifest.job, manifest.version)
        for bucket in manifest.buckets:
            data = encoded.buckets[bucket.name]
            relay.put_bucket(manifest.job, manifest.version, bucket.name, data, bucket.digest)
        return not relay.commit(manifest.job, manifest.version, manifest)
    except RelayFull:
        with contextlib.suppress(RoseError):
            relay.abort(manifest.job, manifest.version)
        return False
    except RoseError:
        return False


def withdraw_oldest(relay: BlockingRelay, job: JobId, version: WeightVersion) -> int:
    """Delete the oldest offer under the name `job`, up to that of `version`; its bytes, or 0."""
    for each in relay.stat(job).committed:
        if each.version <= version:
            relay.delete(job, each.version)
            return each.bytes
    return 0
