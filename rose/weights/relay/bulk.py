"""Moving the bytes of buckets to and from an embedded relay without copies, in threads.

`recv_into` and `sendall` move them between the kernel and the caller's memory and release the GIL.  Downloads
are HTTP range requests; uploads go over a connection that is upgraded to BULK_PROTOCOL.
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from rose.errors import ConfigError, CorruptDelta
from rose.units import MIB
from rose.weights.manifest import MANIFEST_BYTES_MAX
from rose.weights.relay import EpochChanged
from rose.weights.relay.control import Retry, refusal_of, refused
from rose.weights.relay.http import BULK_PATH, BULK_PROTOCOL, EPOCH_HEADER, FRAME_BYTES_MAX, Put, PutReply
from rose.weights.relay.sockets import Sending

_READ_BYTES = MIB
_SILENCE_MAX_S = 15.0
"""A connection on which nothing moves for this long is given up and made again."""
_LENGTH_BYTES = 4
_THREADS_MAX = 32
_T = TypeVar("_T")


class Epochs:
    """The one epoch that all parts of a download come from; if none is given, the first answer settles it."""

    def __init__(self, epoch: str | None) -> None:
        self._settled = {} if epoch is None else {"epoch": epoch}

    def check(self, epoch: str) -> None:
        """Raises EpochChanged.  May be called from several threads."""
        if self._settled.setdefault("epoch", epoch) != epoch:
            raise EpochChanged("the relay was restarted meanwhile")


class Connection:
    """One connection to an embedded relay, for downloads or (once upgraded) for uploads.  Calls block."""

    def __init__(
        self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None, sending: Sending
    ) -> None:
        parts = urlsplit(url)
        host = parts.hostname or ""
        self._headers = dict(headers)
        self._prefix = parts.path
        self._sending = sending
        self._http = (
            http.client.HTTPSConnection(host, parts.port, timeout=_SILENCE_MAX_S, context=tls)
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, parts.port, timeout=_SILENCE_MAX_S)
        )
        self._upgraded = False
        self._aborted = False

    def download(self, path: str, view: memoryview, start: int, epochs: Epochs) -> int:
        """Fill `view` from byte `start` of a bucket on; answers how far it came, if the connection broke."""
        headers = {**self._headers, "Range": f"bytes={start}-{start + len(view) - 1}"}
        self._connect()
        self._http.request("GET", self._prefix + path, headers=headers)
        response = self._http.getresponse()
        epochs.check(response.headers.get(EPOCH_HEADER, ""))
        if response.status >= 300:
            raise refusal_of(response.status, response.read(MANIFEST_BYTES_MAX))
        if response.status != 206 or response.length != len(view):
            raise CorruptDelta(f"the relay answered {response.length} bytes where {len(view)} were asked")
        received = 0
        try:
            while received < len(view):
                if not (got := response.readinto(view[received : received + _READ_BYTES])):
                    break
                received += got
        except OSError:
            pass  # what has come is kept
        if received == len(view):
            response.read()  # the end, which makes the connection fit for the next request
        else:
            self.close()
        return received

    def upload(self, put: Put, view: memoryview) -> None:
        """Send a bucket, unless the relay has these very bytes."""
        self._connect()
        sock = self._upgrade()
        _send_frame(sock, msgspec.json.encode(put))
        reply = _receive_reply(sock)
        if reply.state == "send":
            sock.sendall(view)
            reply = _receive_reply(sock)
        if reply.refusal is not None:
            raise refused(reply.refusal)

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

    def _connect(self) -> None:
        if self._http.sock is None:
            self._upgraded = False
            self._http.connect()
            self._sending.apply(_socket_of(self._http))
        if self._aborted:
            raise ConnectionAbortedError("given up")

    def _upgrade(self) -> socket.socket:
        sock = _socket_of(self._http)
        if not self._upgraded:
            headers = {**self._headers, "Connection": "upgrade", "Upgrade": BULK_PROTOCOL}
            self._http.request("GET", self._prefix + BULK_PATH, headers=headers)
            # The relay says nothing beyond the head of its answer before it is asked again.
            response = self._http.getresponse()
            if response.status != http.HTTPStatus.SWITCHING_PROTOCOLS:
                raise refusal_of(response.status, response.read(MANIFEST_BYTES_MAX))
            self._upgraded = True
        return sock


class Connections:
    """Connections to one relay, each used by one thread at a time and kept for the next call."""

    def __init__(self, make: Callable[[], Connection]) -> None:
        self._make = make
        self._idle: list[Connection] = []
        self._threads = ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="rose-bulk")

    async def run(self, call: Callable[[Connection], _T]) -> _T:
        """Make a blocking call on a connection, in a thread.  Raises Retry where a next attempt may succeed.

        When the caller is cancelled, the call has ended before this does: no buffer is written afterwards.
        """
        connection = self._idle.pop() if self._idle else self._make()
        work = asyncio.get_running_loop().run_in_executor(self._threads, _attempt, call, connection)
        try:
            outcome = await asyncio.shield(work)
        except asyncio.CancelledError:
            if connection.abort():
                await asyncio.wait([work])
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            connection.close()
            raise
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return outcome

    def close(self) -> None:
        """Close them all."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        self._threads.shutdown(wait=False)


def _attempt(call: Callable[[Connection], _T], connection: Connection) -> _T:
    try:
        return call(connection)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"TLS failed: {error}", "check relay.url and relay.tls_ca") from None
    except (OSError, http.client.HTTPException) as error:
        raise Retry(str(error) or type(error).__name__) from error


def _socket_of(connection: http.client.HTTPConnection) -> socket.socket:
    sock: socket.socket | None = connection.sock
    if sock is None:
        raise ConnectionAbortedError("closed")
    return sock


def _send_frame(sock: socket.socket, body: bytes) -> None:
    sock.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)


def _receive_reply(sock: socket.socket) -> PutReply:
    length = int.from_bytes(_receive(sock, _LENGTH_BYTES), "little")
    if length > FRAME_BYTES_MAX:
        raise Retry("what answers is no relay")
    try:
        return msgspec.json.decode(_receive(sock, length), type=PutReply)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Retry(f"the relay's answer cannot be read: {error}") from None


def _receive(sock: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view, received = memoryview(data), 0
    while received < length:
        if not (got := sock.recv_into(view[received:])):
            raise Retry("the relay closed the connection")
        received += got
    return data
