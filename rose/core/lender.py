"""Whether a host lends now: the operator's switch, the hours, the error budget, and rollout-off windows.

    observations --> Jury --> ErrorBudget --+
                       |                    +--> Decision: lend or not, why, and what to keep free
                       +--> Switchback -----+
    drills ---------------> TakeBack -------+

A pure machine like the others: time and chance are arguments.  It measures in either mode; where a host only
observes it never decides to lend.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

import msgspec

from rose.core.attribution import Span
from rose.core.evidence import Difference, Tally, late_share
from rose.core.harm import JUDGE_AFTER_NS, BudgetSettings, Counts, ErrorBudget, Judged, Jury
from rose.core.hours import Hours
from rose.core.readings import GateReason, ServedRequest, StepRecord
from rose.core.switchback import Rng, Switchback, SwitchbackSettings, Window
from rose.core.takeback import DrillSettings, TakeBack
from rose.units import NS_PER_MS


class Mode(StrEnum):
    """How far an operator goes."""

    OBSERVE = "observe"
    """Measure, and report what could be lent; lend nothing."""
    LEND = "lend"


class LenderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator sets."""

    mode: Mode = Mode.LEND
    hours: tuple[Hours, ...] = ()
    """When to lend; empty: always."""
    budget: BudgetSettings = BudgetSettings()
    switchback: SwitchbackSettings = SwitchbackSettings()
    drill: DrillSettings = DrillSettings()


class Decision(NamedTuple):
    """What holds from now on."""

    closed: GateReason | None
    """Why nothing is lent; None: it is."""
    text: str
    reserve_bytes: int

    @property
    def lends(self) -> bool:
        """Whether rollout may run."""
        return self.closed is None


class LenderView(msgspec.Struct, frozen=True, kw_only=True):
    """What `rose status` shows of it."""

    mode: str
    closed: str
    """A GateReason in lower case; empty while the host lends."""
    text: str
    requests: int
    """Judged, within the budget's window; so are the next three."""
    late_by_rollout: int
    late_by_unknown: int
    late_by_serving: int
    harm_allowed: int
    harm_share_max: float
    budget_left_share: float | None
    """Of the error budget; None where harm stops nothing."""
    late_more_with_rollout: float | None
    """Share of requests by which more are late in windows with rollout than without (switchback)."""
    late_more_interval: tuple[float, float] | None
    off_windows: int
    on_windows: int
    drills: int
    take_back_p50_ms: float | None
    take_back_p99_ms: float | None
    serving_growth_bytes_per_s: float
    reserve_bytes: int


class Lender:
    """All of it for one host."""

    def __init__(self, settings: LenderSettings, rng: Rng, now_ns: int) -> None:
        self.settings = settings
        self.switched_off = False
        """By the operator; the caller keeps it over restarts."""
        self.budget = ErrorBudget(settings.budget)
        self.take_back = TakeBack(settings.drill, rng)
        self.switchback = Switchback(settings.switchback, rng, JUDGE_AFTER_NS)
        self._jury = Jury(now_ns)
        self._decision = Decision(GateReason.LENDING_OFF, "nothing is decided yet", 0)

    def reconfigure(self, settings: LenderSettings) -> None:
        """Follow other settings from now on; what was measured and counted stays."""
        self.settings = settings
        self.budget.settings = settings.budget
        self.take_back.reconfigure(settings.drill)
        self.switchback.reconfigure(settings.switchback)

    # ---- what was observed ----------------------------------------------------------------------

    def steps(self, steps: Iterable[StepRecord]) -> None:
        """Steps that rollout engines took on the device."""
        self._jury.logged(steps)

    def gap(self, span: Span) -> None:
        """Rollout may have run then, and nobody knows when exactly."""
        self._jury.gap(span)

    def served(self, requests: Iterable[ServedRequest], now_ns: int) -> None:
        """Requests that the serving engine ended."""
        self._jury.served(requests, now_ns)

    def judge(self, now_ns: int) -> list[Judged]:
        """Judge the requests whose time has come, and book them."""
        judged = self._jury.judge(now_ns)
        for each in judged:
            request = each.request
            self.switchback.judged(request.arrival_ns, request.last_ns, late=each.blame is not None)
        self.budget.add(Counts.of(judged), now_ns)
        return judged

    def reset(self) -> None:
        """The operator knows of the harm, and starts with a full budget and no comparison."""
        self.budget.reset()
        self.switchback.forget()

    # ---- what follows ---------------------------------------------------------------------------

    def decide(
        self, now_ns: int, minute_of_week: int, *, occupied: bool = True
    ) -> tuple[Decision, list[Window]]:
        """Whether to lend now, and the switchback windows that were counted out.

        `occupied`: an engine is there that could use what is lent; without one there is nothing to compare.
        """
        self.budget.advance(now_ns)
        closed, text = self._stopped(minute_of_week)
        windows = self.switchback.advance(now_ns, lending=closed is None and occupied)
        if closed is None and self.switchback.off:
            closed = GateReason.ROLLOUT_OFF_WINDOW
            text = "a window without rollout, to compare with"
        self._decision = Decision(closed, text, self.take_back.reserve_bytes)
        return self._decision, windows

    def _stopped(self, minute_of_week: int) -> tuple[GateReason | None, str]:
        if self.settings.mode is Mode.OBSERVE:
            return GateReason.LENDING_OFF, "lending.mode is observe: measured, and nothing lent"
        if self.switched_off:
            return GateReason.LENDING_OFF, "switched off by the operator: `rose lend on` lends again"
        if self.budget.spent:
            counts = self.budget.counts
            text = (
                f"error budget spent: of {counts.requests} requests {counts.rollout} were late because of"
                f" rollout and {counts.unknown} may have been; {self.budget.allowed} may"
            )
            return GateReason.ERROR_BUDGET_SPENT, text
        if (found := self._proven()) is not None:
            low, high = found.interval
            text = (
                f"error budget spent: with rollout {found.difference:.2%} more requests are late"
                f" ({low:.2%} to {high:.2%}) than in windows without;"
                f" {self.budget.settings.share_max:.2%} may"
            )
            return GateReason.ERROR_BUDGET_SPENT, text
        if self.settings.hours and not any(each.hold(minute_of_week) for each in self.settings.hours):
            return GateReason.OUTSIDE_HOURS, "outside lending.hours"
        return None, "lends"

    def _proven(self) -> Difference | None:
        """The comparison, if it proves more harm than the budget allows.

        It also shows harm that no step log tells of, such as caches that rollout has emptied.
        """
        share_max = self.budget.settings.share_max
        found = self.switchback.proof if share_max < 1 else None
        return found if found is not None and found.interval.low > share_max else None

    def drill_due(self, now_ns: int) -> bool:
        """Whether to take some memory back now, to see how long that takes."""
        return self._decision.lends and self.take_back.due(now_ns)

    def view(self) -> LenderView:
        """What to show."""
        counts, budget, decision = self.budget.counts, self.budget, self._decision
        found = self.switchback.estimate
        p50_ns, p99_ns = self.take_back.quantile_ns(0.5), self.take_back.quantile_ns(0.99)
        off = sum(window.off for window in self.switchback.closed)
        return LenderView(
            mode=self.settings.mode.value,
            closed="" if decision.closed is None else decision.closed.name.lower(),
            text=decision.text,
            requests=counts.requests,
            late_by_rollout=counts.rollout,
            late_by_unknown=counts.unknown,
            late_by_serving=counts.serving,
            harm_allowed=budget.allowed,
            harm_share_max=budget.settings.share_max,
            budget_left_share=_left(budget),
            late_more_with_rollout=None if found is None else found.difference,
            late_more_interval=None if found is None else (found.interval.low, found.interval.high),
            off_windows=off,
            on_windows=len(self.switchback.closed) - off,
            drills=self.take_back.drills,
            take_back_p50_ms=None if p50_ns is None else p50_ns / NS_PER_MS,
            take_back_p99_ms=None if p99_ns is None else p99_ns / NS_PER_MS,
            serving_growth_bytes_per_s=self.take_back.growth_bytes_per_s,
            reserve_bytes=self.take_back.reserve_bytes,
        )


def _left(budget: ErrorBudget) -> float | None:
    if budget.settings.share_max >= 1:
        return None
    return max(0.0, 1 - budget.counts.harmed / budget.allowed) if budget.allowed else 0.0


def harm_interval(counts: Counts) -> tuple[float, float]:
    """Share of requests late because of rollout, as far as can be told: a 95% interval."""
    low, high = late_share([Tally(counts.requests, counts.harmed)]).interval
    return low, high
