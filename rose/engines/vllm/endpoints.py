"""ROSE's own HTTP endpoints on an engine's port, guarded by the token of this host's engines.

vLLM's control routes need its dev mode, which opens much more; these open what rosed and the gateway use.
All answers are JSON; errors are `{"error": code, "detail": text}`.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from vllm.version import __version__ as vllm_version

from rose import __version__
from rose.boards import WatchedBoard
from rose.core.readings import ReplicaReading, SlackReading, Unknown
from rose.engines.vllm.bell import GateBell
from rose.engines.vllm.settings import PluginSettings, read_token
from rose.engines.vllm.updates import Answer, UpdateCycle
from rose.errors import ConfigError

_AFTER_S = 0.003
"""From the HTTP layer to the core loop's inbox takes about this long."""
_BODY_BYTES_MAX = 1 << 20

Handler = Callable[[Request], Awaitable[Response]]
BodyT = TypeVar("BodyT")


class UpdateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /rose/v1/weights/update."""

    version: int
    base_version: int
    path: str
    abort_in_flight: bool = False


class StageRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /rose/v1/weights/stage."""

    version: int
    base_version: int
    path: str


class ApplyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /rose/v1/weights/apply."""

    version: int
    abort_in_flight: bool = False


class UndoRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /rose/v1/weights/undo."""

    abort_in_flight: bool = False


class SettleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /rose/v1/weights/settle."""


class AbortRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /rose/v1/abort: request ids, with or without vLLM's prefix, or all."""

    request_ids: tuple[str, ...] = ()
    all: bool = False


class RoseEndpoints:
    """Entry point `vllm.endpoint_plugins`; vLLM calls `attach_router`, then `init_state`."""

    name = "rose"
    required_tasks: ClassVar[tuple[str, ...] | None] = ("generate",)

    def __init__(self) -> None:
        settings = PluginSettings.from_environ()
        if settings is None:
            raise ConfigError(
                f"the endpoints of ROSE are loaded, but no {PluginSettings.PREFIX}* is set",
                "take `rose` out of VLLM_PLUGINS, or start the engine with rose.engines.vllm.launch",
            )
        self._settings = settings
        self._token = read_token(Path(settings.token_file))
        self._bell = GateBell(settings)
        self._cycle = UpdateCycle(self._bell)
        self._updating: asyncio.Task[Answer] | None = None
        self._engine: Any = None
        self._about: dict[str, Any] = {}

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; a serving engine gets the read-only one alone."""
        self._add(app, "GET", "/rose/v1/engine", self.engine)
        if self._settings.role == "rollout":
            self._add(app, "POST", "/rose/v1/weights/update", self.update_weights)
            self._add(app, "POST", "/rose/v1/weights/stage", self.stage_weights)
            self._add(app, "POST", "/rose/v1/weights/apply", self.apply_weights)
            self._add(app, "POST", "/rose/v1/weights/undo", self.undo_weights)
            self._add(app, "POST", "/rose/v1/weights/settle", self.settle_weights)
            self._add(app, "GET", "/rose/v1/weights/digests", self.weight_digests)
            self._add(app, "POST", "/rose/v1/abort", self.abort)

    def _add(self, app: FastAPI, method: str, path: str, handler: Handler) -> None:
        async def guarded(request: Request) -> Response:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), self._token):
                return _json(
                    401, {"error": "unauthorized", "detail": "send the token of this host's engines"}
                )
            return await handler(request)

        app.add_api_route(path, guarded, methods=[method], include_in_schema=False, response_model=None)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Learn what does not change: model, versions, the processes and where they run."""
        self._engine = self._cycle.engine = engine_client
        if self._settings.weight_version:
            await engine_client.update_weight_version(str(self._settings.weight_version))
        workers = await engine_client.collective_rpc("rose_process")
        self._about = {
            "role": self._settings.role,
            "name": self._settings.name,
            "model": (args.served_model_name or [args.model])[0],
            "vllm_version": vllm_version,
            "rose_version": __version__,
            "block_tokens": engine_client.vllm_config.cache_config.block_size,
            "api_server": {"pid": os.getpid(), "cpus": sorted(os.sched_getaffinity(0))},
            "workers": workers,
        }

    # ---- GET /rose/v1/engine ----------------------------------------------------------------------

    async def engine(self, request: Request) -> Response:
        """Who this engine is and what it holds.  Reads the board only, so a closed gate delays nothing."""
        boards, name, now_ns = self._settings.boards, self._settings.name, time.monotonic_ns()
        board: WatchedBoard[SlackReading] | WatchedBoard[ReplicaReading]
        if self._settings.role == "serving":
            board = WatchedBoard(boards.slack(name), SlackReading)
        else:
            board = WatchedBoard(boards.replica(name), ReplicaReading)
        reading = board.read(now_ns, None)
        if isinstance(reading, Unknown):
            return _json(503, {"error": "board_unknown", "detail": str(reading)})
        weight_version = reading.weight_version if isinstance(reading, ReplicaReading) else 0
        core = {"pid": board.owner.pid if board.owner else None}
        state = {"weight_version": weight_version, "kv_total_blocks": reading.kv_total_blocks, "core": core}
        return _json(200, self._about | state)

    # ---- POST /rose/v1/weights/... ------------------------------------------------------------------

    async def update_weights(self, request: Request) -> Response:
        """Bring the engine to another version: stage, apply, settle."""

        def work(body: UpdateRequest) -> Coroutine[Any, Any, Answer]:
            cycle, abort = self._cycle, body.abort_in_flight
            return cycle.update(body.version, body.base_version, body.path, abort_in_flight=abort)

        return await self._exclusively(request, UpdateRequest, work)

    async def stage_weights(self, request: Request) -> Response:
        """Read and verify a version, while generation goes on."""

        def work(body: StageRequest) -> Coroutine[Any, Any, Answer]:
            return self._cycle.stage(body.version, body.base_version, body.path)

        return await self._exclusively(request, StageRequest, work)

    async def apply_weights(self, request: Request) -> Response:
        """Pause, write what is staged, resume."""

        def work(body: ApplyRequest) -> Coroutine[Any, Any, Answer]:
            return self._cycle.apply(body.version, abort_in_flight=body.abort_in_flight)

        return await self._exclusively(request, ApplyRequest, work)

    async def undo_weights(self, request: Request) -> Response:
        """Pause, take the latest apply back, resume."""

        def work(body: UndoRequest) -> Coroutine[Any, Any, Answer]:
            return self._cycle.undo(abort_in_flight=body.abort_in_flight)

        return await self._exclusively(request, UndoRequest, work)

    async def settle_weights(self, request: Request) -> Response:
        """What was applied stays."""
        return await self._exclusively(request, SettleRequest, lambda _: self._cycle.settle())

    async def _exclusively(
        self, request: Request, kind: type[BodyT], work: Callable[[BodyT], Coroutine[Any, Any, Answer]]
    ) -> Response:
        """One call about weights at a time.

        Once begun it is made whole, whether or not anybody still waits for the answer: new weights under the
        old version would match prefixes of the old ones.
        """
        body = await _decode(request, kind)
        if isinstance(body, Response):
            return body
        if self._updating is not None and not self._updating.done():
            return _json(409, {"error": "busy", "detail": "another weight update is under way"})
        self._updating = asyncio.create_task(work(body))
        return _answer(await asyncio.shield(self._updating))

    # ---- GET /rose/v1/weights/digests, POST /rose/v1/abort --------------------------------------------

    async def weight_digests(self, request: Request) -> Response:
        """Digest of every live parameter, by checkpoint name, computed now."""
        return _answer(await self._cycle.digests())

    async def abort(self, request: Request) -> Response:
        """End requests; their clients get what they have so far, with finish_reason `abort`."""
        body = await _decode(request, AbortRequest)
        if isinstance(body, Response):
            return body
        known = self._engine.output_processor.external_req_ids
        if body.all:
            wanted = list(known)
        else:
            names = (
                name for each in body.request_ids for name in (each, f"chatcmpl-{each}", f"cmpl-{each}-0")
            )
            wanted = [name for name in names if name in known]
        if wanted:
            async with self._bell.ringing():
                await self._engine.abort(wanted)
                await asyncio.sleep(_AFTER_S)
        return _json(200, {"aborted": len(wanted)})


class BellMiddleware:
    """ASGI middleware of a rollout engine: rings when a request comes or ends.

    A closed gate would notice a new or a disconnected client only when its bounded wait is over.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        settings = PluginSettings.require("rollout")
        self._bell = GateBell(settings)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        loop.call_later(_AFTER_S, self._bell.ring)
        try:
            await self._app(scope, receive, send)
        finally:
            loop.call_later(_AFTER_S, self._bell.ring)


async def _decode(request: Request, kind: type[Any]) -> Any:
    """The body as a `kind`, or the answer that refuses it."""
    data = await request.body()
    if len(data) > _BODY_BYTES_MAX:
        return _json(413, {"error": "too_large", "detail": f"bodies are at most {_BODY_BYTES_MAX} bytes"})
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        return _json(400, {"error": "bad_request", "detail": str(error)})


_STATUS = {"wrong_base": 409, "busy": 409, "not_staged": 409, "corrupt_delta": 422}


def _answer(answer: Answer) -> Response:
    if (code := answer.get("error")) is None:
        return _json(200, answer)
    detail = {key: value for key, value in answer.items() if key in {"detail", "version_held"}}
    return _json(_STATUS.get(code, 500), {"error": code} | detail)


def _json(status: int, body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
