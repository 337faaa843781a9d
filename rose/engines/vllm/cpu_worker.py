"""The worker of a ROSE engine on CPUs (`--worker-cls`)."""

from __future__ import annotations

from typing import Any

import torch
from rose_kernels.arena.base import Arena
from rose_kernels.arena.host import HostArena
from vllm.v1.worker.cpu_worker import CPUWorker

from rose.engines.vllm.worker import RoseWorkerMixin


class RoseCPUWorker(RoseWorkerMixin, CPUWorker):
    """vLLM's CPU worker, bound to its cores, with live weights and a KV cache that can shrink."""

    def init_device(self) -> Any:
        """As vLLM, after asking the kernel for the AMX tiles where the CPU has them.

        vLLM's attention uses them without asking.  Usually oneDNN has asked by then, but not if the first
        prompt is of a few tokens: that worker dies of an illegal instruction (vLLM 0.32.0).
        """
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        return super().init_device()

    def _rose_new_arena(self, size_bytes: int) -> tuple[Arena, torch.Tensor] | None:
        arena = HostArena(size_bytes)
        return arena, torch.frombuffer(arena.memory, dtype=torch.int8, count=size_bytes)
