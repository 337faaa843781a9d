"""The worker of a ROSE engine on CPUs (`--worker-cls`)."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from rose.engines.vllm.worker import RoseWorkerMixin


class RoseCPUWorker(RoseWorkerMixin, CPUWorker):
    """vLLM's CPU worker, bound to its cores, with live weights."""

    def init_device(self) -> Any:
        """As vLLM, after asking the kernel for the AMX tiles where the CPU has them.

        vLLM's attention uses them without asking.  Usually oneDNN has asked by then, but not if the first
        prompt is of a few tokens: that worker dies of an illegal instruction (vLLM 0.32.0).
        """
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        return super().init_device()
