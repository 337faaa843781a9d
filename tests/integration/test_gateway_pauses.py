"""Pauses and aborts of both engines' dialects, for the whole fleet."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from dialect_asks import ASK_VLLM, GENERATE, LONG_SGLANG, LONG_VLLM, PROMPT, SAMPLING, refused
from gateway_world import MESSAGES, MODEL, expected, world
from waiting import until


async def test_vllm_pause_keep_and_resume(tmp_path: Path) -> None:
    """Turns freeze where they are, and no token is lost or made twice."""
    async with world(tmp_path) as made:
        task = asyncio.create_task(made.post(GENERATE, LONG_VLLM))
        await made.running_turn()
        assert await made.post("/pause?mode=keep", b"") == (200, {"status": "paused"})
        assert await made.get("/is_paused") == (200, {"is_paused": True})
        await until(lambda: not any(engine.state.requests for engine in made.engines))
        assert (await made.turns())["queued"] == 1
        assert await made.post("/resume", b"") == (200, {"status": "resumed"})
        _, answer = await task
        assert answer["choices"][0]["token_ids"] == expected(PROMPT, 400)[0]
        assert [attempt["end"] for attempt in answer["rose"]["attempts"]] == ["paused", "finished"]


async def test_vllm_pause_abort_answers_with_what_there_is(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        task = asyncio.create_task(made.post(GENERATE, LONG_VLLM))
        await made.running_turn()
        await made.post("/pause", b"")
        _, answer = await task
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "abort"
        count = len(choice["token_ids"])
        assert choice["token_ids"] == expected(PROMPT, count)[0]
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": count}]
        waiting = asyncio.create_task(made.post(GENERATE, ASK_VLLM))
        await until(lambda: len(made.scheduler.dispatcher.book.live) == 1)
        await made.post("/resume", b"")
        assert (await waiting)[0] == 200
        counts = await made.turns()
        assert (counts["finished"], counts["cancelled"]) == (1, 1)


async def test_vllm_pause_wait_lets_turns_end(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        task = asyncio.create_task(
            made.post(GENERATE, ASK_VLLM | {"sampling_params": SAMPLING | {"max_tokens": 40}})
        )
        await made.running_turn()
        await made.post("/pause?mode=wait", b"")
        assert (await made.turns())["in_flight"] == 0
        _, answer = await task
        assert len(answer["choices"][0]["token_ids"]) == 40
        status, error, _ = await refused(made, "/pause?mode=sideways", b"")
        assert (status, error["error"]["type"]) == (400, "BadRequestError")


async def test_a_pause_outlives_the_scheduler(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        await made.post("/pause", b"")
    async with world(tmp_path, engines=1, job=False) as made:
        await made.ready()
        assert await made.get("/is_paused") == (200, {"is_paused": True})
        task = asyncio.create_task(made.post(GENERATE, ASK_VLLM))
        await until(lambda: len(made.scheduler.dispatcher.book.live) == 1)
        assert (await made.turns())["queued"] == 1
        await made.post("/resume", b"")
        assert (await task)[0] == 200


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_sglang_pause_and_continue(tmp_path: Path, mode: str) -> None:
    async with world(tmp_path, engines=1) as made:
        task = asyncio.create_task(made.post("/generate", LONG_SGLANG))
        await made.running_turn()
        assert (await made.post("/pause_generation", {"mode": mode}))[1]["status"] == "ok"
        await until(lambda: not made.engines[0].state.requests)
        assert (await made.post("/continue_generation", {}))[1]["status"] == "ok"
        _, answer = await task
        finish = answer["meta_info"]["finish_reason"]
        assert finish["type"] == ("abort" if mode == "abort" else "length")
        count = len(answer["output_ids"])
        assert answer["output_ids"] == expected(PROMPT, count)[0]


async def test_vllm_abort_requests(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        named = asyncio.create_task(made.post(GENERATE, LONG_VLLM | {"request_id": "mine"}))
        other = asyncio.create_task(made.post(GENERATE, LONG_VLLM | {"request_id": "mine-2"}))
        await until(lambda: len(made.engines[0].state.requests) == 2)
        body = {"request_ids": ["generate-tokens-mine", "not-there"]}
        assert await made.post("/abort_requests", body) == (200, {"status": "aborted", "aborted": 1})
        assert (await named)[1]["choices"][0]["finish_reason"] == "abort"
        assert not other.done()
        assert await made.post("/inference/v1/abort_requests", {}) == (
            200,
            {"status": "aborted", "aborted": 1},
        )
        assert (await other)[1]["choices"][0]["finish_reason"] == "abort"
        await until(lambda: not made.engines[0].state.requests)
        assert (await made.post("/abort_requests", {"request_ids": "mine"}))[0] == 400


async def test_openai_turns_are_aborted_by_the_ids_in_their_answers(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        stream = await made.openai.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            stream=True,
            extra_body={"ignore_eos": True},  # type: ignore
        )
        chunks = []
        async for chunk in stream:
            if not chunks:
                await made.post("/abort_requests", {"request_ids": [chunk.id]})
            chunks.append(chunk)
        assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "abort"
        assert (await made.turns())["cancelled"] == 1


async def test_sglang_abort_request(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        task = asyncio.create_task(made.post("/generate", LONG_SGLANG | {"rid": "mine"}))
        await made.running_turn()
        async with made.http.post(f"{made.url}/abort_request", json={"rid": "mine"}) as response:
            assert (response.status, await response.text()) == (200, "")
        _, answer = await task
        golden = {"type": "abort", "message": "Aborted by its client", "status_code": None, "err_type": None}
        assert answer["meta_info"]["finish_reason"] == golden
        async with made.http.post(f"{made.url}/abort_request", json={"abort_all": True}) as response:
            assert response.status == 200
        assert (await refused(made, "/abort_request", {}))[0] == 400
