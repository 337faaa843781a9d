"""The KV cache in an arena, with vLLM's own allocation and torch, without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rose_kernels.arena.host import HostArena

from rose.boards import BoardPaths, WatchedBoard
from rose.core.readings import KvHolding, Unknown
from rose.engines.vllm.kv_layout import KvLayout
from rose.engines.vllm.kv_orders import OrderWriter

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine

PAGE, BLOCKS, LAYERS = 4096, 32, 3
TENSOR = SimpleNamespace(
    size=BLOCKS * LAYERS * PAGE,
    layers=["a", "b", "c"],
    layer_stride=BLOCKS * PAGE,
    block_stride=PAGE,
    offset=0,
    host_resident=False,
)


class Rig:
    """A holder over an arena that is full of ones, and the scheduler's end of its orders."""

    def __init__(self, run_dir: Path) -> None:
        from rose.engines.vllm.kv_arena import KvHolder  # noqa: PLC0415 (imports torch)

        boards = BoardPaths(run_dir)
        layout = KvLayout.of(SimpleNamespace(num_blocks=BLOCKS, kv_cache_tensors=[TENSOR]))
        assert layout is not None
        self.arena = HostArena(layout.size_bytes)
        self.blocks = np.frombuffer(self.arena.memory, np.uint8).reshape(LAYERS, BLOCKS, PAGE)
        self.blocks[:] = 1
        self.holder = KvHolder(self.arena, layout, boards, "r0")
        self.orders = OrderWriter(boards, "r0")
        self._board = WatchedBoard(boards.kv_holding("r0"), KvHolding)

    @property
    def holding(self) -> KvHolding:
        holding = self._board.read(time.monotonic_ns(), None)
        assert not isinstance(holding, Unknown)
        return holding

    def obeyed(self, revision: int) -> KvHolding:
        return wait_for(lambda: self.holding, lambda holding: holding.revision >= revision)


def wait_for(look: Callable[[], Any], good: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + 20
    while not good(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.005)
    return found


@pytest.fixture
def rig(run_dir: Path) -> Rig:
    return Rig(run_dir)


def test_parked_blocks_leave_memory_and_the_others_stay(rig: Rig) -> None:
    holding = rig.obeyed(rig.orders.give(((4, 8), (20, 32))))
    assert holding.resident_bytes == holding.mapped_bytes == 16 * LAYERS * PAGE
    assert holding.released_bytes == 16 * LAYERS * PAGE
    assert holding.release_ns > 0
    kept = np.r_[0:4, 8:20]
    assert (rig.blocks[:, kept] == 1).all()
    assert not rig.blocks[:, 4:8].any()
    assert not rig.blocks[:, 20:].any()


def test_unparked_blocks_are_there_when_the_step_begins(rig: Rig) -> None:
    rig.obeyed(rig.orders.give(((8, 32),)))
    revision = rig.orders.give(((16, 32),))
    rig.holder.before_step()
    rig.blocks[:, 8:16] = 5
    holding = rig.obeyed(revision)
    assert (rig.blocks[:, 8:16] == 5).all()
    assert holding.mapped_bytes == 16 * LAYERS * PAGE


def test_a_block_in_use_is_never_given_back_however_orders_follow(rig: Rig) -> None:
    """What a step uses is unparked before it, and keeps its bytes until it is parked again."""
    rng = np.random.default_rng(0)
    for step in range(2, 120):
        first, end = sorted(int(number) for number in rng.integers(1, BLOCKS + 1, 2))
        revision = rig.orders.give(((first, end),) if first < end else ())
        rig.holder.before_step()
        used = np.r_[0:first, end:BLOCKS]
        rig.blocks[:, used] = step
        if step % 10 == 0:
            rig.obeyed(revision)
        assert (rig.blocks[:, used] == step).all(), step


def test_resident_memory_is_measured_not_computed(rig: Rig) -> None:
    rig.obeyed(rig.orders.give(((8, 32),)))
    holding = rig.obeyed(rig.orders.give(()))
    assert holding.mapped_bytes == BLOCKS * LAYERS * PAGE  # may all become resident, but nobody wrote there
    assert holding.resident_bytes == 8 * LAYERS * PAGE


def test_without_an_order_everything_stays(rig: Rig) -> None:
    for path in BoardPaths(Path(rig._board.path).parent).run_dir.glob("kv-order-*"):
        path.unlink()
    rig.holder.before_step()
    assert (rig.blocks == 1).all()
    assert rig.arena.resident_bytes() == rig.arena.size_bytes


def test_vllm_allocates_its_cache_in_the_arena() -> None:
    from vllm.v1.kv_cache_interface import (  # noqa: PLC0415 (only where vLLM is installed)
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheLayout,
        KVCacheTensor,
    )
    from vllm.v1.worker.utils import allocate_kv_cache  # noqa: PLC0415

    from rose.engines.vllm.kv_arena import ArenaAllocation  # noqa: PLC0415

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    page = spec.page_size_bytes
    size = 8 * 2 * page
    cache = KVCacheTensor(size=size, layers=["a", "b"], layer_stride=8 * page, block_stride=page)
    config = KVCacheConfig(8, [cache], [KVCacheGroupSpec(["a", "b"], spec)])
    layout = KvLayout.of(config)
    assert layout is not None
    assert (layout.size_bytes, layout.block_bytes) == (size, 2 * page)
    arena = HostArena(size)
    allocation = ArenaAllocation(torch.frombuffer(arena.memory, dtype=torch.int8, count=size))
    with allocation:
        assert torch.zeros(4, dtype=torch.int8).data_ptr() != arena.address
        views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)
        assert torch.zeros(size, dtype=torch.int8).data_ptr() != arena.address  # only the first
    assert allocation.answered
    starts = sorted(view.data_ptr() - arena.address for view in views.values())
    assert starts == [0, 8 * page]
    views["b"][3].fill_(1)
    touched = np.flatnonzero(np.frombuffer(arena.memory, np.uint8))
    assert touched.min() >= layout.base[1] + 3 * layout.stride[1]
    assert touched.max() < layout.base[1] + 4 * layout.stride[1]
