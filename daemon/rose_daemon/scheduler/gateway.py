"""The OpenAI dialect: a client's request becomes a turn, and the turn an answer."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable

import msgspec
from aiohttp import web

from rose.units import JobId, TurnId
from rose_daemon.scheduler.dispatch import Dispatcher
from rose_daemon.scheduler.errors import Failure, Refused, bad_request, conflict, not_found
from rose_daemon.scheduler.jobs import JobDesk
from rose_daemon.scheduler.output import Answer, ChunkWriter, head, replayed_pieces, whole_body
from rose_daemon.scheduler.requests import Dialect, Request, parse
from rose_daemon.scheduler.store import JobRecord, StoredAnswer
from rose_daemon.scheduler.turns import Turn

_NAME_MAX = 256
_JSON = "application/json"


class Gateway:
    """Handlers of /v1.  `stored` finds the finished turn of a job by its id."""

    def __init__(
        self, desk: JobDesk, dispatcher: Dispatcher, stored: Callable[[JobId, str], StoredAnswer | None]
    ) -> None:
        self._desk = desk
        self._dispatcher = dispatcher
        self._stored = stored
        self._runs = itertools.count(1)
        self._started = int(time.time())

    async def models(self, _: web.Request) -> web.Response:
        """GET /v1/models: the models of all jobs."""
        cards = [
            {"id": model, "object": "model", "created": self._started, "owned_by": "rose"}
            for model in self._desk.models
        ]
        return web.json_response({"object": "list", "data": cards})

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._serve(http, Dialect.CHAT)

    async def completion(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._serve(http, Dialect.COMPLETION)

    async def _serve(self, http: web.Request, dialect: Dialect) -> web.StreamResponse:
        request = parse(dialect, await http.read())
        record = self._desk.resolve(_name(http, "x-rose-job"))
        if request.model not in (None, record.spec.model):
            raise not_found(
                f"model {request.model!r} does not exist; this job rolls out {record.spec.model!r}",
                code="model_not_found",
                param="model",
            )
        turn_id = _name(http, "x-rose-turn-id") or _name(http, "idempotency-key")
        if turn_id is not None and (kept := self._stored(record.spec.job, turn_id)) is not None:
            _require_same(request, kept.digest, turn_id)
            self._dispatcher.book.counts.replayed += 1
            return await self._replay(http, request, kept.answer)
        turn = self._turn(http, request, record, turn_id)
        turn.readers += 1
        try:
            if request.stream:
                return await _stream(http, request, turn)
            return await _whole(request, turn)
        finally:
            self._dispatcher.leave(turn)

    def _turn(self, http: web.Request, request: Request, record: JobRecord, turn_id: str | None) -> Turn:
        """The live turn of that id, or a new one."""
        job = record.spec.job
        if turn_id is not None and (live := self._dispatcher.book.find(job, turn_id)) is not None:
            _require_same(request, live.request.digest, turn_id)
            self._dispatcher.book.counts.joined += 1
            return live
        named = turn_id is not None
        turn_id = turn_id or uuid.uuid4().hex
        session = request.body.get("session_id")
        trajectory = _name(http, "x-rose-trajectory") or (session if isinstance(session, str) else None)
        turn = Turn(
            key=TurnId(f"{job}/{turn_id}/{next(self._runs)}"),
            turn_id=turn_id,
            named=named,
            job=job,
            trajectory=trajectory or turn_id,
            model=record.spec.model,
            request=request,
            now_s=time.monotonic(),
        )
        self._dispatcher.arrive(turn, _name(http, "x-rose-group") or "", _name(http, "x-rose-task") or "")
        return turn

    async def _replay(self, http: web.Request, request: Request, answer: Answer) -> web.StreamResponse:
        if not request.stream:
            return _whole_response(request, answer)
        response = await _open_stream(http, answer.turn_id, answer.replica)
        writer = ChunkWriter(request, head(answer.turn_id, answer.dialect, answer.model, answer.created))
        for piece in replayed_pieces(answer):
            await _send(response, writer.chunk(piece))
        return await _end_stream(response, writer, answer)


async def _whole(request: Request, turn: Turn) -> web.Response:
    while turn.outcome is None:
        await turn.changed()
    return _whole_response(request, _answer_of(turn))


async def _stream(http: web.Request, request: Request, turn: Turn) -> web.StreamResponse:
    """Show the turn as it grows.

    Nothing is sent before its first output, so that errors until then keep their status.
    """
    while not turn.pieces and turn.outcome is None:
        await turn.changed()
    if not turn.pieces:
        _answer_of(turn)
    replica = turn.attempt.replica if turn.attempt is not None else turn.attempts[-1].replica
    turn.shown = True
    response = await _open_stream(http, turn.turn_id, replica)
    writer = ChunkWriter(request, head(turn.turn_id, request.dialect, turn.model, int(time.time())))
    shown = 0
    while True:
        while shown < len(turn.pieces):
            shown += 1
            await _send(response, writer.chunk(turn.pieces[shown - 1]))
        if turn.outcome is not None:
            break
        await turn.changed()
    if isinstance(turn.outcome, Answer):
        return await _end_stream(response, writer, turn.outcome)
    if isinstance(turn.outcome, Failure):
        await _send(response, turn.outcome.document())
    await response.write_eof()
    return response


def _answer_of(turn: Turn) -> Answer:
    """The outcome, if it is an answer.  Raises Refused for a failed turn."""
    outcome = turn.outcome
    if isinstance(outcome, Failure):
        raise Refused(outcome)
    # A turn is cancelled only after its last reader has left.
    assert isinstance(outcome, Answer), f"{turn.key} ended as {outcome!r} under its reader"
    return outcome


def _whole_response(request: Request, answer: Answer) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(whole_body(answer, request)),
        content_type=_JSON,
        headers={"x-rose-replica": answer.replica, "x-rose-turn-id": answer.turn_id},
    )


async def _open_stream(http: web.Request, turn_id: str, replica: str) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "x-rose-replica": replica,
            "x-rose-turn-id": turn_id,
        }
    )
    await response.prepare(http)
    return response


async def _send(response: web.StreamResponse, document: dict[str, object]) -> None:
    await response.write(b"data: " + msgspec.json.encode(document) + b"\n\n")


async def _end_stream(
    response: web.StreamResponse, writer: ChunkWriter, answer: Answer
) -> web.StreamResponse:
    await _send(response, writer.last(answer))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _require_same(request: Request, digest: str, turn_id: str) -> None:
    if request.digest != digest:
        raise conflict(f"turn {turn_id!r} was another request", code="turn_id_reused")


def _name(http: web.Request, header: str) -> str | None:
    """A header that names something.  Raises Refused (400) for one that cannot be a name."""
    value = http.headers.get(header)
    if value is None or not value.strip():
        return None
    value = value.strip()
    if len(value) > _NAME_MAX or not value.isprintable() or not value.isascii():
        raise bad_request(
            f"{header} must be at most {_NAME_MAX} printable ASCII characters", code="bad_header"
        )
    return value
