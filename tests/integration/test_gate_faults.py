"""Faults of processes that share boards: the gate closes, serving goes on, and all is well again afterwards.

The processes have no model (see gate_world); the same faults on real engines are in test_engine_serving.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gate_world import World

from rose.boards import PAGE_BYTES, BoardPaths, BoardWriter, WatchedBoard
from rose.core.readings import GateMode, GatePolicy, GateReason, SlackReading, Unknown
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.step_gate import StepGate
from rose.units import NS_PER_S

CLOCK_SHIM = Path(__file__).with_name("clock_shim.c")
STOPPED_S = 5
UNKNOWN = {GateReason.BOARD_UNKNOWN}


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes worlds; ends them all."""
    made: list[World] = []

    def make(environ: dict[str, str] | None = None) -> World:
        run_dir = tmp_path / str(len(made))
        run_dir.mkdir()
        made.append(World(run_dir, environ))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def world(worlds: Callable[..., World]) -> World:
    """One in which rollout runs beside serving."""
    world = worlds()
    works(world)
    return world


def works(world: World) -> None:
    """Serving goes on, and rollout beside it."""
    serves(world)
    steps = world.seen().steps
    wait_for(lambda: world.seen().steps > steps + 5, "rollout goes on")


def serves(world: World) -> None:
    """Serving goes on, whatever happens."""
    steps = world.slack().steps
    wait_for(lambda: world.slack().steps > steps + 10, "serving goes on")
    assert world.alive("serving")


def stands_still(world: World, reasons: set[GateReason]) -> None:
    """Rollout has stopped, and knows why."""
    wait_for(lambda: world.seen().reason in reasons, f"closed for {reasons}")
    steps = world.seen().steps
    time.sleep(0.2)
    assert world.seen().steps == steps
    assert not world.seen().open


def test_rosed_is_killed(world: World) -> None:
    world.signal("rosed", signal.SIGKILL)
    stands_still(world, {GateReason.ROSED_GONE, GateReason.POLICY_UNKNOWN})
    serves(world)
    world.start("rosed")
    works(world)


def test_the_rollout_engine_is_killed(world: World) -> None:
    world.signal("rollout", signal.SIGKILL)
    serves(world)
    world.start("rollout")
    works(world)
    assert world.alive("rosed")


def test_the_serving_engine_is_killed(world: World) -> None:
    world.signal("serving", signal.SIGKILL)
    stands_still(world, UNKNOWN)
    assert world.alive("rollout")
    world.start("serving")
    works(world)


def test_processes_that_are_stopped_for_seconds(worlds: Callable[..., World]) -> None:
    """A stopped process is to all others what a hanging one is."""
    without_rosed, without_serving = worlds(), worlds()
    works(without_rosed)
    works(without_serving)
    without_rosed.signal("rosed", signal.SIGSTOP)
    without_serving.signal("serving", signal.SIGSTOP)
    stopped = time.monotonic()
    stands_still(without_rosed, {GateReason.ROSED_GONE})
    stands_still(without_serving, UNKNOWN)
    serves(without_rosed)
    time.sleep(max(0, stopped + STOPPED_S - time.monotonic()))
    assert not without_rosed.seen().open
    assert not without_serving.seen().open
    without_rosed.signal("rosed", signal.SIGCONT)
    without_serving.signal("serving", signal.SIGCONT)
    works(without_rosed)
    works(without_serving)


def test_boards_are_cut_short(world: World) -> None:
    """Whose page is gone writes it anew; nobody else touches it, or dies of it."""
    for path in (world.paths.slack("s"), world.paths.gate("r")):
        for length in (0, 40, 1500, PAGE_BYTES - 1):
            os.truncate(path, length)
            serves(world)
    works(world)
    assert all(world.alive(role) for role in world.processes)


@pytest.fixture(scope="module")
def clock_shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that shifts the wall clock of processes it is preloaded into, as a file says."""
    library = tmp_path_factory.mktemp("shim") / "clock_shim.so"
    command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(CLOCK_SHIM), "-ldl"]
    subprocess.run(command, check=True)
    return library


def test_the_wall_clock_jumps_by_an_hour(
    worlds: Callable[..., World], clock_shim: Path, tmp_path: Path
) -> None:
    """Forward, back, and further back: everything goes by the monotonic clock."""
    shift = tmp_path / "shift"
    shift.write_text("0")
    environ = {"LD_PRELOAD": str(clock_shim), "ROSE_CLOCK_SHIFT": str(shift)}
    world = worlds(environ)
    works(world)
    for seconds in (3600, 0, -3600):
        shift.write_text(str(seconds))
        code = "import time; print(int(time.time()))"
        shown = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | environ, check=True, capture_output=True, text=True
        )
        assert abs(int(shown.stdout) - time.time() - seconds) < 60, "the shim does not work"
        works(world)
    assert all(world.alive(role) for role in world.processes)


# ---- killed in the middle of a word -------------------------------------------------------------------

BOUNDARIES = ["nothing", "half a slot", "slot", "checksum", "number"]
"""How far a publication got: each is a state in which a killed writer may leave the page."""
DIES = """
import os, signal, sys
from pathlib import Path
from rose import boards, slots
from rose.boards import BoardWriter
from rose.core import readings
slots.shared_library = boards.shared_library = lambda: None
path, kind, stage, *words = sys.argv[1:]
writer = BoardWriter(Path(path), getattr(readings, kind))
plain, page = writer._slots, writer._page
record = [int(word) for word in words]
writer.publish(record)
record[1] += 1
number = int.from_bytes(page[slots.SEQUENCE_AT : slots.SEQUENCE_AT + 8], "little") + 1
at = slots.SLOTS_AT[number & 1]
image = plain._slot.pack(number, *record)
stages = ["nothing", "half a slot", "slot", "checksum", "number"]
reached = stages.index(stage)
if reached == 1:
    page[at : at + len(image) // 2] = image[: len(image) // 2]
if reached >= 2:
    page[at : at + len(image)] = image
if reached >= 3:
    page[at + len(image) : at + len(image) + 8] = slots.zlib.crc32(image).to_bytes(8, "little")
if reached >= 4:
    page[slots.SEQUENCE_AT : slots.SEQUENCE_AT + 8] = number.to_bytes(8, "little")
print("published", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("stage", BOUNDARIES)
@pytest.mark.parametrize("kind", [SlackReading, GatePolicy])
def test_a_writer_is_killed_at_a_boundary_of_its_board(
    run_dir: Path, kind: type[SlackReading] | type[GatePolicy], stage: str
) -> None:
    """Readers have the record before or the one after, and nothing in between; then the gate is closed."""
    paths, now_ns = BoardPaths(run_dir), time.monotonic_ns()
    slack = SlackReading(*[0] * len(SlackReading._fields))._replace(stamp_ns=now_ns, waiting=3)
    policy = GatePolicy(1, GateMode.STRICT, 512, 0, 0, now_ns + 30 * NS_PER_S, NS_PER_S, NS_PER_S, 0)
    record = slack if kind is SlackReading else policy
    path = paths.slack("s") if kind is SlackReading else paths.gate("r")
    other = BoardWriter(paths.gate("r"), GatePolicy) if kind is SlackReading else None
    if other is not None:
        other.publish(policy)
    command = [sys.executable, "-c", DIES, str(path), kind.__name__, stage, *map(str, record)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"published\n"
        board: WatchedBoard[tuple[int, ...]] = WatchedBoard(path, kind)  # type: ignore[arg-type]
        seen = board.read(time.monotonic_ns(), None)
        after = record[1] + 1
        expected = {record[1], after} if stage == "number" else {record[1]}
        assert not isinstance(seen, Unknown)
        assert seen[1] in expected
        assert (seen[0], *seen[2:]) == (record[0], *record[2:])
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.wait(60)
    assert process.returncode == -signal.SIGKILL
    given = {"role": "rollout", "name": "r", "run_dir": str(run_dir), "token_file": ""}
    gate = StepGate(PluginSettings(**given, serving_name="s"), step_tokens_max=512)  # type: ignore[arg-type]
    admission = gate.decide(time.monotonic_ns())
    assert not admission.open
    assert admission.reason in {GateReason.BOARD_UNKNOWN, GateReason.POLICY_UNKNOWN}
