"""The co-serving benchmark as a picture: what serving felt, what rollout got, and when the gate was open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rose.core.attribution import Span
from rose.errors import ConfigError
from rose.units import NS_PER_MS, NS_PER_S
from rose_daemon.bench.runs import GATED, Measured, Mode, Run, of_mode
from rose_daemon.harness.load import RequestRecord

TIMELINE_S = 3.0
_COLOURS = {
    Mode.ALONE: "#444444",
    Mode.ROLLOUT_ALONE: "#999999",
    Mode.NAIVE: "#d62728",
    Mode.STATIC: "#ff7f0e",
    Mode.PRIORITY: "#9467bd",
    Mode.ROSE_STRICT: "#1f77b4",
    Mode.ROSE_SLACK: "#2ca02c",
}
_OPEN, _SERVING, _ROLLOUT = "#ffe9a8", "#444444", "#2ca02c"


def available() -> bool:
    """Whether matplotlib is installed (the extra `plot`)."""
    try:
        import matplotlib  # noqa: F401, PLC0415 - an extra, and slow to import
    except ModuleNotFoundError:
        return False
    return True


def draw(measured: Measured, report: dict[str, Any], path: Path) -> None:
    """Write the picture as PNG.  Raises ConfigError when the file cannot be written."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(11, 12), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=(1, 1, 1.1))
    budgets = measured.options.budgets
    for cell, title, budget_ms, values in (
        (grid[0, 0], "time to first token", budgets.ttft_ms, lambda one: [one.ttft_ms]),
        (grid[0, 1], "time per output token", budgets.tpot_ms, lambda one: [one.tpot_ms]),
        (grid[1, 0], "inter-token latency", None, lambda one: one.gaps_ms),
    ):
        _distribution(figure.add_subplot(cell), measured, title, budget_ms, values)
    _throughput(figure.add_subplot(grid[1, 1]), report)
    _timeline(figure.add_subplot(grid[2, :]), measured)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"{path}: the picture cannot be written: {error.strerror}") from None


def _distribution(
    axes: Any,
    measured: Measured,
    title: str,
    budget_ms: float | None,
    values: Callable[[RequestRecord], Sequence[float | None]],
) -> None:
    """Cumulative distribution of each mode, over a logarithmic axis: the tail is what matters."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter  # noqa: PLC0415

    for mode in measured.options.modes:
        records = [record for run in of_mode(measured.runs, mode) for record in run.records]
        known = sorted(value for record in records for value in values(record) if value is not None)
        if known:
            shares = np.arange(1, len(known) + 1) / len(known)
            axes.plot(known, shares, label=str(mode), color=_COLOURS[mode], linewidth=1.2)
    if budget_ms is not None:
        axes.axvline(budget_ms, color="black", linestyle=":", linewidth=1, label="budget")
    axes.set(title=title, xlabel="milliseconds", ylabel="share", xscale="log", ylim=(0, 1.005))
    axes.set_xlim(left=max(1.0, axes.get_xlim()[0]))  # tokens that came in one piece have no time between
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _throughput(axes: Any, report: dict[str, Any]) -> None:
    rates = {
        mode: figures["rollout_tokens_per_s"]
        for mode, figures in report["modes"].items()
        if figures["rollout_tokens_per_s"] is not None
    }
    axes.barh(list(rates), list(rates.values()), color=[_COLOURS[Mode(mode)] for mode in rates])
    if (reference := report["reference_tokens_per_s"]) is not None:
        axes.axvline(reference, color="black", linestyle="--", linewidth=1, label="what serving alone leaves")
        axes.legend(fontsize=8)
    axes.invert_yaxis()
    axes.set(title="rollout", xlabel="tokens per second")
    axes.grid(axis="x", alpha=0.3)


def _timeline(axes: Any, measured: Measured) -> None:
    """The busiest seconds of the first round: what both engines did in each gated mode, and in naive."""
    runs = {
        mode: next((run for run in of_mode(measured.runs, mode) if run.round == 0), None)
        for mode in (Mode.NAIVE, *GATED)
    }
    shown = {mode: run for mode, run in runs.items() if run is not None}
    ticks = []
    for row, (mode, run) in enumerate(shown.items()):
        start_ns = run.started_ns + _busiest(run)
        lanes = (
            ((0.0, 0.9), measured.gate_open.get(mode, []), _OPEN),
            ((0.45, 0.4), [Span(step.start_ns, step.end_ns) for step in run.serving_steps], _SERVING),
            ((0.05, 0.4), [Span(step.start_ns, step.end_ns) for step in run.rollout_steps], _ROLLOUT),
        )
        for (low, height), spans, colour in lanes:
            bars = _bars(spans, start_ns)
            axes.broken_barh(bars, (row + low, height), facecolors=colour)
        ticks.append((row + 0.45, str(mode)))
    axes.set(
        title="busiest seconds of the first round: serving steps, rollout steps (green), open gate (yellow)",
        xlabel="seconds",
        xlim=(0, TIMELINE_S),
        ylim=(0, max(1, len(shown))),
    )
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])


def _busiest(run: Run) -> int:
    """Where in the run the stretch with the most arrivals begins; arrivals are the same in all modes."""
    arrivals = sorted(record.planned_ns - run.started_ns for record in run.records)
    if not arrivals:
        return 0
    ends = np.searchsorted(arrivals, [at + round(TIMELINE_S * NS_PER_S) for at in arrivals])
    first = arrivals[int(np.argmax(ends - np.arange(len(arrivals))))]
    return max(0, first - 100 * NS_PER_MS)


def _bars(spans: Sequence[Span], start_ns: int) -> list[tuple[float, float]]:
    """Beginnings and widths, in seconds, of what lies in the stretch."""
    end_ns = start_ns + round(TIMELINE_S * NS_PER_S)
    return [
        ((span.start_ns - start_ns) / NS_PER_S, (span.end_ns - span.start_ns) / NS_PER_S)
        for span in spans
        if span.end_ns > start_ns and span.start_ns < end_ns
    ]
