"""What an engine's blocks count as in the page ledger."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose.boards import BoardPaths
from rose.engines.vllm.kv_pages import SharedPages
from rose.engines.vllm.settings import PluginSettings
from rose.errors import ConfigError

ledger_module = pytest.importorskip("rose_kernels.arena.ledger")
MIB = 1 << 20
BLOCKS = 33


class Books:
    """A ledger with one account."""

    def __init__(self, capacity_pages: int) -> None:
        self.capacity_pages = self.free_pages = capacity_pages

    def acquire(self, pages: int) -> int:
        if pages > self.free_pages:
            return 0
        self.free_pages -= pages
        return pages

    def release(self, pages: int) -> None:
        self.free_pages += pages


def pages_of(capacity: int, **more: Any) -> tuple[SharedPages, Books]:
    books = Books(capacity)
    return SharedPages(books, books, **({"block_bytes": MIB} | more)), books


def parked_above(budget: int) -> np.ndarray:
    return np.arange(BLOCKS) > budget


def test_pages_are_charged_for_blocks_with_memory() -> None:
    pages, _ = pages_of(20)
    assert pages.charge(parked_above(0)) == 1  # the null block
    assert pages.charge(parked_above(3)) == 2
    assert pages.charge(parked_above(4)) == 3
    assert pages.charge(np.zeros(BLOCKS, np.bool_)) == 17


def test_a_group_that_is_partly_in_use_counts_whole() -> None:
    pages, _ = pages_of(20, group_blocks=8)
    mask = np.ones(BLOCKS, np.bool_)
    mask[[0, 9, 10]] = False
    assert pages.charge(mask) == 8
    mask[32] = False  # the last group has one block only
    assert pages.charge(mask) == 12


@pytest.mark.parametrize(("free", "budget"), [(17, 32), (10, 19), (2, 3), (1, 1), (0, 0)])
def test_as_many_blocks_as_there_are_pages_for(free: int, budget: int) -> None:
    pages, books = pages_of(free)
    assert pages.acquire_for(32, parked_above, 0) == budget
    assert pages.held == free - books.free_pages <= free
    assert pages.charge(parked_above(budget)) <= pages.held or budget == 0


def test_a_rollout_engine_leaves_the_headroom() -> None:
    pages, books = pages_of(20, leave_share=0.25)
    assert pages.acquire_for(32, parked_above, 0) == 29
    assert books.free_pages == 5
    books.acquire(3)
    assert pages.available == 0


def test_what_is_given_back_is_released() -> None:
    pages, books = pages_of(20)
    pages.acquire_for(32, parked_above, 0)
    pages.settle(parked_above(5))
    assert (pages.held, books.free_pages) == (3, 17)
    pages.settle(parked_above(5))
    assert pages.held == 3
    assert pages.acquire_for(9, parked_above, 5) == 9
    assert pages.held == 5


def test_when_a_neighbour_is_quicker_there_is_less() -> None:
    pages, books = pages_of(10)
    acquire = books.acquire

    def too_late(wanted: int) -> int:
        books.acquire = acquire  # type: ignore[method-assign]
        books.free_pages -= 4
        return 0

    books.acquire = too_late  # type: ignore[method-assign]
    assert pages.acquire_for(19, parked_above, 0) == 11
    assert (pages.held, books.free_pages) == (6, 0)


def settings(run_dir: Path, role: str, shared: int) -> PluginSettings:
    return PluginSettings(role=role, name=role, run_dir=str(run_dir), token_file="", kv_shared_bytes=shared)  # type: ignore[arg-type]


NEIGHBOUR = """
import sys
from pathlib import Path
from rose.engines.vllm.kv_pages import SharedPages
from rose.engines.vllm.settings import PluginSettings
shared = {"token_file": "", "kv_shared_bytes": 20 << 20}
settings = PluginSettings(role="rollout", name="r", run_dir=sys.argv[1], **shared)
pages = SharedPages.join(settings, 1 << 20, 1)
import numpy as np
print(pages.acquire_for(32, lambda budget: np.arange(33) > budget, 0), flush=True)
sys.stdin.read()
"""


def test_two_engines_share_a_real_ledger(run_dir: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR, str(run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin
    assert child.stdout
    try:
        assert child.stdout.readline() == "15\n"  # 8 of 10 pages; one block of them is the null block
        serving = SharedPages.join(settings(run_dir, "serving", 20 * MIB), MIB, 1)
        assert serving.available == 2
        assert serving.acquire_for(32, parked_above, 0) == 3
    finally:
        child.stdin.close()
        child.wait(10)
    ledger = ledger_module.Ledger(BoardPaths(run_dir).ledger)
    ledger.reclaim()
    assert serving.acquire_for(32, parked_above, 3) == 19
    serving._account.leave()  # type: ignore[attr-defined]


def test_another_size_is_refused(run_dir: Path) -> None:
    ledger_module.Ledger.create(BoardPaths(run_dir).ledger, 7)
    with pytest.raises(ConfigError, match="7 pages"):
        SharedPages.join(settings(run_dir, "serving", 20 * MIB), MIB, 1)


def test_a_damaged_ledger_is_refused(run_dir: Path) -> None:
    BoardPaths(run_dir).ledger.write_bytes(b"no ledger")
    with pytest.raises(ConfigError, match="cannot be shared"):
        SharedPages.join(settings(run_dir, "serving", 20 * MIB), MIB, 1)
