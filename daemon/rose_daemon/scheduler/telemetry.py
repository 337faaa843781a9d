"""Metrics of the scheduler process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rose.units import ReplicaId

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)

Gauges = Mapping[tuple[str, str], Mapping[tuple[tuple[str, str], ...], float]]
"""(name, help) -> labels -> value."""


class Telemetry:
    """The process's Prometheus metrics.  `state` is asked for present values at each scrape."""

    def __init__(self, state: Callable[[], Gauges]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StateCollector(state, lambda: self._tokens))
        self._outcomes = Counter(
            "rose_turns", "Turns that ended, by outcome", ["outcome"], registry=self._registry
        )
        self._interruptions = Counter(
            "rose_attempts_interrupted",
            "Attempts that ended early",
            ["replica", "reason"],
            registry=self._registry,
        )
        self._tokens: dict[ReplicaId, int] = {}
        """Counted here and shown at a scrape: the library's counter costs more than the rest of a token."""
        self._first_token = Histogram(
            "rose_turn_first_token_seconds",
            "From arrival to the first token, queueing included",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._duration = Histogram(
            "rose_turn_seconds",
            "From arrival to outcome",
            ["outcome"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._dropped = Counter("rose_dropped", "Things let go, by kind", ["kind"], registry=self._registry)

    def settled(self, outcome: str, seconds: float) -> None:
        """A turn has its outcome (`answer`, `failure` or `cancelled`)."""
        self._outcomes.labels(outcome).inc()
        self._duration.labels(outcome).observe(seconds)

    def interrupted(self, replica: ReplicaId, reason: str) -> None:
        """An attempt ended early."""
        self._interruptions.labels(replica, reason[:64]).inc()

    def tokens(self, replica: ReplicaId, count: int) -> None:
        """A replica produced output tokens."""
        self._tokens[replica] = self._tokens.get(replica, 0) + count

    def first_token(self, seconds: float) -> None:
        """A turn got its first token."""
        self._first_token.observe(seconds)

    def dropped(self, kind: str, count: int = 1) -> None:
        """Something was dropped (`garbage_message`, `node_message`, `journal_row`, `stored_answer`)."""
        self._dropped.labels(kind).inc(count)

    def exposition(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _StateCollector(Collector):
    def __init__(self, state: Callable[[], Gauges], tokens: Callable[[], Mapping[ReplicaId, int]]) -> None:
        self._state = state
        self._tokens = tokens

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        for (name, text), series in self._state().items():
            names = [label for label, _ in next(iter(series), ())]
            family = GaugeMetricFamily(name, text, labels=names)
            for labels, value in series.items():
                family.add_metric([value_ for _, value_ in labels], value)
            yield family
        text = "Output tokens received from replicas"
        counted = CounterMetricFamily("rose_rollout_tokens", text, labels=["replica"])
        for replica, count in self._tokens().items():
            counted.add_metric([replica], count)
        yield counted
