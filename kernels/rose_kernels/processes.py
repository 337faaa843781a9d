"""Which process is meant, and whether it is gone for certain."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

_STATE, _THREADS, _START = 0, 17, 19  # fields 3, 20 and 22 of proc(5), counted from behind the name


def _stat(pid: int) -> list[bytes]:
    """What proc(5) says of a process, from its state on; raises OSError."""
    text = Path(f"/proc/{pid}/stat").read_bytes()  # a process may have any bytes for a name
    return text.rpartition(b")")[2].split()


def process_start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot (proc(5), field 22), or 0 if it is gone.

    Pid and start time together name a process for ever; a pid alone is reused.
    """
    try:
        fields = _stat(pid)
    except OSError:
        return 0
    return 0 if fields[_STATE] in b"ZX" else int(fields[_START])


class Owner(NamedTuple):
    """A process, named so that no later one can be taken for it."""

    pid: int
    start_ticks: int

    @classmethod
    def myself(cls) -> Owner:
        """The calling process."""
        pid = os.getpid()
        return cls(pid, process_start_ticks(pid))

    def alive(self) -> bool:
        """Whether that very process still runs (a zombie does not)."""
        return self.start_ticks != 0 and process_start_ticks(self.pid) == self.start_ticks

    def has_exited(self) -> bool:
        """Whether it is proven that the process is over, with all its threads, and so holds no memory.

        Stricter than `not alive()`: where nothing can be learned about it, it has not exited.  Only for
        owners of this pid namespace, see `scope`.
        """
        try:
            fields = _stat(self.pid)
        except OSError:
            return _no_such_process(self.pid)
        if int(fields[_START]) != self.start_ticks:
            return True
        # A main thread that ended before the others is a zombie too, and the process goes on.
        return fields[_STATE] in b"ZX" and int(fields[_THREADS]) <= 1


def _no_such_process(pid: int) -> bool:
    """Ask the kernel itself: /proc may be hidden from us (hidepid) or not mounted."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False


def scope() -> int:
    """64 bits that are equal where pids mean the same: one boot of one machine, one pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    digest = hashlib.blake2b(boot + str(namespace).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
