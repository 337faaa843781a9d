"""Virtual time: a seeded, deterministic event loop.

Instants and durations are whole picoseconds, so that many steps of an engine can be summed in closed form
and give exactly what stepping through them one by one gives.  Policy machines are told nanoseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np

PS_PER_NS = 1_000
PS_PER_US = 1_000_000
PS_PER_MS = 1_000_000_000
PS_PER_S = 1_000_000_000_000

Call = Callable[[int, Any], None]
"""Told the time, and what it was asked for with."""
_Entry = tuple[int, int, Call, Any]


def ps(seconds: float) -> int:
    """Seconds to picoseconds, rounded to the nearest one."""
    return round(seconds * PS_PER_S)


def seconds(time_ps: int) -> float:
    """Picoseconds to seconds."""
    return time_ps / PS_PER_S


class Loop:
    """Runs callbacks in order of time; those of one instant in the order they were asked for."""

    def __init__(self) -> None:
        self.now_ps = 0
        self.events = 0
        """Callbacks run so far."""
        self._heap: list[_Entry] = []
        self._asked = 0
        self._stopped = False

    @property
    def now_ns(self) -> int:
        """The time as the policy machines know it."""
        return self.now_ps // PS_PER_NS

    def at(self, time_ps: int, call: Call, argument: Any = None) -> None:
        """Have `call(time_ps, argument)` run at an instant that is not past."""
        assert time_ps >= self.now_ps, f"{time_ps} lies before {self.now_ps}"
        self._asked += 1
        heapq.heappush(self._heap, (time_ps, self._asked, call, argument))

    def after(self, delay_ps: int, call: Call, argument: Any = None) -> None:
        """Have `call` run `delay_ps` from now."""
        self.at(self.now_ps + delay_ps, call, argument)

    def stop(self) -> None:
        """End `run` after the present callback."""
        self._stopped = True

    def run(self, until_ps: int | None = None) -> None:
        """Run until nothing is left, `stop` is called, or the next callback lies after `until_ps`."""
        heap = self._heap
        pop = heapq.heappop
        self._stopped = False
        while heap and not self._stopped:
            entry = pop(heap)
            time_ps, _, call, argument = entry
            if until_ps is not None and time_ps > until_ps:
                heapq.heappush(heap, entry)
                self.now_ps = until_ps
                return
            self.now_ps = time_ps
            self.events += 1
            call(time_ps, argument)


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Random numbers of their own for each purpose: adding one purpose leaves the others as they were."""
    words = [seed]
    for name in names:
        words.extend(str(name).encode())
        words.append(256)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))
