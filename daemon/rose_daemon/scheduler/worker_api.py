"""Registration of engines that ROSE does not manage, as SGLang's gateway (sgl-model-gateway) has it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from rose.core.membership import READY
from rose_daemon.scheduler.dialects import fields
from rose_daemon.scheduler.errors import Shape, bad_request
from rose_daemon.scheduler.workers import Worker, Workers


class WorkerApi:
    """Handlers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def routes(self) -> list[tuple[web.RouteDef, Shape]]:
        """All endpoints, with the shape of their errors."""
        routes = [
            web.get("/workers", self.list),
            web.post("/workers", self.create),
            web.get("/workers/{worker}", self.show),
            web.delete("/workers/{worker}", self.delete),
            web.post("/add_worker", self.add),
            web.post("/remove_worker", self.remove),
            web.get("/list_workers", self.urls),
        ]
        return [(route, Shape.SGLANG) for route in routes]

    async def list(self, _: web.Request) -> web.Response:
        """GET /workers."""
        shown = [show(worker) for worker in self._workers.all.values()]
        stats = {"prefill_count": 0, "decode_count": 0, "regular_count": len(shown)}
        return web.json_response({"workers": shown, "total": len(shown), "stats": stats})

    async def create(self, http: web.Request) -> web.Response:
        """POST /workers `{"url": ..., "model_id": ...}`; other members of SGLang's gateway are ignored."""
        body = fields.decode(await http.read())
        url = fields.typed(body, "url", str, "")
        worker = self._workers.add(url, fields.name(body, "model_id"))
        location = f"/workers/{worker.id}"
        document = {"status": "accepted", "worker_id": worker.id, "url": worker.url, "location": location}
        return web.json_response(document, status=HTTPStatus.ACCEPTED.value, headers={"Location": location})

    async def show(self, http: web.Request) -> web.Response:
        """GET /workers/{id}."""
        return web.json_response(show(self._workers.find(unquote(http.match_info["worker"]))))

    async def delete(self, http: web.Request) -> web.Response:
        """DELETE /workers/{id}: its turns move to other replicas."""
        worker = self._workers.remove(unquote(http.match_info["worker"]))
        document = {"status": "accepted", "worker_id": worker.id}
        return web.json_response(document, status=HTTPStatus.ACCEPTED.value)

    async def add(self, http: web.Request) -> web.Response:
        """POST /add_worker?url=..., the older form."""
        worker = self._workers.add(_url(http))
        return web.Response(text=f"Successfully added worker: {worker.url}")

    async def remove(self, http: web.Request) -> web.Response:
        """POST /remove_worker?url=..., the older form."""
        worker = self._workers.remove(_url(http))
        return web.Response(text=f"Successfully removed worker: {worker.url}")

    async def urls(self, _: web.Request) -> web.Response:
        """GET /list_workers, the older form."""
        return web.json_response({"urls": list(self._workers.all)})


def show(worker: Worker) -> dict[str, Any]:
    """A worker as SGLang's gateway shows it."""
    probed = worker.probed
    return {
        "id": worker.id,
        "url": worker.url,
        "model_id": worker.model or (probed.model if probed else None),
        "is_healthy": worker.state == READY,
        "worker_type": "regular",
        "connection_mode": "http",
        "runtime_type": probed.engine if probed else None,
        "metadata": {
            "state": worker.state,
            "reason": worker.reason,
            "weight_version": None if probed is None else probed.version,
            "context_tokens_max": None if probed is None else probed.context_tokens_max,
            "configured": worker.configured,
        },
    }


def _url(http: web.Request) -> str:
    url = http.query.get("url", "")
    if not url:
        raise bad_request("name the worker: ?url=http://host:port", param="url")
    return url
