"""The trainer's side: after each optimiser step, publish what changed.

Version `base_version` is the checkpoint that everybody holds already; it is not uploaded.  The publisher
keeps the bits of the last published version (one copy of the model in host memory) and the encoded bytes of
the last few, which it pushes again when the relay was restarted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self, TypedDict, TypeVar, Unpack

import msgspec

from rose.closing import Closing
from rose.config import RelayConfig
from rose.errors import CorruptDelta, RoseError, VersionConflict
from rose.units import JobId, WeightVersion
from rose.weights import container, encoding, resume
from rose.weights import manifest as manifests
from rose.weights.bits import Bits, State, as_state
from rose.weights.coding import DEFAULT, Coding
from rose.weights.container import EncodedVersion
from rose.weights.digests import digest_state
from rose.weights.manifest import Bucket, squashed_job, stateful_job
from rose.weights.offers import withdraw_oldest
from rose.weights.ondevice import DeviceBases, Distant, on_gpu, require_cupy
from rose.weights.patches import Patch, write_patch
from rose.weights.relay import JobStat, RelayFull
from rose.weights.relay.blocking import BlockingRelay
from rose.weights.relay.connecting import connect
from rose.weights.relay.ranges import PARALLEL
from rose.weights.reports import PublishReport, report_of, timed_ms
from rose.weights.shortcuts import Shortcuts
from rose.weights.stateful import StatefulDeltas

_COMMIT_ROUNDS_MAX = 3
"""Pushes of one version before giving up: a relay that restarts meanwhile loses what was staged."""
_CHECKPOINT = WeightVersion(0)
_ROOM_MAX_S = 30.0
_ROOM_POLL_S = 0.1
_BYTES_PER_FILE = 8192
"""At most a relay's bookkeeping and padding for a bucket or a manifest."""
_BYTES_PER_VERSION_MIN = 12288
"""At least what a relay needs for a version beside its buckets' bytes."""
_T = TypeVar("_T")


class Options(TypedDict, total=False):
    """How a publisher works, beside what it needs to begin."""

    base_version: WeightVersion
    """Number of the state it begins with; 0."""
    keep: int
    """Versions that are pushed again after the relay restarts; a full relay loses older ones first; 4."""
    anchor_every: int | None
    """n: publish each version divisible by n whole, so that a receiver may begin there; None: none."""
    coding: Coding
    """How deltas are coded: classes by speed of the link, threads."""
    squash_every: int | None
    """n: for each version divisible by n offer one delta from the last such version too, where that is fewer
    bytes than the versions between; takes another copy of the model in host memory.  None: never."""
    stateful: bool
    """Offer each version also coded with what changed in the versions before, to hosts with
    `node.weights_stateful`: some percent fewer bytes, for another encoding and a byte of host memory per
    element; False."""
    on_gpu: bool
    """Compare CUDA tensors with the version before on their GPU, where another copy of them is kept, so that
    only changes come to the host; takes CuPy (extra `gpu`).  False: they are copied to the host whole."""


class Publisher(Closing):
    """Publishes the weight versions of one job.  One thread, one publisher per job.

    The state given to `publish` maps checkpoint names to torch tensors (any device), NumPy arrays or Bits,
    and must not change while the call runs.  `Options` lists the keywords.  Where the versions that are left
    at the relay no longer follow from the checkpoint, the next one is published whole, if it has room for it.
    """

    def __init__(
        self,
        relay: BlockingRelay,
        job: JobId,
        base_state: Mapping[str, object],
        **options: Unpack[Options],
    ) -> None:
        keep, anchor_every = options.get("keep", 4), options.get("anchor_every")
        base_version = options.get("base_version", _CHECKPOINT)
        if keep < 1 or (anchor_every is not None and anchor_every < 1):
            raise ValueError("keep and anchor_every must be at least 1")
        self._relay = relay
        self._job = job
        self._keep = keep
        self._anchor_every = anchor_every
        self._coding = options.get("coding", DEFAULT)
        self._held: dict[str, Bits] = {name: bits.copy() for name, bits in as_state(base_state).items()}
        self._digests = digest_state(self._held)
        self._version = base_version
        self._base_version = base_version
        self._kept: dict[WeightVersion, EncodedVersion] = {}
        self._unsettled: EncodedVersion | None = None
        self._newest_there = _CHECKPOINT
        """The relay's newest version, as of the latest `heal`."""
        self._making_room = threading.Lock()
        self._epoch: str | None = None
        squash_every = options.get("squash_every")
        self._shortcuts = Shortcuts(relay, job, squash_every, self._coding) if squash_every else None
        self._begin_shortcuts()
        self._stateful = StatefulDeltas(relay, job, self._coding) if options.get("stateful") else None
        if options.get("on_gpu"):
            require_cupy()
        self._on_device = DeviceBases(on_gpu) if options.get("on_gpu") else None
        self._anchor_bytes = 0
        """Size of the last anchor; what the next one will be like."""

    @classmethod
    def connect(
        cls,
        config: RelayConfig,
        job: JobId,
        base_state: Mapping[str, object],
        *,
        timeout_s: float = 60,
        **options: Unpack[Options],
    ) -> Self:
        """A publisher that talks to the configured relay; close it.  Raises ConfigError."""
        relay = BlockingRelay(connect(config, timeout_s=timeout_s))
        return cls(relay, job, base_state, **options)

    @classmethod
    def resume(
        cls,
        relay: BlockingRelay,
        job: JobId,
        base_state: Mapping[str, object],
        **options: Unpack[Options],
    ) -> Self:
        """A publisher that goes on where a former one of the job stopped, however that ended.

        `base_state` is the checkpoint that everybody holds.  The newest version is taken from the relay: see
        `version` for what to publish next.  Raises WrongBase if it does not follow from the checkpoint.
        """
        base = as_state(base_state)
        standing = resume.newest(relay, job, base, options.get("base_version", _CHECKPOINT))
        publisher = cls(relay, job, standing.state, **options)
        publisher._version = standing.version
        publisher._begin_shortcuts()
        publisher._epoch = standing.epoch
        publisher._kept = {each.manifest.version: each for each in standing.chain[-publisher._keep :]}
        return publisher

    @property
    def version(self) -> WeightVersion:
        """The newest version known to be committed; the base at first."""
        return self._version

    @property
    def digests(self) -> Mapping[str, str]:
        """Digest of every parameter in `version`."""
        return self._digests

    @property
    def state(self) -> State:
        """Every parameter in `version`: the publisher's own memory, to be read and not written."""
        return self._held

    def publish(self, version: WeightVersion, state: Mapping[str, object]) -> PublishReport:
        """Publish `state` as `version`, a delta on the version before.

        When it returns, the relay has committed it.  When it raises, the version is not known to be committed
        and may be published again: the same bytes are taken up where they were left, other bytes are refused
        once the version is visible.  Raises VersionConflict, WrongBase (another model), UnsupportedTensor,
        RelayFull, RelayUnavailable, CorruptDelta (the encoder failed its own check; nothing was pushed).
        """
        self.heal()
        fetch_ms, (target, distant) = timed_ms(lambda: self._fetch(state))
        if version == self._version:
            return self._repeat(target)
        if version < self._version:
            raise VersionConflict(
                f"version {version} cannot follow version {self._version} of {self._job}",
                "versions of a job only grow",
            )
        if version < self._newest_there:
            raise VersionConflict(
                f"the relay has version {self._newest_there} of {self._job}: nobody would take {version}",
                "Publisher.resume goes on from there; a new run needs a job id of its own",
            )
        encode_ms, (encoded, digests) = timed_ms(lambda: self._encode(version, target, distant))
        encode_ms += fetch_ms
        verify_ms, patches = timed_ms(lambda: self._decode_again(encoded))
        stateful_ms, stateful_bytes = timed_ms(lambda: self._offer_stateful(encoded, target))
        self._unsettled = encoded
        push_ms, _ = timed_ms(lambda: self._push(encoded, encode_ms + verify_ms))
        self._advance(encoded, patches, digests)
        report = report_of(encoded.manifest, encode_ms=encode_ms, verify_ms=verify_ms, push_ms=push_ms)
        return msgspec.structs.replace(report, stateful_ms=stateful_ms, stateful_bytes=stateful_bytes)

    def heal(self) -> tuple[WeightVersion, ...]:
        """Push again what a restarted relay has lost; answers those versions.

        `publish` does it first.  A trainer whose steps take long may call it in between.
        """
        stat = self._relay.stat(self._job)
        self._settle(stat.versions)
        self._newest_there = max(stat.versions, default=_CHECKPOINT)
        lost: tuple[WeightVersion, ...] = ()
        if stat.epoch != self._epoch:
            lost = tuple(version for version in sorted(self._kept) if version not in stat.versions)
            for version in lost:
                self._push(self._kept[version])
        self._epoch = stat.epoch
        return lost

    def close(self) -> None:
        """Close connections."""
        self._relay.close()

    # ---- inside ----

    def _fetch(self, state: Mapping[str, object]) -> tuple[State, Distant]:
        """The state in host memory, and what of it can be encoded where it lies."""
        if self._on_device is None:
            return as_state(state), {}
        return self._on_device.compare(state, self._held)

    def _begin_shortcuts(self) -> None:
        if self._shortcuts is not None:
            self._shortcuts.begin(self._version, self._held, self._digests)

    def _encode(
        self, version: WeightVersion, target: State, distant: Distant
    ) -> tuple[EncodedVersion, dict[str, str]]:
        digests = digest_state(target)

        def encode(*, anchor: bool) -> EncodedVersion:
            return encoding.encode_coded(
                self._job,
                version,
                None if anchor else self._version,
                None if anchor else self._held,
                target,
                base_digests=self._digests,
                target_digests=digests,
                how=self._coding,
                distant=distant,
            )

        if self._anchor_every is not None and version % self._anchor_every == 0:
            return encode(anchor=True), digests
        stat = self._relay.stat(self._job)
        ours_bytes = sum(each.bytes + _BYTES_PER_VERSION_MIN for each in stat.committed)
        room_bytes = stat.capacity_bytes - stat.used_bytes + ours_bytes
        if self._leads_nowhere(stat) and self._anchor_bytes <= room_bytes:
            anchor = encode(anchor=True)
            self._anchor_bytes = anchor.manifest.delta_bytes + _bookkeeping_bytes(anchor)
            if self._anchor_bytes <= room_bytes:
                return anchor, digests
        return encode(anchor=False), digests

    def _leads_nowhere(self, stat: JobStat) -> bool:
        """Whether the relay's versions lead nowhere from the checkpoint.

        So it is after a restart, or when it was full: engines that start anew could never get on.
        """
        bases = {each.version: each.base_version for each in stat.committed}
        version: WeightVersion | None = self._version
        while version is not None and version != self._base_version:
            if version not in bases:
                break
            version = bases[version]
        return version not in (None, self._base_version)

    def _offer_stateful(self, encoded: EncodedVersion, target: State) -> int:
        """Before the version is committed, as hosts look for the offer when they hear of the version."""
        return 0 if self._stateful is None else self._stateful.offer(encoded, self._held, target)

    def _push(self, encoded: EncodedVersion, encode_ms: float | None = None) -> None:
        """Have the relay commit a version, whatever is there of it already."""
        manifest = encoded.manifest
        commit = partial(self._relay.commit, self._job, manifest.version, manifest, encode_ms=encode_ms)
        missing = commit()
        for _ in range(_COMMIT_ROUNDS_MAX):
            if not missing:
                return
            try:
                self._put(encoded, missing)
            except VersionConflict:
                # Left over from an attempt with other bytes.  Aborting leaves a committed version alone, and
                # then the second attempt meets the same conflict.
                self._relay.abort(self._job, manifest.version)
                self._put(encoded, missing)
            missing = self._with_room(encoded, commit)
        raise RoseError(
            f"the relay lost buckets of version {manifest.version} {_COMMIT_ROUNDS_MAX} times",
            "is it being restarted, or is relay.stage_ttl_s too short?",
        )

    def _put(self, encoded: EncodedVersion, names: Collection[str]) -> None:
        """Push buckets, several at a time: each waits for the relay before and after its bytes."""
        version = encoded.manifest.version

        def put(bucket: Bucket) -> None:
            data = encoded.buckets[bucket.name]
            self._with_room(
                encoded, lambda: self._relay.put_bucket(self._job, version, bucket.name, data, bucket.digest)
            )

        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="rose-push") as threads:
            wanted = [bucket for bucket in encoded.manifest.buckets if bucket.name in names]
            for done in [threads.submit(put, bucket) for bucket in wanted]:
                done.result()

    def _with_room(self, encoded: EncodedVersion, call: Callable[[], _T]) -> _T:
        """Make the call; while the relay is full, delete this job's oldest version that need not be kept.

        Before an anchor none need be: whoever holds an older version, or none, goes on with the anchor.
        """
        anchor = encoded.manifest.base_version is None
        while True:
            try:
                return call()
            except RelayFull:
                with self._making_room:
                    if not self._make_room(encoded.manifest.version, anchor=anchor):
                        raise

    def _make_room(self, version: WeightVersion, *, anchor: bool) -> bool:
        """Delete the oldest of what need not be kept; False if there is nothing.

        Stateful offers first, which are of no use for long; squashed ones last, as late hosts come by them
        where versions are gone.
        """
        stat = self._relay.stat(self._job)
        if nbytes := withdraw_oldest(self._relay, stateful_job(self._job), version):
            self._await_room(stat.used_bytes - nbytes)
            return True
        droppable = [
            each
            for each in (stat.versions if anchor else stat.versions[: -self._keep])
            if each < version and (anchor or each not in self._kept)
        ]
        if not droppable:
            nbytes = withdraw_oldest(self._relay, squashed_job(self._job), version)
            if nbytes:
                self._await_room(stat.used_bytes - nbytes)
            return nbytes > 0
        self._kept.pop(droppable[0], None)
        self._relay.delete(self._job, droppable[0])
        bytes_of = {each.version: each.bytes for each in stat.committed}
        self._await_room(stat.used_bytes - bytes_of[droppable[0]])
        return True

    def _await_room(self, used_bytes: int) -> None:
        """Wait for a deleted version's memory, which readers may still hold: or the next would go too."""
        for _ in range(int(_ROOM_MAX_S / _ROOM_POLL_S)):
            if self._relay.stat(self._job).used_bytes <= used_bytes:
                return
            time.sleep(_ROOM_POLL_S)

    def _settle(self, committed: tuple[WeightVersion, ...]) -> None:
        """Find out what became of a version whose commit was never answered."""
        encoded, self._unsettled = self._unsettled, None
        if encoded is None or encoded.manifest.version not in committed:
            return
        found = self._relay.manifest(self._job, encoded.manifest.version).manifest
        if found == encoded.manifest:
            self._advance(encoded, self._decode_again(encoded), found.target_digests)

    def _decode_again(self, encoded: EncodedVersion) -> list[Patch]:
        """Decode a version as a receiver would.  Raises CorruptDelta if that gives other bytes.

        What is decoded shares no memory with the trainer's tensors.
        """
        try:
            return container.decode_patches(
                encoded.manifest, encoded.buckets, self._held, threads=self._coding.threads
            )
        except CorruptDelta as error:
            raise CorruptDelta(
                f"the encoded delta does not give the trainer's weights: {error.what}"
            ) from None

    def _advance(self, encoded: EncodedVersion, patches: Iterable[Patch], digests: Mapping[str, str]) -> None:
        """The version is committed: it is the next base."""
        patches = list(patches)
        if self._stateful is not None:
            self._stateful.published(encoded.manifest, patches, self._held)
        if self._on_device is not None:
            self._on_device.advance(patches)
        for patch in patches:
            write_patch(self._held[patch.name], patch)
        self._digests = dict(digests)
        self._version = encoded.manifest.version
        self._unsettled = None
        self._kept[self._version] = encoded
        for old in sorted(self._kept)[: -self._keep]:
            del self._kept[old]
        if self._shortcuts is not None:
            self._shortcuts.published(encoded.manifest, self._held, self._digests)

    def _repeat(self, target: State) -> PublishReport:
        if digest_state(target) != self._digests:
            raise VersionConflict(
                f"version {self._version} of {self._job} is published with other weights",
                "a committed version never changes: publish the next one",
            )
        if (kept := self._kept.get(self._version)) is None:
            raise VersionConflict(
                f"version {self._version} of {self._job} is the checkpoint this publisher began with",
                f"publish version {self._version + 1}",
            )
        push_ms, _ = timed_ms(lambda: self._push(kept))
        return report_of(kept.manifest, encode_ms=0.0, verify_ms=0.0, push_ms=push_ms, repeated=True)


def _bookkeeping_bytes(encoded: EncodedVersion) -> int:
    """What a relay needs for a version beside its buckets: the manifest, and a little per bucket."""
    return len(manifests.encode(encoded.manifest)) + _BYTES_PER_FILE * (1 + len(encoded.buckets))
