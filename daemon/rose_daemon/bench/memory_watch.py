"""What `rose bench memory` sees while serving and rollout share memory: ledger, boards, processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rose_kernels.arena.ledger import Ledger

from rose.boards import BoardPaths, WatchedBoard
from rose.core.readings import KvHolding, Unknown
from rose.units import NS_PER_MS
from rose_daemon.node.warden import descendants, parents

_PERIOD_S = 0.004
ENOUGH_BACK = 0.5
"""Share of what was lent that a burst must get back."""


class Sample(msgspec.Struct, frozen=True):
    """The shared memory at one instant, in bytes."""

    at_ns: int
    free: int
    """By the ledger."""
    serving_kv: int
    """Physical memory behind the KV caches, as the workers measured it; -1 if not known."""
    rollout_kv: int
    serving_rss: int
    """Anonymous memory of the workers, as the kernel counts it."""
    rollout_rss: int


class MemoryWatch:
    """Takes samples in a thread, from `start` to `stop`."""

    def __init__(self, boards: BoardPaths, serving: str, replica: str, worker_pids: Sequence[int]) -> None:
        self._ledger = Ledger(boards.ledger)
        self._serving = WatchedBoard(boards.kv_holding(serving), KvHolding)
        self._rollout = WatchedBoard(boards.kv_holding(replica), KvHolding)
        self._pids = worker_pids
        self._samples: list[Sample] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def capacity_bytes(self) -> int:
        """All there is to share."""
        return self._ledger.capacity_pages * self._ledger.page_bytes

    def look(self) -> Sample:
        """One sample."""
        now_ns = time.monotonic_ns()
        serving, rollout = (board.read(now_ns, None) for board in (self._serving, self._rollout))
        serving_rss, rollout_rss = (anonymous_bytes(pid) for pid in self._pids)
        free = self._ledger.free_pages * self._ledger.page_bytes
        return Sample(now_ns, free, _resident(serving), _resident(rollout), serving_rss, rollout_rss)

    def start(self) -> None:
        """Begin anew."""
        self._samples, self._stopped = [], threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> list[Sample]:
        """The samples since `start`."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        return self._samples

    def _run(self) -> None:
        while not self._stopped.wait(_PERIOD_S):
            self._samples.append(self.look())


def _resident(holding: KvHolding | Unknown) -> int:
    return -1 if isinstance(holding, Unknown) else holding.resident_bytes


def anonymous_bytes(pid: int) -> int:
    """Anonymous memory of a process; 0 if it is gone."""
    return _field(Path(f"/proc/{pid}/status"), "RssAnon:")


def pss_bytes(pid: int) -> int:
    """Proportional share of memory of a process and its descendants: what they share counts once."""
    return sum(
        _field(Path(f"/proc/{each}/smaps_rollup"), "Pss:") for each in (pid, *descendants(pid, parents()))
    )


def _field(path: Path, name: str) -> int:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


class BurstMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one burst did to the memory that was lent."""

    lent_bytes: int
    """Physical memory of the rollout engine's KV cache before."""
    taken_bytes: int
    """By how much it fell."""
    rss_fell_bytes: int
    """By how much the memory of the rollout worker fell, as the kernel counts it."""
    serving_grew_bytes: int
    """By how much the serving engine's KV cache grew."""
    take_back_ms: float | None
    """From the instant at which less than the headroom was free to that at which half of what was lent had
    come back; None if it never came to that."""

    @property
    def taken_share(self) -> float:
        """Part of what was lent that came back."""
        return self.taken_bytes / self.lent_bytes if self.lent_bytes > 0 else 0.0


def burst_memory(samples: Sequence[Sample], headroom_bytes: int) -> BurstMemory:
    """Figures of a burst; `samples` begin before its first request."""
    first = samples[0]
    lowest = min(_known(sample.rollout_kv for sample in samples), default=0)
    return BurstMemory(
        lent_bytes=max(0, first.rollout_kv),
        taken_bytes=max(0, first.rollout_kv - lowest),
        rss_fell_bytes=max(0, first.rollout_rss - min(sample.rollout_rss for sample in samples)),
        serving_grew_bytes=max(0, max(sample.serving_kv for sample in samples) - first.serving_kv),
        take_back_ms=_take_back_ms(samples, headroom_bytes),
    )


def _take_back_ms(samples: Sequence[Sample], headroom_bytes: int) -> float | None:
    lent = samples[0].rollout_kv
    short_ns = next((sample.at_ns for sample in samples if sample.free < headroom_bytes), None)
    if short_ns is None:
        return None
    for sample in samples:
        if sample.at_ns >= short_ns and 0 <= sample.rollout_kv <= (1 - ENOUGH_BACK) * lent:
            return (sample.at_ns - short_ns) / NS_PER_MS
    return None


def _known(values: Iterable[int]) -> list[int]:
    return [value for value in values if value >= 0]
