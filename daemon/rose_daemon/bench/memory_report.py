"""The report of `rose bench memory`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from rose.units import MIB
from rose_daemon.bench.memory import BurstRun, MemoryMeasured
from rose_daemon.bench.memory_watch import ENOUGH_BACK
from rose_daemon.harness.load import RequestRecord
from rose_daemon.harness.stats import percentiles, rounded
from rose_daemon.harness.summary import head

ACTIVE_MS_MAX = 1000.0
"""Longest that an activation may take on a CPU."""


def build(measured: MemoryMeasured) -> dict[str, Any]:
    """The report as JSON: what was measured, what was to be reached, and whether it was."""
    modes = {
        mode: _mode(runs, measured.rollout_tokens_per_s.get(mode))
        for mode, runs in (
            ("alone", measured.alone),
            ("shared", measured.shared),
            ("static", measured.static),
        )
    }
    report = head("bench memory", measured.started_at) | {
        "options": {
            name: getattr(measured.options, name)
            for name in measured.options.__struct_fields__
            if name != "directory"
        },
        "modes": modes,
        "memory": _memory(measured.shared),
        "activation": _activation(measured),
    }
    report["reached"] = reached = _reached(report)
    return report | {"ok": all(reached.values()), "exit_code": 0 if all(reached.values()) else 1}


def _mode(runs: Sequence[BurstRun], tokens_per_s: float | None) -> dict[str, Any]:
    records: list[RequestRecord] = [record for run in runs for record in run.records]
    return {
        "requests": len(records),
        "failed": sum(bool(record.error) for record in records),
        "ttft_ms": percentiles([each.ttft_ms for each in records if each.ttft_ms is not None], 50, 99),
        "tpot_ms": percentiles([each.tpot_ms for each in records if each.tpot_ms is not None], 50, 99),
        "preemptions": sum(run.preemptions for run in runs),
        "shortages": sum(run.shortages for run in runs),
        "rollout_tokens_per_s": rounded(tokens_per_s, 0),
    }


def _memory(runs: Sequence[BurstRun]) -> dict[str, Any]:
    bursts = [run.memory for run in runs if run.memory is not None]
    times = [burst.take_back_ms for burst in bursts if burst.take_back_ms is not None]
    return {
        "bursts": len(bursts),
        "bursts_with_enough_back": sum(burst.taken_share >= ENOUGH_BACK for burst in bursts),
        "lent_mib": _mib([burst.lent_bytes for burst in bursts]),
        "taken_back_mib": _mib([burst.taken_bytes for burst in bursts]),
        "taken_share_min": rounded(min((burst.taken_share for burst in bursts), default=None)),
        "rollout_rss_fell_mib": _mib([burst.rss_fell_bytes for burst in bursts]),
        "serving_kv_grew_mib": _mib([burst.serving_grew_bytes for burst in bursts]),
        "take_back_ms": percentiles(times, 50, 99) | {"max": rounded(max(times, default=None))},
    }


def _mib(values: Sequence[int]) -> dict[str, float | None]:
    if not values:
        return {"min": None, "median": None, "max": None}
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    return {"min": ordered[0] // MIB, "median": middle // MIB, "max": ordered[-1] // MIB}


def _activation(measured: MemoryMeasured) -> dict[str, Any] | None:
    found = measured.activation
    if found is None:
        return None
    return {
        "pss_active_mib": found.pss_active_bytes // MIB,
        "pss_inactive_mib": found.pss_inactive_bytes // MIB,
        "kv_inactive_mib": rounded(found.kv_inactive_bytes / MIB),
        "active_ms": percentiles(found.active_ms, 50) | {"max": rounded(max(found.active_ms))},
        "first_answer_ms": percentiles(found.first_answer_ms, 50)
        | {"max": rounded(max(found.first_answer_ms))},
    }


def _reached(report: dict[str, Any]) -> dict[str, bool]:
    memory, modes, activation = report["memory"], report["modes"], report["activation"]
    return {
        "every_burst_took_half_back": memory["bursts_with_enough_back"] == memory["bursts"] > 0,
        "no_more_preemptions_than_alone": modes["shared"]["preemptions"] <= modes["alone"]["preemptions"],
        "no_request_failed": not any(mode["failed"] for mode in modes.values()),
        "active_within_a_second": activation is not None and activation["active_ms"]["max"] <= ACTIVE_MS_MAX,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print it."""
    table = Table(
        title="bursts on serving; milliseconds", title_justify="left", box=None, header_style="bold"
    )
    for heading in ("mode", "sent", "TTFT p50", "p99", "TPOT p50", "p99", "preempted", "rollout tok/s"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for mode, figures in report["modes"].items():
        table.add_row(
            mode,
            str(figures["requests"]),
            *(_text(figures[key][p]) for key in ("ttft_ms", "tpot_ms") for p in ("p50", "p99")),
            str(figures["preemptions"]),
            _text(figures["rollout_tokens_per_s"]),
        )
    console.print(table)
    memory, activation = report["memory"], report["activation"]
    lent, back, rss = memory["lent_mib"], memory["taken_back_mib"], memory["rollout_rss_fell_mib"]
    if memory["bursts"]:
        console.print(
            f"lent {lent['median']} MiB (median), taken back {back['median']} MiB, at least "
            f"{memory['taken_share_min']:.0%} of it; worker RSS fell by {rss['median']} MiB"
        )
    times = memory["take_back_ms"]
    console.print(f"take-back: p50 {_text(times['p50'])} ms, p99 {_text(times['p99'])} ms")
    if activation is not None:
        console.print(
            f"replica: PSS {activation['pss_active_mib']} MiB active, {activation['pss_inactive_mib']} MiB "
            f"inactive; active again in {_text(activation['active_ms']['max'])} ms at most"
        )
    for name in (name for name, good in report["reached"].items() if not good):
        console.print(f"not reached: {name.replace('_', ' ')}", style="red")


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"
