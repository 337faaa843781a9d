"""Engines that ROSE does not manage: vLLM or SGLang servers known by their URL, used as dedicated replicas.

They are named in `scheduler.workers` or registered while the scheduler runs; those survive a restart.  Each
is asked every `PROBE_S` what it is and how it fares; towards the machine all of them are one node.  ROSE does
not know their weights: a version is taken from an engine that tells a number, and is unknown else, so that
only jobs with `unknown_version_ok` run on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog

from rose.config_rules import engine_address_fault
from rose.core.events import ClusterEvent, NodeHeartbeat, NodeLeft, NodeRegistered, ReplicaReport
from rose.core.membership import DEDICATED, READY
from rose.errors import NotReady
from rose.units import NodeId, ReplicaId, WeightVersion
from rose_daemon.scheduler.errors import bad_request, conflict, not_found
from rose_daemon.scheduler.store import Store
from rose_daemon.scheduler.upstream import SGLANG, VLLM, Upstream

NODE = NodeId("external-workers")
PROBE_S = 2.0
UNREACHABLE = "unreachable"
STARTING = "starting"
_WORKERS_MAX = 4096

log = structlog.get_logger()


class Probed(NamedTuple):
    """What an engine told of itself."""

    engine: str
    model: str
    context_tokens_max: int
    version: WeightVersion | None


class Worker:
    """One engine."""

    def __init__(self, url: str, model: str, *, configured: bool) -> None:
        self.url = url
        self.model = model
        """As registered; empty takes the first that the engine serves."""
        self.configured = configured
        self.probed: Probed | None = None
        self.state = STARTING
        self.reason = "not probed yet"

    @property
    def id(self) -> ReplicaId:
        """Name of the replica: host and port."""
        return ReplicaId(self.url.partition("://")[2])

    def report(self) -> ReplicaReport:
        """For the machine."""
        probed = self.probed
        return ReplicaReport(
            replica=self.id,
            kind=DEDICATED,
            state=self.state,
            url=self.url,
            model=self.model or (probed.model if probed else ""),
            weight_version=probed.version if probed else None,
            context_tokens_max=probed.context_tokens_max if probed else 0,
            engine=probed.engine if probed else VLLM,
        )


class Workers:
    """All of them.  `name` is that of this run of the scheduler.

    Towards the machine they are a node that comes with the first of them and leaves with the last; it is
    heard every `beat_s`.
    """

    def __init__(
        self,
        urls: tuple[str, ...],
        name: str,
        beat_s: float,
        *,
        store: Store,
        upstream: Upstream,
        feed: Callable[[ClusterEvent], None],
    ) -> None:
        self._name = name
        self._beat_s = beat_s
        self._sessions = 0
        self._session = ""
        self._store = store
        self._upstream = upstream
        self._feed = feed
        self._sequence = 0
        self._probes: dict[str, asyncio.Task[None]] = {}
        self.all: dict[str, Worker] = {}
        for url in urls:
            self.all[url.rstrip("/")] = Worker(url.rstrip("/"), "", configured=True)
        for url, model in store.workers().items():
            self.all.setdefault(url, Worker(url, model, configured=False))

    def add(self, url: str, model: str = "") -> Worker:
        """Register an engine; a repeat changes nothing.  Raises Refused (400, 409)."""
        url = _checked(url)
        if (known := self.all.get(url)) is not None:
            if model and model != known.model:
                raise conflict(f"{url} is registered for model {known.model!r}", code="worker_exists")
            return known
        if len(self.all) >= _WORKERS_MAX:
            raise conflict(f"{_WORKERS_MAX} workers are registered already", code="too_many_workers")
        self._store.put_worker(url, model)
        worker = self.all[url] = Worker(url, model, configured=False)
        self._watch(worker)
        return worker

    def remove(self, url: str) -> Worker:
        """Let an engine go: its turns move.  Raises Refused (404, 409)."""
        worker = self.find(url)
        if worker.configured:
            raise conflict(f"{worker.url} is named in scheduler.workers", code="worker_configured")
        self._store.delete_worker(worker.url)
        del self.all[worker.url]
        if (probe := self._probes.pop(worker.url, None)) is not None:
            probe.cancel()
        self._beat()
        return worker

    def find(self, name: str) -> Worker:
        """By URL or id.  Raises Refused (404)."""
        for worker in self.all.values():
            if name.rstrip("/") in (worker.url, worker.id):
                return worker
        raise not_found(f"no worker {name!r} is registered", code="worker_unknown")

    async def flush(self) -> None:
        """Flush the caches of SGLang engines, which know no salt.  Raises NotReady."""
        for worker in list(self.all.values()):
            if worker.probed is not None and worker.probed.engine == SGLANG:
                await self._upstream.post(f"{worker.url}/flush_cache")

    async def run(self) -> None:
        """Probe and report until cancelled."""
        for worker in self.all.values():
            self._watch(worker)
        try:
            while True:
                self._beat()
                await asyncio.sleep(self._beat_s)
        finally:
            for probe in self._probes.values():
                probe.cancel()

    # ---- inside ------------------------------------------------------------------------------------

    def _watch(self, worker: Worker) -> None:
        self._probes[worker.url] = asyncio.create_task(self._keep_probing(worker))

    async def _keep_probing(self, worker: Worker) -> None:
        while True:
            before = (worker.state, worker.probed)
            try:
                worker.probed = await self._probe(worker)
                worker.state, worker.reason = READY, ""
            except NotReady as error:
                worker.state, worker.reason = UNREACHABLE, str(error)
            if before != (worker.state, worker.probed):
                log.info("worker_" + worker.state, url=worker.url, text=worker.reason, found=worker.probed)
                self._beat()
            await asyncio.sleep(PROBE_S)

    async def _probe(self, worker: Worker) -> Probed:
        """Ask an engine what it is.  Raises NotReady."""
        await self._upstream.get(f"{worker.url}/health")
        cards = (await self._upstream.get_json(f"{worker.url}/v1/models")).get("data")
        known = {card["id"]: card for card in cards or () if isinstance(card, dict) and "id" in card}
        if not known or (worker.model and worker.model not in known):
            raise NotReady(f"{worker.url} serves {', '.join(known) or 'no model'}, not {worker.model!r}")
        model = worker.model or next(iter(known))
        context = known[model].get("max_model_len")
        info = await self._info(worker.url)
        engine = SGLANG if "is_generation" in info else VLLM
        label = info.get("weight_version")
        version = WeightVersion(int(label)) if isinstance(label, str) and label.isdecimal() else None
        return Probed(engine, model, context if isinstance(context, int) else 0, version)

    async def _info(self, url: str) -> dict[str, Any]:
        """SGLang's `/model_info` (before: `/get_model_info`), or vLLM's `/weight_info`, or nothing."""
        for path in ("/model_info", "/get_model_info", "/weight_info"):
            with contextlib.suppress(NotReady):
                return await self._upstream.get_json(url + path)
        return {}

    def _beat(self) -> None:
        if self.all and not self._session:
            self._sessions += 1
            self._session = f"{self._name}-{self._sessions}"
            self._feed(NodeRegistered(NODE, self._session, ()))
        if not self.all:
            if self._session:
                self._feed(NodeLeft(NODE, self._session))
                self._session = ""
            return
        self._sequence += 1
        # Before its first probe it is not known what an engine runs.
        reports = tuple(worker.report() for worker in self.all.values() if worker.probed is not None)
        self._feed(NodeHeartbeat(NODE, self._session, self._sequence, reports))


def _checked(url: str) -> str:
    """The address without a slash at its end.  Raises Refused (400)."""
    if fault := engine_address_fault(url):
        raise bad_request(fault, param="url")
    return url.rstrip("/")
