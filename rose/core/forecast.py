"""What capacity a job may expect over the next minutes, from how it came and went lately (ours).

The estimate for a horizon is the mean over the last stretch of that length, moved by the median of how much
such a stretch differed from the one before it.  The interval comes from the same differences, so it is as
wide as the past was unsteady; it assumes no distribution, only that the next minutes are of the kind of the
last hour.  Where that hour holds too few stretches for the wanted coverage, the interval spans all that was
seen and says how much less it promises; without any it is what can be at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from statistics import median
from typing import NamedTuple

import msgspec

from rose.units import NS_PER_S, JobId

SAMPLE_S = 5.0
"""Capacity is looked at this often."""
HISTORY_S = 3600.0
"""And remembered for so long."""
COVERAGE = 0.8
"""Share of stretches that an interval is to hold."""
HORIZON_S_MAX = HISTORY_S / 2

_SAMPLES_MAX = int(HISTORY_S / SAMPLE_S)
_SAMPLE_NS = int(SAMPLE_S * NS_PER_S)


class Capacity(NamedTuple):
    """What a job may use at an instant."""

    dedicated_slots: int
    """Turns that its dedicated replicas could run at once, of those that take turns with an open gate."""
    borrowed_slots: int
    """Those of borrowed replicas."""
    turns_in_flight: int
    tokens: int
    """Output tokens of the job so far."""


class Estimate(msgspec.Struct, frozen=True):
    """A mean over the horizon, and where it will lie."""

    expected: float | None
    """None: nothing to go by."""
    low: float
    high: float | None
    """None: no bound is known."""
    coverage: float
    """Share of past stretches that such an interval held; 1 where it is all that can be."""


class Forecast(msgspec.Struct, frozen=True):
    """Means over the next `horizon_s` seconds."""

    horizon_s: float
    history_s: float
    """How far back it looks."""
    slots: Estimate
    """Turns that can run at once."""
    borrowed_slots: Estimate
    """Those of them on borrowed replicas."""
    tokens_per_s: Estimate
    """Output tokens, while turns are in flight, at such load as there was lately."""


class _Sample(NamedTuple):
    """Values that are None were not seen."""

    slots: float | None
    borrowed: float | None
    tokens_per_s: float | None


_UNSEEN = _Sample(None, None, None)


class _History:
    """Samples of one job, `SAMPLE_S` apart."""

    def __init__(self) -> None:
        self.samples: deque[_Sample] = deque(maxlen=_SAMPLES_MAX)
        self._last: tuple[int, Capacity] | None = None

    def note(self, now_ns: int, capacity: Capacity) -> None:
        """Add a sample; times at which nobody looked are unseen."""
        rate: float | None = None
        if self._last is not None:
            since_ns, before = now_ns - self._last[0], self._last[1]
            missed = min(_SAMPLES_MAX, round(since_ns / _SAMPLE_NS) - 1)
            self.samples.extend([_UNSEEN] * missed)
            made = capacity.tokens - before.tokens
            # Without turns nothing tells what the replicas could have made.
            if since_ns > 0 and made >= 0 and before.turns_in_flight and capacity.turns_in_flight:
                rate = made * NS_PER_S / since_ns
        self._last = (now_ns, capacity)
        slots = capacity.dedicated_slots + capacity.borrowed_slots
        self.samples.append(_Sample(slots, capacity.borrowed_slots, rate))


class CapacityHistory:
    """How the capacity of all jobs came and went."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, _History] = {}

    def note(self, now_ns: int, capacities: Iterable[tuple[JobId, Capacity]]) -> None:
        """Take a sample of all jobs; those not named are forgotten.  To be called every `SAMPLE_S`."""
        known, self._jobs = self._jobs, {}
        for job, capacity in capacities:
            history = self._jobs[job] = known.get(job) or _History()
            history.note(now_ns, capacity)

    def forecast(self, job: JobId, horizon_s: float, slots_max: int, borrowed_max: int) -> Forecast:
        """Of the next `horizon_s` seconds (up to `HORIZON_S_MAX`); the bounds are what the job asked for."""
        history = self._jobs.get(job)
        samples = history.samples if history is not None else ()
        length = max(1, round(horizon_s / SAMPLE_S))
        return Forecast(
            horizon_s=horizon_s,
            history_s=len(samples) * SAMPLE_S,
            slots=estimate([sample.slots for sample in samples], length, slots_max),
            borrowed_slots=estimate([sample.borrowed for sample in samples], length, borrowed_max),
            tokens_per_s=estimate([sample.tokens_per_s for sample in samples], length, None),
        )


def estimate(series: Sequence[float | None], length: int, most: float | None) -> Estimate:
    """The mean of the next `length` values of a series that lies between 0 and `most`."""
    means = _means(series, length)
    pairs = zip(means, means[length:], strict=False)
    steps = sorted(after - before for before, after in pairs if before is not None and after is not None)
    recent = [value for value in series[-length:] if value is not None]
    if not recent:
        return Estimate(None, 0.0, most, 1.0)
    now = sum(recent) / len(recent)
    stretches = len(steps) // length  # neighbours among the steps share nearly all of their values
    if stretches < 2:
        return Estimate(_within(now, most), 0.0, most, 1.0)
    # Of n exchangeable values the next one lies between the k-th from either end with probability
    # 1 - 2k / (n + 1); k may not be less than 1.
    outside = (1 - COVERAGE) / 2
    tail = max(0.0, (outside * (stretches + 1) - 1) / (stretches - 1))
    expected = _within(now + median(steps), most)
    return Estimate(
        expected=expected,
        low=min(expected, _within(now + _quantile(steps, tail), most)),
        high=max(expected, _within(now + _quantile(steps, 1 - tail), most)),
        coverage=min(COVERAGE, (stretches - 1) / (stretches + 1)),
    )


def _means(series: Sequence[float | None], length: int) -> list[float | None]:
    """Mean of each `length` values in a row; None where less than half of them were seen."""
    sums = list(accumulate((value or 0.0 for value in series), initial=0.0))
    seen = list(accumulate((value is not None for value in series), initial=0))
    found: list[float | None] = []
    for start in range(len(series) - length + 1):
        count = seen[start + length] - seen[start]
        found.append((sums[start + length] - sums[start]) / count if 2 * count >= length else None)
    return found


def _quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, linear between neighbours."""
    place = share * (len(values) - 1)
    index = min(int(place), len(values) - 2)
    return values[index] + (place - index) * (values[index + 1] - values[index])


def _within(value: float, most: float | None) -> float:
    return max(0.0, value if most is None else min(value, most))
