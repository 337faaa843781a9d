"""The serving engine's HTTP port: is it well, and what does it say of itself?"""

from __future__ import annotations

from typing import NamedTuple

import aiohttp

from rose.core.readings import Unknown
from rose.units import NS_PER_S
from rose_daemon.telemetry.engine_metrics import EngineMetrics, nothing_known, parse

FROZEN_AFTER_NS = 30 * NS_PER_S
"""Gauges that claim requests beside counters that stand still for this long are left-overs of an abort."""
_METRICS_BYTES_MAX = 4 << 20


class Probe(NamedTuple):
    """Answer of the serving engine's HTTP port."""

    healthy: bool | Unknown
    metrics: EngineMetrics | Unknown


async def probe(session: aiohttp.ClientSession, url: str, timeout_s: float) -> Probe:
    """Ask /health and /metrics.  Refused connections mean down; silence means unknown."""
    limit = aiohttp.ClientTimeout(total=timeout_s)
    healthy: bool | Unknown
    try:
        async with session.get(url + "/health", timeout=limit) as response:
            healthy = response.status == 200
    except TimeoutError:
        healthy = Unknown("health_timeout")
    except (aiohttp.ClientError, OSError):
        healthy = False
    if healthy is not True:
        return Probe(healthy, Unknown("serving_down" if healthy is False else "health_timeout"))
    return Probe(healthy, await scrape(session, url, timeout_s))


async def scrape(session: aiohttp.ClientSession, url: str, timeout_s: float) -> EngineMetrics | Unknown:
    """Ask /metrics alone."""
    limit = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.get(url + "/metrics", timeout=limit) as response:
            if response.status != 200:
                return Unknown("metrics_refused")
            text = await _text(response)
    except (TimeoutError, aiohttp.ClientError, OSError):
        return Unknown("metrics_unreachable")
    return parse(text) if text is not None else Unknown("metrics_too_long")


async def _text(response: aiohttp.ClientResponse) -> str | None:
    """The whole body, which may come in pieces; None if it is longer than metrics ever are."""
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > _METRICS_BYTES_MAX:
            return None
    return data.decode(errors="replace")


class MetricsWatch:
    """The latest metrics, as long as they are fresh and the engine behind them moves.

    vLLM sets its gauges when a step ends.  If all requests are cancelled at once there is no further step,
    and the gauges keep what they held: such metrics are `metrics_frozen`, not those of a full engine.
    """

    def __init__(self, stale_ns: int, frozen_ns: int = FROZEN_AFTER_NS) -> None:
        self._stale_ns = stale_ns
        self._frozen_ns = frozen_ns
        self._latest: EngineMetrics | None = None
        self._reason = Unknown("not_observed")
        self._at_ns = 0
        self._moved_ns = 0

    def observe(self, metrics: EngineMetrics | Unknown, now_ns: int) -> None:
        """A scrape ended; one that failed leaves the former metrics to age."""
        if isinstance(metrics, Unknown):
            self._reason = metrics
            return
        before, self._latest, self._at_ns = self._latest, metrics, now_ns
        if before is None or before.tokens != metrics.tokens or not _claims_work(metrics):
            self._moved_ns = now_ns

    def latest(self, now_ns: int) -> EngineMetrics:
        """Each signal, or why it is not known."""
        if self._latest is None:
            return nothing_known(self._reason)
        age_ns = now_ns - self._at_ns
        if age_ns > self._stale_ns:
            return nothing_known(Unknown("metrics_stale", age_ns))
        if self._at_ns - self._moved_ns > self._frozen_ns:
            frozen = Unknown("metrics_frozen", now_ns - self._moved_ns)
            return self._latest._replace(running=frozen, waiting=frozen, kv_used_share=frozen)
        return self._latest


def _claims_work(metrics: EngineMetrics) -> bool:
    """Whether the gauges say that requests are there; what is not known may be."""
    return not metrics.running == metrics.waiting == 0
