"""Slack of a serving engine without the plugin, inferred from its metrics: at low load only (ours).

Metrics are read every so often, and vLLM sets its gauges only when a step ends, so a request may be at work
that no reading shows.  Therefore:

- Rollout is admitted only after serving had nothing to do for `quiet_ns`: no request in any reading, and
  counters of tokens that stand still, so that none came and went in between.
- Each reading opens the gate for `open_ns` and no longer: a board of this kind is stale after that, whoever
  writes it.  What rollout then has on the device is `open_ns` and the step that began last.
- The readings come at least a TTFT budget apart.  A request that keeps its budget has its first token within
  it, and shows in the gauges from then on; so no more than two openings can touch it before, and rollout's
  steps are capped such that both together leave it its budget.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from rose.core.readings import NEVER, SlackReading, Unknown

OPENINGS_PER_REQUEST = 2
"""Openings that can touch one request before its first token: the one before its arrival, and one after."""


class LoadSample(NamedTuple):
    """What the serving engine's metrics said."""

    running: int
    waiting: int
    tokens: float
    """Prompt and output tokens since the engine's start."""
    prefill_p99_ns: int
    """Upper bound of the p99 time of a prefill; 0 until one was seen."""


class InferenceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How careful to be."""

    ttft_slo_ns: int
    quiet_ns: int = 2_000_000_000
    open_ns: int = 20_000_000
    gap_ns_max: int = 5_000_000_000
    """Two readings further apart than this say nothing about the time between them."""
    steps_in_flight: int = 1
    """Rollout steps that may be given out at once: 2 with asynchronous scheduling."""


class InferredSlack:
    """Turns readings of metrics into what the plugin's board would say."""

    def __init__(self, settings: InferenceSettings) -> None:
        self._settings = settings
        self._before: tuple[LoadSample, int] | None = None
        self._quiet_since_ns: int | None = None

    def observe(self, sample: LoadSample | Unknown, now_ns: int) -> SlackReading | Unknown:
        """The board's words for this reading; busy (`in_step`) unless serving was provably quiet."""
        if isinstance(sample, Unknown):
            self._before = self._quiet_since_ns = None
            return sample
        if not self._still_quiet(sample, now_ns):
            self._quiet_since_ns = None if sample.running or sample.waiting else now_ns
        self._before = (sample, now_ns)
        words = dict.fromkeys(SlackReading._fields, 0)
        return SlackReading(**words)._replace(
            stamp_ns=now_ns,
            waiting=sample.waiting,
            running=sample.running,
            ttft_deadline_ns=NEVER,
            tpot_deadline_ns=NEVER,
            in_step=int(not self._opens(sample, now_ns)),
            prefill_p99_ns=self._reserved_ns(sample),
        )

    def _still_quiet(self, sample: LoadSample, now_ns: int) -> bool:
        if self._before is None or sample.running or sample.waiting:
            return False
        before, then_ns = self._before
        quiet_before = not (before.running or before.waiting)
        return (
            quiet_before
            and sample.tokens == before.tokens
            and 0 <= now_ns - then_ns <= self._settings.gap_ns_max
        )

    def _opens(self, sample: LoadSample, now_ns: int) -> bool:
        since_ns = self._quiet_since_ns
        if since_ns is None or now_ns - since_ns < self._settings.quiet_ns:
            return False
        return self._step_budget_ns(sample) > 0

    def _step_budget_ns(self, sample: LoadSample) -> int:
        """How long one rollout step may take, before margins."""
        settings = self._settings
        left_ns = settings.ttft_slo_ns - sample.prefill_p99_ns - OPENINGS_PER_REQUEST * settings.open_ns
        return left_ns // (OPENINGS_PER_REQUEST * settings.steps_in_flight)

    def _reserved_ns(self, sample: LoadSample) -> int:
        """What of the budget is not for one rollout step: the gate subtracts it as the time of a prefill."""
        return self._settings.ttft_slo_ns - max(0, self._step_budget_ns(sample))
