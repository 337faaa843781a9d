"""A worker under SCHED_IDLE for a while."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rose_daemon.bench import idle_priority as module
from rose_daemon.bench.idle_priority import idle_priority, why_not

THREADS = """
import threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def worker() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", THREADS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    process.kill()
    process.wait()
    process.stdout.close()


def policies(pid: int) -> list[int]:
    return [os.sched_getscheduler(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()]


def test_all_threads_go_and_come_back(worker: int) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with pytest.raises(RuntimeError), idle_priority([worker]):  # noqa: PT012 - looked at from within
        assert policies(worker) == [os.SCHED_IDLE] * 2
        raise RuntimeError
    assert policies(worker) == [os.SCHED_OTHER] * 2


def test_it_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, policy: int, param: os.sched_param) -> None:
        if policy == os.SCHED_OTHER:
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(module.os, "sched_setscheduler", refuse)
    assert "CAP_SYS_NICE" in why_not()


def test_a_process_that_ended_is_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with idle_priority([process.pid]):
        pass
