"""The load of `rose bench gateway`: streams that ask for one turn after the other, as cheaply as may be."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
import numpy as np

from rose.errors import EngineFailed
from rose_daemon.bench.gateway_engines import MODEL

_TOKEN = b'"text":"'
_WARM_UP_S = 1.0
_SAMPLED = 16
_TURNS = 8
_END = b"0\r\n\r\n"


@dataclass
class Figures:
    """What one run of the load saw."""

    ttft_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    """Between reads that brought tokens, of one stream in `_SAMPLED`."""
    tokens: int = 0
    tokens_all: int = 0
    """With those outside the measured time."""
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


def gap_p99(figures: Figures) -> float | None:
    """99th percentile of the time between tokens, or blocks of them, of one turn, in ms."""
    return float(np.percentile(figures.gap_ms, 99)) if figures.gap_ms else None


@dataclass(frozen=True)
class Ask:
    """One kind of turn; the output is between half and one and a half times as long."""

    prompt_tokens: int = 64
    output_tokens: int = 128


class Stream(asyncio.Protocol):
    """One connection: sends a request, counts the tokens of its answer.

    Chunks are not parsed: a token is where `"text":"` stands, also across two reads.
    """

    def __init__(self, figures: Figures, sampled: bool = False) -> None:
        self._figures = figures
        self._sampled = sampled
        self._read_s = 0.0
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
        if found and self._sampled:
            self._note_gap()
        self.tokens += found
        self._figures.tokens_all += found
        if self._figures.counting:
            self._figures.tokens += found
        self._tail = seen[-(len(_TOKEN) - 1) :]
        if seen.endswith(_END) and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _note_gap(self) -> None:
        now_s = time.perf_counter()
        if self.tokens and self._figures.counting:
            self._figures.gap_ms.append((now_s - self._read_s) * 1000)
        self._read_s = now_s

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


async def connect(url: str, figures: Figures, sampled: bool = False) -> Stream:
    """A connection to a gateway or an engine.  Raises EngineFailed."""
    parts = urlsplit(url)
    assert parts.hostname is not None, url
    assert parts.port is not None, url
    loop = asyncio.get_running_loop()
    try:
        _, stream = await loop.create_connection(lambda: Stream(figures, sampled), parts.hostname, parts.port)
    except OSError as error:
        raise EngineFailed(f"{url} takes no connection: {error.strerror or error}") from None
    return stream


async def run_for(urls: Sequence[str], streams: int, ask: Ask, seconds: float, seed: int) -> Figures:
    """Keep `streams` turns going at a time, and count for so many seconds once they go.

    Stream i asks `urls[i % len(urls)]`.  Raises EngineFailed when nobody listens there any more.
    """
    figures = Figures(counting=False)
    rng = random.Random(seed)
    async with _tasks(
        _stream(
            urls[number % len(urls)], ask, figures, f"{seed}-{number}", rng.random(), number % _SAMPLED == 0
        )
        for number in range(streams)
    ) as tasks:
        await _failing(tasks, min(_WARM_UP_S, seconds))
        figures.counting, began_s = True, time.perf_counter()
        await _failing(tasks, seconds)
        figures.counting, figures.elapsed_s = False, time.perf_counter() - began_s
    return figures


async def run_turns(urls: Sequence[str], streams: int, ask: Ask, turns: int, seed: int) -> Figures:
    """Run so many turns in all, `streams` at a time.  Raises EngineFailed as `run_for`."""
    figures = Figures()
    rng = random.Random(seed)
    each, more = divmod(turns, streams)
    began_s = time.perf_counter()
    async with _tasks(
        _stream(
            urls[number % len(urls)],
            ask,
            figures,
            f"{seed}-{number}",
            rng.random(),
            turns=each + (number < more),
        )
        for number in range(streams)
    ) as tasks:
        await _failing(tasks, None)
    figures.elapsed_s = time.perf_counter() - began_s
    return figures


@contextlib.asynccontextmanager
async def _tasks(work: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Tasks that have all ended when the block is left, in whatever way."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _failing(tasks: Collection[asyncio.Task[None]], seconds: float | None) -> None:
    """Wait so long, or until all are done; raises what one of them raised."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


async def _stream(
    url: str,
    ask: Ask,
    figures: Figures,
    name: str,
    seed: float,
    sampled: bool = False,
    turns: int | None = None,
) -> None:
    """One turn after the other, so many or without end, `_TURNS` to a trajectory."""
    rng = random.Random(seed)
    connection = await connect(url, figures, sampled)
    numbers = itertools.count() if turns is None else iter(range(turns))
    try:
        for number in numbers:
            counted = figures.counting
            try:
                ttft_ms = await connection.ask(request_of(url, ask, rng, f"bench-{name}-{number // _TURNS}"))
            except EngineFailed:
                figures.errors += 1
                connection = await connect(url, figures, sampled)
                continue
            if counted:
                figures.ttft_ms.append(ttft_ms)
            figures.turns += 1
    finally:
        connection.close()


async def hang_up(url: str, count: int, ask: Ask, *, at_once: int, within_s: float, seed: int) -> None:
    """Begin `count` turns, and hang up on each at a random time.  Raises EngineFailed as `run_for`."""
    rng = random.Random(seed)
    room = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with room:
            connection = await connect(url, Figures())
            try:
                asking = connection.ask(request_of(url, ask, rng, f"gone-{seed}-{number}"))
                async with asyncio.timeout(rng.uniform(0, within_s)):
                    await asking
            except (TimeoutError, EngineFailed):
                return  # as meant; or the turn was refused, which its count tells
            finally:
                connection.close()

    async with _tasks(map(one, range(count))) as tasks:
        await _failing(tasks, None)
