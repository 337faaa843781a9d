"""The page ledger as engines and rosed use it: real processes, real deaths, wrong files and wrong calls."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ledger_world import load_stepping
from native_builds import build
from rose_kernels import shared
from rose_kernels.arena import ledger as ledger_module
from rose_kernels.arena.ledger import (
    LEDGER_BYTES,
    OWNERS_MAX,
    PAGES_MAX,
    REVISION_MAX,
    Account,
    Ledger,
    LedgerError,
    LimitAnswer,
    OwnerGone,
    OwnerPages,
    Role,
)
from rose_kernels.processes import Owner

CAPACITY = 100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gpu0.ledger"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    return Ledger.create(path, CAPACITY)


@pytest.fixture
def account(ledger: Ledger) -> Iterator[Account]:
    account = ledger.join(Role.SERVING, CAPACITY)
    yield account
    ledger_module._joined.clear()


def elsewhere(path: Path, code: str) -> subprocess.Popen[str]:
    """Another process with `account` in the ledger, that runs `code` and then waits to be killed."""
    lines = (
        "import sys, time; from pathlib import Path",
        "from rose_kernels.arena.ledger import Ledger, Role",
        f"ledger = Ledger(Path(sys.argv[1])); account = ledger.join(Role.ROLLOUT, {CAPACITY})",
        code,
        "print('ready', flush=True); time.sleep(60)",
    )
    command = [sys.executable, "-c", "\n".join(lines), str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def in_child(work: Callable[[], None]) -> int:
    """Exit status (or minus the signal) of a forked process that does `work`."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - the child must not go on as a second test run
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---- counting -----------------------------------------------------------------------------------


def test_an_owner_takes_and_gives_back(ledger: Ledger, account: Account) -> None:
    assert account.acquire(30) == 30
    assert account.acquire(20) == 20
    account.release(5)
    assert account.held_pages == 45
    assert (ledger.used_pages, ledger.free_pages) == (45, 55)
    assert account.line == OwnerPages(Owner.myself(), Role.SERVING, 45, CAPACITY, 0)
    assert account.leave() == 45
    assert ledger.used_pages == 0
    assert ledger.view().owners == ()


def test_all_or_nothing_unless_told_otherwise(account: Account) -> None:
    assert account.acquire(101) == 0
    assert account.acquire(101, at_least=50) == 100
    assert account.acquire(1) == 0
    assert account.acquire(0) == 0


def test_more_than_is_held_cannot_be_released(ledger: Ledger, account: Account) -> None:
    account.acquire(3)
    with pytest.raises(LedgerError):
        account.release(4)
    assert ledger.used_pages == 3


@pytest.mark.parametrize(("pages", "least"), [(-1, None), (5, 6), (5, -1)])
def test_senseless_amounts_are_refused(
    ledger: Ledger, account: Account, pages: int, least: int | None
) -> None:
    with pytest.raises(LedgerError):
        account.acquire(pages, at_least=least)
    assert ledger.used_pages == 0


def test_two_processes_share_what_there_is(path: Path, ledger: Ledger, account: Account) -> None:
    account.acquire(70)
    code = "assert account.acquire(31) == 0 and account.acquire(31, at_least=1) == 30"
    with elsewhere(path, code) as process:
        view = ledger.view()
        assert view.consistent
        assert view.used_pages == 100
        assert [(line.role, line.held_pages) for line in view.owners] == [
            (Role.SERVING, 70),
            (Role.ROLLOUT, 30),
        ]
        process.kill()


# ---- limits ---------------------------------------------------------------------------------------


def test_a_limit_is_applied_or_deferred_until_the_owner_has_released(
    ledger: Ledger, account: Account
) -> None:
    me = Owner.myself()
    account.acquire(50)
    assert ledger.set_limit(me, 1, 60) is LimitAnswer.APPLIED
    assert account.acquire(20, at_least=1) == 10
    assert ledger.set_limit(me, 2, 40) is LimitAnswer.DEFERRED
    assert account.acquire(1) == 0
    account.release(19)
    assert ledger.set_limit(me, 2, 40) is LimitAnswer.DEFERRED
    account.release(1)
    assert ledger.set_limit(me, 2, 40) is LimitAnswer.APPLIED
    assert account.acquire(1) == 0
    assert account.line.limit_revision == 2


def test_an_older_revision_is_stale_and_a_second_meaning_a_conflict(ledger: Ledger, account: Account) -> None:
    me = Owner.myself()
    assert ledger.set_limit(me, 7, 60) is LimitAnswer.APPLIED
    assert ledger.set_limit(me, 6, 10) is LimitAnswer.STALE
    assert ledger.set_limit(me, 7, 10) is LimitAnswer.CONFLICT
    assert ledger.set_limit(me, 7, 60) is LimitAnswer.APPLIED
    assert account.line.limit_pages == 60
    assert ledger.set_limit(me, REVISION_MAX, PAGES_MAX) is LimitAnswer.APPLIED


@pytest.mark.parametrize(
    ("revision", "pages"), [(0, 1), (-1, 1), (REVISION_MAX + 1, 1), (1, -1), (1, PAGES_MAX + 1)]
)
def test_a_limit_out_of_range_is_refused(ledger: Ledger, account: Account, revision: int, pages: int) -> None:
    with pytest.raises(LedgerError):
        ledger.set_limit(Owner.myself(), revision, pages)
    assert account.line.limit_pages == CAPACITY


def test_the_limit_of_a_stranger_cannot_be_set(ledger: Ledger, account: Account) -> None:
    with pytest.raises(OwnerGone):
        ledger.set_limit(Owner(account.owner.pid, 1), 1, 5)


def test_a_later_owner_of_a_slot_begins_with_its_own_limit(ledger: Ledger, account: Account) -> None:
    ledger.set_limit(Owner.myself(), 9, 1)
    account.leave()
    again = ledger.join(Role.ROLLOUT, 12)
    assert again.line == OwnerPages(Owner.myself(), Role.ROLLOUT, 0, 12, 0)
    assert ledger.set_limit(Owner.myself(), 1, 50) is LimitAnswer.APPLIED


# ---- lives and deaths --------------------------------------------------------------------------------


def test_what_a_killed_process_held_is_reclaimed(path: Path, ledger: Ledger, account: Account) -> None:
    with elsewhere(path, "account.acquire(40)") as process:
        assert ledger.reclaim() == []
        process.kill()
        process.wait()
        (line,) = ledger.reclaim()
        assert (line.owner.pid, line.role, line.held_pages) == (process.pid, Role.ROLLOUT, 40)
    assert ledger.reclaim() == []
    assert ledger.used_pages == 0
    assert [line.owner for line in ledger.view().owners] == [account.owner]


def test_a_stopped_process_keeps_its_pages_and_hinders_nobody(
    path: Path, ledger: Ledger, account: Account
) -> None:
    with elsewhere(path, "account.acquire(40)") as process:
        process.send_signal(signal.SIGSTOP)
        assert ledger.reclaim() == []
        assert account.acquire(60) == 60
        process.kill()


def test_a_dead_main_thread_is_not_a_dead_process(path: Path, ledger: Ledger) -> None:
    """/proc shows a zombie, while another thread goes on with the memory."""
    code = (
        "import ctypes, threading; account.acquire(40)\n"
        "threading.Thread(target=lambda: time.sleep(60)).start()\n"
        "print('ready', flush=True)\n"
        f"ctypes.CDLL(None).syscall({60 if platform.machine() == 'x86_64' else 93}, 0)"  # exit, of one thread
    )
    with elsewhere(path, code) as process:
        deadline = time.monotonic() + 10
        while " Z " not in Path(f"/proc/{process.pid}/stat").read_text():
            assert time.monotonic() < deadline
        assert ledger.reclaim() == []
        process.kill()
        process.wait()
        assert len(ledger.reclaim()) == 1


def test_a_later_process_of_the_same_pid_does_not_keep_it_alive(ledger: Ledger, monkeypatch: Any) -> None:
    mine = Owner.myself()
    monkeypatch.setattr(Owner, "myself", lambda: Owner(mine.pid, mine.start_ticks - 1))
    ledger.join(Role.ROLLOUT, CAPACITY).acquire(9)
    ledger_module._joined.clear()
    assert [line.held_pages for line in ledger.reclaim()] == [9]


def test_what_cannot_be_seen_is_not_taken_for_dead(
    ledger: Ledger, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where /proc hides the processes of other users, or is not mounted."""

    def hidden(path: Path) -> bytes:
        raise FileNotFoundError(path)

    account.acquire(5)
    monkeypatch.setattr(Path, "read_bytes", hidden)
    assert ledger.reclaim() == []
    monkeypatch.setattr(os, "kill", lambda pid, number: (_ for _ in ()).throw(PermissionError))
    assert ledger.reclaim() == []


def test_a_process_joins_once_and_may_come_back(ledger: Ledger, account: Account, path: Path) -> None:
    with pytest.raises(LedgerError, match="already"):
        Ledger(path).join(Role.SERVING, CAPACITY)
    account.leave()
    with pytest.raises(OwnerGone):
        account.acquire(1)
    with pytest.raises(OwnerGone):
        account.leave()
    assert ledger.join(Role.SERVING, CAPACITY).acquire(1) == 1


def test_a_child_has_no_part_in_its_parents_account(ledger: Ledger, account: Account) -> None:
    def work() -> None:
        with pytest.raises(OwnerGone):
            account.acquire(1)
        with pytest.raises(OwnerGone):
            account.leave()
        assert ledger.join(Role.ROLLOUT, 5).acquire(5) == 5

    assert in_child(work) == 0
    assert [line.held_pages for line in ledger.reclaim()] == [5]
    assert ledger.used_pages == 0


def test_a_program_that_replaced_itself_does_not_count_twice(path: Path, ledger: Ledger) -> None:
    """exec keeps pid and start time, and loses all memory."""
    code = (
        "import os\n"
        "if len(sys.argv) == 2:\n"
        "    account.acquire(40)\n"
        "    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], 'again'])\n"
        "account.acquire(10)"
    )
    with elsewhere(path, code) as process:
        assert [line.held_pages for line in ledger.view().owners] == [10]
        process.kill()


def test_threads_of_one_process_do_not_mix_up_their_account(ledger: Ledger, account: Account) -> None:
    def work() -> None:
        for _ in range(500):
            if account.acquire(3):
                account.release(3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert account.held_pages == ledger.used_pages == 0


def test_no_slot_is_left_for_one_too_many(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Owner.myself()
    for index in range(OWNERS_MAX):
        monkeypatch.setattr(Owner, "myself", lambda index=index: Owner(mine.pid, 1 + index))
        ledger.join(Role.ROLLOUT, 1)
        ledger_module._joined.clear()
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="owners already"):
        ledger.join(Role.ROLLOUT, 1)
    assert len(ledger.reclaim()) == OWNERS_MAX
    ledger.join(Role.ROLLOUT, 1).leave()


# ---- killed between any two words ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def stepping(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_stepping(tmp_path_factory.mktemp("ledger"))


def life(library: Any, ledger: Ledger) -> None:
    """What an engine does in its life, by the stepping library on the same file."""
    address, identity = ledger._address, ledger_module._identity(Owner.myself(), Role.ROLLOUT)
    slot = library.rose_ledger_join(address, identity, 50)
    assert library.rose_ledger_acquire(address, slot, identity, 40, 40) == 40
    assert library.rose_ledger_release(address, slot, identity, 15) == 0
    assert library.rose_ledger_set_limit(address, slot, identity, 1, 30) == 0
    assert library.rose_ledger_acquire(address, slot, identity, 9, 1) == 5
    assert library.rose_ledger_leave(address, slot, identity) == 30


def test_an_engine_may_be_killed_at_any_access(ledger: Ledger, account: Account, stepping: Any) -> None:
    account.acquire(20)

    def work(accesses: int) -> None:
        stepping.test_kill_at(accesses)
        life(stepping, ledger)

    kills = 0
    while (status := in_child(partial(work, kills + 1))) == -signal.SIGKILL:
        kills += 1
        assert account.acquire(50, at_least=1) >= 40  # the others go on at once
        account.release(account.held_pages - 20)
        ledger.reclaim()
        assert ledger.view().owners == (account.line,)
        assert ledger.used_pages == 20
    assert status == 0
    assert kills > 40


def test_whoever_reclaims_may_be_killed_at_any_access(
    ledger: Ledger, account: Account, stepping: Any
) -> None:
    account.acquire(20)

    def die_holding(pages: int) -> None:
        ledger.join(Role.ROLLOUT, CAPACITY).acquire(pages)

    def reclaim(accesses: int) -> None:
        ledger_module._C = stepping
        stepping.test_kill_at(accesses)
        ledger.reclaim()

    kills = 0
    while True:
        assert in_child(partial(die_holding, 30)) == 0
        if (status := in_child(partial(reclaim, kills + 1))) != -signal.SIGKILL:
            break
        kills += 1
        ledger.reclaim()
        assert ledger.used_pages == 20
        assert ledger.view().owners == (account.line,)
    assert status == 0
    assert kills > 10
    assert ledger.used_pages == 20


def storm(tmp_path: Path, compiler: str, *runner: str) -> None:
    options = ("-static",) if runner else ()
    program = build(tmp_path, "ledger_storm", *options, sources=("ledger.c",), compiler=compiler)
    done = subprocess.run(
        [*runner, str(program), "5", "1500", "11"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    operations, _, _, _, kills, _ = done.stdout.split()
    assert int(operations) > 1000
    assert int(kills) > 3


def test_processes_in_a_storm_never_hold_more_than_there_is(tmp_path: Path) -> None:
    storm(tmp_path, "gcc")


def test_the_same_holds_for_code_for_arm64(tmp_path: Path) -> None:
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("qemu-aarch64 is not installed")
    storm(tmp_path, "aarch64-linux-gnu-gcc", "qemu-aarch64")


# ---- files ------------------------------------------------------------------------------------------


def test_whoever_comes_first_makes_the_file(path: Path) -> None:
    first = Ledger.create(path, CAPACITY)
    first.join(Role.SERVING, CAPACITY).acquire(3)
    ledger_module._joined.clear()
    assert Ledger.create(path, CAPACITY).used_pages == 3
    assert Ledger(path).page_bytes == 2 << 20
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600


def test_another_shape_is_refused(path: Path, ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="100 pages"):
        Ledger.create(path, CAPACITY + 1)
    with pytest.raises(LedgerError):
        Ledger.create(path, CAPACITY, 4096)


@pytest.mark.parametrize(("capacity", "page_bytes"), [(-1, 4096), (PAGES_MAX + 1, 4096), (1, 0)])
def test_a_senseless_shape_is_refused(path: Path, capacity: int, page_bytes: int) -> None:
    with pytest.raises(LedgerError):
        Ledger.create(path, capacity, page_bytes)
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"short", bytes(LEDGER_BYTES), b"\xff" * LEDGER_BYTES])
def test_another_file_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(LedgerError):
        Ledger(path)
    with pytest.raises(LedgerError):
        Ledger.create(path, CAPACITY)
    assert path.read_bytes() == content


def test_a_file_of_an_earlier_boot_is_refused(
    path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "scope", lambda: 1)
    with pytest.raises(LedgerError, match="boot"):
        Ledger(path)


def test_a_missing_file_is_said(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Ledger(path)


def test_without_the_library_the_import_says_what_to_do() -> None:
    code = (
        "import rose_kernels.library as library; library.built_library = lambda name: None\n"
        "import rose_kernels.arena\n"
        "import rose_kernels.arena.ledger"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: the page ledger needs the C library" in done.stderr
    assert "install a C compiler" in done.stderr


def test_a_library_of_another_version_is_refused() -> None:
    class Foreign:
        _name = "foreign.so"

    with pytest.raises(OSError, match="not of this version"):
        shared.declare(Foreign())
