"""`RewardPool`: reward functions on HTTP endpoints, away from the trainer (RollArt, arXiv 2512.22560).

    async with RewardPool(["http://scorer-0:9000/score", "http://scorer-1:9000/score"]) as rewards:
        scores = await asyncio.gather(*(rewards.score({"answer": text}) for text in answers))

Only for rewards without state: a call whose answer did not come is sent again, maybe to another endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec

from rose.errors import ConfigError, NotReady

_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_PAUSE_MAX_S = 10.0


class RewardLoad(NamedTuple):
    """What an autoscaler goes by."""

    waiting: int
    """Calls that no endpoint has room for."""
    in_flight: int
    room: int
    """Calls that all endpoints together may run at a time."""


@dataclass(slots=True)
class _Endpoint:
    """One URL."""

    url: str
    in_flight: int = 0
    failures: int = 0
    """In a row."""


class RewardPool:
    """Sends each call to the endpoint with the fewest in flight; those that fail come last."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        calls_per_endpoint_max: int = 32,
        queue_max: int = 4096,
        timeout_s: float = 30.0,
        attempts_max: int = 4,
        pause_s: float = 0.2,
        on_load: Callable[[RewardLoad], None] | None = None,
    ) -> None:
        """`timeout_s` is of one attempt; `pause_s` the first pause between two, doubled each time.

        `on_load` is the hook for an autoscaler: called whenever a call begins to wait or ends; it may start
        endpoints and, when they are up, have `set_endpoints` called.
        """
        if min(calls_per_endpoint_max, queue_max, attempts_max) < 1 or timeout_s <= 0 or pause_s < 0:
            raise ConfigError("a reward pool needs limits of at least 1 and a time-out above 0")
        self._each_max, self._queue_max = calls_per_endpoint_max, queue_max
        self._timeout_s, self._attempts_max, self._pause_s = timeout_s, attempts_max, pause_s
        self._on_load = on_load
        self._endpoints: dict[str, _Endpoint] = {}
        self._waiting = 0
        self._freed = asyncio.Condition()
        self._session: aiohttp.ClientSession | None = None
        self._replace(urls)

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def load(self) -> RewardLoad:
        """Now."""
        in_flight = sum(endpoint.in_flight for endpoint in self._endpoints.values())
        return RewardLoad(self._waiting, in_flight, self._each_max * len(self._endpoints))

    async def set_endpoints(self, urls: Sequence[str]) -> None:
        """From now on use these; calls in flight elsewhere go on."""
        self._replace(urls)
        async with self._freed:
            self._freed.notify_all()

    async def score(self, call: dict[str, Any]) -> dict[str, Any]:
        """POST `call` as JSON and return the JSON object that comes back.

        Raises NotReady when the queue is full or all attempts failed, ConfigError when an endpoint refuses
        the call (a 4xx that another attempt would not change) or answers with something else than an object.
        """
        assert self._session is not None, "use the pool as a context manager"
        failure, failed = "", ""
        for attempt in range(self._attempts_max):
            if attempt:
                await asyncio.sleep(min(_PAUSE_MAX_S, self._pause_s * 2 ** (attempt - 1)))
            endpoint = await self._seize(failed)
            try:
                async with self._session.post(endpoint.url, json=call) as response:
                    data = await response.read()
                if response.status not in _TRY_AGAIN:
                    endpoint.failures = 0
                    return _decoded(endpoint.url, response.status, data)
                failure = f"status {response.status}"
            except (aiohttp.ClientError, TimeoutError) as error:
                failure = str(error) or type(error).__name__
            finally:
                await self._release(endpoint)
            endpoint.failures += 1
            failed = endpoint.url
        raise NotReady(f"{failed}: {failure}", f"{self._attempts_max} attempts at a reward failed")

    def _replace(self, urls: Sequence[str]) -> None:
        for url in urls:
            if urlsplit(url).scheme not in {"http", "https"}:
                raise ConfigError(f"{url!r} is not the address of a reward endpoint", "http://host:port/path")
        if not urls:
            raise ConfigError("a reward pool needs at least one endpoint")
        self._endpoints = {url: self._endpoints.get(url) or _Endpoint(url) for url in urls}

    async def _seize(self, failed: str) -> _Endpoint:
        """Room on an endpoint, on another than the one that just `failed` if there is a choice."""
        async with self._freed:
            if (found := self._free(failed)) is None:
                if self._waiting >= self._queue_max:
                    raise NotReady(f"{self._waiting} rewards wait already", "start more reward endpoints")
                self._waiting += 1
                try:
                    self._tell()
                    while (found := self._free(failed)) is None:
                        await self._freed.wait()
                except asyncio.CancelledError:
                    self._freed.notify()  # the room may have been meant for this caller
                    raise
                finally:
                    self._waiting -= 1
            found.in_flight += 1
            return found

    def _free(self, failed: str) -> _Endpoint | None:
        roomy = (each for each in self._endpoints.values() if each.in_flight < self._each_max)
        return min(roomy, key=lambda each: (each.url == failed, each.failures, each.in_flight), default=None)

    async def _release(self, endpoint: _Endpoint) -> None:
        endpoint.in_flight -= 1
        async with self._freed:
            self._freed.notify()
        self._tell()

    def _tell(self) -> None:
        if self._on_load is not None:
            self._on_load(self.load)


def _decoded(url: str, status: int, data: bytes) -> dict[str, Any]:
    shown = data[:200].decode("utf-8", errors="replace")
    if status >= 400:
        raise ConfigError(f"{url}: status {status}: {shown}")
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        raise ConfigError(f"{url}: not a JSON object: {shown}") from None
