"""All dialects, and prompt embeddings, on a real engine: the gateway says what the engine says."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_world import TOKEN, Engine, Gatekeeper, unused_port
from gateway_world import Node
from rose_daemon.scheduler.process import running
from test_engine_live_weights import Chain
from waiting import until

from rose.boards import BoardPaths
from rose.config import Config, NodeConfig, ReplicaConfig, SchedulerConfig
from rose.core.events import ReplicaReport
from rose.engines.vllm.launch import rollout_command
from rose.units import ReplicaId, WeightVersion

pytestmark = pytest.mark.engine

MODEL = "rollout"
PROMPT = [(7 * number + 3) % 256 for number in range(80)]
TOKENS = 24


@pytest.fixture(scope="module")
def engine(demo_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A dedicated replica that takes embeddings and tells what its prefix cache had."""
    root = tmp_path_factory.mktemp("engine")
    run_dir, token_file = root / "run", root / "engine.token"
    run_dir.mkdir()
    token_file.touch(mode=0o600)
    token_file.write_text(TOKEN)
    replica = ReplicaConfig(
        id=ReplicaId("r0"),
        kind="dedicated",
        model=str(demo_models.rollout),
        cpus=(min(os.sched_getaffinity(0)),),
        kv_blocks=256,
        engine_args=("--enable-prompt-embeds",),
    )
    node = NodeConfig(state_dir=str(root), run_dir=str(run_dir), token_file=str(token_file))
    config = Config(node=node, replicas=(replica,))
    port = unused_port()
    gate = Gatekeeper(BoardPaths(run_dir), "r0")
    engine = Engine(rollout_command(replica, config, port=port), port, root / "engine.log", TOKEN)
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.stop()
        gate.close()


class Gateway:
    """A scheduler with a job on the engine."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http
        self.version = 0

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._http.post(self._url + path, json=body) as response:
            document: dict[str, Any] = await response.json()
            assert response.status in {200, 201}, document
            return document

    async def ready(self) -> None:
        async def eligible() -> bool:
            async with self._http.get(f"{self._url}/rose/v1/status") as response:
                return any(replica["eligible"] for replica in (await response.json())["replicas"])

        await until(eligible)


@pytest.fixture
async def gateway(engine: Engine, tmp_path: Path) -> AsyncIterator[Gateway]:
    config = SchedulerConfig(control="tcp://127.0.0.1:0", gateway_port=0, state_dir=str(tmp_path / "state"))
    async with running(config) as scheduler, aiohttp.ClientSession() as http:
        made = Gateway(scheduler.gateway_url, http)

        def report() -> list[ReplicaReport]:
            version = WeightVersion(made.version)
            return [
                ReplicaReport(
                    ReplicaId("r0"), "dedicated", "ready", engine.url, MODEL, version,
                    gate_open=True, context_tokens_max=2048,
                )
            ]  # fmt: skip

        node = await Node(scheduler.nodes.address, report).start()
        try:
            await made.post("/rose/v1/jobs", {"job": "walk", "model": MODEL, "n_rl": 1, "n_serving_max": 0})
            await made.ready()
            yield made
        finally:
            await node.stop()


async def test_every_dialect_says_what_the_engine_says(engine: Engine, gateway: Gateway) -> None:
    want = engine.complete(MODEL, PROMPT, TOKENS, logprobs=2)
    sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2}
    body = {"token_ids": PROMPT, "sampling_params": sampling, "output_mode": "text"}
    (choice,) = (await gateway.post("/inference/v1/generate", body))["choices"]
    assert (choice["token_ids"], choice["text"]) == (want["token_ids"], want["text"])
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": TOKENS}]
    (choice,) = (await gateway.post("/inference/v1/generate", body | {"output_mode": "tokens"}))["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == want["token_ids"]
    logprobs = [entry["logprob"] for entry in content]
    assert logprobs == pytest.approx(want["logprobs"]["token_logprobs"], abs=1e-3)
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    asked = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    answer = await gateway.post("/generate", asked)
    meta = answer["meta_info"]
    assert (answer["output_ids"], answer["text"]) == (want["token_ids"], want["text"])
    assert [entry[0] for entry in meta["output_token_logprobs"]] == pytest.approx(logprobs, abs=1e-3)
    assert all(len(best) == 2 for best in meta["output_top_logprobs"])
    assert (meta["prompt_tokens"], meta["weight_version"]) == (len(PROMPT), "0")
    assert meta["cached_tokens"] > 0


async def test_a_flush_leaves_no_prefix_to_find(gateway: Gateway) -> None:
    async def cached() -> int:
        params = {"temperature": 0, "max_new_tokens": 2}
        answer = await gateway.post("/generate", {"input_ids": PROMPT, "sampling_params": params})
        found: int = answer["meta_info"]["cached_tokens"]
        return found

    await cached()
    assert await cached() > 0
    async with gateway._http.post(f"{gateway._url}/flush_cache") as response:
        assert response.status == 200
    assert await cached() == 0
    assert await cached() > 0


async def test_embeddings_of_another_version_are_not_found(
    engine: Engine, gateway: Gateway, demo_models: Any, tmp_path: Path
) -> None:
    """Their hashes hang on the version like those of tokens; the same ones under new weights are new."""
    embeds = _embeddings(Path(demo_models.rollout), PROMPT)

    async def ask() -> tuple[list[int], int]:
        body = {
            "model": MODEL, "prompt_embeds": embeds, "max_tokens": TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        answer = await gateway.post("/v1/completions", body)
        return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    want = engine.complete(MODEL, PROMPT, TOKENS)["token_ids"]
    (first, cold), (again, warm) = await ask(), await ask()
    assert first == again == want, "embeddings of tokens are as good as the tokens"
    assert (cold, warm > 0) == (0, True)
    version = Chain(Path(demo_models.rollout), tmp_path).step()
    update = {"version": 1, "base_version": 0, "path": str(version.directory), "abort_in_flight": False}
    answer = engine.rose("POST", "weights/update", update)
    assert answer.status_code == 200, answer.text
    gateway.version = 1
    await gateway.post("/rose/v1/jobs/walk/steps", {"rl_step": 1, "required_version": 1})
    await gateway.ready()
    assert (await ask())[1] == 0
    assert (await ask())[1] > 0


def _embeddings(checkpoint: Path, tokens: list[int]) -> str:
    """Input embeddings of tokens, as vLLM takes them: base64 of a tensor as torch saves it."""
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415

    weights = load_file(checkpoint / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("embed_tokens.weight")]
    data = io.BytesIO()
    torch.save(weights[name][torch.tensor(tokens)].clone(), data)
    return base64.b64encode(data.getvalue()).decode()
