"""Which pages KV blocks lie in, for any layout: no page that a block in use touches is ever given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.engines.vllm.kv_layout import KvLayout, block_ranges, page_runs

PAGE = 4096


def config(blocks: int, *tensors: Any) -> Any:
    return SimpleNamespace(num_blocks=blocks, kv_cache_tensors=list(tensors))


def tensor(size: int, layers: int, layer_stride: int, block_stride: int, offset: int = 0, **more: Any) -> Any:
    names = [f"layer{number}" for number in range(layers)]
    fields = {"size": size, "layers": names, "layer_stride": layer_stride, "block_stride": block_stride}
    return SimpleNamespace(**fields, offset=offset, **{"host_resident": False} | more)


def layer_outermost(blocks: int, layers: int, page: int) -> KvLayout:
    layout = KvLayout.of(config(blocks, tensor(blocks * layers * page, layers, blocks * page, page)))
    assert layout is not None
    return layout


def block_outermost(blocks: int, layers: int, page: int) -> KvLayout:
    layout = KvLayout.of(config(blocks, tensor(blocks * layers * page, layers, page, layers * page)))
    assert layout is not None
    return layout


def test_a_tail_cut_is_one_range_a_layer() -> None:
    layout = layer_outermost(blocks=10, layers=3, page=2 * PAGE)
    free = ~layout.pages_in_use([(6, 10)], PAGE)
    assert page_runs(free, 1000) == [(12, 8), (32, 8), (52, 8)]
    assert layout.block_bytes == 6 * PAGE


def test_block_outermost_memory_is_one_range_a_run_of_blocks() -> None:
    layout = block_outermost(blocks=10, layers=3, page=PAGE)
    assert page_runs(~layout.pages_in_use([(2, 4), (9, 10)], PAGE), 1000) == [(6, 6), (27, 3)]


def test_a_page_that_a_block_in_use_touches_is_kept() -> None:
    layout = layer_outermost(blocks=8, layers=1, page=PAGE // 2)
    assert page_runs(~layout.pages_in_use([(3, 4)], PAGE), 9) == []
    assert page_runs(~layout.pages_in_use([(3, 6)], PAGE), 9) == [(2, 1)]


def test_everything_parked_keeps_nothing_and_nothing_parked_keeps_all() -> None:
    layout = layer_outermost(blocks=8, layers=2, page=PAGE)
    assert layout.pages_in_use([], PAGE).all()
    assert not layout.pages_in_use([(0, 8)], PAGE).any()
    assert not layout.pages_in_use([(-3, 99)], PAGE).any()


@given(
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(1, 3 * PAGE),
    st.booleans(),
    st.sets(st.integers(0, 19)),
)
def test_pages_in_use_are_those_that_blocks_touch(
    blocks: int, layers: int, page: int, outermost: bool, parked: set[int]
) -> None:
    layout = (layer_outermost if outermost else block_outermost)(blocks, layers, page)
    touched = np.zeros(-(-layout.size_bytes // PAGE), np.bool_)
    for block in set(range(blocks)) - parked:
        for base, stride, length in zip(layout.base, layout.stride, layout.length, strict=True):
            start = int(base + block * stride)
            touched[start // PAGE : -(-(start + int(length)) // PAGE)] = True
    assert np.array_equal(layout.pages_in_use(block_ranges(parked), PAGE), touched)


@pytest.mark.parametrize(
    ("stride", "page", "blocks"),
    [(3 * PAGE, PAGE, 1), (PAGE // 4, PAGE, 4), (PAGE + PAGE // 2, PAGE, 2), (65536, 2 << 20, 32)],
)
def test_a_group_fills_whole_pages(stride: int, page: int, blocks: int) -> None:
    assert layer_outermost(64, 2, stride).group_blocks(page) == blocks


def test_strides_without_a_small_common_multiple_waste_little() -> None:
    blocks = layer_outermost(64, 1, 5000).group_blocks(PAGE)
    assert PAGE / (blocks * 5000) <= 1 / 8


def test_what_is_not_understood_is_not_touched() -> None:
    assert KvLayout.of(config(4)) is None
    assert KvLayout.of(config(4, tensor(4096, 1, 0, 1024, host_resident=True))) is None
    assert KvLayout.of(config(8, tensor(4096, 1, 0, 1024))) is None  # blocks beyond the allocation


def test_runs_are_cut_to_slices() -> None:
    pages = np.array([0, 1, 1, 1, 1, 1, 0, 1], np.bool_)
    assert page_runs(pages, 2) == [(1, 2), (3, 2), (5, 1), (7, 1)]
    assert page_runs(np.zeros(4, np.bool_), 2) == []


def test_ranges_of_blocks() -> None:
    assert block_ranges([]) == ()
    assert block_ranges([5, 1, 2, 3, 9]) == ((1, 4), (5, 6), (9, 10))
