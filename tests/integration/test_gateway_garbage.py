"""What turns leave behind is freed without the garbage collector, whichever way they end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from dialect_asks import PROMPT
from gateway_world import MODEL, world
from rose_daemon.scheduler.engine_http import EngineConnection
from rose_daemon.scheduler.turns import Attempt, Turn
from waiting import until

KINDS = (Turn, Attempt, EngineConnection)


def alive() -> int:
    return sum(isinstance(each, KINDS) for each in gc.get_objects())


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_turns_are_freed_at_their_end(tmp_path: Path) -> None:
    async with world(tmp_path, engines=2) as made:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}

        async def finish(stream: bool) -> None:
            async with made.http.post(f"{made.url}/v1/completions", json=body | {"stream": stream}) as answer:
                assert answer.status == 200
                await answer.read()

        async def leave(stream: bool) -> None:
            asking = made.http.post(
                f"{made.url}/v1/completions", json=body | {"stream": stream, "max_tokens": 4000}
            )
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3), asking as answer:
                    await answer.read()

        async def refused() -> None:
            status, _ = await made.post("/v1/completions", body)
            assert status == 422

        async def end_all() -> None:
            for stream in (False, True):
                await asyncio.gather(
                    *(finish(stream) for _ in range(10)), *(leave(stream) for _ in range(10))
                )
            for engine in made.engines:
                engine.state.fail_status, engine.state.fail_count = 422, 10
            await asyncio.gather(*(refused() for _ in range(10)))

            async def quiet() -> bool:
                turns = await made.turns()
                return turns["in_flight"] == 0 and turns["queued"] == 0

            await until(quiet)

        await end_all()
        made.scheduler.upstream._engines.close()
        await until(lambda: alive() == 0)
