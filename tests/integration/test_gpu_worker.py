"""The GPU worker's KV cache, over a driver that is not there and plain memory of the host."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import GRANULE, CUresult, FakeCuda
from rose_kernels.arena.cuda import CudaArena
from vllm.v1.worker.gpu_worker import Worker

from rose.engines.vllm import gpu_worker
from rose.engines.vllm.gpu_worker import RoseGPUWorker
from rose.engines.vllm.kv_arena import ArenaAllocation

pytestmark = pytest.mark.engine

SIZE = 3 * GRANULE - 1000


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    cuda = FakeCuda()
    monkeypatch.setattr(
        gpu_worker, "CudaArena", lambda size_bytes, device: CudaArena(size_bytes, device=device, driver=cuda)
    )
    monkeypatch.setattr(
        gpu_worker, "tensor_over", lambda arena, size, device: torch.empty(size, dtype=torch.int8)
    )
    yield cuda
    assert cuda.contexts == []


def worker(*, cumem: bool = False) -> Any:
    """A worker without an engine: all that its allocation looks at."""
    bare: Any = object.__new__(RoseGPUWorker)
    bare.device = torch.device("cuda:0")
    bare.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_cumem_allocator=cumem))
    return bare


def test_the_cache_lies_in_an_arena_with_memory_behind_all_of_it(cuda: FakeCuda) -> None:
    arena, tensor = worker()._rose_new_arena(SIZE)
    assert (tensor.numel(), tensor.dtype) == (SIZE, torch.int8)
    assert arena.resident_bytes() == cuda.used_bytes == 3 * GRANULE
    assert cuda.zeroed == cuda.accessible  # as the zeros that vLLM asked for
    arena.close()
    cuda.require_nothing_left()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_memory_of_sleep_mode_is_left_to_vllm(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture, *, enabled: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        made = worker(cumem=enabled)._rose_new_arena(SIZE)
    assert (made is None) == enabled
    assert ("sleep mode" in caplog.text) == enabled


@pytest.mark.parametrize("cuda_of", [{"virtual_memory": False}, {"memory_bytes": 2 * GRANULE}])
def test_where_there_is_no_arena_vllm_allocates_itself_and_the_log_says_so(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture, cuda_of: dict[str, Any]
) -> None:
    for name, value in cuda_of.items():
        setattr(cuda, name, value)
    with caplog.at_level(logging.WARNING):
        assert worker()._rose_new_arena(SIZE) is None
    assert "KV memory is not elastic" in caplog.text
    if "memory_bytes" in cuda_of:
        cuda.require_nothing_left()


def test_a_driver_that_fails_is_no_reason_to_serve_nobody(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.fails = lambda number, function: (
        CUresult.CUDA_ERROR_UNKNOWN if function == "cuMemAddressReserve" else 0
    )
    with caplog.at_level(logging.WARNING):
        assert worker()._rose_new_arena(SIZE) is None
    assert "CUDA_ERROR_UNKNOWN" in caplog.text
    cuda.require_nothing_left()


def test_vllm_gets_the_arena_for_its_kv_cache_and_for_nothing_else(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = worker()
    _, tensor = bare._rose_new_arena(SIZE)
    bare._rose_allocation = ArenaAllocation(tensor)
    plain = nullcontext()
    monkeypatch.setattr(Worker, "_maybe_get_memory_pool_context", lambda self, tag: plain)
    assert bare._maybe_get_memory_pool_context("weights") is plain
    with bare._maybe_get_memory_pool_context("kv_cache"):
        cache = torch.zeros(SIZE, dtype=torch.int8, device="cpu")
        other = torch.zeros(SIZE, dtype=torch.int8, device="cpu")
    assert cache.data_ptr() == tensor.data_ptr() != other.data_ptr()
