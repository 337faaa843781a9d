"""The manifest: what one weight version consists of, and the digests that prove it.

A version is an anchor (all parameters whole, `base_version` None) or a delta on `base_version`.  It lists
every parameter of the model, also the unchanged ones, so that a receiver can check all of what it runs.
Manifests come from the network and from disks: `decode` checks every field and every relation before it
returns one.

Versions travel `coded`: slices of parameters in the delta codec, which need the base to be decoded.  A host
decodes once and keeps the outcome as `coo` and `dense`, (index, value) pairs and whole parameters, which its
engines apply without a base.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Literal

import msgspec
import numpy as np

from rose.errors import CorruptDelta
from rose.units import MIB, JobId, WeightVersion
from rose.weights import boxes
from rose.weights.bits import ITEMSIZE
from rose.weights.digests import DIGEST_PATTERN, digest, fingerprint

MANIFEST_NAME = "manifest.json"
MANIFEST_BYTES_MAX = 64 * MIB
BUCKET_BYTES_MAX = 64 * MIB
PARAMETER_BYTES_MAX = 1 << 40
VERSION_MAX = (1 << 53) - 1
"""Versions stay exact in every JSON reader."""

_SQUASHED = ".squashed"
_STATEFUL = ".stateful"
JOB_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z"
BUCKET_PATTERN = r"^bucket-[0-9]{5}\.safetensors\Z"
_NAME_PATTERN = r"^[!#-\[\]-~]{1,512}\Z"
"""Checkpoint names: printable ASCII but space, quote and backslash, so JSON never escapes them."""

Digest = Annotated[str, msgspec.Meta(pattern=DIGEST_PATTERN)]
Count = Annotated[int, msgspec.Meta(ge=0, le=PARAMETER_BYTES_MAX)]
BucketName = Annotated[str, msgspec.Meta(pattern=BUCKET_PATTERN)]
Mode = Literal["same", "coo", "dense", "coded"]
SLICES_MAX = 4096
"""Slices of one parameter."""
TABLES_BYTES_MAX = 1 << 16
HISTORY_MAX = 7
"""Versions of which the changes may be needed to decode one."""
_Require = Callable[[bool, str], None]


Box = Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(max_length=8)]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all records: immutable, and strict about keys."""


class Bucket(_Record, frozen=True, kw_only=True):
    """One file of a version, at most BUCKET_BYTES_MAX long."""

    name: BucketName
    size: Annotated[int, msgspec.Meta(gt=8, le=BUCKET_BYTES_MAX)]
    digest: Digest
    """xxh3-128 of the file."""


class Shard(_Record, frozen=True, kw_only=True):
    """Where the elements [start, stop) of a parameter, flattened in checkpoint order, lie."""

    bucket: BucketName
    start: Count
    stop: Count
    entries: Count
    """Values stored: stop - start if dense, else the number of changed elements."""


class Slice(_Record, frozen=True, kw_only=True, omit_defaults=True):
    """A rectangle of a parameter in the delta codec.  Slices cover their parameter and do not overlap."""

    box: Box | None = None
    """Half-open range per dimension, in coordinates of the checkpoint; None: all of the parameter."""
    changed: Count
    """Elements that differ from the base; all of them in an anchor."""
    base_digest: Digest | None = None
    target_digest: Digest | None = None
    """xxh3-128 of the slice's bytes in row-major order; both are with the parameter if it is all of it."""
    bucket: BucketName | None = None
    """None: nothing changed, nothing is stored."""
    offset: Count = 0
    """Of the first byte in the bucket."""
    length: Count = 0
    raw: bool = False
    """The bytes are those of the slice itself, which for tiny ones is smallest."""
    tables: Annotated[int, msgspec.Meta(ge=0, lt=SLICES_MAX)] | None = None
    """Which of the manifest's tables it was coded with, if any."""


class Origin(_Record, frozen=True, kw_only=True):
    """The version as it travelled, of which a host made this one."""

    digest: Digest
    """See `identity`."""
    delta_bytes: Count


class Parameter(_Record, frozen=True, kw_only=True):
    """One parameter of the model, changed or not."""

    name: Annotated[str, msgspec.Meta(pattern=_NAME_PATTERN)]
    dtype: str
    """A safetensors dtype name."""
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=8)]
    mode: Mode
    changed: Count
    """Elements that differ from the base; all of them in an anchor."""
    base_digest: Digest | None
    """xxh3-128 of the parameter's bytes before; None in an anchor."""
    target_digest: Digest | None
    """xxh3-128 of the parameter's bytes in this version.

    None, as the one before, where trainer ranks hold a slice each: only the digests of those are known then.
    """
    shards: tuple[Shard, ...] = ()
    """In order of `start`, at most one per bucket; empty unless the mode is coo or dense."""
    slices: tuple[Slice, ...] = ()
    """Empty unless the mode is coded."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        """What its slices or shards take in buckets, names of tensors apart."""
        index_bytes = (4 if self.elements <= 1 << 32 else 8) if self.mode == "coo" else 0
        entry_bytes = ITEMSIZE[self.dtype] + index_bytes
        return sum(part.length for part in self.slices) + entry_bytes * sum(s.entries for s in self.shards)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * ITEMSIZE[self.dtype]


class Manifest(_Record, frozen=True, kw_only=True):
    """All of one version."""

    schema: Literal[1] = 1
    job: Annotated[JobId, msgspec.Meta(pattern=JOB_PATTERN)]
    version: Annotated[WeightVersion, msgspec.Meta(ge=0, le=VERSION_MAX)]
    base_version: Annotated[WeightVersion, msgspec.Meta(ge=0, le=VERSION_MAX)] | None
    """None: an anchor."""
    undo: bool = False
    """The way back, from a later `base_version` to `version`.  Made and used on one host, never sent."""
    fingerprint: Digest
    """Of the model's form: see `rose.weights.digests.fingerprint`."""
    parameters: tuple[Parameter, ...]
    """In order of name."""
    buckets: tuple[Bucket, ...]
    tables: tuple[Annotated[bytes, msgspec.Meta(max_length=TABLES_BYTES_MAX)], ...] = ()
    """Tables of the delta codec that slices name."""
    history: Annotated[int, msgspec.Meta(ge=0, le=HISTORY_MAX)] = 0
    """How many versions, up to the base, it takes to know the changes of (`rose.weights.history`)."""
    origin: Origin | None = None
    """Set on a host that decoded the version; never sent."""

    @property
    def coded(self) -> bool:
        """Whether it takes a base to decode."""
        return any(parameter.mode == "coded" for parameter in self.parameters)

    @property
    def changed(self) -> int:
        """Elements that differ from the base."""
        return sum(parameter.changed for parameter in self.parameters)

    @property
    def elements(self) -> int:
        """Elements of the whole model."""
        return sum(parameter.elements for parameter in self.parameters)

    @property
    def dense_bytes(self) -> int:
        """Size of the whole model."""
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def delta_bytes(self) -> int:
        """Size of all buckets, and of the tables that come with the manifest."""
        return sum(bucket.size for bucket in self.buckets) + sum(map(len, self.tables))

    @property
    def wire_bytes(self) -> int:
        """`delta_bytes` of the version as it travelled."""
        return self.origin.delta_bytes if self.origin else self.delta_bytes

    @property
    def target_digests(self) -> dict[str, str]:
        """Digest of every parameter in this version, by name, where it is known: on a host, of all."""
        return {each.name: each.target_digest for each in self.parameters if each.target_digest is not None}


def encode(manifest: Manifest) -> bytes:
    """Canonical JSON: equal manifests have equal bytes."""
    return msgspec.json.encode(manifest)


def decode(data: bytes | bytearray | memoryview) -> Manifest:
    """Decode and check a manifest.  Raises CorruptDelta, whatever the bytes are."""
    if len(data) > MANIFEST_BYTES_MAX:
        raise CorruptDelta(f"manifest of {len(data)} bytes is above the limit of {MANIFEST_BYTES_MAX}")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptDelta(f"manifest cannot be read: {error}") from None
    check(manifest)
    return manifest


def check(manifest: Manifest) -> None:
    """Check the relations between fields; `decode` has done so already.  Raises CorruptDelta."""
    base = manifest.base_version
    follows = (
        not manifest.undo
        if base is None
        else (base > manifest.version if manifest.undo else base < manifest.version)
    )
    if not follows:
        raise CorruptDelta(f"version {manifest.version} cannot be built on version {base}")
    if manifest.history and (manifest.undo or base is None or not manifest.coded):
        raise CorruptDelta("manifest: a history where none is of use")
    names = [parameter.name for parameter in manifest.parameters]
    if any(first >= second for first, second in itertools.pairwise(names)):
        raise CorruptDelta("manifest: parameters are not in order of name, or named twice")
    buckets = {bucket.name: bucket for bucket in manifest.buckets}
    if len(buckets) != len(manifest.buckets):
        raise CorruptDelta("manifest: a bucket is named twice")
    used: set[str] = set()
    for parameter in manifest.parameters:
        _check_parameter(parameter, anchor=manifest.base_version is None)
        used.update(shard.bucket for shard in parameter.shards)
        for part in parameter.slices:
            _check_place(parameter.name, part, buckets, len(manifest.tables))
            used.update([part.bucket] if part.bucket else ())
    if used != buckets.keys():
        raise CorruptDelta(
            f"manifest: buckets do not match shards: {', '.join(sorted(used ^ buckets.keys())[:3])}"
        )
    if manifest.fingerprint != fingerprint((p.name, p.dtype, p.shape) for p in manifest.parameters):
        raise CorruptDelta("manifest: the fingerprint is not that of its parameters")


def identity(manifest: Manifest) -> str:
    """Digest of what a version leads from and to, whatever the form in which it travels.

    Tells two versions of the same number apart, such as those of two runs of a job.
    """
    parameters = [(each.name, *_identity(each)) for each in manifest.parameters]
    told = main_job(manifest.job), manifest.version, manifest.base_version, parameters
    return digest(msgspec.json.encode(told))


def squashed_job(job: JobId) -> JobId:
    """Under which name a job's squashed deltas lie at the relay: see `rose.weights.shortcuts`."""
    return JobId(job + _SQUASHED)


def is_squashed(job: JobId) -> bool:
    """Whether versions under this name are squashed deltas."""
    return job.endswith(_SQUASHED)


def stateful_job(job: JobId) -> JobId:
    """Under which name a job's stateful deltas lie at the relay: see `rose.weights.stateful`."""
    return JobId(job + _STATEFUL)


def main_job(job: JobId) -> JobId:
    """The job that a version belongs to, in whatever form it came."""
    return JobId(job.removesuffix(_SQUASHED).removesuffix(_STATEFUL))


def valid_job(job: str) -> bool:
    """Whether a job id can name a directory and a URL segment."""
    return re.match(JOB_PATTERN, job) is not None


def tied_names(manifest: Manifest, held: Collection[str]) -> frozenset[str]:
    """Parameters that the receiver does not hold by that name, but by another one: tied weights.

    A trainer may name a tied output head beside the embedding.  Its bytes before and after are then those of
    a parameter that is held, so nothing is lost by leaving it out; where they differ it is no tie.
    """
    known = {_identity(each) for each in manifest.parameters if each.name in held}
    strange = (each for each in manifest.parameters if each.name not in held)
    return frozenset(each.name for each in strange if len(each.shape) > 1 and _identity(each) in known)


def _identity(parameter: Parameter) -> tuple[object, ...]:
    parts = tuple((part.box, part.base_digest, part.target_digest) for part in parameter.slices)
    return (
        parameter.dtype,
        parameter.shape,
        parameter.base_digest,
        parameter.target_digest,
        parts if parameter.target_digest is None else (),
    )


def _check_parameter(parameter: Parameter, *, anchor: bool) -> None:
    def require(holds: bool, what: str) -> None:
        if not holds:
            raise CorruptDelta(f"manifest: {parameter.name}: {what}")

    require(parameter.dtype in ITEMSIZE, f"unknown dtype {parameter.dtype[:40]!r}")
    require(parameter.nbytes <= PARAMETER_BYTES_MAX, f"shape {parameter.shape} is above the size limit")
    proven = parameter.target_digest is not None
    if proven:
        require(
            (parameter.base_digest is None) == anchor,
            "base digest missing in a delta, or present in an anchor",
        )
    else:
        require(parameter.base_digest is None, "a digest before and none after")
        sliced = parameter.mode == "coded" and parameter.slices and parameter.slices[0].box is not None
        require(bool(sliced), "no digest")
    require(parameter.changed <= parameter.elements, "more changed elements than elements")
    if anchor:
        require(parameter.mode in {"dense", "coded"}, "an anchor holds whole parameters")
        require(parameter.changed == parameter.elements, "an anchor changes all elements")
    elif proven:
        moved = parameter.mode != "same"
        require(
            moved == (parameter.changed > 0),
            f"mode {parameter.mode} with {parameter.changed} changed elements",
        )
        require(moved == (parameter.base_digest != parameter.target_digest), "digests contradict the mode")
    if parameter.mode == "coded":
        require(not parameter.shards, "slices beside shards")
        _check_slices(parameter, require, anchor=anchor)
    else:
        require(not parameter.slices, f"slices in mode {parameter.mode}")
        _check_shards(parameter, require)


def _check_slices(parameter: Parameter, require: _Require, *, anchor: bool) -> None:
    slices = parameter.slices
    require(0 < len(slices) <= SLICES_MAX, f"{len(slices)} slices")
    if slices[0].box is None:
        require(len(slices) == 1, "a slice beside one that is all of the parameter")
        require(slices[0].target_digest is None is slices[0].base_digest, "a digest given twice")
    else:
        require(all(_fits(part.box, parameter.shape) for part in slices), "a slice lies outside")
        require(
            _tile([part.box for part in slices if part.box], parameter.elements), "slices overlap or lack"
        )
    for part in slices:
        size = parameter.elements if part.box is None else boxes.size_of(part.box)
        require(part.changed == size if anchor else part.changed <= size, "changed elements of a slice")
        require((part.bucket is None) == (part.changed == 0 == part.length), "a slice without what changed")
        if part.raw:
            require(part.length == size * ITEMSIZE[parameter.dtype], "raw bytes of another number")
            require(part.tables is None, "raw bytes and tables")
        if part.box is not None:
            require(part.target_digest is not None, "a slice without a digest")
            require((part.base_digest is None) == anchor, "base digest of a slice")
            moved = part.base_digest != part.target_digest
            require(moved == (part.changed > 0), "digests of a slice contradict its changes")
    require(sum(part.changed for part in slices) == parameter.changed, "changes of slices do not add up")


def _fits(box: Box | None, shape: tuple[int, ...]) -> bool:
    if box is None or len(box) != len(shape):
        return False
    return all(first < last <= size for (first, last), size in zip(box, shape, strict=True))


def _tile(found: list[Box], elements: int) -> bool:
    """Whether boxes that fit a parameter cover each of its elements once."""
    if sum(boxes.size_of(box) for box in found) != elements:
        return False
    edges = np.array(found, np.int64)
    for number, box in enumerate(edges[:-1]):
        later = edges[number + 1 :]
        apart = (later[:, :, 0] >= box[:, 1]) | (later[:, :, 1] <= box[:, 0])
        if not apart.any(axis=1).all():
            return False
    return True


def _check_place(name: str, part: Slice, buckets: Mapping[str, Bucket], tables: int) -> None:
    if part.tables is not None and part.tables >= tables:
        raise CorruptDelta(f"manifest: {name}: no tables {part.tables}")
    bucket = None if part.bucket is None else buckets.get(part.bucket)
    if part.bucket is not None and (bucket is None or part.offset + part.length > bucket.size):
        raise CorruptDelta(f"manifest: {name}: a slice lies outside its bucket")


def _check_shards(parameter: Parameter, require: _Require) -> None:
    shards = parameter.shards
    require(len({shard.bucket for shard in shards}) == len(shards), "two shards in one bucket")
    position = 0
    for shard in shards:
        require(position <= shard.start < shard.stop <= parameter.elements, "shards overlap or lie outside")
        require(0 < shard.entries <= shard.stop - shard.start, "a shard stores no value, or too many")
        if parameter.mode == "dense":
            require(shard.start == position, "a dense parameter has holes")
            require(shard.entries == shard.stop - shard.start, "a dense shard lacks values")
        require(
            shard.entries * ITEMSIZE[parameter.dtype] < BUCKET_BYTES_MAX, "a shard larger than its bucket"
        )
        position = shard.stop
    stored = sum(shard.entries for shard in shards)
    expected = parameter.elements if parameter.mode == "dense" else parameter.changed
    require(stored == expected, f"{stored} values stored, {expected} expected")
