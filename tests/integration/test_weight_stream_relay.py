"""A framework's weights on their way: through the relay's server, into what turns are sampled from."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from dialect_asks import ASK_VLLM, GENERATE
from gateway_world import world
from rose_daemon.relay.server import serving
from safetensors.torch import save_file
from waiting import until

from rose.adapters.publishing import WeightStream
from rose.client import Job, Scheduler
from rose.config import RelayConfig
from rose.weights.bits import as_bits

WEIGHTS = {"model.norm.weight": torch.ones(64, dtype=torch.bfloat16), "lm_head.weight": torch.zeros(4, 64)}


async def test_turns_run_on_what_a_trainer_sent(tmp_path: Path) -> None:
    checkpoint = tmp_path / "policy"
    checkpoint.mkdir()
    save_file(WEIGHTS, checkpoint / "model.safetensors")
    async with (
        world(tmp_path, engines=2) as made,
        serving(RelayConfig(port=0, capacity_bytes=1 << 24)) as url,
    ):
        job, relay = Job(Scheduler(made.url), "job-0"), RelayConfig(url=url)
        trained = torch.nn.Parameter(torch.full((64,), 1.5))

        def update() -> list[int]:
            with WeightStream.connect(relay, job, checkpoint) as weights:
                assert weights.version == 0
                report = weights.send([("model.norm.weight", trained)], timeout_s=60)
                assert (report.version, report.changed) == (1, 64)
            with WeightStream.connect(relay, job, checkpoint) as weights:
                assert weights.version == 1, "a trainer that restarts goes on where it was"
                held = weights.send([], timeout_s=60)
                assert (held.version, held.repeated) == (1, True)
                return list(weights._publisher.state["model.norm.weight"].words)

        updating = asyncio.create_task(asyncio.to_thread(update))

        async def required() -> bool:
            _, status = await made.get("/rose/v1/jobs/job-0")
            return bool(status["required_version"] == 1) or updating.done()

        await until(required, within_s=60)
        # What rosed would have its engines do.
        for engine in made.engines:
            engine.state.version = 1
        assert await updating == list(as_bits(trained.detach().to(torch.bfloat16)).words)
        _, answer = await made.post(GENERATE, ASK_VLLM)
        assert {span["version"] for span in answer["choices"][0]["weight_versions"]} == {"1"}
