"""Faults that users of other routers have met: load, names, dead engines behind a live health probe, time."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientConnectionResetError, ClientError, web
from dialect_asks import ASK_SGLANG, ASK_VLLM, GENERATE, PROMPT
from gateway_world import MESSAGES, MODEL, World, expected, world
from waiting import until

ENDPOINTS: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, 480),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}, 80),
    (GENERATE, ASK_VLLM | {"sampling_params": {"max_tokens": 1}}, 80),
    ("/generate", ASK_SGLANG | {"sampling_params": {"max_new_tokens": 1}}, 80),
]


async def test_requests_that_begin_alike_spread_over_all_engines(tmp_path: Path) -> None:
    """Many at once, without a trajectory: what they share must not send them all to one engine."""
    async with world(tmp_path, engines=8, job=False, token_ms=300) as made:
        spec = {"job": "many", "model": MODEL, "n_rl": 8, "trajectories_per_replica_max": 200}
        await made.post("/rose/v1/jobs", spec)
        await made.ready()
        for path, body, number in ENDPOINTS:
            before = [len(engine.state.served) for engine in made.engines]
            answers = await asyncio.gather(*(made.post(path, body) for _ in range(number)))
            assert {status for status, _ in answers} == {200}
            served = [
                len(engine.state.served) - old for engine, old in zip(made.engines, before, strict=True)
            ]
            assert sum(served) == number
            assert max(served) / (number / 8) <= 2, path


async def test_turns_of_a_trajectory_stay_together_and_names_are_whole(tmp_path: Path) -> None:
    async with world(tmp_path, engines=4, token_ms=1) as made:
        where: dict[str, Counter[str]] = {}

        async def walk(name: str) -> None:
            for _ in range(10):
                body = ASK_VLLM | {"sampling_params": {"max_tokens": 2}}
                status, answer = await made.post(GENERATE, body, X_SMG_Routing_Key=name)
                assert status == 200
                assert answer["rose"]["trajectory"] == name
                (attempt,) = answer["rose"]["attempts"]
                where.setdefault(name, Counter())[attempt["replica"]] += 1

        names = ["session-1", "session-12", "session-123", "session-2", "Session-1"]
        await asyncio.gather(*map(walk, names))
        assert {name: list(replicas.values()) for name, replicas in where.items()} == {
            name: [10] for name in names
        }
        _, status = await made.get("/rose/v1/status")
        assert status["pins"] == len(names)


async def test_turns_without_a_name_follow_their_conversation(tmp_path: Path) -> None:
    async with world(tmp_path, engines=4, token_ms=1) as made:
        replicas: dict[int, set[str]] = {}
        for number in range(4):
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"walk {number}"}]
            for _ in range(4):
                body = {"messages": messages, "max_tokens": 2}
                _, answer = await made.post("/v1/chat/completions", body)
                replicas.setdefault(number, set()).add(answer["rose"]["attempts"][0]["replica"])
                messages += [{"role": "assistant", "content": "up"}, {"role": "user", "content": "and now?"}]
        assert all(len(used) == 1 for used in replicas.values())


async def _in_rotation(world: World, name: str) -> bool:
    _, status = await world.get("/rose/v1/status")
    return bool({each["replica"]: each["eligible"] for each in status["replicas"]}[name])


async def test_an_engine_that_hangs_goes_out_of_rotation_though_its_health_is_200(tmp_path: Path) -> None:
    async with world(tmp_path, turn_stall_timeout_s=0.5) as made:
        task = asyncio.create_task(
            made.post(GENERATE, ASK_VLLM | {"sampling_params": {"max_tokens": 60, "ignore_eos": True}})
        )
        hung = await made.running_turn()
        hung.state.stalled = True
        _, answer = await task
        assert answer["choices"][0]["token_ids"] == expected(PROMPT, 60)[0]
        assert answer["rose"]["attempts"][0]["end"] == "turn_stalled"
        async with made.http.get(f"{hung.url}/health") as response:
            assert response.status == 200
        assert not await _in_rotation(made, hung.state.name)
        hung.state.stalled = False
        await made.ready()
        assert await _in_rotation(made, hung.state.name)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_generation_completes_once(
    tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only silence ends an attempt; no time limit does, and none is begun twice."""
    monkeypatch.setattr("rose_daemon.scheduler.server.BODY_TIMEOUT_S", 1.0)
    monkeypatch.setattr("rose_daemon.scheduler.process.IDLE_TIMEOUT_S", 1.0)
    monkeypatch.setattr("rose_daemon.scheduler.upstream.CONNECT_TIMEOUT_S", 1.0)
    monkeypatch.setattr("rose_daemon.scheduler.upstream.SIDE_CALL_TIMEOUT_S", 1.0)
    async with world(tmp_path, token_ms=15, turn_stall_timeout_s=2) as made:
        body = ASK_VLLM | {"sampling_params": {"max_tokens": 200, "ignore_eos": True}, "stream": stream}
        async with made.http.post(made.url + GENERATE, json=body) as response:
            data = await response.read()
        assert data.count(b'"finish_reason":"length"') == 1
        assert sum(len(engine.state.served) for engine in made.engines) == 1
        counts = await made.turns()
        assert (counts["finished"], counts["interrupted"]) == (1, 0)


async def test_nobody_works_for_a_client_that_left(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        for path, body in ((GENERATE, ASK_VLLM), ("/generate", ASK_SGLANG)):
            for stream in (False, True):
                made.engines[0].state.stalled = made.engines[1].state.stalled = True
                task = asyncio.create_task(made.post(path, body | {"stream": stream}))
                await until(lambda: any(engine.state.requests for engine in made.engines))
                task.cancel()
                await until(lambda: not any(engine.state.requests for engine in made.engines))
        counts = await made.turns()
        assert (counts["cancelled"], counts["in_flight"], counts["queued"]) == (4, 0, 0)


async def test_a_client_that_leaves_as_its_stream_begins_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither as a turn begins to be shown, nor as it is shown again."""

    prepare = web.StreamResponse.prepare

    async with world(tmp_path) as made:

        async def gone(self: web.StreamResponse, request: web.BaseRequest) -> Any:
            if made.url.endswith(request.host):  # not a mock engine
                raise ClientConnectionResetError("Cannot write to closing transport")
            return await prepare(self, request)

        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3}
        headers = {"x-rose-turn-id": "left"}
        status, _ = await made.post("/v1/completions", body, x_rose_turn_id="left")
        assert status == 200
        monkeypatch.setattr(web.StreamResponse, "prepare", gone)
        for named in (headers, {}):
            with pytest.raises(ClientError):
                async with made.http.post(
                    f"{made.url}/v1/completions", json=body | {"stream": True}, headers=named
                ) as answer:
                    await answer.read()
        monkeypatch.undo()

        async def quiet() -> bool:
            turns = await made.turns()
            return turns["in_flight"] == 0 and turns["queued"] == 0

        await until(quiet)
    assert not [record for record in caplog.records if record.name.startswith("aiohttp") and record.exc_info]
