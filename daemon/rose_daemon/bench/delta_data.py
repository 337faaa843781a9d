"""Weights to measure delta formats on: chains of Adam steps, generated, or two given checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rose_kernels.delta import FORMATS, advance, new_history

from rose.errors import NotFound
from rose.weights import tensorfile
from rose.weights.bits import Bits
from rose.weights.checkpoint import open_checkpoint

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[Any]

CHAINS = (("adam lr 1e-6", 1e-6), ("adam lr 1.75e-6", 1.75e-6), ("adam lr 5.6e-6", 5.6e-6))
"""Chains and their learning rates: about 1.2, 1.9 and 4.9% of weights change in the last step."""
STEPS = 24


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Bits of one dtype before and after an update, and the history of the elements where known."""

    name: str
    dtype: str
    base: Words
    target: Words
    history: npt.NDArray[np.uint8] | None

    @property
    def changed(self) -> int:
        """Elements that differ."""
        return int(np.count_nonzero(self.base != self.target))


def bfloat16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    """Round to bfloat16, to nearest and ties to even, as raw bits."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def adam_chain(elements: int, learning_rate: float, seed: int) -> Iterator[npt.NDArray[np.uint16]]:
    """bf16 bits of a square matrix of normal weights (deviation 0.02) after each of 24 Adam steps.

    Gradients are noise of a scale per row and per column over a weak constant low-rank signal, as in RL:
    directions persist over a few steps and then turn.
    """
    rng = np.random.default_rng(seed)
    side = int(elements**0.5)
    shape = (side, side)
    weight = rng.standard_normal(shape, np.float32) * np.float32(0.02)
    first, second = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    row_scale = np.exp(rng.standard_normal((side, 1), np.float32)) * np.float32(1e-4)
    column_scale = np.exp(rng.standard_normal((1, side), np.float32))
    signal = rng.standard_normal((side, 4), np.float32) @ rng.standard_normal((4, side), np.float32)
    for step in range(1, STEPS + 1):
        gradient = rng.standard_normal(shape, np.float32)
        gradient += np.float32(0.075) * signal
        gradient *= row_scale
        gradient *= column_scale
        first += np.float32(0.1) * (gradient - first)
        second += np.float32(0.001) * (np.square(gradient, out=gradient) - second)
        direction = np.sqrt(second / np.float32(1 - 0.999**step)) + np.float32(1e-12)
        np.divide(first / np.float32(1 - 0.9**step), direction, out=direction)
        weight -= np.float32(learning_rate) * direction
        yield bfloat16_bits(weight).reshape(-1)


def generate(name: str, learning_rate: float, elements: int, seed: int) -> Workload:
    """The last step of a chain, with the history that the steps before it left."""
    chain = adam_chain(elements, learning_rate, seed)
    before = base = next(chain)
    history = new_history(base.size)
    for number, bits in enumerate(chain, 2):
        before, base = base, bits
        if number < STEPS:
            at = np.flatnonzero(before != base)
            advance(history, FORMATS["BF16"], at, before[at], base[at])
    return Workload(name, "BF16", before, base, history)


def of_pair(old: Path, new: Path) -> Workload:
    """Two checkpoints, directories or safetensors files: their tensors of the commonest float dtype in a row.

    Raises NotFound if they share no tensor of 8 or 16 bit floats.
    """
    before, after = _tensors(old), _tensors(new)
    sizes: dict[str, int] = {}
    shared = [name for name, bits in before.items() if name in after and bits.same_form(after[name])]
    for name in shared:
        dtype = before[name].dtype
        if dtype in FORMATS and FORMATS[dtype].can_be_sparse:
            sizes[dtype] = sizes.get(dtype, 0) + before[name].nbytes
    if not sizes:
        raise NotFound(f"{old} and {new} share no tensor of 8 or 16 bit floats")
    dtype = max(sizes, key=lambda item: sizes[item])
    names = [name for name in shared if before[name].dtype == dtype]
    base, target = (np.concatenate([side[name].words for name in names]) for side in (before, after))
    return Workload(f"{old.name} -> {new.name}", dtype, base, target, None)


def _tensors(path: Path) -> dict[str, Bits]:
    if path.is_file():
        return dict(tensorfile.parse(np.memmap(path, np.uint8, mode="r")).tensors)
    return open_checkpoint(path).state
