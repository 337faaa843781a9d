"""The map of a group: which context an element's position and value are coded in, and how it is chosen.

Changes of bf16 weights are all but decided by the old exponent: an optimiser moves every weight about as far,
which is more often over a rounding boundary where numbers lie close together.  Elements are therefore put
into a few classes by their old exponent (and, with history, into groups by how long ago they last changed),
and each class has statistics of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rose_kernels.delta.elements import ElementFormat

CLASSES_MAX = 8
GROUPS_MAX = 4
HISTORY_AGE_MAX = 7

MAP_DTYPE = np.dtype(
    [
        ("width", "u1"), ("exponent_shift", "u1"), ("exponent_mask", "u1"), ("classes", "u1"),
        ("groups", "u1"), ("value_classes", "u1"), ("reserved", "u1", 2), ("thresholds", "u1", 8),
        ("class_of", "u1", 256), ("value_class_of", "u1", 256), ("group_of", "u1", 16),
    ]
)  # fmt: skip
"""`rose_map` of rose_delta.h."""


@dataclass(frozen=True)
class Plan:
    """Thresholds of a group, as its header carries them.

    `thresholds` and `value_thresholds` are exponents, rising, at least 1: the class of an element is the
    number of them at or below its old exponent.  `age_thresholds` (None without history) are ages in
    versions, rising, 2 to 7: elements that never changed since the anchor are group 0, the others 1 plus the
    number of them at or below their age.
    """

    element: ElementFormat
    thresholds: tuple[int, ...] = ()
    value_thresholds: tuple[int, ...] = ()
    age_thresholds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.element.can_be_sparse:
            raise ValueError(f"{self.element.name} has no exponent classes")
        for cuts in (self.thresholds, self.value_thresholds):
            _require_rising(cuts, 1, self.element.exponent_mask, CLASSES_MAX - 1)
        _require_rising(self.age_thresholds or (), 2, HISTORY_AGE_MAX, GROUPS_MAX - 2)

    @property
    def stateful(self) -> bool:
        """Whether coding needs the history of the base."""
        return self.age_thresholds is not None

    @property
    def groups(self) -> int:
        """Groups by history: 1 without."""
        return 1 if self.age_thresholds is None else 2 + len(self.age_thresholds)

    @property
    def contexts(self) -> int:
        """Contexts of positions: class * groups + group."""
        return (len(self.thresholds) + 1) * self.groups

    @property
    def value_contexts(self) -> int:
        """Contexts of values: value class * groups + group."""
        return (len(self.value_thresholds) + 1) * self.groups

    @cached_property
    def class_of(self) -> npt.NDArray[np.uint8]:
        """Class by exponent, 256 entries."""
        return np.searchsorted(self.thresholds, np.arange(256), side="right").astype(np.uint8)

    @cached_property
    def value_class_of(self) -> npt.NDArray[np.uint8]:
        """Value class by exponent, 256 entries."""
        return np.searchsorted(self.value_thresholds, np.arange(256), side="right").astype(np.uint8)

    @cached_property
    def group_of(self) -> npt.NDArray[np.uint8]:
        """Group by history byte, 16 entries."""
        if self.age_thresholds is None:
            return np.zeros(16, np.uint8)
        ages = (np.arange(16) + 1) // 2
        groups = 1 + np.searchsorted(self.age_thresholds, ages, side="right")
        return np.where(ages == 0, 0, groups).astype(np.uint8)

    @cached_property
    def packed(self) -> npt.NDArray[Any]:
        """The plan as the C kernels take it."""
        record = np.zeros(1, MAP_DTYPE)
        record["width"] = self.element.itemsize
        record["exponent_shift"] = self.element.exponent_shift
        record["exponent_mask"] = self.element.exponent_mask
        record["classes"] = len(self.thresholds) + 1
        record["groups"] = self.groups
        record["value_classes"] = len(self.value_thresholds) + 1
        record["thresholds"][0, : len(self.thresholds)] = self.thresholds
        record["class_of"] = self.class_of
        record["value_class_of"] = self.value_class_of
        record["group_of"] = self.group_of
        return record


def _require_rising(cuts: Sequence[int], least: int, most: int, count_max: int) -> None:
    if len(cuts) > count_max or any(not least <= cut <= most for cut in cuts):
        raise ValueError(f"thresholds {cuts} are not at most {count_max} of {least} to {most}")
    if any(a >= b for a, b in pairwise(cuts)):
        raise ValueError(f"thresholds {cuts} do not rise")


def position_thresholds(
    elements: npt.NDArray[np.int64], changed: npt.NDArray[np.int64], classes: int
) -> tuple[int, ...]:
    """Cuts of the exponents into at most `classes` classes that make positions cheapest to code.

    `elements` and `changed` count (a sample of) elements by [exponent, group].  A context of n elements with
    k changes costs n * H(k/n) bits: the entropy of its positions.  Ours.
    """
    return _cheapest_cuts(np.stack([changed, elements - changed], axis=2), classes, 0.0)


def value_thresholds(symbols: npt.NDArray[np.int64], classes: int) -> tuple[int, ...]:
    """Cuts of the exponents into at most `classes` classes that make values cheapest to code.

    `symbols` counts the values of changed elements by [exponent, group, symbol].  Each context also pays for
    its table.
    """
    return _cheapest_cuts(symbols, classes, _TABLE_BITS_PER_SYMBOL)


_TABLE_BITS_PER_SYMBOL = 10.0


def _entropy_bits(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Bits of coding rows of counts (last axis), each row with its own frequencies."""
    totals = counts.sum(axis=-1)
    logs = np.log2(np.where(counts > 0, counts, 1.0))
    return np.asarray(totals * np.log2(np.maximum(totals, 1.0)) - (counts * logs).sum(axis=-1))


_EXPONENTS_CONSIDERED = 40
"""Below the largest; whatever is smaller goes into the lowest class."""


def _cheapest_cuts(
    counts: npt.NDArray[np.int64], classes: int, table_bits_per_symbol: float
) -> tuple[int, ...]:
    """Dynamic programme over the exponents in use of `counts[exponent, group, symbol]`."""
    used = np.flatnonzero(counts.any(axis=(1, 2)))
    if used.size == 0 or classes <= 1:
        return ()
    stop = int(used[-1]) + 1
    start = max(int(used[0]), stop - _EXPONENTS_CONSIDERED)
    count = stop - start
    counts = counts[:stop, :, counts.any(axis=(0, 1))]
    sums = np.cumsum(np.concatenate([np.zeros_like(counts[:1]), counts]), axis=0).astype(np.float64)
    begins, ends = np.triu_indices(count)
    joined = sums[start + ends + 1] - sums[np.where(begins == 0, 0, start + begins)]
    tables = table_bits_per_symbol * np.count_nonzero(joined, axis=-1)
    price = np.full((count, count + 1), np.inf)
    price[begins, ends + 1] = (_entropy_bits(joined) + tables).sum(axis=-1)
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    choices: list[npt.NDArray[np.int64]] = []  # by number of classes: where the last one begins, by its end
    totals = []
    for _ in range(min(classes, count)):
        sums = best[:-1, None] + price
        choice = np.argmin(sums, axis=0)
        best = np.append(np.inf, sums[choice[1:], np.arange(1, count + 1)])
        choices.append(choice)
        totals.append(best[count])
    cuts = []
    end = count
    for choice in reversed(choices[: int(np.argmin(totals)) + 1]):
        end = int(choice[end])
        cuts.append(start + end)
    return tuple(sorted(cut for cut in cuts if cut > start))
