"""A worker whose writes fail when a test says so: `--worker-cls faulty_worker.FaultyWorker`.

The file that ROSE_TEST_FAULT names says what: `apply` on rank 1, or `undo` on rank 0 as well.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rose.engines.vllm.cpu_worker import RoseCPUWorker


class FaultyWorker(RoseCPUWorker):
    """The worker of a CPU engine, with faults on order."""

    def _asked_for(self) -> str:
        path = Path(os.environ["ROSE_TEST_FAULT"])
        return path.read_text() if path.exists() else ""

    def rose_apply_weights(self, version: int) -> dict[str, Any]:
        """Rank 1 cannot write."""
        if self._rose_rank == 1 and self._asked_for():
            return {
                "error": "apply_failed",
                "detail": "as ordered",
                "version_held": self._live_weights.version,
            }
        return super().rose_apply_weights(version)

    def rose_undo_weights(self) -> dict[str, Any]:
        """Rank 0 cannot take back what it wrote."""
        if self._rose_rank == 0 and self._asked_for() == "undo":
            return {"error": "weights_mixed", "detail": "as ordered"}
        return super().rose_undo_weights()
