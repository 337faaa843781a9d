"""What rosed makes of the ledger of shared KV memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rose_daemon.node.sharing import SharedMemory

from rose.core.events import MemoryObserved
from rose.core.readings import Unknown
from rose.units import NS_PER_S

arena = pytest.importorskip("rose_kernels.arena.ledger")
PAGE = 2 << 20

JOIN_AND_DIE = """
import os, sys
from pathlib import Path
from rose_kernels.arena.ledger import Ledger, Role
Ledger(Path(sys.argv[1])).join(Role.ROLLOUT, 100).acquire(30)
os._exit(0)
"""


def unknown(reason: str) -> MemoryObserved:
    return MemoryObserved(Unknown(reason), Unknown(reason), Unknown(reason))


def test_without_a_ledger_memory_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    shared = SharedMemory(path)
    assert shared.observe(0) == unknown("ledger_missing")
    path.write_bytes(b"something else")
    assert shared.observe(0) == unknown("ledger_unreadable")


def test_serving_and_free_pages_are_read_and_the_dead_are_cleared(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    account = arena.Ledger.create(path, 100).join(arena.Role.SERVING, 100)
    account.acquire(20)
    subprocess.run([sys.executable, "-c", JOIN_AND_DIE, str(path)], check=True)
    shared = SharedMemory(path)
    assert shared.observe(0) == MemoryObserved(20 * PAGE, 80 * PAGE, 100 * PAGE)
    account.acquire(10)
    assert shared.observe(1) == MemoryObserved(30 * PAGE, 70 * PAGE, 100 * PAGE)
    subprocess.run([sys.executable, "-c", JOIN_AND_DIE, str(path)], check=True)
    assert shared.observe(2).free_bytes == 40 * PAGE  # not every look asks who is dead
    assert shared.observe(NS_PER_S).free_bytes == 70 * PAGE
    account.leave()
    path.unlink()
    assert shared.observe(0) == unknown("ledger_missing")
