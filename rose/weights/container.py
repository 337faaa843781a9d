"""A version's delta as files: write it, and read it back without trusting a byte.

On disk a version is a directory of `manifest.json` and buckets.  A bucket is a safetensors file.  For a
parameter stored whole (mode dense) it holds `<name>.val`, the raw bits; for a sparse one (mode coo) also
`<name>.idx`, the changed positions relative to the shard's start, strictly increasing; for a coded one
`<name> <n>`, blobs of the delta codec (`rose.weights.coding`).  Trainers send coded versions; hosts keep what
they decoded, and their undos, as coo and dense, which needs no base.  Values are absolute, so applying a
delta twice is applying it once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rose.errors import CorruptDelta
from rose.units import MIB, JobId, WeightVersion
from rose.weights import coding, files, tensorfile
from rose.weights import manifest as manifests
from rose.weights.bits import ITEMSIZE, Bits, State, Words, word_dtype
from rose.weights.digests import digest
from rose.weights.history import ChangeHistory
from rose.weights.manifest import (
    MANIFEST_BYTES_MAX,
    MANIFEST_NAME,
    Bucket,
    Manifest,
    Parameter,
    Shard,
    Slice,
)
from rose.weights.patches import Indices, Patch

_BATCH_BYTES = 512 * MIB
"""Of patches that are held at a time."""
_INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class EncodedVersion:
    """A version ready to be pushed or written: its manifest and its buckets by name."""

    manifest: Manifest
    buckets: Mapping[str, bytes]


def metadata(job: JobId, version: WeightVersion) -> dict[str, str]:
    """What every bucket of a version says of itself."""
    return {"format": "rose-delta", "job": job, "version": str(version)}


# ---- decode -------------------------------------------------------------------------------------


def decode_patches(
    manifest: Manifest,
    buckets: Mapping[str, bytes | npt.NDArray[np.uint8]],
    base: State | None = None,
    *,
    threads: int = 1,
    history: ChangeHistory | None = None,
) -> list[Patch]:
    """Patches of all changed parameters, in order of name, from the buckets' bytes.

    Sizes, digests, names, dtypes, lengths and index bounds are checked before anything is returned.
    `manifest` must come from `manifest.decode`.  Coded parameters take the base, unless the version is an
    anchor, and are proven to give the promised bytes; stateful ones also take the history of the base.
    Raises CorruptDelta, WrongBase.
    """
    opened = _open_buckets(manifest, buckets)
    patches = [
        _join(parameter, [_read_shard(parameter, shard, opened[shard.bucket]) for shard in parameter.shards])
        for parameter in manifest.parameters
        if parameter.shards
    ]
    if manifest.coded:
        patches += coding.decode_coded(manifest, _fetch_from(buckets), base, threads=threads, history=history)
    return sorted(patches, key=lambda patch: patch.name)


def read_batches(
    directory: Path, base: State | None, *, threads: int = 1, history: ChangeHistory | None = None
) -> Iterator[list[Patch]]:
    """`read_patches`, some parameters at a time: what a large version comes to is never held as a whole.

    Patches that were yielded are proven; a later batch may still raise.
    """
    manifest = read_manifest(directory)
    if any(parameter.shards for parameter in manifest.parameters):
        yield read_patches(directory, base, threads=threads)
        return
    named = {bucket.name: bucket for bucket in manifest.buckets}
    held: dict[str, npt.NDArray[np.uint8]] = {}
    for batch in _batches(manifest):
        wanted = sorted({part.bucket for part in batch if part.bucket is not None})
        held = {name: held[name] for name in wanted if name in held}
        for name in wanted:
            if name not in held:
                held[name] = files.read_file(directory / name, named[name].size)
                _open_bucket(manifest, named[name], held)
        yield coding.decode_coded(
            manifest,
            _fetch_from(held),
            base,
            threads=threads,
            only=frozenset(batch).__contains__,
            history=history,
        )


def _batches(manifest: Manifest) -> Iterator[list[Slice]]:
    """The slices of some parameters at a time, so many that they keep several threads busy."""
    batch: list[Slice] = []
    room = _BATCH_BYTES
    for parameter in manifest.parameters:
        entry_bytes = ITEMSIZE[parameter.dtype] + _INDEX_BYTES
        nbytes = parameter.stored_bytes + parameter.changed * entry_bytes
        if batch and nbytes > room:
            yield batch
            batch, room = [], _BATCH_BYTES
        batch += parameter.slices
        room -= nbytes
    if batch:
        yield batch


def check_buckets(manifest: Manifest, buckets: Mapping[str, bytes | npt.NDArray[np.uint8]]) -> None:
    """Check all that can be checked without a base.  Raises CorruptDelta."""
    if manifest.coded:
        _open_buckets(manifest, buckets)
        coding.check_blobs(manifest, _fetch_from(buckets))
    else:
        decode_patches(manifest, buckets)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a version directory.  Raises CorruptDelta, also when it is missing."""
    path = directory / MANIFEST_NAME
    try:
        return manifests.decode(files.read_file(path, MANIFEST_BYTES_MAX).tobytes())
    except CorruptDelta as error:
        raise CorruptDelta(f"{path}: {error.what.removeprefix(f'{path}: ')}") from None


def read_patches(directory: Path, base: State | None = None, *, threads: int = 1) -> list[Patch]:
    """`decode_patches` of a version directory.  Raises CorruptDelta, also when a file is missing."""
    manifest = read_manifest(directory)
    return decode_patches(manifest, read_buckets(directory, manifest), base, threads=threads)


def read_buckets(directory: Path, manifest: Manifest) -> dict[str, npt.NDArray[np.uint8]]:
    """All buckets of a version directory.  Raises CorruptDelta where one is missing or too large."""
    return {bucket.name: files.read_file(directory / bucket.name, bucket.size) for bucket in manifest.buckets}


def _fetch_from(buckets: Mapping[str, bytes | npt.NDArray[np.uint8]]) -> coding.Fetch:
    def fetch(part: Slice) -> memoryview:
        assert part.bucket is not None
        return np.frombuffer(buckets[part.bucket], np.uint8).data[part.offset : part.offset + part.length]

    return fetch


def _open_buckets(
    manifest: Manifest, buckets: Mapping[str, bytes | npt.NDArray[np.uint8]]
) -> dict[str, Mapping[str, Bits]]:
    """The tensors of all buckets, which are the very ones that the manifest speaks of."""
    opened = {bucket.name: _open_bucket(manifest, bucket, buckets) for bucket in manifest.buckets}
    stored: dict[str, int] = dict.fromkeys(opened, 0)
    expected: dict[str, set[str]] = {name: set() for name in opened}
    for parameter in manifest.parameters:
        for shard in parameter.shards:
            expected[shard.bucket].add(f"{parameter.name}.val")
            if parameter.mode == "coo":
                expected[shard.bucket].add(f"{parameter.name}.idx")
        for part in parameter.slices:
            if part.bucket is not None:
                stored[part.bucket] += 1
    for name, tensors in opened.items():
        if not stored[name] and tensors.keys() != expected[name]:
            raise CorruptDelta(f"{name}: holds other tensors than the manifest says")
        if stored[name] and len(tensors) != stored[name] + len(expected[name]):
            raise CorruptDelta(f"{name}: holds another number of tensors than the manifest says")
    return opened


def _open_bucket(
    manifest: Manifest, bucket: Bucket, buckets: Mapping[str, bytes | npt.NDArray[np.uint8]]
) -> Mapping[str, Bits]:
    data = np.frombuffer(buckets.get(bucket.name, b""), dtype=np.uint8)
    if data.size != bucket.size:
        raise CorruptDelta(f"{bucket.name}: {data.size} bytes, {bucket.size} expected")
    if digest(data) != bucket.digest:
        raise CorruptDelta(f"{bucket.name}: the digest does not match")
    parsed = tensorfile.parse(data)
    if parsed.metadata != metadata(manifest.job, manifest.version):
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


# ---- write --------------------------------------------------------------------------------------


def write_version(directory: Path, encoded: EncodedVersion, *, durable: bool = True) -> None:
    """Write a version into a new directory, and make it durable if asked to.  Raises FileExistsError.

    The manifest comes last: a directory without one is no version.
    """
    directory.mkdir(parents=True)
    for name, data in encoded.buckets.items():
        files.write(directory / name, data, durable=durable)
    files.write(directory / MANIFEST_NAME, manifests.encode(encoded.manifest), durable=durable)
    if durable:
        files.sync_directory(directory)
