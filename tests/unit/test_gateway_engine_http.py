"""Connections to engines: used again, given up, and what comes over them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import httptools
import pytest
from rose_daemon.scheduler import engine_http
from rose_daemon.scheduler.engine_http import EnginePool
from rose_daemon.scheduler.pacing import Pacer
from waiting import until

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Seen:
    """A receiver that keeps everything; enough once `until` has come."""

    def __init__(self, until: bytes = b"\0") -> None:
        self.status = 0
        self.data = b""
        self._until = until

    def head(self, status: int) -> None:
        self.status = status

    def block(self, data: bytes) -> bool:
        self.data += data
        return self._until in self.data


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Server:
    """An engine of few words."""

    talk: Talk

    def __init__(self) -> None:
        self.connections = 0
        self.requests: list[bytes] = []
        self.url = ""

    async def request(self, reader: asyncio.StreamReader) -> bool:
        """Read one request; False when the client left."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.requests.append(head + await reader.readexactly(size))
        return True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await self.talk(reader, writer)
        writer.close()


@contextlib.asynccontextmanager
async def engine(talk: Callable[[Server], Talk]) -> AsyncIterator[tuple[Server, EnginePool]]:
    made = Server()
    made.talk = talk(made)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pool = EnginePool(1.0, Pacer(0.0))
    try:
        yield made, pool
    finally:
        pool.close()
        server.close()


async def ask(server: Server, pool: EnginePool, seen: Seen | None = None) -> Seen:
    seen = seen or Seen()
    await pool.post(server.url, "/v1/completions", {"X-Request-Id": "t"}, b"{}", seen)
    return seen


def answering(*parts: bytes, requests: int = 100, pause_s: float = 0.0) -> Callable[[Server], Talk]:
    """Answers each of so many requests on a connection with these parts, then closes it."""

    def talk(server: Server) -> Talk:
        async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(requests):
                if not await server.request(reader):
                    return
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(pause_s)

        return run

    return talk


async def test_a_connection_is_used_again() -> None:
    parts = [HEAD + chunk(b"one"), chunk(b"two") + b"0\r\n\r\n"]
    async with engine(answering(*parts, pause_s=0.01)) as (server, pool):
        for _ in range(3):
            seen = await ask(server, pool)
            assert (seen.status, seen.data) == (200, b"onetwo")
        assert server.connections == 1
        assert server.requests[0].startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"X-Request-Id: t\r\n" in server.requests[0]


async def test_requests_at_once_have_connections_of_their_own() -> None:
    async with engine(answering(HEAD + chunk(b"x"), b"0\r\n\r\n", pause_s=0.02)) as (server, pool):
        await asyncio.gather(*(ask(server, pool) for _ in range(5)))
        assert server.connections == 5
        await asyncio.gather(*(ask(server, pool) for _ in range(5)))
        assert server.connections == 5


async def test_an_idle_connection_that_the_engine_closed_is_no_failure() -> None:
    async with engine(answering(HEAD + chunk(b"x") + b"0\r\n\r\n", requests=1)) as (server, pool):
        for _ in range(3):
            assert (await ask(server, pool)).data == b"x"
        assert server.connections == 3


async def test_an_idle_connection_is_not_kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_http, "KEEP_ALIVE_S", 0.05)
    async with engine(answering(HEAD + chunk(b"x") + b"0\r\n\r\n")) as (server, pool):
        await ask(server, pool)
        await asyncio.sleep(0.15)
        await ask(server, pool)
        assert server.connections == 2


async def test_what_matters_may_come_before_the_end() -> None:
    """The end of the body comes later, and the connection is good for the next request then."""
    async with engine(answering(HEAD + chunk(b"x[DONE]"), b"0\r\n\r\n", pause_s=0.05)) as (server, pool):
        assert (await ask(server, pool, Seen(b"[DONE]"))).data == b"x[DONE]"
        await asyncio.sleep(0.1)
        await ask(server, pool, Seen(b"[DONE]"))
        assert server.connections == 1


async def test_a_body_that_does_not_end_costs_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_http, "_LAST_CHUNK_S", 0.05)
    async with engine(answering(HEAD + chunk(b"[DONE]"), requests=1, pause_s=10)) as (server, pool):
        await ask(server, pool, Seen(b"[DONE]"))
        await until(lambda: not pool._all)


@pytest.mark.parametrize("end", [b"0\r\n\r\n", b"", b"zz\r\n"])
async def test_chunks_of_one_read_come_at_once(end: bytes) -> None:
    """And none is lost, whatever follows them: the end, nothing yet, or what is no HTTP."""
    blocks: list[bytes] = []

    class Counting(Seen):
        def block(self, data: bytes) -> bool:
            blocks.append(data)
            return super().block(data)

    connection = engine_http.EngineConnection(EnginePool(1.0, Pacer(0.0)), engine_http.Target("", 0))
    connection._receiver = Counting()
    connection._done = asyncio.get_running_loop().create_future()
    connection._whole = False
    connection.data_received(HEAD + chunk(b"one") + chunk(b"two") + chunk(b"three") + end)
    assert blocks == [b"onetwothree"]
    if end == b"zz\r\n":
        with pytest.raises(httptools.HttpParserError):
            await connection._done
    else:
        assert connection._done.done() == bool(end)


async def test_an_answer_cut_short_is_a_lost_connection() -> None:
    async with engine(answering(HEAD + chunk(b"half"), requests=1)) as (server, pool):
        seen = Seen()
        with pytest.raises(ConnectionResetError):
            await ask(server, pool, seen)
        assert seen.data == b"half"
        assert server.connections == 1, "what has begun to answer is not asked again"


@pytest.mark.parametrize("junk", [b"SSH-2.0-OpenSSH_9\r\n", b"HTTP/1.1 abc\r\n\r\n", HEAD + b"zz\r\n"])
async def test_what_is_no_http(junk: bytes) -> None:
    async with engine(answering(junk, pause_s=1)) as (server, pool):
        with pytest.raises(httptools.HttpParserError):
            await ask(server, pool)
        await until(lambda: not pool._all)


async def test_what_nobody_asked_for_closes_the_connection() -> None:
    late = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"
    parts = [HEAD + chunk(b"x") + b"0\r\n\r\n", late]
    async with engine(answering(*parts, pause_s=0.05)) as (server, pool):
        await ask(server, pool)
        await until(lambda: not pool._all)
        assert (await ask(server, pool)).status == 200
        assert server.connections == 2


async def test_a_cancelled_request_hangs_up() -> None:
    left = asyncio.Event()

    def talk(server: Server) -> Talk:
        async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.request(reader)
            writer.write(HEAD + chunk(b"x"))
            await reader.read()
            left.set()

        return run

    async with engine(talk) as (server, pool):
        task = asyncio.create_task(ask(server, pool))
        await asyncio.sleep(0.05)
        task.cancel()
        async with asyncio.timeout(20):
            await left.wait()
        assert pool._idle == {}


async def test_a_fault_of_the_receiver_is_not_hidden() -> None:
    class Broken(Seen):
        def block(self, data: bytes) -> bool:
            raise AssertionError("ours")

    async with engine(answering(HEAD + chunk(b"x"), pause_s=1)) as (server, pool):
        with pytest.raises(AssertionError, match="ours"):
            await ask(server, pool, Broken())


async def test_nobody_listens() -> None:
    with pytest.raises(ConnectionRefusedError):
        await EnginePool(1.0, Pacer(0.0)).post("http://127.0.0.1:9", "/", {}, b"", Seen())


@contextlib.asynccontextmanager
async def spaced(talk: Callable[[Server], Talk]) -> AsyncIterator[tuple[Server, EnginePool]]:
    """Streams are read 50 ms apart, however calm it is."""
    async with engine(talk) as (server, pool):
        pool.pacer._spacing.due = lambda now_s: False  # type: ignore[method-assign]
        pool.pacer._spacing.value_s = 0.05
        yield server, pool


async def test_spaced_reads_bring_all_and_the_first_at_once() -> None:
    blocks: list[bytes] = []

    class Counting(Seen):
        def block(self, data: bytes) -> bool:
            blocks.append(data)
            return super().block(data)

    parts = [HEAD, *(chunk(b"token%d." % number) for number in range(60)), b"0\r\n\r\n"]
    async with spaced(answering(*parts, pause_s=0.002)) as (server, pool):
        for _ in range(2):
            blocks.clear()
            seen = await ask(server, pool, Counting())
            assert seen.data == b"".join(b"token%d." % number for number in range(60))
            assert blocks[0].startswith(b"token0.")
            assert len(blocks) < 60
        assert server.connections == 1


async def test_an_engine_that_goes_while_its_stream_rests_is_noticed() -> None:
    async with spaced(answering(HEAD + chunk(b"x"), requests=0)) as (server, pool):
        with pytest.raises(ConnectionError):
            await ask(server, pool)

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(HEAD + chunk(b"kept") + chunk(b"too"))

    async with spaced(lambda _: cut) as (server, pool):
        seen = Seen()
        with pytest.raises(ConnectionError):
            await ask(server, pool, seen)
        assert seen.data == b"kepttoo"


async def test_a_turn_that_is_given_up_while_its_stream_rests_closes_the_connection() -> None:
    gone = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(HEAD + chunk(b"x"))
        await reader.read()
        gone.set()

    async with spaced(lambda _: endless) as (server, pool):
        seen = Seen()
        asking = asyncio.create_task(ask(server, pool, seen))
        await until(lambda: seen.data == b"x")
        asking.cancel()
        async with asyncio.timeout(20):
            await gone.wait()
        await until(lambda: not pool.pacer._resting and not pool._all)
