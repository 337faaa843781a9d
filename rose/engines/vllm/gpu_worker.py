"""The worker of a ROSE engine on a GPU (`--worker-cls`)."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from rose.engines.vllm.worker import RoseWorkerMixin


class RoseGPUWorker(RoseWorkerMixin, Worker):
    """vLLM's GPU worker with live weights."""
