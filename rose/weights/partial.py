"""Receivers that hold a part of the model: they fetch what touches it by slices and chunks, and nothing else.

What a rank or a host needs follows from its layout (`planner.slices`), whatever the trainer's is: both speak
in coordinates of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from rose_kernels import delta

from rose.errors import CorruptDelta, WrongBase
from rose.weights import boxes, coding
from rose.weights.bits import State, empty_buffer
from rose.weights.boxes import Box
from rose.weights.manifest import Manifest, Parameter, Slice
from rose.weights.patches import Patch
from rose.weights.relay import Committed, Relay
from rose.weights.relay.ranges import Range, fetch_ranges

_HEAD_BYTES = 1024
"""Holds the header of a slice of up to about 80 chunks."""
_WHOLE_BYTES_MAX = 64 << 10
"""Slices up to this size are fetched whole: a round trip would cost more."""


async def fetch_part(
    relay: Relay, committed: Committed, wanted: Mapping[str, Box], base: State, *, threads: int = 1
) -> list[Patch]:
    """Patches of the boxes `wanted`, in coordinates of the checkpoint and within the boxes.

    `base` holds the wanted parameters, of which the bytes of every touched slice are proven.  Of a large
    slice that is wanted in part, only the header and the chunks that touch the box are fetched; then each
    chunk is checked by its digest, and not the outcome as a whole.  The rest of the buckets is not fetched,
    so digests of buckets are not checked.  Raises WrongBase, CorruptDelta, and what `Relay.get_into` raises.
    """
    manifest = committed.manifest
    touched = {part: (parameter, box) for parameter, part, box in _touched(manifest, wanted)}
    held = {part: empty_buffer(part.length) for part in touched}

    async def fetch(ranges: Iterable[tuple[Slice, int, int]]) -> None:
        asked = [
            Range(part.bucket, held[part][first:stop], part.offset + first)
            for part, first, stop in ranges
            if part.bucket is not None and first < stop
        ]
        await fetch_ranges(relay, manifest.job, manifest.version, asked, epoch=committed.epoch)

    by_chunk = [part for part, (parameter, box) in touched.items() if _worth_chunks(parameter, part, box)]
    heads = {part: min(_HEAD_BYTES, part.length) for part in by_chunk}
    await fetch((part, 0, heads.get(part, part.length)) for part in touched)
    longer = {part: _header_bytes(part, held[part]) for part in by_chunk}
    await fetch((part, heads[part], longer[part]) for part in by_chunk)
    chunks: dict[Slice, list[int]] = {}
    ranges: list[tuple[Slice, int, int]] = []
    for part in by_chunk:
        header = _header(part, held[part][: max(heads[part], longer[part])])
        chunks[part] = _chunks_of(*touched[part], part, header)
        places = (header.chunks[number] for number in chunks[part])
        ranges += [(part, max(first, heads[part]), stop) for first, stop in _joined(places)]
    await fetch(ranges)
    patches = coding.decode_coded(
        manifest, held.__getitem__, base, threads=threads, only=touched.__contains__, chunks=chunks
    )
    return [clipped for patch in patches if (clipped := _clip(patch, wanted[patch.name])).values.size]


def _worth_chunks(parameter: Parameter, part: Slice, box: Box) -> bool:
    """Whether to ask for a slice's header first, which costs a round trip."""
    covered = part.box or boxes.whole(parameter.shape)
    return boxes.intersect(covered, box) != covered and not part.raw and part.length > _WHOLE_BYTES_MAX


def _header_bytes(part: Slice, head: memoryview) -> int:
    try:
        length = delta.header_length(head)
    except delta.CorruptDelta as error:
        raise CorruptDelta(f"{part.bucket}: {error}") from None
    if length > part.length:
        raise CorruptDelta(f"{part.bucket}: a header that is longer than its slice")
    return length


def _header(part: Slice, head: memoryview) -> delta.ShardHeader:
    try:
        header = delta.read_header(head)
    except delta.CorruptDelta as error:
        raise CorruptDelta(f"{part.bucket}: {error}") from None
    if header.length != part.length:
        raise CorruptDelta(f"{part.bucket}: the slice is another than the manifest says")
    return header


def _chunks_of(parameter: Parameter, box: Box, part: Slice, header: delta.ShardHeader) -> list[int]:
    """Numbers of the chunks that hold some of the box."""
    covered = part.box or boxes.whole(parameter.shape)
    if header.elements != boxes.size_of(covered):
        raise CorruptDelta(f"{part.bucket}: the slice is another than the manifest says")
    shared = boxes.intersect(covered, box)
    assert shared is not None
    local = tuple((first - low, last - low) for (first, last), (low, _) in zip(shared, covered, strict=True))
    return [int(number) for number in boxes.chunks(boxes.shape_of(covered), local, header.chunk_elements)]


def _joined(places: Iterable[delta.ChunkPlace]) -> list[tuple[int, int]]:
    """Where the chunks' payloads lie; neighbours are fetched as one."""
    found: list[tuple[int, int]] = []
    for place in places:
        first, stop = place.offset, place.offset + place.length
        if found and found[-1][1] == first:
            first = found.pop()[0]
        found.append((first, stop))
    return found


def part_bytes(manifest: Manifest, wanted: Mapping[str, Box]) -> int:
    """What `fetch_part` fetches at most; the rest of `manifest.delta_bytes` stays where it is."""
    return sum(part.length for _, part, _ in _touched(manifest, wanted))


def _touched(manifest: Manifest, wanted: Mapping[str, Box]) -> Iterator[tuple[Parameter, Slice, Box]]:
    """The stored slices that share an element with what is wanted, and what that is.  Raises WrongBase."""
    parameters = {parameter.name: parameter for parameter in manifest.parameters}
    for name, box in wanted.items():
        if (parameter := parameters.get(name)) is None or len(box) != len(parameter.shape):
            raise WrongBase(f"{name}: version {manifest.version} has no such parameter")
        if parameter.shards:
            raise WrongBase(f"{name}: is not coded, so that parts of it cannot be fetched")
        for part in parameter.slices:
            if part.bucket is not None and _meets(parameter, part, box):
                yield parameter, part, box


def _meets(parameter: Parameter, part: Slice, box: Box) -> bool:
    return boxes.intersect(part.box or boxes.whole(parameter.shape), box) is not None


def _clip(patch: Patch, box: Box) -> Patch:
    """What of a patch lies in the box."""
    if box == boxes.whole(patch.shape):
        return patch
    indices = np.arange(patch.values.size) if patch.indices is None else patch.indices
    inside = np.ones(indices.size, dtype=bool)
    for axis, (first, last) in zip(np.unravel_index(indices, patch.shape), box, strict=True):
        inside &= (axis >= first) & (axis < last)
    return Patch(patch.name, patch.dtype, patch.shape, indices[inside], patch.values[inside])
