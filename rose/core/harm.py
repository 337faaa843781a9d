"""Who made serving requests late, by replay of the step logs, and the error budget for rollout's part.

Each request that the serving engine ended is judged once the rollout steps that ran beside it are known: by
`rose.core.attribution`, whether they explain its delay.  What cannot be told counts as rollout's fault: the
budget is there to protect serving.

The budget: of the requests of the last `window_ns`, a share of `share_max` may be late because of rollout,
and `requests_min` in any case, as one of a few requests proves nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from rose.core.attribution import Blame, Cause, Span, StepHistory, Wait, decode_wait, first_token_wait
from rose.core.readings import ServedRequest, StepRecord
from rose.units import NS_PER_S

JUDGE_AFTER_NS = 2 * NS_PER_S
"""A request is judged this long after its end: by then the steps that ran beside it are logged."""
STEPS_KEPT_NS = 180 * NS_PER_S
"""How far back steps are known; a longer wait is of unknown cause."""
STEPS_MAX = 100_000
PENDING_MAX = 20_000
BUCKET_NS = 60 * NS_PER_S


class BudgetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The error budget; `share_max` 1: harm is measured, and stops nothing."""

    share_max: float = 0.001
    requests_min: int = 3
    window_ns: int = 3600 * NS_PER_S

    def __post_init__(self) -> None:
        if not 0 <= self.share_max <= 1 or self.requests_min < 0 or self.window_ns < BUCKET_NS:
            raise ValueError(f"senseless error budget: {self}")


class Judged(NamedTuple):
    """A request, and who made it late; None if nobody did."""

    request: ServedRequest
    blame: Blame | None
    budget: str
    """`ttft` or `tpot`: the budget that was broken; empty if none was."""
    overshoot_ns: int

    @property
    def harmed(self) -> bool:
        """Whether rollout made it late, or may have."""
        return self.blame is not None and self.blame.cause is not Cause.SERVING


class LateWait(NamedTuple):
    """A budget that a request broke."""

    budget: str
    wait: Wait


def late_waits(request: ServedRequest) -> list[LateWait]:
    """The waits of a request that were too long."""
    first_ns = request.first_ns or request.last_ns  # given up without a token: it waited until then
    ttft = first_token_wait(request.arrival_ns, first_ns, request.ttft_budget_ns)
    found = [LateWait("ttft", ttft)] if ttft else []
    if request.first_ns:
        tpot = decode_wait(request.first_ns, request.last_ns, request.tokens, request.tpot_budget_ns)
        found += [LateWait("tpot", tpot)] if tpot else []
    return found


class Jury:
    """Keeps the latest steps of all rollout engines, and judges requests by them."""

    def __init__(self, began_ns: int) -> None:
        """Nothing is known from before `began_ns`: requests that arrived earlier are nobody's."""
        self._began_ns = self._known_from_ns = began_ns
        self._steps: deque[StepRecord] = deque()
        self._gaps: deque[Span] = deque(maxlen=1000)
        self._pending: deque[ServedRequest] = deque()
        self.dropped = 0
        """Requests that were too many to keep until they could be judged, or that made no sense."""

    def logged(self, steps: Iterable[StepRecord]) -> None:
        """Steps of a rollout engine, as its log has them."""
        self._steps += steps
        while len(self._steps) > STEPS_MAX:
            self._known_from_ns = max(self._known_from_ns, self._steps.popleft().end_ns)

    def gap(self, span: Span) -> None:
        """Not every step of that time is known."""
        last = self._gaps[-1] if self._gaps else None
        if last is not None and last.start_ns <= span.start_ns <= last.end_ns:
            self._gaps[-1] = Span(last.start_ns, max(last.end_ns, span.end_ns))
        else:
            self._gaps.append(span)

    def served(self, requests: Iterable[ServedRequest], now_ns: int) -> None:
        """Requests that ended by now; an end that lies ahead is none, and nothing waits for it."""
        for each in requests:
            if each.last_ns > now_ns + JUDGE_AFTER_NS:
                self.dropped += 1
            elif each.arrival_ns >= self._began_ns:
                self._pending.append(each)
        while len(self._pending) > PENDING_MAX:
            self._pending.popleft()
            self.dropped += 1

    def judge(self, now_ns: int) -> list[Judged]:
        """The requests whose time has come."""
        self._forget(now_ns)
        due: list[tuple[ServedRequest, list[LateWait]]] = []
        while self._pending and self._pending[0].last_ns + JUDGE_AFTER_NS <= now_ns:
            request = self._pending.popleft()
            due.append((request, late_waits(request)))
        spans = [each.wait for _, waits in due for each in waits]
        if not spans:
            return [Judged(request, None, "", 0) for request, _ in due]
        begin_ns, end_ns = min(wait.start_ns for wait in spans), max(wait.end_ns for wait in spans)
        steps = (step for step in self._steps if step.end_ns > begin_ns and step.start_ns < end_ns)
        history = StepHistory(steps, [*self._gaps, Span(0, self._known_from_ns)])
        return [_judged(request, waits, history) for request, waits in due]

    def _forget(self, now_ns: int) -> None:
        horizon_ns = now_ns - STEPS_KEPT_NS
        while self._steps and self._steps[0].end_ns < horizon_ns:
            self._steps.popleft()
        while self._gaps and self._gaps[0].end_ns < horizon_ns:
            self._gaps.popleft()
        self._known_from_ns = max(self._known_from_ns, min(horizon_ns, now_ns))


_WORST_FIRST = (Cause.ROLLOUT, Cause.UNKNOWN, Cause.SERVING)


def _judged(request: ServedRequest, waits: Sequence[LateWait], history: StepHistory) -> Judged:
    """A request that broke both budgets is rollout's fault if either breach is."""
    if not waits:
        return Judged(request, None, "", 0)
    blames = [(history.blame(late.wait), late) for late in waits]
    blame, worst = min(blames, key=lambda each: _WORST_FIRST.index(each[0].cause))
    return Judged(request, blame, worst.budget, worst.wait.overshoot_ns)


class Counts(NamedTuple):
    """Requests of a stretch of time, and those that were late, by cause."""

    requests: int = 0
    rollout: int = 0
    unknown: int = 0
    serving: int = 0

    @property
    def harmed(self) -> int:
        """Late because of rollout, as far as can be told."""
        return self.rollout + self.unknown

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(*(mine + its for mine, its in zip(self, other, strict=True)))

    def less(self, other: Counts) -> Counts:
        """Without those."""
        return Counts(*(mine - its for mine, its in zip(self, other, strict=True)))

    @classmethod
    def of(cls, judged: Iterable[Judged]) -> Counts:
        """Of requests."""
        total = cls()
        for each in judged:
            cause = each.blame.cause if each.blame else None
            hits = (cause is Cause.ROLLOUT, cause is Cause.UNKNOWN, cause is Cause.SERVING)
            total = total.plus(cls(1, *map(int, hits)))
        return total


class ErrorBudget:
    """Counts the harm of the last `window_ns`, in buckets of a minute."""

    def __init__(self, settings: BudgetSettings) -> None:
        self.settings = settings
        self._buckets: deque[tuple[int, Counts]] = deque()
        self.counts = Counts()
        """Of the whole window."""

    def add(self, counts: Counts, at_ns: int) -> None:
        """Requests judged at `at_ns`; from a journal of earlier ones, oldest first, too."""
        number = at_ns // BUCKET_NS
        if self._buckets and self._buckets[-1][0] >= number:
            last, before = self._buckets[-1]
            self._buckets[-1] = last, before.plus(counts)
        else:
            self._buckets.append((number, counts))
        self.counts = self.counts.plus(counts)
        self.advance(at_ns)

    def advance(self, now_ns: int) -> None:
        """Time passed: what is older than the window is forgotten."""
        oldest = (now_ns - self.settings.window_ns) // BUCKET_NS
        while self._buckets and self._buckets[0][0] <= oldest:
            self.counts = self.counts.less(self._buckets.popleft()[1])

    def reset(self) -> None:
        """The operator starts with a full budget."""
        self._buckets.clear()
        self.counts = Counts()

    @property
    def allowed(self) -> int:
        """How many requests of the window rollout may make late."""
        return max(self.settings.requests_min, int(self.settings.share_max * self.counts.requests))

    @property
    def spent(self) -> bool:
        """Whether it made more than that."""
        return self.settings.share_max < 1 and self.counts.harmed > self.allowed
