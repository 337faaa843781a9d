"""Engines that ROSE does not manage: registered by URL, probed, routed to, not trusted with a version."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from dialect_asks import ASK_SGLANG, ASK_VLLM, GENERATE, PROMPT, SAMPLING, TEXT, TOKENS, events, like, refused
from gateway_world import MESSAGES, MODEL, Engine, World, expected, world
from rose_daemon import mock_model
from rose_daemon.mock_engine import MockState
from rose_daemon.scheduler import workers
from sglang_mock import SglangEngine, SglangState
from waiting import until


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PROBE_S", 0.05)


@contextlib.asynccontextmanager
async def external(*engines: Any) -> AsyncIterator[None]:
    for engine in engines:
        await engine.start()
    try:
        yield
    finally:
        for engine in engines:
            await engine.stop()


async def start_job(made: World, n_rl: int, **terms: Any) -> None:
    spec = {"job": "job-0", "model": MODEL, "n_rl": n_rl, "unknown_version_ok": True} | terms
    assert (await made.post("/rose/v1/jobs", spec))[0] == 201


async def test_workers_are_registered_as_sglangs_gateway_has_it(tmp_path: Path) -> None:
    engine = Engine(MockState())
    async with external(engine), world(tmp_path, engines=0, job=False) as made:
        status, answer = await made.post("/workers", {"url": engine.url, "worker_type": "regular"})
        name = engine.url.removeprefix("http://")
        golden = {"status": "accepted", "worker_id": name, "url": engine.url, "location": f"/workers/{name}"}
        assert (status, answer) == (202, golden)

        async def healthy() -> bool:
            _, shown = await made.get(f"/workers/{name}")
            return bool(shown["is_healthy"])

        await until(healthy)
        _, shown = await made.get("/workers")
        worker = {
            "id": name, "url": engine.url, "model_id": MODEL, "is_healthy": True, "worker_type": "regular",
            "connection_mode": "http", "runtime_type": "vllm",
            "metadata": {
                "state": "ready", "reason": "", "weight_version": None, "context_tokens_max": 2048,
                "configured": False,
            },
        }  # fmt: skip
        stats = {"prefill_count": 0, "decode_count": 0, "regular_count": 1}
        assert like(shown, {"workers": [worker], "total": 1, "stats": stats}), shown
        assert await made.get("/list_workers") == (200, {"urls": [engine.url]})
        async with made.http.delete(f"{made.url}/workers/{name}") as response:
            assert (response.status, await response.json()) == (
                202,
                {"status": "accepted", "worker_id": name},
            )
        for action in ("add", "remove"):
            async with made.http.post(f"{made.url}/{action}_worker", params={"url": engine.url}) as response:
                assert (response.status, "Successfully" in await response.text()) == (200, True)
        status, error, headers = await refused(made, "/remove_worker?url=" + engine.url, {})
        assert (status, headers["x-rose-error"]) == (404, "worker_unknown")
        assert like(error, {"error": {"message": "?", "type": "NotFoundError", "code": 404}})
        for url in (
            "",
            "https://h:1",
            "http://h",
            "http://h:1/path",
            "http://u@h:1",
            "h:1",
            "http://h:99999999",
        ):
            assert (await made.post("/workers", {"url": url}))[0] == 400, url


async def test_registered_and_configured_workers_survive_a_restart(tmp_path: Path) -> None:
    one, two = Engine(MockState()), Engine(MockState())
    async with external(one, two):
        async with world(tmp_path, engines=0, job=False, workers=(one.url,)) as made:
            await made.post("/workers", {"url": two.url})
            await start_job(made, 2)
            await made.ready(2)
            async with made.http.delete(f"{made.url}/workers/{one.url[7:]}") as response:
                assert (response.status, response.headers["x-rose-error"]) == (409, "worker_configured")
        async with world(tmp_path, engines=0, job=False, workers=(one.url,)) as made:
            await made.ready(2)
            assert (await made.post(GENERATE, ASK_VLLM))[0] == 200


async def test_an_unknown_version_is_only_for_jobs_that_allow_it(tmp_path: Path) -> None:
    engine = Engine(MockState(name="external"))
    async with external(engine), world(tmp_path, engines=1, job=False, workers=(engine.url,)) as made:
        await made.post("/rose/v1/jobs", {"job": "strict", "model": MODEL, "n_rl": 2})
        easy = {"job": "easy", "model": MODEL, "n_rl": 2, "unknown_version_ok": True}
        await made.post("/rose/v1/jobs", easy)

        async def settled() -> bool:
            _, status = await made.get("/rose/v1/status")
            jobs = {each["replica"]: each["job"] for each in status["replicas"]}
            return jobs == {"replica-0": "strict", engine.url[7:]: "easy"}

        await until(settled)
        _, answer = await made.post(GENERATE, ASK_VLLM, x_rose_job="easy")
        assert answer["choices"][0]["token_ids"] == TOKENS
        assert answer["choices"][0]["weight_versions"] == [{"version": "unknown", "start": 0, "end": 6}]
        assert answer["rose"]["weight_versions"] == [[0, 5, None]]
        wish = {"weight_version": {"min_version": 0}}
        status, _, headers = await refused(made, GENERATE, ASK_VLLM | wish, x_rose_job="easy")
        assert (status, headers["x-rose-error"]) == (409, "version_unavailable"), "unknown is no version"
        async with made.http.get(
            f"{made.url}/get_weight_version", headers={"x-rose-job": "easy"}
        ) as response:
            assert (await response.json())["weight_version"] == "unknown"


async def test_a_version_that_an_engine_tells_counts(tmp_path: Path) -> None:
    engine = SglangEngine(SglangState(weight_version="4"))
    async with external(engine), world(tmp_path, engines=0, job=False, workers=(engine.url,)) as made:
        await start_job(made, 1, unknown_version_ok=False)
        await made.post("/rose/v1/jobs/job-0/steps", {"rl_step": 1, "required_version": 4})
        await made.ready(1)
        _, answer = await made.post("/generate", ASK_SGLANG)
        assert answer["meta_info"]["weight_version"] == "4"
        await made.post("/rose/v1/jobs/job-0/steps", {"rl_step": 2, "required_version": 5})
        await made.ready(0)
        engine.state.weight_version = "5"
        await made.ready(1)


async def test_an_engine_that_goes_away_gets_no_turns_until_it_is_back(tmp_path: Path) -> None:
    one, two = SglangEngine(SglangState()), Engine(MockState())
    async with external(one, two), world(tmp_path, engines=0, job=False, workers=(one.url, two.url)) as made:
        await start_job(made, 2)
        await made.ready(2)
        one.state.healthy = False
        await made.ready(1)
        _, shown = await made.get(f"/workers/{one.url[7:]}")
        assert (shown["is_healthy"], shown["metadata"]["state"]) == (False, "unreachable")
        assert "503" in shown["metadata"]["reason"]
        one.state.healthy = True
        await made.ready(2)


@pytest.mark.parametrize("incremental", [False, True])
async def test_every_dialect_runs_on_sglang(tmp_path: Path, incremental: bool) -> None:
    engine = SglangEngine(SglangState(incremental=incremental))
    async with external(engine), world(tmp_path, engines=0, job=False, workers=(engine.url,)) as made:
        await start_job(made, 1)
        await made.ready(1)
        _, answer = await made.post("/generate", ASK_SGLANG | {"return_logprob": True, "top_logprobs_num": 2})
        assert (answer["text"], answer["output_ids"]) == (TEXT, TOKENS)
        meta = answer["meta_info"]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == TOKENS
        assert all(len(best) == 2 for best in meta["output_top_logprobs"])
        assert (meta["cached_tokens"], meta["finish_reason"]) == (3, {"type": "length", "length": 6})
        _, answer = await made.post(GENERATE, ASK_VLLM | {"sampling_params": SAMPLING | {"logprobs": 1}})
        assert answer["choices"][0]["token_ids"] == TOKENS
        content = answer["choices"][0]["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == TOKENS
        body = {"prompt": "Which way to the goal?", "max_tokens": 6, "ignore_eos": True, "logprobs": 1}
        _, answer = await made.post("/v1/completions", body | {"return_token_ids": True})
        (choice,) = answer["choices"]
        assert (choice["text"], choice["token_ids"]) == (TEXT, TOKENS)
        assert choice["logprobs"]["tokens"][0] == mock_model.decode(TOKENS[:1])
        asked = engine.state.served[-1]
        assert asked["text"] == "Which way to the goal?"
        assert asked["sampling_params"] == {"max_new_tokens": 6, "ignore_eos": True}
        chunks = await events(made, GENERATE, ASK_VLLM | {"stream": True})
        assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == TOKENS
        stop = {"sampling_params": SAMPLING | {"stop_token_ids": [TOKENS[2]]}}
        _, answer = await made.post(GENERATE, ASK_VLLM | stop)
        assert answer["choices"][0]["stop_reason"] == TOKENS[2]


async def test_a_chat_on_sglang_counts_what_the_engine_counted(tmp_path: Path) -> None:
    engine = SglangEngine(SglangState())
    async with external(engine), world(tmp_path, engines=0, job=False, workers=(engine.url,)) as made:
        await start_job(made, 1)
        await made.ready(1)
        body = {"messages": MESSAGES, "max_tokens": 12, "ignore_eos": True}
        _, answer = await made.post("/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == expected(mock_model.chat_prompt(MESSAGES), 12)[1]
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["rose"]["attempts"][0]["tokens"] == 12
        assert answer["rose"]["weight_versions"] == [[0, 11, None]]
        status, _, headers = await refused(made, "/v1/chat/completions", body | {"return_token_ids": True})
        assert (status, headers["x-rose-error"]) == (400, "unsupported")


async def test_what_sglang_cannot_do_is_said(tmp_path: Path) -> None:
    engine = SglangEngine(SglangState())
    async with external(engine), world(tmp_path, engines=0, job=False, workers=(engine.url,)) as made:
        await start_job(made, 1)
        await made.ready(1)
        body = {"prompt": PROMPT, "max_tokens": 4, "bad_words": ["x"]}
        status, error, _ = await refused(made, "/v1/completions", body)
        assert (status, error["error"]["param"]) == (400, "bad_words")
        status, error, _ = await refused(made, "/v1/completions", {"prompt": PROMPT, "temperature": -1})
        assert status == 400
        assert "temperature must be non-negative" in error["error"]["message"]


async def _has(made: World, tokens: int = 0, attempts: int = 0) -> None:
    """Wait until the only turn has come so far."""
    (turn,) = made.scheduler.dispatcher.book.live.values()
    await until(lambda: turn.token_count >= tokens and len(turn.attempts) >= attempts)


async def test_a_turn_moves_between_sglang_and_vllm(tmp_path: Path) -> None:
    """Cut on either, it goes on on the other from its tokens."""
    one, two = SglangEngine(SglangState(token_ms=3)), Engine(MockState(token_ms=3))
    async with external(one, two), world(tmp_path, engines=0, job=False, workers=(one.url, two.url)) as made:
        await start_job(made, 2)
        await made.ready(2)
        body = ASK_VLLM | {"sampling_params": SAMPLING | {"max_tokens": 60}}
        task = asyncio.create_task(made.post(GENERATE, body))
        await until(lambda: bool(made.scheduler.dispatcher.book.live))
        for number in range(1, 3):
            await _has(made, tokens=15 * number)
            if one.state.running:
                one.state.abort = True
            else:
                two.state.abort("rose:kv_budget_cut")
            await _has(made, attempts=number)
        _, answer = await task
        assert answer["choices"][0]["token_ids"] == expected(PROMPT, 60)[0]
        used = [attempt["replica"] for attempt in answer["rose"]["attempts"]]
        assert used[0] != used[1] != used[2]


async def test_nobody_works_on_sglang_for_a_client_that_left(tmp_path: Path) -> None:
    engine = SglangEngine(SglangState(token_ms=10))
    async with external(engine), world(tmp_path, engines=0, job=False, workers=(engine.url,)) as made:
        await start_job(made, 1)
        await made.ready(1)
        task = asyncio.create_task(
            made.post(GENERATE, ASK_VLLM | {"sampling_params": SAMPLING | {"max_tokens": 500}})
        )
        await until(lambda: engine.state.running == 1)
        task.cancel()
        await until(lambda: engine.state.running == 0)
        async with made.http.post(f"{made.url}/flush_cache") as response:
            assert response.status == 200
        assert engine.state.flushed == 1
