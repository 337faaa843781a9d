"""The warden: nothing of an engine outlives it, whatever ends first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from rose_daemon.node import warden
from rose_daemon.node.host import tree_bytes

from rose.boards import process_start_ticks

# An engine as vLLM builds one: a first process with a child that has its own session and ignores SIGTERM.
STUBBORN_CHILD = """
import signal, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-I", "-S", "-c",
     "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child up', flush=True); time.sleep(600)"],
    start_new_session=True)
print("pid", child.pid, flush=True)
"""  # fmt: skip  # noqa: E501


class Run:
    def __init__(self, log: Path, script: str, grace_s: float, bytes_max: int) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", warden.__file__, str(log), str(bytes_max), str(grace_s), "--"),
                *(sys.executable, "-I", "-S", "-c", script),
            ],
            stdin=subprocess.PIPE,
        )

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(script: str, grace_s: float = 5, bytes_max: int = 1 << 20) -> Run:
        runs.append(Run(tmp_path / f"engine-{len(runs)}.log", script, grace_s, bytes_max))
        return runs[-1]

    yield begin
    for run in runs:
        assert run.process.stdin
        run.process.stdin.close()
        run.process.kill()
        run.process.wait()


def until(condition: Callable[[], object], limit_s: float = 15) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def child_pid(run: Run) -> int:
    until(lambda: "child up" in run.text())
    return int(run.text().split("pid ")[1].split()[0])


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_output_and_exit_code_come_through(start: Start) -> None:
    run = start("import sys; print('to stdout'); print('to stderr', file=sys.stderr); sys.exit(7)")
    assert run.process.wait(15) == 7
    assert "to stdout" in run.text()
    assert "to stderr" in run.text()


def test_death_by_signal_is_told_as_128_plus_signal(start: Start) -> None:
    run = start("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert run.process.wait(15) == 128 + signal.SIGKILL


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    argv = [sys.executable, warden.__file__, str(tmp_path / "log"), "1000", "1", "--", "/no/such/engine"]
    assert subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, timeout=15).returncode == 127
    assert "cannot start /no/such/engine" in (tmp_path / "log").read_text()


def test_a_dead_engine_takes_its_orphans_along(start: Start) -> None:
    run = start(STUBBORN_CHILD + "time.sleep(1)")
    child = child_pid(run)
    assert run.process.wait(15) == 0
    assert not runs(child)


def test_the_end_of_rosed_ends_everything(start: Start) -> None:
    run = start(
        STUBBORN_CHILD + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)", grace_s=0.3
    )
    child = child_pid(run)
    assert run.process.stdin
    run.process.stdin.close()  # what the kernel does when rosed is killed
    assert run.process.wait(15) == 128 + signal.SIGKILL
    assert not runs(child)
    assert "rosed is gone" in run.text()


def test_sigterm_asks_and_sigusr1_kills(start: Start) -> None:
    polite = "print('got term', flush=True)"
    run = start(
        STUBBORN_CHILD + f"signal.signal(signal.SIGTERM, lambda *_: {polite})\nwhile True: time.sleep(1)",
    )
    child = child_pid(run)
    time.sleep(0.2)
    run.process.send_signal(signal.SIGTERM)
    until(lambda: "got term" in run.text())
    assert run.process.poll() is None
    run.process.send_signal(warden.KILL)
    assert run.process.wait(15) == 128 + signal.SIGKILL
    assert not runs(child)


def test_a_killed_warden_takes_the_engines_first_process_along(start: Start) -> None:
    run = start("import os, time; print('pid', os.getpid(), 'child up', flush=True); time.sleep(600)")
    engine = child_pid(run)
    run.process.kill()
    until(lambda: not runs(engine))


def test_the_log_is_bounded(start: Start) -> None:
    run = start("for n in range(20000): print(n, 'x' * 80)\nprint('last words')", bytes_max=200_000)
    assert run.process.wait(30) == 0
    former = run.log.with_suffix(".log.1")
    assert run.log.stat().st_size <= 200_000
    assert former.stat().st_size <= 200_000
    assert run.text().endswith("last words\n")


def test_an_engine_outlives_a_log_that_cannot_be_rotated(start: Start, tmp_path: Path) -> None:
    (tmp_path / "engine-0.log.1").mkdir()  # in the way of the rotation
    run = start("for _ in range(2000): print('x' * 99)\nprint('the end', flush=True)", bytes_max=4096)
    assert run.process.wait(30) == 0


def test_a_deleted_log_is_begun_anew(tmp_path: Path) -> None:
    log = warden.BoundedLog(tmp_path / "engine.log", 100)
    log.write(b"x" * 80)
    (tmp_path / "engine.log").unlink()
    for _ in range(3):
        log.write(b"y" * 80)
    assert (tmp_path / "engine.log").read_bytes() == b"y" * 80


def test_descendants_are_found_across_levels() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        until(lambda: len(warden.descendants(parent.pid)) == 1)
        assert warden.descendants(parent.pid)[0] in warden.descendants(os.getpid())
    finally:
        for pid in [*warden.descendants(parent.pid), parent.pid]:
            os.kill(pid, signal.SIGKILL)
        parent.wait()


def test_a_process_may_have_any_name() -> None:
    """The kernel cuts names at 15 bytes, in the middle of a letter too."""
    rename = "open('/proc/self/comm', 'wb').write(b'nam\\xc3'); print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as odd:
        assert odd.stdout
        assert odd.stdin
        odd.stdout.readline()
        assert warden.parents()[odd.pid] == os.getpid()
        assert odd.pid in warden.descendants(os.getpid())
        assert process_start_ticks(odd.pid) > 0
        held = tree_bytes(odd.pid, warden.parents())
        assert isinstance(held, int)
        assert held > 0
        odd.stdin.close()


def test_shared_memory_of_a_killed_engine_is_removed(start: Start) -> None:
    script = """
import time
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=4096)
print("block", block.name, flush=True)
time.sleep(600)
"""
    run = start(script, 0.2)
    until(lambda: "block " in run.text())
    block = Path("/dev/shm") / run.text().split("block ")[1].split()[0]
    assert block.exists()
    run.process.send_signal(signal.SIGUSR1)
    run.process.wait(15)
    assert not block.exists()


@pytest.mark.parametrize("ends", ["by itself", "when told"])
def test_shared_memory_of_an_engine_that_ends_in_order_is_removed(start: Start, ends: str) -> None:
    """Nobody has it mapped then: removing it is the work of Python's tracker, which needs a moment."""
    script = f"""
import signal, sys, time
from multiprocessing import shared_memory
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
blocks = [shared_memory.SharedMemory(create=True, size=4096) for _ in range(20)]
print("blocks", *[block.name for block in blocks], "", flush=True)
for block in blocks:
    block.close()
time.sleep({0.1 if ends == "by itself" else 600})
"""
    run = start(script)
    until(lambda: run.text().endswith("\n"))
    blocks = [Path("/dev/shm") / name for name in run.text().splitlines()[0].split()[1:]]
    assert len(blocks) == 20
    if ends == "when told":
        run.process.terminate()
    assert run.process.wait(15) == 0
    assert not [block for block in blocks if block.exists()]


def test_a_helper_that_stays_is_killed_after_an_orderly_end(start: Start) -> None:
    run = start(STUBBORN_CHILD)
    assert run.process.wait(15) == 0
    child = int(run.text().split("pid ")[1].split()[0])
    assert child not in warden.parents()


def test_shared_memory_that_somebody_else_has_mapped_stays() -> None:
    ours = SharedMemory(create=True, size=4096)
    block = Path("/dev/shm") / ours.name
    try:
        assert block in warden.shared_memory([os.getpid()])
        warden.remove_abandoned({block})
        assert block.exists()
    finally:
        ours.close()
        warden.remove_abandoned({block})
    assert not block.exists()
    resource_tracker.unregister(f"/{ours.name}", "shared_memory")
