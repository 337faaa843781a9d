"""`rose.adapters`: what a framework streams becomes versions that fit the checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import requests
import torch
from weight_states import JOB, MemoryRelay, fail_once, same

from rose.adapters import trl
from rose.adapters.publishing import WeightStream
from rose.client import Job
from rose.weights.bits import UnsupportedTensor, as_state
from rose.weights.publisher import Publisher
from rose.weights.relay import RelayUnavailable
from rose.weights.relay.blocking import BlockingRelay

MODEL = {
    "model.embed.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4).to(torch.bfloat16),
    "model.norm.weight": torch.ones(4),
    "steps": torch.tensor([3], dtype=torch.int64),
}


class StandingJob(Job):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.name = JOB
        self.required: list[int] = []
        self.awaited: list[int] = []

    def require(self, version: int) -> None:
        self.required.append(version)

    def wait_for_version(self, version: int, **options: Any) -> Any:
        assert options["replicas"] == 1
        self.awaited.append(version)


@pytest.fixture
def relay() -> MemoryRelay:
    return MemoryRelay()


@pytest.fixture
def job() -> StandingJob:
    return StandingJob()


@pytest.fixture
def weights(relay: MemoryRelay, job: StandingJob) -> Iterator[WeightStream]:
    with WeightStream(job, Publisher(BlockingRelay(relay), JOB, MODEL)) as opened:
        yield opened


def published(relay: MemoryRelay) -> dict[str, Any]:
    """What a host that holds the checkpoint makes of the relay's versions."""
    return dict(Publisher.resume(BlockingRelay(relay), JOB, MODEL).state)


def test_what_is_trained_in_another_precision_is_cast_and_the_rest_stays(
    relay: MemoryRelay, job: StandingJob, weights: WeightStream
) -> None:
    trained = torch.nn.Parameter(MODEL["model.embed.weight"].float() + 0.5)
    report = weights.send([("model.embed.weight", trained)], timeout_s=1)
    assert (report.version, weights.version) == (1, 1)
    assert (job.required, job.awaited) == ([1], [1])
    wanted = MODEL | {"model.embed.weight": trained.detach().to(torch.bfloat16)}
    assert same(published(relay), as_state(wanted))
    weights.send([("model.norm.weight", np.zeros(4, dtype=np.float32))])
    assert (job.required, job.awaited) == ([1, 2], [1])
    assert same(published(relay), as_state(wanted | {"model.norm.weight": torch.zeros(4)}))


def test_a_tensor_may_be_freed_once_it_is_handed_over(relay: MemoryRelay, weights: WeightStream) -> None:
    buffer = torch.empty(4)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        buffer.fill_(7)
        yield "model.norm.weight", buffer
        buffer.fill_(-1)

    weights.send(gathered())
    assert same(published(relay), as_state(MODEL | {"model.norm.weight": torch.full((4,), 7.0)}))


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("norm.weight", torch.ones(4), r"it has model\.norm\.weight"),
        ("module.model.norm.weight", torch.ones(4), r"it has model\.norm\.weight"),
        ("lora_A", torch.ones(4), "names of the checkpoint"),
        ("model.norm.weight", torch.ones(5), r"shape \(5,\)"),
        ("steps", torch.ones(1), "I64"),
        ("model.norm.weight", "no tensor", "not a tensor"),
    ],
)
def test_what_the_checkpoint_has_not_is_refused_and_nothing_is_published(
    relay: MemoryRelay, job: StandingJob, weights: WeightStream, name: str, tensor: Any, text: str
) -> None:
    with pytest.raises(UnsupportedTensor, match=text):
        weights.send([("model.embed.weight", torch.zeros(3, 4)), (name, tensor)])
    assert job.required == []
    assert relay.vault.stat(JOB).versions == ()
    weights.drop()
    weights.send([])
    assert same(published(relay), as_state(MODEL)), "what was taken before the error is dropped too"


def test_a_failed_publish_can_be_repeated(
    relay: MemoryRelay, job: StandingJob, weights: WeightStream
) -> None:
    weights.take([("model.norm.weight", torch.zeros(4))])
    relay.before = fail_once("commit")
    with pytest.raises(RelayUnavailable):
        weights.publish()
    assert job.required == []
    assert weights.publish().version == 1
    assert weights.publish().repeated, "such as after the scheduler could not be told"
    assert job.required == [1, 1]


# ---- TRL's client, its contract written down -------------------------------------------------------


@pytest.fixture
def standing_trl(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The members of TRL 1.16 that the adapter touches: trl/generation/{vllm_client,vllm_generation}.py.

    tests/integration/test_adapters_trl.py uses the package itself, where it is installed.
    """

    posted: list[dict[str, Any]] = []

    class VLLMClient:
        def __init__(self, base_url: str | None = None, group_port: int = 0, connection_timeout: float = 0.0):
            self.base_url = base_url

            self.session = requests.Session()

        def _post(self, url: str, **options: Any) -> dict[str, Any]:
            posted.append(options)
            samples = options["json"]["n"] * len(options["json"]["prompt"])
            return {"token_ids": [[options["json"].get("seed", 0)]] * samples}

        def generate(
            self,
            prompts: Any,
            features: Any = None,
            n: int = 1,
            generation_kwargs: Any = None,
            **options: Any,
        ) -> dict[str, Any]:
            body = {"prompt": prompts, "n": n, **options, **(generation_kwargs or {})}
            ids = self._post("/v1/completions", json=body)["token_ids"]
            logprobs = [[[-1.0]]] * len(ids) if options.get("logprobs", 0) is not None else None
            shown = {"logprobs": logprobs, "logprob_token_ids": logprobs}
            return {"prompt_ids": prompts, "completion_ids": ids} | shown

        def update_named_param(self, name: str, weights: torch.Tensor) -> None:
            metadata = [(name, str(weights.dtype), list(weights.shape))]
            self.update_named_params(metadata, iter([(name, weights)]))

        def update_named_params(self, metadata: Any, named_params: Any) -> None:
            raise NotImplementedError("NCCL")

    modules = {name: ModuleType(name) for name in ("trl", "trl.generation", "trl.generation.vllm_client")}
    generation = ModuleType("trl.generation.vllm_generation")
    modules["trl.generation.vllm_client"].VLLMClient = VLLMClient  # type: ignore[attr-defined]
    generation.VLLMClient = VLLMClient  # type: ignore[attr-defined]
    generation.posted = posted  # type: ignore[attr-defined]
    modules["trl.generation"].vllm_generation = generation  # type: ignore[attr-defined]
    for name, module in (modules | {generation.__name__: generation}).items():
        monkeypatch.setitem(sys.modules, name, module)
    trl._client_class.cache_clear()
    monkeypatch.setattr(trl, "_client_class", trl._client_class.__wrapped__)
    return generation


def test_trls_weight_update_is_one_version(
    relay: MemoryRelay, job: StandingJob, weights: WeightStream, standing_trl: ModuleType
) -> None:
    with trl.through_rose(weights, logprobs_mode="processed_logprobs"):
        client: Any = standing_trl.VLLMClient(base_url="http://127.0.0.1:1", group_port=1)
    assert standing_trl.VLLMClient.__name__ == "VLLMClient", "patched only while trainers are made"
    client.init_communicator(device=0)
    assert client.get_server_info()["model_config"]["logprobs_mode"] == "processed_logprobs"
    with client.weight_update():
        client.update_named_param("model.norm.weight", torch.zeros(4))
        client.update_named_param("model.embed.weight", torch.zeros(3, 4))
    assert (job.required, job.awaited) == ([1], [1])
    client.update_named_param("model.norm.weight", torch.full((4,), 2.0))
    assert job.required == [1, 2]

    def fail_half_way() -> None:
        with client.weight_update():
            client.update_named_param("model.norm.weight", torch.full((4,), 9.0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    with client.weight_update():
        client.update_named_param("model.embed.weight", torch.ones(3, 4))
    assert job.required == [1, 2, 3]
    wanted = {"model.norm.weight": torch.full((4,), 2.0), "model.embed.weight": torch.ones(3, 4).bfloat16()}
    assert same(published(relay), as_state(MODEL | wanted))
    client.close_communicator()


def test_trls_samples_are_turns_of_their_own(weights: WeightStream, standing_trl: ModuleType) -> None:
    client: Any = trl.client(weights, base_url="http://127.0.0.1:1")
    sampled = client.generate([[1, 2], [3]], n=3, max_tokens=4, logprobs=0, generation_kwargs={"seed": 7})
    assert sampled["prompt_ids"] == [[1, 2], [3]]
    assert sampled["completion_ids"] == [[seed] for seed in range(7, 13)], "no two samples with one seed"
    assert len(sampled["logprobs"]) == len(sampled["logprob_token_ids"]) == 6
    asked = sorted(standing_trl.posted, key=lambda options: options["json"]["seed"])
    assert [options["json"]["prompt"] for options in asked] == [[[1, 2]]] * 3 + [[[3]]] * 3
    assert all((options["json"]["n"], options["json"]["max_tokens"]) == (1, 4) for options in asked)
    headers = [options["headers"] for options in asked]
    assert {header["x-rose-job"] for header in headers} == {JOB}
    assert len({header["x-rose-turn-id"] for header in headers}) == 6
    groups = [header["x-rose-group"] for header in headers]
    assert groups == [groups[0]] * 3 + [groups[3]] * 3
    assert groups[0] != groups[3]
    assert client.generate([[1]], n=2, logprobs=None)["logprobs"] is None
    standing_trl.posted.clear()
    client.generate([[1]], features=[{}], n=2)
    assert len(standing_trl.posted) == 1
    assert "headers" not in standing_trl.posted[0]
