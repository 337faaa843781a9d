"""What the gateway benchmark found: the JSON report, what was aimed at, and the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rose_daemon.bench.gateway import KNEE_TTFT_MS, Measured
from rose_daemon.bench.gateway_load import Figures, gap_p99, p99
from rose_daemon.harness.stats import rounded
from rose_daemon.harness.summary import head

GOALS = {
    "throughput_ratio": 0.90,
    "added_ttft_p50_ms": 2.0,
    "added_ttft_p99_ms": 10.0,
    "knee_ratio": 0.4,
    "memory_growth": 0.05,
}


def build(measured: Measured) -> dict[str, Any]:
    """The report; `ok` says whether everything that was promised holds, `goals` what was aimed at."""
    options = measured.options
    direct, through = _together(measured.direct), _together(measured.through)
    knees = {
        name: _knee(found, measured.idle_ms)
        for name, found in (("direct", measured.knee_direct), ("gateway", measured.knee_through))
    }
    alone, behind = knees["direct"], knees["gateway"]
    knee_ratio = None
    if alone and behind and alone["chunks_per_s"]:
        knee_ratio = behind["chunks_per_s"] / alone["chunks_per_s"]
    first, last = measured.memory[len(measured.memory) // 2][1], measured.memory[-1][1]
    figures: dict[str, float | None] = {
        "throughput_ratio": rounded(through["tokens_per_s"] / direct["tokens_per_s"], 4),
        "added_ttft_p50_ms": rounded(through["ttft_ms"]["p50"] - direct["ttft_ms"]["p50"]),
        "added_ttft_p99_ms": rounded(through["ttft_ms"]["p99"] - direct["ttft_ms"]["p99"]),
        "knee_ratio": rounded(knee_ratio, 4),
        "memory_growth": rounded(last / first - 1, 4),
    }
    left_over = measured.left_over
    clean = not any(left_over[name] for name in ("in_flight", "queued", "running_on_engines", "unaccounted"))
    return head("bench gateway", measured.started_at) | {
        "ok": clean,
        "exit_code": 0 if clean else 1,
        "setup": {
            "streams": options.streams,
            "engines": options.engines,
            "token_ms": options.token_ms,
            "rounds": options.rounds,
            "duration_s": options.duration_s,
            "seed": options.seed,
        },
        "direct": direct | {"cpu_us_per_chunk": _cpu(measured.direct, measured.cpu_direct_s)},
        "gateway": through | {"cpu_us_per_chunk": _cpu(measured.through, measured.cpu_through_s)},
        "figures": figures,
        "goals": {
            name: {"goal": goal, "met": _meets(name, figures[name], goal)} for name, goal in GOALS.items()
        },
        "knees": knees,
        "memory": [{"turns": turns, "resident_bytes": size} for turns, size in measured.memory],
        "disconnects": {"clients": options.disconnects} | left_over,
    }


def _meets(name: str, value: float | None, goal: float) -> bool | None:
    if value is None:
        return None
    return value >= goal if name.endswith("_ratio") else value <= goal


def _cpu(runs: list[Figures], cpu_s: Mapping[str, float]) -> dict[str, float | None]:
    """Microseconds that each process took for a chunk, its share of turns and all else included."""
    chunks = sum(figures.tokens_all for figures in runs)
    return {name: rounded(spent_s * 1e6 / chunks) if chunks else None for name, spent_s in cpu_s.items()}


def _together(runs: list[Figures]) -> dict[str, Any]:
    ttft = [each for figures in runs for each in figures.ttft_ms]
    return {
        "tokens_per_s": rounded(sum(one.tokens for one in runs) / sum(one.elapsed_s for one in runs)),
        "turns": sum(one.turns for one in runs),
        "errors": sum(one.errors for one in runs),
        "ttft_ms": {f"p{q}": rounded(float(np.percentile(ttft, q))) for q in (50, 99)},
        "rounds": [
            {
                "tokens_per_s": rounded(one.tokens_per_s),
                "ttft_p99_ms": rounded(p99(one)),
                "gap_p99_ms": rounded(gap_p99(one)),
            }
            for one in runs
        ],
    }


def _knee(found: list[tuple[int, Figures]], idle_ms: float) -> dict[str, Any] | None:
    """The most chunks a second at which first tokens still come in time; 0 if they never do."""
    if not found:
        return None
    steps: list[dict[str, Any]] = [
        {
            "streams": streams,
            "chunks_per_s": round(figures.tokens_per_s, 1),
            "added_ttft_p99_ms": round(p99(figures) - idle_ms, 3),
            "gap_p99_ms": rounded(gap_p99(figures)),
        }
        for streams, figures in found
    ]
    within = [step for step in steps if step["added_ttft_p99_ms"] <= KNEE_TTFT_MS]
    none = {"chunks_per_s": 0.0, "streams": 0, "gap_p99_ms": None}
    best = max(within, key=lambda step: step["chunks_per_s"], default=none)
    return {name: best[name] for name in none} | {"steps": steps}


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report as a table."""
    setup = report["setup"]
    title = (
        f"gateway: {setup['streams']} streams, {setup['engines']} engines, {setup['token_ms']:g} ms a token"
    )
    table = Table(title=title, title_justify="left", box=None, header_style="bold", padding=(0, 1, 0, 0))
    for heading in ("", "tokens/s", "TTFT p50", "TTFT p99", "knee chunks/s"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name in ("direct", "gateway"):
        figures, knee = report[name], report["knees"][name]
        table.add_row(
            name,
            f"{figures['tokens_per_s']:.0f}",
            f"{figures['ttft_ms']['p50']:.1f} ms",
            f"{figures['ttft_ms']['p99']:.1f} ms",
            "-" if knee is None else f"{knee['chunks_per_s']:.0f}",
        )
    console.print(table)
    for name in ("direct", "gateway"):
        spent = ", ".join(f"{process} {us}" for process, us in report[name]["cpu_us_per_chunk"].items())
        console.print(f"CPU a chunk, {name}, in us: {spent}")
    for name, goal in report["goals"].items():
        verdict = {True: "met", False: "missed", None: "not measured"}[goal["met"]]
        console.print(f"{name}: {report['figures'][name]} (goal {goal['goal']}: {verdict})")
    left = report["disconnects"]
    console.print(
        f"after {left['clients']} clients hung up: {left['in_flight']} in flight, {left['queued']} queued, "
        f"{left['running_on_engines']} running on engines"
    )
