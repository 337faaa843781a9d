"""Reports of `rose sim`: JSON, and tables for a terminal."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from rose_sim.calibration import Calibration
from rose_sim.profiled import COST_MODEL, engines_of
from rose_sim.results import Outcome
from rose_sim.scenario import read
from rose_sim.systems import get
from rose_sim.world import serving_trace, simulate

SCHEMA = 1


def run_report(
    path: Path, systems: list[str] | None, seed: int | None, *, single_steps: bool = False
) -> dict[str, Any]:
    """Run the scenario for each system; `systems` and `seed` override the file.

    Everything but `wall_s` and `peak_rss_bytes` depends on the scenario and the seed alone.
    """
    scenario = read(path)
    if seed is not None:
        scenario = msgspec.structs.replace(scenario, seed=seed)
    names = list(scenario.systems if systems is None else systems)
    for name in names:
        get(name)  # an unknown one is refused before anything runs
    serving, rollout = engines_of(scenario)
    trace = serving_trace(scenario)
    started = time.perf_counter()
    outcomes = {name: simulate(scenario, name, slow=single_steps, trace=trace) for name in names}
    return {
        "schema": SCHEMA,
        "command": "sim run",
        "scenario": msgspec.to_builtins(scenario),
        "engines": {"serving": serving.source, "rollout": rollout.source},
        "trace": {"source": trace.source, "requests": len(trace.at_ns), "notes": list(trace.notes)},
        "systems": {name: msgspec.to_builtins(outcome) for name, outcome in outcomes.items()},
        "assumptions": {name: list(get(name).assumptions) for name in names},
        "events": sum(outcome.events for outcome in outcomes.values()),
        **costs(started),
    }


def costs(started: float) -> dict[str, float | int]:
    """What the simulation itself took, since `started`."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"wall_s": round(time.perf_counter() - started, 3), "peak_rss_bytes": peak}


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report; `-` is standard output."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    if str(path) == "-":
        sys.stdout.buffer.write(text)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


def show_run(report: dict[str, Any], console: Console) -> None:
    """The table of a run."""
    table = Table(
        "system", "traj/s", "rollout s", "step s", "alloc", "TTFT p50/p99 ms", "TPOT p50/p99 ms", "SLO"
    )
    for name, found in report["systems"].items():
        outcome = msgspec.convert(found, Outcome)
        table.add_row(
            name,
            f"{outcome.throughput:.3f}" if outcome.steps else "-",
            f"{outcome.rollout_s:.0f}" if outcome.steps else "-",
            f"{outcome.step_s:.0f}" if outcome.steps else "-",
            f"{outcome.allocation_overhead:.1%}" if outcome.steps else "-",
            f"{outcome.ttft_ms.p50:.0f} / {outcome.ttft_ms.p99:.0f}",
            f"{outcome.tpot_ms.p50:.1f} / {outcome.tpot_ms.p99:.1f}",
            "ok" if outcome.slo_ok else "broken",
        )
    console.print(table)
    for role, source in report["engines"].items():
        if not source.startswith(COST_MODEL):
            console.print(f"{role} engines as measured, {source}", soft_wrap=True)
    _footer(report, console)


def show_reproduction(report: dict[str, Any], console: Console) -> None:
    """The rows, the fitted inputs, and what misses mean."""
    table = Table("row", "target", "found", "tolerance", "kind", "")
    for row in report["rows"]:
        verdict = "ok" if row["ok"] else "MISS"
        value = _number(row["value"])
        table.add_row(row["name"], row["target"], value, row["tolerance"], row["kind"], verdict)
    console.print(table)
    console.print("Fitted inputs, one set for each model, shared by all rows:")
    for name, value in report["fitted"].items():
        console.print(f"  {name} = {value}")
    console.print("Assumed, as no source gives them:")
    for name, value in report["assumed"].items():
        console.print(f"  {name} = {value}")
    misses = [row for row in report["rows"] if not row["ok"]]
    if misses:
        console.print("Rows outside their tolerance:")
    for row in misses:
        console.print(f"  {row['name']}: {row['note'] or 'no explanation is known'}")
    if report["sensitivity"]:
        spread = Table("ratio", "fitted input", "-20%", "base", "+20%")
        for row in report["sensitivity"]:
            spread.add_row(
                row["ratio"], row["input"], *(f"{row[key]:.2f}" for key in ("low", "base", "high"))
            )
        console.print(spread)
    _footer(report, console)


def show_whatif(report: dict[str, Any], console: Console) -> None:
    """What a fleet can lend."""
    table = Table("hour", "requests/s", "serving busy", "gate open", "lendable GPU-h")
    for row in report["hours"]:
        table.add_row(
            str(row["hour"]),
            f"{row['rate_rps']:.2f}",
            f"{row['serving_busy_share']:.1%}",
            f"{row['gate_open_share']:.1%}",
            f"{row['lendable_gpu_hours']:.1f}",
        )
    console.print(table)
    slo, advice = report["slo"], report["recommended"]
    tried = Table(
        "token cap", "GPUs lent", "rollout tokens/s", "late", "added by lending", "KV cuts", "bound"
    )
    for each in report["candidates"]:
        tried.add_row(
            str(each["token_cap"]),
            str(each["n_serving"]),
            f"{each['rollout_tokens_per_s']:.0f}",
            f"{each['late'][0]:.3%}",
            f"{each['added'][0]:.3%} ({each['added'][1]:.3%} to {each['added'][2]:.3%})",
            str(each["kv_cuts"]),
            "kept" if each["meets"] else "broken",
        )
    console.print(tried)
    low, high = slo["broken_share_ci"]
    console.print(
        f"rollout: {report['rollout_tokens_per_s']:.0f} tokens/s\n"
        f"requests over budget: {slo['broken_share']:.3%} with rollout ({low:.3%} to {high:.3%}), "
        f"{slo['broken_share_alone']:.3%} without; P99 TTFT {slo['ttft_p99_ms']:.0f} ms, "
        f"P99 TPOT {slo['tpot_p99_ms']:.1f} ms\n"
        f"recommended: headroom {advice['headroom_share']:.0%}, token cap {advice['token_cap']}, "
        f"n_serving {advice['n_serving']} of {report['question']['gpus']} GPUs"
    )
    for note in report["notes"]:
        console.print(f"note: {note}")
    _footer(report, console)


def show_sweep(report: dict[str, Any], console: Console) -> None:
    """One line for every combination and system."""
    keys = list(report["rows"][0]["settings"]) if report["rows"] else []
    table = Table(*keys, "system", "traj/s", "rollout s", "TTFT p99", "TPOT p99", "SLO")
    for row in report["rows"]:
        table.add_row(
            *(str(row["settings"][key]) for key in keys),
            row["system"],
            f"{row['throughput']:.3f}",
            f"{row['rollout_s']:.0f}",
            f"{row['ttft_p99_ms']:.0f}",
            f"{row['tpot_p99_ms']:.1f}",
            "ok" if row["slo_ok"] else "broken",
        )
    console.print(table)
    _footer(report, console)


def show_calibration(found: Calibration, console: Console) -> None:
    """What was fitted."""
    for name, cost in (("serving", found.serving), ("rollout", found.rollout)):
        console.print(
            f"{name}: prefill {cost.base / 1e9:.2f} ms + {cost.token / 1e6:.1f} us a token, "
            f"decode {cost.batch[1] / 1e9:.2f} ms (1) to {cost.batch[16] / 1e9:.2f} ms (16 requests), "
            f"{cost.overhead / 1e9:.2f} ms between steps; median error {found.errors[name]:.1%}"
        )
    console.print(f"rollout clients ask again after {found.turnaround_ms:.1f} ms")
    table = Table(
        "mode", "way in ms", "way out ms", "wake ms", "prefills x", "decodes x", "core held",
        caption="medians; x: serving steps over the fit beside a rollout step, p50 / p95",
    )  # fmt: skip
    for mode, fit in found.modes.items():
        table.add_row(
            mode,
            f"{median(fit.api_in_ms):.2f}",
            f"{median(fit.api_out_ms):.2f}",
            f"{fit.wake_ms:.2f}",
            _spread(fit.serving_shared.prefill),
            _spread(fit.serving_shared.decode),
            f"{fit.held:.0%}",
        )
    console.print(table)


def _spread(quantiles: tuple[float, ...]) -> str:
    return f"{median(quantiles):.2f} / {quantiles[-1 - len(quantiles) // 20]:.2f}"


def show_fidelity(report: dict[str, Any], console: Console) -> None:
    """Measured and predicted figures, and each miss by name."""
    table = Table("mode", "figure", "measured", "predicted", "off by", "wanted", "")
    for row in report["rows"]:
        table.add_row(
            row["mode"],
            row["figure"],
            f"{row['measured']:.4g}",
            f"{row['predicted']:.4g}",
            f"{row['predicted'] / row['measured'] - 1:+.0%}" if row["measured"] else "-",
            f"{row['low']:.4g} to {row['high']:.4g}",
            "ok" if row["ok"] else "MISS",
        )
    console.print(table)
    misses = [f"{row['mode']}: {row['figure']}" for row in report["rows"] if not row["ok"]]
    console.print(f"{len(report['rows']) - len(misses)} of {len(report['rows'])} figures within tolerance")
    for miss in misses:
        console.print(f"  missed: {miss}")
    for mode in report["left_out"]:
        console.print(f"  not predicted: {mode}")
    _footer(report, console)


def _footer(report: dict[str, Any], console: Console) -> None:
    console.print(f"{report['wall_s']:.1f} s, {report['peak_rss_bytes'] / 1e6:.0f} MB")


def _number(value: float | bool | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}"
