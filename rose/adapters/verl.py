"""verl: rollout replicas that stand for ROSE's gateway, and a checkpoint engine that publishes versions.

    VERL_USE_EXTERNAL_MODULES=rose.adapters.verl python -m verl.trainer.main_ppo \\
        actor_rollout_ref.rollout.name=rose \\
        +actor_rollout_ref.rollout.engine_kwargs.rose.url=http://127.0.0.1:7700 \\
        +actor_rollout_ref.rollout.engine_kwargs.rose.job=grpo ...

verl's agent loops ask a replica for tokens by a Ray call; here its actor asks the gateway, over HTTP, in
vLLM's token dialect.  No engine is started: ROSE has its own.  Importing this module needs verl 0.9.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from rose.adapters.publishing import WeightStream
from rose.client import Job, Scheduler
from rose.config import load
from rose.errors import ConfigError, NotReady

NAME = "rose"
_KEYS = frozenset({"url", "job", "token_file"})
_PAUSE_S = 0.2
_ATTEMPTS = 8
"""Sends of one request whose connection breaks; it carries an id, so it runs once."""


class GatewayServer:
    """What verl calls on the server of a replica, towards the gateway."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings` are `engine_kwargs.rose`: url, job, and token_file if the gateway asks for a token."""
        if unknown := set(settings) - _KEYS:
            raise ConfigError(f"engine_kwargs.{NAME}: unknown {min(unknown)!r}", f"known: {sorted(_KEYS)}")
        if not settings.get("url") or not settings.get("job"):
            raise ConfigError(f"engine_kwargs.{NAME} must name `url` and `job`")
        self._url = str(settings["url"]).rstrip("/")
        self._headers = {"x-rose-job": str(settings["job"])}
        if settings.get("token_file"):
            from rose.secret import read_secret  # noqa: PLC0415

            token = read_secret(Path(str(settings["token_file"])), "token_file")
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: aiohttp.ClientSession | None = None

    @property
    def address(self) -> str:
        """`host:port`, as verl names servers."""
        return urlsplit(self._url).netloc

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **others: Any
    ) -> TokenOutput:
        """Tokens after `prompt_ids`.  Raises NotReady when the gateway cannot be reached, ConfigError.

        `sampling_params` are vLLM's, with verl's `max_new_tokens` for `max_tokens` and a boolean `logprobs`.
        """
        if used := [name for name, value in others.items() if value]:
            raise ConfigError(f"{min(used)} is not supported through ROSE's gateway")
        sampling = dict(sampling_params)
        if "max_new_tokens" in sampling:
            sampling["max_tokens"] = sampling.pop("max_new_tokens")
        wants_logprobs = bool(sampling.pop("logprobs", False))
        if wants_logprobs:
            sampling["logprobs"] = 0
        body = {"token_ids": list(prompt_ids), "sampling_params": sampling, "request_id": request_id}
        # With `full_determinism` verl gives all turns of a trajectory the same id.
        prompt = hashlib.blake2b(repr(body["token_ids"]).encode(), digest_size=8).hexdigest()
        headers = {"x-rose-turn-id": f"{request_id}-{prompt}"}
        answer = await self._post("/inference/v1/generate", body, headers)
        (choice,) = answer["choices"]
        entries = (choice["logprobs"] or {}).get("content") if wants_logprobs else None
        return TokenOutput(
            token_ids=choice["token_ids"],
            log_probs=None if entries is None else [entry["logprob"] for entry in entries],
            stop_reason="aborted" if choice["finish_reason"] == "abort" else "completed",
            extra_fields={"weight_versions": answer["rose"]["weight_versions"]},
        )

    async def abort_all_requests(self, **_: Any) -> None:
        """Stop turns where they are; they keep their tokens and go on at `resume_generation`."""
        await self._post("/pause?mode=keep", {}, {})

    async def resume_generation(self) -> None:
        """Let turns go on, on the version that was published meanwhile."""
        await self._post("/resume", {}, {})

    async def clear_kv_cache(self) -> None:
        """Match no prefix from before."""
        await self._post("/reset_prefix_cache", {}, {})

    async def nothing(self, *_: Any, **__: Any) -> None:
        """Memory and profiles of engines are ROSE's matter."""

    sleep = wake_up = release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=self._headers, timeout=aiohttp.ClientTimeout(total=None)
            )
        failure = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_PAUSE_S * 2**attempt)
            try:
                async with self._session.post(self._url + path, json=body, headers=headers) as response:
                    answer: dict[str, Any] = await response.json()
            except (aiohttp.ClientError, ConnectionError) as error:
                failure = str(error) or type(error).__name__
                continue
            if response.status < 400:
                return answer
            failure = f"status {response.status}: {answer.get('error', {}).get('message')}"
            if response.status not in (429, 500, 502, 503):
                raise ConfigError(f"{self._url}{path}: {failure}")
        raise NotReady(f"{self._url}{path}: {failure}", f"{_ATTEMPTS} attempts failed")


class SilentWorker:
    """What takes part in verl's weight updates for a replica, which has to have a worker."""

    def execute_checkpoint_engine(self, method: str, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to prepare, to join or to finalise."""
        return {}

    def update_weights(self, global_steps: int | None = None) -> None:
        """ROSE's engines pull from the relay."""


class RoseReplica(RolloutReplica):  # type: ignore[misc]
    """A replica without an engine of its own: its server is an actor that asks the gateway."""

    async def init_hybrid(self, worker_group: Any) -> None:
        """The trainer's workers have no engine beside them."""
        await self.launch_servers()

    async def init_standalone(self) -> None:
        """No pool of GPUs is taken."""
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Actors that take no CPU of their own."""
        settings = dict(self.config.engine_kwargs.get(NAME) or {})
        server = ray.remote(num_cpus=0, max_concurrency=self.max_concurrency)(GatewayServer).remote(settings)
        self.servers = [server]
        self.workers = [ray.remote(num_cpus=0)(SilentWorker).remote()]
        self._server_handle = server
        self._server_address = GatewayServer(settings).address


@CheckpointEngineRegistry.register(NAME)
class RoseCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Publishes the trainer's weights on ROSE's relay, from where the engines pull them."""

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        url: str,
        job: str,
        checkpoint: str,
        config: str,
        timeout_s: float = 600,
    ) -> None:
        """`checkpoint` is the directory that engines started from, `config` a rose.toml with the relay."""
        self._is_master = is_master
        self._job = Job(Scheduler(url), job)
        self._checkpoint, self._config, self._timeout_s = Path(checkpoint), Path(config), timeout_s
        self._stream: WeightStream | None = None

    def prepare(self) -> dict[str, Any]:
        """Nothing to exchange."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Nobody talks to anybody: rank 0 publishes."""
        return {"rank": list(range(actor_wg_world_size))}, {"rank": [-1] * rollout_world_size}

    def init_process_group(self, rank: int, **_: Any) -> None:
        """Remember whether this worker publishes."""
        self._is_master = rank == 0

    def finalize(self) -> None:
        """Nothing was allocated."""

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        """Publish; every rank takes part in gathering, rank 0 keeps what comes."""
        if not self._is_master:
            for _ in weights:
                pass
            return
        if self._stream is None:
            self._stream = WeightStream.connect(load(self._config).relay, self._job, self._checkpoint)
        self._stream.send(weights, timeout_s=self._timeout_s)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Nothing: engines pull from the relay."""
        nothing: tuple[tuple[str, torch.Tensor], ...] = ()
        for pair in nothing:
            yield pair


RolloutReplicaRegistry.register(NAME, lambda: RoseReplica)
