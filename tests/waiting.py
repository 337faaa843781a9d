"""How tests wait: for the very thing they assert, with a bound that a starved machine keeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

PATIENCE_S = 60.0
"""For what takes milliseconds: only a test that fails waits as long."""


async def until(condition: Callable[[], object | Awaitable[object]], within_s: float = PATIENCE_S) -> None:
    """Wait until `condition` holds; fail the test if it does not in time."""
    due_s = time.monotonic() + within_s
    while True:
        result = condition()
        if await result if isinstance(result, Awaitable) else result:
            return
        assert time.monotonic() < due_s, f"{condition} did not come true"
        await asyncio.sleep(0.005)
