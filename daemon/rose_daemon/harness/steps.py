"""The step logs of the engines on this host, collected while they run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from rose.core.attribution import Span
from rose.core.readings import StepRecord
from rose.rings import RingReader

PERIOD_S = 0.2
"""A ring holds 512 steps: a second and more of the smallest."""


class StepCollector:
    """The one reader of an engine's ring of steps: keeps what was logged, and where something is missing."""

    def __init__(self, path: Path) -> None:
        self.steps: list[StepRecord] = []
        self.gaps: list[Span] = []
        """Stretches of which not every step is known."""
        self._ring = RingReader(path, StepRecord)
        self._lost = 0
        self._known_ns = 0

    def collect(self) -> None:
        """Fetch what came since the last call."""
        fetched = self._ring.fetch()
        lost = self._ring.dropped + self._ring.torn
        if lost != self._lost:
            # What was dropped came after the last record known before, and ended by now.
            self._lost = lost
            self.gaps.append(Span(self._known_ns, time.monotonic_ns()))
        if fetched:
            self.steps += fetched
            self._known_ns = fetched[-1].end_ns

    def forget(self) -> None:
        """Begin anew; what lies in the ring is thrown away."""
        self.collect()
        self.steps, self.gaps = [], []

    def within(self, start_ns: int, end_ns: int) -> list[StepRecord]:
        """The steps that had the device at some time in between."""
        return [step for step in self.steps if step.end_ns > start_ns and step.start_ns < end_ns]

    async def run(self) -> None:
        """Collect until cancelled."""
        while True:
            self.collect()
            await asyncio.sleep(PERIOD_S)
