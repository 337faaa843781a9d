"""Self-contained HTML reports with plots as inline SVG: no scripts, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
    padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .25rem .7rem; text-align: left }
th { border-bottom: 2px solid #888 } tr:nth-child(even) { background: #f4f4f4 }
.miss { color: #a00; font-weight: 600 } .ok { color: #060 } figure { margin: 1.5rem 0 }
svg { max-width: 100% } figcaption { font-weight: 600 }
"""
_COLOURS = ("#1b6ca8", "#c8553d", "#4f772d", "#8e5ea2", "#b8860b", "#2f4f4f", "#d1495b", "#555555")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 260, 56, 34


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


Series = Sequence[tuple[float, float]]


def page(title: str, body: str) -> str:
    """A whole document."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>{body}</html>\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text cells; a cell `MISS` or `ok` is coloured."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    classes = {"MISS": ' class="miss"', "broken": ' class="miss"', "ok": ' class="ok"'}
    lines = []
    for row in rows:
        cells = (f"<td{classes.get(cell, '')}>{escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def bars(caption: str, values: dict[str, float], unit: str) -> str:
    """Horizontal bars, one a name."""
    most = max([*values.values(), 1e-12])
    parts, step = [], 26
    for index, (name, value) in enumerate(values.items()):
        y, width = index * step + 6, 360 * value / most
        parts.append(
            f'<text x="170" y="{y + 14}" text-anchor="end" font-size="12">{escape(name)}</text>'
            f'<rect x="178" y="{y}" width="{width:.1f}" height="18" fill="{_colour(index)}"/>'
            f'<text x="{184 + width:.1f}" y="{y + 14}" font-size="12">{value:.4g} {escape(unit)}</text>'
        )
    return _figure(caption, "".join(parts), len(values) * step + 10)


def lines(caption: str, series: Mapping[str, Series], x_label: str, y_label: str) -> str:
    """Lines over a common axis that starts at zero."""
    points = [point for each in series.values() for point in each]
    if not points:
        return ""
    x_max = max((x for x, _ in points if x > 0), default=1.0)
    y_max = max((y for _, y in points if y > 0), default=1.0)

    def at(x: float, y: float) -> str:
        left = _LEFT + (_WIDTH - _LEFT - 10) * x / x_max
        return f"{left:.1f},{_HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - 24) * y / y_max:.1f}"

    parts = [_axes(x_label, y_label, x_max, y_max)]
    for index, (name, each) in enumerate(series.items()):
        colour = _colour(index)
        path = " ".join(at(x, y) for x, y in each)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts.append(
            f'<text x="{_WIDTH - 12}" y="{38 + 15 * index}" text-anchor="end" font-size="12" '
            f'fill="{colour}">{escape(name)}</text>'
        )
    return _figure(caption, "".join(parts), _HEIGHT)


def _axes(x_label: str, y_label: str, x_max: float, y_max: float) -> str:
    floor = _HEIGHT - _BOTTOM
    return (
        f'<path d="M{_LEFT},20 V{floor} H{_WIDTH - 10}" fill="none" stroke="#888"/>'
        f'<text x="{_LEFT}" y="14" font-size="12">{escape(y_label)}</text>'
        f'<text x="{_LEFT - 6}" y="30" text-anchor="end" font-size="11">{y_max:.4g}</text>'
        f'<text x="{_LEFT - 6}" y="{floor}" text-anchor="end" font-size="11">0</text>'
        f'<text x="{_WIDTH - 10}" y="{floor + 14}" text-anchor="end" font-size="11">{x_max:.4g}</text>'
        f'<text x="{(_WIDTH + _LEFT) // 2}" y="{_HEIGHT - 4}" text-anchor="middle" '
        f'font-size="12">{escape(x_label)}</text>'
    )


def _figure(caption: str, content: str, height: int) -> str:
    return (
        f"<figure><figcaption>{escape(caption)}</figcaption>"
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'role="img" aria-label="{escape(caption)}">{content}</svg></figure>'
    )


def run_page(report: dict[str, Any]) -> str:
    """The report of `rose sim run`."""
    systems = report["systems"]
    rows = [
        [
            name, f"{found['throughput']:.3f}", f"{found['rollout_s']:.0f}",
            f"{found['allocation_overhead']:.1%}", f"{found['ttft_ms']['p99']:.0f}",
            f"{found['tpot_ms']['p99']:.1f}", "ok" if found["slo_ok"] else "broken",
        ]
        for name, found in systems.items()
    ]  # fmt: skip
    trained = {name: found for name, found in systems.items() if found["steps"]}
    ends = {name: _cdf(found["steps"][0]["finish_s"]) for name, found in trained.items()}
    hours = {name: _by_hour(found["timeline"]["serving_busy"]) for name, found in systems.items()}
    tokens = {name: _by_hour(found["timeline"]["rollout_tokens_per_s"]) for name, found in trained.items()}
    gates = {name: _by_hour(found["timeline"]["gate_open"]) for name, found in systems.items()}
    lent = {name: _by_hour(found["timeline"]["lent_memory_gb"]) for name, found in systems.items()}
    body = table(("system", "traj/s", "rollout s", "alloc", "TTFT p99", "TPOT p99", "SLO"), rows)
    body += bars("Throughput", {name: found["throughput"] for name, found in trained.items()}, "traj/s")
    body += bars("Rollout time", {name: found["rollout_s"] for name, found in trained.items()}, "s")
    body += lines("Trajectories ended in the first step", ends, "seconds of rollout", "share")
    body += lines("Serving engines at work", hours, "hours", "share")
    body += lines("Rollout gate open", gates, "hours", "share")
    body += lines("KV memory of rollout on serving GPUs", lent, "hours", "GB")
    body += lines("Rollout", tokens, "hours", "tokens/s")
    return page(f"rose sim run: {report['scenario']['name']}", body)


def reproduction_page(report: dict[str, Any]) -> str:
    """The report of `rose sim reproduce`."""
    rows = [
        [
            row["name"], row["target"], "-" if row["value"] is None else f"{row['value']:.4g}",
            row["tolerance"], row["kind"], "ok" if row["ok"] else "MISS", "" if row["ok"] else row["note"],
        ]
        for row in report["rows"]
    ]  # fmt: skip
    body = table(("figure", "target", "found", "tolerance", "kind", "", "why it misses"), rows)
    body += "<h2>Fitted inputs</h2>"
    body += table(("input", "value"), [[name, f"{value:g}"] for name, value in report["fitted"].items()])
    body += "<h2>Assumed inputs</h2>"
    body += table(("input", "value"), [[name, f"{value:g}"] for name, value in report["assumed"].items()])
    if report["sensitivity"]:
        body += "<h2>Sensitivity: each fitted input 20% lower and higher</h2>"
        rows = [
            [row["ratio"], row["input"], *(f"{row[key]:.3f}" for key in ("low", "base", "high"))]
            for row in report["sensitivity"]
        ]
        body += table(("ratio", "input", "-20%", "base", "+20%"), rows)
    return page("rose sim reproduce", body)


def _by_hour(minutes: Sequence[float]) -> list[tuple[float, float]]:
    return [(minute / 60, value) for minute, value in enumerate(minutes)]


def _cdf(values: Sequence[float]) -> list[tuple[float, float]]:
    ordered = sorted(values)
    step = max(1, len(ordered) // 200)
    return [(ordered[index], (index + 1) / len(ordered)) for index in range(0, len(ordered), step)]
