"""TRL: `trl.generation.vllm_client.VLLMClient`, with weights that go through ROSE's relay.

    with WeightStream.connect(load(Path("rose.toml")).relay, job, Path("/models/policy")) as weights:
        with through_rose(weights):
            trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="server",
                                                       vllm_server_base_url="http://127.0.0.1:7700"))
        trainer.train()

Generation needs none of this: TRL's own client speaks vLLM's dialect, and so does the gateway.  What changes
is that the trainer joins no NCCL group with engines that come and go: it publishes versions.

Written for TRL 1.16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rose.adapters.publishing import WeightStream

if TYPE_CHECKING:
    from trl.generation.vllm_client import VLLMClient


@contextlib.contextmanager
def through_rose(weights: WeightStream, *, timeout_s: float = 600) -> Iterator[None]:
    """Trainers that are made inside get a client that publishes through `weights`.

    After each update the trainer waits until a replica runs it, at most `timeout_s`.
    """
    from trl.generation import vllm_generation  # noqa: PLC0415

    kind = vllm_generation.VLLMClient

    def make(*arguments: Any, **options: Any) -> VLLMClient:
        return client(weights, *arguments, timeout_s=timeout_s, **options)

    vllm_generation.VLLMClient = make
    try:
        yield
    finally:
        vllm_generation.VLLMClient = kind


def client(weights: WeightStream, *arguments: Any, timeout_s: float = 600, **options: Any) -> VLLMClient:
    """TRL's client; `arguments` and `options` are those of its constructor."""
    made: VLLMClient = _client_class()(*arguments, **options)
    made.weights = weights
    made.weights_timeout_s = timeout_s
    return made


@lru_cache(maxsize=1)
def _client_class() -> type[VLLMClient]:
    from trl.generation.vllm_client import VLLMClient  # noqa: PLC0415

    class RoseVLLMClient(VLLMClient):  # type: ignore[misc]
        """Generates as TRL's client does; its weight updates are versions on the relay."""

        weights: WeightStream
        weights_timeout_s: float
        _collecting = False

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
