"""Shards that lie on a device: what encoding asks of them is computed there, and only that comes to the host.

Written against `Device`, so that the tests run it, and the kernels of changes.cu, on the host.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rose_kernels.delta.choice import Pair, runs
from rose_kernels.delta.codec import Shard
from rose_kernels.delta.elements import BY_NAME, ElementFormat
from rose_kernels.delta.kernel import Changes
from rose_kernels.delta.plan import Plan

SOURCE = Path(__file__).with_name("changes.cu")
STRIP_ELEMENTS = 512
"""Elements that one warp lists."""
WARP = 32
BLOCK_THREADS = 256

DeviceArray = Any
"""A flat array of a device: NumPy's operations, of which slices are views."""


class Device(Protocol):
    """Where arrays lie and kernels run, in order of the calls."""

    arrays: Any
    """The module of its arrays, as CuPy is: empty, zeros, asarray, cumsum, flatnonzero."""

    def current(self) -> AbstractContextManager[object]:
        """Where arrays are made and kernels run while it is entered."""
        ...

    def run(self, kernel: str, blocks: int, threads: int, *arguments: object) -> None:
        """Start a kernel of changes.cu.  Arguments are arrays, ints (64 bits), or None (a null pointer)."""
        ...

    def to_host(self, array: DeviceArray) -> npt.NDArray[Any]:
        """A copy of the array for the host, when all before is done."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DeviceShard:
    """A shard to encode, like `codec.Shard`, of which base, target and history lie on `device`.

    They must not change while the shard is encoded.  The device needs room for 72 bytes per 512
    elements (264 with a history) and 6 per change; what is coded dense after all is copied to the host whole.
    """

    dtype: str
    base: DeviceArray
    target: DeviceArray
    device: Device
    history: DeviceArray | None = None
    digests: tuple[bytes | None, bytes | None] = (None, None)

    def __post_init__(self) -> None:
        word = self.element.word
        for words in (self.base, self.target):
            if words.dtype != word or words.shape != self.target.shape or words.ndim != 1:
                raise ValueError(f"{self.dtype} wants flat {word} of equal sizes")
            if not words.flags.c_contiguous:
                raise ValueError("base and target must be contiguous")
        past = self.history
        if past is not None and (past.dtype != np.uint8 or past.shape != self.target.shape):
            raise ValueError("a history has one byte per element")

    @property
    def element(self) -> ElementFormat:
        """Its row of the table of formats."""
        return BY_NAME[self.dtype]

    @property
    def elements(self) -> int:
        """How many there are."""
        return int(self.target.size)

    @property
    def stateful(self) -> bool:
        """Whether it comes with a history."""
        return self.history is not None

    @property
    def can_be_sparse(self) -> bool:
        """Whether changes can be coded by exponent class."""
        return self.element.can_be_sparse

    def runs(self, every: int) -> Pair:
        """See `choice.Sampled`."""
        to_host = self.device.to_host
        with self.device.current():
            history = None if self.history is None else to_host(runs(self.history, every))
            return to_host(runs(self.base, every)), to_host(runs(self.target, every)), history

    def on_host(self) -> Shard:
        """All of it."""
        to_host = self.device.to_host
        with self.device.current():
            history = None if self.history is None else to_host(self.history)
            return Shard(self.dtype, to_host(self.base), to_host(self.target), history, self.digests)

    def changes(self, plan: Plan, chunk_elements: int) -> Changes:
        """Compare base and target on the device, and list what differs."""
        if self.elements == 0:
            return Changes(np.zeros(0, np.uint32), np.zeros(0, np.uint16), np.zeros(0, np.int64))
        with self.device.current():
            return self._listed(plan, chunk_elements)

    def _listed(self, plan: Plan, chunk_elements: int) -> Changes:
        xp, device = self.device.arrays, self.device
        chunks = -(-self.elements // chunk_elements)
        strips_per_chunk = -(-chunk_elements // STRIP_ELEMENTS)
        strips = chunks * strips_per_chunk
        blocks = -(-strips * WARP // BLOCK_THREADS)
        width = f"u{8 * self.element.itemsize}"
        mapped = xp.asarray(np.frombuffer(plan.packed.tobytes(), np.uint8))
        counts = xp.empty((chunks, strips_per_chunk, plan.contexts + 1), np.uint32)
        sizes = self.elements, chunk_elements, strips_per_chunk, strips
        tensor = mapped, self.base, self.target, self.history, *sizes
        device.run(f"rose_count_{width}", blocks, BLOCK_THREADS, *tensor, counts)
        before = xp.cumsum(counts, axis=1, dtype=np.uint32)
        ends = np.cumsum(device.to_host(before[:, -1, -1]), dtype=np.int64)
        before -= counts
        starts = xp.asarray(np.concatenate([[0], ends[:-1]]).astype(np.int64))
        places, steps = xp.empty(int(ends[-1]), np.uint32), xp.empty(int(ends[-1]), np.uint16)
        if places.size:
            device.run(f"rose_list_{width}", blocks, BLOCK_THREADS, *tensor, before, starts, places, steps)
        return Changes(device.to_host(places), device.to_host(steps), ends)
