"""Versions in the delta codec: how they travel.

A parameter that changed is cut into slices of at most SLICE_BYTES_MAX, or into those that trainer
ranks hold.  Slices of one dtype share tables, which come with the manifest; each slice is a blob of its own
(docs/delta-format.md) in a bucket, a safetensors file of such blobs.  Decoding takes the base and proves,
slice by slice and in scratch memory, that base and outcome are the bytes that the manifest names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from rose_kernels import delta
from rose_kernels.delta.device import DeviceShard

from rose.errors import CorruptDelta, WrongBase
from rose.units import MIB
from rose.weights import boxes, tensorfile
from rose.weights.bits import Bits, State, Words, word_dtype
from rose.weights.boxes import Box
from rose.weights.digests import digest
from rose.weights.history import Ages, ChangeHistory
from rose.weights.joining import Decoded, join
from rose.weights.manifest import BUCKET_BYTES_MAX, Manifest, Parameter, Slice, tied_names
from rose.weights.ondevice import part_of
from rose.weights.patches import Patch, digest_patched

Blob = bytes | memoryview | npt.NDArray[np.uint8]
Fetch = Callable[[Slice], memoryview]
"""The bytes of a slice, as they lie in its bucket."""

SLICE_BYTES_MAX = 32 * MIB
"""Of the parameter: small enough that threads share out a large one, and that any fits a bucket."""
_GROUP_ELEMENTS_MAX = 256 * MIB
"""Slices that share tables.  What is coded at a time is held in memory, tables are paid for per group."""
_MEASURED_ELEMENTS_MAX = 4 * MIB
"""Groups up to this size are coded with fewer classes too: their tables may cost more than they save."""
_FEWER_CLASSES = (4, 1)
_OTHER_BASE = "the bytes held are not those that the delta was made on"
_BUCKET_BYTES = BUCKET_BYTES_MAX - MIB
"""Room for blobs in a bucket; the rest is for its header."""
_BLOBS_PER_BUCKET_MAX = 1024
_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True, slots=True)
class Coding:
    """How to encode: `classes` is K of the codec, `threads` share out the work without changing the outcome.

    `slice_bytes_max` is smaller in tests only.
    """

    classes: int = 8
    threads: int = 1
    slice_bytes_max: int = SLICE_BYTES_MAX


DEFAULT = Coding()


# ---- encode -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A slice to encode: its part of a parameter, before (None in an anchor) and after, flat.

    Box None is all of the parameter; then the digests are with the parameter.
    """

    name: str
    dtype: str
    box: Box | None
    base: Words | None
    target: Words
    base_digest: str | None = None
    target_digest: str | None = None
    history: Ages | None = None
    """How the elements of the base changed before; None: not to be used."""
    distant: delta.DistantShard | None = None
    """The same where base and target lie, to be compared there; not with a history."""

    @property
    def unchanged(self) -> bool:
        """Whether it need not be stored."""
        return self.base_digest is not None and self.base_digest == self.target_digest


@dataclass(frozen=True, slots=True)
class CodedPieces:
    """What `encode_pieces` makes: a slice per piece, in their order, the tables and the buckets they name."""

    slices: tuple[Slice, ...]
    tables: tuple[bytes, ...]
    buckets: Mapping[str, bytes]


def cut_pieces(
    name: str,
    base: Bits | None,
    target: Bits,
    coding: Coding,
    history: Ages | None = None,
    distant: DeviceShard | None = None,
) -> list[Piece]:
    """A changed parameter as pieces to encode, `distant` being the same on a device."""
    parts = boxes.cut(boxes.whole(target.shape), coding.slice_bytes_max // target.words.itemsize)
    if len(parts) == 1:
        before = None if base is None else base.words
        return [Piece(name, target.dtype, None, before, target.words, history=history, distant=distant)]
    found = []
    first = 0  # pieces are runs
    for box in parts:
        before = None if base is None else boxes.take(base.words, base.shape, box)
        after = boxes.take(target.words, target.shape, box)
        before_digest = None if before is None else digest(before)
        past = None if history is None else boxes.take(history, target.shape, box)
        there = None if distant is None else part_of(distant, first, after.size)
        found.append(Piece(name, target.dtype, box, before, after, before_digest, digest(after), past, there))
        first += after.size
    return found


def encode_pieces(
    pieces: Sequence[Piece], coding: Coding, metadata: Mapping[str, str], *, first_bucket: int = 0
) -> CodedPieces:
    """Encode pieces in the smallest form: by exponent class, dense, or as they are.

    The outcome depends on the arguments alone.  Buckets are numbered from `first_bucket` on.
    """
    slices: list[Slice] = [_unstored(piece) for piece in pieces]
    blobs: list[tuple[int, bytes]] = []
    tables: list[bytes] = []
    for group in _groups(pieces):
        encoded = _encode_group([pieces[at] for at in group], coding)
        if encoded.tables:
            tables.append(encoded.tables)
        for at, shard in zip(group, encoded.shards, strict=True):
            piece = pieces[at]
            sparse = shard.mode == delta.Mode.SPARSE
            raw = len(shard.data) >= piece.target.nbytes
            slices[at] = msgspec.structs.replace(
                slices[at],
                changed=shard.changed,
                raw=raw,
                tables=len(tables) - 1 if sparse and not raw else None,
            )
            blobs.append((at, piece.target.tobytes() if raw else shard.data))
    buckets: dict[str, bytes] = {}
    for number, members in enumerate(_fill(blobs), first_bucket):
        bucket = f"bucket-{number:05d}.safetensors"
        named = {f"{pieces[at].name} {at}": data for at, data in members}
        buckets[bucket], offsets = tensorfile.encode_blobs(named, metadata)
        for (at, data), offset in zip(members, offsets, strict=True):
            slices[at] = msgspec.structs.replace(slices[at], bucket=bucket, offset=offset, length=len(data))
    return CodedPieces(tuple(slices), tuple(tables), buckets)


def _unstored(piece: Piece) -> Slice:
    whole = piece.box is None
    return Slice(
        box=piece.box,
        changed=0,
        base_digest=None if whole else piece.base_digest,
        target_digest=None if whole else piece.target_digest,
    )


def _groups(pieces: Sequence[Piece]) -> Iterator[list[int]]:
    """Numbers of the pieces to be stored, by dtype."""
    by_dtype: dict[str, list[int]] = {}
    for at, piece in enumerate(pieces):
        if not piece.unchanged and piece.target.size:
            by_dtype.setdefault(piece.dtype, []).append(at)
    for _, members in sorted(by_dtype.items()):
        group: list[int] = []
        elements = 0
        for at in members:
            if group and elements + pieces[at].target.size > _GROUP_ELEMENTS_MAX:
                yield group
                group, elements = [], 0
            group.append(at)
            elements += pieces[at].target.size
        yield group


def _encode_group(pieces: Sequence[Piece], coding: Coding) -> delta.EncodedGroup:
    shards = [
        piece.distant or delta.Shard(piece.dtype, piece.base, piece.target, piece.history) for piece in pieces
    ]
    settings = delta.Settings(classes=coding.classes, threads=coding.threads)
    best = delta.encode_group(shards, settings)
    if best.tables and sum(piece.target.size for piece in pieces) <= _MEASURED_ELEMENTS_MAX:
        for fewer in _FEWER_CLASSES:
            if fewer < coding.classes:
                less = replace(settings, classes=fewer, value_classes=fewer)
                best = min(best, delta.encode_group(shards, less), key=lambda group: group.nbytes)
    return best


def _fill(blobs: Iterable[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    bucket: list[tuple[int, bytes]] = []
    room = _BUCKET_BYTES
    for at, data in blobs:
        if bucket and (len(data) > room or len(bucket) == _BLOBS_PER_BUCKET_MAX):
            yield bucket
            bucket, room = [], _BUCKET_BYTES
        bucket.append((at, data))
        room -= len(data)
    if bucket:
        yield bucket


# ---- decode -------------------------------------------------------------------------------------


def decode_coded(
    manifest: Manifest,
    fetch: Fetch,
    base: State | None,
    *,
    threads: int = 1,
    only: Callable[[Slice], bool] = lambda part: True,
    chunks: Mapping[Slice, Sequence[int]] = MappingProxyType({}),
    history: ChangeHistory | None = None,
) -> list[Patch]:
    """Patches of the parameters in mode coded, in order of name, proven against their digests.

    `base` may be None for an anchor; with one, everything has to be of its form, and parameters that it lacks
    because they are tied to others are left out.  `only` tells which slices to decode, `chunks` of which of
    them no more than some chunks, for which the base is proven and every chunk by its digest.  `history` is
    that of the base, which stateful deltas take.  Raises CorruptDelta or WrongBase; nothing is written.
    """
    if manifest.history and (history is None or not history.covers(manifest)):
        raise WrongBase(
            f"version {manifest.version} takes the changes of {manifest.history} versions before it",
            "they were not seen here: take it in its other form",
        )
    tables = [_read_tables(blob) for blob in manifest.tables]
    tied = frozenset() if base is None else tied_names(manifest, base)
    coded = (parameter for parameter in manifest.parameters if parameter.mode == "coded")
    parameters = [parameter for parameter in coded if parameter.name not in tied]
    work = [
        (number, parameter, part)
        for number, parameter in enumerate(parameters)
        for part in parameter.slices
        if part.bucket is not None and only(part)
    ]
    for number in sorted({number for number, _, _ in work}):
        _require_form(parameters[number], base, anchor=manifest.base_version is None)

    def decode(item: tuple[int, Parameter, Slice]) -> Decoded:
        _, parameter, part = item
        before = None if base is None else base[parameter.name]
        stateful = part.tables is not None and tables[part.tables].plan.stateful
        past = _past(parameter, part, history, manifest.history) if stateful else None
        return _decode_slice(parameter, part, fetch(part), tables, before, past, chunks.get(part))

    parts: list[list[tuple[Slice, Decoded]]] = [[] for _ in parameters]
    for (number, _, part), decoded in zip(work, _share_out(decode, work, threads), strict=True):
        parts[number].append((part, decoded))
    return [join(parameter, found, base) for parameter, found in zip(parameters, parts, strict=True) if found]


def check_pieces(pieces: Sequence[Piece], coded: CodedPieces, *, threads: int = 1) -> None:
    """Decode what was encoded, and compare with the targets.  Raises CorruptDelta if a bit differs."""
    tables = [_read_tables(blob) for blob in coded.tables]

    def check(item: tuple[Piece, Slice]) -> None:
        piece, part = item
        if part.bucket is None:
            return
        blob = memoryview(coded.buckets[part.bucket])[part.offset : part.offset + part.length]
        where = f"{part.bucket}: {piece.name}"
        elements, base = piece.target.size, piece.base
        after = _decode_blob(where, piece.dtype, elements, part, blob, tables, base, piece.history).over(base)
        if not np.array_equal(after, piece.target):
            raise CorruptDelta(f"{where}: the encoded delta does not give the trainer's weights")

    for _ in _share_out(check, list(zip(pieces, coded.slices, strict=True)), threads):
        pass


def check_blobs(manifest: Manifest, fetch: Fetch) -> None:
    """Check all that can be checked without the base: headers, tables, digests.  Raises CorruptDelta."""
    tables = [_read_tables(blob) for blob in manifest.tables]
    for parameter in manifest.parameters:
        for part in parameter.slices:
            if part.bucket is not None and not part.raw:
                where, elements = _where(parameter, part), _elements(parameter, part)
                _reader(where, parameter.dtype, elements, part, fetch(part), tables)


def _read_tables(blob: bytes) -> delta.GroupTables:
    try:
        return delta.GroupTables.read(blob)
    except delta.CorruptDelta as error:
        raise CorruptDelta(f"manifest: {error}") from None


def _require_form(parameter: Parameter, base: State | None, *, anchor: bool) -> None:
    """What follows allocates as much as the manifest says, so that has to be what is held."""
    held = None if base is None else base.get(parameter.name)
    if held is None:
        if anchor and base is None:
            return
        what = "takes its base to be decoded" if base is None else "no such parameter in the base"
        raise WrongBase(f"{parameter.name}: {what}")
    if (held.dtype, held.shape) != (parameter.dtype, parameter.shape):
        raise WrongBase(
            f"{parameter.name}: {parameter.dtype} {parameter.shape} cannot follow {held.dtype} {held.shape}"
        )


def _decode_slice(
    parameter: Parameter,
    part: Slice,
    blob: memoryview,
    tables: Sequence[delta.GroupTables],
    base: Bits | None,
    past: Ages | None,
    chunks: Sequence[int] | None,
) -> Decoded:
    where = _where(parameter, part)
    base_digest = parameter.base_digest if part.box is None else part.base_digest
    before = None
    if base is not None and base_digest is not None:
        before = base.words if part.box is None else boxes.take(base.words, base.shape, part.box)
    elements = _elements(parameter, part)
    try:
        decoded = _decode_blob(where, parameter.dtype, elements, part, blob, tables, before, past, chunks)
    except CorruptDelta:
        if before is not None and digest(before) != base_digest:
            raise WrongBase(f"{where}: {_OTHER_BASE}") from None
        raise
    if chunks is not None:
        if before is not None and digest(before) != base_digest:
            raise WrongBase(f"{where}: {_OTHER_BASE}")
        return decoded
    held_digest: str | None = None
    if before is None:
        found = digest(decoded.values)
    else:
        held_digest, found = digest_patched(before, decoded.indices, decoded.values)
    if held_digest != base_digest:
        raise WrongBase(f"{where}: {_OTHER_BASE}")
    if found != (parameter.target_digest if part.box is None else part.target_digest):
        raise CorruptDelta(f"{where}: decodes to other bytes than promised")
    return decoded


def _decode_blob(
    where: str,
    dtype: str,
    elements: int,
    part: Slice,
    blob: memoryview,
    tables: Sequence[delta.GroupTables],
    before: Words | None,
    past: Ages | None,
    chunks: Sequence[int] | None = None,
) -> Decoded:
    if part.raw:
        return Decoded(None, np.frombuffer(blob, np.uint8).view(word_dtype(dtype)))
    reader = _reader(where, dtype, elements, part, blob, tables, chunks)
    try:
        return Decoded(*reader.decode(before, past))
    except delta.CorruptDelta as error:
        raise CorruptDelta(f"{where}: {error}") from None


def _past(parameter: Parameter, part: Slice, history: ChangeHistory | None, span: int) -> Ages | None:
    """How a slice's elements changed in the last `span` versions."""
    if history is None:
        return None
    ages = history.before(parameter.name, parameter.elements, span)
    return ages if part.box is None else boxes.take(ages, parameter.shape, part.box)


def _elements(parameter: Parameter, part: Slice) -> int:
    return parameter.elements if part.box is None else boxes.size_of(part.box)


def _reader(
    where: str,
    dtype: str,
    elements: int,
    part: Slice,
    blob: memoryview,
    tables: Sequence[delta.GroupTables],
    chunks: Sequence[int] | None = None,
) -> delta.ShardReader:
    """A reader of the slice's blob, if its header says what the manifest says.  Raises CorruptDelta."""
    try:
        reader = delta.ShardReader(blob, None if part.tables is None else tables[part.tables], only=chunks)
    except delta.CorruptDelta as error:
        raise CorruptDelta(f"{where}: {error}") from None
    header = reader.header
    if (header.elements, header.element, header.changed) != (elements, delta.FORMATS[dtype], part.changed):
        raise CorruptDelta(f"{where}: the slice is another than the manifest says")
    return reader


def _where(parameter: Parameter, part: Slice) -> str:
    return f"{part.bucket}: {parameter.name}" + ("" if part.box is None else f" {list(part.box)}")


def _share_out(work: Callable[[_In], _Out], items: Sequence[_In], threads: int) -> Iterator[_Out]:
    """`map` on several threads, in order."""
    if threads == 1 or len(items) < 2:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(work, items)
