"""Choosing a group's plan from a sample of its changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rose_kernels.delta.elements import Bytes, ElementFormat, Words
from rose_kernels.delta.plan import Plan, position_thresholds, value_thresholds
from rose_kernels.delta.reference import steps, value_symbol
from rose_kernels.delta.tables import VALUE_SYMBOLS

Pair = tuple[Words, Words, Bytes | None]
"""Base, target, history."""


class Sampled(Protocol):
    """A shard as far as choosing a plan looks at it."""

    @property
    def elements(self) -> int:
        """How many there are."""
        ...

    @property
    def stateful(self) -> bool:
        """Whether it comes with a history."""
        ...

    def runs(self, every: int) -> Pair:
        """One in `every` of its elements: `runs` of each array."""
        ...


_SAMPLE_RUN = 64
_SAMPLE_ELEMENTS_MAX = 1 << 17
_SAMPLE_CHANGES_MAX = 1 << 13

AGE_THRESHOLDS = (2, 5)
"""Groups of the stateful mode: never changed, in the last version, 2 to 4 versions ago, longer ago."""

_SYMBOL_OF_STEP = np.array([value_symbol(step)[0] for step in range(1 << 16)], np.uint8)


def choose_plan(element: ElementFormat, shards: Sequence[Sampled], classes: int, value_classes: int) -> Plan:
    """Thresholds for a group, from at most 2^17 of its elements in runs of 64."""
    ages = AGE_THRESHOLDS if shards[0].stateful else None
    groups = Plan(element, age_thresholds=ages)
    base, target, history = _sample(shards)
    cells = ((base >> element.exponent_shift) & element.exponent_mask).astype(np.int64)
    changed = np.flatnonzero(base != target)
    few = changed[:: max(1, changed.size // _SAMPLE_CHANGES_MAX)]
    directed = steps(base[few], target[few], element)
    if history is not None:
        cells = cells * groups.groups + groups.group_of[history]
        directed ^= np.where(groups.group_of[history[few]] > 0, history[few] & 1, 0)
    elements = _counts(cells, groups.groups)
    changes = _counts(cells[changed], groups.groups)
    symbols = _SYMBOL_OF_STEP[directed]
    by_symbol = _counts(cells[few] * VALUE_SYMBOLS + symbols, groups.groups, VALUE_SYMBOLS)
    # The tables are shared by the whole group, so what they cost weighs less than in the sample.
    scale = sum(shard.elements for shard in shards) * changed.size / max(1, few.size * base.size)
    return Plan(
        element,
        position_thresholds(elements, changes, classes),
        value_thresholds((by_symbol * scale).astype(np.int64), value_classes),
        ages,
    )


def _counts(cells: npt.NDArray[np.int64], *shape: int) -> npt.NDArray[np.int64]:
    size = 256 * math.prod(shape)
    return np.bincount(cells, minlength=size).reshape(256, *shape)


def _sample(shards: Sequence[Sampled]) -> tuple[Words, Words, Bytes | None]:
    """Base, target and history of the sampled elements: every shard gives runs at equal distances."""
    every = max(1, -(-sum(shard.elements for shard in shards) // _SAMPLE_ELEMENTS_MAX))
    pairs = [shard.runs(every) for shard in shards]
    histories = [history & 15 for _, _, history in pairs if history is not None]
    return (
        np.concatenate([base for base, _, _ in pairs]),
        np.concatenate([target for _, target, _ in pairs]),
        np.concatenate(histories) if histories else None,
    )


def runs(words: Words, every: int) -> Words:
    """One in `every` elements, in runs of 64."""
    stride = _SAMPLE_RUN * every
    count = words.size // stride
    if count == 0:
        return words[: max(1, words.size // every)]
    return words[: count * stride].reshape(count, stride)[:, :_SAMPLE_RUN].ravel()
