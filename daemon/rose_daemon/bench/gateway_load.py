"""The load of `rose bench gateway`: streams that ask for one turn after the other, as cheaply as may be."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import msgspec
import numpy as np

from rose.errors import EngineFailed
from rose_daemon.bench.gateway_engines import MODEL

_TOKEN = b'"text":"'
_WARM_UP_S = 1.0
_TURNS = 8
_END = b"0\r\n\r\n"


@dataclass
class Figures:
    """What one run of the load saw."""

    ttft_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    turns: int = 0
    elapsed_s: float = 0.0
    errors: int = 0
    counting: bool = True
    """Within the measured time."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens, which are chunks here."""
        return self.tokens / self.elapsed_s if self.elapsed_s else 0.0


def p99(figures: Figures) -> float:
    """99th percentile of the time to the first token, in ms."""
    return float(np.percentile(figures.ttft_ms, 99)) if figures.ttft_ms else float("inf")


@dataclass(frozen=True)
class Ask:
    """One kind of turn; the output is between half and one and a half times as long."""

    prompt_tokens: int = 64
    output_tokens: int = 128


class Stream(asyncio.Protocol):
    """One connection: sends a request, counts the tokens of its answer.

    Chunks are not parsed: a token is where `"text":"` stands, also across two reads.
    """

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._done: asyncio.Future[None] | None = None
        self._first_s = 0.0
        self.tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(EngineFailed("the connection was closed in the middle of an answer"))

    def data_received(self, data: bytes) -> None:
        """As asyncio."""
        seen = self._tail + data
        found = seen.count(_TOKEN)
        if found and not self.tokens:
            self._first_s = time.perf_counter()
        self.tokens += found
        if self._figures.counting:
            self._figures.tokens += found
        self._tail = seen[-(len(_TOKEN) - 1) :]
        if seen.endswith(_END) and self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def ask(self, request: bytes) -> float:
        """Send a request and read its answer; the time to the first token in ms.  Raises EngineFailed."""
        assert self._transport is not None, "not connected"
        self._done = asyncio.get_running_loop().create_future()
        self._tail, self.tokens = b"", 0
        sent_s = time.perf_counter()
        self._transport.write(request)
        await self._done
        if not self.tokens:
            raise EngineFailed("an answer without a token")
        return (self._first_s - sent_s) * 1000

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()


def request_of(url: str, ask: Ask, rng: random.Random, trajectory: str = "") -> bytes:
    """The bytes of one streamed completion."""
    body = msgspec.json.encode(
        {
            "model": MODEL,
            "prompt": [rng.randrange(1, 30_000) for _ in range(ask.prompt_tokens)],
            "max_tokens": rng.randint(max(1, ask.output_tokens // 2), ask.output_tokens * 3 // 2),
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    )
    named = f"x-rose-trajectory: {trajectory}\r\n" if trajectory else ""
    return f"{head}{named}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def connect(url: str, figures: Figures) -> Stream:
    """A connection to a gateway or an engine."""
    parts = urlsplit(url)
    assert parts.hostname is not None, url
    assert parts.port is not None, url
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: Stream(figures), parts.hostname, parts.port)
    return stream


async def run_for(urls: Sequence[str], streams: int, ask: Ask, seconds: float, seed: int) -> Figures:
    """Keep `streams` turns going at a time, and count for so many seconds once they go.

    Stream i asks `urls[i % len(urls)]`.
    """
    figures = Figures(counting=False)
    rng = random.Random(seed)
    tasks = [
        asyncio.create_task(_stream(urls[number % len(urls)], ask, figures, f"{seed}-{number}", rng.random()))
        for number in range(streams)
    ]
    await asyncio.sleep(min(_WARM_UP_S, seconds))
    figures.counting, began_s = True, time.perf_counter()
    await asyncio.sleep(seconds)
    figures.counting, figures.elapsed_s = False, time.perf_counter() - began_s
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return figures


async def run_turns(urls: Sequence[str], streams: int, ask: Ask, turns: int, seed: int) -> Figures:
    """Run so many turns in all, `streams` at a time."""
    figures = Figures()
    rng = random.Random(seed)
    each, more = divmod(turns, streams)
    began_s = time.perf_counter()
    await asyncio.gather(
        *(
            _stream(
                urls[number % len(urls)],
                ask,
                figures,
                f"{seed}-{number}",
                rng.random(),
                each + (number < more),
            )
            for number in range(streams)
        )
    )
    figures.elapsed_s = time.perf_counter() - began_s
    return figures


async def _stream(
    url: str, ask: Ask, figures: Figures, name: str, seed: float, turns: int | None = None
) -> None:
    """One turn after the other, so many or without end, `_TURNS` to a trajectory."""
    rng = random.Random(seed)
    connection = await connect(url, figures)
    numbers = itertools.count() if turns is None else iter(range(turns))
    try:
        for number in numbers:
            counted = figures.counting
            try:
                ttft_ms = await connection.ask(request_of(url, ask, rng, f"bench-{name}-{number // _TURNS}"))
            except EngineFailed:
                figures.errors += 1
                connection = await connect(url, figures)
                continue
            if counted:
                figures.ttft_ms.append(ttft_ms)
            figures.turns += 1
    finally:
        connection.close()


async def hang_up(url: str, count: int, ask: Ask, *, at_once: int, within_s: float, seed: int) -> None:
    """Begin `count` turns, and hang up on each at a random time."""
    rng = random.Random(seed)
    room = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with room:
            connection = await connect(url, Figures())
            asking = asyncio.ensure_future(connection.ask(request_of(url, ask, rng, f"gone-{seed}-{number}")))
            await asyncio.wait({asking}, timeout=rng.uniform(0, within_s))
            connection.close()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    await asyncio.gather(*map(one, range(count)))
