"""What a worker of a ROSE engine adds to vLLM's: its place on the host, and calls about weights.

The methods named `rose_*` are called through `collective_rpc` and answer plain dicts.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from rose_kernels.arena.base import Arena

from rose.engines.live import LiveWeights
from rose.engines.vllm.kv_arena import ArenaAllocation, KvHolder
from rose.engines.vllm.kv_layout import KvLayout
from rose.engines.vllm.plugin import bind_process, cores_of_rank
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.slack_board import RankShape
from rose.engines.vllm.weights import RoseWeightTransferEngine
from rose.errors import RoseError

log = logging.getLogger(__name__)


class RoseWorkerMixin:
    """Goes before a vLLM worker class among the bases."""

    weight_transfer_engine: Any
    vllm_config: Any
    _rose_allocation: ArenaAllocation | None = None
    _rose_kv: KvHolder | None = None
    _rose_rank = 0
    _rose_ranks = 1

    def __init__(self, vllm_config: Any, local_rank: int, *args: Any, **kwargs: Any) -> None:
        self._rose_ranks = vllm_config.parallel_config.tensor_parallel_size
        self._rose_rank = local_rank % self._rose_ranks
        self._bind()  # before any pool of threads exists
        super().__init__(vllm_config, local_rank, *args, **kwargs)  # type: ignore[call-arg]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load as vLLM does, then bind once more: loading may have made threads of its own."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self._bind()

    def _bind(self) -> None:
        settings = PluginSettings.from_environ()
        if settings is not None:
            cores = cores_of_rank(settings.worker_cores, self._rose_rank, self._rose_ranks)
            bind_process(cores, idle_priority=settings.worker_idle_priority)

    # ---- KV memory --------------------------------------------------------------------------------

    def _rose_new_arena(self, size_bytes: int) -> tuple[Arena, torch.Tensor] | None:
        """An arena for the KV cache, and int8 over it; None where there is none for the device."""
        return None

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """As vLLM; the KV cache of a rollout engine, or of one that shares memory, lies in an arena."""
        settings = PluginSettings.from_environ()
        layout = KvLayout.of(kv_cache_config)
        if settings is not None and (settings.role == "rollout" or settings.kv_shared_bytes):
            made = self._rose_new_arena(layout.size_bytes) if layout else None
        else:
            made = None
        if made is not None:
            self._rose_allocation = ArenaAllocation(made[1])
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        if made is None or settings is None or layout is None:
            return
        if self._rose_allocation is None or not self._rose_allocation.answered:
            log.warning("KV memory is not elastic: vLLM did not allocate its cache as expected")
            return
        engine = RankShape.of(self.vllm_config).board_name(settings.name)
        self._rose_kv = KvHolder(made[0], layout, settings.boards, engine, self._rose_rank)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "kv_cache" and self._rose_allocation is not None:
            return self._rose_allocation
        context: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)  # type: ignore[misc]
        return context

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM, once there is memory behind every block that the step may use."""
        if self._rose_kv is not None:
            self._rose_kv.before_step()
        return super().execute_model(*args, **kwargs)  # type: ignore[misc]

    def rose_process(self) -> dict[str, Any]:
        """Who this worker is, and where the kernel lets it run."""
        return {
            "pid": os.getpid(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "policy": "idle" if os.sched_getscheduler(0) == os.SCHED_IDLE else "other",
        }

    @property
    def _live_weights(self) -> LiveWeights:
        engine = self.weight_transfer_engine
        if not isinstance(engine, RoseWeightTransferEngine):
            raise RoseError(
                "this engine was started without the weight backend `rose`",
                """add --weight-transfer-config '{"backend":"rose"}'""",
            )
        return engine.live

    def rose_stage_weights(self, path: str, version: int, base_version: int) -> dict[str, Any]:
        """Begin to read and verify a version in the background, while generation goes on."""
        return self._live_weights.stage_in_background(path, version, base_version)

    def rose_stage_state(self) -> dict[str, Any]:
        """How the staging goes."""
        return self._live_weights.stage_state()

    def rose_apply_weights(self, version: int) -> dict[str, Any]:
        """Write the staged version over the live parameters.  Generation must be paused."""
        return self._live_weights.apply_staged(version)

    def rose_undo_weights(self) -> dict[str, Any]:
        """Take the latest write back, if it is not settled.  Generation must be paused."""
        return self._live_weights.undo_applied()

    def rose_discard_weights(self) -> dict[str, Any]:
        """Forget what is staged, and the way back from what was written."""
        return self._live_weights.discard()

    def rose_weight_digests(self) -> dict[str, Any]:
        """Digests of all live parameters, by checkpoint name, computed now."""
        return self._live_weights.digests()
