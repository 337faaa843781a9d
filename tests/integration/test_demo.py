"""The demo as a user runs it: the whole of it small, interrupted, killed, and started wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rose_daemon.harness.interrupts import Interrupts
from rose_daemon.harness.marked import end_marked, marked_pids
from rose_daemon.harness.screen import Screen
from rose_daemon.harness.stack import Cores, Stack, StackPlan

from rose.errors import EngineFailed, Exit

ROSE = (sys.executable, "-m", "rose.cli.main")

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the demo needs two cores")


class RunningDemo:
    """A demo process, its output in a file."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self._output = directory.with_suffix(".txt")
        command = [*ROSE, "demo", "--out", str(directory), *options]
        with self._output.open("wb") as stream:
            self.process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self._output.read_text("utf-8", "replace")

    @property
    def stack_id(self) -> str:
        """Mark of everything it started; empty before it started anything."""
        try:
            config = tomllib.loads((self.directory / "rose.toml").read_text())
        except FileNotFoundError:
            return ""
        return Path(config["node"]["run_dir"]).name.removeprefix("rose-")

    def status(self) -> tuple[int, dict[str, Any]]:
        """What `rose status --json` answers beside it."""
        command = [*ROSE, "status", "--json", "--config", str(self.directory / "rose.toml")]
        done = subprocess.run(command, capture_output=True, check=False)
        return done.returncode, json.loads(done.stdout) if done.stdout else {}

    def wait_for(self, text: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def assert_nothing_left(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while pids := marked_pids(self.stack_id):
            assert time.monotonic() < deadline, pids
            time.sleep(0.1)
        boards = Path("/dev/shm") / f"rose-{self.stack_id}"
        while boards.exists():
            assert time.monotonic() < deadline, boards
            time.sleep(0.1)


@contextlib.contextmanager
def demo(directory: Path, *options: str) -> Iterator[RunningDemo]:
    running = RunningDemo(directory, *options)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        if running.stack_id:
            end_marked(running.stack_id, 0.0)


def at(report: dict[str, Any], path: str) -> Any:
    value: Any = report
    for name in path.split("."):
        value = value[name]
    return value


STABLE_KEYS = (
    "schema", "command", "started_at", "machine", "ok",
    "serving.requests", "serving.within_budget_share",
    "serving.ttft_ms.p50", "serving.ttft_ms.p99", "serving.tpot_ms.p50", "serving.tpot_ms.p99",
    "rollout.tokens_per_s.dedicated", "rollout.tokens_per_s.opportunistic",
    "turns.finished", "turns.aborted", "turns.rerouted", "turns.lost", "turns.duplicated",
    "trajectories.finished", "trajectories.lost",
    "weights.versions_published", "weights.versions_applied", "weights.bitexact",
    "weights.delta_bytes", "weights.dense_bytes", "weights.bytes_per_changed",
    "weights.pause_ms.p50", "weights.pause_ms.max",
    "gate.open_share",
)  # fmt: skip


@two_cores
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_whole_system(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"])
    copy = tmp_path / "copy" / "report.json"
    options = ("--steps", "2", "--duration", "1", "--groups", "4", "--json", str(copy))
    try:
        with demo(tmp_path / "demo", *options) as running:
            running.wait_for("step 1: rollout", 400)
            code, status = running.status()
            assert code == Exit.OK, status
            assert [one["state"] for one in status["replicas"]] == ["ready", "ready"]
            assert running.process.wait(300) in (Exit.OK, Exit.SLO_BREACH), running.output
            running.assert_nothing_left(0.5)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert json.loads(copy.read_text()) == report
    for key in STABLE_KEYS:
        assert at(report, key) is not None, key
    # A busy test machine may cost serving its budget; nothing may cost the rest.
    assert report["ok"] or report["reasons"][0].endswith("broke their budget")
    assert report["serving"]["failed"] == 0
    assert report["weights"]["versions_applied"] == 2
    assert report["turns"]["rerouted"] >= 1
    assert report["turns"]["as_the_gateway_counts"]["finished"] == report["turns"]["finished"]
    assert report["turns"]["replayed"] == 2
    assert all(report["rollout"]["turns"].values())
    assert report["placement"]["ok"]
    assert not (tmp_path / "demo" / "state").exists(), "what is large is removed without --keep"


@two_cores
@pytest.mark.engine
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_an_ended_demo_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with demo(tmp_path / "demo") as running:
        running.wait_for("rosed is ready", 60)
        time.sleep(1)  # engines are starting by now
        assert len(marked_pids(running.stack_id)) >= 7
        running.process.send_signal(number)
        assert running.process.wait(60) == code, running.output
        running.assert_nothing_left(60)


@two_cores
@pytest.mark.engine
async def test_an_engine_that_cannot_start_is_one_clear_line(tmp_path: Path) -> None:
    plan = StackPlan(
        directory=tmp_path, serving_model=tmp_path / "none", replicas=(), cores=Cores.of_this_machine()
    )
    stacks = []

    async def start() -> None:
        with Screen(Console(quiet=True)) as screen:
            async with Stack(plan, screen) as stack:
                stacks.append(stack)
                await stack.launch()
                await stack.ready()

    with pytest.raises(EngineFailed, match="serving ended with exit code"):
        await start()
    assert marked_pids(stacks[0].stack_id) == []


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("TIMESTAMP,ContextTokens\n", ":1: no column GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", ":2: TIMESTAMP 'noon' is not a time"),
    ],
)
def test_a_bad_trace_is_refused_before_anything_starts(tmp_path: Path, rows: str, reason: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(rows)
    for command in (("demo",), ("bench", "coserve")):
        done = subprocess.run(
            [*ROSE, *command, "--out", str(tmp_path / "out"), "--trace", str(trace)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == Exit.USAGE
        assert f"rose: {trace}{reason}" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "out" / "rose.toml").exists()


def test_interrupts_give_none(tmp_path: Path) -> None:
    said: list[str] = []
    interrupts = Interrupts(said.append)
    hurried: list[bool] = []
    interrupts.hurry = lambda: hurried.append(True)

    async def work() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(10)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
        return "done"

    assert interrupts.run(work()) is None
    assert (len(said), hurried) == (1, [True])
