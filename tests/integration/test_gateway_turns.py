"""Turns through the gateway: plain ones, and those that engines let go of in the middle."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from dialect_asks import ASK_SGLANG, ASK_VLLM, GENERATE
from gateway_world import MESSAGES, MODEL, World, expected, world
from rose_daemon import mock_model
from waiting import until

from rose.core.cluster_settings import ClusterSettings

PROMPT = mock_model.chat_prompt(MESSAGES)
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}
LONG = {"max_tokens": 60, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


async def chat(world: World, **more: Any) -> Any:
    return await world.openai.chat.completions.create(model=MODEL, messages=MESSAGES, **(LONG | more))  # type: ignore[call-overload]


async def streamed(world: World, **more: Any) -> tuple[str, list[int], Any]:
    """(text, token ids, last chunk) of a streamed chat."""
    text, tokens, chunk = "", [], None
    async for chunk in await chat(world, stream=True, **more):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            tokens += choice.token_ids
    return text, tokens, chunk


async def test_plain_chat(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        answer = await chat(made, extra_headers={"x-rose-turn-id": "t1", "x-rose-trajectory": "walk"})
        tokens, text = expected(PROMPT, 60)
        assert answer.choices[0].message.content == text
        assert answer.choices[0].token_ids == tokens
        assert answer.choices[0].finish_reason == "length"
        assert answer.prompt_token_ids == PROMPT
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 60)
        assert answer.rose["turn_id"] == "t1"
        assert answer.rose["trajectory"] == "walk"
        assert answer.rose["weight_versions"] == [[0, 59, 0]]
        (attempt,) = answer.rose["attempts"]
        assert (attempt["tokens"], attempt["end"]) == (60, "finished")


async def test_token_ids_only_when_asked(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        status, answer = await made.post("/v1/chat/completions", CHAT | {"max_tokens": 3})
        assert status == 200
        assert "token_ids" not in answer["choices"][0]
        assert "prompt_token_ids" not in answer


async def test_streamed_chat(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        text, tokens, last = await streamed(made, stream_options={"include_usage": True})
        assert (tokens, text) == expected(PROMPT, 60)
        assert last.usage.completion_tokens == 60
        assert last.rose["weight_versions"] == [[0, 59, 0]]


@pytest.mark.parametrize("prompt", ["Once upon a time", mock_model.encode("Once upon a time")])
async def test_completion(tmp_path: Path, prompt: Any) -> None:
    async with world(tmp_path) as made:
        answer = await made.openai.completions.create(
            model=MODEL, prompt=prompt, logprobs=1, max_tokens=20, extra_body={"ignore_eos": True}
        )
        _, text = expected(mock_model.encode("Once upon a time"), 20)
        assert answer.choices[0].text == text
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert len(logprobs.tokens) == len(logprobs.token_logprobs or ()) == 20
        assert logprobs.text_offset is not None
        assert logprobs.text_offset[1] == len(logprobs.tokens[0])


async def test_models(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        assert [model.id async for model in made.openai.models.list()] == [MODEL]


@pytest.mark.parametrize("cut_after", [1, 7, 31])
async def test_cut_turn_goes_on_elsewhere_with_the_same_tokens(tmp_path: Path, cut_after: int) -> None:
    async with world(tmp_path) as made:
        task = asyncio.create_task(chat(made, logprobs=True, top_logprobs=1))
        first = await made.running_turn(cut_after)
        first.state.abort("rose:kv_budget_cut")
        answer = await task
        choice = answer.choices[0]
        assert (choice.token_ids, choice.message.content) == expected(PROMPT, 60)
        assert choice.finish_reason == "length"
        assert answer.usage.completion_tokens == 60
        assert answer.usage.prompt_tokens == len(PROMPT)
        attempts = answer.rose["attempts"]
        assert [attempt["end"] for attempt in attempts] == ["rose:kv_budget_cut", "finished"]
        assert attempts[0]["replica"] != attempts[1]["replica"]
        assert sum(attempt["tokens"] for attempt in attempts) == 60
        counts = await made.turns()
        assert (counts["finished"], counts["interrupted"], counts["rerouted"]) == (1, 1, 1)
        # The continuation was asked for by tokens, and only for the rest.
        resumed = next(body for e in made.engines for body in e.state.served if "prompt" in body)
        assert resumed["prompt"] == PROMPT + choice.token_ids[: attempts[0]["tokens"]]
        assert resumed["max_tokens"] == attempts[1]["tokens"]
        # Log probabilities of both attempts have one shape.
        content = choice.logprobs.content
        assert len(content) == 60
        assert all(len(entry.top_logprobs) == 1 and entry.bytes for entry in content)


async def test_logprobs_do_not_show_the_seam(tmp_path: Path) -> None:
    async with world(tmp_path, token_ms=1) as made:
        whole = await chat(made, logprobs=True, top_logprobs=2)
        task = asyncio.create_task(chat(made, logprobs=True, top_logprobs=2))
        (await made.running_turn(20)).state.abort("rose:kv_budget_cut")
        assert (await task).choices[0].logprobs == whole.choices[0].logprobs


@pytest.mark.parametrize("seed", range(4))
async def test_cut_streams_show_no_seam(tmp_path: Path, seed: int) -> None:
    """Several cuts at any place, inside of characters too."""
    rng = random.Random(seed)
    async with world(tmp_path, engines=3, token_ms=1) as made:
        task = asyncio.create_task(streamed(made))
        for _ in range(3):
            engine = await made.running_turn(rng.randint(1, 12))
            engine.state.abort("rose:kv_budget_cut")
            await until(lambda: any(engine.state.requests for engine in made.engines))
        text, tokens, last = await task
        assert (tokens, text) == expected(PROMPT, 60)
        assert len(last.rose["attempts"]) == 4


async def test_special_tokens_stay_hidden_across_the_seam(tmp_path: Path) -> None:
    """With ignore_eos an end token may stand in the middle; /detokenize would show it."""

    def early_end(number: int) -> bool:
        prompt = mock_model.chat_prompt([{"role": "user", "content": f"case {number}"}])
        return mock_model.EOS in expected(prompt, 10)[0]

    number = next(filter(early_end, range(1000)))
    messages = [{"role": "user", "content": f"case {number}"}]
    async with world(tmp_path) as made:
        body = {"model": MODEL, "messages": messages, "max_tokens": 30, "ignore_eos": True}
        task = asyncio.create_task(made.post("/v1/chat/completions", body))
        (await made.running_turn(15)).state.abort("rose:kv_budget_cut")
        _, answer = await task
        assert answer["choices"][0]["message"]["content"] == expected(mock_model.chat_prompt(messages), 30)[1]


async def test_a_resumed_turn_that_ends_by_itself(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        messages: list[dict[str, str]] = []
        for number in range(200):
            messages = [{"role": "user", "content": f"end {number}"}]
            tokens, text = expected(mock_model.chat_prompt(messages), 100, ignore_eos=False)
            if 20 < len(tokens) < 90:
                break
        body = {"model": MODEL, "messages": messages, "max_tokens": 100, "return_token_ids": True}
        task = asyncio.create_task(made.post("/v1/chat/completions", body))
        (await made.running_turn(10)).state.abort("rose:kv_budget_cut")
        _, answer = await task
        choice = answer["choices"][0]
        assert (choice["token_ids"], choice["message"]["content"]) == (tokens, text)
        assert choice["finish_reason"] == "stop"


async def test_without_a_limit_the_context_is_the_limit(tmp_path: Path) -> None:
    async with world(tmp_path, token_ms=0.2) as made:
        for engine in made.engines:
            engine.state.context_tokens_max = 200
        await made.node.beat_now()
        body = CHAT | {"ignore_eos": True, "return_token_ids": True}
        task = asyncio.create_task(made.post("/v1/chat/completions", body))
        (await made.running_turn(20)).state.abort("rose:kv_budget_cut")
        _, answer = await task
        assert answer["choices"][0]["token_ids"] == expected(PROMPT, 200 - len(PROMPT))[0]


async def test_versions_are_recorded_by_token(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        body = {"job": "job-0", "model": MODEL, "n_rl": 2}
        await made.http.delete(f"{made.url}/rose/v1/jobs/job-0")
        await made.post("/rose/v1/jobs", body | {"staleness_max": 1})
        await made.post("/rose/v1/jobs/job-0/versions", {"version": 1})
        await made.ready()
        task = asyncio.create_task(chat(made))
        first = await made.running_turn(10)
        (other,) = [engine for engine in made.engines if engine is not first]
        other.state.version = 1
        await until(lambda: made.scheduler.driver.machine.replica(other.state.name).weight_version == 1)  # type: ignore[union-attr,arg-type]
        first.state.abort("rose:kv_budget_cut")
        answer = await task
        (low, end, old), (begin, high, new) = answer.rose["weight_versions"]
        assert (low, high, old, new) == (0, 59, 0, 1)
        assert begin == end + 1
        kept = expected(PROMPT, begin)[0]
        assert answer.choices[0].token_ids == kept + expected(PROMPT + kept, 60 - begin, version=1)[0]


async def test_a_trajectory_that_grew_too_old_is_told_so_in_each_dialect(tmp_path: Path) -> None:
    """In a stream and out of it: what runs is aborted, what comes is refused, and it is counted."""
    async with world(tmp_path, engines=1, job=False, token_ms=20) as made:
        spec = {"job": "job-0", "model": MODEL, "n_rl": 1, "staleness_max": 1, "trajectory_staleness_max": 0}
        await made.post("/rose/v1/jobs", spec)
        await made.ready()
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}

        async def whole() -> tuple[int, str]:
            status, answer = await made.post("/v1/completions", body, x_rose_trajectory="old")
            return status, answer["error"]["code"]

        async def streamed() -> str:
            async with made.http.post(
                f"{made.url}/v1/completions",
                json=body | {"stream": True},
                headers={"x-rose-trajectory": "old"},
            ) as answer:
                assert answer.status == 200
                return (await answer.text()).strip().rpartition("data: ")[2]

        running = [asyncio.create_task(whole()), asyncio.create_task(streamed())]
        (engine,) = made.engines
        await until(lambda: len(engine.state.requests) == 2 and engine.state.tokens > 20)
        await made.post("/rose/v1/jobs/job-0/steps", {"rl_step": 1, "required_version": 1})
        assert await running[0] == (409, "trajectory_stale")
        error = msgspec.json.decode(await running[1])["error"]
        assert error["code"] == "trajectory_stale"
        assert "began on version 0; the job is at 1" in error["message"]
        await until(lambda: not engine.state.requests)
        for path, ask in (
            ("/v1/completions", body),
            (GENERATE, ASK_VLLM),
            ("/generate", ASK_SGLANG | {"sampling_params": {"max_new_tokens": 1}}),
        ):
            data = msgspec.json.encode(ask)
            async with made.http.post(
                made.url + path, data=data, headers={"x-rose-trajectory": "old"}
            ) as answer:
                assert (answer.status, answer.headers["x-rose-error"]) == (409, "trajectory_stale")
                assert "Retry-After" not in answer.headers
        _, job = await made.get("/rose/v1/jobs/job-0")
        assert job["trajectories_stale"] == 1
        async with made.http.get(f"{made.url}/metrics") as metrics:
            assert 'rose_job_trajectories_stale{job="job-0"} 1.0' in await metrics.text()


async def test_a_stalled_engine_loses_its_turn(tmp_path: Path) -> None:
    async with world(tmp_path, turn_stall_timeout_s=2) as made:
        task = asyncio.create_task(chat(made))
        engine = await made.running_turn()
        engine.state.stalled = True
        async with asyncio.timeout(60):
            answer = await task
        assert answer.choices[0].token_ids == expected(PROMPT, 60)[0]
        assert answer.rose["attempts"][0]["end"] == "turn_stalled"
        await until(lambda: not engine.state.requests)


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_an_engine_that_fails_is_passed_by(tmp_path: Path, status: int) -> None:
    async with world(tmp_path) as made:
        for engine in made.engines:
            engine.state.fail_status, engine.state.fail_count = status, 1
        answer = await chat(made)
        assert answer.choices[0].token_ids == expected(PROMPT, 60)[0]
        ends = [attempt["end"] for attempt in answer.rose["attempts"]]
        assert ends == [f"engine_status_{status}"] * 2 + ["finished"]


async def test_an_engine_that_only_fails_is_left_out_until_it_works_again(tmp_path: Path) -> None:
    """It is always the least loaded one: without this it would draw every turn first."""
    async with world(tmp_path, token_ms=1) as made:
        broken = made.engines[0].state
        broken.fail_status, broken.fail_count = 500, 1000
        left_out = None
        for number in range(20):
            # Not one trajectory, which would stay away from a replica that failed it.
            answer = await chat(made, extra_headers={"x-rose-trajectory": f"walk-{number}"})
            assert answer.choices[0].finish_reason == "length"
            if broken.fail_count == 997 and left_out is None:
                _, status = await made.get("/rose/v1/status")
                left_out = not {each["replica"]: each["eligible"] for each in status["replicas"]}[broken.name]
        assert left_out
        assert 3 <= 1000 - broken.fail_count <= 6
        broken.fail_count = 0
        await made.ready()
        await asyncio.gather(*(chat(made) for _ in range(8)))
        assert broken.tokens > 0


async def test_turns_wait_while_every_engine_fails(tmp_path: Path) -> None:
    """Tries that cannot work must not use up the attempts of turns."""
    async with world(tmp_path, token_ms=1) as made:
        for engine in made.engines:
            engine.state.fail_status, engine.state.fail_count = 503, 4
        answers = await asyncio.gather(*(chat(made) for _ in range(12)))
        assert all(answer.choices[0].token_ids == expected(PROMPT, 60)[0] for answer in answers)
        assert (await made.turns())["failed"] == 0


async def test_an_engine_that_vanishes_is_passed_by(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        task = asyncio.create_task(chat(made))
        await (await made.running_turn()).stop()
        answer = await task
        assert answer.choices[0].token_ids == expected(PROMPT, 60)[0]


@pytest.mark.parametrize("more", [{"stop": ["never"]}, {"length_penalty": 0.5}, {"min_tokens": 5}])
async def test_what_cannot_straddle_a_cut_starts_again(tmp_path: Path, more: dict[str, Any]) -> None:
    async with world(tmp_path) as made:
        body = CHAT | {"max_tokens": 60, "ignore_eos": True, "return_token_ids": True} | more
        task = asyncio.create_task(made.post("/v1/chat/completions", body))
        (await made.running_turn()).state.abort("rose:kv_budget_cut")
        _, answer = await task
        assert answer["choices"][0]["token_ids"] == expected(PROMPT, 60)[0]
        assert answer["rose"]["weight_versions"] == [[0, 59, 0]]
        assert (await made.turns())["restarted"] == 1


async def test_a_turn_that_always_starts_again_is_given_up(tmp_path: Path) -> None:
    """Tokens that are thrown away are no progress: such a turn must not go round for ever."""
    async with world(tmp_path, token_ms=5) as made:
        made.scheduler.driver.machine._dispatcher._settings = ClusterSettings(
            attempts_max=3, backoff_ns=1_000_000
        )
        body = CHAT | {"max_tokens": 60, "ignore_eos": True, "stop": ["never"]}
        task = asyncio.create_task(made.post("/v1/chat/completions", body))
        for _ in range(3):
            engine = await made.running_turn()
            engine.state.abort("rose:kv_budget_cut")
            await until(lambda: not engine.state.requests)  # noqa: B023 - awaited in this very round
        async with asyncio.timeout(60):
            status, answer = await task
        assert (status, answer["error"]["code"]) == (503, "attempts_exhausted")
        assert (await made.turns())["interrupted"] == 3


async def test_a_stream_that_cannot_go_on_says_so(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        body = CHAT | {"max_tokens": 60, "ignore_eos": True, "stop": ["never"], "stream": True}
        async with made.http.post(f"{made.url}/v1/chat/completions", json=body) as response:
            await response.content.readany()
            made.busy().state.abort("rose:kv_budget_cut")
            rest = (await response.read()).decode()
        assert '"code":"stream_cut"' in rest
        assert "[DONE]" not in rest
        counts = await made.turns()
        assert (counts["failed"], counts["in_flight"]) == (1, 0)


async def test_disconnect_stops_the_engine(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        for stream in (False, True):
            body = CHAT | {"max_tokens": 1000, "ignore_eos": True, "stream": stream}
            task = asyncio.create_task(made.post("/v1/chat/completions", body))
            await made.running_turn()
            task.cancel()
            await until(lambda: not any(engine.state.requests for engine in made.engines))
        counts = await made.turns()
        assert (counts["cancelled"], counts["in_flight"], counts["queued"]) == (2, 0, 0)


async def test_disconnect_while_queued(tmp_path: Path) -> None:
    async with world(tmp_path, job=False) as made:
        await made.post("/rose/v1/jobs", {"job": "other", "model": "not-here"})
        task = asyncio.create_task(made.post("/v1/completions", {"prompt": "x"}))

        async def queued(number: int) -> bool:
            return (await made.turns())["queued"] == number

        await until(lambda: queued(1))
        task.cancel()
        await until(lambda: queued(0))
        assert (await made.turns())["cancelled"] == 1


async def test_a_resend_of_a_finished_turn_is_replayed(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        body = CHAT | {"max_tokens": 20, "temperature": 1.0}
        first = await made.post("/v1/chat/completions", body, x_rose_turn_id="t1")
        again = await made.post("/v1/chat/completions", body, idempotency_key="t1")
        assert again == first
        async with made.http.post(
            f"{made.url}/v1/chat/completions", json=body | {"stream": True}, headers={"x-rose-turn-id": "t1"}
        ) as response:
            text = (await response.read()).decode()
        assert text.endswith("data: [DONE]\n\n")
        assert sum(len(engine.state.served) for engine in made.engines) == 1
        counts = await made.turns()
        assert (counts["arrived"], counts["replayed"]) == (1, 2)
        status, other = await made.post(
            "/v1/chat/completions", body | {"max_tokens": 21}, x_rose_turn_id="t1"
        )
        assert (status, other["error"]["code"]) == (409, "turn_id_reused")


async def test_equal_requests_without_an_id_are_two_turns(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        body = CHAT | {"max_tokens": 5}
        (_, one), (_, two) = [await made.post("/v1/chat/completions", body) for _ in range(2)]
        assert one["rose"]["turn_id"] != two["rose"]["turn_id"]
        assert (await made.turns())["arrived"] == 2


async def test_a_resend_of_a_turn_in_flight_shares_it(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        body = CHAT | {"max_tokens": 60, "ignore_eos": True}
        headers = {"x_rose_turn_id": "t1"}
        first = asyncio.create_task(made.post("/v1/chat/completions", body, **headers))
        await made.running_turn()
        second = asyncio.create_task(made.post("/v1/chat/completions", body, **headers))

        async def joined() -> bool:
            return (await made.turns())["joined"] == 1

        await until(joined)
        # The first client going away does not take the answer from the second one.
        first.cancel()
        status, answer = await second
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == expected(PROMPT, 60)[1]
        counts = await made.turns()
        assert (counts["arrived"], counts["finished"], counts["cancelled"]) == (1, 1, 0)


@pytest.mark.parametrize("seed", range(3))
async def test_chaos_loses_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    """Cuts, failures, stalls and impatient clients at random: every turn has the right tokens, once."""
    rng = random.Random(seed)
    async with world(tmp_path, engines=3, token_ms=4, turn_stall_timeout_s=2) as made:
        done = 0

        async def client(number: int) -> None:
            nonlocal done
            messages = [{"role": "user", "content": f"turn {number}"}]
            body = {"model": MODEL, "messages": messages, "max_tokens": 40, "ignore_eos": True}
            body |= {"return_token_ids": True, "stream": False}
            headers = {"x_rose_turn_id": f"turn-{number}"}
            while True:
                patience_s = rng.choice([0.02, 5.0, 5.0])
                try:
                    async with asyncio.timeout(patience_s):
                        status, answer = await made.post("/v1/chat/completions", body, **headers)
                except (TimeoutError, aiohttp.ClientError):
                    continue
                assert status == 200, answer
                tokens, text = expected(mock_model.chat_prompt(messages), 40)
                assert answer["choices"][0]["token_ids"] == tokens
                assert answer["choices"][0]["message"]["content"] == text
                done += 1
                return

        async def mischief() -> None:
            while True:
                await asyncio.sleep(rng.uniform(0.01, 0.05))
                state = rng.choice(made.engines).state
                match rng.randrange(3):
                    case 0:
                        state.abort("rose:kv_budget_cut")
                    case 1:
                        state.fail_status, state.fail_count = 500, 2
                    case 2:
                        state.stalled = True
                        await asyncio.sleep(0.05)
                        state.stalled = False

        trouble = asyncio.create_task(mischief())
        try:
            async with asyncio.timeout(240):
                await asyncio.gather(*(client(number) for number in range(24)))
        finally:
            trouble.cancel()
        assert done == 24
        await until(lambda: not any(engine.state.requests for engine in made.engines))
        counts = await made.turns()
        assert (counts["in_flight"], counts["queued"], counts["failed"]) == (0, 0, 0)
        assert counts["interrupted"] > 0
