"""`rose bench gate`: what the plugins cost the thread that schedules, by the wall and in processor time.

vLLM's own schedulers run in this process, with made-up tokens (`rose.engines.vllm.step_loop`), in three
settings: a hot loop, where nothing but the plugin runs and everything it touches is in the cache; between
vLLM's own scheduling of so many requests; and with the core left to others for a while in every step, as it
is while a device works.  The difference between the settings is what caches do, and that between wall and
processor time is waiting for a core.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from rose.boards import BoardPaths, BoardWriter
from rose.core.readings import NEVER, GateMode, GatePolicy, SlackReading
from rose.engines.vllm.elastic_serving import ElasticServingMixin
from rose.engines.vllm.rollout_scheduler import RolloutMixin
from rose.engines.vllm.serving_scheduler import ServingMixin
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.step_loop import Cost, StepCost, StepLoop, TimedScheduler, engine_config
from rose.units import NS_PER_MS
from rose_daemon.demo.models import make_models
from rose_daemon.harness.stats import percentile
from rose_daemon.harness.summary import head

WARM_STEPS = 30
_NO_COST = Cost(0, 0)
_PROMPT_TOKENS = 12
_TOKENS_MAX = 1500
_NAME = "bench"
_HEARTBEAT_NS, _TICK_NS, _LEASE_NS = 250 * NS_PER_MS, 50 * NS_PER_MS, 1000 * NS_PER_MS
_BUDGETS_NS = (250 * NS_PER_MS, 60 * NS_PER_MS)

Say = Callable[[str], None]


class GateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    running: int = 64
    steps: int = 400
    device_ms: float = 3.0
    """How long a step leaves the core to others, in the third setting."""


class _TimedServing(ServingMixin, ElasticServingMixin, TimedScheduler):
    """A serving engine."""


class _TimedRollout(RolloutMixin, TimedScheduler):
    """An opportunistic rollout engine."""


def measure(options: GateOptions, say: Say) -> dict[str, Any]:
    """Measure both plugins in all settings."""
    with tempfile.TemporaryDirectory(prefix="rose-bench-", dir="/dev/shm") as text:
        directory = Path(text)
        model = make_models(directory / "models").serving
        config = engine_config(model, sequences_max=options.running, kv_blocks=66 * options.running)
        report = head("gate", datetime.now(UTC)) | {"settings": msgspec.to_builtins(options)}
        clocks = _World(config, directory / "clocks", options).hot_loop()
        report["clocks_us"] = {what: round(value / 1e3, 2) for what, value in clocks._asdict().items()}
        for what, world in (("serving", _Serving), ("rollout", _Rollout)):
            say(f"{what} scheduler, {options.running} requests")
            report[what] = world(config, directory / what, options).measure(clocks)
    return report


class _World:
    """One scheduler, and whatever it sees of others; here vLLM's alone, to time the clocks themselves."""

    scheduler: type[TimedScheduler] = TimedScheduler
    role: Any = "serving"
    serving_name = ""

    def __init__(self, config: Any, run_dir: Path, options: GateOptions) -> None:
        self._options = options
        run_dir.mkdir()
        self.paths = BoardPaths(run_dir)
        self.prepare()
        given = PluginSettings(
            role=self.role, name=_NAME, run_dir=str(run_dir), token_file="", serving_name=self.serving_name
        )
        self._loop = StepLoop(self.scheduler, config, given)
        for number in range(options.running):
            prompt = [(7 * number + position) % 250 for position in range(_PROMPT_TOKENS)]
            self._loop.add(str(number), prompt, _TOKENS_MAX)
        while self._loop.scheduler.waiting:
            self._loop.step()
        gc.collect()
        gc.freeze()  # as vLLM does in its core process

    def prepare(self) -> None:
        """Before the scheduler is made."""

    def before_step(self) -> None:
        """What changes from step to step."""

    def measure(self, clocks: Cost) -> dict[str, Any]:
        """All settings, less what the clocks cost."""
        seconds = self._options.device_ms / 1e3
        found = {"scheduling": _summary(self._run(), clocks)}
        self._loop.device = lambda: time.sleep(seconds)
        found["asleep_between"] = _summary(self._run(), clocks)
        self._loop.device = lambda: None
        self._loop.repeat_one_step()  # which leaves the scheduler of no further use
        self._run()
        found["hot_loop"] = _summary(self._run(), clocks)
        return found

    def hot_loop(self) -> Cost:
        """The median of a hot loop."""
        self._loop.repeat_one_step()
        costs = [cost.on_step for cost in self._run()]
        middle = len(costs) // 2
        return Cost(*(sorted(times)[middle] for times in zip(*costs, strict=True)))

    def _run(self) -> list[StepCost]:
        costs = []
        for _ in range(self._options.steps + WARM_STEPS):
            self.before_step()
            costs.append(self._loop.timed_step())
        return costs[WARM_STEPS:]


class _Serving(_World):
    scheduler = _TimedServing
    role = "serving"


class _Rollout(_World):
    """Beside an idle serving engine; it and rosed write their boards as often as they would."""

    scheduler = _TimedRollout
    role = "rollout"
    serving_name = "serving"

    def prepare(self) -> None:
        """Open the gate."""
        self._slack = BoardWriter(self.paths.slack(self.serving_name), SlackReading)
        self._policy = BoardWriter(self.paths.gate(_NAME), GatePolicy)
        self._said_ns = self._renewed_ns = 0
        self.before_step()

    def before_step(self) -> None:
        """Serving says that it is idle, rosed that it lives."""
        now_ns = time.monotonic_ns()
        if now_ns - self._said_ns > _HEARTBEAT_NS:
            self._said_ns = now_ns
            zeros = SlackReading(*[0] * len(SlackReading._fields))
            self._slack.publish(
                zeros._replace(stamp_ns=now_ns, ttft_deadline_ns=NEVER, tpot_deadline_ns=NEVER)
            )
        if now_ns - self._renewed_ns > _TICK_NS:
            self._renewed_ns = now_ns
            until_ns = now_ns + _LEASE_NS
            self._policy.publish(GatePolicy(1, GateMode.STRICT, 512, 0, 0, until_ns, *_BUDGETS_NS, 0))


def _summary(costs: Sequence[StepCost], clocks: Cost) -> dict[str, Any]:
    def figures(of: Callable[[StepCost], Cost], clocks: Cost = _NO_COST) -> dict[str, float]:
        times = [of(cost) for cost in costs]
        wall = [max(0, each.wall_ns - clocks.wall_ns) / 1e3 for each in times]
        cpu = [max(0, each.cpu_ns - clocks.cpu_ns) / 1e3 for each in times]
        return {
            "wall_p50_us": round(percentile(wall, 50) or 0.0, 2),
            "wall_p99_us": round(percentile(wall, 99) or 0.0, 2),
            "cpu_p50_us": round(percentile(cpu, 50) or 0.0, 2),
            "cpu_p99_us": round(percentile(cpu, 99) or 0.0, 2),
        }

    found: dict[str, Any] = {
        "vllm": figures(lambda cost: cost.vllm),
        "on_step": figures(lambda cost: cost.on_step, clocks),
        "deferred": figures(lambda cost: cost.deferred),
    }
    own = found["vllm"]["cpu_p50_us"]
    found["on_step_share_of_vllm"] = round(found["on_step"]["cpu_p50_us"] / own, 4) if own else None
    return found


# ---- for people ---------------------------------------------------------------------------------

_SETTINGS = {
    "hot_loop": "hot loop",
    "scheduling": "amid vLLM's own",
    "asleep_between": "also asleep between",
}
_PARTS = {"on_step": "on the step", "deferred": "beside the device"}


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report as a table."""
    settings = report["settings"]
    title = f"What a plugin costs a step of {settings['running']} requests, in µs ({os.cpu_count()} cores)"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("scheduler", "setting", "part"):
        table.add_column(name, no_wrap=True)
    for name in ("wall p50", "wall p99", "CPU p50", "CPU p99"):
        table.add_column(name, justify="right")
    for world in ("serving", "rollout"):
        for setting, words in _SETTINGS.items():
            parts = _PARTS if setting == "hot_loop" else _PARTS | {"vllm": "vLLM itself"}
            for part, text in parts.items():
                figures = report[world][setting][part]
                table.add_row(world, words, text, *(f"{value:.1f}" for value in figures.values()))
    console.print(table)
