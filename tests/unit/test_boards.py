"""Boards: what a reader makes of every state that a page can be in."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from native_builds import build
from rose_kernels.shared import shared_library

from rose import boards, slots
from rose.boards import (
    PAGE_BYTES,
    BoardPaths,
    BoardReader,
    BoardWriter,
    Owner,
    WatchedBoard,
    process_start_ticks,
)
from rose.core.readings import NEVER, GatePolicy, ReplicaReading, SlackReading, Unknown
from rose.errors import RoseError

NOW_NS = 5_000_000_000
STALE_NS = 1_000_000_000


def policy(revision: int = 1) -> GatePolicy:
    return GatePolicy(revision, 1, 512, 40, 3, NOW_NS, 250_000_000, 60_000_000, 5_000_000)


def slack(stamp_ns: int = NOW_NS) -> SlackReading:
    return SlackReading(stamp_ns, *range(1, len(SlackReading._fields)))


@pytest.fixture(autouse=True, params=["atomic", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it in C, and in Python as where that was not built.  Other processes of a test always use C."""
    if request.param == "plain":
        monkeypatch.setattr(slots, "shared_library", lambda: None)
        monkeypatch.setattr(boards, "shared_library", lambda: None)
    else:
        assert shared_library() is not None, "build it (again): pip install -e . --no-build-isolation"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gate-r0.board"


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


def test_a_reader_sees_the_latest_record(path: Path) -> None:
    writer = BoardWriter(path, GatePolicy)
    reader = BoardReader(path, GatePolicy)
    for revision in range(5):
        writer.publish(policy(revision))
        assert reader.read() == policy(revision)
    assert reader.owner == Owner(os.getpid(), process_start_ticks(os.getpid()))


@pytest.mark.parametrize("kind", [GatePolicy, SlackReading, ReplicaReading])
def test_every_record_keeps_its_extremes(path: Path, kind: type[GatePolicy]) -> None:
    writer, reader = BoardWriter(path, kind), BoardReader(path, kind)
    for word in (0, -1, NEVER, -(1 << 63), (1 << 63) - 1):
        record = kind(*[word] * len(kind._fields))
        writer.publish(record)
        assert reader.read() == record


def test_a_record_that_does_not_fit_a_word_is_refused(path: Path) -> None:
    writer, reader = BoardWriter(path, GatePolicy), BoardReader(path, GatePolicy)
    writer.publish(policy(1))
    with pytest.raises(struct.error):
        writer.publish(policy(1 << 63))
    assert reader.read() == policy(1)


def test_an_empty_board_is_unknown(path: Path) -> None:
    BoardWriter(path, GatePolicy)
    assert BoardReader(path, GatePolicy).read() == Unknown("board_empty")


def test_another_layout_is_foreign(path: Path) -> None:
    writer = BoardWriter(path, GatePolicy)
    writer.publish(policy())
    assert BoardReader(path, SlackReading).read() == Unknown("board_foreign")


def test_another_file_is_foreign(path: Path) -> None:
    path.write_bytes(b"\xff" * PAGE_BYTES)
    assert BoardReader(path, GatePolicy).read() == Unknown("board_foreign")


@pytest.mark.parametrize("offset", [64, 72, 64 + 8 + 9 * 8, 1024, 1032, 1024 + 8 + 9 * 8])
def test_a_changed_byte_is_torn_never_a_wrong_number(path: Path, offset: int) -> None:
    writer, reader = BoardWriter(path, GatePolicy), BoardReader(path, GatePolicy)
    writer.publish(policy(1))
    writer.publish(policy(2))
    with path.open("r+b") as page:
        page.seek(offset)
        byte = page.read(1)[0]
        page.seek(offset)
        page.write(bytes([byte ^ 0x40]))
    assert reader.read() in (policy(2), Unknown("board_torn"))
    assert reader.read() == (policy(2) if offset >= 1024 else Unknown("board_torn"))


def test_a_wrong_sequence_is_torn(path: Path) -> None:
    writer, reader = BoardWriter(path, GatePolicy), BoardReader(path, GatePolicy)
    writer.publish(policy(1))
    with path.open("r+b") as page:
        page.seek(32)
        page.write((77).to_bytes(8, "little"))
    assert reader.read() == Unknown("board_torn")


def test_no_torn_record_is_ever_read_under_way(path: Path) -> None:
    """A writer at full speed in another process: each record has the same number in every word."""
    writer_code = """
import sys, time
from pathlib import Path
from rose.boards import BoardWriter
from rose.core.readings import ReplicaReading
writer = BoardWriter(Path(sys.argv[1]), ReplicaReading)
words, end = len(ReplicaReading._fields), time.monotonic() + 1.5
number = 0
while time.monotonic() < end:
    for number in range(number + 1, number + 200):
        writer.publish(ReplicaReading(*[number] * words))
print(number)
"""
    BoardWriter(path, ReplicaReading)
    process = subprocess.Popen([sys.executable, "-c", writer_code, str(path)], stdout=subprocess.PIPE)
    reader, seen, last = BoardReader(path, ReplicaReading), 0, 0
    while process.poll() is None:
        record = reader.read()
        if not isinstance(record, Unknown):
            assert len(set(record)) == 1, record
            assert record[0] >= last
            seen, last = seen + 1, record[0]
    assert process.returncode == 0
    assert seen > 100


def test_a_new_writer_goes_on_where_the_old_one_ended(path: Path) -> None:
    BoardWriter(path, GatePolicy).publish(policy(1))
    reader = BoardReader(path, GatePolicy)
    second = BoardWriter(path, GatePolicy)
    assert reader.read() == policy(1)
    second.publish(policy(2))
    assert reader.read() == policy(2)


def test_a_reader_of_a_short_file_says_so(path: Path) -> None:
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="mmap"):
        BoardReader(path, GatePolicy)


def test_both_ways_use_the_same_bytes(path: Path) -> None:
    library, words = shared_library(), len(SlackReading._fields)
    with path.open("w+b") as file:
        file.truncate(PAGE_BYTES)
        page = mmap.mmap(file.fileno(), PAGE_BYTES)
    slots.HEADER.pack_into(page, 0, slots.MAGIC, 77, words, 0, 0, 0)
    both = [slots.AtomicSlots(library, page, 77, words), slots.PlainSlots(page, 77, words)]
    images = []
    for number, (writer, other) in enumerate([both, both[::-1], both, both[::-1]]):
        record = tuple(number * (-1) ** word << word for word in range(words))
        writer.publish(record)
        assert writer.read() == other.read() == record
    for writer in both:
        page[32:] = bytes(PAGE_BYTES - 32)
        writer.publish(tuple(range(words)))
        images.append(bytes(page))
    assert images[0] == images[1]


def test_the_largest_record_fits(path: Path) -> None:
    words = slots.WORDS_MAX
    with path.open("w+b") as file:
        file.truncate(PAGE_BYTES)
        page = mmap.mmap(file.fileno(), PAGE_BYTES)
    slots.HEADER.pack_into(page, 0, slots.MAGIC, 5, words, 0, 0, 0)
    board = slots.slots_of(page, 5, words)
    for start in (0, 1000):
        board.publish(tuple(range(start, start + words)))
        assert board.read() == tuple(range(start, start + words))
    assert page[3072:] == bytes(PAGE_BYTES - 3072)


def test_a_failed_read_leaves_no_half_record_to_other_threads(path: Path) -> None:
    writer, reader = BoardWriter(path, GatePolicy), BoardReader(path, GatePolicy)
    writer.publish(policy(1))
    assert reader.read() == policy(1)
    writer.publish(policy(2))
    with path.open("r+b") as page:
        page.seek(64 + 8)
        page.write(b"\xff" * 16)
    assert reader.read() == Unknown("board_torn")
    writer.publish(policy(3))
    assert reader.read() == policy(3)


@pytest.mark.parametrize("compiler", ["gcc", "aarch64-linux-gnu-gcc"])
def test_code_for_another_machine_reads_and_writes_the_same(
    path: Path, tmp_path: Path, compiler: str
) -> None:
    runner = [] if compiler == "gcc" else ["qemu-aarch64"]
    if runner and shutil.which("qemu-aarch64") is None:
        pytest.skip("qemu-aarch64 is not installed")
    program = build(
        tmp_path, "board_words", *(["-static"] if runner else []), sources=("boards.c",), compiler=compiler
    )
    writer, reader = BoardWriter(path, GatePolicy), BoardReader(path, GatePolicy)
    words = len(GatePolicy._fields)
    command = [*runner, str(program), str(path), str(writer._layout), str(words)]
    writer.publish(policy(3))
    done = subprocess.run([*command, "read"], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(word) for word in policy(3)]
    rings = writer.bell.rings
    subprocess.run([*command, "publish", "4242"], check=True)
    assert reader.read() == GatePolicy(*[4242] * words)
    assert writer.bell.rings == rings + 1
    foreign = [*command[:-2], "1", str(words), "read"]
    assert subprocess.run(foreign, check=True, capture_output=True, text=True).stdout == "trouble 3\n"


# ---- watched boards -----------------------------------------------------------------------------


def watch(path: Path) -> WatchedBoard[SlackReading]:
    return WatchedBoard(path, SlackReading, owner_check_ns=0)


def test_a_watched_board_may_come_later(path: Path) -> None:
    board = watch(path)
    assert board.read(NOW_NS, STALE_NS) == Unknown("board_missing")
    assert board.bell is None
    assert board.owner is None
    BoardWriter(path, SlackReading).publish(slack())
    assert board.read(NOW_NS, STALE_NS) == slack()
    assert board.bell is not None


def test_a_stale_record_is_unknown_and_gives_its_age(path: Path) -> None:
    BoardWriter(path, SlackReading).publish(slack(NOW_NS))
    board = watch(path)
    assert board.read(NOW_NS + STALE_NS, STALE_NS) == slack()
    assert board.read(NOW_NS + STALE_NS + 1, STALE_NS) == Unknown("board_stale", STALE_NS + 1)
    assert board.read(NOW_NS + 100 * STALE_NS, None) == slack()


def test_a_record_from_the_future_is_unknown(path: Path) -> None:
    BoardWriter(path, SlackReading).publish(slack(NOW_NS + 3 * STALE_NS))
    assert watch(path).read(NOW_NS, STALE_NS) == Unknown("clock_jumped", -3 * STALE_NS)


def test_a_truncated_file_is_unknown_not_a_bus_error(path: Path) -> None:
    BoardWriter(path, SlackReading).publish(slack())
    board = watch(path)
    assert board.read(NOW_NS, STALE_NS) == slack()
    os.truncate(path, 100)
    assert board.read(NOW_NS, STALE_NS) == Unknown("board_truncated")
    os.truncate(path, 0)
    assert watch(path).read(NOW_NS, STALE_NS) == Unknown("board_truncated")


def test_a_removed_and_replaced_file_is_followed(path: Path) -> None:
    BoardWriter(path, SlackReading).publish(slack())
    board = watch(path)
    assert board.read(NOW_NS, STALE_NS) == slack()
    path.unlink()
    assert board.read(NOW_NS, STALE_NS) == Unknown("board_missing")
    BoardWriter(path, SlackReading).publish(slack(NOW_NS + 1))
    assert board.read(NOW_NS, STALE_NS) == slack(NOW_NS + 1)


def test_a_board_of_another_user_is_forbidden_not_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    BoardWriter(path, GatePolicy).publish(policy())
    monkeypatch.setattr(os, "open", refuse)  # tests may run as root, whom no mode keeps out
    assert WatchedBoard(path, GatePolicy).read(NOW_NS, None) == Unknown("board_forbidden")


def test_a_directory_or_no_path_at_all_is_missing(tmp_path: Path) -> None:
    assert watch(tmp_path).read(NOW_NS, STALE_NS) == Unknown("board_missing")
    assert watch(tmp_path / "no" / "such").read(NOW_NS, STALE_NS) == Unknown("board_missing")


def test_a_writer_that_ended_is_gone(path: Path) -> None:
    code = """
import sys
from pathlib import Path
from rose.boards import BoardWriter
from rose.core.readings import SlackReading
BoardWriter(Path(sys.argv[1]), SlackReading).publish(SlackReading(int(sys.argv[2]), *[0] * 19))
"""
    run_python(code, str(path), str(NOW_NS))
    board = watch(path)
    assert board.read(NOW_NS, STALE_NS) == Unknown("owner_gone")
    BoardWriter(path, SlackReading).publish(slack())
    assert board.read(NOW_NS, STALE_NS) == slack()


def test_a_killed_writer_is_gone_even_unreaped(path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from rose.boards import BoardWriter
from rose.core.readings import SlackReading
BoardWriter(Path(sys.argv[1]), SlackReading).publish(SlackReading(int(sys.argv[2]), *[0] * 19))
print("up", flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", code, str(path), str(NOW_NS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        board = watch(path)
        assert not isinstance(board.read(NOW_NS, STALE_NS), Unknown)
        process.kill()
        deadline = time.monotonic() + 10
        while not isinstance(board.read(NOW_NS, STALE_NS), Unknown):  # a zombie by now
            assert time.monotonic() < deadline
        assert board.read(NOW_NS, STALE_NS) == Unknown("owner_gone")


def test_a_reused_pid_is_not_the_owner(path: Path) -> None:
    """The page names our pid, but a process that started at another time."""
    BoardWriter(path, SlackReading).publish(slack())
    with path.open("r+b") as page:
        page.seek(24)
        page.write((process_start_ticks(os.getpid()) + 1).to_bytes(8, "little"))
    assert watch(path).read(NOW_NS, STALE_NS) == Unknown("owner_gone")


@pytest.mark.parametrize("pid", [0, -1, 1 << 40, 2**63 - 1])
def test_a_senseless_pid_is_not_alive(path: Path, pid: int) -> None:
    BoardWriter(path, SlackReading).publish(slack())
    with path.open("r+b") as page:
        page.seek(16)
        page.write(pid.to_bytes(8, "little", signed=True))
    assert watch(path).read(NOW_NS, STALE_NS) == Unknown("owner_gone")


def test_without_pidfds_the_owner_is_looked_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused)
    BoardWriter(path, SlackReading).publish(slack())
    assert watch(path).read(NOW_NS, STALE_NS) == slack()


def test_watching_many_boards_leaks_no_descriptor(tmp_path: Path) -> None:
    writer = BoardWriter(tmp_path / "b", SlackReading)
    writer.publish(slack())
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        watch(tmp_path / "b").read(NOW_NS, STALE_NS)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


CUTS = [0, 1, 64, 3000, PAGE_BYTES - 1]


@pytest.mark.parametrize("length", CUTS)
def test_a_board_that_is_cut_short_kills_nobody_and_is_made_whole(path: Path, length: int) -> None:
    """A page past the end of a file must not be touched: each of these calls would end the process."""
    writer, reader, watched = BoardWriter(path, SlackReading), BoardReader(path, SlackReading), watch(path)
    writer.publish(slack())
    assert reader.read() == watched.read(NOW_NS, STALE_NS) == slack()
    os.truncate(path, length)
    assert reader.read() == watched.read(NOW_NS, STALE_NS) == Unknown("board_truncated")
    assert not reader.owner.alive()
    for bell in (writer.bell, reader.bell):
        bell.awaited = True
        bell.ring()
        bell.nudge()
        bell.wait(bell.count, 1_000_000)
        assert (bell.count, bell.rings, bell.awaited) == (0, 0, False)
    writer.activity.begin(5)
    assert reader.activity.busy_ns(9) == 0
    writer.activity.end(9, more=False)
    writer.publish(slack(NOW_NS + 1))
    assert reader.read() == slack(NOW_NS + 1)
    assert watched.read(NOW_NS + 100_000_000, STALE_NS) == slack(NOW_NS + 1)
    assert reader.owner.alive()


def test_a_process_that_writes_and_rings_all_the_time_survives_any_cut(path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from rose.boards import BoardReader, BoardWriter
from rose.core.readings import SlackReading
writer = BoardWriter(Path(sys.argv[1]), SlackReading)
number = 0
print("up", flush=True)
while True:
    number += 1
    writer.publish(SlackReading(number, *[0] * 19))
    writer.bell.ring()
    writer.activity.begin(number)
    time.sleep(0.005)
"""
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        reader = BoardReader(path, SlackReading)
        try:
            for length in 4 * CUTS:
                os.truncate(path, length)
                time.sleep(0.02)
                assert process.poll() is None
            deadline = time.monotonic() + 10
            while isinstance(reader.read(), Unknown):
                assert time.monotonic() < deadline
        finally:
            process.kill()


def test_a_record_is_read_once(path: Path) -> None:
    """What nobody published anew is not parsed anew; what somebody did, is."""
    writer, reader = BoardWriter(path, GatePolicy), BoardReader(path, GatePolicy)
    writer.publish(policy(1))
    assert reader.read() is reader.read()
    writer.publish(policy(1))
    assert reader.read() == policy(1)
    writer.publish(policy(2))
    assert reader.read() == policy(2)
    another = BoardWriter(path, SlackReading)
    another.publish(slack())
    assert reader.read() == Unknown("board_foreign")


# ---- bells --------------------------------------------------------------------------------------


def test_a_ring_ends_a_wait(path: Path) -> None:
    writer = BoardWriter(path, GatePolicy)
    reader = BoardReader(path, GatePolicy)
    seen = reader.bell.count
    ringer = threading.Timer(0.1, writer.bell.ring)
    started = time.monotonic()
    ringer.start()
    reader.bell.wait(seen, 20_000_000_000)
    assert time.monotonic() - started < 15
    assert reader.bell.count == seen + 1
    ringer.join()


def test_a_ring_before_the_wait_is_not_lost(path: Path) -> None:
    writer = BoardWriter(path, GatePolicy)
    seen = writer.bell.count
    writer.bell.ring()
    started = time.monotonic()
    writer.bell.wait(seen, 20_000_000_000)
    assert time.monotonic() - started < 15


def test_a_wait_ends_by_itself(path: Path) -> None:
    bell = BoardWriter(path, GatePolicy).bell
    bell.wait(bell.count, 20_000_000)
    bell.wait(bell.count, 0)
    bell.wait(bell.count, -5)


def test_a_ring_crosses_processes(path: Path) -> None:
    bell = BoardWriter(path, GatePolicy).bell
    seen = bell.count
    code = """
import sys
from pathlib import Path
from rose.boards import BoardReader
from rose.core.readings import GatePolicy
BoardReader(Path(sys.argv[1]), GatePolicy).bell.ring()
"""
    run_python(code, str(path))
    assert bell.count == seen + 1


def test_rings_and_nudges_are_counted_apart(path: Path) -> None:
    bell = BoardWriter(path, GatePolicy).bell
    bell.nudge()
    assert (bell.count, bell.rings) == (0, 0)  # nobody waits
    bell.awaited = True
    assert bell.awaited
    bell.nudge()
    bell.ring()
    bell.nudge()
    assert (bell.count >> 16, bell.rings) == (2, 1)
    bell.awaited = False
    bell.nudge()
    assert bell.count >> 16 == 2
    bell._word.value |= 0xFFFF
    bell.ring()
    assert (bell.count >> 16, bell.rings) == (2, 0)  # no ring carries into the nudges


def test_no_ring_is_lost_when_processes_ring_at_once(path: Path, request: pytest.FixtureRequest) -> None:
    if "plain" in request.node.name:
        pytest.skip("only atomic words can count what happens at the same instant")
    bell = BoardWriter(path, GatePolicy).bell
    bell.awaited = True
    code = """
import sys
from pathlib import Path
from rose.boards import BoardReader
from rose.core.readings import GatePolicy
bell = BoardReader(Path(sys.argv[1]), GatePolicy).bell
for _ in range(20000):
    bell.ring()
    bell.nudge()
"""
    command = [sys.executable, "-c", code, str(path)]
    ringers = [subprocess.Popen(command) for _ in range(3)]
    assert [ringer.wait(60) for ringer in ringers] == [0, 0, 0]
    assert (bell.rings, bell.count >> 16) == (60000, 60000)


def test_an_unknown_machine_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "vax")
    with pytest.raises(RoseError, match="vax"):
        BoardWriter(path, GatePolicy)


def test_paths_name_their_boards() -> None:
    boards = BoardPaths(Path("/dev/shm/rose"))
    assert boards.slack("serving").name == "slack-serving.board"
    assert boards.gate("r0").name == "gate-r0.board"
    assert boards.replica("r0").name == "replica-r0.board"
