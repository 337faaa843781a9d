"""A version's delta as files: encode it, write it, and read it back without trusting a byte.

On disk a version is a directory of `manifest.json` and buckets.  A bucket is a safetensors file.  For a
parameter stored whole (mode dense) it holds `<name>.val`, the raw bits; for a sparse one (mode coo) also
`<name>.idx`, the changed positions relative to the shard's start, strictly increasing.  Values are absolute,
so applying a delta twice is applying it once.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rose.errors import CorruptDelta, WrongBase
from rose.units import JobId, WeightVersion
from rose.weights import manifest as manifests
from rose.weights import tensorfile
from rose.weights.bits import ITEMSIZE, Bits, State, Words, word_dtype
from rose.weights.digests import digest, digest_state, fingerprint
from rose.weights.manifest import MANIFEST_BYTES_MAX, MANIFEST_NAME, Bucket, Manifest, Mode, Parameter, Shard
from rose.weights.shards import Demand, Placement, plan_buckets

Indices = npt.NDArray[np.int64]

_WORD_NAMES = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}
_HEADER_BYTES_PER_TENSOR = 160
"""Upper bound of a bucket's header per tensor, name and padding apart."""
_HEADER_BYTES_RESERVED = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """New bits of one parameter: all of them (`indices` None), or those at `indices`.

    Indices count elements flattened in checkpoint order, strictly increasing, within the shape; `values` are
    raw little-endian words as wide as an element, one per index.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    indices: Indices | None
    values: Words


@dataclass(frozen=True, slots=True)
class EncodedVersion:
    """A version ready to be pushed or written: its manifest and its buckets by name."""

    manifest: Manifest
    buckets: Mapping[str, bytes]


# ---- encode -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """One parameter's new bits, before they are cut into shards.

    Those at `indices`, or with `indices` None all of them; or none where nothing changed.
    """

    dtype: str
    shape: tuple[int, ...]
    changed: int
    indices: Indices | None
    values: Words

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def demand(self, name: str) -> Demand:
        itemsize = ITEMSIZE[self.dtype]
        header_bytes = _HEADER_BYTES_PER_TENSOR + len(name)
        if self.indices is None:
            return Demand(name, self.elements, itemsize, header_bytes)
        index_bytes = _index_dtype(self.elements).itemsize
        return Demand(name, self.changed, itemsize + index_bytes, 2 * header_bytes)

    def shard(self, place: Placement, bucket: str) -> tuple[Shard, dict[str, Bits]]:
        entries = place.last - place.first
        blobs = {f"{place.name}.val": _raw(self.values[place.first : place.last])}
        if self.indices is None:
            shard = Shard(bucket=bucket, start=place.first, stop=place.last, entries=entries)
            return shard, blobs
        indices = self.indices[place.first : place.last]
        start = int(indices[0])
        shard = Shard(bucket=bucket, start=start, stop=int(indices[-1]) + 1, entries=entries)
        relative = (indices - start).astype(_index_dtype(self.elements))
        return shard, {f"{place.name}.idx": _raw(relative)} | blobs


def encode_version(
    job: JobId,
    version: WeightVersion,
    base_version: WeightVersion | None,
    base: State | None,
    target: State,
    *,
    base_digests: Mapping[str, str] | None = None,
    target_digests: Mapping[str, str] | None = None,
) -> EncodedVersion:
    """Encode `target` as a delta on `base`, or as an anchor if both bases are None.

    Each parameter is stored in the smaller of its two forms.  Digests already known may be passed in.  The
    outcome depends on the arguments alone, so a retry gives the same bytes.  Raises WrongBase if the states
    are not of one model, CorruptDelta if the version is not above its base.
    """
    if (base is None) != (base_version is None):
        raise ValueError("base and base_version go together")
    if base is not None:
        _require_same_form(base, target)
        base_digests = base_digests if base_digests is not None else digest_state(base)
    target_digests = target_digests if target_digests is not None else digest_state(target)
    changes = {name: _change(None if base is None else base[name], target[name]) for name in sorted(target)}
    form = _Form(job, version, base_version, None if base is None else base_digests, target_digests)
    return _encode(form, changes)


def encode_undo(
    manifest: Manifest,
    held: WeightVersion,
    state: State,
    patches: Iterable[Patch],
    digests: Mapping[str, str],
) -> EncodedVersion:
    """The way back from `manifest`'s version to `state`, which is version `held` with these digests.

    `patches` are those of the version, verified.  Costs as much as the version is large, not as the model is,
    unless it is an anchor.  Raises WrongBase if the version does not follow `held`.
    """
    if manifest.base_version not in (None, held) or manifest.version <= held:
        raise WrongBase(f"version {manifest.version} does not follow version {held}")
    changes = {name: _unchanged(bits.dtype, bits.shape) for name, bits in state.items()}
    for patch in patches:
        before = state[patch.name]
        if manifest.base_version is None:
            changes[patch.name] = _change(Bits(patch.dtype, patch.shape, patch.values), before)
        elif patch.indices is None:
            changes[patch.name] = _change(None, before)
        else:
            values = before.words[patch.indices]
            changes[patch.name] = _Change(before.dtype, before.shape, values.size, patch.indices, values)
    arrived = {name: manifest.target_digests[name] for name in state}
    form = _Form(manifest.job, held, manifest.version, arrived, digests, undo=True)
    return _encode(form, changes)


def encode_squashed(first: Manifest, last: Manifest, patches: Iterable[Patch]) -> EncodedVersion:
    """Encode `patches`, the sum of all versions from `first` to `last`, as one: see `rose.weights.squash`."""
    base_digests = {each.name: each.base_digest for each in first.parameters if each.base_digest is not None}
    changes = {each.name: _unchanged(each.dtype, each.shape) for each in last.parameters}
    for patch in patches:
        if base_digests.get(patch.name) != last.target_digests[patch.name]:
            count = patch.values.size
            changes[patch.name] = _Change(patch.dtype, patch.shape, count, patch.indices, patch.values)
    form = _Form(last.job, last.version, first.base_version, base_digests or None, last.target_digests)
    return _encode(form, changes)


@dataclass(frozen=True, slots=True)
class _Form:
    """What the manifest of a version says besides its changes; `base_digests` None makes an anchor."""

    job: JobId
    version: WeightVersion
    base_version: WeightVersion | None
    base_digests: Mapping[str, str] | None
    target_digests: Mapping[str, str]
    undo: bool = False


def _encode(form: _Form, found: Mapping[str, _Change]) -> EncodedVersion:
    changes = dict(sorted(found.items()))
    metadata = {"format": "rose-delta", "job": form.job, "version": str(form.version)}
    shards, files = _fill_buckets(changes, metadata)
    manifest = Manifest(
        job=form.job,
        version=form.version,
        base_version=form.base_version,
        undo=form.undo,
        fingerprint=fingerprint((name, each.dtype, each.shape) for name, each in changes.items()),
        parameters=tuple(
            Parameter(
                name=name,
                dtype=change.dtype,
                shape=change.shape,
                mode=_mode(change, anchor=form.base_digests is None),
                changed=change.changed,
                base_digest=None if form.base_digests is None else form.base_digests[name],
                target_digest=form.target_digests[name],
                shards=tuple(shards.get(name, ())),
            )
            for name, change in changes.items()
        ),
        buckets=tuple(Bucket(name=name, size=len(data), digest=digest(data)) for name, data in files.items()),
    )
    # Through `decode`, as whatever we would refuse to read must not be written either.
    return EncodedVersion(manifests.decode(manifests.encode(manifest)), files)


def _mode(change: _Change, *, anchor: bool) -> Mode:
    if change.indices is not None:
        return "coo"
    return "dense" if anchor or change.changed else "same"


def _change(base: Bits | None, target: Bits) -> _Change:
    """What leads from `base` to `target`, in the smaller form; with no base all of it."""
    if base is None:
        return _Change(target.dtype, target.shape, target.words.size, None, target.words)
    indices = np.flatnonzero(base.words != target.words).astype(np.int64, copy=False)
    entry_bytes = ITEMSIZE[target.dtype] + _index_dtype(target.words.size).itemsize
    if not indices.size:
        return _unchanged(target.dtype, target.shape)
    if indices.size * entry_bytes < target.nbytes:
        return _Change(target.dtype, target.shape, indices.size, indices, target.words[indices])
    return _Change(target.dtype, target.shape, indices.size, None, target.words)


def _unchanged(dtype: str, shape: tuple[int, ...]) -> _Change:
    return _Change(dtype, shape, 0, None, np.empty(0, word_dtype(dtype)))


def _fill_buckets(
    changes: Mapping[str, _Change], metadata: Mapping[str, str]
) -> tuple[dict[str, list[Shard]], dict[str, bytes]]:
    shards: dict[str, list[Shard]] = {}
    files: dict[str, bytes] = {}
    demands = (change.demand(name) for name, change in changes.items() if change.changed)
    for number, places in enumerate(plan_buckets(demands, reserved_bytes=_HEADER_BYTES_RESERVED)):
        bucket = f"bucket-{number:05d}.safetensors"
        tensors: dict[str, Bits] = {}
        for place in places:
            shard, blobs = changes[place.name].shard(place, bucket)
            shards.setdefault(place.name, []).append(shard)
            tensors.update(blobs)
        files[bucket] = tensorfile.encode(tensors, metadata)
    return shards, files


def _index_dtype(elements: int) -> np.dtype[Any]:
    return np.dtype("<u4") if elements <= 1 << 32 else np.dtype("<u8")


def _raw(words: npt.NDArray[Any]) -> Bits:
    return Bits(_WORD_NAMES[words.dtype.itemsize], words.shape, words)


# ---- decode -------------------------------------------------------------------------------------


def decode_patches(manifest: Manifest, buckets: Mapping[str, bytes | npt.NDArray[np.uint8]]) -> list[Patch]:
    """Patches of all changed parameters, in order of name, from the buckets' bytes.

    Sizes, digests, names, dtypes, lengths and index bounds are checked before anything is returned.
    `manifest` must come from `manifest.decode`.  Raises CorruptDelta.
    """
    files = {bucket.name: _open_bucket(manifest, bucket, buckets) for bucket in manifest.buckets}
    expected: dict[str, set[str]] = {name: set() for name in files}
    patches: list[Patch] = []
    for parameter in manifest.parameters:
        parts = []
        for shard in parameter.shards:
            expected[shard.bucket].add(f"{parameter.name}.val")
            if parameter.mode == "coo":
                expected[shard.bucket].add(f"{parameter.name}.idx")
            parts.append(_read_shard(parameter, shard, files[shard.bucket]))
        if parameter.shards:
            patches.append(_join(parameter, parts))
    for name, tensors in files.items():
        if tensors.keys() != expected[name]:
            raise CorruptDelta(f"{name}: holds other tensors than the manifest says")
    return patches


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a version directory.  Raises CorruptDelta, also when it is missing."""
    return manifests.decode(read_file(directory / MANIFEST_NAME, MANIFEST_BYTES_MAX).tobytes())


def read_patches(directory: Path) -> list[Patch]:
    """`decode_patches` of a version directory.  Raises CorruptDelta, also when a file is missing."""
    manifest = read_manifest(directory)
    return decode_patches(manifest, {b.name: read_file(directory / b.name, b.size) for b in manifest.buckets})


def _open_bucket(
    manifest: Manifest, bucket: Bucket, buckets: Mapping[str, bytes | npt.NDArray[np.uint8]]
) -> Mapping[str, Bits]:
    data = np.frombuffer(buckets.get(bucket.name, b""), dtype=np.uint8)
    if data.size != bucket.size:
        raise CorruptDelta(f"{bucket.name}: {data.size} bytes, {bucket.size} expected")
    if digest(data) != bucket.digest:
        raise CorruptDelta(f"{bucket.name}: the digest does not match")
    parsed = tensorfile.parse(data)
    metadata = {"format": "rose-delta", "job": manifest.job, "version": str(manifest.version)}
    if parsed.metadata != metadata:
        raise CorruptDelta(f"{bucket.name}: belongs to another version, or is no delta")
    return parsed.tensors


def _read_shard(
    parameter: Parameter, shard: Shard, tensors: Mapping[str, Bits]
) -> tuple[Indices | None, Words]:
    where = f"{shard.bucket}: {parameter.name}"
    values = tensors.get(f"{parameter.name}.val")
    if (
        values is None
        or values.words.dtype != word_dtype(parameter.dtype)
        or values.words.size != shard.entries
    ):
        raise CorruptDelta(
            f"{where}: values are missing, or of another width or number than the manifest says"
        )
    if parameter.mode == "dense":
        return None, values.words
    relative = tensors.get(f"{parameter.name}.idx")
    if relative is None or relative.dtype not in ("U32", "U64") or relative.words.size != shard.entries:
        raise CorruptDelta(
            f"{where}: indices are missing, or of another type or number than the manifest says"
        )
    # Checked while unsigned: a huge index must not turn negative first.
    if int(relative.words.max()) >= shard.stop - shard.start:
        raise CorruptDelta(f"{where}: an index lies outside its shard")
    indices = relative.words.astype(np.int64)
    if np.any(indices[1:] <= indices[:-1]):
        raise CorruptDelta(f"{where}: indices are not strictly increasing")
    return indices + shard.start, values.words


def _join(parameter: Parameter, parts: list[tuple[Indices | None, Words]]) -> Patch:
    values = parts[0][1] if len(parts) == 1 else np.concatenate([part[1] for part in parts])
    found = [part[0] for part in parts if part[0] is not None]
    indices = None if not found else found[0] if len(found) == 1 else np.concatenate(found)
    return Patch(parameter.name, parameter.dtype, parameter.shape, indices, values)


def read_file(path: Path, bytes_max: int) -> npt.NDArray[np.uint8]:
    """A regular file of at most `bytes_max` bytes; never follows a link or waits on a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CorruptDelta(f"{path}: cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > bytes_max:
            raise CorruptDelta(f"{path}: not a regular file of at most {bytes_max} bytes")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return np.frombuffer(file.read(bytes_max), dtype=np.uint8)
    finally:
        os.close(descriptor)


# ---- write and apply ----------------------------------------------------------------------------


def write_version(directory: Path, encoded: EncodedVersion) -> None:
    """Write a version into a new directory, and make it durable.  Raises FileExistsError.

    The manifest comes last: a directory without one is no version.
    """
    directory.mkdir(parents=True)
    for name, data in encoded.buckets.items():
        write_durably(directory / name, data)
    write_durably(directory / MANIFEST_NAME, manifests.encode(encoded.manifest))
    sync_directory(directory)


def write_durably(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Write a file and wait until it is on stable storage."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Make renames and new names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def apply_patch(bits: Bits, patch: Patch) -> Bits:
    """The patched tensor, in memory of its own.  Raises WrongBase if the patch is of another form."""
    if (bits.dtype, bits.shape) != (patch.dtype, patch.shape):
        raise WrongBase(f"{patch.name}: {patch.dtype} {patch.shape} cannot patch {bits.dtype} {bits.shape}")
    words = bits.words.copy()
    words[slice(None) if patch.indices is None else patch.indices] = patch.values
    return Bits(bits.dtype, bits.shape, words)


def apply_to_state(state: State, patches: Iterable[Patch]) -> dict[str, Bits]:
    """The state after the patches; `state` is left as it is, parameters not patched are shared with it.

    Raises WrongBase if a patch names a parameter that the state lacks, or of another form.
    """
    patched = dict(state)
    for patch in patches:
        if patch.name not in state:
            raise WrongBase(f"{patch.name}: no such parameter in the base")
        patched[patch.name] = apply_patch(state[patch.name], patch)
    return patched


def check_base(manifest: Manifest, digests: Mapping[str, str]) -> None:
    """Check that digests held are those the delta was built on (an anchor fits any).  Raises WrongBase.

    Names that are tied to what is held (`manifest.tied_names`) need not be there.
    """
    tied = manifests.tied_names(manifest, digests)
    if digests.keys() != manifest.target_digests.keys() - tied:
        odd = sorted((digests.keys() ^ manifest.target_digests.keys()) - tied)
        raise WrongBase(f"version {manifest.version} is of another model: {', '.join(odd[:3])}")
    for parameter in manifest.parameters:
        if parameter.name in tied:
            continue
        if parameter.base_digest is not None and parameter.base_digest != digests[parameter.name]:
            raise WrongBase(
                f"{parameter.name}: the bytes held are not those of version {manifest.base_version}"
            )


def check_target(manifest: Manifest, digests: Mapping[str, str]) -> None:
    """Check that digests computed after applying are the promised ones.  Raises CorruptDelta."""
    tied = manifests.tied_names(manifest, digests)
    for name, expected in manifest.target_digests.items():
        if name not in tied and digests.get(name) != expected:
            raise CorruptDelta(f"{name}: the bytes are not those of version {manifest.version}")


def _require_same_form(base: State, target: State) -> None:
    for name in sorted(base.keys() | target.keys()):
        if name not in base or name not in target or not base[name].same_form(target[name]):
            raise WrongBase(f"{name}: missing in one of the two states, or of another dtype or shape")
