"""Text to token ids and back, as an engine has it: passed on to a replica of the job, all of which agree."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web

from rose.core.cluster_view import JobView, ReplicaView
from rose.errors import NotReady
from rose.units import JobId
from rose_daemon.scheduler.dialects import fields
from rose_daemon.scheduler.errors import Failure, Refused, Shape, not_found
from rose_daemon.scheduler.identity import header_name
from rose_daemon.scheduler.jobs import JobDesk

PATHS = ("/tokenize", "/detokenize")


class TextApi:
    """vLLM's POST /tokenize and /detokenize.

    `forward` asks a URL: status and body, or NotReady.  An engine answers these beside its scheduler, so a
    replica that takes no turns at the moment can be asked too.
    """

    def __init__(
        self,
        desk: JobDesk,
        view: Callable[[JobId], JobView | None],
        forward: Callable[[str, dict[str, Any]], Awaitable[tuple[int, bytes]]],
    ) -> None:
        self._desk = desk
        self._view = view
        self._forward = forward

    def routes(self) -> list[tuple[web.RouteDef, Shape]]:
        """For `build_app`."""
        return [(web.post(path, self.pass_on), Shape.VLLM) for path in PATHS]

    async def pass_on(self, http: web.Request) -> web.Response:
        """Ask the job's replicas, those that take turns first, until one answers."""
        body = fields.decode(await http.read())
        model = fields.typed(body, "model", str, None)
        record = self._desk.resolve(header_name(http.headers, "x-rose-job"), model)
        if model not in (None, record.spec.model):
            text = f"this job rolls out {record.spec.model!r}"
            raise not_found(text, code="model_not_found", param="model")
        body["model"] = record.spec.model
        failure = f"job {record.spec.job!r} holds no replica"
        for replica in self._replicas(record.spec.job):
            try:
                status, data = await self._forward(replica.url + http.path, body)
            except NotReady as error:
                failure = str(error)
                continue
            return web.Response(body=data, status=status, content_type="application/json")
        raise Refused(Failure(HTTPStatus.SERVICE_UNAVAILABLE, "no_replica", failure))

    def _replicas(self, job: JobId) -> list[ReplicaView]:
        view = self._view(job)
        replicas = [replica for replica in view.replicas if replica.url] if view is not None else []
        return sorted(replicas, key=lambda replica: not replica.eligible)
