"""Prometheus metrics of rosed, computed from the node's state when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rose.core.lifecycle import ReplicaState
from rose.core.nodeview import NodeView
from rose.errors import NotReady
from rose_daemon.node.updates import UpdateHistory

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PER_REPLICA = {
    "kv_used_blocks": "KV blocks in use",
    "kv_total_blocks": "KV blocks of the engine",
    "running": "Requests running",
    "waiting": "Requests waiting",
}


class NodeCollector(Collector):
    """Turns the node's view into metric families.  What is unknown is left out, never 0."""

    def __init__(self, view: Callable[[], NodeView], history: UpdateHistory) -> None:
        self._view = view
        self._history = history

    def collect(self) -> Iterator[Metric]:
        """All families, as of now."""
        view = self._view()
        yield GaugeMetricFamily("rose_healthy", "Whether the node is healthy", float(view.healthy))
        yield GaugeMetricFamily("rose_rl_step", "RL step of the job", view.rl_step)
        yield from self._memory(view)
        yield from self._replicas(view)
        updates = CounterMetricFamily("rose_weight_updates", "Weight updates of engines", labels=["outcome"])
        updates.add_metric(["applied"], self._history.applied)
        updates.add_metric(["refused"], self._history.refused)
        yield updates

    @staticmethod
    def _memory(view: NodeView) -> Iterator[Metric]:
        memory = view.memory
        for part in ("serving_bytes", "free_bytes", "total_bytes", "headroom_bytes"):
            if memory is not None and (value := getattr(memory, part)) is not None:
                yield GaugeMetricFamily(f"rose_device_{part}", f"Device memory: {part}", value)

    @staticmethod
    def _replicas(view: NodeView) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "rose_replica_state", "1 for the present state", labels=["replica", "state"]
        )
        gate = GaugeMetricFamily("rose_gate_open", "Whether the gate is open", labels=["replica", "reason"])
        drift = GaugeMetricFamily(
            "rose_gate_drift", "Measured over predicted time of recent rollout steps", labels=["replica"]
        )
        version = GaugeMetricFamily("rose_weight_version", "Weight version in use", labels=["replica"])
        cuts = CounterMetricFamily("rose_kv_budget_cuts", "Emergency cuts", labels=["replica"])
        tokens = CounterMetricFamily("rose_rollout_tokens", "Tokens scheduled", labels=["replica"])
        gauges = {
            name: GaugeMetricFamily(f"rose_replica_{name}", text, labels=["replica"])
            for name, text in _PER_REPLICA.items()
        }
        for replica in view.replicas:
            for each in ReplicaState:
                state.add_metric([replica.id, each.value], float(each.value == replica.state))
            gate.add_metric([replica.id, replica.gate.reason], float(replica.gate.open))
            if replica.gate.drift is not None:
                drift.add_metric([replica.id], replica.gate.drift)
            version.add_metric([replica.id], replica.weight_version)
            if replica.memory is not None:
                cuts.add_metric([replica.id], replica.memory.cuts)
            if replica.tokens is not None:
                tokens.add_metric([replica.id], replica.tokens)
            for name, family in gauges.items():
                if (value := getattr(replica, name)) is not None:
                    family.add_metric([replica.id], value)
        yield from (state, gate, drift, version, cuts, tokens, *gauges.values())


class MetricsServer:
    """GET /metrics on 127.0.0.1."""

    def __init__(self, collector: NodeCollector, port: int) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self._port = port
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen.  Raises NotReady."""
        application = web.Application()
        application.router.add_get("/metrics", self._answer)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        except OSError as error:
            raise NotReady(
                f"node.metrics_port: cannot listen on 127.0.0.1:{self._port}: {error.strerror}",
                "set [node] metrics_port to a free port",
            ) from None

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": _CONTENT_TYPE})
