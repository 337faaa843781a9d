"""What the slices of a parameter decode to, as one patch of the parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rose.weights import boxes
from rose.weights.bits import State, Words, word_dtype
from rose.weights.manifest import Parameter, Slice
from rose.weights.patches import Indices, Patch


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """A slice's new bits at local positions (None: all), in the coordinates of its box."""

    indices: Indices | None
    values: Words

    def over(self, before: Words | None) -> Words:
        """All bits of the slice."""
        if self.indices is None:
            return self.values
        assert before is not None
        after = before.copy()
        after[self.indices] = self.values
        return after


def join(parameter: Parameter, found: Sequence[tuple[Slice, Decoded]], base: State | None) -> Patch:
    """The slices' new bits as one patch of the parameter."""
    form = (parameter.name, parameter.dtype, parameter.shape)
    (first, decoded), *more = found
    if not more and first.box is None:
        return Patch(*form, decoded.indices, decoded.values)
    covered = sum(boxes.size_of(part.box) for part, _ in found if part.box is not None)
    if covered == parameter.elements and all(each.indices is None for _, each in found):
        words = np.empty(parameter.elements, word_dtype(parameter.dtype))
        for part, each in found:
            assert part.box is not None
            boxes.put(words, parameter.shape, part.box, each.values)
        return Patch(*form, None, words)
    assert base is not None
    before = base[parameter.name].words
    indices, values = zip(*(_sparse(parameter, part, each, before) for part, each in found), strict=True)
    return Patch(*form, *_ordered(np.concatenate(indices), np.concatenate(values)))


def _sparse(parameter: Parameter, part: Slice, decoded: Decoded, before: Words) -> tuple[Indices, Words]:
    """A slice's changes at flat positions of the parameter."""
    assert part.box is not None
    local, values = decoded.indices, decoded.values
    if local is None:
        local = np.flatnonzero(boxes.take(before, parameter.shape, part.box) != values)
        values = values[local]
    return boxes.globalise(parameter.shape, part.box, local), values


def _ordered(indices: Indices, values: Words) -> tuple[Indices, Words]:
    if np.all(indices[1:] > indices[:-1]):
        return indices, values
    order = np.argsort(indices)
    return indices[order], values[order]
