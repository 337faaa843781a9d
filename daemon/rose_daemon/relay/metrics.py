"""Prometheus metrics of a relay, computed from what it holds when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rose.weights.relay import VersionStat
from rose_daemon.relay.vault import Vault

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MS_PER_S = 1000.0
_NEWEST: dict[str, tuple[str, Callable[[VersionStat], float | None]]] = {
    "version": ("Newest committed version", lambda stat: float(stat.version)),
    "update_bytes": ("Bytes of the newest version", lambda stat: float(stat.bytes)),
    "encode_seconds": ("What its trainer took to make and check it", lambda stat: _seconds(stat.encode_ms)),
    "push_seconds": ("From its first bucket to its commit", lambda stat: _seconds(stat.push_ms)),
}
"""Of a job's newest version; what is not known is left out, never 0."""


class VaultCollector(Collector):
    """What a relay holds, as metric families."""

    def __init__(self, vault: Vault[Any]) -> None:
        self._vault = vault

    def collect(self) -> Iterator[Metric]:
        """All families, as of now."""
        vault = self._vault
        yield GaugeMetricFamily("rose_relay_capacity_bytes", "Memory for versions", vault.capacity_bytes)
        yield GaugeMetricFamily("rose_relay_used_bytes", "Memory in use or promised", vault.used_bytes)
        held = GaugeMetricFamily("rose_relay_versions", "Committed versions", labels=["job"])
        newest = {
            name: GaugeMetricFamily(f"rose_relay_{name}", text, labels=["job"])
            for name, (text, _) in _NEWEST.items()
        }
        for job in vault.jobs():
            committed = vault.stat(job).committed
            held.add_metric([job], len(committed))
            for name, (_, value_of) in _NEWEST.items():
                if (value := value_of(committed[-1])) is not None:
                    newest[name].add_metric([job], value)
        yield from (held, *newest.values())


def exposition(vault: Vault[Any]) -> bytes:
    """All metrics in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(VaultCollector(vault))
    return generate_latest(registry)


def _seconds(took_ms: float | None) -> float | None:
    return None if took_ms is None else took_ms / _MS_PER_S
