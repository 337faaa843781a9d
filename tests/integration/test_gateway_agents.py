"""What clients need that know OpenAI's or vLLM's dialect and nothing of ROSE."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from dialect_asks import events, refused
from gateway_world import MESSAGES, MODEL, expected, world
from rose_daemon import mock_model
from rose_daemon.mock_script import Reply
from waiting import until

from rose.client import Job, Scheduler
from rose.errors import TimedOut

CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
CALL = Reply(tool="run", arguments={"command": "echo 'a → b' > x"})
SESSION = "/rose/v1/jobs/job-0/sessions"


async def test_a_stream_ends_as_one_of_vllm_does(tmp_path: Path) -> None:
    """Every chunk has a choice, unless the usage was asked for; the last one has ROSE's record."""
    async with world(tmp_path, engines=1) as made:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": "Which way?", "max_tokens": 6}),
            ("/v1/completions", {"prompt": ["Which", "way?"], "n": 2, "max_tokens": 6}),
            ("/v1/chat/completions", CHAT | {"max_tokens": 1}),
        ):
            chunks = await events(made, path, body | {"stream": True, "ignore_eos": True})
            assert all(len(chunk["choices"]) == 1 for chunk in chunks)
            ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
            wanted = body.get("n", 1) * (len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)
            assert sum(end is not None for end in ends) == wanted
            assert ends[-1] == "length"
            assert [chunk for chunk in chunks if "rose" in chunk] == [chunks[-1]]
            assert not any("usage" in chunk for chunk in chunks)
            options = {"stream": True, "stream_options": {"include_usage": True}}
            *_, last = await events(made, path, body | options)
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] > 0
            for record in last["rose"].get("turns", [last["rose"]]):
                assert record["attempts"]


async def test_a_session_in_the_base_url_is_a_trajectory_that_is_kept(tmp_path: Path) -> None:
    async with world(tmp_path, engines=2) as made:
        client = openai.AsyncOpenAI(base_url=f"{made.url}{SESSION}/task-1/v1", api_key="unused")
        other = openai.AsyncOpenAI(base_url=f"{made.url}{SESSION}/task-10/v1", api_key="unused")
        model = (await client.models.list()).data[0].id
        assert (await client.models.retrieve(model)).id == model
        answers = []
        for _ in range(3):
            completion = await client.chat.completions.create(**CHAT | {"model": model})
            answers.append(completion)
        await other.chat.completions.create(**CHAT)
        async for _ in await other.completions.create(model=model, prompt="x", stream=True):
            pass
        await client.close()
        await other.close()

        def kept() -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
            job = Job(Scheduler(made.url), "job-0")
            mine, others = list(job.turns(trajectory="task-1")), list(job.turns(trajectory="task-10"))
            return mine, others, job.finish_session("task-1")

        turns, others, forgotten = await asyncio.to_thread(kept)
        assert (len(turns), len(others), forgotten) == (3, 2, 3)
        assert len({turn["turn_id"] for turn in turns}) == 3
        assert [f"chatcmpl-{turn['turn_id']}" for turn in turns] == [one.id for one in answers]
        for turn in turns:
            (choice,) = turn["choices"]
            assert choice["prompt_token_ids"] == mock_model.chat_prompt(MESSAGES)
            assert choice["token_ids"] == expected(choice["prompt_token_ids"], 6, ignore_eos=False)[0]
        assert len({turn["replica"] for turn in turns}) == 1


async def test_a_session_speaks_every_dialect_and_its_errors(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        prompt = mock_model.encode("Which way to the goal?")
        body: dict[str, Any] = {"token_ids": prompt, "sampling_params": {"max_tokens": 4}}
        status, answer = await made.post(f"{SESSION}/a%20b/inference/v1/generate", body)
        assert (status, answer["rose"]["trajectory"]) == (200, "a b")
        sglang: dict[str, Any] = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4}}
        status, answer = await made.post(f"{SESSION}/c/generate", sglang, x_rose_trajectory="not-this")
        assert (status, answer["meta_info"]["rose"]["trajectory"]) == (200, "c")
        status, error, headers = await refused(made, f"{SESSION}/c/generate", {})
        assert (status, error["error"]["code"]) == (400, 400)
        status, error, headers = await refused(made, f"{SESSION}/%C3%A9/v1/chat/completions", CHAT)
        assert (status, headers["x-rose-error"]) == (400, "bad_request")
        status, error, headers = await refused(made, f"{SESSION}/{'x' * 300}/v1/chat/completions", CHAT)
        assert (status, headers["x-rose-error"]) == (400, "bad_request")
        nowhere = "/rose/v1/jobs/nobody/sessions/c/v1/chat/completions"
        status, error, headers = await refused(made, nowhere, CHAT)
        assert (status, error["error"]["code"]) == (404, "job_unknown")


async def test_models_are_those_of_the_job_that_is_named(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        await made.post("/rose/v1/jobs", {"job": "other", "model": "org/other", "n_rl": 1})
        _, answer = await made.get("/v1/models")
        assert {card["id"] for card in answer["data"]} == {MODEL, "org/other"}
        status, answer = await made.post("/v1/chat/completions", CHAT)
        assert (status, answer["model"]) == (200, MODEL), "the model names the job, as there is one of it"
        assert (await made.post("/detokenize", {"model": MODEL, "tokens": [65]}))[1]["prompt"] == "A"
        for model in (None, "nobody's"):
            status, answer = await made.post("/v1/chat/completions", CHAT | {"model": model})
            assert (status, answer["error"]["code"]) == (400, "job_not_named")
        await made.post("/rose/v1/jobs", {"job": "third", "model": MODEL, "n_rl": 1})
        status, answer = await made.post("/v1/chat/completions", CHAT)
        assert (status, answer["error"]["code"]) == (400, "job_not_named"), "now there are two of it"
        _, answer = await made.get("/rose/v1/jobs/other/sessions/s/v1/models")
        assert [card["id"] for card in answer["data"]] == ["org/other"]
        assert (await made.get("/v1/models/org/other"))[1]["id"] == "org/other"
        status, answer = await made.get("/v1/models/org")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        status, _ = await made.get(f"/rose/v1/jobs/other/sessions/s/v1/models/{MODEL}")
        assert status == 404


async def test_a_trainer_without_steps_requires_versions(tmp_path: Path) -> None:
    async with world(tmp_path, engines=2) as made:
        job = Job(Scheduler(made.url), "job-0")
        assert len((await asyncio.to_thread(job.wait_for_replicas, 2)).replicas) == 2
        for _ in range(2):
            await asyncio.to_thread(job.require, 1)
            status = await asyncio.to_thread(job.status)
            assert (status.required_version, status.rl_step, status.rolling) == (1, 0, True)
        waiting = asyncio.create_task(asyncio.to_thread(job.wait_for_version, 1, replicas=1, timeout_s=30))
        made.engines[0].state.version = 1
        assert (await waiting).on_version(1) >= 1
        with pytest.raises(TimedOut, match="3 replicas do not take turns of job-0"):
            await asyncio.to_thread(job.wait_for_replicas, 3, timeout_s=0.01)


async def test_text_to_tokens_and_back_wherever_a_replica_answers(tmp_path: Path) -> None:
    async with world(tmp_path, engines=2) as made:
        status, answer = await made.post("/tokenize", {"prompt": "Grüße"})
        assert (status, answer["tokens"]) == (200, mock_model.encode("Grüße"))
        _, answer = await made.post("/tokenize", {"model": MODEL, "messages": MESSAGES})
        assert answer["tokens"] == mock_model.chat_prompt(MESSAGES)
        status, answer = await made.post(
            "/detokenize", {"model": MODEL, "tokens": mock_model.encode("Grüße")}
        )
        assert (status, answer["prompt"]) == (200, "Grüße")
        status, error, headers = await refused(made, "/detokenize", {"model": "other", "tokens": [1]})
        assert (status, headers["x-rose-error"]) == (404, "model_not_found")
        assert error["error"]["code"] == 404
        status, _, headers = await refused(made, "/tokenize", b"{")
        assert (status, headers["x-rose-error"]) == (400, "invalid_json")
        await made.engines[0].stop()
        for _ in range(4):
            assert (await made.post("/tokenize", {"prompt": "x"}))[0] == 200
        await made.engines[1].stop()
        status, _, headers = await refused(made, "/tokenize", {"prompt": "x"})
        assert (status, headers["x-rose-error"], headers["Retry-After"]) == (503, "no_replica", "1")


async def test_vllms_reset_of_the_prefix_cache(tmp_path: Path) -> None:
    long = "a long way to go, and the same beginning every time " * 2
    async with world(tmp_path, engines=1) as made:

        async def cached() -> int:
            body = {"prompt": long, "max_tokens": 2, "ignore_eos": True}
            _, answer = await made.post("/v1/completions", body)
            found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        assert (await cached(), await cached() > 0) == (0, True)
        assert await made.post("/reset_prefix_cache", {}) == (200, {"success": True})
        assert (await cached(), await cached() > 0) == (0, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_come_through(tmp_path: Path, stream: bool) -> None:
    async with world(tmp_path, engines=1) as made:
        made.engines[0].state.script = [CALL, Reply(content="Done.")]
        tool = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
        ask: dict[str, Any] = {**CHAT, "max_tokens": 200, "tools": [tool]}
        message: dict[str, Any]
        if stream:
            state = openai.lib.streaming.chat.ChatCompletionStreamState()
            async for chunk in await made.openai.chat.completions.create(**ask, stream=True):
                state.handle_chunk(chunk)
            completion: Any = state.get_final_completion()
        else:
            completion = await made.openai.chat.completions.create(**ask)
        (choice,) = completion.choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert (call.function.name, json.loads(call.function.arguments)) == ("run", CALL.arguments)
        message = {"role": "assistant", "content": "", "tool_calls": [call.model_dump(exclude={"index"})]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "exit code 0"}
        completion = await made.openai.chat.completions.create(
            **ask | {"messages": [*MESSAGES, message, result]}
        )
        assert completion.choices[0].message.content == "Done."


async def test_a_call_of_a_tool_that_is_cut_begins_again(tmp_path: Path) -> None:
    """Its parser has seen only half of it, so the half is thrown away; nobody was shown it."""
    async with world(tmp_path, engines=2, token_ms=4) as made:
        long = Reply(tool="run", arguments={"command": "echo " + "x" * 400})
        for engine in made.engines:
            engine.state.script = [long]
        tool = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
        asked = made.openai.chat.completions.create(**CHAT | {"max_tokens": 1000, "tools": [tool]})
        task = asyncio.create_task(asked)
        engine = await made.running_turn(tokens=8)
        engine.state.abort("rose:kv_budget_cut")
        async with asyncio.timeout(30):
            completion = await task
        (call,) = completion.choices[0].message.tool_calls or ()
        assert json.loads(call.function.arguments) == long.arguments
        await until(lambda: not any(engine.state.requests for engine in made.engines))
        assert (await made.turns())["restarted"] == 1
