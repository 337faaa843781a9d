"""HTTP to engines, for what they stream: each part of a body is handed on as it comes.

A general client passes each token through a buffer, a future and a switch of tasks, which costs more than
all that the gateway does with it.  Here the callback of the socket parses (httptools) and calls the receiver:
once for all that one read brought, be it many chunks, so that the further behind the gateway is, the less a
token costs it.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from rose_daemon.scheduler.pacing import Pacer

KEEP_ALIVE_S = 2.0
"""An idle connection is used again for this long; engines close theirs after five seconds."""
_LAST_CHUNK_S = 1.0
"""How long the end of a body may take after its last event."""


class Receiver(Protocol):
    """Who takes in an answer."""

    def head(self, status: int) -> None:
        """The answer begins."""
        ...

    def block(self, data: bytes) -> bool:
        """Part of the body; True once all that matters has come."""
        ...


class Target(NamedTuple):
    """Where an engine listens."""

    host: str
    port: int


class EngineConnection(asyncio.Protocol):
    """One connection."""

    def __init__(self, pool: EnginePool, target: Target) -> None:
        self._pool = pool
        self._target = target
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._parts: list[bytes] = []
        """Of the body, from the present read, for the receiver."""
        self._done: asyncio.Future[None] | None = None
        self._whole = True
        """No answer is under way."""
        self._reusable = False
        self._expiry: asyncio.TimerHandle | None = None
        self.answered = False
        """A byte of the present answer has come."""

    async def post(self, request: bytes, receiver: Receiver) -> None:
        """Send a request, and wait until its answer is complete, or complete enough for the receiver.

        Raises ConnectionError when the connection ends before, HttpParserError for what is no HTTP.
        Cancelled, it closes the connection, by which engines abort the request.
        """
        self.answered = False
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the engine closed the connection")
        self._receiver = receiver
        self._whole = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        self._done = self._receiver = None
        self._release()

    def close(self) -> None:
        """Hang up."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """As `Stream`."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """As `Stream`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # ---- asyncio's and httptools' callbacks ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """As asyncio."""
        if self._whole and self._done is None:
            self.close()  # nobody asked
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._hand_on()
            self._fail(error)
        else:
            streams = bool(self._parts)
            self._hand_on()
            if streams and self._receiver is not None:
                self._pool.pacer.has_read(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio."""
        self._transport = None
        self._pool.forget(self._target, self)
        # The parser knows this connection: without it the two are freed at once.
        del self._parser
        self._fail(ConnectionResetError("the engine closed the connection"))

    def on_headers_complete(self) -> None:
        """As httptools."""
        if self._receiver is not None:
            self._receiver.head(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        """As httptools."""
        if self._receiver is not None:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """As httptools."""
        self._hand_on()
        self._whole = True
        self._reusable = self._parser.should_keep_alive()
        if self._done is None:
            self._release()
        else:
            self._finish()

    # ---- inside ------------------------------------------------------------------------------------------

    def _hand_on(self) -> None:
        """Give the receiver what has come of the body."""
        parts, receiver = self._parts, self._receiver
        if not parts:
            return
        self._parts = []
        if receiver is None:
            return
        try:
            enough = receiver.block(parts[0] if len(parts) == 1 else b"".join(parts))
        except Exception as error:  # noqa: BLE001 - a fault of the receiver is its own: who waits gets to see it
            self._fail(error)
        else:
            if enough:
                self._finish()

    def _finish(self) -> None:
        self._receiver = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self._receiver = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        elif self._transport is not None:
            self.close()

    def _release(self) -> None:
        """Be used again, once the answer has come to its end."""
        loop = asyncio.get_running_loop()
        if self._expiry is not None:
            self._expiry.cancel()
        if self._transport is None:
            return
        if not self._whole:
            self._expiry = loop.call_later(_LAST_CHUNK_S, self.close)
        elif self._reusable:
            self._parser = httptools.HttpResponseParser(self)
            self._expiry = loop.call_later(KEEP_ALIVE_S, self.close)
            self._pool.keep(self._target, self)
        else:
            self.close()

    def reuse(self) -> None:
        """Taken from the pool."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None


class EnginePool:
    """Connections to all engines."""

    def __init__(self, connect_timeout_s: float, pacer: Pacer) -> None:
        self._connect_timeout_s = connect_timeout_s
        self.pacer = pacer
        self._idle: dict[Target, list[EngineConnection]] = {}
        self._all: set[EngineConnection] = set()

    async def post(
        self, url: str, path: str, headers: dict[str, str], body: bytes, receiver: Receiver
    ) -> None:
        """Send a POST, and wait for its answer.

        Raises ConnectionError (TimeoutError, OSError) when no connection is to be had or it breaks, and
        HttpParserError.  An idle connection that the engine closed meanwhile is no reason to fail.
        """
        parts = urlsplit(url)
        target = Target(parts.hostname or "", parts.port or 80)
        lines = [f"POST {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
        request = head.encode("ascii") + body
        if idle := self._idle.get(target):
            connection = idle.pop()
            connection.reuse()
            try:
                return await connection.post(request, receiver)
            except ConnectionResetError:
                if connection.answered:
                    raise
        connection = await self._connect(target)
        return await connection.post(request, receiver)

    def keep(self, target: Target, connection: EngineConnection) -> None:
        """The connection is idle."""
        self._idle.setdefault(target, []).append(connection)

    def forget(self, target: Target, connection: EngineConnection) -> None:
        """The connection is gone."""
        self._all.discard(connection)
        idle = self._idle.get(target, [])
        if connection in idle:
            idle.remove(connection)
        if not idle:
            self._idle.pop(target, None)

    def close(self) -> None:
        """Hang up on all engines."""
        for connection in list(self._all):
            connection.close()

    async def _connect(self, target: Target) -> EngineConnection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_timeout_s):
            _, connection = await loop.create_connection(
                lambda: EngineConnection(self, target), target.host, target.port
            )
        self._all.add(connection)
        return connection
