"""The co-serving report on a terminal, in 80 columns."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from rose_daemon.bench.runs import BUSY_RANGE, Mode

HEADINGS = (
    "mode", "sent", "within\nbudget", "TTFT\np99", "over\nalone", "TPOT\np99", "ITL\np99", "ITL\nmax",
    "rollout\ntok/s", "of\nref.", "busy",
)  # fmt: skip


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report: a row a mode, then what was set out to be reached."""
    budgets = report["budgets"]
    title = f"co-serving; milliseconds; budgets TTFT {budgets['ttft_ms']:g}, TPOT {budgets['tpot_ms']:g}"
    table = Table(title=title, title_justify="left", box=None, header_style="bold", padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "mode" else "right", no_wrap=True)
    for mode, figures in report["modes"].items():
        table.add_row(mode, *_cells(figures))
    console.print(table)
    for line in _remarks(report):
        console.print(line)
    if not report["ok"]:
        console.print("not ok: a mode that promises to keep the budgets broke them", style="red")


def _cells(figures: dict[str, Any]) -> list[str]:
    against = (figures["against"].get(str(Mode.ALONE)) or {}).get("ttft_ms", {})
    return [
        str(figures["requests"] or "-"),
        _text(figures["within_budget_share"], "{:.2%}"),
        _text(figures["ttft_ms"]["p99"], "{:.0f}"),
        _text(against.get("p99_ratio"), "{:.2f}x"),
        _text(figures["tpot_ms"]["p99"], "{:.1f}"),
        _text(figures["itl_ms"]["p99"], "{:.0f}"),
        _text(figures["itl_ms"]["max"], "{:.0f}"),
        _text(figures["rollout_tokens_per_s"], "{:.0f}"),
        _text(figures["share_of_reference"], "{:.0%}"),
        _text(figures["serving_busy_share"], "{:.0%}"),
    ]


def _remarks(report: dict[str, Any]) -> list[str]:
    lines = []
    if (reference := report["reference_tokens_per_s"]) is not None:
        alone = report["rollout_alone_tokens_per_s"]
        lines.append(f"ref.: {reference:.0f} rollout tokens/s, what serving alone leaves of {alone:.0f}")
    if report["serving_alone_busy_as_wanted"] is False:
        low, high = BUSY_RANGE
        share = report["serving_alone_busy_share"]
        lines.append(f"serving alone was {share:.0%} busy; between {low:.0%} and {high:.0%} was wanted")
    if report["serving_alone_broke_budgets"]:
        lines.append("serving alone broke its budgets too: only what rollout made late counts against it")
    if report["kv_budget_was_cut"]:
        lines.append("the machine ran short of memory: rollout's KV budget was cut, its figures are too low")
    lines += [f"{mode} was left out: {reason}" for mode, reason in report["setup"]["skipped"].items()]
    for goal in report["goals"]:
        reached = "reached" if goal["reached"] else "missed"
        lines.append(f"goal {reached}: {goal['name']} {goal['value']:.4g} (wanted {goal['wanted']})")
    return lines


def _text(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)
