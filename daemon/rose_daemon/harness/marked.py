"""Finding every process of one stack by a mark in its environment.

Children inherit the mark, so grandchildren that moved to their own process group are found as well, and
nothing else ever is.  Standard library only: the reaper runs this with nothing else imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from rose_daemon.node.warden import remove_abandoned, shared_memory

MARK = "ROSE_STACK"


def marked_environ(stack_id: str) -> dict[str, str]:
    """Variables that mark a process as part of the stack.

    SPT_NOENV keeps setproctitle (vLLM renames its processes) from overwriting /proc/PID/environ.
    """
    return {MARK: stack_id, "SPT_NOENV": "1"}


def marked_pids(stack_id: str) -> list[int]:
    """Living processes of the stack, this one excepted, in order of pid."""
    mark = f"{MARK}={stack_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            # A zombie has no environment left to read, so it does not count as living.
            environ = (entry / "environ").read_bytes()
        except OSError:
            continue
        if mark in environ.split(b"\0"):
            found.append(int(entry.name))
    return sorted(found)


def end_marked(stack_id: str, grace_s: float) -> int:
    """Wait `grace_s` for the stack's processes to end, then kill what is left; how many were killed."""
    deadline = time.monotonic() + grace_s
    while marked_pids(stack_id) and time.monotonic() < deadline:
        time.sleep(0.1)
    killed = 0
    shared: set[Path] = set()
    # Again until none is left: a process may have been forked between two looks.
    while pids := marked_pids(stack_id):
        shared |= shared_memory(pids)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        time.sleep(0.05)
    remove_abandoned(shared)
    return killed
