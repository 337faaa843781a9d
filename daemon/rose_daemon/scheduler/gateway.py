"""Turns over HTTP, in any dialect: a client's request becomes a turn, and the turn an answer."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from rose.core.events import TrajectoryEnded
from rose.units import TrajectoryId, TurnId
from rose_daemon.scheduler import batches
from rose_daemon.scheduler.dialects import fields, parse, whole_body
from rose_daemon.scheduler.dispatch import Dispatcher
from rose_daemon.scheduler.errors import bad_request, conflict, not_found
from rose_daemon.scheduler.identity import Identifier, header_name, path_name
from rose_daemon.scheduler.jobs import JobDesk
from rose_daemon.scheduler.output import Answer
from rose_daemon.scheduler.requests import Dialect, Request
from rose_daemon.scheduler.store import JobRecord, Store
from rose_daemon.scheduler.streams import replay, show
from rose_daemon.scheduler.tracing import Tracer, TurnTrace, context_of
from rose_daemon.scheduler.turns import Turn


class Gateway:
    """Handlers of the endpoints that generate."""

    def __init__(self, desk: JobDesk, dispatcher: Dispatcher, store: Store, tracer: Tracer) -> None:
        self._desk = desk
        self._dispatcher = dispatcher
        self._store = store
        self._tracer = tracer
        self._identifier = Identifier()
        self._runs = itertools.count(1)
        self._started = int(time.time())

    async def models(self, http: web.Request) -> web.Response:
        """GET /v1/models: the models of all jobs, or of the job that the request names."""
        cards = [self._card(name) for name in self._models(http)]
        return web.json_response({"object": "list", "data": cards})

    async def model(self, http: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        name = http.match_info["model"]
        if name not in self._models(http):
            raise not_found(f"no job rolls out model {name[:200]!r}", code="model_not_found", param="model")
        return web.json_response(self._card(name))

    def _models(self, http: web.Request) -> list[str]:
        job = _job_name(http)
        return list(self._desk.models) if job is None else [self._desk.resolve(job).spec.model]

    def _card(self, model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": self._started, "owned_by": "rose"}

    def handler(self, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The handler of a dialect's endpoint."""

        async def handle(http: web.Request) -> web.StreamResponse:
            return await self._serve(http, dialect)

        return handle

    async def finish_session(self, http: web.Request) -> web.Response:
        """POST /finish_session: nothing more is kept for that trajectory.

        It is named by `{"session_id": ...}` in the body or, as SkyRL does, in the query.
        """
        record = self._desk.resolve(header_name(http.headers, "x-rose-job"))
        data = await http.read()
        body = fields.decode(data) if data else {}
        session = fields.name(body, "session_id") or fields.name(dict(http.query), "session_id")
        if not session:
            raise bad_request("`session_id` must name the trajectory to finish", param="session_id")
        job = record.spec.job
        self._dispatcher.feed(TrajectoryEnded(job, TrajectoryId(session)))
        forgotten = self._store.forget_answers(job, session)
        return web.json_response({"session_id": session, "finished": True, "answers_forgotten": forgotten})

    async def _serve(self, http: web.Request, dialect: Dialect) -> web.StreamResponse:
        request = parse(dialect, await http.read())
        record = self._desk.resolve(_job_name(http), request.model)
        if request.model not in (None, record.spec.model):
            raise not_found(
                f"model {request.model!r} does not exist; this job rolls out {record.spec.model!r}",
                code="model_not_found",
                param="model",
            )
        turn_id = header_name(http.headers, "x-rose-turn-id") or header_name(http.headers, "idempotency-key")
        if parts := batches.split(request):
            return await self._serve_all(http, request, parts, record, turn_id)
        if (kept := self._kept(request, record, turn_id)) is not None:
            if request.stream:
                return await replay(http, request, kept)
            return _whole_response(request, kept)
        turn = self._turn(http, request, record, turn_id)
        turn.readers += 1
        try:
            if request.stream:
                return await show(http, request, turn)
            return _whole_response(request, await turn.settled())
        finally:
            self._dispatcher.leave(turn)

    async def _serve_all(
        self,
        http: web.Request,
        request: Request,
        parts: list[Request],
        record: JobRecord,
        turn_id: str | None,
    ) -> web.StreamResponse:
        """A request of several prompts."""
        found: list[batches.Part] = []
        turns: list[Turn] = []
        try:
            for number, part in enumerate(parts):
                name = None if turn_id is None else f"{turn_id}.{number}"
                if (kept := self._kept(part, record, name)) is not None:
                    found.append(kept)
                    continue
                turn = self._turn(http, part, record, name)
                turn.readers += 1
                turns.append(turn)
                found.append(turn)
            name = turn_id or uuid.uuid4().hex
            if request.stream:
                return await batches.show(http, request, found, name, int(time.time()))
            return await batches.whole(request, found, name)
        finally:
            for turn in turns:
                self._dispatcher.leave(turn)

    def _kept(self, request: Request, record: JobRecord, turn_id: str | None) -> Answer | None:
        """The answer that is kept of an earlier run of that turn."""
        kept = None if turn_id is None else self._store.answer(record.spec.job, turn_id)
        if turn_id is None or kept is None:
            return None
        _require_same(request, kept.digest, turn_id)
        self._dispatcher.book.counts.replayed += 1
        return kept.answer

    def _turn(self, http: web.Request, request: Request, record: JobRecord, turn_id: str | None) -> Turn:
        """The live turn of that id, or a new one."""
        job = record.spec.job
        if turn_id is not None and (live := self._dispatcher.book.find(job, turn_id)) is not None:
            _require_same(request, live.request.digest, turn_id)
            self._dispatcher.book.counts.joined += 1
            live.trace.happened("joined")
            return live
        session = path_name(http.match_info, "session")
        # Who can be told nothing but a base URL sends no ids: its turns get one each, to be kept for export.
        named = turn_id is not None or bool(session)
        turn_id = turn_id or uuid.uuid4().hex
        identity = self._identifier.identify(http.headers, request, session)
        told = identity is not None and not identity.guessed
        trajectory = identity.trajectory if identity is not None and told else turn_id
        turn = Turn(
            key=TurnId(f"{job}/{turn_id}/{next(self._runs)}"),
            turn_id=turn_id,
            named=named,
            job=job,
            trajectory=trajectory,
            model=record.spec.model,
            request=request,
            now_s=time.monotonic(),
            trace=self._trace(http, request, record, turn_id, trajectory),
        )
        affinity = identity.trajectory if identity is not None else turn_id
        group, task = (header_name(http.headers, f"x-rose-{kind}") or "" for kind in ("group", "task"))
        self._dispatcher.arrive(turn, affinity, guessed=not told, group=group, task=task)
        return turn

    def _trace(
        self, http: web.Request, request: Request, record: JobRecord, turn_id: str, trajectory: str
    ) -> TurnTrace:
        operation = "chat" if request.dialect is Dialect.CHAT else "text_completion"
        model = record.spec.model
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": model,
            "gen_ai.conversation.id": trajectory,
            "rose.job": record.spec.job,
            "rose.turn_id": turn_id,
            "rose.dialect": request.dialect.value,
        }
        return self._tracer.begin(context_of(http.headers), f"{operation} {model}", attributes)


def _job_name(http: web.Request) -> str | None:
    """The job that a request names in its path or a header."""
    return path_name(http.match_info, "job") or header_name(http.headers, "x-rose-job")


def _whole_response(request: Request, answer: Answer) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(whole_body(answer, request)),
        content_type="application/json",
        headers={"x-rose-replica": answer.replica, "x-rose-turn-id": answer.turn_id},
    )


def _require_same(request: Request, digest: str, turn_id: str) -> None:
    if request.digest != digest:
        raise conflict(f"turn {turn_id!r} was another request", code="turn_id_reused")
