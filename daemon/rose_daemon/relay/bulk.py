"""Receiving buckets without copies: from the socket straight into the vault's memory.

An HTTP connection is upgraded to this protocol: frames of JSON, and after each Part the bytes that it names.
A writer opens a bucket with Put and gets a ticket (unless its bytes are here already), sends Parts on this or
other connections, and closes it with Finish.  When the connection that opened it ends before, it is given up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from rose.errors import RoseError
from rose.units import MIB
from rose.weights.relay.http import (
    BULK_PROTOCOL,
    FRAME_BYTES_MAX,
    BadRequest,
    BulkReply,
    BulkRequest,
    Finish,
    Part,
    Put,
)
from rose_daemon.relay import requests
from rose_daemon.relay.pools import MemoryBlock
from rose_daemon.relay.requests import TRANSFER_MAX_S
from rose_daemon.relay.uploads import Upload, Uploads
from rose_daemon.relay.vault import Vault

_READ_BYTES = MIB
_LENGTH_BYTES = 4


@dataclass(eq=False)
class _Incoming:
    """A part on its way."""

    upload: Upload
    view: memoryview
    start: int
    position: int = 0

    @property
    def rest(self) -> memoryview:
        return self.view[self.position : self.position + _READ_BYTES]

    def arrived(self, nbytes: int) -> bool:
        """Bytes have been written to `rest`; whether that was the last of them."""
        at = self.start + self.position
        self.upload.arrived(at, at + nbytes)
        self.position += nbytes
        return self.position == len(self.view)


@dataclass(frozen=True, slots=True)
class Bulk:
    """What the upgraded connections of a relay share."""

    vault: Vault[MemoryBlock]
    uploads: Uploads
    tidy: Callable[[], Awaitable[None]]
    receivers: set[BulkReceiver]


class BulkReceiver(asyncio.BufferedProtocol):
    """One upgraded connection."""

    def __init__(self, bulk: Bulk, transport: asyncio.Transport, http: asyncio.Protocol) -> None:
        self._bulk = bulk
        self._transport = transport
        self._http = http
        self._frame = bytearray(_LENGTH_BYTES + FRAME_BYTES_MAX)
        self._framed = 0
        self._incoming: _Incoming | None = None
        self._tickets: set[str] = set()
        self._answering: asyncio.Task[None] | None = None
        self._deadline = asyncio.get_running_loop().call_later(TRANSFER_MAX_S, self._be_late)
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection has ended."""

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        if self._incoming is not None:
            return self._incoming.rest
        return memoryview(self._frame)[self._framed :]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have arrived there."""
        if self._incoming is not None:
            self._take(nbytes)
        else:
            self._framed += nbytes
            self._parse()

    def eof_received(self) -> bool:
        """The writer is done; close."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended: what was not finished leaves no trace."""
        self._deadline.cancel()
        if self._incoming is not None:
            self._bulk.uploads.left(self._incoming.upload, self)
            self._incoming = None
        for ticket in self._tickets:
            self._bulk.uploads.give_up(ticket)
        if not self.lost.done():
            self.lost.set_result(None)
        self._http.connection_lost(exc)

    def end(self) -> None:
        """Close the connection, unless something is on its way."""
        if self._incoming is None and not self._tickets:
            self._transport.close()

    def pause_writing(self) -> None:
        """Our answers are short."""

    def resume_writing(self) -> None:
        """Our answers are short."""

    # ---- inside ----

    def _parse(self) -> None:
        """Deal with all that is in the frame's buffer."""
        while self._framed >= _LENGTH_BYTES and not self._transport.is_closing():
            stop = _LENGTH_BYTES + int.from_bytes(self._frame[:_LENGTH_BYTES], "little")
            if not _LENGTH_BYTES < stop <= len(self._frame) or self._answering is not None:
                self._transport.abort()  # no frame, or one before it was its turn
                return
            if self._framed < stop:
                return
            body = bytes(self._frame[_LENGTH_BYTES:stop])
            self._drop(stop)
            self._handle(body)
            if self._incoming is not None:
                rest = self._incoming.rest
                taken = min(self._framed, len(rest))
                rest[:taken] = self._frame[:taken]
                self._drop(taken)
                if taken:
                    self._take(taken)

    def _drop(self, count: int) -> None:
        """Forget bytes at the beginning of the frame's buffer."""
        self._frame[: self._framed - count] = self._frame[count : self._framed]
        self._framed -= count

    def _take(self, nbytes: int) -> None:
        """Bytes of a part have arrived."""
        if self._incoming is not None and self._incoming.arrived(nbytes):
            upload, self._incoming = self._incoming.upload, None
            self._bulk.uploads.left(upload, self)
            self._reply(BulkReply("received"))

    def _handle(self, body: bytes) -> None:
        try:
            request = msgspec.json.decode(body, type=BulkRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._reply(BulkReply("refused", requests.refusal(BadRequest(f"cannot be read: {error}"))))
            return
        if not isinstance(request, Part):
            self._answering = asyncio.ensure_future(self._answer(request))
            return
        try:
            upload = self._bulk.uploads.find(request.ticket)
            view = upload.part(request.start, request.size)
        except RoseError as error:
            self._reply(BulkReply("refused", requests.refusal(error)))
            self._transport.close()  # the bytes that follow have no place
            return
        upload.writers[self] = self._transport.abort
        self._incoming = _Incoming(upload, view, request.start)

    async def _answer(self, request: Put | Finish) -> None:
        try:
            reply = await (self._put(request) if isinstance(request, Put) else self._finish(request))
        except RoseError as error:
            reply = BulkReply("refused", requests.refusal(error))
        self._answering = None
        self._reply(reply)

    async def _put(self, put: Put) -> BulkReply:
        key, bucket = requests.key_named(put.job, put.version), requests.bucket_named(put.bucket)
        size, digest = requests.content(put.size, put.digest)
        await self._bulk.tidy()
        reservation = self._bulk.vault.reserve(key, bucket, size, digest, time.monotonic())
        if reservation is None:
            return BulkReply("stored")
        ticket = self._bulk.uploads.open(reservation)
        self._tickets.add(ticket)
        if self.lost.done():
            self._bulk.uploads.give_up(ticket)
        return BulkReply("send", ticket=ticket)

    async def _finish(self, finish: Finish) -> BulkReply:
        self._tickets.discard(finish.ticket)
        await self._bulk.uploads.finish(finish.ticket)
        return BulkReply("stored")

    def _reply(self, reply: BulkReply) -> None:
        self._be_in_time()
        body = msgspec.json.encode(reply)
        self._transport.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    def _be_in_time(self) -> None:
        self._deadline.cancel()
        self._deadline = asyncio.get_running_loop().call_later(TRANSFER_MAX_S, self._be_late)

    def _be_late(self) -> None:
        """Nothing was completed for long; an idle connection may stay."""
        if self._incoming is not None or self._tickets:
            self._transport.abort()


async def receive(request: web.Request, bulk: Bulk) -> None:
    """Take an HTTP connection over until it ends.  Raises BadRequest."""
    if request.headers.get("Upgrade", "").lower() != BULK_PROTOCOL:
        raise BadRequest(f"this address is for Upgrade: {BULK_PROTOCOL}")
    transport = request.transport
    if transport is None:
        raise ConnectionResetError
    receiver = BulkReceiver(bulk, transport, request.protocol)
    transport.set_protocol(receiver)
    head = f"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: {BULK_PROTOCOL}\r\n\r\n"
    transport.write(head.encode())
    bulk.receivers.add(receiver)
    try:
        await receiver.lost
    finally:
        bulk.receivers.discard(receiver)
        transport.abort()
