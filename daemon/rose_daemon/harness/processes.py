"""Child processes that never outlive their parent: own process group, parent-death signal, log file."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from rose.errors import EngineFailed, TimedOut
from rose_daemon.node.warden import parents, remove_abandoned, shared_memory

_PR_SET_PDEATHSIG = 1
_LOG_TAIL_LINES = 400
LEFTOVERS_GRACE_S = 3.0
"""For what a process leaves in its group when it ends by itself."""


class Placement:
    """Where a child runs: the cores, and whether only while nobody else wants them (SCHED_IDLE)."""

    def __init__(self, cpus: Sequence[int] = (), *, idle: bool = False) -> None:
        self.cpus = frozenset(cpus)
        self.idle = idle

    def apply(self) -> None:
        """Place the calling process; children inherit it."""
        if self.cpus:
            os.sched_setaffinity(0, self.cpus)
        if self.idle:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class Child:
    """A running child process and its log."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.returncode is None

    def failure(self) -> EngineFailed:
        """What to tell the user about a child that ended unasked."""
        reason = last_error(self.log)
        code = self.process.returncode
        how = (
            f"was killed by signal {-code}"
            if code is not None and code < 0
            else f"ended with exit code {code}"
        )
        return EngineFailed(f"{self.name} {how}" + (f": {reason}" if reason else ""), f"see {self.log}")

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, and kill its process group when it has not after `grace_s`."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.process.wait()
                await self._group_ends(LEFTOVERS_GRACE_S)
        shared = shared_memory(group_members(self.process.pid))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        if shared:
            await self._group_ends(LEFTOVERS_GRACE_S)
            remove_abandoned(shared)

    async def _group_ends(self, grace_s: float) -> None:
        """Give the rest of the process group time to clean up, such as Python's tracker of shared memory."""
        deadline = time.monotonic() + grace_s
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, 0)
                await asyncio.sleep(0.05)


async def spawn(
    name: str,
    command: Sequence[str],
    log: Path,
    *,
    environ: Mapping[str, str],
    placement: Placement | None = None,
    stdin: int = asyncio.subprocess.DEVNULL,
    stdout: int | None = None,
) -> Child:
    """Start a child in its own process group; both its streams go to `log` unless `stdout` says else.

    Must be called in the main thread: the parent-death signal follows the thread that forks.
    Raises EngineFailed when the program cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    prepare = _before_exec(os.getpid(), placement or Placement())
    with log.open("ab") as stream:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=stdin,
                stdout=stream if stdout is None else stdout,
                stderr=stream,
                env=dict(environ),
                start_new_session=True,
                preexec_fn=prepare,
                limit=1 << 24,
            )
        except OSError as error:
            raise EngineFailed(f"{name} cannot be started: {command[0]}: {error.strerror}") from None
    return Child(name, process, log)


def group_members(group: int) -> list[int]:
    """Processes of a process group."""
    found = []
    for pid in parents():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == group:
                found.append(pid)
    return found


def _before_exec(parent: int, placement: Placement) -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the signal was set up
            os._exit(1)
        placement.apply()

    return prepare


def last_error(log: Path) -> str:
    """The line of a log that most likely says what went wrong: the last error, or else the last line."""
    try:
        with log.open(encoding="utf-8", errors="replace") as stream:
            lines = [line.strip() for line in deque(stream, _LOG_TAIL_LINES) if line.strip()]
    except OSError:
        return ""
    own = [line for line in lines if line.startswith(("rose: ", "rosed: "))]
    errors = [line for line in lines if "rror" in line and "Traceback" not in line]
    return (own or errors or lines or [""])[-1][:300]


async def until(
    what: str, check: Callable[[], Awaitable[bool]], timeout_s: float, period_s: float = 0.25
) -> None:
    """Poll until `check` says yes.  Raises TimedOut naming `what`."""
    deadline = time.monotonic() + timeout_s
    while not await check():
        if time.monotonic() > deadline:
            raise TimedOut(f"{what}: not ready after {timeout_s:.0f} s")
        await asyncio.sleep(period_s)
