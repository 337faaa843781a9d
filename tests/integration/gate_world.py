"""A serving engine, a rollout engine and rosed without models: each in a process of its own.

`python gate_world.py serving|rollout|rosed RUN_DIR`.  Each does what its counterpart does with shared memory,
by the same code; a step is a sleep.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, TypeVar

from rose_daemon.node.gates import Gates

from rose.boards import BoardPaths, BoardReader, BoardWriter
from rose.core.readings import GateMode, GatePolicy, SlackReading, Unknown
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.slack_board import SlackBoard
from rose.engines.vllm.step_gate import StepGate
from rose.units import NS_PER_MS, ReplicaId

RecordT = TypeVar("RecordT", bound=tuple[int, ...])
LEASE_NS = 600 * NS_PER_MS
STALE_MS = 600
_TICK_S = 0.05
_STEP_S = 0.003
_DECODES = 8
_PAUSE_S = 0.03


class Seen(NamedTuple):
    """What the rollout engine makes of it."""

    stamp_ns: int
    open: int
    reason: int
    steps: int


def seen_path(run_dir: Path) -> Path:
    """The board of `Seen`."""
    return run_dir / "seen.board"


def serving(run_dir: Path) -> None:
    """A request of some steps, a pause, and so on."""
    board = SlackBoard(
        PluginSettings(role="serving", name="s", run_dir=str(run_dir), token_file=""), 100, 512
    )
    number = 0
    while True:
        number += 1
        name = str(number)
        board.tracker.arrived(name, time.monotonic_ns(), 20)
        board.publish(1, 0, 90)
        for step in range(_DECODES):
            now_ns = time.monotonic_ns()
            board.tracker.scheduled(name, now_ns)
            board.step_began(now_ns, board.neighbours_ns(now_ns), 0 if step else 20, 1 if step else 0)
            board.publish(0, 1, 90)
            time.sleep(_STEP_S)
            now_ns = time.monotonic_ns()
            board.step_ended(now_ns, board.neighbours_ns(now_ns))
            board.tracker.produced(name, now_ns, 1)
            board.publish(0, 1, 90)
        board.tracker.finished(name)
        board.publish(0, 0, 100)
        time.sleep(_PAUSE_S)


def rollout(run_dir: Path) -> None:
    """Steps while the gate is open."""
    settings = PluginSettings(
        role="rollout",
        name="r",
        run_dir=str(run_dir),
        token_file="",
        serving_name="s",
        board_stale_ms=STALE_MS,
    )
    gate = StepGate(settings, step_tokens_max=512)
    seen, steps = BoardWriter(seen_path(run_dir), Seen), 0
    while True:
        now_ns = time.monotonic_ns()
        admission = gate.decide(now_ns)
        if not admission.open:
            admission, _ = gate.wait_until_open(admission)
        if admission.open:
            step = gate.step_began(8, time.monotonic_ns())
            gate.settle(time.monotonic_ns())
            time.sleep(_STEP_S)
            gate.step_ended(step, time.monotonic_ns() - step.started_ns)
            steps += 1
        seen.publish(Seen(time.monotonic_ns(), admission.open, admission.reason, steps))


def rosed(run_dir: Path) -> None:
    """Renews a policy."""
    gates = Gates(BoardPaths(run_dir), LEASE_NS)
    policy = GatePolicy(1, GateMode.STRICT, 512, 0, 0, 0, 250 * NS_PER_MS, 60 * NS_PER_MS, 0)
    gates.publish(ReplicaId("r"), policy, time.monotonic_ns())
    while True:
        gates.renew(time.monotonic_ns())
        time.sleep(_TICK_S)


class World:
    """All three of them, and what is to be seen from outside."""

    def __init__(self, run_dir: Path, environ: dict[str, str] | None = None) -> None:
        self.run_dir = run_dir
        self.paths = BoardPaths(run_dir)
        self._environ = os.environ | (environ or {})
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for role in ("serving", "rosed", "rollout"):
            self.start(role)

    def start(self, role: str) -> None:
        """Start one, perhaps again."""
        command = [sys.executable, __file__, role, str(self.run_dir)]
        self.processes[role] = subprocess.Popen(command, env=self._environ)

    def signal(self, role: str, number: int) -> None:
        """Send a signal to one; a killed one is waited for."""
        self.processes[role].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[role].wait()

    def close(self) -> None:
        """End what is left."""
        for process in self.processes.values():
            process.kill()
            process.wait()

    def slack(self) -> SlackReading:
        """The serving engine's board."""
        return _read(self.paths.slack("s"), SlackReading)

    def seen(self) -> Seen:
        """What the rollout engine did."""
        return _read(seen_path(self.run_dir), Seen)

    def alive(self, role: str) -> bool:
        """Whether it still runs."""
        return self.processes[role].poll() is None


def _read(path: Path, kind: type[RecordT]) -> RecordT:
    """A record, once there is one: a board may just have been made, or cut short by the test."""
    deadline = time.monotonic() + 60
    while True:
        try:
            record = BoardReader(path, kind).read()
        except (OSError, ValueError):
            record = Unknown("board_missing")
        if not isinstance(record, Unknown):
            return record
        assert time.monotonic() < deadline, record
        time.sleep(0.005)


if __name__ == "__main__":
    {"serving": serving, "rollout": rollout, "rosed": rosed}[sys.argv[1]](Path(sys.argv[2]))
