"""The reward pool: every call is answered once, by whatever endpoint is well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rose.errors import ConfigError, NotReady
from rose.rewards import RewardLoad, RewardPool

Handler = Callable[[dict[str, Any]], Awaitable[web.Response]]


@asynccontextmanager
async def endpoint(handle: Handler) -> AsyncIterator[str]:
    async def receive(request: web.Request) -> web.Response:
        return await handle(await request.json())

    app = web.Application()
    app.add_routes([web.post("/score", receive)])
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/score"
    finally:
        await runner.cleanup()


async def double(call: dict[str, Any]) -> web.Response:
    return web.json_response({"reward": 2 * call["x"]})


def always(status: int, text: str = "") -> Handler:
    async def handle(_: dict[str, Any]) -> web.Response:
        return web.Response(status=status, text=text)

    return handle


async def test_each_call_gets_its_own_answer_and_limits_hold() -> None:
    running = most = 0

    async def slow(call: dict[str, Any]) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return await double(call)

    loads: list[RewardLoad] = []
    async with (
        endpoint(slow) as url,
        RewardPool([url], calls_per_endpoint_max=4, on_load=loads.append) as pool,
    ):
        answers = await asyncio.gather(*(pool.score({"x": x}) for x in range(40)))
        assert [answer["reward"] for answer in answers] == [2 * x for x in range(40)]
        assert most == 4
        assert max(load.waiting for load in loads) == 36
        assert pool.load == RewardLoad(0, 0, 4)


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_call_that_fails_goes_to_another_endpoint(status: int) -> None:
    async with (
        endpoint(always(status)) as bad,
        endpoint(double) as good,
        RewardPool([bad, good], pause_s=0) as pool,
    ):
        answers = await asyncio.gather(*(pool.score({"x": x}) for x in range(20)))
        assert [answer["reward"] for answer in answers] == [2 * x for x in range(20)]


async def test_dead_and_silent_endpoints_cost_time_only() -> None:
    async def silent(_: dict[str, Any]) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError

    async with endpoint(double) as gone:
        pass
    async with (
        endpoint(silent) as hung,
        endpoint(double) as good,
        RewardPool([gone, hung, good], timeout_s=1, pause_s=0) as pool,
    ):
        assert (await pool.score({"x": 4}))["reward"] == 8
    async with RewardPool([gone], attempts_max=2, pause_s=0) as pool:
        with pytest.raises(NotReady, match="2 attempts"):
            await pool.score({"x": 4})
        assert pool.load.in_flight == 0


@pytest.mark.parametrize(("status", "text"), [(422, "no x"), (200, "not json"), (200, "[1]")])
async def test_a_refusal_is_not_sent_again(status: int, text: str) -> None:
    calls = 0

    async def refuse(_: dict[str, Any]) -> web.Response:
        nonlocal calls
        calls += 1
        return web.Response(status=status, text=text)

    async with endpoint(refuse) as url, RewardPool([url], pause_s=0) as pool:
        with pytest.raises(ConfigError):
            await pool.score({})
        assert calls == 1


async def test_a_full_queue_refuses_and_new_endpoints_empty_it() -> None:
    gate, full = asyncio.Event(), asyncio.Event()

    def watch(load: RewardLoad) -> None:
        if load.waiting == 2:
            full.set()

    async def held(call: dict[str, Any]) -> web.Response:
        await gate.wait()
        return await double(call)

    async with (
        endpoint(held) as busy,
        endpoint(double) as fresh,
        RewardPool([busy], calls_per_endpoint_max=1, queue_max=2, on_load=watch) as pool,
    ):
        calls = [asyncio.create_task(pool.score({"x": x})) for x in range(3)]
        await full.wait()
        with pytest.raises(NotReady, match="2 rewards wait"):
            await pool.score({"x": 9})
        await pool.set_endpoints([busy, fresh])
        assert [(await calls[x])["reward"] for x in (1, 2)] == [2, 4]
        gate.set()
        assert (await calls[0])["reward"] == 0


async def test_callers_that_give_up_leave_their_places_to_others() -> None:
    async def slow(call: dict[str, Any]) -> web.Response:
        await asyncio.sleep(0.01)
        return await double(call)

    async with endpoint(slow) as url, RewardPool([url], calls_per_endpoint_max=1) as pool:
        calls = [asyncio.create_task(pool.score({"x": x})) for x in range(12)]
        await asyncio.sleep(0.015)
        for call in calls[::2]:
            call.cancel()
        async with asyncio.timeout(5):
            answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [answer["reward"] for answer in answers[1::2] if isinstance(answer, dict)] == [
            2 * x for x in range(1, 12, 2)
        ]
        assert pool.load == RewardLoad(0, 0, 1)


@pytest.mark.parametrize("urls", [[], ["scorer:9000"]])
async def test_what_is_no_address_is_refused(urls: list[str]) -> None:
    with pytest.raises(ConfigError):
        RewardPool(urls)
