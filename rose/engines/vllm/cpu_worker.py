"""The worker of a ROSE engine on CPUs (`--worker-cls`)."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from rose.engines.vllm.worker import RoseWorkerMixin


class RoseCPUWorker(RoseWorkerMixin, CPUWorker):
    """vLLM's CPU worker, bound to its cores, with live weights."""
