"""Delays on purpose, on real engines: to see whether blame for late requests can be believed.

A device that does not switch away from a step is what ROSE is for, and a CPU core is none.  So while rollout
is to hold the device, both workers are stopped in the middle of a rollout step; while serving is to hold up
itself, its worker alone is.  Whether a rollout step was in flight is read from the engine's board, not from
the step log by which the blame goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence

from rose_daemon.bench.runs import Injection

PAUSE_S = (1.5, 3.0)
"""Between two injections: what one delayed is done by then."""
HOLD_S = (0.4, 0.8)
"""Above the TTFT budget, below the age at which a board counts as stale."""
_POLL_S = 0.001


class Injector:
    """Stops workers now and then; a seed gives the same plan."""

    def __init__(
        self,
        seed: int,
        serving: Sequence[int],
        rollout: Sequence[int],
        serving_steps: Callable[[], bool],
        rollout_steps: Callable[[], bool],
    ) -> None:
        """Pids of the workers, and whether each engine has a step in flight now."""
        self.injections: list[Injection] = []
        self._rng = random.Random(seed)
        self._serving = serving
        self._rollout = rollout
        self._serving_steps = serving_steps
        self._rollout_steps = rollout_steps

    async def run(self) -> None:
        """Inject until cancelled; leaves every worker running."""
        while True:
            await asyncio.sleep(self._rng.uniform(*PAUSE_S))
            by_rollout = self._rng.random() < 0.5
            hold_s = self._rng.uniform(*HOLD_S)
            works = self._rollout_steps if by_rollout else self._serving_steps
            while not works():  # noqa: ASYNC110 - a word in shared memory, which no event tells of
                await asyncio.sleep(_POLL_S)
            await self._hold(by_rollout, hold_s)

    async def _hold(self, by_rollout: bool, hold_s: float) -> None:
        pids = (*self._serving, *self._rollout) if by_rollout else self._serving
        start_ns = time.monotonic_ns()
        try:
            _signal(pids, signal.SIGSTOP)
            await asyncio.sleep(_POLL_S)
            by_rollout = by_rollout and self._rollout_steps()  # the step that was seen may just have ended
            await asyncio.sleep(hold_s)
        finally:
            _signal(pids, signal.SIGCONT)
        self.injections.append(Injection(by_rollout, start_ns, time.monotonic_ns()))


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the stack notices by itself
            os.kill(pid, number)
