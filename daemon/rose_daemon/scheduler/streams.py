"""Server-sent events to one client: the turn as it grows, and comments while it does not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from aiohttp import web

from rose_daemon.scheduler.dialects import ChunkWriter, chunk_writer, fields
from rose_daemon.scheduler.errors import Failure, Refused, Shape
from rose_daemon.scheduler.output import Answer, replayed_pieces
from rose_daemon.scheduler.requests import Dialect, Request
from rose_daemon.scheduler.turns import Turn

_COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_UNREAD_BYTES_MAX = 1 << 16

SHAPES = {
    Dialect.CHAT: Shape.OPENAI,
    Dialect.COMPLETION: Shape.OPENAI,
    Dialect.GENERATE: Shape.VLLM,
    Dialect.SGLANG: Shape.SGLANG,
}
"""How each dialect shows errors."""


async def show(http: web.Request, request: Request, turn: Turn) -> web.StreamResponse:
    """Show the turn as it grows.

    Nothing is sent before its first output or the first comment, so that errors until then keep their
    status.  Raises Refused for those.
    """
    await begun([turn])
    if isinstance(turn.outcome, Failure) and not turn.pieces:
        raise Refused(turn.outcome)
    response = head_of(turn.turn_id, turn.replica)
    # A client that left while it was written to is no error of ours; who called ends its turn.
    with contextlib.suppress(ConnectionResetError):
        await response.prepare(http)
        writer = chunk_writer(request, turn.turn_id, turn.model, int(time.time()))
        await Follower(http, response, writer, turn).follow()
        if isinstance(turn.outcome, Answer):
            await _close(response, writer, turn.outcome)
        elif isinstance(turn.outcome, Failure):
            await response.write(fields.event(turn.outcome.document(SHAPES[request.dialect])))
            await response.write_eof()
    return response


async def begun(turns: Sequence[Turn]) -> None:
    """Wait until one of the turns has output, its outcome, or a comment to be sent."""
    change = asyncio.Event()
    for turn in turns:
        turn.listeners.append(change.set)
    try:
        while turns and not any(turn.pieces or turn.outcome is not None or turn.idle for turn in turns):
            change.clear()
            await change.wait()
    finally:
        for turn in turns:
            turn.listeners.remove(change.set)


class Follower:
    """Writes one client's stream.

    New output is written by `pump`, in the task that brings it: a switch of tasks for each token would cost
    as much as all the rest.  It goes straight into the connection, framed as aiohttp frames it, since
    aiohttp's own `write` may wait for a client that reads slowly, and nobody else should.  Such a client, and
    one of HTTP/1.0, is written to by `follow`, in its own task.
    """

    def __init__(self, http: web.Request, response: web.StreamResponse, writer: ChunkWriter, turn: Turn):
        self._response = response
        self._writer = writer
        self._turn = turn
        self._connection = http.transport if response.headers.get("Transfer-Encoding") == "chunked" else None
        self._direct: asyncio.Transport | None = None
        self._shown = 0
        self._needed = asyncio.Event()

    async def follow(self) -> None:
        """Write all of the turn, until it has its outcome."""
        turn = self._turn
        turn.listeners.append(self.pump)
        try:
            while True:
                while block := self._news():
                    await self._response.write(block)
                if turn.outcome is not None:
                    return
                if turn.idle:
                    turn.idle = False
                    await self._response.write(_COMMENT)
                # aiohttp sends the headers with the first block.
                self._direct = self._connection if self._shown else None
                self._needed.clear()
                await self._needed.wait()
                self._direct = None
        finally:
            turn.listeners.remove(self.pump)

    def pump(self) -> None:
        """Something changed: write it, or have `follow` see to it."""
        direct = self._direct
        if (
            direct is None
            or self._turn.outcome is not None
            or self._turn.idle
            or direct.get_write_buffer_size() > _UNREAD_BYTES_MAX
        ):
            self._needed.set()
        elif block := self._news():
            direct.write(b"%x\r\n%s\r\n" % (len(block), block))

    def _news(self) -> bytes:
        """Events of the pieces that have not been shown yet."""
        turn, first = self._turn, self._shown
        pieces = turn.pieces
        if first == len(pieces):
            return b""
        turn.shown = True
        self._shown = len(pieces)
        version = turn.version
        if first + 1 == len(pieces):  # as nearly always
            return self._writer.events(pieces[first], version)
        return b"".join([self._writer.events(piece, version) for piece in pieces[first:]])


async def replay(http: web.Request, request: Request, answer: Answer) -> web.StreamResponse:
    """Show a finished answer as a stream."""
    response = head_of(answer.turn_id, answer.replica)
    writer = chunk_writer(request, answer.turn_id, answer.model, answer.created)
    with contextlib.suppress(ConnectionResetError):
        await response.prepare(http)
        await write_again(response, writer, answer)
        await _close(response, writer, answer)
    return response


async def write_again(response: web.StreamResponse, writer: ChunkWriter, answer: Answer) -> None:
    """Write a finished answer, all but its last chunk."""
    version = answer.weight_versions[-1][2] if answer.weight_versions else None
    for piece in replayed_pieces(answer):
        await response.write(writer.events(piece, version))


def head_of(turn_id: str, replica: str | None) -> web.StreamResponse:
    """The response before it begins; `replica` is named unless the turn waits for one still."""
    headers = {
        "Content-Type": "text/event-stream; charset=utf-8",
        "Cache-Control": "no-cache",
        "x-rose-turn-id": turn_id,
    }
    if replica:
        headers["x-rose-replica"] = replica
    return web.StreamResponse(headers=headers)


async def _close(response: web.StreamResponse, writer: ChunkWriter, answer: Answer) -> None:
    await response.write(writer.last(answer) + DONE)
    await response.write_eof()
