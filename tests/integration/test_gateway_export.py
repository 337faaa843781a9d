"""Finished turns as data: pages, JSON lines, and what they leave out after `finish_session`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_world import MESSAGES, MODEL, World, world
from rose_daemon.scheduler import export

from rose.client import Job, Scheduler
from rose.errors import NotFound

JOB = "job-0"
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "return_token_ids": True}


async def play(made: World, turns: int) -> Job:
    """Run turns of two trajectories, `walk` (even ones) and `walk-1`."""
    for number in range(turns):
        status, answer = await made.post(
            "/v1/chat/completions",
            CHAT | {"seed": number, "logprobs": True},
            x_rose_turn_id=f"t{number}",
            x_rose_trajectory="walk-1" if number % 2 else "walk",
        )
        assert status == 200, answer
    await made.post("/v1/chat/completions", CHAT)  # without an id: not kept
    return Job(Scheduler(made.url), JOB)


async def test_an_export_has_every_named_turn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "PAGE_MAX", 2)
    async with world(tmp_path, engines=1) as made:
        job = await play(made, 5)
        path = tmp_path / "turns.jsonl"
        assert await asyncio.to_thread(job.export, path, logprobs=True) == 5
        turns = [json.loads(line) for line in path.read_text().splitlines()]
        assert [turn["turn_id"] for turn in turns] == [f"t{number}" for number in range(5)]
        assert [turn["seed"] for turn in turns] == list(range(5))
        assert len({turn["request_digest"] for turn in turns}) == 5
        for turn in turns:
            (choice,) = turn["choices"]
            assert choice["prompt_token_ids"]
            assert len(choice["logprobs"]) == len(choice["token_ids"]) > 0
            assert turn["weight_versions"] == [[0, len(choice["token_ids"]) - 1, 0]]
        assert not (tmp_path / "turns.jsonl.part").exists()


async def test_a_finished_session_is_gone_and_its_namesake_is_not(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        job = await play(made, 4)

        def use() -> tuple[list[str], int, list[str]]:
            before = [turn["turn_id"] for turn in job.turns(trajectory="walk")]
            forgotten = job.finish_session("walk")
            return before, forgotten, [turn["turn_id"] for turn in job.turns()]

        assert await asyncio.to_thread(use) == (["t0", "t2"], 2, ["t1", "t3"])


async def test_logprobs_only_if_asked_for_and_bad_queries_are_refused(tmp_path: Path) -> None:
    async with world(tmp_path, engines=1) as made:
        job = await play(made, 1)
        (turn,) = await asyncio.to_thread(lambda: list(job.turns()))
        assert "logprobs" not in turn["choices"][0]
        for query in ("after=-1", "limit=many", f"after={'9' * 40}"):
            async with made.http.get(f"{made.url}/rose/v1/jobs/{JOB}/answers?{query}") as response:
                assert response.status == 400
        with pytest.raises(NotFound):
            await asyncio.to_thread(lambda: list(Job(Scheduler(made.url), "nobody").turns()))
