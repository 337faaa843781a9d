"""Several downloads at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rose.units import JobId, WeightVersion
from rose.weights.relay import Relay

PARALLEL = 4
"""Downloads at a time, unless a caller says otherwise."""


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """Bytes of a bucket from `offset` on, and the memory that they go to."""

    bucket: str
    destination: memoryview
    offset: int = 0


async def fetch_ranges(
    relay: Relay,
    job: JobId,
    version: WeightVersion,
    ranges: Sequence[Range],
    *,
    epoch: str | None = None,
    parallel: int = PARALLEL,
) -> None:
    """Fill all the destinations from one version.  Raises as `Relay.get_into` does, when all have ended."""
    await run_some(
        parallel,
        (
            relay.get_into(job, version, each.bucket, each.destination, offset=each.offset, epoch=epoch)
            for each in ranges
        ),
    )


async def run_some(parallel: int, calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await all the calls, so many at a time.  The first error ends the others, and is raised after them."""
    waiting = iter(calls)

    async def run() -> None:
        for call in waiting:
            await call

    await run_all(run() for _ in range(parallel))


async def run_all(calls: Iterable[Awaitable[None]]) -> None:
    """Await all the calls at once.  The first error ends the others, and is raised after them."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
