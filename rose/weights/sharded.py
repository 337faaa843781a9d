"""Publishing from many ranks: each encodes and pushes what it holds, and nobody gathers the weights.

    publish          every rank, with its own tensors
      agree          all-gather of a few bytes: version, base, whether to send an anchor
      encode         own parts against the own copy of them; decoded again and compared
      exchange       all-gather of fragments: slices, digests, buckets' names; no weights
      push           own buckets, all ranks at once; then commit, which answers what is missing

All ranks make the same manifest of the fragments, so whoever finishes last commits the version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Self, TypeVar, Unpack

import msgspec
import numpy as np

from rose.closing import Closing
from rose.config import RelayConfig
from rose.errors import CorruptDelta, RoseError, TimedOut, VersionConflict
from rose.units import JobId, WeightVersion
from rose.weights import boxes, coding, encoding
from rose.weights.bits import Bits, UnsupportedTensor, Words, as_bits
from rose.weights.coding import DEFAULT, CodedPieces, Piece
from rose.weights.container import metadata
from rose.weights.digests import digest, fingerprint
from rose.weights.manifest import Bucket, Manifest, Parameter, Slice
from rose.weights.publisher import Options
from rose.weights.relay import JobStat, RelayFull
from rose.weights.relay.blocking import BlockingRelay
from rose.weights.relay.connecting import connect
from rose.weights.reports import PublishReport, report_of, timed_ms
from rose.weights.sharding import Sharding, local_tensor

Exchange = Callable[[bytes], Sequence[bytes]]
"""An all-gather of small messages: called by all ranks at once, answers those of all ranks in order.

With torch: `lambda mine: all_gather_object(...)`.  It may raise; then `publish` does, and may be repeated.
"""

_BUCKETS = 100_000
"""Numbers of buckets, shared out over the ranks."""
_POLL_S = 0.05
_OF_PUBLISHER_ALONE = ("squash_every", "stateful", "on_gpu")
_SaidT = TypeVar("_SaidT", bound=msgspec.Struct)


class _Hello(msgspec.Struct, frozen=True):
    """What a rank is about to do."""

    version: WeightVersion
    base: WeightVersion
    anchor: bool = False
    committed: bool = False
    """The relay has the version.  What is not common to all, rank 0 tells."""
    failure: str = ""


class _Part(msgspec.Struct, frozen=True):
    """A slice that a rank pushes."""

    name: str
    dtype: str
    slice: Slice
    base_digest: str | None
    target_digest: str | None


class _Fragment(msgspec.Struct, frozen=True):
    """A rank's part of the manifest; or why there is none."""

    parts: tuple[_Part, ...] = ()
    tables: tuple[bytes, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    encode_ms: float = 0.0
    verify_ms: float = 0.0
    failure: str = ""


class ShardedPublisher(Closing):
    """One rank's share in publishing the versions of a job.  All ranks make the same calls in the same order.

    The tensors given are this rank's: DTensors, or plain tensors of the shape that `sharding` says this
    rank holds.  `Options` lists the keywords; `keep` is not used, as after a restart of the relay or of the
    trainer the next version is an anchor.  Costs a copy of what this rank pushes, in host memory.
    Raises ValueError for squash_every, stateful and on_gpu, which are for Publisher alone.
    """

    def __init__(
        self,
        relay: BlockingRelay,
        job: JobId,
        base_state: Mapping[str, object],
        sharding: Sharding,
        rank: int,
        exchange: Exchange,
        *,
        timeout_s: float = 300,
        **options: Unpack[Options],
    ) -> None:
        sharding.require_whole()
        if unfit := [name for name in _OF_PUBLISHER_ALONE if options.get(name)]:
            raise ValueError(f"{', '.join(unfit)}: for Publisher alone")
        self._relay = relay
        self._job = job
        self._sharding = sharding
        self._rank = rank
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._coding = options.get("coding", DEFAULT)
        self._anchor_every = options.get("anchor_every")
        self._version = options.get("base_version", WeightVersion(0))
        self._published = False
        self._held = [_owned(piece) for piece in self._pieces(base_state, None)]

    @classmethod
    def connect(
        cls,
        config: RelayConfig,
        job: JobId,
        base_state: Mapping[str, object],
        sharding: Sharding,
        rank: int,
        exchange: Exchange,
        *,
        timeout_s: float = 300,
        **options: Unpack[Options],
    ) -> Self:
        """A publisher that talks to the configured relay; close it.  Raises ConfigError."""
        relay = BlockingRelay(connect(config))
        return cls(relay, job, base_state, sharding, rank, exchange, timeout_s=timeout_s, **options)

    @property
    def version(self) -> WeightVersion:
        """The newest version known to be committed; the base at first."""
        return self._version

    def publish(self, version: WeightVersion, state: Mapping[str, object]) -> PublishReport:
        """Publish `version`, of which `state` is this rank's part.  Called by all ranks.

        When it returns, the relay has committed the version.  When it raises, it may be repeated, by all
        ranks.  Raises VersionConflict, RoseError (also what another rank failed with), TimedOut, RelayFull,
        RelayUnavailable.
        """
        agreed = self._agree(version)
        if agreed.committed:
            return self._repeat(version, state)
        base = None if agreed.anchor else self._version
        pieces, coded, fragment = self._encode(version, state, anchor=agreed.anchor)
        fragments = self._all(fragment, _Fragment)
        for rank, each in enumerate(fragments):
            if each.failure:
                raise RoseError(f"rank {rank} could not encode version {version}: {each.failure}")
        manifest = _merge(self._job, version, base, self._sharding, fragments)
        encode_ms = max(each.encode_ms for each in fragments)
        verify_ms = max(each.verify_ms for each in fragments)
        push_ms, _ = timed_ms(lambda: self._push(manifest, coded.buckets, encode_ms + verify_ms))
        self._advance(version, pieces)
        return report_of(manifest, encode_ms=encode_ms, verify_ms=verify_ms, push_ms=push_ms)

    def close(self) -> None:
        """Close connections."""
        self._relay.close()

    # ---- agree ------------------------------------------------------------------------------------

    def _all(self, mine: _SaidT, kind: type[_SaidT]) -> list[_SaidT]:
        """What all ranks say, in order of rank."""
        said = self._exchange(msgspec.msgpack.encode(mine))
        if len(said) != len(self._sharding.held):
            raise RoseError(f"{len(said)} ranks answer, the sharding is over {len(self._sharding.held)}")
        return [msgspec.msgpack.decode(each, type=kind) for each in said]

    def _agree(self, version: WeightVersion) -> _Hello:
        """What is to be done, as rank 0 finds the relay.  Raises VersionConflict, RoseError."""
        hello = _Hello(version, self._version)
        if self._rank == 0:
            try:
                stat = self._relay.stat(self._job)
                committed = version in stat.versions
                if not committed:
                    self._relay.abort(self._job, version)  # left by an earlier attempt: nobody pushes yet
                anchor = self._must_anchor(version, stat)
                hello = _Hello(version, self._version, anchor=anchor, committed=committed)
            except RoseError as error:
                hello = _Hello(version, self._version, failure=error.what)
        answers = self._all(hello, _Hello)
        first = answers[0]
        if first.failure:
            raise RoseError(f"rank 0 could not ask the relay: {first.failure}")
        if any(each.version != version for each in answers):
            told = ", ".join(str(each.version) for each in answers)
            raise VersionConflict(f"ranks do not publish the same version: {told}")
        newest = max(each.base for each in answers)
        if version < newest or (version == newest and not first.committed):
            raise VersionConflict(
                f"version {version} cannot follow version {newest} of {self._job}",
                "versions of a job only grow",
            )
        # Where a rank did not learn that a version was committed, no base is common to all.
        apart = any(each.base != newest for each in answers)
        return msgspec.structs.replace(first, anchor=first.anchor or apart)

    def _must_anchor(self, version: WeightVersion, stat: JobStat) -> bool:
        """Asked for, or our base is not the relay's newest version, as after a restart of either side."""
        if self._anchor_every is not None and version % self._anchor_every == 0:
            return True
        newest = max(stat.versions, default=None)
        return newest != self._version if self._published else newest not in (None, self._version)

    def _repeat(self, version: WeightVersion, state: Mapping[str, object]) -> PublishReport:
        """The version is committed; so be it, if these are its weights.  Raises VersionConflict."""
        manifest = self._relay.manifest(self._job, version).manifest
        known = {
            (each.name, part.box): each.target_digest if part.box is None else part.target_digest
            for each in manifest.parameters
            for part in each.slices
        } | {(each.name, None): each.target_digest for each in manifest.parameters if each.mode == "same"}
        pieces = self._pieces(state, None)
        for piece in pieces:
            if known.get((piece.name, piece.box)) != piece.target_digest:
                raise VersionConflict(
                    f"version {version} of {self._job} is published with other weights: {piece.name}",
                    "a committed version never changes: publish the next one",
                )
        self._advance(version, pieces)
        return report_of(manifest, encode_ms=0.0, verify_ms=0.0, push_ms=0.0, repeated=True)

    def _advance(self, version: WeightVersion, pieces: Sequence[Piece]) -> None:
        self._held, self._version, self._published = [_owned(piece) for piece in pieces], version, True

    # ---- encode -----------------------------------------------------------------------------------

    def _pieces(self, state: Mapping[str, object], before: Sequence[Piece] | None) -> list[Piece]:
        """What this rank pushes, in the order of the plan; with the pieces `before` as base."""
        held = self._sharding.held[self._rank]
        pieces: list[Piece] = []
        for part in self._sharding.pushes[self._rank]:
            shape, box = self._sharding.shapes[part.name], held[part.name]
            bits = as_bits(local_tensor(state[part.name]))
            if bits.shape != boxes.shape_of(box):
                raise UnsupportedTensor(
                    f"{part.name}: {bits.shape} on rank {self._rank}, {boxes.shape_of(box)} expected"
                )
            elements_max = self._coding.slice_bytes_max // bits.words.itemsize
            cuts = boxes.cut(part.box, elements_max)
            pieces += [_piece(part.name, shape, box, cut, bits) for cut in cuts]
        if before is None:
            return pieces
        return [_on(piece, base) for piece, base in zip(pieces, before, strict=True)]

    def _encode(
        self, version: WeightVersion, state: Mapping[str, object], *, anchor: bool
    ) -> tuple[list[Piece], CodedPieces, _Fragment]:
        """This rank's pieces, coded and decoded again.  A failure is in the fragment: others wait for it."""
        nothing = CodedPieces((), (), {})
        first = self._rank * (_BUCKETS // len(self._sharding.held))
        labels = metadata(self._job, version)

        def encode() -> tuple[list[Piece], CodedPieces]:
            pieces = self._pieces(state, None if anchor else self._held)
            return pieces, coding.encode_pieces(pieces, self._coding, labels, first_bucket=first)

        try:
            encode_ms, (pieces, coded) = timed_ms(encode)
            verify_ms, _ = timed_ms(lambda: coding.check_pieces(pieces, coded, threads=self._coding.threads))
        except (RoseError, KeyError) as error:
            return [], nothing, _Fragment(failure=f"{type(error).__name__}: {error}")
        parts = tuple(
            _Part(piece.name, piece.dtype, part, piece.base_digest, piece.target_digest)
            for piece, part in zip(pieces, coded.slices, strict=True)
        )
        buckets = tuple(
            Bucket(name=name, size=len(data), digest=digest(data)) for name, data in coded.buckets.items()
        )
        return pieces, coded, _Fragment(parts, coded.tables, buckets, encode_ms, verify_ms)

    # ---- push -------------------------------------------------------------------------------------

    def _push(self, manifest: Manifest, mine: Mapping[str, bytes], encode_ms: float) -> None:
        """Push this rank's buckets, and see to it that the version is committed."""
        deadline_s = time.monotonic() + self._timeout_s
        digests = {bucket.name: bucket.digest for bucket in manifest.buckets}
        while missing := self._commit(manifest, encode_ms):
            ours = [name for name in missing if name in mine]
            for name in ours:
                self._put(manifest.version, name, mine[name], digests[name])
            if time.monotonic() > deadline_s:
                raise TimedOut(
                    f"version {manifest.version} was not complete within {self._timeout_s:.0f} s",
                    f"{len(missing)} buckets are missing, first {missing[0]}: did a rank die?",
                )
            if not ours:
                time.sleep(_POLL_S)

    def _commit(self, manifest: Manifest, encode_ms: float) -> tuple[str, ...]:
        commit = partial(self._relay.commit, self._job, manifest.version, manifest, encode_ms=encode_ms)
        try:
            return commit()
        except RelayFull:
            if not self._make_room(manifest.version):
                raise
            return commit()

    def _put(self, version: WeightVersion, name: str, data: bytes, digest_hex: str) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._relay.put_bucket(self._job, version, name, data, digest_hex)
            except RelayFull:
                # Rank 0 alone deletes; the others wait for the room.
                if (self._rank == 0 and not self._make_room(version)) or time.monotonic() > deadline_s:
                    raise
                time.sleep(_POLL_S)

    def _make_room(self, version: WeightVersion) -> bool:
        """Delete the job's oldest version, but for the one that the new one is built on."""
        older = [each for each in self._relay.stat(self._job).versions if each < min(version, self._version)]
        if older:
            self._relay.delete(self._job, older[0])
        return bool(older)


def _piece(name: str, shape: boxes.Shape, held: boxes.Box, cut: boxes.Box, bits: Bits) -> Piece:
    """A part of a local tensor as a piece of the parameter."""
    local = tuple((first - low, last - low) for (first, last), (low, _) in zip(cut, held, strict=True))
    words = boxes.take(bits.words, bits.shape, local)
    box = None if cut == boxes.whole(shape) else cut
    return Piece(name, bits.dtype, box, None, words, None, digest(words))


def _on(piece: Piece, base: Piece) -> Piece:
    """The piece as a change of what it was."""
    return Piece(
        piece.name, piece.dtype, piece.box, base.target, piece.target, base.target_digest, piece.target_digest
    )


def _owned(piece: Piece) -> Piece:
    """The piece in memory of its own, without its base."""
    words: Words = np.array(piece.target)
    return Piece(piece.name, piece.dtype, piece.box, None, words, None, piece.target_digest)


def _merge(
    job: JobId,
    version: WeightVersion,
    base: WeightVersion | None,
    sharding: Sharding,
    fragments: Sequence[_Fragment],
) -> Manifest:
    """The manifest of the whole version; the same on all ranks."""
    found: dict[str, list[_Part]] = {name: [] for name in sorted(sharding.shapes)}
    tables: list[bytes] = []
    for fragment in fragments:
        for part in fragment.parts:
            moved = part.slice
            if moved.tables is not None:
                moved = msgspec.structs.replace(moved, tables=moved.tables + len(tables))
            found[part.name].append(msgspec.structs.replace(part, slice=moved))
        tables += fragment.tables
    parameters = [_parameter(name, sharding.shapes[name], parts) for name, parts in found.items()]
    return encoding.checked(
        Manifest(
            job=job,
            version=version,
            base_version=base,
            fingerprint=fingerprint((each.name, each.dtype, each.shape) for each in parameters),
            parameters=tuple(parameters),
            buckets=tuple(bucket for fragment in fragments for bucket in fragment.buckets),
            tables=tuple(tables),
        )
    )


def _parameter(name: str, shape: boxes.Shape, parts: Sequence[_Part]) -> Parameter:
    """A parameter as its ranks tell it.  Of one cut into slices only the slices' digests are known."""
    if len({part.dtype for part in parts}) != 1:
        raise CorruptDelta(f"{name}: ranks push it as {sorted({part.dtype for part in parts})}")
    first = parts[0]
    slices = tuple(sorted((part.slice for part in parts), key=lambda part: part.box or ()))
    whole = first.slice.box is None
    unchanged = whole and first.base_digest == first.target_digest
    return Parameter(
        name=name,
        dtype=first.dtype,
        shape=shape,
        mode="same" if unchanged else "coded",
        changed=sum(part.changed for part in slices),
        base_digest=first.base_digest if whole else None,
        target_digest=first.target_digest if whole else None,
        slices=() if unchanged else slices,
    )
