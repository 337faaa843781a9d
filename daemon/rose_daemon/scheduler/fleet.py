"""Control endpoints of vLLM and SGLang, answered for the whole fleet of a job.

A trainer that drives one engine drives all of them here: pausing, aborting, flushing, asking for versions.
What only makes sense towards one engine (collective weight transfers, its memory) is refused with 501, as
ROSE moves weights through its relay and decides on memory itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

import rose
from rose.core.cluster_view import JobView, ReplicaView
from rose.errors import NotReady
from rose.units import JobId, WeightVersion
from rose_daemon.scheduler.dialects import fields
from rose_daemon.scheduler.dispatch import Dispatcher
from rose_daemon.scheduler.errors import Failure, Refused, Shape, bad_request
from rose_daemon.scheduler.identity import header_name
from rose_daemon.scheduler.jobs import JobDesk
from rose_daemon.scheduler.output import version_label
from rose_daemon.scheduler.turns import Turn

_VLLM_PAUSES = frozenset({"abort", "wait", "keep"})
_SGLANG_PAUSES = frozenset({"abort", "retract", "in_place"})
_VERSION_DIGITS_MAX = 15
_IDS_MAX = 100_000

VLLM_REFUSED = (
    "init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update",
    "start_draft_weight_update", "update_weights", "weight_checker", "sleep", "wake_up",
)  # fmt: skip
SGLANG_REFUSED = (
    "init_weights_update_group", "destroy_weights_update_group", "update_weights_from_disk",
    "update_weights_from_distributed", "update_weights_from_tensor", "update_weights_from_ipc",
    "get_weights_by_name", "release_memory_occupation", "resume_memory_occupation", "begin_weight_update",
    "end_weight_update", "weights_checker",
)  # fmt: skip


class FleetApi:
    """Handlers.

    `view` shows a job as the machine sees it, None if it is not running; `flush` empties the caches of
    engines that know no salt, and may raise NotReady.
    """

    def __init__(
        self,
        desk: JobDesk,
        dispatcher: Dispatcher,
        view: Callable[[JobId], JobView | None],
        flush: Callable[[], Awaitable[None]],
    ) -> None:
        self._desk = desk
        self._dispatcher = dispatcher
        self._view = view
        self._flush = flush

    def routes(self) -> list[tuple[web.RouteDef, Shape]]:
        """All endpoints, with the shape of their errors."""
        vllm = [
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.get("/is_paused", self.is_paused),
            web.post("/abort_requests", self.abort_requests),
            web.post("/inference/v1/abort_requests", self.abort_requests),
            web.get("/weight_info", self.weight_version),
            web.get("/get_world_size", self.refused),
            web.post("/finish_weight_update", self.finish_weight_update),
            web.post("/update_weight_version", self.update_weight_version),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
            *(web.post(f"/{name}", self.refused) for name in VLLM_REFUSED),
        ]
        sglang = [
            web.post("/abort_request", self.abort_request),
            web.post("/pause_generation", self.pause_generation),
            web.post("/continue_generation", self.continue_generation),
            web.get("/flush_cache", self.flush_cache),
            web.post("/flush_cache", self.flush_cache),
            web.get("/get_weight_version", self.weight_version),
            web.get("/weight_version", self.weight_version),
            web.get("/health_generate", self.health_generate),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
            web.get("/model_info", self.model_info),
            web.get("/get_model_info", self.model_info),
            *(web.post(f"/{name}", self.refused) for name in SGLANG_REFUSED),
        ]
        return [(route, Shape.VLLM) for route in vllm] + [(route, Shape.SGLANG) for route in sglang]

    # ---- pauses ------------------------------------------------------------------------------------

    async def pause(self, http: web.Request) -> web.Response:
        """vLLM's POST /pause?mode=abort|wait|keep."""
        mode = http.query.get("mode", "abort")
        await self._pause(self._job(http), _one_of("mode", mode, _VLLM_PAUSES))
        return web.json_response({"status": "paused"})

    async def resume(self, http: web.Request) -> web.Response:
        """vLLM's POST /resume."""
        self._desk.resume(self._job(http))
        return web.json_response({"status": "resumed"})

    async def is_paused(self, http: web.Request) -> web.Response:
        """vLLM's GET /is_paused."""
        return web.json_response({"is_paused": self._record(http).paused})

    async def pause_generation(self, http: web.Request) -> web.Response:
        """SGLang's POST /pause_generation `{"mode": "abort" | "retract" | "in_place"}`."""
        mode = fields.typed(await _body(http), "mode", str, "abort")
        _one_of("mode", mode, _SGLANG_PAUSES)
        await self._pause(self._job(http), "abort" if mode == "abort" else "keep")
        return web.json_response({"status": "ok", "message": "Generation paused successfully."})

    async def continue_generation(self, http: web.Request) -> web.Response:
        """SGLang's POST /continue_generation."""
        self._desk.resume(self._job(http))
        return web.json_response({"status": "ok", "message": "Generation continued successfully."})

    async def _pause(self, job: JobId, mode: str) -> None:
        self._desk.pause(job, stop=mode == "keep")
        if mode == "abort":
            self._abort(self._dispatcher.book.of_job(job))
        while mode == "wait" and (tasks := self._attempts(job)):
            await asyncio.wait(tasks)

    def _attempts(self, job: JobId) -> list[asyncio.Task[None]]:
        turns = self._dispatcher.book.of_job(job)
        return [turn.attempt.task for turn in turns if turn.attempt is not None and turn.attempt.task]

    # ---- aborts ------------------------------------------------------------------------------------

    async def abort_requests(self, http: web.Request) -> web.Response:
        """vLLM's POST /abort_requests `{"request_ids": [...]}`; without ids, all turns of the job."""
        ids = fields.typed(await _body(http), "request_ids", list, [])
        if len(ids) > _IDS_MAX or not all(isinstance(one, str) for one in ids):
            raise bad_request("`request_ids` must be a list of names", param="request_ids")
        aborted = self._abort_named(http, ids) if ids else self._abort_all(http)
        return web.json_response({"status": "aborted", "aborted": aborted})

    async def abort_request(self, http: web.Request) -> web.Response:
        """SGLang's POST /abort_request `{"rid": ...}` or `{"abort_all": true}`."""
        body = await _body(http)
        rid = fields.name(body, "rid")
        if fields.typed(body, "abort_all", bool, False):
            self._abort_all(http)
        elif rid:
            self._abort_named(http, [rid])
        else:
            raise bad_request("name a request by `rid`, or all of them by `abort_all`", param="rid")
        return web.Response()

    def _abort_named(self, http: web.Request, names: list[str]) -> int:
        job = self._job(http)
        return self._abort([turn for turn in self._dispatcher.book.named(set(names)) if turn.job == job])

    def _abort_all(self, http: web.Request) -> int:
        return self._abort(self._dispatcher.book.of_job(self._job(http)))

    def _abort(self, turns: list[Turn]) -> int:
        for turn in turns:
            self._dispatcher.abort(turn)
        return len(turns)

    # ---- versions ----------------------------------------------------------------------------------

    async def weight_version(self, http: web.Request) -> web.Response:
        """SGLang's GET /get_weight_version and vLLM's GET /weight_info."""
        view = self._job_view(http)
        return web.json_response({"weight_version": _version(view), "rose": _versions(view)})

    async def update_weight_version(self, http: web.Request) -> web.Response:
        """Both dialects' POST /update_weight_version `{"new_version": "7"}`: turns need that one from now on.

        It has to be on the relay: the engines pull it from there.
        """
        body = await _body(http)
        version = _number(body.get("new_version"), "new_version")
        before = _version(self._job_view(http))
        self._desk.move_to(self._job(http), version)
        if fields.typed(body, "abort_all_requests", bool, False):
            self._abort_all(http)
        text = f"turns need version {version} from now on; they needed {before}"
        return web.json_response({"success": True, "new_version": str(version), "message": text})

    async def finish_weight_update(self, http: web.Request) -> web.Response:
        """vLLM's POST /finish_weight_update `{"weight_version": "7"}`; as /update_weight_version."""
        version = (await _body(http)).get("weight_version")
        if version is None:
            raise Refused(_NOT_HERE)
        self._desk.move_to(self._job(http), _number(version, "weight_version"))
        return web.json_response({"message": "Weight update finished"})

    async def refused(self, _: web.Request) -> web.Response:
        """What one engine does, and a fleet whose weights and memory ROSE moves does not."""
        raise Refused(_NOT_HERE)

    # ---- caches, health, information -------------------------------------------------------------------

    async def flush_cache(self, http: web.Request) -> web.Response:
        """SGLang's /flush_cache: turns from now on match no prefix from before."""
        await self._flush_prefixes(self._job(http))
        return web.Response(text="Cache flushed.\n")

    async def reset_prefix_cache(self, http: web.Request) -> web.Response:
        """vLLM's POST /reset_prefix_cache; as /flush_cache."""
        await self._flush_prefixes(self._job(http))
        return web.json_response({"success": True})

    async def _flush_prefixes(self, job: JobId) -> None:
        self._desk.flush(job)
        try:
            await self._flush()
        except NotReady as error:
            raise Refused(Failure(HTTPStatus.SERVICE_UNAVAILABLE, "not_flushed", str(error))) from None

    async def health_generate(self, http: web.Request) -> web.Response:
        """SGLang's GET /health_generate: 200 if a replica takes or runs turns, else 503."""
        view = self._job_view(http)
        if not any(replica.eligible or replica.turns_in_flight for replica in view.replicas):
            text = f"no replica of job {view.job!r} takes turns now"
            raise Refused(Failure(HTTPStatus.SERVICE_UNAVAILABLE, "no_replica", text))
        return web.Response()

    async def model_info(self, http: web.Request) -> web.Response:
        """SGLang's GET /model_info."""
        return web.json_response(_model(self._job_view(http)))

    async def server_info(self, http: web.Request) -> web.Response:
        """SGLang's GET /server_info: the fleet as one server, and each replica in `internal_states`."""
        view = self._job_view(http)
        cap = view.trajectories_per_replica_max
        document = _model(view) | {
            "served_model_name": view.model,
            "status": "ready" if any(replica.eligible for replica in view.replicas) else "busy",
            "version": f"rose {rose.__version__}",
            "max_running_requests": cap * len(view.replicas),
            "internal_states": [_replica(replica) for replica in view.replicas],
            "rose": _versions(view),
        }
        return web.json_response(document)

    # ---- inside ------------------------------------------------------------------------------------

    def _record(self, http: web.Request) -> Any:
        return self._desk.resolve(header_name(http.headers, "x-rose-job"))

    def _job(self, http: web.Request) -> JobId:
        job: JobId = self._record(http).spec.job
        return job

    def _job_view(self, http: web.Request) -> JobView:
        view = self._view(self._job(http))
        assert view is not None, "the desk knows a job that the machine does not"
        return view


_NOT_HERE = Failure(
    HTTPStatus.NOT_IMPLEMENTED,
    "moved_by_rose",
    "the gateway stands for a fleet whose weights and memory ROSE moves: publish versions on the relay"
    " (rose.weights.Publisher), then POST /update_weight_version",
)


async def _body(http: web.Request) -> dict[str, Any]:
    """A JSON object; no body is an empty one.  Raises Refused (400)."""
    data = await http.read()
    return fields.decode(data) if data else {}


def _one_of(name: str, value: str, allowed: frozenset[str]) -> str:
    if value not in allowed:
        raise bad_request(f"`{name}` must be one of {', '.join(sorted(allowed))}", param=name)
    return value


def _number(value: Any, name: str) -> WeightVersion:
    text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    if not text.isdecimal() or not text.isascii() or len(text) > _VERSION_DIGITS_MAX:
        raise bad_request(f"`{name}` must be the number of a version on the relay", param=name)
    return WeightVersion(int(text))


def _version(view: JobView) -> str:
    """The oldest version that the job's replicas run: the fleet has reached at least that one."""
    held = [replica.weight_version for replica in view.replicas]
    known = [version for version in held if version is not None]
    return version_label(None if len(known) < len(held) else min(known, default=view.required_version))


def _versions(view: JobView) -> dict[str, Any]:
    return {
        "required_version": view.required_version,
        "latest_version": view.latest_version,
        "replicas": {replica.replica: replica.weight_version for replica in view.replicas},
    }


def _model(view: JobView) -> dict[str, Any]:
    return {
        "model_path": view.model,
        "tokenizer_path": view.model,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": _version(view),
    }


def _replica(replica: ReplicaView) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(replica)
    return document | {"num_running_reqs": replica.turns_in_flight}
