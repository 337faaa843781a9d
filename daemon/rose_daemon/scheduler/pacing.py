"""How often streams are read while the gateway is short of processor time.

A read of one token costs about as much as one of five.  Idle, each token is read as it comes; busy, a stream
that has begun is left alone for some milliseconds after each read, and what has come meanwhile is read,
parsed and sent on together, as network cards moderate their interrupts.  First tokens are never held back,
and as processor time is freed by it, they come sooner.
"""

from __future__ import annotations

import asyncio
import collections
import math
import time
from typing import Protocol

_SAMPLE_S = 0.1
_BUSY, _CALM = 0.65, 0.45
"""Shares of one core above which reads move apart, and below which they move together again."""
_LEAST_S = 0.01
_TICK_S = 0.004
_CATCH_UP = 1.25
_WIDER, _NARROWER = 1.5, 0.7


class Spacing:
    """The time between reads of one stream, from what the process has computed.  Times are in seconds."""

    def __init__(self, most_s: float, now_s: float, cpu_s: float) -> None:
        self._most_s = most_s
        self._sampled_s, self._cpu_s = now_s, cpu_s
        self.value_s = 0.0
        """0: each read at once."""

    def due(self, now_s: float) -> bool:
        """Whether it is time for another sample."""
        return now_s - self._sampled_s >= _SAMPLE_S

    def sample(self, now_s: float, cpu_s: float) -> None:
        """The process has used `cpu_s` of processor time since it started."""
        share = (cpu_s - self._cpu_s) / (now_s - self._sampled_s)
        self._sampled_s, self._cpu_s = now_s, cpu_s
        if share > _BUSY:
            self.value_s = min(max(self.value_s * _WIDER, _LEAST_S), self._most_s)
        elif share < _CALM:
            value_s = self.value_s * _NARROWER
            self.value_s = value_s if value_s >= _LEAST_S else 0.0


class Stream(Protocol):
    """What can be left unread for a while."""

    def pause(self) -> None:
        """Read no more."""
        ...

    def resume(self) -> None:
        """Read again; a stream that has been closed meanwhile does nothing."""
        ...


class Pacer:
    """Spaces out the reads of all streams of this process, `most_s` apart at most; 0 never does."""

    def __init__(self, most_s: float) -> None:
        self._spacing = Spacing(most_s, time.monotonic(), time.process_time())
        self._resting: collections.deque[tuple[float, Stream]] = collections.deque()
        self._ticking = False

    def has_read(self, stream: Stream) -> None:
        """A stream that goes on was read just now."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if self._spacing.due(now_s):
            self._spacing.sample(now_s, time.process_time())
        if not self._spacing.value_s:
            return
        stream.pause()
        self._resting.append((now_s + self._spacing.value_s, stream))
        if not self._ticking:
            self._ticking = True
            loop.call_later(_TICK_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read those whose time has come, but not many more than come evenly.

        After a pause many are due at once; were they read at once, they would be due together ever after, and
        what else there is to do would wait for all of them each time.
        """
        now_s, resting = loop.time(), self._resting
        evenly = len(resting) * _TICK_S / max(self._spacing.value_s, _LEAST_S)
        for _ in range(math.ceil(evenly * _CATCH_UP)):
            if not resting or resting[0][0] > now_s:
                break
            resting.popleft()[1].resume()
        self._ticking = bool(resting)
        if resting:
            loop.call_later(_TICK_S, self._tick, loop)
