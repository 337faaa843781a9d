"""What the co-serving benchmark found: the JSON report, the verdict, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rose.errors import Exit
from rose.units import NS_PER_MS
from rose_daemon.bench.coserve import GATED, GateCosts, Measured, Mode, Run, of_mode
from rose_daemon.harness.load import Budgets
from rose_daemon.harness.stats import bootstrap, percentile, percentiles, rounded
from rose_daemon.harness.summary import breaches, head, serving_figures, violations

VIOLATIONS_PER_MODE = 50


def build(measured: Measured) -> dict[str, Any]:
    """The report."""
    options, runs = measured.options, measured.runs
    budgets = options.budgets
    modes = {str(mode): _mode(of_mode(runs, mode), budgets, options.seed) for mode in options.modes}
    reference = modes.get(str(Mode.ROLLOUT_ALONE), {}).get("rollout_tokens_per_s")
    busy_share = modes.get(str(Mode.ALONE), {}).get("serving_busy_share")
    # What serving alone leaves of the device: nobody can give rollout more without taking from serving.
    attainable = None if busy_share is None or reference is None else reference * (1 - busy_share)
    for figures in modes.values():
        figures["share_of_reference"] = _share(figures["rollout_tokens_per_s"], reference)
        figures["share_of_attainable"] = _share(figures["rollout_tokens_per_s"], attainable)
    report = head("bench coserve", measured.started_at) | {
        "budgets": {"ttft_ms": budgets.ttft_ms, "tpot_ms": budgets.tpot_ms},
        "modes": modes,
        "reference_tokens_per_s": reference,
        "serving_alone_busy_share": busy_share,
        "setup": _setup(measured),
        "gate": _gate(measured),
        "violations": _violations(runs, budgets),
    }
    code = verdict(report)
    return report | {"ok": code is Exit.OK, "exit_code": int(code)}


def _share(value: float | None, whole: float | None) -> float | None:
    return round(value / whole, 4) if value is not None and whole else None


def verdict(report: dict[str, Any]) -> Exit:
    """5 when a mode that promises to keep the budgets broke them, else 0."""
    for mode in GATED:
        share = report["modes"].get(str(mode), {}).get("within_budget_share")
        if share is not None and breaches(share):
            return Exit.SLO_BREACH
    return Exit.OK


def _mode(runs: Sequence[Run], budgets: Budgets, seed: int) -> dict[str, Any]:
    records = [record for run in runs for record in run.records]
    gaps = [gap for record in records for gap in record.gaps_ms]
    elapsed_s = sum(run.elapsed_s for run in runs)
    tokens = sum(run.rollout_tokens for run in runs)
    alone = all(run.mode is Mode.ALONE for run in runs)
    figures = serving_figures(records, budgets)
    ttfts = [[one.ttft_ms for one in run.records if one.ttft_ms is not None] for run in runs]
    interval = bootstrap(ttfts, lambda values: float(np.percentile(values, 99)), np.random.default_rng(seed))
    figures["ttft_ms"]["p99_ci"] = None if interval is None else [round(end, 3) for end in interval]
    return figures | {
        "itl_ms": percentiles(gaps, 99) | {"max": rounded(max(gaps, default=None))},
        "rollout_tokens_per_s": None if alone or not elapsed_s else round(tokens / elapsed_s, 2),
        "serving_busy_share": _mean([run.serving_busy_share for run in runs]),
        "rollout_busy_share": _mean([run.rollout_busy_share for run in runs]),
        "rounds": [_round(run, budgets) for run in runs],
    }


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
        "rate_scale": first["rate_scale"],
        "concurrency": options.concurrency,
        "rollout_prompt_tokens": options.rollout_prompt_tokens,
        "rollout_output_tokens": options.rollout_output_tokens,
        "cpu_affinity": {
            "serving_worker": [cores.shared],
            "rollout_worker": [cores.shared],
            "everything_else": [cores.host],
        },
        "rounds": options.rounds,
        "duration_s": options.trace.duration_s,
        "seed": options.seed,
        "traces": measured.traces,
    }


def _gate(measured: Measured) -> dict[str, Any]:
    """What the plugins cost a step (the worst gated mode), and how well they predicted."""
    replicas = [costs.replica for costs in measured.gates.values()]
    p50_ns = max((replica.overhead_p50_ns for replica in replicas), default=None)
    p99_ns = max((replica.overhead_p99_ns for replica in replicas), default=None)
    return {
        "overhead_us": {
            "p50": None if p50_ns is None else rounded(p50_ns / 1e3),
            "p99": None if p99_ns is None else rounded(p99_ns / 1e3),
        },
        "modes": {str(mode): _predictions(costs) for mode, costs in measured.gates.items()},
    }


def _predictions(costs: GateCosts) -> dict[str, Any]:
    slack, replica = costs.slack, costs.replica
    return {
        "serving": {
            "overhead_us": rounded(slack.overhead_ns / 1e3),
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
    """Broken requests, the first of each mode."""
    listed = []
    for mode in dict.fromkeys(run.mode for run in runs):
        broken = [
            {"mode": str(mode), "round": run.round} | one
            for run in of_mode(runs, mode)
            for one in violations(run.records, budgets)
        ]
        listed += broken[:VIOLATIONS_PER_MODE]
    return listed


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report as a table."""
    budgets = report["budgets"]
    title = f"co-serving, budgets TTFT {budgets['ttft_ms']:g} ms, TPOT {budgets['tpot_ms']:g} ms"
    table = Table(title=title, title_justify="left", box=None, header_style="bold", padding=(0, 1, 0, 0))
    headings = (
        "mode", "sent", "in budget", "TTFT p99", "TPOT p99", "ITL p99", "rollout", "share", "of left", "busy",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "mode" else "right", no_wrap=True)
    for mode, figures in report["modes"].items():
        table.add_row(
            mode,
            str(figures["requests"] or "-"),
            _text(figures["within_budget_share"], "{:.2%}"),
            _text(figures["ttft_ms"]["p99"], "{:.0f} ms"),
            _text(figures["tpot_ms"]["p99"], "{:.1f} ms"),
            _text(figures["itl_ms"]["p99"], "{:.0f} ms"),
            _text(figures["rollout_tokens_per_s"], "{:.0f}/s"),
            _text(figures["share_of_reference"], "{:.0%}"),
            _text(figures["share_of_attainable"], "{:.0%}"),
            _text(figures["serving_busy_share"], "{:.0%}"),
        )
    console.print(table)
    if not report["ok"]:
        console.print("not ok: a mode that promises to keep the budgets broke them", style="red")


def _text(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)
