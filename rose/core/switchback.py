"""Randomised rollout-off windows: serving with and without rollout, compared on one host (switchback).

Time is cut into windows of one length.  In each block of them one, drawn at random, runs without rollout: so
there are always some, and nothing about the load can tell which.  A request counts for a window if all of its
life lies in it; one that saw both sides of a switch counts for neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import msgspec

from rose.core.evidence import Difference, Tally, difference
from rose.units import NS_PER_S

Z_PROOF = 3.5
"""Quantile of the normal distribution that proves harm: it is looked at after every window, so that 95% would
be passed by chance before long."""
WINDOWS_KEPT = 4096
"""Windows that the comparison goes back to, off and on together: 34 hours of half minutes."""


class Rng(Protocol):
    """What is used of `random.Random`."""

    def randrange(self, stop: int, /) -> int:
        """A number below `stop`."""

    def random(self) -> float:
        """A number in [0, 1)."""


class SwitchbackSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`off_share` 0: every window has rollout."""

    off_share: float = 0.02
    window_ns: int = 30 * NS_PER_S

    def __post_init__(self) -> None:
        if not 0 <= self.off_share <= 0.5 or self.window_ns <= 0:
            raise ValueError(f"off_share must lie in [0, 0.5] and window_ns be above 0: {self}")

    @property
    def block_windows(self) -> int:
        """Windows of which one is off; 0: none ever is."""
        return round(1 / self.off_share) if self.off_share else 0


class Window(NamedTuple):
    """A window that is over."""

    start_ns: int
    off: bool
    requests: int
    late: int

    @property
    def tally(self) -> Tally:
        """What was counted in it."""
        return Tally(self.requests, self.late)


class Switchback:
    """Draws the windows and counts what happened in them.

    While lending is stopped for another reason, or nobody is there to lend to, there is no window: neither
    with rollout nor without.
    """

    def __init__(self, settings: SwitchbackSettings, rng: Rng, settle_ns: int) -> None:
        """`settle_ns` after its end a window's requests are all judged."""
        self._settings = settings
        self._rng = rng
        self._settle_ns = settle_ns
        self._number = -1
        """Of the window under way, since lending began or went on; -1: none is."""
        self._off_number = 0
        self._open: deque[tuple[int, bool]] = deque()
        self._counts: dict[int, list[int]] = {}
        self.closed: deque[Window] = deque(maxlen=WINDOWS_KEPT)
        self.estimate: Difference | None = None
        """How many more requests are late with rollout than without, with 95% confidence; None while one side
        has no requests."""
        self.proof: Difference | None = None
        """The same with the confidence of Z_PROOF."""

    @property
    def off(self) -> bool:
        """Whether the window under way is without rollout."""
        return self._number >= 0 and self._open[-1][1]

    def reconfigure(self, settings: SwitchbackSettings) -> None:
        """Follow other settings; if they differ, what is under way counts for nothing, and a block begins."""
        if settings != self._settings:
            self._settings, self._number = settings, -1
            self._open.clear()
            self._counts.clear()

    def advance(self, now_ns: int, *, lending: bool) -> list[Window]:
        """Time passed; answers the windows that are counted out now."""
        if not lending:
            if self._number >= 0:  # the window is cut short: it counts for nothing
                self._counts.pop(self._open.pop()[0], None)
            self._number = -1
        elif self._number < 0 or now_ns >= self._open[-1][0] + self._settings.window_ns:
            self._begin(now_ns)
        done = []
        while self._open and now_ns >= self._open[0][0] + self._settings.window_ns + self._settle_ns:
            start_ns, off = self._open.popleft()
            done.append(Window(start_ns, off, *self._counts.pop(start_ns)))
        self.closed += done
        if done:
            self._compare()
        return done

    def _begin(self, now_ns: int) -> None:
        self._number += 1
        block = self._settings.block_windows
        if block and self._number % block == 0:
            # The first window after a start has rollout: what it begins with is not measured.
            first = 1 if self._number == 0 else 0
            self._off_number = self._number + first + self._rng.randrange(block - first)
        self._open.append((now_ns, bool(block) and self._number == self._off_number))
        self._counts[now_ns] = [0, 0]

    def judged(self, arrival_ns: int, end_ns: int, *, late: bool) -> None:
        """A request lived from `arrival_ns` to `end_ns`."""
        for start_ns, _ in self._open:
            if start_ns <= arrival_ns and end_ns <= start_ns + self._settings.window_ns:
                counts = self._counts[start_ns]
                counts[0] += 1
                counts[1] += late
                return

    def restore(self, windows: Iterable[Window]) -> None:
        """Windows that a former process counted out."""
        self.closed += windows
        self._compare()

    def forget(self) -> None:
        """Begin anew."""
        self.closed.clear()
        self._compare()

    def _compare(self) -> None:
        on = [window.tally for window in self.closed if not window.off]
        off = [window.tally for window in self.closed if window.off]
        self.estimate = difference(on, off)
        self.proof = difference(on, off, z=Z_PROOF)
