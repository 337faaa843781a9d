"""What a worker of a ROSE engine adds to vLLM's: its place on the host, and calls about weights.

The methods named `rose_*` are called through `collective_rpc` and answer plain dicts.
"""

from __future__ import annotations

import os
from typing import Any

from rose.engines.live import LiveWeights
from rose.engines.vllm.plugin import bind_process
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.weights import RoseWeightTransferEngine
from rose.errors import RoseError


class RoseWorkerMixin:
    """Goes before a vLLM worker class among the bases."""

    weight_transfer_engine: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._bind()  # before any pool of threads exists
        super().__init__(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load as vLLM does, then bind once more: loading may have made threads of its own."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self._bind()

    @staticmethod
    def _bind() -> None:
        settings = PluginSettings.from_environ()
        if settings is not None:
            bind_process(settings.worker_cores, idle_priority=settings.worker_idle_priority)

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

    def rose_discard_weights(self) -> dict[str, Any]:
        """Forget what is staged."""
        return self._live_weights.discard()

    def rose_weight_digests(self) -> dict[str, Any]:
        """Digests of all live parameters, by checkpoint name, computed now."""
        return self._live_weights.digests()
