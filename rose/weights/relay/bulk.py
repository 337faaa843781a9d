"""Connections to an embedded relay for the bytes of buckets, used from threads; and uploads over them.

`recv_into` and `sendall` move bytes between the kernel and the caller's memory without copies, and release
the GIL.  Uploads go over connections that are upgraded to BULK_PROTOCOL; for downloads see `lanes`.
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from rose.errors import ConfigError
from rose.weights.manifest import MANIFEST_BYTES_MAX
from rose.weights.relay.control import SILENCE_MAX_S, Retry, refusal_of, refused
from rose.weights.relay.http import (
    BULK_PATH,
    BULK_PROTOCOL,
    FRAME_BYTES_MAX,
    BulkReply,
    BulkRequest,
    Finish,
    Part,
    Put,
)
from rose.weights.relay.sockets import Sending

_LENGTH_BYTES = 4
_TLS_SEND_BYTES = 64 << 10
_THREADS_MAX = 32
_T = TypeVar("_T")


class Connection:
    """One connection to an embedded relay.  Calls block."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
        sending: Sending,
        silence_s: float = SILENCE_MAX_S,
    ) -> None:
        parts = urlsplit(url)
        host = parts.hostname or ""
        self._prefix = parts.path
        self._headers = {"Host": parts.netloc.rpartition("@")[2], **headers}
        self._sending = sending
        self._http = (
            http.client.HTTPSConnection(host, parts.port, timeout=silence_s, context=tls)
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, parts.port, timeout=silence_s)
        )
        self._aborted = False

    @property
    def socket(self) -> socket.socket:
        """The socket, with TLS if any.  Raises ConnectionAbortedError."""
        sock: socket.socket | None = self._http.sock
        if sock is None:
            raise ConnectionAbortedError("closed")
        return sock

    @property
    def closed(self) -> bool:
        """Whether it has to be made (again)."""
        return self._http.sock is None

    def connect(self) -> bool:
        """Connect, unless it is; answers whether that was needed."""
        needed = self.closed
        if needed:
            self._aborted = False
            self._http.connect()
            self._sending.apply(self.socket)
        if self._aborted:
            raise ConnectionAbortedError("given up")
        return needed

    def send_request(self, path: str, headers: Mapping[str, str]) -> None:
        """Send a GET."""
        lines = [f"GET {self._prefix}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in {**self._headers, **headers}.items()]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))

    def abort(self) -> bool:
        """Break it off, from another thread; True if the call at work on it is about to fail."""
        self._aborted = True
        if (sock := self._http.sock) is None:
            return False
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False  # it was not connected yet
        return True

    def close(self) -> None:
        """Close it."""
        self._http.close()


class Uplink(Connection):
    """A connection that is upgraded to BULK_PROTOCOL.  Calls block; refusals raise what they stand for."""

    def open(self, put: Put) -> str:
        """Open a bucket; answers its ticket, empty if the relay has these very bytes."""
        self._make_ready()
        self._send(put)
        return self.receive().ticket

    def send_part(self, part: Part, view: memoryview) -> None:
        """Send bytes of a bucket; `receive` what is said to that."""
        self._make_ready()
        self._send(part)
        # A link that is slow is not one that is silent.  The time-out of `sendall` is for all it is given,
        # that of `send` for the wait until some of it goes.  With TLS `send` sends all as well, and is given
        # little at a time, which would halve the rate without.
        size = _TLS_SEND_BYTES if isinstance(self.socket, ssl.SSLSocket) else len(view)
        while view:
            view = view[self.socket.send(view[:size]) :]

    def send_all(self, ticket: str, view: memoryview) -> None:
        """Send a bucket in one part."""
        self.send_part(Part(ticket, 0, len(view)), view)
        self.receive()

    def finish(self, ticket: str) -> None:
        """The whole bucket was received."""
        self._send(Finish(ticket))
        self.receive()

    def receive(self) -> BulkReply:
        """The next answer."""
        length = int.from_bytes(self._receive_bytes(_LENGTH_BYTES), "little")
        if length > FRAME_BYTES_MAX:
            raise Retry("what answers is no relay")
        try:
            reply = msgspec.json.decode(self._receive_bytes(length), type=BulkReply)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Retry(f"the relay's answer cannot be read: {error}") from None
        if reply.refusal is not None:
            raise refused(reply.refusal)
        return reply

    def _make_ready(self) -> None:
        if not self.connect():
            return
        self.send_request(BULK_PATH, {"Connection": "upgrade", "Upgrade": BULK_PROTOCOL})
        # The relay says nothing beyond the head of its answer before it is asked again.
        with http.client.HTTPResponse(self.socket, method="GET") as response:
            response.begin()
            if response.status != http.HTTPStatus.SWITCHING_PROTOCOLS:
                refusal = refusal_of(response.status, response.read(MANIFEST_BYTES_MAX))
                self.close()
                raise refusal

    def _send(self, request: BulkRequest) -> None:
        body = msgspec.json.encode(request)
        self.socket.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    def _receive_bytes(self, length: int) -> bytearray:
        data = bytearray(length)
        view, received = memoryview(data), 0
        while received < length:
            if not (got := self.socket.recv_into(view[received:])):
                raise ConnectionResetError("the relay closed the connection")
            received += got
        return data


class Uplinks:
    """Connections on which buckets are opened and finished, each for one bucket at a time, and then kept."""

    def __init__(self, make: Callable[[], Uplink]) -> None:
        self._make = make
        self._idle: list[Uplink] = []
        self._threads = ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="rose-uplink")

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[Uplink]:
        """A connection, which is closed if anything goes wrong."""
        uplink = self._idle.pop() if self._idle else self._make()
        try:
            yield uplink
        except BaseException:
            uplink.abort()
            uplink.close()
            raise
        self._idle.append(uplink)

    async def run(self, call: Callable[[], _T]) -> _T:
        """Make a blocking call, in a thread.  Raises Retry where a next attempt may succeed."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, _attempt, call)

    def close(self) -> None:
        """Close them all."""
        for uplink in self._idle:
            uplink.close()
        self._idle.clear()
        self._threads.shutdown(wait=False)


def _attempt(call: Callable[[], _T]) -> _T:
    try:
        return call()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise failure(error) from error


def failure(error: Exception) -> Exception:
    """What a broken connection means to the caller."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConfigError(f"TLS failed: {error}", "check relay.url and relay.tls_ca")
    return Retry(str(error) or type(error).__name__)
