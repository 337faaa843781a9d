"""What the co-serving benchmark found: the JSON report and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rose.core.attribution import Cause
from rose.core.readings import ReplicaReading
from rose.errors import Exit
from rose.units import NS_PER_MS
from rose_daemon.bench import causes
from rose_daemon.bench.figures import BASELINES, Comparison
from rose_daemon.bench.runs import BUSY_RANGE, GATED, GateCosts, Measured, Mode, Run, of_mode
from rose_daemon.harness.load import Budgets
from rose_daemon.harness.stats import percentile, rounded
from rose_daemon.harness.summary import breaches, head, serving_figures

VIOLATIONS_PER_MODE = 50


def build(measured: Measured) -> dict[str, Any]:
    """The report."""
    options, runs = measured.options, measured.runs
    budgets = options.budgets
    comparison = Comparison(runs, options.seed)
    present = [mode for mode in options.modes if mode not in measured.skipped]
    modes = {str(mode): _mode(mode, runs, budgets, comparison) for mode in present}
    rollout_alone = modes.get(str(Mode.ROLLOUT_ALONE), {}).get("rollout_tokens_per_s")
    busy_share = modes.get(str(Mode.ALONE), {}).get("serving_busy_share")
    # What serving alone leaves of the device: nobody can give rollout more without taking from serving.
    reference = None if busy_share is None or rollout_alone is None else rollout_alone * (1 - busy_share)
    for mode, figures in modes.items():
        shared = mode != Mode.ROLLOUT_ALONE
        figures["share_of_reference"] = _share(figures["rollout_tokens_per_s"], reference) if shared else None
        for one in figures["rounds"]:
            one["share_of_reference"] = _share(one["rollout_tokens_per_s"], reference) if shared else None
    alone_share = modes.get(str(Mode.ALONE), {}).get("within_budget_share")
    report = head("bench coserve", measured.started_at) | {
        "budgets": {"ttft_ms": budgets.ttft_ms, "tpot_ms": budgets.tpot_ms},
        "modes": modes,
        "reference_tokens_per_s": rounded(reference, 2),
        "rollout_alone_tokens_per_s": rollout_alone,
        "serving_alone_busy_share": busy_share,
        "serving_alone_busy_as_wanted": None if busy_share is None else _as_wanted(busy_share),
        "serving_alone_broke_budgets": alone_share is not None and breaches(alone_share),
        "kv_budget_was_cut": any(run.kv_budget_share < 1 for run in runs),
        "setup": _setup(measured),
        "gate": _gate(measured),
        "attribution": causes.of_drills(measured.drills, budgets),
        "violations": _violations(runs, budgets),
    }
    report["goals"] = goals(report)
    code = verdict(report)
    return report | {"ok": code is Exit.OK, "exit_code": int(code)}


def _share(value: float | None, whole: float | None) -> float | None:
    return round(value / whole, 4) if value is not None and whole else None


def _as_wanted(busy_share: float) -> bool:
    return BUSY_RANGE[0] <= busy_share <= BUSY_RANGE[1]


def verdict(report: dict[str, Any]) -> Exit:
    """5 when a mode that promises to keep the budgets broke them, else 0.

    Where serving alone broke them too, only what is not known to be its own doing counts.
    """
    for mode in GATED:
        figures = report["modes"].get(str(mode), {})
        share = figures.get("within_budget_share")
        if share is not None and report["serving_alone_broke_budgets"]:
            own = figures["late_by_cause"][str(Cause.SERVING)]
            share += own / figures["requests"]
        if share is not None and breaches(share):
            return Exit.SLO_BREACH
    return Exit.OK


def goals(report: dict[str, Any]) -> list[dict[str, Any]]:
    """How far the gated modes are from what ROSE sets out to reach; no part of the exit code."""
    slack = report["modes"].get(str(Mode.ROSE_SLACK), {})
    strict = report["modes"].get(str(Mode.ROSE_STRICT), {})
    alone = (strict.get("against") or {}).get(str(Mode.ALONE)) or {}
    attribution = report["attribution"] or {}
    rows = (
        ("rose-slack: share within both budgets", slack.get("within_budget_share"), ">=", 0.995),
        ("rose-slack: share of the reference", slack.get("share_of_reference"), ">=", 0.93),
        ("rose-strict: p99 TTFT over alone", alone.get("ttft_ms", {}).get("p99_ratio"), "<=", 1.15),
        ("rose-strict: share of the reference", strict.get("share_of_reference"), ">=", 0.80),
        ("rose-slack: share late because of rollout", slack.get("late_by_rollout_share"), "<=", 0.001),
        ("rose-strict: share late because of rollout", strict.get("late_by_rollout_share"), "<=", 0.001),
        ("blame for injected delays: precision", attribution.get("precision"), ">=", 0.9),
        ("blame for injected delays: recall", attribution.get("recall"), ">=", 0.9),
    )
    return [
        {
            "name": name,
            "value": value,
            "wanted": f"{sign} {bound}",
            "reached": value >= bound if sign == ">=" else value <= bound,
        }
        for name, value, sign, bound in rows
        if value is not None
    ]


def _mode(mode: Mode, runs: Sequence[Run], budgets: Budgets, comparison: Comparison) -> dict[str, Any]:
    ours = of_mode(runs, mode)
    elapsed_s = sum(run.elapsed_s for run in ours)
    tokens = sum(run.rollout_tokens for run in ours)
    figures = serving_figures([record for run in ours for record in run.records], budgets)
    rolls_out = mode is not Mode.ALONE and elapsed_s > 0
    return (
        figures
        | comparison.latencies(mode)
        | causes.summary(ours, budgets, of_mode(runs, Mode.ALONE))
        | {
            "rollout_tokens_per_s": round(tokens / elapsed_s, 2) if rolls_out else None,
            "serving_busy_share": _mean([run.serving_busy_share for run in ours]),
            "rollout_busy_share": _mean([run.rollout_busy_share for run in ours]),
            "against": {str(base): comparison.against(mode, base) for base in BASELINES},
            "rounds": [_round(run, budgets) for run in ours],
        }
    )


def _round(run: Run, budgets: Budgets) -> dict[str, Any]:
    ttft = [one.ttft_ms for one in run.records if one.ttft_ms is not None]
    tpot = [one.tpot_ms for one in run.records if one.tpot_ms is not None]
    return {
        "round": run.round,
        "requests": len(run.records),
        "broken": sum(bool(one.breach(budgets)) for one in run.records),
        "elapsed_s": round(run.elapsed_s, 2),
        "ttft_p99_ms": rounded(percentile(ttft, 99)),
        "tpot_p99_ms": rounded(percentile(tpot, 99)),
        "rollout_tokens_per_s": None
        if run.mode is Mode.ALONE
        else round(run.rollout_tokens / run.elapsed_s, 2),
        "rollout_errors": run.rollout_errors,
        "serving_busy_share": round(run.serving_busy_share, 4),
        "rollout_busy_share": round(run.rollout_busy_share, 4),
        "gate_transitions": run.gate_transitions,
        "kv_budget_share": round(run.kv_budget_share, 4),
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _setup(measured: Measured) -> dict[str, Any]:
    options, cores = measured.options, measured.cores
    first = measured.traces[0]
    return {
        "trace": first["trace"],
        "offset": first["offset"],
        "size_divisor": first["size_divisor"],
        "output_divisor": first["output_divisor"],
        "rate_scale": first["rate_scale"],
        "rate_rps": first["requests_per_s"],
        "calibration": [
            {"rate_rps": round(trial.rate_rps, 3), "busy_share": round(trial.busy_share, 4)}
            for trial in measured.calibration
        ],
        "concurrency": options.concurrency,
        "rollout_prompt_tokens": options.rollout_prompt_tokens,
        "rollout_output_tokens": options.rollout_output_tokens,
        "step_tokens_max": {"static": options.static_tokens, "others": options.token_cap},
        "cpu_affinity": {
            "serving_worker": [cores.shared],
            "rollout_worker": [cores.shared],
            "everything_else": [cores.host],
        },
        "rounds": options.rounds,
        "duration_s": round(first["duration_s"], 2),
        "seed": options.seed,
        "skipped": {str(mode): reason for mode, reason in measured.skipped.items()},
        "traces": measured.traces,
    }


def _gate(measured: Measured) -> dict[str, Any]:
    """What the plugins cost a step (the worst gated mode), and how well they predicted."""
    replicas = [costs.replica for costs in measured.gates.values()]

    def worst_us(of: Callable[[ReplicaReading], int]) -> float | None:
        return rounded(max(map(of, replicas)) / 1e3) if replicas else None

    return {
        "overhead_us": {
            "p50": worst_us(lambda replica: replica.overhead_p50_ns),
            "p99": worst_us(lambda replica: replica.overhead_p99_ns),
        },
        "overhead_cpu_us": {
            "p50": worst_us(lambda replica: replica.overhead_cpu_p50_ns),
            "p99": worst_us(lambda replica: replica.overhead_cpu_p99_ns),
        },
        "modes": {str(mode): _predictions(costs) for mode, costs in measured.gates.items()},
    }


def _predictions(costs: GateCosts) -> dict[str, Any]:
    slack, replica = costs.slack, costs.replica
    return {
        "serving": {
            "overhead_us": rounded(slack.overhead_ns / 1e3),
            "deferred_us": rounded(slack.deferred_ns / 1e3),
            "prefill_p99_ms": rounded(slack.prefill_p99_ns / NS_PER_MS),
            "prefill_predicted_ms": rounded(slack.prefill_predicted_ns / NS_PER_MS),
            "drift": slack.drift_permille / 1000,
        },
        "rollout": {
            "margin_ms": rounded(replica.margin_ns / NS_PER_MS),
            "drift": replica.drift_permille / 1000,
        },
    }


def _violations(runs: Sequence[Run], budgets: Budgets) -> list[dict[str, Any]]:
    """Broken requests, the first of each mode; those that were late by serving's own doing come last."""
    listed = []
    for mode in dict.fromkeys(run.mode for run in runs):
        broken = [
            {
                "mode": str(mode),
                "round": run.round,
                "request": one.record.index,
                "budget": one.budget,
                "cause": one.cause,
                "rollout_ms": rounded(one.rollout_ms),
                "ttft_ms": rounded(one.record.ttft_ms),
                "tpot_ms": rounded(one.record.tpot_ms),
                "error": one.record.error,
            }
            for run in of_mode(runs, mode)
            for one in causes.violations(run, budgets)
        ]
        broken.sort(key=lambda one: one["cause"] == Cause.SERVING)
        listed += broken[:VIOLATIONS_PER_MODE]
    return listed
