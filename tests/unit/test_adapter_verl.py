"""`rose.adapters.verl`, and its contract with verl written down.

Read from verl 0.9.1: verl/workers/rollout/{replica,llm_server}.py and verl/checkpoint_engine/base.py.
`integration/test_adapters.py` uses the package itself, where it is installed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web

from rose.errors import ConfigError, NotReady

SETTINGS = {"url": "http://127.0.0.1:1", "job": "grpo"}
CHOICE = {"token_ids": [7, 8], "finish_reason": "length", "logprobs": None}


@dataclass
class TokenOutput:
    """verl.workers.rollout.replica.TokenOutput."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class Registry(dict[str, Any]):
    """verl's registries: of replicas, by a call, and of engines, by a decorator."""

    def of_replicas(self, name: str, loader: Callable[[], type]) -> None:
        self[name] = loader

    def of_engines(self, name: str) -> Callable[[type], type]:
        def keep(kind: type) -> type:
            self[name] = kind
            return kind

        return keep


replicas, engines = Registry(), Registry()


class Actor:
    """What `ray.remote(...)(kind).remote(...)` gives, in this process."""

    def __init__(self, made: Any) -> None:
        self.made = made


def remote(**options: Any) -> Callable[[type], Any]:
    assert options["num_cpus"] == 0
    return lambda kind: SimpleNamespace(remote=lambda *arguments: Actor(kind(*arguments)))


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, over stand-ins of verl and ray."""
    members: dict[str, dict[str, Any]] = {
        "ray": {"remote": remote},
        "verl": {},
        "verl.checkpoint_engine": {},
        "verl.checkpoint_engine.base": {
            "CheckpointEngine": object,
            "CheckpointEngineRegistry": SimpleNamespace(register=engines.of_engines),
        },
        "verl.workers": {},
        "verl.workers.rollout": {},
        "verl.workers.rollout.replica": {
            "RolloutReplica": object,
            "RolloutReplicaRegistry": SimpleNamespace(register=replicas.of_replicas),
            "TokenOutput": TokenOutput,
        },
    }
    for name, values in members.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "rose.adapters.verl", raising=False)
    yield importlib.import_module("rose.adapters.verl")
    sys.modules.pop("rose.adapters.verl", None)


class Gateway:
    """Notes what is asked of it, and answers as it is told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.refusals: list[int] = []
        self.choice: dict[str, Any] = dict(CHOICE)
        self.url = ""

    async def answer(self, http: web.Request) -> web.Response:
        self.asked.append((http.path_qs, await http.json(), dict(http.headers)))
        if self.refusals:
            return web.json_response({"error": {"message": "no"}}, status=self.refusals.pop(0))
        return web.json_response({"choices": [self.choice], "rose": {"weight_versions": [[0, 1, 4]]}})


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    made = Gateway()
    app = web.Application()
    app.add_routes([web.post("/{path:.*}", made.answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


async def test_a_turn_is_one_call_in_vllms_token_dialect(adapter: ModuleType, gateway: Gateway) -> None:
    server = adapter.GatewayServer({"url": f"{gateway.url}/", "job": "grpo"})
    gateway.choice["logprobs"] = {"content": [{"logprob": -0.5}, {"logprob": -1.5}]}
    sampling = {"temperature": 1.0, "top_k": -1, "max_new_tokens": 2, "logprobs": True}
    output = await server.generate(
        request_id="r",
        prompt_ids=[1, 2],
        sampling_params=sampling,
        image_data=None,
        video_data=None,
        priority=0,
    )
    assert output == TokenOutput(
        [7, 8], [-0.5, -1.5], stop_reason="completed", extra_fields={"weight_versions": [[0, 1, 4]]}
    )
    assert sampling["max_new_tokens"] == 2, "the caller's dict is its own"
    ((path, body, headers),) = gateway.asked
    assert path == "/inference/v1/generate"
    assert body["token_ids"] == [1, 2]
    assert body["sampling_params"] == {"temperature": 1.0, "top_k": -1, "max_tokens": 2, "logprobs": 0}
    assert headers["x-rose-job"] == "grpo"
    gateway.choice = CHOICE | {"finish_reason": "abort"}
    output = await server.generate([1, 2, 7], {"logprobs": False}, "r")
    assert (output.stop_reason, output.log_probs) == ("aborted", None)
    ids = [asked[2]["x-rose-turn-id"] for asked in gateway.asked]
    assert len(set(ids)) == 2, "verl may name all turns of a trajectory alike"
    await server.generate([1, 2], {}, "r")
    assert gateway.asked[2][2]["x-rose-turn-id"] == ids[0], "the same turn sent again is one"
    with pytest.raises(ConfigError, match="image_data"):
        await server.generate([1], {}, "r", image_data=["x"])
    await server.close()


async def test_a_busy_gateway_is_asked_again_and_a_refusal_is_final(
    adapter: ModuleType, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_PAUSE_S", 0.001)
    server = adapter.GatewayServer({"url": gateway.url, "job": "grpo"})
    gateway.refusals = [429, 503]
    assert (await server.generate([1], {}, "r")).token_ids == [7, 8]
    assert len({asked[2]["x-rose-turn-id"] for asked in gateway.asked}) == 1
    gateway.refusals = [400]
    with pytest.raises(ConfigError, match="status 400: no"):
        await server.generate([1], {}, "r")
    monkeypatch.setattr(adapter, "_ATTEMPTS", 2)
    gateway.refusals = [503, 503]
    with pytest.raises(NotReady, match="status 503"):
        await server.generate([1], {}, "r")
    await server.close()


async def test_an_update_holds_turns_and_lets_them_go_on(adapter: ModuleType, gateway: Gateway) -> None:
    server = adapter.GatewayServer({"url": gateway.url, "job": "grpo"})
    await server.abort_all_requests(checkpoint_kv=False, timeout_s=30.0)
    await server.clear_kv_cache()
    for name in ("sleep", "wake_up", "release_kv_cache", "resume_kv_cache", "start_profile", "stop_profile"):
        await getattr(server, name)()
    await server.resume_generation()
    assert [asked[0] for asked in gateway.asked] == ["/pause?mode=keep", "/reset_prefix_cache", "/resume"]
    await server.close()


def test_settings_that_are_wrong_are_named(adapter: ModuleType) -> None:
    for wrong, text in (({"url": "x"}, "`url` and `job`"), (SETTINGS | {"jobb": 1}, "unknown 'jobb'")):
        with pytest.raises(ConfigError, match=text):
            adapter.GatewayServer(wrong)


async def test_a_replica_is_an_actor_and_a_worker_that_receives_nothing(adapter: ModuleType) -> None:
    replica = replicas["rose"]()()
    replica.config = SimpleNamespace(engine_kwargs={"rose": SETTINGS})
    replica.max_concurrency = 8
    await replica.init_standalone()
    assert replica._server_address == "127.0.0.1:1"
    assert isinstance(replica._server_handle.made, adapter.GatewayServer)
    (worker,) = replica.workers
    assert worker.made.execute_checkpoint_engine("prepare") == {}
    assert worker.made.update_weights(global_steps=3) is None


async def test_rank_0_publishes_and_the_others_help_to_gather(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[list[tuple[str, torch.Tensor]], float]] = []
    stream = SimpleNamespace(send=lambda weights, timeout_s: sent.append((list(weights), timeout_s)))
    monkeypatch.setattr(adapter, "WeightStream", SimpleNamespace(connect=lambda *_: stream))
    monkeypatch.setattr(adapter, "load", lambda _: SimpleNamespace(relay=None))
    kind = engines["rose"]
    options = SETTINGS | {"checkpoint": "/models/policy", "config": "rose.toml", "timeout_s": 5}
    ranks = [kind(1 << 20, **options) for _ in range(2)]
    actors, rollouts = kind.build_topology(2, 1, [rank.prepare() for rank in ranks])
    assert rollouts == {"rank": [-1]}
    for rank, number in zip(ranks, actors["rank"], strict=True):
        rank.init_process_group(rank=number)
    gathered: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        gathered.append("gathered")
        yield "w", torch.ones(1)

    for rank in ranks:
        await rank.send_weights(weights(), global_steps=1)
        rank.finalize()
    assert gathered == ["gathered"] * 2
    (((name, _),), timeout_s) = sent[0]
    assert (len(sent), name, timeout_s) == (1, "w", 5)
    assert [pair async for pair in ranks[1].receive_weights(global_steps=1)] == []
