"""What the benchmark reads of the two engines: boards, step logs, metrics, processes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from rose.boards import WatchedBoard
from rose.core.attribution import Span
from rose.core.readings import GateTransition, ReplicaReading, SlackReading, Unknown
from rose.errors import EngineFailed, NotReady
from rose.journals import GATES, read_gates
from rose.units import ReplicaId
from rose_daemon.harness.load import Target
from rose_daemon.harness.stack import SERVING_NAME, Stack
from rose_daemon.harness.steps import StepCollector

REPLICA = ReplicaId("opportunistic-0")
DRAIN_TIMEOUT_S = 60.0


class Counters(msgspec.Struct, frozen=True):
    """Both boards and the rollout engine's tokens at one instant."""

    at_ns: int
    slack: SlackReading
    replica: ReplicaReading
    generated: int


class Probe:
    """Looks at the engines of a stack."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._slack = WatchedBoard(stack.boards.slack(SERVING_NAME), SlackReading)
        self._replica = WatchedBoard(stack.boards.replica(REPLICA), ReplicaReading)
        self.serving_steps = StepCollector(stack.boards.steps(SERVING_NAME))
        self.rollout_steps = StepCollector(stack.boards.steps(REPLICA))

    @contextlib.asynccontextmanager
    async def collecting(self) -> AsyncIterator[None]:
        """Fetch the step logs meanwhile."""
        tasks = [asyncio.create_task(each.run()) for each in (self.serving_steps, self.rollout_steps)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    def forget_steps(self) -> None:
        """Keep no step that was logged so far."""
        self.serving_steps.forget()
        self.rollout_steps.forget()

    def collect_steps(self) -> None:
        """Fetch what is in the logs now."""
        self.serving_steps.collect()
        self.rollout_steps.collect()

    def serving_works(self) -> bool:
        """Whether the serving engine has a step in flight."""
        return bool(_read(self._slack).in_step)

    def rollout_works(self) -> bool:
        """Whether the rollout engine has a step in flight."""
        activity = self._replica.activity
        if activity is None:
            _read(self._replica)  # opens the board
            activity = self._replica.activity
        return activity is not None and activity.working

    def gate_open(self, start_ns: int, end_ns: int) -> list[Span]:
        """When the rollout engine's gate was open, by rosed's journal."""
        journal = Path(self._stack.config.node.state_dir) / GATES
        transitions = [entry.as_transition() for entry in read_gates(journal, REPLICA)]
        return open_spans(transitions, start_ns, end_ns)

    async def counters(self, client: aiohttp.ClientSession) -> Counters:
        """Everything that counts, now.  Raises NotReady, EngineFailed."""
        generated = await generated_tokens(client, self._stack.replica(REPLICA))
        return Counters(time.monotonic_ns(), _read(self._slack), _read(self._replica), generated)

    async def workers(self, client: aiohttp.ClientSession, target: Target) -> list[int]:
        """Pids of an engine's workers.  Raises EngineFailed."""
        about = await engine_facts(client, target, self._stack.engine_token)
        return [worker["pid"] for worker in about["workers"]]

    async def drain(self, client: aiohttp.ClientSession) -> None:
        """Abort what is left in the rollout engine, until it is idle.  Raises EngineFailed."""
        url = f"{self._stack.replica(REPLICA).url}/rose/v1/abort"
        headers = {"Authorization": f"Bearer {self._stack.engine_token}"}
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        while time.monotonic() < deadline_s:
            async with client.post(url, json={"all": True}, headers=headers) as response:
                if response.status != 200:
                    raise EngineFailed(f"{url} answered {response.status}: {(await response.text())[:200]}")
            await asyncio.sleep(0.3)
            reading = _read(self._replica)
            if not reading.running and not reading.waiting:
                return
        raise EngineFailed(f"{REPLICA} still has requests {DRAIN_TIMEOUT_S:.0f} s after they were aborted")


def open_spans(transitions: Iterable[GateTransition], start_ns: int, end_ns: int) -> list[Span]:
    """When a gate was open between two instants, by its transitions."""
    spans: list[Span] = []
    opened_ns: int | None = None
    for transition in transitions:
        if opened_ns is not None:
            spans.append(Span(opened_ns, transition.at_ns))
        opened_ns = transition.at_ns if transition.tokens else None
    if opened_ns is not None:
        spans.append(Span(opened_ns, end_ns))
    cut = (Span(max(span.start_ns, start_ns), min(span.end_ns, end_ns)) for span in spans)
    return [span for span in cut if span.end_ns > span.start_ns]


def _read(board: WatchedBoard[Any]) -> Any:
    reading = board.read(time.monotonic_ns(), None)
    if isinstance(reading, Unknown):
        raise NotReady(f"{board.path}: {reading}")
    return reading


async def generated_tokens(client: aiohttp.ClientSession, target: Target) -> int:
    """Tokens an engine has generated since its start, from its metrics.  Raises EngineFailed."""
    try:
        async with client.get(f"{target.url}/metrics") as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineFailed(f"{target.url}/metrics: {error}") from None
    for family in text_string_to_metric_families(text):
        if family.name == "vllm:generation_tokens":
            return int(sum(one.value for one in family.samples if one.name.endswith("_total")))
    raise EngineFailed(f"{target.url}/metrics has no vllm:generation_tokens_total")


async def engine_facts(client: aiohttp.ClientSession, target: Target, token: str) -> dict[str, Any]:
    """What an engine says of itself, its processes included.  Raises EngineFailed."""
    url = f"{target.url}/rose/v1/engine"
    try:
        async with client.get(url, headers={"Authorization": f"Bearer {token}"}) as response:
            if response.status == 200:
                return dict(await response.json())
            raise EngineFailed(f"{url} answered {response.status}: {(await response.text())[:200]}")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineFailed(f"{url}: {error}") from None
