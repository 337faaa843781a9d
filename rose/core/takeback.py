"""How long it takes to have lent memory back, measured by drills, and what that leaves to lend (ours).

A drill takes a few KV blocks of a replica away at a random time, waits until its engine says that their
memory is given back, and lets it have them again.  While memory is on its way back serving may go on
growing: by as much as it was seen to grow in a second, for as long as the slowest drill took.  So much is
kept free, if the headroom is less.
"""

from __future__ import annotations

from collections import deque
from math import ceil, log
from typing import NamedTuple

import msgspec

from rose.core.switchback import Rng
from rose.units import NS_PER_S

DRILLS_KEPT = 256
GROWTH_KEPT_NS = 3600 * NS_PER_S
"""How long a burst of serving's memory is remembered."""
_GROWTH_BINS = 60


class DrillSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`period_ns` 0: no drills."""

    period_ns: int = 600 * NS_PER_S
    """Mean time between drills; the first comes no sooner than this after a start."""
    share_max: float = 0.05
    """Most of a replica's KV blocks that a drill takes."""

    def __post_init__(self) -> None:
        if self.period_ns < 0 or not 0 < self.share_max <= 1:
            raise ValueError(f"period_ns must not be negative, share_max must lie in (0, 1]: {self}")


class TakenBack(NamedTuple):
    """One drill."""

    blocks: int
    duration_ns: int


class TakeBack:
    """Draws the drills, keeps what they measured, and bounds what may be lent."""

    def __init__(self, settings: DrillSettings, rng: Rng) -> None:
        self._settings = settings
        self._rng = rng
        self._due_ns: int | None = None
        self._drills: deque[TakenBack] = deque(maxlen=DRILLS_KEPT)
        self._serving: tuple[int, int] | None = None
        self._growth: deque[tuple[int, float]] = deque()
        """(bin, most bytes a second), one entry a bin."""

    def reconfigure(self, settings: DrillSettings) -> None:
        """Follow other settings; the time of the next drill is drawn anew if they differ."""
        if settings != self._settings:
            self._settings, self._due_ns = settings, None

    def due(self, now_ns: int) -> bool:
        """Whether a drill is due; each answer of True draws the time of the next."""
        period_ns = self._settings.period_ns
        if not period_ns:
            return False
        if self._due_ns is None:
            self._due_ns = now_ns + period_ns + self._pause_ns()
        if now_ns < self._due_ns:
            return False
        self._due_ns = now_ns + self._pause_ns()
        return True

    def _pause_ns(self) -> int:
        """Exponential, so that nothing can be in step with the drills."""
        return round(-log(1.0 - self._rng.random()) * self._settings.period_ns)

    def blocks(self, held_blocks: int) -> int:
        """How many of the blocks that a replica may use to take in a drill; 0 if it has too few."""
        most = min(int(self._settings.share_max * held_blocks), held_blocks - 1)
        return 1 + self._rng.randrange(most) if most > 0 else 0

    def measured(self, blocks: int, duration_ns: int) -> None:
        """A drill is over."""
        self._drills.append(TakenBack(blocks, duration_ns))

    def serving_unseen(self) -> None:
        """The serving engine is gone, or loads: what it holds then is no sign of what it will."""
        self._serving = None

    def serving_holds(self, serving_bytes: int, now_ns: int) -> None:
        """Memory of the serving engine, read about once a second."""
        if self._serving is not None:
            since_ns, before = self._serving
            if now_ns - since_ns < NS_PER_S // 2:
                return
            self._grew(max(0.0, (serving_bytes - before) * NS_PER_S / (now_ns - since_ns)), now_ns)
        self._serving = now_ns, serving_bytes

    def _grew(self, bytes_per_s: float, now_ns: int) -> None:
        number = now_ns * _GROWTH_BINS // GROWTH_KEPT_NS
        while self._growth and self._growth[0][0] <= number - _GROWTH_BINS:
            self._growth.popleft()
        if self._growth and self._growth[-1][0] == number:
            self._growth[-1] = number, max(bytes_per_s, self._growth[-1][1])
        else:
            self._growth.append((number, bytes_per_s))

    @property
    def drills(self) -> int:
        """How many of the latest are known."""
        return len(self._drills)

    def quantile_ns(self, share: float) -> int | None:
        """Time to have a drill's memory back, of the latest ones; None before the first.

        The upper order statistic: with fewer than 100 drills p99 is the slowest.
        """
        if not self._drills:
            return None
        durations = sorted(drill.duration_ns for drill in self._drills)
        return durations[min(len(durations), ceil(share * (len(durations) + 1))) - 1]

    @property
    def growth_bytes_per_s(self) -> float:
        """The most that serving's memory grew in a second, of the last hour."""
        return max((rate for _, rate in self._growth), default=0.0)

    @property
    def reserve_bytes(self) -> int:
        """What to keep free for serving to grow into while memory comes back; 0 before the first drill."""
        return ceil(self.growth_bytes_per_s * (self.quantile_ns(0.99) or 0) / NS_PER_S)
