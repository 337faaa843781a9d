"""What the stateful mode remembers: per element, how long ago it last changed and which way.

One byte per element, of which 4 bits are used: 0 for never since the anchor, else `2 * age - 1` after a step
up and `2 * age` after a step down, with the age in versions counted from 1 and held at 7.  Both ends keep it,
begin with zeros at an anchor, and advance it once per version.
"""

from __future__ import annotations

import numpy as np

from rose_kernels.delta.elements import Bytes, ElementFormat, Indices, Words, order
from rose_kernels.delta.plan import HISTORY_AGE_MAX


def new_history(elements: int) -> Bytes:
    """The history of a tensor just after an anchor."""
    return np.zeros(elements, np.uint8)


def advance(history: Bytes, element: ElementFormat, indices: Indices, old: Words, new: Words) -> None:
    """Let one version pass, in place: `new` bits took the place of `old` ones at `indices`."""
    aged = 2 * HISTORY_AGE_MAX - 1
    np.add(history, 2, out=history, where=(history > 0) & (history < aged))
    width = 8 * element.itemsize
    distance = (order(new, element).astype(np.int64) - order(old, element)) & (1 << width) - 1
    history[indices] = 1 + (distance >> (width - 1))
