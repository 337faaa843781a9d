"""When the garbage collector runs in a process that streams.

Turns leave no cycles behind, so that reference counts free nearly all; yet Python's collector looks through
what turns in flight hold again and again, and holds up all streams meanwhile, for 20 to 60 ms a second under
load.  Here it looks when nothing is in flight, and else seldom.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

IDLE_S = 5.0
"""Least time between two collections while nothing is in flight."""
BUSY_S = 60.0
"""And while something is, unless they take long."""
_SHARE = 0.002
"""Most of the time that collections may take of a busy process."""
_FEW = 2_000
"""New objects that are not worth a collection."""
_LOOK_S = 1.0


def due(idle: bool, since_s: float, took_s: float, objects: int) -> bool:
    """Whether to collect: `since_s` after the last time, which took `took_s`, with so many new objects."""
    if objects < _FEW:
        return False
    return since_s >= (IDLE_S if idle else max(BUSY_S, took_s / _SHARE))


async def collect_seldom(idle: Callable[[], bool]) -> None:
    """Instead of Python's own timing, until cancelled.  What is there by now is taken to stay for good."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        last_s, took_s = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(_LOOK_S)
            now_s = time.monotonic()
            if due(idle(), now_s - last_s, took_s, gc.get_count()[0]):
                gc.collect()
                last_s = time.monotonic()
                took_s = last_s - now_s
    finally:
        gc.enable()
