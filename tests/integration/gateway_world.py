"""A small world for gateway tests: mock engines, a node that speaks rose.wire, the real scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec
import openai
import zmq
import zmq.asyncio
from aiohttp import web
from rose_daemon import mock_model
from rose_daemon.mock_engine import MockState, build_app
from rose_daemon.scheduler.process import Scheduler, running
from waiting import until

from rose import wire
from rose.config import SchedulerConfig
from rose.core.events import ReplicaReport
from rose.units import NodeId, ReplicaId, WeightVersion

MODEL = "rollout"
MESSAGES = [{"role": "user", "content": "Which way to the goal?"}]


def expected(
    prompt: list[int], count: int, version: int = 0, *, ignore_eos: bool = True
) -> tuple[list[int], str]:
    """Tokens and text of an undisturbed run."""
    tokens: list[int] = []
    stream, text = mock_model.TextStream(), ""
    while len(tokens) < count:
        token = mock_model.sample([*prompt, *tokens], version).token
        tokens.append(token)
        if token == mock_model.EOS and not ignore_eos:
            break
        text += stream.feed(token)
    return tokens, text


class Engine:
    """A mock engine in this process."""

    def __init__(self, state: MockState) -> None:
        self.state = state
        self.url = ""
        self._runner = web.AppRunner(build_app(state), handler_cancellation=True, shutdown_timeout=0.05)

    async def start(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        await self._runner.cleanup()

    def report(self, *, state: str = "ready", kind: str = "dedicated") -> ReplicaReport:
        return ReplicaReport(
            replica=ReplicaId(self.state.name),
            kind=kind,
            state=state,
            url=self.url,
            model=self.state.model,
            weight_version=WeightVersion(self.state.version),
            gate_open=True,
            kv_budget_tokens=1 << 20,
            context_tokens_max=self.state.context_tokens_max,
        )


class Node:
    """What rosed is to the scheduler."""

    def __init__(
        self, address: str, reports: Callable[[], Iterable[ReplicaReport]], name: str = "node-0"
    ) -> None:
        self._reports = reports
        self._name = NodeId(name)
        self._session = f"{name}-{time.monotonic_ns()}"
        self._sequence = 0
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self.received: list[wire.ToNode] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Self:
        await self.register()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]
        return self

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def beat_now(self) -> None:
        self._sequence += 1
        await self.send(wire.Heartbeat(self._name, self._session, self._sequence, tuple(self._reports())))

    async def send(self, message: wire.ToScheduler) -> None:
        await self._socket.send(wire.pack(message))

    async def send_raw(self, data: bytes) -> None:
        await self._socket.send(data)

    def got(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]

    async def register(self) -> None:
        await self.send(wire.Register(wire.PROTOCOL, self._name, self._session, tuple(self._reports())))

    async def _beat(self) -> None:
        while True:
            await self.beat_now()
            await asyncio.sleep(0.05)

    async def _listen(self) -> None:
        while True:
            message = wire.unpack_to_node(await self._socket.recv())
            self.received.append(message)
            if isinstance(message, wire.Unregistered):
                await self.register()


class World:
    """Everything, with shortcuts for tests."""

    def __init__(self, scheduler: Scheduler, engines: list[Engine], node: Node) -> None:
        self.scheduler = scheduler
        self.engines = engines
        self.node = node
        self.url = scheduler.gateway_url
        self.http = aiohttp.ClientSession()
        self.openai = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """POST JSON (or raw bytes) and read a JSON answer."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(self.url + path, data=data, headers=named) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()

    async def turns(self) -> dict[str, int]:
        _, status = await self.get("/rose/v1/status")
        counts: dict[str, int] = status["turns"]
        live = counts["queued"] + counts["in_flight"]
        assert counts["arrived"] == counts["finished"] + counts["failed"] + counts["cancelled"] + live
        return counts

    async def ready(self, replicas: int | None = None) -> None:
        """Wait until the job may use that many replicas (default: all)."""
        wanted = len(self.engines) if replicas is None else replicas

        async def eligible() -> bool:
            _, status = await self.get("/rose/v1/status")
            return sum(replica["eligible"] for replica in status["replicas"]) == wanted

        await until(eligible)

    def busy(self) -> Engine:
        """The engine that runs the only request."""
        (engine,) = [engine for engine in self.engines if engine.state.requests]
        return engine

    async def running_turn(self, tokens: int = 5) -> Engine:
        """Wait until one engine has produced tokens of the only turn."""
        before = sum(engine.state.tokens for engine in self.engines)
        await until(lambda: sum(engine.state.tokens for engine in self.engines) >= before + tokens)
        return self.busy()


@contextlib.asynccontextmanager
async def world(
    state_dir: Path, *, engines: int = 2, job: bool = True, token_ms: float = 2.0, **config: Any
) -> AsyncIterator[World]:
    """A scheduler with `engines` dedicated mock replicas and, unless told otherwise, a job on all of them."""
    states = [MockState(name=f"replica-{index}", token_ms=token_ms) for index in range(engines)]
    started = [await Engine(state).start() for state in states]
    settings = SchedulerConfig(
        control="tcp://127.0.0.1:0", gateway_port=0, state_dir=str(state_dir / "scheduler"), **config
    )
    async with running(settings) as scheduler:
        node = await Node(scheduler.nodes.address, lambda: [engine.report() for engine in started]).start()
        made = World(scheduler, started, node)
        try:
            if job:
                await made.post("/rose/v1/jobs", {"job": "job-0", "model": MODEL, "n_rl": engines})
                await made.ready()
            yield made
        finally:
            await made.http.close()
            await made.openai.close()
            await node.stop()
            for engine in started:
                await engine.stop()
