"""Weights before and after an update, for the tests of the delta codec."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rose_kernels.delta import FORMATS, Kernels
from rose_kernels.delta.native import library_path, load
from rose_kernels.delta.reference import ReferenceKernels

Words = npt.NDArray[Any]

SPARSE_DTYPES = ("BF16", "F16", "F8_E4M3", "F8_E5M2")


@cache
def native(folder: Path) -> dict[str, Kernels]:
    """The C kernels with and without vector instructions, each from a copy of the library of its own."""
    path = library_path()
    if path is None:
        return {}
    found: dict[str, Kernels] = {}
    for portable in (False, True):
        copy = folder / f"{'portable' if portable else 'fastest'}.so"
        copy.write_bytes(path.read_bytes())
        kernels = load(copy, portable=portable)
        found[kernels.name] = kernels
    return found


def all_kernels(folder: Path) -> dict[str, Kernels]:
    """Every set of kernels this machine runs, by name."""
    return {"numpy": ReferenceKernels(), **native(folder)}


def weights(rng: np.random.Generator, dtype: str, n: int) -> Words:
    """Bits of normal weights of the usual size."""
    values = (rng.standard_normal(n) * 0.02).astype(np.float32)
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    half = values.astype(np.float16).view(np.uint16)
    if dtype == "F16":
        return half
    element = FORMATS[dtype]
    exponents = (4 - np.minimum(rng.geometric(0.5, n), 4)) << element.exponent_shift
    low = rng.integers(0, 1 << element.exponent_shift, n)
    return (exponents | low | rng.integers(0, 2, n) << 7).astype(np.uint8)


def updated(rng: np.random.Generator, dtype: str, base: Words, density: float) -> Words:
    """What a step of the optimiser makes of `base`: more changes, and longer ones, at small exponents."""
    element = FORMATS[dtype]
    exponent = (base >> element.exponent_shift) & element.exponent_mask
    rarer = 2.0 ** -(exponent.astype(float) - (np.median(exponent) if base.size else 0))
    changed = rng.random(base.size) < np.minimum(density * rarer, 1.0)
    sizes = np.minimum(rng.geometric(0.7, base.size) * np.maximum(rarer.astype(int), 1), 60)
    moved = base.astype(np.int64) + np.where(rng.random(base.size) < 0.5, sizes, -sizes)
    return np.where(changed, moved & (1 << 8 * element.itemsize) - 1, base).astype(element.word)


def pairs() -> Iterator[tuple[str, str, Words, Words]]:
    """Name, dtype, base and target of the shapes of change that matter."""
    rng = np.random.default_rng(7)
    for dtype in SPARSE_DTYPES:
        word = FORMATS[dtype].word
        base = weights(rng, dtype, 5000)
        for density in (0.0, 0.01, 0.05, 0.52):
            yield f"{dtype}-{density}", dtype, base, updated(rng, dtype, base, density)
        top = 1 << 8 * word.itemsize
        anything, other = rng.integers(0, top, (2, 3000)).astype(word)
        yield f"{dtype}-random-bits", dtype, anything, other
        yield f"{dtype}-all-one-step", dtype, base, base ^ word.type(1)
        yield f"{dtype}-one-value", dtype, np.zeros(777, word), np.full(777, top // 2, word)
        every = np.arange(0, top, word.itemsize**2).astype(
            word
        )  # infinities, NaN, -0 and denormals among them
        yield f"{dtype}-patterns", dtype, every, np.roll(every, every.size // 3)
        for n in (1, 63, 64, 65, 4095, 4097):
            part = weights(rng, dtype, n)
            yield f"{dtype}-{n}-elements", dtype, part, updated(rng, dtype, part, 0.1)
        last = base.copy()
        last[-1] ^= 1
        yield f"{dtype}-only-the-last", dtype, base, last


def history_of(rng: np.random.Generator, n: int) -> npt.NDArray[np.uint8]:
    """A history with all its values, most elements unchanged."""
    return np.where(rng.random(n) < 0.7, 0, rng.integers(0, 15, n)).astype(np.uint8)
