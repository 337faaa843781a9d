"""Make versions: from weights as they travel, and from patches as hosts keep and undo them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from rose.errors import WrongBase
from rose.units import JobId, WeightVersion
from rose.weights import coding, tensorfile
from rose.weights import manifest as manifests
from rose.weights.bits import ITEMSIZE, Bits, State, Words, word_dtype
from rose.weights.coding import Coding, Piece
from rose.weights.container import EncodedVersion, metadata
from rose.weights.digests import digest, digest_state, fingerprint
from rose.weights.history import ChangeHistory
from rose.weights.manifest import Bucket, Manifest, Mode, Origin, Parameter, Shard
from rose.weights.ondevice import Distant
from rose.weights.patches import Indices, Patch
from rose.weights.shards import Demand, Placement, plan_buckets

_WORD_NAMES = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}
_HEADER_BYTES_PER_TENSOR = 160
"""Upper bound of a bucket's header per tensor, name and padding apart."""
_HEADER_BYTES_RESERVED = 1024


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
    """Encode `target` as a delta on `base`, or as an anchor if both bases are None, so that it needs no base.

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


def encode_coded(
    job: JobId,
    version: WeightVersion,
    base_version: WeightVersion | None,
    base: State | None,
    target: State,
    *,
    base_digests: Mapping[str, str] | None = None,
    target_digests: Mapping[str, str] | None = None,
    how: Coding = coding.DEFAULT,
    history: ChangeHistory | None = None,
    distant: Distant = MappingProxyType({}),
) -> EncodedVersion:
    """As `encode_version`, in the delta codec: the form in which versions travel.

    With the history of the base, which has to be that of `base_version`, it takes that to be decoded.
    Tensors that are `distant` too are compared where they lie.
    """
    if (base is None) != (base_version is None):
        raise ValueError("base and base_version go together")
    if base is None:
        base_digests = None
    else:
        _require_same_form(base, target)
        base_digests = base_digests if base_digests is not None else digest_state(base)
    target_digests = target_digests if target_digests is not None else digest_state(target)
    pieces: list[Piece] = []
    counts: dict[str, int] = {}
    for name in sorted(target):
        if base_digests is None or base_digests[name] != target_digests[name]:
            past = None if history is None else history.before(name, target[name].words.size, history.span)
            before = None if base is None else base[name]
            there = None if base is None else distant.get(name)
            found = coding.cut_pieces(name, before, target[name], how, past, there)
            pieces += found
            counts[name] = len(found)
    encoded = coding.encode_pieces(pieces, how, metadata(job, version))
    slices = iter(encoded.slices)
    parameters = []
    for name, bits in sorted(target.items()):
        mine = tuple(itertools.islice(slices, counts.get(name, 0)))
        parameters.append(
            Parameter(
                name=name,
                dtype=bits.dtype,
                shape=bits.shape,
                mode="coded" if mine else "same",
                changed=sum(part.changed for part in mine),
                base_digest=None if base_digests is None else base_digests[name],
                target_digest=target_digests[name],
                slices=mine,
            )
        )
    span = 0 if history is None or not pieces else history.span
    form = _Form(job, version, base_version, base_digests, target_digests, history=span)
    return _seal(form, parameters, encoded.buckets, encoded.tables)


class DecodedVersion:
    """What a host keeps of a coded version: its patches, ready to be applied without a base.

    Made some parameters at a time, in any order, so that nothing holds all of a large version.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._parameters: dict[str, Parameter] = {}
        self._buckets: list[Bucket] = []

    def add(
        self, patches: Iterable[Patch], digests: Mapping[str, tuple[str | None, str]]
    ) -> dict[str, bytes]:
        """Take in patches; answers buckets to be kept.

        `digests` are those before and after, of parameters that the host holds; those without a patch are
        unchanged.
        """
        forms = {each.name: (each.dtype, each.shape) for each in self._manifest.parameters}
        changes = {name: _unchanged(*forms[name]) for name in sorted(digests)}
        for patch in patches:
            count = patch.values.size
            changes[patch.name] = _Change(patch.dtype, patch.shape, count, patch.indices, patch.values)
        labels = metadata(self._manifest.job, self._manifest.version)
        shards, buckets = _fill_buckets(changes, labels, first=len(self._buckets))
        self._buckets += _described(buckets)
        anchor = self._manifest.base_version is None
        for name, change in changes.items():
            self._parameters[name] = _parameter(name, change, shards, digests[name], anchor=anchor)
        return buckets

    def manifest(self) -> Manifest:
        """Of what was added."""
        came = self._manifest
        origin = Origin(digest=manifests.identity(came), delta_bytes=came.delta_bytes)
        form = _Form(came.job, came.version, came.base_version, None, {}, origin=origin)
        parameters = [self._parameters[name] for name in sorted(self._parameters)]
        return _manifest(form, parameters, self._buckets)


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
    origin: Origin | None = None
    history: int = 0


def _encode(form: _Form, found: Mapping[str, _Change]) -> EncodedVersion:
    changes = dict(sorted(found.items()))
    shards, buckets = _fill_buckets(changes, metadata(form.job, form.version))
    before: Mapping[str, str | None] = form.base_digests or dict.fromkeys(changes)
    parameters = [
        _parameter(
            name, change, shards, (before[name], form.target_digests[name]), anchor=form.base_digests is None
        )
        for name, change in changes.items()
    ]
    return _seal(form, parameters, buckets)


def _parameter(
    name: str,
    change: _Change,
    shards: Mapping[str, Sequence[Shard]],
    digests: tuple[str | None, str],
    *,
    anchor: bool,
) -> Parameter:
    base_digest, target_digest = digests
    return Parameter(
        name=name,
        dtype=change.dtype,
        shape=change.shape,
        mode=_mode(change, anchor=anchor),
        changed=change.changed,
        base_digest=None if anchor else base_digest,
        target_digest=target_digest,
        shards=tuple(shards.get(name, ())),
    )


def _seal(
    form: _Form,
    parameters: Sequence[Parameter],
    buckets: Mapping[str, bytes],
    tables: tuple[bytes, ...] = (),
) -> EncodedVersion:
    return EncodedVersion(_manifest(form, parameters, _described(buckets), tables), buckets)


def _described(buckets: Mapping[str, bytes]) -> list[Bucket]:
    return [Bucket(name=name, size=len(data), digest=digest(data)) for name, data in buckets.items()]


def _manifest(
    form: _Form,
    parameters: Sequence[Parameter],
    buckets: Sequence[Bucket],
    tables: tuple[bytes, ...] = (),
) -> Manifest:
    made = Manifest(
        job=form.job,
        version=form.version,
        base_version=form.base_version,
        undo=form.undo,
        fingerprint=fingerprint((each.name, each.dtype, each.shape) for each in parameters),
        parameters=tuple(parameters),
        buckets=tuple(buckets),
        tables=tables,
        history=form.history,
        origin=form.origin,
    )
    return checked(made)


def checked(manifest: Manifest) -> Manifest:
    """The manifest as a reader gets it: what we would refuse to read must not be written either."""
    return manifests.decode(manifests.encode(manifest))


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
    changes: Mapping[str, _Change], labels: Mapping[str, str], *, first: int = 0
) -> tuple[dict[str, list[Shard]], dict[str, bytes]]:
    shards: dict[str, list[Shard]] = {}
    filled: dict[str, bytes] = {}
    demands = (change.demand(name) for name, change in changes.items() if change.changed)
    for number, places in enumerate(plan_buckets(demands, reserved_bytes=_HEADER_BYTES_RESERVED), first):
        bucket = f"bucket-{number:05d}.safetensors"
        tensors: dict[str, Bits] = {}
        for place in places:
            shard, blobs = changes[place.name].shard(place, bucket)
            shards.setdefault(place.name, []).append(shard)
            tensors.update(blobs)
        filled[bucket] = tensorfile.encode(tensors, labels)
    return shards, filled


def _index_dtype(elements: int) -> np.dtype[Any]:
    return np.dtype("<u4") if elements <= 1 << 32 else np.dtype("<u8")


def _raw(words: npt.NDArray[Any]) -> Bits:
    return Bits(_WORD_NAMES[words.dtype.itemsize], words.shape, words)


def _require_same_form(base: State, target: State) -> None:
    for name in sorted(base.keys() | target.keys()):
        if name not in base or name not in target or not base[name].same_form(target[name]):
            raise WrongBase(f"{name}: missing in one of the two states, or of another dtype or shape")
