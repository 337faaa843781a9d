"""The bell of a rollout engine's gate, rung so that its core loop looks up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from rose.boards import WatchedBoard
from rose.core.readings import GatePolicy
from rose.engines.vllm.settings import PluginSettings

_RING_S = (0.002, 0.05)
"""Shortest and longest pause between rings while a call waits for its answer."""


class GateBell:
    """The bell on this rollout engine's own gate board, which ends the wait of a closed gate."""

    def __init__(self, settings: PluginSettings) -> None:
        self._board = WatchedBoard(settings.boards.gate(settings.name), GatePolicy)

    def ring(self) -> None:
        """Ring it, if the board is there."""
        self._board.read(time.monotonic_ns(), None)
        if self._board.bell is not None:
            self._board.bell.ring()

    @contextlib.asynccontextmanager
    async def ringing(self) -> AsyncIterator[None]:
        """Ring again and again, so that a call made meanwhile is served at once; less and less often.

        A ring may come before the call has reached the core loop, and end the wait in vain.
        """

        async def keep_ringing() -> None:
            pause_s = _RING_S[0]
            while True:
                self.ring()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RING_S[1])

        task = asyncio.create_task(keep_ringing())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
