"""What a vLLM engine says of itself at /metrics, in the names of several releases.

A signal has the newest of its names that the text holds.  Series of data-parallel engines are added up; of
shares the worst counts.  What is missing, negative or not a number is `Unknown` with the name in its reason.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from rose.core.readings import Unknown

_RUNNING = ("vllm:num_requests_running",)
_WAITING = ("vllm:num_requests_waiting",)
_KV_USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_PROMPT_TOKENS = ("vllm:prompt_tokens_total",)
_OUTPUT_TOKENS = ("vllm:generation_tokens_total",)
_TTFT = ("vllm:time_to_first_token_seconds",)
_INTER_TOKEN = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
_PREFILL = ("vllm:request_prefill_time_seconds",)
_OF_INTEREST = tuple(
    {*_RUNNING, *_WAITING, *_KV_USED, *_PROMPT_TOKENS, *_OUTPUT_TOKENS, *_TTFT, *_INTER_TOKEN, *_PREFILL}
)


class Histogram(NamedTuple):
    """A histogram since the engine's start, in seconds."""

    buckets: tuple[tuple[float, float], ...]
    """(upper bound, observations up to it), by bound."""
    total_s: float
    number: float

    def quantile_bound(self, share: float) -> float | Unknown:
        """Upper bound of the bucket that holds the quantile: never less than the quantile itself."""
        if self.number <= 0:
            return Unknown("no_samples")
        for bound, below in self.buckets:
            if below >= share * self.number:
                return bound if math.isfinite(bound) else Unknown("beyond_buckets")
        return Unknown("metrics_contradictory")


class EngineMetrics(NamedTuple):
    """One look at an engine, all its data-parallel ranks together."""

    running: int | Unknown
    waiting: int | Unknown
    kv_used_share: float | Unknown
    """Of the fullest rank."""
    tokens: float | Unknown
    """Prompt and output tokens since the engine's start."""
    ttft: Histogram | Unknown
    inter_token: Histogram | Unknown
    prefill: Histogram | Unknown
    """Time from first schedule to first token."""


Series = Mapping[str, list[Sample]]


def parse(text: str) -> EngineMetrics | Unknown:
    """The signals in the text of /metrics; Unknown only if the text is none."""
    lines = (line for line in text.splitlines() if line.startswith(_OF_INTEREST))
    series: dict[str, list[Sample]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                series[sample.name].append(sample)
        return _signals(series)
    except (ValueError, KeyError, OverflowError):  # of the parser, a bucket's bound, sums of what is infinite
        return Unknown("metrics_malformed")


def _signals(series: Series) -> EngineMetrics:
    return EngineMetrics(
        running=_count(series, _RUNNING),
        waiting=_count(series, _WAITING),
        kv_used_share=_worst_share(series, _KV_USED),
        tokens=_total(_sum(series, _PROMPT_TOKENS), _sum(series, _OUTPUT_TOKENS)),
        ttft=_histogram(series, _TTFT),
        inter_token=_histogram(series, _INTER_TOKEN),
        prefill=_histogram(series, _PREFILL),
    )


def nothing_known(reason: Unknown) -> EngineMetrics:
    """An engine of which nothing is known, for one reason."""
    return EngineMetrics(*[reason] * len(EngineMetrics._fields))


def _values(series: Series, names: Iterable[str], suffix: str = "") -> list[Sample] | Unknown:
    """The series under the newest name that is there."""
    for name in names:
        if found := series.get(name + suffix):
            return found
    return Unknown(f"metrics_missing: {next(iter(names))}{suffix}")


def _sum(series: Series, names: Iterable[str], suffix: str = "") -> float | Unknown:
    found = _values(series, names, suffix)
    if isinstance(found, Unknown):
        return found
    total = math.fsum(sample.value for sample in found)
    return total if total >= 0 and math.isfinite(total) else Unknown("metrics_contradictory")


def _count(series: Series, names: Iterable[str]) -> int | Unknown:
    total = _sum(series, names)
    return total if isinstance(total, Unknown) else math.ceil(total)


def _total(one: float | Unknown, other: float | Unknown) -> float | Unknown:
    if isinstance(one, Unknown) or isinstance(other, Unknown):
        return one if isinstance(one, Unknown) else other
    return one + other


def _worst_share(series: Series, names: Iterable[str]) -> float | Unknown:
    found = _values(series, names)
    if isinstance(found, Unknown):
        return found
    fits = all(0 <= sample.value <= 1 for sample in found)
    return max(sample.value for sample in found) if fits else Unknown("metrics_contradictory")


def _histogram(series: Series, names: Iterable[str]) -> Histogram | Unknown:
    for name in names:
        if name + "_count" in series:
            return _histogram_of(series, name)
    return Unknown(f"metrics_missing: {next(iter(names))}")


def _histogram_of(series: Series, name: str) -> Histogram | Unknown:
    total_s, count = _sum(series, (name,), "_sum"), _sum(series, (name,), "_count")
    if isinstance(total_s, Unknown):
        return total_s
    if isinstance(count, Unknown):
        return count
    buckets: dict[float, float] = defaultdict(float)
    for sample in series.get(name + "_bucket", ()):
        bound_s = float(sample.labels["le"])
        if math.isnan(bound_s) or math.isnan(sample.value):
            raise ValueError(f"{name}: not a number")
        buckets[bound_s] += sample.value
    return Histogram(tuple(sorted(buckets.items())), total_s, count)


class PeriodAverage:
    """Average of what came into a histogram between two looks."""

    def __init__(self) -> None:
        self._before: Histogram | None = None

    def observe(self, now: Histogram | Unknown) -> float | Unknown:
        """The average since the last look; after a restart of the engine, since its start."""
        if isinstance(now, Unknown):
            return now
        before, self._before = self._before, now
        if before is None:
            return Unknown("first_sample")
        restarted = now.number < before.number or now.total_s < before.total_s
        count = now.number - (0 if restarted else before.number)
        total_s = now.total_s - (0 if restarted else before.total_s)
        return total_s / count if count > 0 else Unknown("no_samples")


class Averages:
    """What requests waited lately, in seconds; between the two latest readings of the metrics."""

    def __init__(self) -> None:
        self._ttft, self._inter_token = PeriodAverage(), PeriodAverage()
        self.ttft_s: float | Unknown = Unknown("not_observed")
        self.inter_token_s: float | Unknown = Unknown("not_observed")

    def observe(self, metrics: EngineMetrics | Unknown) -> None:
        """The metrics were read."""
        known = nothing_known(metrics) if isinstance(metrics, Unknown) else metrics
        self.ttft_s = self._ttft.observe(known.ttft)
        self.inter_token_s = self._inter_token.observe(known.inter_token)
