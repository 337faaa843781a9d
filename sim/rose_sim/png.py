"""Pictures of the reports of `rose sim run` and `rose sim reproduce` (matplotlib, extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rose.errors import ConfigError

_INCHES = (11, 8)


def draw_run(report: dict[str, Any], path: Path) -> None:
    """Timelines, ends of trajectories and throughput of all systems.  Raises ConfigError."""
    figure, axes = _sheet(2, 3)
    systems = report["systems"]
    trained = {name: found for name, found in systems.items() if found["steps"]}
    for axis, key, title in (
        (axes[0][0], "serving_busy", "serving engines at work"),
        (axes[0][1], "gate_open", "rollout gate open"),
        (axes[0][2], "lent_memory_gb", "KV memory of rollout on serving GPUs, GB"),
        (axes[1][0], "rollout_tokens_per_s", "rollout, tokens/s"),
    ):
        for name, found in systems.items():
            values = found["timeline"][key]
            axis.plot([minute / 60 for minute in range(len(values))], values, label=name, linewidth=1)
        _label(axis, title, "hours")
    for name, found in trained.items():
        ends = sorted(found["steps"][0]["finish_s"])
        axes[1][1].plot(
            ends, [(index + 1) / len(ends) for index in range(len(ends))], label=name, linewidth=1
        )
    _label(axes[1][1], "trajectories ended in the first step", "seconds of rollout")
    _bars(axes[1][2], {name: found["throughput"] for name, found in trained.items()}, "trajectories/s")
    axes[0][0].legend(fontsize=7)
    _save(figure, f"rose sim run: {report['scenario']['name']}", path)


def draw_reproduction(report: dict[str, Any], path: Path) -> None:
    """What was found over what was published, of every row with a number.  Raises ConfigError."""
    figure, axes = _sheet(1, 2)
    ratios = {}
    for row in report["rows"]:
        try:
            target = float(row["target"])
        except ValueError:
            continue
        if target and isinstance(row["value"], int | float):
            ratios[row["name"]] = (row["value"] / target, row["ok"])
    axis = axes[0][0]
    axis.barh(list(ratios), [value for value, _ in ratios.values()],
              color=["#4f772d" if ok else "#c8553d" for _, ok in ratios.values()])  # fmt: skip
    axis.axvline(1.0, color="#222222", linewidth=0.8)
    axis.invert_yaxis()
    axis.tick_params(labelsize=5)
    _label(axis, "found over published", "ratio")
    swings = {f"{row['ratio']} / {row['input']}": row for row in report["sensitivity"]}
    widest = sorted(swings.items(), key=lambda item: -abs(item[1]["high"] - item[1]["low"]))[:30]
    axis = axes[0][1]
    for index, (_, row) in enumerate(widest):
        axis.plot((row["low"], row["high"]), (index, index), color="#1b6ca8")
        axis.plot(row["base"], index, "o", color="#222222", markersize=3)
    axis.set_yticks(range(len(widest)), [name for name, _ in widest])
    axis.tick_params(labelsize=5)
    _label(
        axis, "ratios with a fitted input 20% lower and higher" if widest else "no sensitivity asked for", ""
    )
    _save(figure, "rose sim reproduce", path)


def _sheet(rows: int, columns: int) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (optional, and slow to import)
    except ImportError:
        raise ConfigError("matplotlib is not installed", "install the extra `plot`, or use --html") from None
    figure = Figure(figsize=_INCHES, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _bars(axis: Any, values: Mapping[str, float], title: str) -> None:
    axis.barh(list(values), list(values.values()))
    axis.invert_yaxis()
    axis.tick_params(labelsize=7)
    _label(axis, title, "")


def _label(axis: Any, title: str, x_label: str) -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(x_label, fontsize=8)


def _save(figure: Any, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=11)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
