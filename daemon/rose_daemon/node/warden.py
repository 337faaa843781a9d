"""A small process between rosed and one engine: it keeps the log, and leaves nothing behind.

Run by file path (`python -I -S warden.py LOG LOG_BYTES_MAX GRACE_S -- ARGV...`), standard library only, so
that it starts in milliseconds and stays small.  An engine is several processes (API server, core, workers)
and a killed API server leaves the others running.  The warden therefore is a child subreaper: whatever the
engine started comes back to it when orphaned, and all of it is killed before the warden exits.

- Standard input is the lifeline.  rosed holds the other end; when rosed dies, even by SIGKILL, it closes
  and the warden ends the engine: SIGTERM, GRACE_S seconds, SIGKILL.
- ROSE_WARDEN_ADOPTION in its own environment (JSON: grace_s, directory, record, body) gives the engine a
  grace after that.  Before the engine is started, RECORD is written: BODY, and how to find this warden.  A
  later rosed connects to the socket named there and is the lifeline from then on; if none comes within
  grace_s, the engine ends as above.  A warden that was told to stop before gives no grace.
- SIGTERM: terminate the engine.  SIGUSR1: kill it.
- If the warden itself dies, the kernel sends the engine's first process SIGTERM (PR_SET_PDEATHSIG).
- ROSE_WARDEN_BEFORE_KILL in its own environment (a JSON list) is run as a script, with the pids added, before
  anything is killed.  While it fails nothing is: what shares a GPU through MPS would damage the others.
- The engine's output goes to LOG; past LOG_BYTES_MAX the file becomes LOG.1 and a new one is begun.

Exit code: the engine's own, or 128 + signal; 127 when the command could not be started.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

BEFORE_KILL = "ROSE_WARDEN_BEFORE_KILL"
ADOPTION = "ROSE_WARDEN_ADOPTION"
ADOPTED = b"adopted\n"
"""What a warden says to the rosed that is its lifeline from then on; at its end the exit code follows."""
_RETRY_S = 5.0
KILL = signal.SIGUSR1
"""What tells a warden to kill its engine at once."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_READ_BYTES = 1 << 16
_STAT_BYTES_MAX = 4096
_LAST_WORK_S = 2.0
"""What an engine that ended in order leaves its helpers, to end by themselves."""
_MULTIPROCESSING = ("/dev/shm/psm_", "/dev/shm/sem.mp-")


class BoundedLog:
    """A log file that never holds more than about twice `bytes_max` on disk."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._file = self._open()

    def _open(self) -> BinaryIO:
        return self._path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append; a full disk, or a log that cannot be rotated, loses log lines, never the engine."""
        with contextlib.suppress(OSError):
            if self._file.tell() + len(data) > self._bytes_max:
                self._rotate()
            self._file.write(data)

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # somebody deleted it
            self._path.replace(self._path.with_suffix(".log.1"))
        # The old file stays open until there is a new one, so that a failure here costs no more than lines.
        former, self._file = self._file, self._open()
        former.close()


class Nursery:
    """Where a later rosed finds the warden of an engine that has lost its own.  Raises OSError."""

    def __init__(self, grace_s: float, directory: str, record: str, body: dict[str, Any]) -> None:
        self.grace_s = grace_s
        self._record = Path(record)
        self._path = Path(directory) / f"warden-{os.getpid()}.sock"
        self._path.unlink(missing_ok=True)  # of a former process of our pid
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self._path))
        self._path.chmod(0o600)
        self.listener.listen()
        stat = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        self._body = {**body, "pid": os.getpid(), "start_ticks": int(stat[19]), "socket": str(self._path)}
        draft = self._record.with_name(f".{self._record.name}.{os.getpid()}")
        draft.write_text(json.dumps(self._body))
        draft.chmod(0o600)
        draft.replace(self._record)

    def close(self) -> None:
        """Take socket and record away, unless the record is another warden's by now."""
        self.listener.close()
        with contextlib.suppress(OSError, ValueError):
            self._path.unlink(missing_ok=True)
            if json.loads(self._record.read_bytes()) == self._body:
                self._record.unlink()


class Warden:
    """Runs one engine to its end."""

    def __init__(
        self,
        argv: list[str],
        log: BoundedLog,
        grace_s: float,
        before_kill: tuple[str, ...] = (),
        nursery: Nursery | None = None,
    ) -> None:
        self._nursery = nursery
        self._parent: socket.socket | None = None
        """The lifeline of an engine that was adopted."""
        self._orphan_until: float | None = None
        """Set while there is no lifeline, and one may come."""
        self._argv = argv
        self._before_kill = before_kill
        self._log = log
        self._grace_s = grace_s
        self._kill_at: float | None = None
        self._stop_wanted = False
        self._has_lifeline = True
        self._wake = -1
        self._engine: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Start the engine, wait for its end, kill what it left; the exit code."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._wake, wake_up = os.pipe()
        os.set_blocking(wake_up, False)
        signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to be woken
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(KILL, self._on_kill)
        try:
            engine = subprocess.Popen(  # one thread here, so preexec_fn is safe
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),  # noqa: PLW1509
            )
        except OSError as error:
            self._log.write(f"rosed: cannot start {self._argv[0]}: {error}\n".encode())
            return 127
        self._engine = engine
        if self._stop_wanted:  # told to stop while starting
            self._terminate()
        self._watch(engine)
        self._let_helpers_end(engine.pid)
        self._kill_all()
        self._drain(engine)
        code = engine.wait()
        self._last_words(code if code >= 0 else 128 - code)
        return code if code >= 0 else 128 - code

    def _last_words(self, code: int) -> None:
        """Tell a rosed that is not our parent how the engine ended."""
        if self._parent is not None:
            with contextlib.suppress(OSError):
                self._parent.sendall(b"%d\n" % code)

    def _watch(self, engine: subprocess.Popen[bytes]) -> None:
        """Copy output until the engine's first process has ended."""
        assert engine.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(engine.stdout, selectors.EVENT_READ, self._on_output)
            selector.register(sys.stdin.buffer, selectors.EVENT_READ, self._on_lifeline)
            selector.register(self._wake, selectors.EVENT_READ, self._on_wake)
            if self._nursery is not None:
                selector.register(self._nursery.listener, selectors.EVENT_READ, self._on_newcomer)
            while not self._reap(engine.pid):
                for key, _ in selector.select(self._patience_s()):
                    if not key.data(key.fd):
                        selector.unregister(key.fileobj)
                if self._parent is not None and self._parent.fileno() not in selector.get_map():
                    selector.register(self._parent, selectors.EVENT_READ, self._on_lifeline)
                if self._orphan_until is not None and time.monotonic() >= self._orphan_until:
                    self._orphan_until = None
                    self._end_unasked(b"rosed is gone and none came: stopping the engine\n")
                if self._kill_wanted():
                    self._kill_all()

    def _let_helpers_end(self, engine_pid: int) -> None:
        """After an orderly end, wait a moment for what the engine started.

        Python's tracker of shared memory removes what is left once the last user has closed its pipe.  Killed
        right away it cannot, and what nobody has mapped any more is not found by `_kill_all` either.
        """
        ended = os.waitid(os.P_PID, engine_pid, os.WEXITED | os.WNOWAIT)
        if ended is None or ended.si_code != os.CLD_EXITED:
            return
        until = time.monotonic() + _LAST_WORK_S
        while not self._kill_wanted() and time.monotonic() < until and descendants(os.getpid()):
            time.sleep(0.01)

    def _kill_wanted(self) -> bool:
        return self._kill_at is not None and time.monotonic() >= self._kill_at

    def _drain(self, engine: subprocess.Popen[bytes]) -> None:
        """Log the last words; nobody is left to write more."""
        assert engine.stdout is not None
        while self._on_output(engine.stdout.fileno()):
            pass

    def _patience_s(self) -> float | None:
        instants = [at for at in (self._kill_at, self._orphan_until) if at is not None]
        return max(0.0, min(instants) - time.monotonic()) if instants else None

    @staticmethod
    def _reap(engine_pid: int) -> bool:
        """Collect adopted children that ended; True once the engine itself has (Popen collects that one)."""
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == engine_pid:
                return True
            os.waitpid(ended.si_pid, 0)
        return False

    @staticmethod
    def _on_wake(descriptor: int) -> bool:
        return bool(os.read(descriptor, _READ_BYTES))

    def _on_output(self, descriptor: int) -> bool:
        data = os.read(descriptor, _READ_BYTES)
        self._log.write(data)
        return bool(data)

    def _on_lifeline(self, descriptor: int) -> bool:
        try:
            alive = bool(os.read(descriptor, _READ_BYTES))
        except ConnectionResetError:
            alive = False
        if not alive:
            self._bereaved()
        return alive

    def _bereaved(self) -> None:
        """The lifeline broke.  Whoever comes next is accepted only after this."""
        self._has_lifeline, self._parent = False, None
        if self._nursery is None or self._stop_wanted:
            self._end_unasked(b"rosed is gone: stopping the engine\n")
            return
        self._orphan_until = time.monotonic() + self._nursery.grace_s
        self._log.write(b"rosed is gone: waiting %g s for another one\n" % self._nursery.grace_s)

    def _end_unasked(self, why: bytes) -> None:
        self._log.write(why)
        self._stop_wanted = True
        self._terminate()
        self._kill_at = time.monotonic() + self._grace_s

    def _on_newcomer(self, _descriptor: int) -> bool:
        """Another rosed: the lifeline from now on, if there is none.  It asks again if it was too early."""
        assert self._nursery is not None
        newcomer, _ = self._nursery.listener.accept()
        if self._has_lifeline or self._stop_wanted:
            newcomer.close()
            return True
        try:
            newcomer.sendall(ADOPTED)
        except OSError:
            newcomer.close()
            return True
        self._parent, self._has_lifeline, self._orphan_until = newcomer, True, None
        self._log.write(b"another rosed has come: the engine stays\n")
        return True

    def _on_term(self, _signal: int, _frame: FrameType | None) -> None:
        self._stop_wanted = True
        self._terminate()

    def _on_kill(self, _signal: int, _frame: FrameType | None) -> None:
        self._stop_wanted = True
        self._kill_at = 0.0

    def _terminate(self) -> None:
        # Not through Popen, which would collect the exit status that `_reap` waits for.
        if self._engine is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._engine.pid, signal.SIGTERM)

    def _kill_all(self) -> None:
        """SIGKILL every descendant, until none is left: a process may fork while it is being hunted.

        Python's tracker of shared memory is one of them, so its work is done here.
        """
        shared: set[Path] = set()
        while victims := descendants(os.getpid()):
            if not self._may_kill(victims):
                time.sleep(_RETRY_S)
                continue
            shared |= shared_memory(victims)
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        remove_abandoned(shared)

    def _may_kill(self, victims: list[int]) -> bool:
        """Whether the victims were taken off whatever they share."""
        if not self._before_kill:
            return True
        command = [sys.executable, "-I", "-S", *self._before_kill, *map(str, victims)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode:
            self._log.write(b"rosed: nothing is killed: " + done.stderr + b"\n")
        return done.returncode == 0


def parents() -> dict[int, int]:
    """pid -> parent pid of every process that runs (proc(5): fields 3 and 4 of stat, after the name)."""
    found: dict[int, int] = {}
    # rosed asks every second, of hundreds of processes: with pathlib it would take three times as long.
    with os.scandir("/proc") as entries:
        for name in (entry.name for entry in entries if entry.name.isdigit()):
            with contextlib.suppress(OSError):
                # Bytes, as a name is cut at 15 of them, in the middle of a letter too.
                state, parent = _read(f"/proc/{name}/stat").rpartition(b")")[2].split(maxsplit=2)[:2]
                if state not in b"ZX":
                    found[int(name)] = int(parent)
    return found


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _STAT_BYTES_MAX)
    finally:
        os.close(descriptor)


def descendants(pid: int, parent_of: Mapping[int, int] | None = None) -> list[int]:
    """Children of a process, their children, and so on; `parent_of` is a recent answer of `parents`."""
    known = parents() if parent_of is None else parent_of
    found: list[int] = []
    level = {pid}
    while level:
        level = {child for child, parent in known.items() if parent in level}
        found += level
    return found


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """Files of Python's multiprocessing (shared memory and semaphores) that these processes have mapped."""
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                path = line.split(maxsplit=5)[5:]
                if path and path[0].startswith(_MULTIPROCESSING):
                    found.add(Path(path[0]))
    return found


def remove_abandoned(files: set[Path]) -> None:
    """Remove those of `files` that no living process has mapped."""
    if left := {path for path in files if path.exists()}:
        for path in left - shared_memory(parents()):
            with contextlib.suppress(OSError):
                path.unlink()


def main() -> None:
    """Entry point; see the module's docstring."""
    log, bytes_max, grace_s, separator, *argv = sys.argv[1:]
    assert separator == "--"
    before_kill = tuple(json.loads(os.environ.pop(BEFORE_KILL, "[]")))
    bounded = BoundedLog(Path(log), int(bytes_max))
    adoption = json.loads(os.environ.pop(ADOPTION, "null"))
    nursery: Nursery | None = None
    if adoption is not None:
        try:
            nursery = Nursery(**adoption)
        except OSError as error:  # no worse than without: the engine ends with its rosed
            bounded.write(f"rosed: the engine cannot be adopted: {error}\n".encode())
    try:
        sys.exit(Warden(argv, bounded, float(grace_s), before_kill, nursery).run())
    finally:
        if nursery is not None:
            nursery.close()


if __name__ == "__main__":
    main()
