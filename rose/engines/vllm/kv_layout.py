"""Where KV blocks lie in the memory of a worker: which pages blocks in use touch.  Imports no vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BlockRange = tuple[int, int]
"""First block, and the one after the last."""


class KvLayout(NamedTuple):
    """Layers by block: block b of layer l lies at `base[l] + b * stride[l]`, `length[l]` bytes long."""

    size_bytes: int
    blocks: int
    base: NDArray[np.int64]
    stride: NDArray[np.int64]
    length: NDArray[np.int64]

    @classmethod
    def of(cls, kv_cache_config: Any) -> KvLayout | None:
        """The layout that vLLM's KVCacheConfig describes; None where it is not one we know.

        One allocation holds the layers of all tensors; a layer's page in it has no padding that others use.
        """
        tensors = kv_cache_config.kv_cache_tensors
        if not tensors or any(tensor.host_resident for tensor in tensors):
            return None
        base, stride, length = [], [], []
        for tensor in tensors:
            page = min(tensor.block_stride, tensor.layer_stride or tensor.block_stride)
            for index in range(len(tensor.layers)):
                base.append(tensor.offset + index * tensor.layer_stride)
                stride.append(tensor.block_stride)
                length.append(page if len(tensor.layers) > 1 else tensor.block_stride)
        as_array = [np.asarray(values, np.int64) for values in (base, stride, length)]
        layout = cls(tensors[0].size, kv_cache_config.num_blocks, *as_array)
        ends = layout.base + (layout.blocks - 1) * layout.stride + layout.length
        return layout if bool((ends <= layout.size_bytes).all()) and layout.blocks > 0 else None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers together."""
        return int(self.length.sum())

    def group_blocks(self, page_bytes: int) -> int:
        """The least number of neighbouring blocks that fill whole pages in every layer.

        Where strides and pages have little in common, as many as waste at most an eighth in split pages.
        """
        least = 1
        for stride in {int(stride) for stride in self.stride}:
            exact = page_bytes // math.gcd(page_bytes, stride)
            ample = -(-8 * page_bytes // stride)
            least = max(least, min(exact, ample))
        return least

    def pages_in_use(self, parked: Iterable[BlockRange], page_bytes: int) -> NDArray[np.bool_]:
        """For every page of the memory, whether a block that is not parked touches it."""
        kept = np.ones(self.blocks + 2, np.int8)
        kept[0] = kept[-1] = 0  # block b is at b + 1
        for first, end in parked:
            kept[max(first, 0) + 1 : max(end, 0) + 1] = 0
        kept[-1] = 0
        edges = np.flatnonzero(np.diff(kept))
        starts, ends = edges[::2], edges[1::2]
        low = self.base[:, None] + starts * self.stride[:, None]
        high = self.base[:, None] + (ends - 1) * self.stride[:, None] + self.length[:, None]
        pages = -(-self.size_bytes // page_bytes)
        change = np.zeros(pages + 1, np.int32)
        np.add.at(change, (low // page_bytes).ravel(), 1)
        np.add.at(change, (-(-high // page_bytes)).ravel(), -1)
        return np.cumsum(change[:-1]) > 0


def page_runs(pages: NDArray[np.bool_], pages_max: int) -> list[tuple[int, int]]:
    """Runs of true pages as (first page, count), none longer than `pages_max`."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], pages, [False])).astype(np.int8)))
    return [
        (first, min(pages_max, int(end) - first))
        for start, end in zip(edges[::2], edges[1::2], strict=True)
        for first in range(int(start), int(end), pages_max)
    ]


def block_ranges(blocks: Iterable[int]) -> tuple[BlockRange, ...]:
    """Block numbers as ascending ranges."""
    ranges: list[BlockRange] = []
    for block in sorted(blocks):
        if ranges and ranges[-1][1] == block:
            ranges[-1] = (ranges[-1][0], block + 1)
        else:
            ranges.append((block, block + 1))
    return tuple(ranges)
