"""Load on OpenAI-dialect engines: open-loop replay of a trace, and closed-loop completions.

All instants are CLOCK_MONOTONIC nanoseconds seen by this client: what a user of the serving engine would see.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from rose.core.attribution import Wait, decode_wait, first_token_wait
from rose.traces import TraceRequest
from rose.units import NS_PER_MS, NS_PER_S, ms_to_ns

REQUEST_TIMEOUT_S = 120.0
LATE_MS = 25.0
"""A request sent this long after its time counts as late: then the generator was the bottleneck."""


class Target(NamedTuple):
    """An engine to load."""

    url: str
    model: str
    token_ids: int = 256
    """Prompts are random ids below this (the byte tokens of the demo's models)."""


class Budgets(NamedTuple):
    """Latency budgets of serving."""

    ttft_ms: float = 250.0
    tpot_ms: float = 60.0


class RequestRecord(msgspec.Struct):
    """What became of one request."""

    index: int
    planned_ns: int
    prompt_tokens: int
    output_tokens: int
    """Asked for."""
    sent_ns: int = 0
    token_ns: list[int] = []
    """Arrival of every token; tokens that came in one piece have one instant."""
    error: str = ""

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token."""
        return (self.token_ns[0] - self.sent_ns) / NS_PER_MS if self.token_ns else None

    @property
    def tpot_ms(self) -> float | None:
        """(t_last - t_first) / (n - 1); None below two tokens."""
        count = len(self.token_ns)
        return (self.token_ns[-1] - self.token_ns[0]) / (count - 1) / NS_PER_MS if count > 1 else None

    @property
    def gaps_ms(self) -> list[float]:
        """Time from each token to the next."""
        return [(b - a) / NS_PER_MS for a, b in zip(self.token_ns, self.token_ns[1:], strict=False)]

    @property
    def late_ms(self) -> float:
        """How long after its time the request was sent."""
        return (self.sent_ns - self.planned_ns) / NS_PER_MS

    def breach(self, budgets: Budgets) -> str:
        """Which budget the request broke, or an empty string.  A failed request broke them all."""
        if self.error:
            return "failed"
        if not self.token_ns:
            return "ttft"
        return next(iter(self.late_waits(budgets)), "")

    def late_waits(self, budgets: Budgets) -> dict[str, Wait]:
        """What the request waited for longer than its budget allows: `ttft`, `tpot`, both or neither."""
        if not self.token_ns:
            return {}
        first_ns, last_ns = self.token_ns[0], self.token_ns[-1]
        waits = {
            "ttft": first_token_wait(self.sent_ns, first_ns, ms_to_ns(budgets.ttft_ms)),
            "tpot": decode_wait(first_ns, last_ns, len(self.token_ns), ms_to_ns(budgets.tpot_ms)),
        }
        return {budget: wait for budget, wait in waits.items() if wait is not None}


def open_client() -> aiohttp.ClientSession:
    """A session for many streams.  One connection a request: vLLM closes idle ones under our feet."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
    )


def repeat(requests: Sequence[TraceRequest], pause_ns: int = NS_PER_S) -> Iterator[TraceRequest]:
    """The requests again and again, each time later by their span and a pause."""
    span_ns = requests[-1].at_ns + pause_ns
    start_ns = 0
    while True:
        for request in requests:
            yield request._replace(at_ns=start_ns + request.at_ns)
        start_ns += span_ns


class TraceLoad:
    """Open-loop replay: each request is sent when its time has come, whatever became of those before it."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        target: Target,
        seed: int,
        on_done: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self.records: list[RequestRecord] = []
        self._client = client
        self._target = target
        self._rng = random.Random(seed)
        self._on_done = on_done

    async def run(self, requests: Iterator[TraceRequest], stop: asyncio.Event) -> None:
        """Replay until the requests or the time are over, then wait for the answers under way."""
        start_ns = time.monotonic_ns()
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                if await _stopped_before(stop, start_ns + request.at_ns):
                    break
                record = RequestRecord(
                    len(self.records), start_ns + request.at_ns, request.prompt_tokens, request.output_tokens
                )
                self.records.append(record)
                prompt = [self._rng.randrange(self._target.token_ids) for _ in range(request.prompt_tokens)]
                tasks.create_task(self._send(prompt, record))

    async def _send(self, prompt: list[int], record: RequestRecord) -> None:
        await stream_completion(self._client, self._target, prompt, record)
        self._on_done(record)


async def _stopped_before(stop: asyncio.Event, at_ns: int) -> bool:
    """Sleep until `at_ns`; whether the stop came first."""
    wait_s = (at_ns - time.monotonic_ns()) / NS_PER_S
    if wait_s > 0:
        try:
            async with asyncio.timeout(wait_s):
                await stop.wait()
        except TimeoutError:
            return False
    return stop.is_set()


async def stream_completion(
    client: aiohttp.ClientSession, target: Target, prompt: list[int], record: RequestRecord
) -> None:
    """One streamed completion of exactly `record.output_tokens`; fills the record and raises nothing."""
    body = completion_body(target, prompt, record.output_tokens, temperature=0.0) | {"stream": True}
    record.sent_ns = time.monotonic_ns()
    record.token_ns = []
    try:
        async with client.post(f"{target.url}/v1/completions", json=body) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    now_ns = time.monotonic_ns()
                    record.token_ns += [now_ns] * _tokens_in(json.loads(line[6:]))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"
        return
    if len(record.token_ns) != record.output_tokens:
        record.error = f"{len(record.token_ns)} of {record.output_tokens} tokens came"


def completion_body(target: Target, prompt: list[int], tokens: int, *, temperature: float) -> dict[str, Any]:
    """Body of a completion of exactly `tokens` tokens that answers with token ids."""
    return {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": temperature,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _tokens_in(event: dict[str, Any]) -> int:
    if "error" in event:
        raise ValueError(str(event["error"])[:200])
    return sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))


class ClosedLoad:
    """Closed-loop rollout load: `concurrency` clients, each asking again as soon as it is answered."""

    def __init__(self, client: aiohttp.ClientSession, target: Target, seed: int) -> None:
        self.completions = 0
        self.tokens = 0
        self.errors: list[str] = []
        self._client = client
        self._target = target
        self._seed = seed

    async def run(self, concurrency: int, prompt_tokens: int, output_tokens: int) -> None:
        """Ask for ever; cancel to end (the engine drops requests whose client has gone)."""
        async with asyncio.TaskGroup() as tasks:
            for worker in range(concurrency):
                rng = random.Random(f"{self._seed}/{worker}")
                tasks.create_task(self._ask(rng, prompt_tokens, output_tokens))

    async def _ask(self, rng: random.Random, prompt_tokens: int, output_tokens: int) -> None:
        while True:
            prompt = [rng.randrange(self._target.token_ids) for _ in range(prompt_tokens)]
            body = completion_body(self._target, prompt, output_tokens, temperature=1.0)
            try:
                async with self._client.post(f"{self._target.url}/v1/completions", json=body) as response:
                    answer = await response.json(content_type=None)
                    if response.status != 200:
                        raise ValueError(f"HTTP {response.status}: {str(answer)[:200]}")
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.2)
                continue
            self.completions += 1
            self.tokens += _tokens_in(answer)
