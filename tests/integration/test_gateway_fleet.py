"""Versions, caches and information, asked as of one engine and answered for the fleet."""

from __future__ import annotations

from pathlib import Path

from dialect_asks import ASK_SGLANG, ASK_VLLM, GENERATE, like, refused
from gateway_world import MESSAGES, MODEL, world
from rose_daemon import mock_model
from rose_daemon.scheduler.fleet import SGLANG_REFUSED, VLLM_REFUSED
from waiting import until


async def test_weight_versions_of_the_fleet(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        for path in ("/get_weight_version", "/weight_version", "/weight_info"):
            _, answer = await made.get(path)
            assert like(answer, {"weight_version": "0", "rose": "?"})
        body = {"new_version": "3", "abort_all_requests": False}
        _, answer = await made.post("/update_weight_version", body)
        assert like(answer, {"success": True, "new_version": "3", "message": "?"})
        made.engines[0].state.version = 3

        async def first_moved() -> bool:
            _, answer = await made.get("/get_weight_version")
            return bool(answer["rose"]["replicas"] == {"replica-0": 3, "replica-1": 0})

        await until(first_moved)
        _, answer = await made.get("/weight_info")
        assert answer["weight_version"] == "0", "the fleet is as far as its slowest replica"
        _, answer = await made.post(GENERATE, ASK_VLLM)
        assert answer["choices"][0]["weight_versions"][0]["version"] == "3"
        assert (await made.post("/finish_weight_update", {"weight_version": "3"}))[0] == 200
        for wrong in ("three", "", -1, 1.5, True, "9" * 20):
            assert (await made.post("/update_weight_version", {"new_version": wrong}))[0] == 400


async def test_what_moves_weights_into_one_engine_isrefused(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        for path in (*VLLM_REFUSED, *SGLANG_REFUSED, "finish_weight_update"):
            status, error, headers = await refused(made, f"/{path}", {})
            assert (status, headers["x-rose-error"]) == (501, "moved_by_rose")
            assert error["error"]["type"] == "NotImplementedError"
            assert "rose.weights.Publisher" in error["error"]["message"]
        assert (await made.get("/get_world_size"))[0] == 501


async def test_a_version_asked_for_and_not_there_is_409_with_a_time(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        for path, body in (
            (GENERATE, ASK_VLLM),
            ("/generate", ASK_SGLANG),
            ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
        ):
            for wish in ({"min_version": 1}, {"exact_version": 1}):
                status, _, headers = await refused(made, path, body | {"weight_version": wish})
                assert (status, headers["x-rose-error"]) == (409, "version_unavailable")
                assert int(headers["Retry-After"]) >= 1
            wish = {"min_version": 0, "exact_version": 0}
            assert (await made.post(path, body | {"weight_version": wish}))[0] == 200
        assert all("weight_version" not in body for body in made.engines[0].state.served)


async def test_flush_cache_lets_no_turn_find_an_old_prefix(tmp_path: Path) -> None:
    long = mock_model.encode("a long way to go, and the same beginning every time " * 2)
    async with world(tmp_path, engines=1) as made:

        async def cached() -> int:
            _, answer = await made.post("/generate", ASK_SGLANG | {"input_ids": long})
            found: int = answer["meta_info"]["cached_tokens"]
            return found

        assert (await cached(), await cached() > 0) == (0, True)
        for method in ("get", "post"):
            async with made.http.request(method, f"{made.url}/flush_cache") as response:
                assert (response.status, await response.text()) == (200, "Cache flushed.\n")
            assert (await cached(), await cached() > 0) == (0, True)


async def test_sglang_information(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        model = {
            "model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True,
            "preferred_sampling_params": None, "weight_version": "0",
        }  # fmt: skip
        for path in ("/model_info", "/get_model_info"):
            assert await made.get(path) == (200, model)
        for path in ("/server_info", "/get_server_info"):
            _, answer = await made.get(path)
            golden = model | {
                "served_model_name": MODEL, "status": "ready", "version": "?", "max_running_requests": 32,
                "internal_states": ["?", "?"], "rose": "?",
            }  # fmt: skip
            assert like(answer, golden), answer
            assert answer["internal_states"][0]["num_running_reqs"] == 0


async def test_health_generate_follows_the_replicas(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        async with made.http.get(f"{made.url}/health_generate") as response:
            assert response.status == 200
        await made.post("/rose/v1/replicas/replica-0/drain", {"drain": True})
        assert (await made.get("/health_generate"))[0] == 503


async def test_finish_session_frees_pin_and_answers(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        headers = {"x_rose_turn_id": "t1", "x_rose_trajectory": "walk-1"}
        await made.post(GENERATE, ASK_VLLM, **headers)
        await made.post(GENERATE, ASK_VLLM, x_rose_turn_id="t2", x_rose_trajectory="walk-12")
        _, status = await made.get("/rose/v1/status")
        assert status["pins"] == 2
        _, answer = await made.post("/finish_session", {"session_id": "walk-1"})
        assert answer == {"session_id": "walk-1", "finished": True, "answers_forgotten": 1}
        _, status = await made.get("/rose/v1/status")
        assert status["pins"] == 1, "a name that begins like another's is another name"
        await made.post(GENERATE, ASK_VLLM, **headers)
        assert len(made.engines[0].state.served) == 3
        assert (await made.post("/finish_session", {}))[0] == 400
