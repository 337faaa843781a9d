"""`rose sim sweep`: a scenario for every combination of some settings, in several processes."""

from __future__ import annotations

import itertools
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import track

from rose.errors import ConfigError
from rose_sim.reports import SCHEMA, costs
from rose_sim.scenario import Scenario, read
from rose_sim.world import simulate

COMBINATIONS_MAX = 10_000


def alter(scenario: Scenario, name: str, text: str) -> Scenario:
    """Set `table.key` (or a key of the top) to a value written as in TOML, or bare.  Raises ConfigError."""
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    plain = msgspec.to_builtins(scenario)
    table, _, key = name.rpartition(".")
    target = plain.get(table) if table else plain
    if not isinstance(target, dict) or key not in target:
        raise ConfigError(
            f"a scenario has no setting {name!r}", "write TABLE.KEY=VALUE, as in serving.rate_rps=3"
        )
    target[key] = value
    try:
        return msgspec.convert(plain, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}={text}: {error}") from None


def sweep_report(path: Path, vary: list[str], workers: int, console: Console) -> dict[str, Any]:
    """Run all combinations; rows come in the order of the settings, whatever finishes first."""
    started = time.perf_counter()
    base = read(path)
    axes = [_axis(text) for text in vary]
    combinations = list(itertools.product(*(values for _, values in axes)))
    if len(combinations) * len(base.systems) > COMBINATIONS_MAX:
        raise ConfigError(f"{len(combinations)} combinations are more than can be run", "vary less at a time")
    tasks: list[tuple[dict[str, str], Scenario, str]] = []
    for values in combinations:
        settings = {name: value for (name, _), value in zip(axes, values, strict=True)}
        scenario = base
        for name, value in settings.items():
            scenario = alter(scenario, name, value)
        tasks.extend((settings, scenario, system) for system in scenario.systems)
    with ProcessPoolExecutor(workers) as pool:
        running = [pool.submit(_one, *task) for task in tasks]
        rows = [each.result() for each in track(running, "simulating", console=console)]
    return {"schema": SCHEMA, "command": "sim sweep", "scenario": base.name, "rows": rows, **costs(started)}


def _axis(text: str) -> tuple[str, list[str]]:
    name, separator, values = text.partition("=")
    found = [value for value in values.split(",") if value]
    if not separator or not name or not found:
        raise ConfigError(f"cannot vary {text!r}", "write TABLE.KEY=V1,V2,...")
    return name, found


def _one(settings: dict[str, str], scenario: Scenario, system: str) -> dict[str, Any]:
    outcome = simulate(scenario, system)
    return {
        "settings": settings,
        "system": system,
        "throughput": outcome.throughput,
        "rollout_s": outcome.rollout_s,
        "ttft_p99_ms": outcome.ttft_ms.p99,
        "tpot_p99_ms": outcome.tpot_ms.p99,
        "slo_ok": outcome.slo_ok,
    }
