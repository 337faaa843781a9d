"""Server-sent events to one client: the turn as it grows, and comments while it does not."""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from rose_daemon.scheduler.dialects import ChunkWriter, chunk_writer
from rose_daemon.scheduler.errors import Failure, Refused, Shape
from rose_daemon.scheduler.output import Answer, replayed_pieces
from rose_daemon.scheduler.requests import Dialect, Request
from rose_daemon.scheduler.turns import Turn

_COMMENT = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"

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
    while not turn.pieces and turn.outcome is None and not turn.idle:
        await turn.changed()
    if isinstance(turn.outcome, Failure) and not turn.pieces:
        raise Refused(turn.outcome)
    response = await _open(http, turn.turn_id, turn.replica)
    writer = chunk_writer(request, turn.turn_id, turn.model, int(time.time()))
    shown = 0
    while True:
        if shown < len(turn.pieces):
            turn.shown = True
            block = b"".join(_rendered(writer, turn, shown))
            shown = len(turn.pieces)
            if block:
                await response.write(block)
        elif turn.outcome is not None:
            break
        else:
            if turn.idle:
                turn.idle = False
                await response.write(_COMMENT)
            await turn.changed()
    if isinstance(turn.outcome, Answer):
        return await _close(response, writer, turn.outcome)
    if isinstance(turn.outcome, Failure):
        await response.write(_event(turn.outcome.document(SHAPES[request.dialect])))
    await response.write_eof()
    return response


async def replay(http: web.Request, request: Request, answer: Answer) -> web.StreamResponse:
    """Show a finished answer as a stream."""
    response = await _open(http, answer.turn_id, answer.replica)
    writer = chunk_writer(request, answer.turn_id, answer.model, answer.created)
    version = answer.weight_versions[-1][2] if answer.weight_versions else None
    for piece in replayed_pieces(answer):
        for document in writer.chunks(piece, version):
            await response.write(_event(document))
    return await _close(response, writer, answer)


def _rendered(writer: ChunkWriter, turn: Turn, first: int) -> list[bytes]:
    """Events of the pieces from `first` on: all that is there goes out in one write."""
    version = turn.version
    return [_event(document) for piece in turn.pieces[first:] for document in writer.chunks(piece, version)]


def _event(document: object) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


async def _open(http: web.Request, turn_id: str, replica: str | None) -> web.StreamResponse:
    """Begin the response; `replica` is named unless the turn waits for one still."""
    headers = {
        "Content-Type": "text/event-stream; charset=utf-8",
        "Cache-Control": "no-cache",
        "x-rose-turn-id": turn_id,
    }
    if replica:
        headers["x-rose-replica"] = replica
    response = web.StreamResponse(headers=headers)
    await response.prepare(http)
    return response


async def _close(response: web.StreamResponse, writer: ChunkWriter, answer: Answer) -> web.StreamResponse:
    await response.write(b"".join([*map(_event, writer.last(answer)), _DONE]))
    await response.write_eof()
    return response
