"""Whose fault it is that a serving request was late: that of rollout, or serving's own.

Both engines log when their steps began and ended.  A late request is blamed on rollout when rollout steps
overlapped its wait for at least as long as it was over its budget: without them it would have been on time
(ours).  What the log does not cover is Unknown, and blames nobody.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from rose.core.readings import StepRecord


class Cause(StrEnum):
    """Who made a request late."""

    ROLLOUT = "rollout"
    SERVING = "serving"
    """Its own engine: queue, batch, a step that took long."""
    UNKNOWN = "unknown"
    """The log has a gap that may hold the rollout steps."""


class Span(NamedTuple):
    """A stretch of time, CLOCK_MONOTONIC nanoseconds."""

    start_ns: int
    end_ns: int


class Wait(NamedTuple):
    """What a late request waited through, and how much of that was too much."""

    start_ns: int
    end_ns: int
    overshoot_ns: int


class Blame(NamedTuple):
    """The verdict on a wait."""

    cause: Cause
    rollout_ns: int
    """Time of rollout steps within the wait."""


def first_token_wait(sent_ns: int, first_ns: int, budget_ns: int) -> Wait | None:
    """The wait for a first token that came after its TTFT budget; None if it was in time."""
    overshoot_ns = first_ns - sent_ns - budget_ns
    return Wait(sent_ns, first_ns, overshoot_ns) if overshoot_ns > 0 else None


def decode_wait(first_ns: int, last_ns: int, tokens: int, budget_ns: int) -> Wait | None:
    """The wait for the rest of `tokens` tokens that came slower than the TPOT budget; None if in time."""
    overshoot_ns = last_ns - first_ns - (tokens - 1) * budget_ns
    return Wait(first_ns, last_ns, overshoot_ns) if tokens > 1 and overshoot_ns > 0 else None


class Coverage:
    """Stretches of time, for asking how much of an interval they cover.  Overlaps count once."""

    def __init__(self, spans: Iterable[Span]) -> None:
        merged: list[Span] = []
        for span in sorted(span for span in spans if span.end_ns > span.start_ns):
            if merged and span.start_ns <= merged[-1].end_ns:
                merged[-1] = Span(merged[-1].start_ns, max(merged[-1].end_ns, span.end_ns))
            else:
                merged.append(span)
        self._starts = [span.start_ns for span in merged]
        self._spans = merged
        self._before = [0, *accumulate(span.end_ns - span.start_ns for span in merged)]

    def within_ns(self, start_ns: int, end_ns: int) -> int:
        """How much of the interval is covered."""
        return max(0, self._until(end_ns) - self._until(start_ns))

    def _until(self, at_ns: int) -> int:
        """Covered time before an instant."""
        number = bisect_right(self._starts, at_ns)
        if not number:
            return 0
        last = self._spans[number - 1]
        return self._before[number - 1] + min(at_ns, last.end_ns) - last.start_ns


class StepHistory:
    """Steps of all rollout engines of one device, and the gaps in their logs."""

    def __init__(self, steps: Iterable[StepRecord], gaps: Iterable[Span] = ()) -> None:
        known = [Span(step.start_ns, step.end_ns) for step in steps]
        self._steps = Coverage(known)
        self._possible = Coverage([*known, *gaps])

    def blame(self, wait: Wait) -> Blame:
        """Who made it so long.

        Raises ValueError for a wait that was not too long: nobody is to blame.
        """
        if wait.overshoot_ns <= 0:
            raise ValueError(f"a wait within its budget has no cause: {wait}")
        rollout_ns = self._steps.within_ns(wait.start_ns, wait.end_ns)
        if rollout_ns >= wait.overshoot_ns:
            cause = Cause.ROLLOUT
        elif self._possible.within_ns(wait.start_ns, wait.end_ns) >= wait.overshoot_ns:
            cause = Cause.UNKNOWN
        else:
            cause = Cause.SERVING
        return Blame(cause, rollout_ns)


class Agreement(NamedTuple):
    """How well blame agrees with what is known to have happened."""

    rightly: int
    """Blamed on rollout, and it was."""
    wrongly: int
    """Blamed on rollout, and it was not."""
    missed: int
    """It was rollout, and something else was blamed."""
    others: int
    """Rightly not blamed on rollout."""

    @classmethod
    def of(cls, pairs: Iterable[tuple[bool, bool]]) -> Agreement:
        """From (blamed on rollout, truly rollout) of each late request."""
        counts = {(True, True): 0, (True, False): 0, (False, True): 0, (False, False): 0}
        for pair in pairs:
            counts[pair] += 1
        return cls(*counts.values())

    @property
    def precision(self) -> float | None:
        """Share of the blamed that was to blame; None if nothing was blamed."""
        blamed = self.rightly + self.wrongly
        return self.rightly / blamed if blamed else None

    @property
    def recall(self) -> float | None:
        """Share of the culprits that was blamed; None if there was none."""
        culprits = self.rightly + self.missed
        return self.rightly / culprits if culprits else None
