"""Rectangles of a parameter: which part of it a rank holds, in the coordinates of the checkpoint.

Pure geometry.  A box is a half-open range per dimension; a scalar has the box `()`.  Flat positions count
elements in checkpoint (row-major) order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Box: TypeAlias = tuple[tuple[int, int], ...]
Shape: TypeAlias = tuple[int, ...]
Positions: TypeAlias = npt.NDArray[np.int64]


def whole(shape: Shape) -> Box:
    """All of a parameter."""
    return tuple((0, size) for size in shape)


def split(shape: Shape, dimension: int, first: int, last: int) -> Box:
    """Rows [first, last) along one dimension, whole along the others; cut to the shape."""
    box = list(whole(shape))
    size = shape[dimension]
    box[dimension] = (min(first, size), min(last, size))
    return tuple(box)


def within(box: Box, part: Box) -> Box:
    """`part`, given in coordinates relative to the box, in those of the checkpoint."""
    return tuple((low + first, low + last) for (low, _), (first, last) in zip(box, part, strict=True))


def shape_of(box: Box) -> Shape:
    """The shape of the local tensor that a box is."""
    return tuple(last - first for first, last in box)


def size_of(box: Box) -> int:
    """Number of elements."""
    return math.prod(shape_of(box))


def intersect(left: Box, right: Box) -> Box | None:
    """What two boxes share; None if nothing."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return box if all(first < last for first, last in box) else None


def subtract(box: Box, hole: Box) -> list[Box]:
    """The box without the hole, as boxes that do not overlap."""
    shared = intersect(box, hole)
    if shared is None:
        return [box]
    rest: list[Box] = []
    core = list(box)
    for dimension, ((first, last), (low, high)) in enumerate(zip(box, shared, strict=True)):
        sides = [(a, b) for a, b in ((first, low), (high, last)) if a < b]
        rest += [(*core[:dimension], side, *core[dimension + 1 :]) for side in sides]
        core[dimension] = (low, high)
    return rest


def cut(box: Box, elements_max: int) -> list[Box]:
    """The box in pieces of at most `elements_max` elements, in order of their positions.

    Cuts the first dimension that can be cut, so pieces of a whole parameter are runs of it.
    """
    if size_of(box) <= elements_max:
        return [box]
    dimension = next(at for at, (first, last) in enumerate(box) if last - first > 1)
    first, last = box[dimension]
    step = max(1, elements_max * (last - first) // size_of(box))
    pieces = (
        (*box[:dimension], (at, min(at + step, last)), *box[dimension + 1 :])
        for at in range(first, last, step)
    )
    return [part for piece in pieces for part in cut(piece, elements_max)]


def runs(shape: Shape, box: Box) -> tuple[Positions, int]:
    """A box as runs of consecutive flat positions: where they begin, in order, and the length of each."""
    if not size_of(box):
        return np.empty(0, np.int64), 0
    inner = len(shape)  # dimensions from here on are contiguous
    while inner > 0 and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    outer = max(inner - 1, 0)
    length = math.prod(last - first for first, last in box[outer:])
    starts = np.zeros(1, np.int64)
    for dimension in range(len(shape)):
        stride = math.prod(shape[dimension + 1 :])
        first, last = box[dimension]
        steps = np.arange(first, last if dimension < outer else first + 1, dtype=np.int64) * stride
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    return starts, length


def chunks(shape: Shape, box: Box, chunk_elements: int) -> Positions:
    """Numbers of the chunks of `chunk_elements` consecutive elements that hold some of the box, in order."""
    starts, length = runs(shape, box)
    if not starts.size:
        return starts
    first, last = starts // chunk_elements, (starts + length - 1) // chunk_elements
    spread = int((last - first).max()) + 1
    numbers = first[:, None] + np.arange(spread, dtype=np.int64)[None, :]
    return np.unique(numbers[numbers <= last[:, None]])


def localise(
    shape: Shape, box: Box, positions: Positions, values: npt.NDArray[Any]
) -> tuple[Positions, npt.NDArray[Any]]:
    """The part of a sparse change that falls into a box, at flat positions of the local tensor.

    Order is kept, so strictly increasing positions stay so.
    """
    coordinates = np.unravel_index(positions, shape) if shape else ()
    inside = np.ones(positions.size, dtype=bool)
    for axis, (first, last) in zip(coordinates, box, strict=True):
        inside &= (axis >= first) & (axis < last)
    local = shape_of(box)
    if not shape:
        return positions, values
    shifted = tuple(axis[inside] - first for axis, (first, _) in zip(coordinates, box, strict=True))
    flat = np.ravel_multi_index(shifted, local) if inside.any() else np.empty(0, np.int64)
    return np.asarray(flat, np.int64), values[inside]


def globalise(shape: Shape, box: Box, positions: Positions) -> Positions:
    """Flat positions in a box's local tensor as flat positions in the parameter; order is kept."""
    starts, length = runs(shape, box)
    if starts.size <= 1:
        return positions + (starts[0] if starts.size else 0)
    row, column = np.divmod(positions, length)
    return np.asarray(starts[row] + column, np.int64)


def put(words: npt.NDArray[Any], shape: Shape, box: Box, values: npt.NDArray[Any]) -> None:
    """Write a local tensor's elements where the box lies in a flat parameter."""
    selection: Sequence[slice] = [slice(first, last) for first, last in box]
    words.reshape(shape)[tuple(selection)] = values.reshape(shape_of(box))


def take(words: npt.NDArray[Any], shape: Shape, box: Box) -> npt.NDArray[Any]:
    """The box's elements of a flat parameter, flat, as a rank's local tensor holds them."""
    selection: Sequence[slice] = [slice(first, last) for first, last in box]
    return words.reshape(shape)[tuple(selection)].reshape(-1)
