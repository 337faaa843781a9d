"""Several prompts in one request of `/v1/completions`: turns of their own, answered as one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_world import MODEL, World, expected, world
from rose_daemon import mock_model
from waiting import until

TEXTS = ["Which way to the goal?", "And from there?", "Back again?"]
PROMPTS = [mock_model.encode(text) for text in TEXTS]
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}


async def quiet(made: World) -> None:
    async def nothing() -> bool:
        turns = await made.turns()
        return turns["in_flight"] == turns["queued"] == 0

    await until(nothing)


async def chunks(made: World, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    """All events of a stream but its end, which has to be there."""
    async with made.http.post(
        f"{made.url}/v1/completions", json=body | {"stream": True}, headers=headers
    ) as answer:
        assert answer.status == 200, await answer.text()
        lines = [line for line in (await answer.text()).split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def put_together(found: list[dict[str, Any]]) -> dict[int, tuple[list[int], str, str | None]]:
    """(token ids, text, finish reason) of each choice."""
    shown: dict[int, tuple[list[int], str, str | None]] = {}
    for chunk in found:
        for choice in chunk["choices"]:
            tokens, text, reason = shown.get(choice["index"], ([], "", None))
            reason = choice["finish_reason"] or reason
            shown[choice["index"]] = (tokens + choice["token_ids"], text + choice["text"], reason)
    return shown


@pytest.mark.parametrize("prompts", [TEXTS, PROMPTS])
async def test_each_prompt_is_answered_in_its_place(tmp_path: Path, prompts: list[Any]) -> None:
    async with world(tmp_path) as made:
        status, answer = await made.post("/v1/completions", BODY | {"prompt": prompts, "n": 2})
        assert status == 200, answer
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        for number, prompt in enumerate(prompts):
            _, alone = await made.post("/v1/completions", BODY | {"prompt": prompt, "n": 2})
            for choice in alone["choices"]:
                assert answer["choices"][2 * number + choice["index"]] == choice | {
                    "index": 2 * number + choice["index"]
                }
                assert choice["prompt_token_ids"] == PROMPTS[number]
        total = sum(map(len, PROMPTS))
        assert answer["usage"]["completion_tokens"] == 6 * 30
        assert answer["usage"]["prompt_tokens"] == total
        assert answer["usage"]["total_tokens"] == total + 6 * 30
        assert len(answer["rose"]["turns"]) == 3
        assert (await made.turns())["finished"] == 6
        with_usage = BODY | {"prompt": prompts, "n": 2, "stream_options": {"include_usage": True}}
        found = await chunks(made, with_usage)
        assert {chunk["id"] for chunk in found} == {found[0]["id"]}
        assert put_together(found) == {
            index: (choice["token_ids"], choice["text"], "length")
            for index, choice in enumerate(answer["choices"])
        }
        assert [chunk["usage"] for chunk in found if chunk.get("usage")] == [answer["usage"]]
        assert [chunk for chunk in found if "rose" in chunk] == [found[-1]]
        assert len(found[-1]["rose"]["turns"]) == 3
        found = await chunks(made, BODY | {"prompt": prompts, "n": 2})
        assert [chunk for chunk in found if "rose" in chunk] == [found[-1]]
        assert found[-1]["choices"]
        assert len(found[-1]["rose"]["turns"]) == 3


async def test_the_openai_client_streams_several_prompts(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        stream = await made.openai.completions.create(
            model=MODEL, prompt=TEXTS, max_tokens=20, stream=True, extra_body={"ignore_eos": True}
        )
        texts = dict.fromkeys(range(3), "")
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == {index: expected(prompt, 20)[1] for index, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_moves_each_turn_with_its_tokens(tmp_path: Path, stream: bool) -> None:
    """What was one turn began again from all prompts."""
    async with world(tmp_path, engines=3) as made:
        body = BODY | {"prompt": PROMPTS, "max_tokens": 200}

        async def ask() -> dict[int, tuple[list[int], str, str | None]]:
            if stream:
                return put_together(await chunks(made, body))
            status, answer = await made.post("/v1/completions", body)
            assert status == 200, answer
            return put_together([answer])

        asking = asyncio.create_task(ask())
        await until(lambda: sum(engine.state.tokens for engine in made.engines) > 60)
        cut = sum(engine.state.abort("rose:kv_budget_cut") for engine in made.engines)
        assert cut == 3
        found = await asking
        assert found == {index: (*expected(prompt, 200), "length") for index, prompt in enumerate(PROMPTS)}
        counts = await made.turns()
        assert (counts["interrupted"], counts["restarted"], counts["finished"]) == (3, 0, 3)


async def test_a_batch_that_is_sent_again_runs_once(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        body = BODY | {"prompt": PROMPTS}
        _, first = await made.post("/v1/completions", body, x_rose_turn_id="b")
        status, again = await made.post("/v1/completions", body, x_rose_turn_id="b")
        assert (status, again["choices"]) == (200, first["choices"])
        streamed = put_together(await chunks(made, body, **{"x-rose-turn-id": "b"}))
        assert streamed == put_together([first])
        counts = await made.turns()
        assert (counts["finished"], counts["replayed"]) == (3, 6)
        status, answer = await made.post(
            "/v1/completions", BODY | {"prompt": PROMPTS[::-1]}, x_rose_turn_id="b"
        )
        assert (status, answer["error"]["code"]) == (409, "turn_id_reused")


@pytest.mark.parametrize("stream", [False, True])
async def test_one_prompt_that_is_refused_ends_all(tmp_path: Path, stream: bool) -> None:
    async with world(tmp_path, engines=1, token_ms=20) as made:
        (engine,) = made.engines
        engine.state.fail_status, engine.state.fail_count = 422, 1
        body = BODY | {"prompt": PROMPTS, "max_tokens": 500, "stream": stream}
        async with made.http.post(f"{made.url}/v1/completions", json=body) as answer:
            text = await answer.text()
        assert answer.status == 422 or (stream and '"error"' in text and "[DONE]" not in text)
        await quiet(made)
        counts = await made.turns()
        assert (counts["failed"], counts["cancelled"]) == (1, 2)
        await until(lambda: not engine.state.requests)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_all(tmp_path: Path, stream: bool) -> None:
    async with world(tmp_path, engines=2, token_ms=20) as made:
        body = BODY | {"prompt": PROMPTS, "max_tokens": 1000, "stream": stream}

        async def ask() -> None:
            async with made.http.post(f"{made.url}/v1/completions", json=body) as answer:
                await answer.read()

        asking = asyncio.create_task(ask())
        await until(lambda: sum(len(engine.state.requests) for engine in made.engines) == 3)
        asking.cancel()
        await quiet(made)
        assert (await made.turns())["cancelled"] == 3
        await until(lambda: not any(engine.state.requests for engine in made.engines))


async def test_a_batch_with_a_prompt_that_is_none_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        for prompts in (["a", ""], [[1], []], ["a", [1]], [[1], ["b"]], [1, "a"]):
            status, answer = await made.post("/v1/completions", BODY | {"prompt": prompts})
            assert (status, answer["error"]["param"]) == (400, "prompt"), prompts
        assert (await made.turns())["arrived"] == 0
