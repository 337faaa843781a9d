"""Orders about parked blocks between two processes: when they take effect, and what a reader may believe."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from rose.boards import BoardPaths, BoardWriter
from rose.core.readings import KvHolding, KvOrderReading, Unknown
from rose.engines.vllm.kv_orders import KvMemory, KvOrder, OrderReader, OrderWriter

BLOCKS = 16


class Worker:
    """Stands in for the worker: says what it holds when told to."""

    def __init__(self, boards: BoardPaths) -> None:
        self.board = BoardWriter(boards.kv_holding("r0"), KvHolding)
        self.orders = OrderReader(boards, "r0")
        self.say(0)

    def say(self, revision: int, resident: int = 0) -> None:
        stamp = time.monotonic_ns()
        self.board.publish(KvHolding(stamp, revision, 4096, 1 << 20, 1 << 20, resident, 0, 0))

    @property
    def parked(self) -> set[int]:
        order = self.orders.read()
        assert isinstance(order, KvOrder)
        return {block for first, end in order.parked for block in range(first, end)}


@pytest.fixture
def boards(tmp_path: Path) -> BoardPaths:
    return BoardPaths(tmp_path)


@pytest.fixture
def worker(boards: BoardPaths) -> Worker:
    return Worker(boards)


@pytest.fixture
def memory(boards: BoardPaths, worker: Worker) -> KvMemory:
    return KvMemory(boards, "r0", BLOCKS)


def mask(*blocks: int) -> np.ndarray:
    parked = np.zeros(BLOCKS, np.bool_)
    parked[list(blocks)] = True
    return parked


def test_at_first_nothing_is_parked(worker: Worker, memory: KvMemory) -> None:
    assert memory.elastic
    assert worker.parked == set()


def test_without_an_arena_orders_reach_nobody(boards: BoardPaths) -> None:
    memory = KvMemory(boards, "r0", BLOCKS)
    memory.order(mask(3), 0)
    memory.step_ended()
    memory.look(time.monotonic_ns())
    assert (memory.elastic, memory.settled, memory.resident_bytes) == (False, True, -1)
    assert not boards.kv_parked("r0").exists()


def test_parking_waits_for_the_steps_in_flight(worker: Worker, memory: KvMemory) -> None:
    memory.order(mask(3, 4), 2)
    assert worker.parked == set()
    memory.step_ended()
    assert worker.parked == set()
    assert not memory.settled
    memory.step_ended()
    assert worker.parked == {3, 4}


def test_unparking_does_not_wait(worker: Worker, memory: KvMemory) -> None:
    memory.order(mask(3, 4, 5), 0)
    assert worker.parked == {3, 4, 5}
    memory.order(mask(4, 9), 1)  # 3 and 5 may be used by the next step; 9 may be used by the one in flight
    assert worker.parked == {4}
    memory.step_ended()
    assert worker.parked == {4, 9}


def test_a_block_that_is_unparked_before_its_memory_went_stays(worker: Worker, memory: KvMemory) -> None:
    memory.order(mask(3, 4), 1)
    memory.order(mask(4), 2)
    memory.step_ended()
    assert worker.parked == set()
    memory.step_ended()
    assert worker.parked == {4}
    memory.order(mask(), 3)
    for _ in range(4):
        memory.step_ended()
    assert worker.parked == set()


def test_settled_means_that_the_worker_gave_it_back(worker: Worker, memory: KvMemory) -> None:
    memory.order(mask(7), 0)
    memory.look(time.monotonic_ns())
    assert not memory.settled
    order = worker.orders.read()
    assert isinstance(order, KvOrder)
    worker.say(order.revision, resident=777)
    memory.look(time.monotonic_ns())
    assert memory.settled
    assert memory.resident_bytes == 777


def test_the_same_order_again_is_no_order(worker: Worker, memory: KvMemory) -> None:
    memory.order(mask(7), 0)
    first = worker.orders.read()
    memory.order(mask(7), 0)
    assert worker.orders.read() == first


def test_a_reader_believes_no_order_older_than_announced(boards: BoardPaths) -> None:
    writer, reader = OrderWriter(boards, "r0"), OrderReader(boards, "r0")
    writer.give(((1, 3),))
    stale = boards.kv_parked("r0").read_bytes()
    assert reader.read() == KvOrder(2, ((1, 3),))
    writer.give(())
    boards.kv_parked("r0").write_bytes(stale)
    assert reader.read() == Unknown("order_missing")


def test_an_order_whose_announcement_is_under_way_counts(boards: BoardPaths) -> None:
    writer, reader = OrderWriter(boards, "r0"), OrderReader(boards, "r0")
    writer.give(((1, 3),))
    BoardWriter(boards.kv_order("r0"), KvOrderReading).publish(KvOrderReading(0, 1))
    assert reader.read() == KvOrder(2, ((1, 3),))


@pytest.mark.parametrize("damage", [b"", b"\xff\xff", b"\x92\x02\xa1x"])
def test_a_damaged_list_is_unknown(boards: BoardPaths, damage: bytes) -> None:
    writer, reader = OrderWriter(boards, "r0"), OrderReader(boards, "r0")
    writer.give(((1, 3),))
    boards.kv_parked("r0").write_bytes(damage)
    assert reader.read() == Unknown("order_unreadable")
    boards.kv_parked("r0").unlink()
    assert reader.read() == Unknown("order_unreadable")


def test_without_a_scheduler_there_is_no_order(boards: BoardPaths) -> None:
    assert OrderReader(boards, "r0").read() == Unknown("board_missing")
