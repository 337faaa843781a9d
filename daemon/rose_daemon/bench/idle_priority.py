"""The operating system's own way to protect serving: the rollout worker under SCHED_IDLE for a while."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

_NONE = os.sched_param(0)


def why_not() -> str:
    """Why this process cannot bring a worker under SCHED_IDLE and back; empty if it can.

    Linux lets anybody go there, but only a process with CAP_SYS_NICE (or enough RLIMIT_NICE) come back.
    """
    found: list[OSError] = []

    def there_and_back() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, _NONE)
            os.sched_setscheduler(0, os.SCHED_OTHER, _NONE)
        except OSError as error:
            found.append(error)

    scout = threading.Thread(target=there_and_back)
    scout.start()
    scout.join()
    return f"leaving SCHED_IDLE needs CAP_SYS_NICE or RLIMIT_NICE: {found[0].strerror}" if found else ""


@contextlib.contextmanager
def idle_priority(pids: Iterable[int]) -> Iterator[None]:
    """Have every thread of these processes run only while nobody else wants the core.

    Raises OSError when that is not allowed.
    """
    wanted = list(pids)
    try:
        for pid in wanted:
            _schedule(pid, os.SCHED_IDLE)
        yield
    finally:
        for pid in wanted:
            _schedule(pid, os.SCHED_OTHER)


def _schedule(pid: int, policy: int) -> None:
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(ProcessLookupError):  # that thread ended meanwhile
            os.sched_setscheduler(int(task.name), policy, _NONE)
