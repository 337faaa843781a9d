"""Receiving buckets without copies: from the socket straight into the vault's memory.

An HTTP connection is upgraded to this protocol.  A writer names a bucket, is told to send its bytes (or that
they are here already), and sends them; nothing else is in flight, so that what arrives is either one frame or
bytes of the bucket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
import xxhash
from aiohttp import web

from rose.errors import CorruptDelta, RoseError
from rose.units import MIB
from rose.weights.relay.http import BULK_PROTOCOL, FRAME_BYTES_MAX, BadRequest, Put, PutReply
from rose_daemon.relay import requests
from rose_daemon.relay.pools import MemoryBlock
from rose_daemon.relay.requests import TRANSFER_MAX_S
from rose_daemon.relay.vault import Reservation, Vault

_READ_BYTES = MIB
_LENGTH_BYTES = 4


class BulkReceiver(asyncio.BufferedProtocol):
    """One upgraded connection."""

    def __init__(
        self,
        vault: Vault[MemoryBlock],
        tidy: Callable[[], Awaitable[None]],
        transport: asyncio.Transport,
        http: asyncio.Protocol,
    ) -> None:
        self._vault = vault
        self._tidy = tidy
        self._transport = transport
        self._http = http
        self._frame = bytearray(_LENGTH_BYTES + FRAME_BYTES_MAX)
        self._framed = 0
        self._incoming: _Incoming | None = None
        self._beginning: asyncio.Future[None] | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        self.lost = asyncio.get_running_loop().create_future()
        """Done when the connection has ended."""

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        if self._incoming is not None:
            return self._incoming.rest
        return memoryview(self._frame)[self._framed :]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have arrived there."""
        if self._incoming is not None:
            self._incoming.arrived(nbytes)
            if self._incoming.complete:
                self._finish(self._incoming)
            return
        self._framed += nbytes
        length = int.from_bytes(self._frame[:_LENGTH_BYTES], "little")
        if self._framed >= _LENGTH_BYTES and not 0 < length <= FRAME_BYTES_MAX:
            self._transport.abort()
        elif self._framed >= _LENGTH_BYTES + length:
            body = bytes(self._frame[_LENGTH_BYTES : _LENGTH_BYTES + length])
            more, self._framed = self._framed > _LENGTH_BYTES + length, 0
            if more:  # than was asked for
                self._transport.abort()
            else:
                self._beginning = asyncio.ensure_future(self._begin(body))

    def eof_received(self) -> bool:
        """The writer is done; close."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended: a bucket that did not arrive whole leaves no trace."""
        if self._incoming is not None:
            self._vault.cancel(self._incoming.reservation, time.monotonic())
            self._incoming = None
        if self._giving_up is not None:
            self._giving_up.cancel()
        if not self.lost.done():
            self.lost.set_result(None)
        self._http.connection_lost(exc)

    def end(self) -> None:
        """Close the connection, unless a bucket is on its way."""
        if self._incoming is None:
            self._transport.close()

    def pause_writing(self) -> None:
        """Our answers are short."""

    def resume_writing(self) -> None:
        """Our answers are short."""

    # ---- inside ----

    async def _begin(self, body: bytes) -> None:
        try:
            reservation = await self._reserve(body)
        except RoseError as error:
            self._reply(PutReply("refused", requests.refusal(error)))
            return
        if reservation is None:
            self._reply(PutReply("stored"))
        elif self.lost.done():
            self._vault.cancel(reservation, time.monotonic())
        else:
            self._incoming = _Incoming(reservation)
            loop = asyncio.get_running_loop()
            self._giving_up = loop.call_later(TRANSFER_MAX_S, self._transport.abort)
            self._reply(PutReply("send"))

    async def _reserve(self, body: bytes) -> Reservation[MemoryBlock] | None:
        try:
            put = msgspec.json.decode(body, type=Put)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadRequest(f"the frame cannot be read: {error}") from None
        key, bucket = requests.key_named(put.job, put.version), requests.bucket_named(put.bucket)
        size, digest = requests.content(put.size, put.digest)
        await self._tidy()
        return self._vault.reserve(key, bucket, size, digest, time.monotonic())

    def _finish(self, incoming: _Incoming) -> None:
        self._incoming = None
        if self._giving_up is not None:
            self._giving_up.cancel()
        try:
            if incoming.digest != incoming.reservation.digest:
                self._vault.cancel(incoming.reservation, time.monotonic())
                raise CorruptDelta(f"{incoming.reservation.bucket}: other bytes arrived than its digest says")
            self._vault.store(incoming.reservation, time.monotonic())
        except RoseError as error:
            self._reply(PutReply("refused", requests.refusal(error)))
        else:
            self._reply(PutReply("stored"))

    def _reply(self, reply: PutReply) -> None:
        body = msgspec.json.encode(reply)
        self._transport.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)


class _Incoming:
    """A bucket on its way."""

    def __init__(self, reservation: Reservation[MemoryBlock]) -> None:
        self.reservation = reservation
        self._data = reservation.block.data
        self._position = 0
        self._hasher = xxhash.xxh3_128()

    @property
    def rest(self) -> memoryview:
        return self._data[self._position : self._position + _READ_BYTES]

    @property
    def complete(self) -> bool:
        return self._position == len(self._data)

    @property
    def digest(self) -> str:
        return str(self._hasher.hexdigest())

    def arrived(self, nbytes: int) -> None:
        # While they are in the cache.
        self._hasher.update(self._data[self._position : self._position + nbytes])
        self._position += nbytes


async def receive(
    request: web.Request,
    vault: Vault[MemoryBlock],
    tidy: Callable[[], Awaitable[None]],
    open_ones: set[BulkReceiver],
) -> None:
    """Take an HTTP connection over until it ends; it is in `open_ones` meanwhile.  Raises BadRequest."""
    if request.headers.get("Upgrade", "").lower() != BULK_PROTOCOL:
        raise BadRequest(f"this address is for Upgrade: {BULK_PROTOCOL}")
    transport = request.transport
    if transport is None:
        raise ConnectionResetError
    receiver = BulkReceiver(vault, tidy, transport, request.protocol)
    transport.set_protocol(receiver)
    head = f"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: {BULK_PROTOCOL}\r\n\r\n"
    transport.write(head.encode())
    open_ones.add(receiver)
    try:
        await receiver.lost
    finally:
        open_ones.discard(receiver)
        transport.abort()
