"""A real engine behind the gateway: what a cut leaves behind, and that a client cannot tell."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_world import EnginePair
from gateway_world import Node
from rose_daemon.scheduler.process import Scheduler, running
from waiting import until

from rose.config import SchedulerConfig
from rose.core.events import ReplicaReport
from rose.core.readings import GateMode
from rose.units import ReplicaId, WeightVersion

pytestmark = pytest.mark.engine

MODEL = "rollout"
TOKENS = 96
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Which way to the goal?"}],
    "max_tokens": TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
    "logprobs": True,
    "top_logprobs": 1,
}


def report(pair: EnginePair) -> ReplicaReport:
    return ReplicaReport(
        replica=ReplicaId("r0"),
        kind="dedicated",
        state="ready",
        url=pair.rollout.url,
        model=MODEL,
        weight_version=WeightVersion(0),
        gate_open=True,
        context_tokens_max=2048,
    )


async def cut(scheduler: Scheduler, pair: EnginePair, after_tokens: int) -> None:
    """Abort what runs on the engine once the only turn has that many tokens."""

    def far_enough() -> bool:
        return any(turn.token_count >= after_tokens for turn in scheduler.dispatcher.book.live.values())

    await until(far_enough, 60)
    answer = await asyncio.to_thread(pair.rollout.rose, "POST", "abort", {"all": True})
    assert answer.json() == {"aborted": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_turn_is_the_turn_it_would_have_been(
    engine_pair: EnginePair, tmp_path: Path, stream: bool
) -> None:
    engine_pair.gate.set(mode=GateMode.OPEN)
    config = SchedulerConfig(control="tcp://127.0.0.1:0", gateway_port=0, state_dir=str(tmp_path))
    async with running(config) as scheduler, aiohttp.ClientSession() as http:
        node = await Node(scheduler.nodes.address, lambda: [report(engine_pair)]).start()
        body = {"job": "walk", "model": MODEL, "n_rl": 1, "n_serving_max": 0}
        await http.post(f"{scheduler.gateway_url}/rose/v1/jobs", json=body)

        async def ask() -> dict[str, Any]:
            url = f"{scheduler.gateway_url}/v1/chat/completions"
            async with http.post(url, json=CHAT | {"stream": stream}) as response:
                assert response.status == 200
                return await _put_together(response) if stream else await response.json()

        whole = await ask()
        task = asyncio.create_task(ask())
        await cut(scheduler, engine_pair, 20)
        await cut(scheduler, engine_pair, 55)
        again = await task
        await node.stop()
    assert [attempt["end"] for attempt in again["rose"]["attempts"]] == ["aborted_by_engine"] * 2 + [
        "finished"
    ]
    mine, reference = again["choices"][0], whole["choices"][0]
    assert len(reference["token_ids"]) == TOKENS
    assert mine["token_ids"] == reference["token_ids"]
    assert mine["message"]["content"] == reference["message"]["content"]
    assert mine["finish_reason"] == "length"
    entries = zip(mine["logprobs"]["content"], reference["logprobs"]["content"], strict=True)
    for entry, other in entries:
        assert entry["token"] == other["token"]
        assert entry["logprob"] == pytest.approx(other["logprob"], abs=0.05)


async def _put_together(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """A streamed chat as one body."""
    choice: dict[str, Any] = {"token_ids": [], "message": {"content": ""}, "logprobs": {"content": []}}
    body: dict[str, Any] = {"choices": [choice]}
    async for line in response.content:
        data = line.decode().removeprefix("data: ").strip()
        if not data or data == "[DONE]":
            continue
        chunk = json.loads(data)
        body["rose"] = chunk.get("rose")
        for part in chunk["choices"]:
            choice["token_ids"] += part["token_ids"]
            choice["message"]["content"] += part["delta"]["content"] or ""
            choice["logprobs"]["content"] += (part["logprobs"] or {"content": []})["content"]
            choice["finish_reason"] = part["finish_reason"]
    return body
