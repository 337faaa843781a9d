"""What changed in the last few versions, and which way: what stateful deltas are coded and decoded with.

    v3 ─▶ v4 ─▶ v5 ─▶ ... ─▶ v10        of the changes of v4 to v10 both ends know, per element, the latest:
                                        its age, at most SPAN_MAX versions, and its direction

Trainer and host each keep one of these and let every version pass through it.  Nothing older counts, so
whoever missed a version, or was restarted, knows all there is to know SPAN_MAX versions later, without being
told.  An anchor does not say what changed: after it, knowledge begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from rose_kernels import delta

from rose.units import WeightVersion
from rose.weights.bits import Bits
from rose.weights.manifest import HISTORY_MAX, Manifest, is_squashed
from rose.weights.patches import Indices, Patch

SPAN_MAX = HISTORY_MAX
"""Versions that are remembered."""
Ages: TypeAlias = npt.NDArray[np.uint8]
"""Per element 0, or 2 * age - 1 after a step up and 2 * age after a step down (docs/delta-format.md)."""

_BLOCK = 1 << 18
"""Elements at a time: so many stay in a core's cache over the passes that are made."""


@dataclass(slots=True)
class Notes:
    """What one version changes, as it is decoded parameter by parameter."""

    _changes: dict[str, tuple[int, Indices, Ages]] = field(default_factory=dict)

    def add(self, patch: Patch, before: Bits) -> None:
        """A patch and the bits it is applied to."""
        element = delta.FORMATS.get(patch.dtype)
        if element is None or not element.can_be_sparse:
            return
        indices = patch.indices
        if indices is None:
            indices = np.flatnonzero(before.words != patch.values)
        new = patch.values if patch.indices is not None else patch.values[indices]
        moved = delta.new_history(indices.size)
        delta.advance(moved, element, np.arange(indices.size), before.words[indices], new)
        self._changes[patch.name] = (before.words.size, indices, moved)

    def __iter__(self) -> Iterator[tuple[str, int, Indices, Ages]]:
        for name, (elements, indices, moved) in self._changes.items():
            yield name, elements, indices, moved


class ChangeHistory:
    """One byte for every element that may change sparsely, in host memory.  For one thread at a time."""

    def __init__(self) -> None:
        self._ages: dict[str, Ages] = {}
        self.version: WeightVersion | None = None
        """The version after which this is the history; None: of none."""
        self.span = 0
        """How many versions, up to that one, are known."""

    def begin(self, version: WeightVersion | None) -> None:
        """Nothing is known of what led to `version`."""
        self._ages, self.version, self.span = {}, version, 0

    def covers(self, manifest: Manifest) -> bool:
        """Whether a delta can be decoded with what is known."""
        return not manifest.history or (
            self.version == manifest.base_version and self.span >= manifest.history
        )

    def before(self, name: str, elements: int, span: int) -> Ages:
        """The history of a parameter over the last `span` versions.  To be read only."""
        ages = self._ages.get(name)
        if ages is None or ages.size != elements:
            return delta.new_history(elements)
        return ages if span >= self.span else ages * (ages <= 2 * span)

    def arrived(self, manifest: Manifest, notes: Notes) -> None:
        """A version took the place of its base; `notes` say what that changed.

        An anchor and a squashed delta do not say what the last version of those that they stand for changed.
        """
        if manifest.base_version is None or is_squashed(manifest.job):
            self.begin(manifest.version)
            return
        if manifest.base_version != self.version:
            self.begin(manifest.base_version)
        for ages in self._ages.values():
            _age(ages)
        for name, elements, indices, moved in notes:
            if name not in self._ages or self._ages[name].size != elements:
                self._ages[name] = delta.new_history(elements)
            self._ages[name][indices] = moved
        self.version, self.span = manifest.version, min(SPAN_MAX, self.span + 1)


def _age(ages: Ages) -> None:
    """Let a version pass: what is older than SPAN_MAX versions then is forgotten."""
    for start in range(0, ages.size, _BLOCK):
        block = ages[start : start + _BLOCK]
        block += (block > 0).view(np.uint8) << 1
        block *= (block <= 2 * SPAN_MAX).view(np.uint8)
