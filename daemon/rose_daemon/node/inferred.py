"""The board of a serving engine that has no plugin: rosed writes it, from the engine's metrics.

Rollout engines read it as they read any other board, so their gates need to know nothing of it; that a record
holds for a moment only is in the age at which they take a board for stale (`PluginSettings.slack_stale_ms`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from rose.boards import BoardWriter
from rose.config import Config
from rose.core.inferred import InferenceSettings, InferredSlack, LoadSample
from rose.core.readings import SlackReading, Unknown
from rose.engines.vllm.launch import INFERRED_OPEN_MS
from rose.units import NS_PER_S, ms_to_ns
from rose_daemon.telemetry.engine_metrics import EngineMetrics, Histogram

_PREFILL_SHARE = 0.99


class InferredBoard:
    """Publishes the board at every reading of the metrics, and wakes the engines that wait for it.

    `ring` wakes them.  Raises OSError when the board cannot be made.
    """

    def __init__(self, config: Config, path: Path, ring: Callable[[], None]) -> None:
        serving = config.serving
        self._slack = InferredSlack(
            InferenceSettings(
                ttft_slo_ns=ms_to_ns(serving.ttft_slo_ms),
                quiet_ns=ms_to_ns(serving.quiet_ms),
                open_ns=ms_to_ns(INFERRED_OPEN_MS),
                gap_ns_max=ms_to_ns(serving.metrics_stale_ms),
                steps_in_flight=1 if config.device.kind == "cpu" else 2,
            )
        )
        self._stale_ns = ms_to_ns(serving.metrics_stale_ms)
        self._path = path
        self._ring = ring
        self._writer: BoardWriter[SlackReading] | None = None
        self._latest: SlackReading | Unknown = Unknown("not_observed")

    def observe(self, metrics: EngineMetrics | Unknown, now_ns: int) -> None:
        """The metrics were read.  What is unknown is not published: the board is stale by itself."""
        reading = self._slack.observe(load_sample(metrics), now_ns)
        if isinstance(reading, Unknown):
            stale = isinstance(self._latest, Unknown) or now_ns - self._latest.stamp_ns > self._stale_ns
            self._latest = reading if stale else self._latest
            return
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = BoardWriter(self._path, SlackReading)
        self._latest = reading
        self._writer.publish(reading)
        if not reading.in_step:
            self._ring()

    def read(self, now_ns: int) -> SlackReading | Unknown:
        """What was last inferred; unknown once the metrics are."""
        if isinstance(self._latest, Unknown):
            return self._latest
        age_ns = now_ns - self._latest.stamp_ns
        return self._latest if age_ns <= self._stale_ns else Unknown("metrics_stale", age_ns)

    def close(self) -> None:
        """Take the board away."""
        if self._writer is not None:
            self._path.unlink(missing_ok=True)


def load_sample(metrics: EngineMetrics | Unknown) -> LoadSample | Unknown:
    """What inference needs of the metrics; Unknown if any of it is."""
    if isinstance(metrics, Unknown):
        return metrics
    prefill_ns = _prefill_p99_ns(metrics)
    if isinstance(metrics.running, Unknown):
        return metrics.running
    if isinstance(metrics.waiting, Unknown):
        return metrics.waiting
    if isinstance(metrics.tokens, Unknown):
        return metrics.tokens
    if isinstance(prefill_ns, Unknown):
        return prefill_ns
    return LoadSample(metrics.running, metrics.waiting, metrics.tokens, prefill_ns)


def _prefill_p99_ns(metrics: EngineMetrics) -> int | Unknown:
    """Upper bound of the p99 time of a prefill; 0 until there was one.

    The time to first token contains it, and its histogram has finer buckets: the lower of both bounds holds.
    """
    seen = [each for each in (metrics.prefill, metrics.ttft) if isinstance(each, Histogram)]
    if not seen:
        return metrics.prefill if isinstance(metrics.prefill, Unknown) else Unknown("metrics_missing")
    if not any(histogram.number for histogram in seen):
        return 0
    bounds = [histogram.quantile_bound(_PREFILL_SHARE) for histogram in seen]
    finite = [bound for bound in bounds if not isinstance(bound, Unknown)]
    return math.ceil(min(finite) * NS_PER_S) if finite else Unknown("beyond_buckets")
