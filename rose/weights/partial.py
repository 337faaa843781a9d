"""Receivers that hold a part of the model: they fetch the slices that touch it, and nothing else.

What a rank or a host needs follows from its layout (`planner.slices`), whatever the trainer's is: both speak
in coordinates of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from rose.errors import WrongBase
from rose.weights import boxes, coding
from rose.weights.bits import State, empty_buffer
from rose.weights.boxes import Box
from rose.weights.manifest import Manifest, Parameter, Slice
from rose.weights.patches import Patch
from rose.weights.relay import Committed, Relay
from rose.weights.relay.ranges import Range, fetch_ranges


async def fetch_part(
    relay: Relay, committed: Committed, wanted: Mapping[str, Box], base: State, *, threads: int = 1
) -> list[Patch]:
    """Patches of the boxes `wanted`, in coordinates of the checkpoint and within the boxes.

    `base` holds the wanted parameters, of which the bytes of every touched slice are proven.  The rest of the
    buckets is not fetched, so digests of buckets are not checked; those of slices are.  Raises WrongBase,
    CorruptDelta, and what `Relay.get_into` raises.
    """
    manifest = committed.manifest
    touched = list(_touched(manifest, wanted))
    held = {part: empty_buffer(part.length) for part in touched}
    ranges = [Range(part.bucket, data, part.offset) for part, data in held.items() if part.bucket is not None]
    await fetch_ranges(relay, manifest.job, manifest.version, ranges, epoch=committed.epoch)
    patches = coding.decode_coded(
        manifest, held.__getitem__, base, threads=threads, only=frozenset(touched).__contains__
    )
    return [clipped for patch in patches if (clipped := _clip(patch, wanted[patch.name])).values.size]


def part_bytes(manifest: Manifest, wanted: Mapping[str, Box]) -> int:
    """What `fetch_part` fetches; the rest of `manifest.delta_bytes` stays where it is."""
    return sum(part.length for part in _touched(manifest, wanted))


def _touched(manifest: Manifest, wanted: Mapping[str, Box]) -> Iterator[Slice]:
    """The stored slices that share an element with what is wanted.  Raises WrongBase."""
    parameters = {parameter.name: parameter for parameter in manifest.parameters}
    for name, box in wanted.items():
        if (parameter := parameters.get(name)) is None or len(box) != len(parameter.shape):
            raise WrongBase(f"{name}: version {manifest.version} has no such parameter")
        if parameter.shards:
            raise WrongBase(f"{name}: is not coded, so that parts of it cannot be fetched")
        yield from (part for part in parameter.slices if part.bucket and _meets(parameter, part, box))


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
