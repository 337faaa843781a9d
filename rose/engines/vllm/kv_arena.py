"""The worker's side of elastic KV memory: the cache lies in an arena, parked blocks are given back.

vLLM allocates its whole KV cache by one `torch.zeros` inside the context that the worker offers.  Ours
answers it with a tensor over an arena; blocks that the scheduler parks are then given back by a thread, in
slices, while steps go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from rose_kernels.arena.base import Arena
from rose_kernels.arena.host import SLICE_BYTES
from torch.overrides import TorchFunctionMode

from rose.boards import BoardPaths, BoardWriter
from rose.core.readings import KvHolding, Unknown
from rose.engines.vllm.kv_layout import KvLayout, page_runs
from rose.engines.vllm.kv_orders import KvOrder, OrderReader
from rose.units import NS_PER_MS, NS_PER_S

_MEASURE_NS = NS_PER_S
"""Period of measuring when nothing is ordered: pages become resident as steps touch them."""
_MEASURE_SHARE = 100
"""At most one part in so many of the time is spent on measuring."""
_NO_BELL_POLL_NS = 5 * NS_PER_MS
_READS_MAX = 100
_NO_REVISION = -1


class ArenaAllocation(TorchFunctionMode):
    """While entered, answers the one allocation of the KV cache, int8 zeros of the tensor's size, with it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor
        self.answered = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As torch, but for that allocation."""
        kwargs = kwargs or {}
        asked = func is torch.zeros and kwargs.get("dtype") is torch.int8
        if asked and args == (self._tensor.numel(),) and not self.answered:
            self.answered = True
            return self._tensor
        return func(*args, **kwargs)


class KvHolder:
    """Keeps memory behind the blocks in use and gives back that of parked ones, as the scheduler orders.

    One lock orders the thread that gives back and the one that runs steps: a step waits for one slice at
    most, and only if the order is new to it.  A page that an order in force needs is never given back.
    """

    def __init__(
        self, arena: Arena, layout: KvLayout, boards: BoardPaths, engine: str, rank: int = 0
    ) -> None:
        self._arena = arena
        self._layout = layout
        self._orders = OrderReader(boards, engine)
        boards.run_dir.mkdir(parents=True, exist_ok=True)
        self._board = BoardWriter(boards.kv_holding(engine, rank), KvHolding)
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        pages = -(-layout.size_bytes // arena.page_bytes)
        arena.ensure(0, pages)
        self._mapped = np.ones(pages, np.bool_)
        self._in_use = np.ones(pages, np.bool_)
        self._revision = self._said_revision = 0
        self._released_bytes = self._release_ns = 0
        self._publish(0, arena.resident_bytes())
        threading.Thread(target=self._serve, name="rose-kv", daemon=True).start()

    def before_step(self) -> None:
        """Put memory behind every block that the step may use."""
        for _ in range(_READS_MAX):
            order = self._orders_read()
            if not isinstance(order, Unknown):
                self._obey(order)
                return
        # Never seen, as orders are rare; to keep all memory is wrong for nobody's tokens.
        self._obey(KvOrder(_NO_REVISION, ()))

    def _orders_read(self) -> KvOrder | Unknown:
        with self._reading:
            return self._orders.read()

    def _obey(self, order: KvOrder) -> None:
        if order.revision == self._revision:
            return
        with self._lock:
            in_use = self._layout.pages_in_use(order.parked, self._arena.page_bytes)
            for first, count in page_runs(in_use & ~self._mapped, in_use.size):
                self._arena.ensure(first, count)
                self._mapped[first : first + count] = True
            self._in_use, self._revision = in_use, order.revision

    def _release(self) -> None:
        """Give back everything that no order in force needs, slice by slice."""
        slice_pages = max(1, SLICE_BYTES // self._arena.page_bytes)
        for first, count in page_runs(self._mapped & ~self._in_use, slice_pages):
            with self._lock:
                pages = slice(first, first + count)
                if self._in_use[pages].any():
                    continue  # ordered back meanwhile; what is left of the slice goes with the next round
                self._arena.release(first, count)
                self._mapped[pages] = False

    # ---- the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        measured_ns = 0
        while True:
            bell = self._orders.bell
            heard = bell.count if bell else 0
            order = self._orders_read()
            began_ns = time.monotonic_ns()
            if not isinstance(order, Unknown):
                self._obey(order)
            due = bool((self._mapped & ~self._in_use).any())
            if due or self._said_revision != self._revision or began_ns >= measured_ns:
                measured_ns = self._round(began_ns, release=due)
            elif bell:
                bell.wait(heard, max(1, measured_ns - time.monotonic_ns()))
            else:
                time.sleep(_NO_BELL_POLL_NS / NS_PER_S)

    def _round(self, began_ns: int, *, release: bool) -> int:
        """Give back if asked, measure and say so; when to measure next."""
        revision = self._revision
        resident = self._arena.resident_bytes()
        if release:
            self._release()
            after = self._arena.resident_bytes()
            self._released_bytes += max(0, resident - after)
            self._release_ns = time.monotonic_ns() - began_ns
            resident = after
        if not (self._mapped & ~self._in_use).any():
            self._said_revision = revision
        self._publish(self._said_revision, resident)
        ended_ns = time.monotonic_ns()
        return ended_ns + max(_MEASURE_NS, _MEASURE_SHARE * (ended_ns - began_ns))

    def _publish(self, revision: int, resident_bytes: int) -> None:
        page_bytes = self._arena.page_bytes
        self._board.publish(
            KvHolding(
                stamp_ns=time.monotonic_ns(),
                revision=revision,
                page_bytes=page_bytes,
                arena_bytes=self._layout.size_bytes,
                mapped_bytes=int(np.count_nonzero(self._mapped)) * page_bytes,
                resident_bytes=resident_bytes,
                released_bytes=self._released_bytes,
                release_ns=self._release_ns,
            )
        )
