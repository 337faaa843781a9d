"""Prometheus metrics of rosed, computed from the node's state when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rose.core.lender import LenderView
from rose.core.lifecycle import ReplicaState
from rose.core.nodeview import NodeView
from rose.errors import NotReady
from rose_daemon.node.updates import STAGING_PHASES, Staging, UpdateHistory

_MS_PER_S = 1000.0
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PER_REPLICA = {
    "kv_used_blocks": "KV blocks in use",
    "kv_total_blocks": "KV blocks of the engine",
    "running": "Requests running",
    "waiting": "Requests waiting",
}


class NodeCollector(Collector):
    """Turns the node's view into metric families.  What is unknown is left out, never 0."""

    def __init__(
        self,
        view: Callable[[], NodeView],
        history: UpdateHistory,
        lending: Callable[[], LenderView] | None = None,
    ) -> None:
        self._view = view
        self._history = history
        self._lending = lending

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
        yield from self._weights()
        if self._lending is not None:
            yield from _lending(self._lending())

    def _weights(self) -> Iterator[Metric]:
        """What the newest version took on its way, and what it changes."""
        history = self._history
        yield CounterMetricFamily("rose_weight_versions_staged", "Weight versions staged", history.staged)
        text = "Bytes of the weight versions staged, as they travelled"
        yield CounterMetricFamily("rose_weight_bytes_staged", text, history.staged_bytes)
        if history.stagings:
            yield from _newest(history.stagings[-1])
        text = "Phases of a replica's latest weight update: stage, pause, apply, total"
        phases = GaugeMetricFamily("rose_weight_update_seconds", text, labels=["replica", "phase"])
        for replica, update in history.latest_applied().items():
            for phase, took_ms in {**update.engine_ms, "total": update.total_ms}.items():
                phases.add_metric([replica, phase], took_ms / _MS_PER_S)
        yield phases

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


def _newest(staging: Staging) -> Iterator[Metric]:
    """Families of the version that was staged last."""
    changed = staging.change.changed
    yield GaugeMetricFamily("rose_weight_staged_version", "Weight version staged last", staging.version)
    text = "Bytes of the weight version staged last, as it travelled"
    yield GaugeMetricFamily("rose_weight_staged_bytes", text, staging.delta_bytes)
    if changed:
        text = "The same per changed weight"
        yield GaugeMetricFamily("rose_weight_bytes_per_changed", text, staging.delta_bytes / changed)
    density = GaugeMetricFamily(
        "rose_weight_density", "Share of the weights that it changes, by kind of tensor", labels=["kind"]
    )
    for kind in staging.kinds:
        density.add_metric([kind.kind], kind.density)
    yield density
    phases = GaugeMetricFamily(
        "rose_weight_staging_seconds",
        "Phases on its way here: encode and push (as the relay says), pull, verify, decode",
        labels=["phase"],
    )
    for phase in STAGING_PHASES:
        if (took_ms := getattr(staging, f"{phase}_ms")) is not None:
            phases.add_metric([phase], took_ms / _MS_PER_S)
    yield phases


def _lending(view: LenderView) -> Iterator[Metric]:
    lends = GaugeMetricFamily("rose_lends", "Whether this host lends, and why not", labels=["reason"])
    lends.add_metric([view.closed], float(not view.closed))
    yield lends
    late = GaugeMetricFamily(
        "rose_serving_late_requests",
        "Late serving requests within the error budget's window, by cause",
        labels=["cause"],
    )
    for cause in ("rollout", "unknown", "serving"):
        late.add_metric([cause], getattr(view, f"late_by_{cause}"))
    yield late
    yield GaugeMetricFamily(
        "rose_serving_judged_requests", "Serving requests within that window", view.requests
    )
    known = {
        "rose_error_budget_left_share": ("Of the error budget for harm by rollout", view.budget_left_share),
        "rose_late_more_with_rollout_share": (
            "Share of requests by which more are late with rollout than without (switchback)",
            view.late_more_with_rollout,
        ),
        "rose_take_back_p99_seconds": (
            "Time to have lent memory back, by drills",
            None if view.take_back_p99_ms is None else view.take_back_p99_ms / _MS_PER_S,
        ),
        "rose_lending_reserve_bytes": ("Memory kept free for serving to grow into", view.reserve_bytes),
    }
    for name, (text, value) in known.items():
        if value is not None:
            yield GaugeMetricFamily(name, text, value)


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
