"""Engines that share a GPU through MPS: who is on it, and what a fault of one means for the others."""

from __future__ import annotations

import re
from collections.abc import Collection

from rose.core.events import DeviceObserved

RECOVERING = "mps_recovering"
SUSPECT = "serving_suspect"
_NOT_READY_MAX = 3
"""So many starts in a row that found the server not ready are called by that name."""
_NOT_READY = re.compile(
    r"MPS server is not ready|MPS_SERVER_NOT_READY|MpsServerNotReady|error 807\b", re.IGNORECASE
)
_FAULT = re.compile(
    r"illegal (memory access|address|instruction)|ILLEGAL_(ADDRESS|INSTRUCTION)|misaligned address"
    r"|unspecified launch failure|LAUNCH_FAILED|device-side assert|MPS client (was )?terminated"
    r"|error (700|719|810)\b",
    re.IGNORECASE,
)
_ADVICE = {
    RECOVERING: "the MPS server takes no new clients before the damaged ones are gone; the replica is "
    "started again after growing pauses",
    SUSPECT: "a rollout engine died of a CUDA fault, which ends or damages every client of its MPS server: "
    "check the serving engine, and restart it; ROSE does not",
}


class MpsFaults:
    """The trouble that the ends of rollout engines tell of."""

    def __init__(self) -> None:
        self._not_ready = 0
        self._suspect = False
        self._suspected: object = None

    def exited(self, reason: str, serving: object) -> None:
        """A rollout engine ended; `serving` is the serving engine's process at that time."""
        if _NOT_READY.search(reason):
            self._not_ready += 1
        elif _FAULT.search(reason):
            self._suspect, self._suspected = True, serving

    def ready(self) -> None:
        """A rollout engine became ready: the server takes clients."""
        self._not_ready = 0

    def health(self, serving: object) -> DeviceObserved:
        """The trouble now.  A serving engine is suspect until another process takes its place."""
        if self._suspect and serving is not None:
            self._suspected = self._suspected or serving
            self._suspect = serving == self._suspected
        if self._suspect:
            return DeviceObserved(SUSPECT, advice=_ADVICE[SUSPECT])
        if self._not_ready >= _NOT_READY_MAX:
            return DeviceObserved(RECOVERING, advice=_ADVICE[RECOVERING])
        return DeviceObserved("")


def sharing(clients: Collection[int], serving_pids: Collection[int]) -> str:
    """How the GPU is shared: `mps` only if the serving engine is on our daemon too."""
    return "mps" if any(pid in clients for pid in serving_pids) else "time-slice"
