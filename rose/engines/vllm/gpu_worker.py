"""The worker of a ROSE engine on a GPU (`--worker-cls`)."""

from __future__ import annotations

import logging
from typing import Any

import torch
from rose_kernels.arena.base import Arena, ArenaError, pages_for
from rose_kernels.arena.cuda import CudaArena
from vllm.v1.worker.gpu_worker import Worker

from rose.engines.vllm.worker import RoseWorkerMixin

log = logging.getLogger(__name__)


def tensor_over(arena: CudaArena, size_bytes: int, device: torch.device) -> torch.Tensor:
    """int8, the first `size_bytes` of an arena, without a copy.  Its first page must have memory."""
    tensor: torch.Tensor = torch.as_tensor(arena, device=device).view(torch.int8)[:size_bytes]
    return tensor


class RoseGPUWorker(RoseWorkerMixin, Worker):
    """vLLM's GPU worker, with live weights and a KV cache that can shrink."""

    device: Any

    def _rose_new_arena(self, size_bytes: int) -> tuple[Arena, torch.Tensor] | None:
        """None, said in the log, where the driver maps no pages or vLLM's own sleep mode holds the memory."""
        if getattr(self.vllm_config.model_config, "enable_cumem_allocator", False):
            log.warning("KV memory is not elastic: vLLM's sleep mode (cumem allocator) keeps it")
            return None
        try:
            arena = CudaArena(size_bytes, device=self.device.index or 0)
        except ArenaError as error:
            log.warning("KV memory is not elastic on this GPU: %s", error)
            return None
        try:
            arena.ensure(0, pages_for(size_bytes, arena.page_bytes))
            return arena, tensor_over(arena, size_bytes, self.device)
        except ArenaError as error:
            arena.close()
            log.warning("KV memory is not elastic: no memory for the cache (%s); vLLM tries itself", error)
            return None
