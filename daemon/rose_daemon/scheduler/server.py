"""The HTTP server of the scheduler: routes, errors in the caller's dialect, authentication, time limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from rose.core.events import JobSubmitted, ReplicaDrainRequested
from rose.units import JobId, ReplicaId, WeightVersion
from rose_daemon.scheduler.errors import Failure, Refused, Shape, bad_request, not_found
from rose_daemon.scheduler.gateway import Gateway
from rose_daemon.scheduler.jobs import JobDesk
from rose_daemon.scheduler.requests import Dialect
from rose_daemon.scheduler.streams import SHAPES
from rose_daemon.service.tokens import Keyring, Scope

BODY_TIMEOUT_S = 30.0
"""A request body must be there after this long."""
IDLE_TIMEOUT_S = 75.0
"""A connection without a complete request head for this long is closed."""

SESSION = "/rose/v1/jobs/{job}/sessions/{session}"
"""Before a dialect's path: the job and the trajectory, for agents that can be told nothing but a base URL."""

_OPEN_PATHS = frozenset({"/health", "/metrics"})
_ADMIN_PATHS = frozenset(
    {
        "/rose/v1/replicas/{replica}/drain",
        "/workers",
        "/workers/{worker}",
        "/add_worker",
        "/remove_worker",
    }
)
"""The fleet, which all jobs share: whatever is not only looked at there is the operator's."""
_SUBMIT_GETS = frozenset({"/flush_cache", "/rose/v1/jobs/{job}/answers"})
"""One changes something, the other hands out what agents wrote."""
_TRY_AGAIN = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})

log = structlog.get_logger()

BodyT = TypeVar("BodyT")


_DIGITS_MAX = 15
_TRAJECTORIES_MAX = 10_000
Number = Annotated[int, msgspec.Meta(ge=0, lt=10**_DIGITS_MAX)]
"""A step or version: exact in every JSON reader, and within what the store and the journal can hold."""


class JobBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /rose/v1/jobs."""

    job: str
    model: str
    n_rl: int = 1
    n_serving_max: int = 1
    staleness_max: int = 0
    trajectories_per_replica_max: int = 16
    unknown_version_ok: bool = False
    trajectory_staleness_max: int | None = None


class StepBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /rose/v1/jobs/{job}/steps."""

    rl_step: Number
    required_version: Number


class VersionBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /rose/v1/jobs/{job}/versions."""

    version: Number


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /rose/v1/replicas/{replica}/drain."""

    drain: bool = True


class Sources(NamedTuple):
    """Where the server finds what it shows."""

    job: Callable[[JobId], dict[str, Any] | None]
    status: Callable[[], dict[str, Any]]
    metrics: Callable[[], bytes]
    drain: Callable[[ReplicaDrainRequested], None]
    trajectories: Callable[[int, JobId | None], list[dict[str, Any]]]
    """At most so many, of one job or of all."""
    explain: Callable[[str], list[dict[str, Any]]]
    """What happened to the runs of a turn id."""


class ControlApi:
    """Handlers of /rose/v1, /metrics and /health."""

    def __init__(self, desk: JobDesk, sources: Sources) -> None:
        self._desk = desk
        self._sources = sources

    async def submit(self, http: web.Request) -> web.Response:
        """Create a job: 201, or 200 when it was there already."""
        body = await _body(http, JobBody)
        spec = JobSubmitted(
            JobId(body.job),
            body.model,
            body.n_rl,
            body.n_serving_max,
            body.staleness_max,
            body.trajectories_per_replica_max,
            body.unknown_version_ok,
            body.trajectory_staleness_max,
        )
        created = self._desk.submit(spec)
        return self._job(spec.job, HTTPStatus.CREATED if created else HTTPStatus.OK)

    async def show(self, http: web.Request) -> web.Response:
        """Show a job."""
        return self._job(_job_id(http))

    async def end(self, http: web.Request) -> web.Response:
        """End a job."""
        self._desk.end(_job_id(http))
        return web.json_response({"job": _job_id(http), "ended": True})

    async def begin_step(self, http: web.Request) -> web.Response:
        """Begin an RL step."""
        body = await _body(http, StepBody)
        self._desk.begin_step(_job_id(http), body.rl_step, WeightVersion(body.required_version))
        return self._job(_job_id(http))

    async def end_step(self, http: web.Request) -> web.Response:
        """End an RL step."""
        text = http.match_info["rl_step"]
        if not text.isdecimal() or len(text) > _DIGITS_MAX:
            raise bad_request(f"{text[:32]!r} is not a step number", param="rl_step")
        self._desk.end_step(_job_id(http), int(text))
        return self._job(_job_id(http))

    async def publish(self, http: web.Request) -> web.Response:
        """Announce a version that the relay has."""
        body = await _body(http, VersionBody)
        self._desk.publish(_job_id(http), WeightVersion(body.version))
        return self._job(_job_id(http))

    async def drain(self, http: web.Request) -> web.Response:
        """Take a replica out of use, or back."""
        body = await _body(http, DrainBody)
        replica = ReplicaId(http.match_info["replica"])
        self._sources.drain(ReplicaDrainRequested(replica, body.drain))
        return web.json_response({"replica": replica, "drain": body.drain})

    async def status(self, _: web.Request) -> web.Response:
        """Everything, for `rose status`."""
        return _json(self._sources.status())

    async def trajectories(self, http: web.Request) -> web.Response:
        """Trajectories that ran lately; query: `job`, `limit` (default 100)."""
        limit = http.query.get("limit", "100")
        if not limit.isdecimal() or len(limit) > _DIGITS_MAX:
            raise bad_request(f"{limit[:32]!r} is not a number", param="limit")
        job = http.query.get("job")
        found = self._sources.trajectories(min(int(limit), _TRAJECTORIES_MAX), JobId(job) if job else None)
        return _json({"trajectories": found})

    async def explain(self, http: web.Request) -> web.Response:
        """What happened to a turn, and why."""
        turn = http.match_info["turn"]
        if not (runs := self._sources.explain(turn)):
            raise not_found(f"nothing is known of turn {turn[:64]!r} (any more)", code="turn_unknown")
        return _json({"turn": turn, "runs": runs})

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus's text format."""
        return web.Response(
            body=self._sources.metrics(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )

    async def health(self, _: web.Request) -> web.Response:
        """The loop runs."""
        return web.json_response({"status": "ok"})

    def _job(self, job: JobId, status: int = HTTPStatus.OK) -> web.Response:
        view = self._sources.job(job)
        if view is None:
            raise not_found(f"no job {job!r} is running", code="job_unknown")
        return _json(view, status)


def build_app(
    gateway: Gateway,
    shaped: Sequence[tuple[web.RouteDef, Shape]],
    control: ControlApi,
    *,
    tokens: Keyring,
    body_bytes_max: int,
) -> web.Application:
    """The application, with routes of engines' own dialects; an empty ring asks clients for none."""
    shapes = {route.path: shape for route, shape in shaped}
    shapes |= {base + dialect.path: shape for dialect, shape in SHAPES.items() for base in ("", SESSION)}
    app = web.Application(
        middlewares=[_errors(shapes), _authentication(tokens), _whole_body], client_max_size=body_bytes_max
    )
    for base in ("", SESSION):
        app.add_routes([web.post(base + dialect.path, gateway.handler(dialect)) for dialect in Dialect])
        app.add_routes([web.get(f"{base}/v1/models", gateway.models)])
        app.add_routes([web.get(base + "/v1/models/{model:.+}", gateway.model)])
    app.add_routes([route for route, _ in shaped])
    app.add_routes(
        [
            web.get("/health", control.health),
            web.get("/metrics", control.metrics),
            web.post("/finish_session", gateway.finish_session),
            web.get("/rose/v1/status", control.status),
            web.get("/rose/v1/trajectories", control.trajectories),
            web.get("/rose/v1/turns/{turn}", control.explain),
            web.post("/rose/v1/jobs", control.submit),
            web.get("/rose/v1/jobs/{job}", control.show),
            web.delete("/rose/v1/jobs/{job}", control.end),
            web.post("/rose/v1/jobs/{job}/steps", control.begin_step),
            web.post("/rose/v1/jobs/{job}/steps/{rl_step}/end", control.end_step),
            web.post("/rose/v1/jobs/{job}/versions", control.publish),
            web.post("/rose/v1/replicas/{replica}/drain", control.drain),
        ]
    )
    return app


def _errors(shapes: Mapping[str, Shape]) -> Middleware:
    """Answer every error in the shape of its path; of paths that nobody knows, in OpenAI's."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as refused:
            failure = refused.failure
        except web.HTTPRequestEntityTooLarge as error:
            text = f"the body is over the limit of {request.client_max_size} bytes"
            failure = Failure(error.status, "body_too_large", text)
        except web.HTTPException as error:
            if error.status < HTTPStatus.BAD_REQUEST:
                raise
            code = error.reason.lower().replace(" ", "_")
            failure = Failure(error.status, code, f"{request.method} {request.path}: {error.reason}")
        response = _json(failure.document(shapes.get(_pattern(request), Shape.OPENAI)), failure.status)
        response.headers["x-rose-error"] = failure.code
        if failure.status in _TRY_AGAIN or failure.code == "version_unavailable":
            response.headers["Retry-After"] = "1"
        if failure.status == HTTPStatus.REQUEST_TIMEOUT:
            response.force_close()
        return response

    return answer


def _pattern(request: web.Request) -> str:
    """The path as it was registered."""
    resource = request.match_info.route.resource
    return request.path if resource is None else resource.canonical


def _authentication(tokens: Keyring) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if tokens and request.path not in _OPEN_PATHS:
            held = tokens.scope_of(request.headers.get("Authorization", ""))
            if held is None:
                text = "send the gateway's token as `Authorization: Bearer ...`"
                raise Refused(Failure(HTTPStatus.UNAUTHORIZED, "bad_token", text))
            if held < (needed := _scope(request)):
                text = f"the token allows {held.name.lower()}, this takes {needed.name.lower()}"
                raise Refused(Failure(HTTPStatus.FORBIDDEN, "scope_too_small", text))
        return await handler(request)

    return check


def _scope(request: web.Request) -> Scope:
    """What a request takes: looking, using what there is, or changing what there is for all."""
    if _pattern(request) in _ADMIN_PATHS and request.method != "GET":
        return Scope.ADMIN
    looks = request.method in ("GET", "HEAD") and _pattern(request) not in _SUBMIT_GETS
    return Scope.READ if looks else Scope.SUBMIT


@web.middleware
async def _whole_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Read the body before the handler runs, so that a slow sender holds nothing but its connection."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            await request.read()
    except TimeoutError:
        text = f"the body did not come within {BODY_TIMEOUT_S:.0f} s"
        raise Refused(Failure(HTTPStatus.REQUEST_TIMEOUT, "body_timeout", text)) from None
    return await handler(request)


async def _body(http: web.Request, kind: type[BodyT]) -> BodyT:
    try:
        return msgspec.json.decode(await http.read(), type=kind)
    except msgspec.ValidationError as error:
        raise bad_request(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None


def _job_id(http: web.Request) -> JobId:
    return JobId(http.match_info["job"])


def _json(document: dict[str, Any], status: int = HTTPStatus.OK) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), status=status, content_type="application/json")
