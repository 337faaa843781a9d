"""Why the late requests of a run were late, and how far that can be believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from rose.core.attribution import Agreement, Cause, StepHistory
from rose.units import NS_PER_MS
from rose_daemon.bench.runs import Drill, Run
from rose_daemon.harness.load import Budgets, RequestRecord
from rose_daemon.harness.stats import rounded, wilson

FAILED = "failed"
CAUSES = (*(str(cause) for cause in Cause), FAILED)
_WORST_FIRST = (Cause.ROLLOUT, Cause.UNKNOWN, Cause.SERVING)


class Violation(NamedTuple):
    """A request that broke a budget, and the verdict on it."""

    record: RequestRecord
    budget: str
    """`ttft`, `tpot`, or `failed`."""
    cause: str
    """One of CAUSES."""
    rollout_ms: float
    """Time of rollout steps within the wait that was too long."""


def violations(run: Run, budgets: Budgets) -> list[Violation]:
    """The broken requests of a run, in their order."""
    history = StepHistory(run.rollout_steps, run.gaps)
    return [_judged(record, budgets, history) for record in run.records if record.breach(budgets)]


def _judged(record: RequestRecord, budgets: Budgets, history: StepHistory) -> Violation:
    if record.breach(budgets) == FAILED or not record.token_ns:
        return Violation(record, FAILED, FAILED, 0.0)
    blames = {budget: history.blame(wait) for budget, wait in record.late_waits(budgets).items()}
    # A request that broke both budgets is rollout's fault if either breach is.
    budget = min(blames, key=lambda each: _WORST_FIRST.index(blames[each].cause))
    return Violation(record, budget, str(blames[budget].cause), blames[budget].rollout_ns / NS_PER_MS)


def summary(runs: Sequence[Run], budgets: Budgets, alone: Sequence[Run] = ()) -> dict[str, Any]:
    """How many requests of a mode were late for which reason.

    Requests blamed on rollout are looked up in `alone` too, which had the same arrivals: the rule for blame
    knows only how long rollout was at work, not that serving would have needed the time itself.
    """
    late = [(run.round, each) for run in runs for each in violations(run, budgets)]
    counts = Counter(each.cause for _, each in late)
    blamed = {(number, each.record.index) for number, each in late if each.cause == Cause.ROLLOUT}
    late_alone = {(run.round, one.index) for run in alone for one in run.records if one.breach(budgets)}
    requests = sum(len(run.records) for run in runs)
    low, high = wilson(counts[Cause.ROLLOUT], requests)
    return {
        "late_by_cause": {cause: counts[cause] for cause in CAUSES},
        "late_by_rollout_share": round(counts[Cause.ROLLOUT] / requests, 6) if requests else None,
        "late_by_rollout_ci": [round(low, 6), round(high, 6)],
        "late_by_rollout_and_alone": len(blamed & late_alone) if alone else None,
    }


def of_drills(drills: Sequence[Drill], budgets: Budgets) -> dict[str, Any] | None:
    """Whether late requests that met an injected delay were blamed rightly; None without drills.

    A request is judged if its wait met injections of one kind only: then it is known who was to blame.
    """
    if not drills:
        return None
    pairs = [pair for drill in drills for pair in _pairs(drill, budgets)]
    found = Agreement.of(pairs)
    kinds = Counter(injection.by_rollout for drill in drills for injection in drill.injections)
    return {
        "injected": {"by_rollout": kinds[True], "by_serving": kinds[False]},
        "judged": len(pairs),
        **found._asdict(),
        "precision": rounded(found.precision),
        "recall": rounded(found.recall),
    }


def _pairs(drill: Drill, budgets: Budgets) -> list[tuple[bool, bool]]:
    """(blamed on rollout, truly rollout's fault) of the late requests of which that is known."""
    pairs = []
    for violation in violations(drill.run, budgets):
        wait = violation.record.late_waits(budgets).get(violation.budget)
        if wait is None:
            continue
        met = {
            injection.by_rollout
            for injection in drill.injections
            if injection.start_ns < wait.end_ns and wait.start_ns < injection.end_ns
        }
        if len(met) == 1:
            pairs.append((violation.cause == Cause.ROLLOUT, met.pop()))
    return pairs
