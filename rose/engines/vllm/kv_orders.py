"""How the scheduler of an engine tells the worker, another process, which KV blocks are parked.

The blocks are in a file that is replaced as a whole; a board says that there is a new one, and its bell
wakes the worker.  Order of events: the file, the board, then the step that uses what was unparked.  So a
worker that looks at the board at the beginning of a step sees every block that the step may touch as in use.
Imports no vLLM.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np
from numpy.typing import NDArray

from rose.boards import Bell, BoardPaths, BoardWriter, WatchedBoard
from rose.core.readings import KvHolding, KvOrderReading, Unknown
from rose.engines.vllm.kv_layout import BlockRange, block_ranges
from rose.units import NS_PER_MS

Blocks = NDArray[np.bool_]
_LOOK_NS = 100 * NS_PER_MS
"""A look costs some microseconds, and there are steps every few milliseconds."""


class KvOrder(msgspec.Struct, frozen=True, array_like=True):
    """Which blocks nobody may use, as ranges; all others may be used."""

    revision: int
    parked: tuple[BlockRange, ...]


class OrderWriter:
    """The scheduler's end.  The first order parks nothing."""

    def __init__(self, boards: BoardPaths, engine: str) -> None:
        boards.run_dir.mkdir(parents=True, exist_ok=True)
        self._path = boards.kv_parked(engine)
        self._board = BoardWriter(boards.kv_order(engine), KvOrderReading)
        self.revision = 0
        self.give(())

    def give(self, parked: tuple[BlockRange, ...]) -> int:
        """Make this the order in force; its revision."""
        self.revision += 1
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.msgpack.encode(KvOrder(self.revision, parked)))
        new.replace(self._path)
        self._board.publish(KvOrderReading(time.monotonic_ns(), self.revision))
        self._board.bell.ring()
        return self.revision


class OrderReader:
    """The worker's end."""

    def __init__(self, boards: BoardPaths, engine: str) -> None:
        self._path = boards.kv_parked(engine)
        self._board = WatchedBoard(boards.kv_order(engine), KvOrderReading)
        self._latest: KvOrder | None = None

    @property
    def bell(self) -> Bell | None:
        """Rings with every order, once there is a scheduler."""
        return self._board.bell

    def read(self) -> KvOrder | Unknown:
        """The order in force, or why it is not known."""
        stamp = self._board.read(time.monotonic_ns(), None)
        if isinstance(stamp, Unknown):
            return stamp
        if self._latest is None or self._latest.revision != stamp.revision:
            try:
                self._latest = msgspec.msgpack.decode(self._path.read_bytes(), type=KvOrder)
            except (OSError, msgspec.MsgspecError):
                return Unknown("order_unreadable")
        # A newer file than the board says is an order whose announcement is under way.
        return self._latest if self._latest.revision >= stamp.revision else Unknown("order_missing")


class KvMemory:
    """The scheduler's view of its KV memory: orders what may be given back, and sees what was.

    Each rank of a tensor-parallel engine keeps a part of every block; all obey the same orders.

    Blocks that become parked are given back only when every step that was in flight then has ended: such a
    step may still write to them.  Blocks that are unparked are in force at once.
    """

    def __init__(self, boards: BoardPaths, engine: str, blocks: int, ranks: int = 1) -> None:
        self._boards = [WatchedBoard(boards.kv_holding(engine, rank), KvHolding) for rank in range(ranks)]
        self._looked_ns = time.monotonic_ns()
        self.holding: KvHolding | Unknown = self._read(self._looked_ns)
        """What the workers last said, all of them together, as of the latest `look`."""
        self.elastic = isinstance(self.holding, KvHolding)
        """Whether the worker put its KV cache into an arena; if not, orders reach nobody."""
        self._orders = OrderWriter(boards, engine) if self.elastic else None
        self._given: Blocks = np.zeros(blocks, np.bool_)
        self.given_back: Blocks = np.zeros(blocks, np.bool_)
        """Parked blocks whose memory is gone, as of the latest `look`."""
        self._pending: Blocks | None = None
        self._steps_before = 0

    def look(self, now_ns: int) -> None:
        """Read what the worker says: now and then, and always while it has something to do."""
        if self._orders is not None and (not self.settled or now_ns - self._looked_ns >= _LOOK_NS):
            self._looked_ns = now_ns
            self.holding = self._read(now_ns)
            if isinstance(self.holding, KvHolding) and self.holding.revision >= self._orders.revision:
                self.given_back = self._given.copy()

    def _read(self, now_ns: int) -> KvHolding | Unknown:
        """One holding: sums of bytes, and as far as the slowest worker is with its orders."""
        holdings: list[KvHolding] = []
        for board in self._boards:
            holding = board.read(now_ns, None)
            if isinstance(holding, Unknown):
                return holding
            holdings.append(holding)
        if len(holdings) == 1:
            return holdings[0]
        return KvHolding(
            stamp_ns=min(each.stamp_ns for each in holdings),
            revision=min(each.revision for each in holdings),
            page_bytes=holdings[0].page_bytes,
            arena_bytes=sum(each.arena_bytes for each in holdings),
            mapped_bytes=sum(each.mapped_bytes for each in holdings),
            resident_bytes=sum(each.resident_bytes for each in holdings),
            released_bytes=sum(each.released_bytes for each in holdings),
            release_ns=max(each.release_ns for each in holdings),
        )

    def order(self, parked: Blocks, steps_in_flight: int) -> None:
        """These blocks (true) are parked from now on, and no others."""
        if self._orders is None:
            return
        self._pending, self._steps_before = None, 0
        if steps_in_flight and bool((parked & ~self._given).any()):
            self._pending, self._steps_before = parked.copy(), steps_in_flight
            parked = parked & self._given
        self._give(parked)

    def step_ended(self) -> None:
        """A step with tokens has ended; they end in the order in which they began."""
        if self._pending is None:
            return
        self._steps_before -= 1
        if self._steps_before == 0:
            pending, self._pending = self._pending, None
            self._give(pending)

    def _give(self, parked: Blocks) -> None:
        if self._orders is not None and not np.array_equal(parked, self._given):
            self._given = parked.copy()
            self.given_back &= parked
            self._orders.give(block_ranges(np.flatnonzero(parked).tolist()))

    @property
    def settled(self) -> bool:
        """Whether what is parked is given back, as of the latest look; True where nothing ever is."""
        if self._orders is None:
            return True
        obeyed = isinstance(self.holding, KvHolding) and self.holding.revision >= self._orders.revision
        return obeyed and self._pending is None

    @property
    def resident_bytes(self) -> int:
        """Physical memory of the KV cache, as of the latest look; -1 if not known."""
        return self.holding.resident_bytes if isinstance(self.holding, KvHolding) else -1
