"""TRL: `trl.generation.vllm_client.VLLMClient`, with weights that go through ROSE's relay.

    with WeightStream.connect(load(Path("rose.toml")).relay, job, Path("/models/policy")) as weights:
        with through_rose(weights):
            trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="server",
                                                       vllm_server_base_url="http://127.0.0.1:7700"))
        trainer.train()

TRL's own client speaks vLLM's dialect, and so does the gateway.  What changes: the trainer joins no NCCL
group with engines that come and go, it publishes versions; and a batch of prompts is not one request, which
would run on one engine and begin again when that lets go of it, but one turn for each sample.

Written for TRL 1.16.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rose.adapters.publishing import WeightStream

if TYPE_CHECKING:
    from trl.generation.vllm_client import VLLMClient


SAMPLES_AT_ONCE = 256
"""Turns of one client that run at the same time."""
RAW = "raw_logprobs"
"""vLLM's default."""


@contextlib.contextmanager
def through_rose(
    weights: WeightStream, *, timeout_s: float = 600, logprobs_mode: str = RAW
) -> Iterator[None]:
    """Trainers that are made inside get a client that publishes through `weights`.

    After each update the trainer waits until a replica runs it, at most `timeout_s`.  `logprobs_mode` says
    how the replicas were started, in `engine_args`: TRL wants `--logprobs-mode processed_logprobs` to correct
    for what differs between trainer and engine, and warns of anything else.
    """
    from trl.generation import vllm_generation  # noqa: PLC0415

    kind = vllm_generation.VLLMClient

    def make(*arguments: Any, **options: Any) -> VLLMClient:
        return client(weights, *arguments, timeout_s=timeout_s, logprobs_mode=logprobs_mode, **options)

    vllm_generation.VLLMClient = make
    try:
        yield
    finally:
        vllm_generation.VLLMClient = kind


def client(
    weights: WeightStream,
    *arguments: Any,
    timeout_s: float = 600,
    logprobs_mode: str = RAW,
    **options: Any,
) -> VLLMClient:
    """TRL's client; `arguments` and `options` are those of its constructor."""
    from requests.adapters import HTTPAdapter  # noqa: PLC0415

    made: VLLMClient = _client_class()(*arguments, **options)
    made.weights = weights
    made.weights_timeout_s = timeout_s
    made.logprobs_mode = logprobs_mode
    retries = made.session.get_adapter(made.base_url).max_retries
    made.session.mount("http://", HTTPAdapter(pool_maxsize=SAMPLES_AT_ONCE, max_retries=retries))
    return made


@lru_cache(maxsize=1)
def _client_class() -> type[VLLMClient]:
    from trl.generation.vllm_client import VLLMClient  # noqa: PLC0415

    class RoseVLLMClient(VLLMClient):  # type: ignore[misc]
        """Generates as TRL's client does; its weight updates are versions on the relay."""

        weights: WeightStream
        weights_timeout_s: float
        logprobs_mode: str
        _collecting = False
        _turn = threading.local()

        def generate(
            self, prompts: list[Any], features: list[Any] | None = None, n: int = 1, **options: Any
        ) -> dict[str, Any]:
            """As TRL's, each sample in a turn of its own; images stay as they are."""
            if features is not None:
                return dict(super().generate(prompts, features, n, **options))
            seed = (options.get("generation_kwargs") or {}).get("seed")
            run = uuid.uuid4().hex

            def sample(place: int) -> dict[str, Any]:
                asked = dict(options)
                if seed is not None:
                    asked["generation_kwargs"] = options["generation_kwargs"] | {"seed": seed + place}
                self._turn.headers = {
                    "x-rose-job": self.weights.job.name,
                    "x-rose-group": f"{run}-{place // n}",
                    "x-rose-turn-id": f"{run}-{place}",
                }
                try:
                    return dict(generate([prompts[place // n]], **asked))
                finally:
                    self._turn.headers = None

            generate = super().generate
            with ThreadPoolExecutor(min(SAMPLES_AT_ONCE, n * len(prompts) or 1)) as threads:
                parts = list(threads.map(sample, range(n * len(prompts))))
            together: dict[str, Any] = {
                name: [part[name][0] for part in parts] for name in ("prompt_ids", "completion_ids")
            }
            for name in ("logprobs", "logprob_token_ids"):
                shown = all(part[name] is not None for part in parts)
                together[name] = [part[name][0] for part in parts] if shown and parts else None
            return together | {"prompt_ids": together["prompt_ids"][::n]}

        def _post(self, url: str, **options: Any) -> dict[str, Any]:
            if headers := getattr(self._turn, "headers", None):
                options["headers"] = headers
            return dict(super()._post(url, **options))

        def get_server_info(self) -> dict[str, Any]:
            """What TRL reads of the server's configuration, which the gateway does not show."""
            return {"model_config": {"logprobs_mode": self.logprobs_mode}, "lora_config": None}

        def init_communicator(self, device: Any = 0) -> None:
            """There is no group to join."""

        def close_communicator(self) -> None:
            """Nor to leave."""

        @contextlib.contextmanager
        def weight_update(self) -> Iterator[None]:
            """All updates inside make one version; none, if the block fails."""
            self._collecting = True
            try:
                yield
            except BaseException:
                self.weights.drop()
                raise
            finally:
                self._collecting = False
            self.weights.publish(timeout_s=self.weights_timeout_s)

        def update_named_params(self, metadata: Any, named_params: Iterable[tuple[str, Any]]) -> None:
            """Take parameters; outside `weight_update` they are a version of their own."""
            self.weights.take(named_params)
            if not self._collecting:
                self.weights.publish(timeout_s=self.weights_timeout_s)

    return RoseVLLMClient
