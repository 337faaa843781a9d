"""`rose bench delta`: sizes and speeds of our delta modes and of other systems' formats, in one run.

Speeds are given against the machine's own: encoding against `np.not_equal` of the same arrays, which reads
what an encoder must read; decoding, in place, against a copy of the target.  Every round measures every row
once, so that a change of the machine's mood meets all of them; the best of the rounds is compared with the
best.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rose_kernels.delta import EncodedGroup, GroupTables, Settings, Shard, ShardReader, encode_group, kernels

from rose_daemon.bench.delta_data import Words, Workload
from rose_daemon.bench.delta_peers import Peer, peers
from rose_daemon.harness.summary import head

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Ours:
    """One of our modes, and on how many threads."""

    name: str
    classes: int
    threads: int
    stateful: bool = False


@dataclass(slots=True)
class Row:
    """What was measured of one format on one workload: seconds by round."""

    format: str
    threads: int
    nbytes: int = 0
    exact: bool = True
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    pairs_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Baseline:
    """The machine's own speeds on the same arrays: seconds by round."""

    memcpy_s: list[float] = field(default_factory=list)
    not_equal_s: list[float] = field(default_factory=list)


def modes(threads_max: int, *, history: bool) -> list[Ours]:
    """Our rows: each mode on one thread, and on all."""
    found = [
        Ours(f"rose K={classes}", classes, threads)
        for classes in (1, 4, 8)
        for threads in sorted({1, threads_max})
    ]
    return [*found, Ours("rose K=8 stateful", 8, 1, stateful=True)] if history else found


def _timed(work: Callable[[], _T], into: list[float]) -> _T:
    started = time.perf_counter()
    outcome = work()
    into.append(time.perf_counter() - started)
    return outcome


class DeltaBench:
    """Measures one workload.  Speeds are taken on `copies` of it in one group, as models are larger."""

    def __init__(self, workload: Workload, *, copies: int, rounds: int, threads_max: int) -> None:
        self._workload = workload
        self._copies = copies
        self._rounds = rounds
        self._base = np.tile(workload.base, copies)
        self._target = np.tile(workload.target, copies)
        self._history = None if workload.history is None else np.tile(workload.history, copies)
        self._scratch = np.empty_like(self._base)
        self._unequal = np.empty(self._base.size, np.bool_)
        self._ours = modes(threads_max, history=workload.history is not None)
        self._peers = peers()
        self.baseline = Baseline()
        self.rows = {mode: Row(mode.name, mode.threads) for mode in self._ours}
        self.peer_rows = {peer.name: Row(peer.name, 1) for peer in self._peers}

    def run(self, say: Callable[[str], None]) -> None:
        """All rounds; peers, which are slow, only in the first two."""
        self._sizes()
        for number in range(self._rounds):
            say(f"{self._workload.name}: round {number + 1} of {self._rounds}")
            self._measure_baseline()
            for mode in self._ours:
                self._measure_ours(mode)
                self._measure_baseline()
            for peer in self._peers if number < 2 else ():
                self._measure_peer(peer)

    def report_rows(self) -> list[dict[str, Any]]:
        """The rows of the report."""
        return [self._report(row) for row in (*self.rows.values(), *self.peer_rows.values())]

    def baseline_gb_s(self) -> dict[str, float]:
        """GB/s of the tensor's bytes."""
        return {
            "memcpy_gb_s": round(self._base.nbytes / min(self.baseline.memcpy_s) / 1e9, 2),
            "not_equal_gb_s": round(self._base.nbytes / min(self.baseline.not_equal_s) / 1e9, 2),
        }

    def _measure_baseline(self) -> None:
        _timed(lambda: np.not_equal(self._base, self._target, out=self._unequal), self.baseline.not_equal_s)
        _timed(lambda: np.copyto(self._scratch, self._target), self.baseline.memcpy_s)

    def _sizes(self) -> None:
        """Bytes are counted on the workload itself, where tables weigh what they weigh."""
        work = self._workload
        for mode in self._ours:
            group = self._encode(mode, work.base, work.target, work.history)
            self.rows[mode].nbytes = group.nbytes
        for peer in self._peers:
            coded = peer.encode(work.base, work.target)
            self.peer_rows[peer.name].nbytes = sum(map(len, coded))

    def _encode(
        self, mode: Ours, base: Words, target: Words, history: npt.NDArray[np.uint8] | None
    ) -> EncodedGroup:
        shard = Shard(self._workload.dtype, base, target, history if mode.stateful else None)
        return encode_group([shard], Settings(classes=mode.classes, threads=mode.threads))

    def _measure_ours(self, mode: Ours) -> None:
        row = self.rows[mode]
        history = self._history if mode.stateful else None
        group = _timed(lambda: self._encode(mode, self._base, self._target, self._history), row.encode_s)

        def reader() -> ShardReader:
            tables = GroupTables.read(group.tables) if group.tables else None
            return ShardReader(group.shards[0].data, tables)

        np.copyto(self._scratch, self._base)
        _timed(lambda: reader().apply(self._scratch, history, threads=mode.threads), row.decode_s)
        row.exact &= np.array_equal(self._scratch, self._target)
        np.copyto(self._scratch, self._base)
        indices, values = _timed(
            lambda: reader().decode(self._scratch, history, threads=mode.threads), row.pairs_s
        )
        if indices is not None:
            kernels().scatter(self._scratch, indices, values)
            values = self._scratch
        row.exact &= np.array_equal(values, self._target)

    def _measure_peer(self, peer: Peer) -> None:
        row = self.peer_rows[peer.name]
        coded = _timed(lambda: peer.encode(self._base, self._target), row.encode_s)
        np.copyto(self._scratch, self._base)
        _timed(lambda: peer.decode(coded, self._scratch), row.decode_s)
        row.exact &= np.array_equal(self._scratch, self._target)

    def _report(self, row: Row) -> dict[str, Any]:
        work, nbytes = self._workload, self._base.nbytes
        found: dict[str, Any] = {
            "format": row.format,
            "data": work.name,
            "density": round(work.changed / work.base.size, 5),
            "threads": row.threads,
            "bytes": row.nbytes,
            "bytes_per_change": round(row.nbytes / max(1, work.changed), 4),
            "encode_gb_s": round(nbytes / min(row.encode_s) / 1e9, 2),
            "decode_gb_s": round(nbytes / min(row.decode_s) / 1e9, 2),
            "encode_vs_not_equal": round(min(self.baseline.not_equal_s) / min(row.encode_s), 3),
            "decode_vs_memcpy": round(min(self.baseline.memcpy_s) / min(row.decode_s), 3),
            "roundtrip": bool(row.exact),
        }
        if row.pairs_s:
            found["decode_pairs_vs_memcpy"] = round(min(self.baseline.memcpy_s) / min(row.pairs_s), 3)
        return found


def measure(
    workloads: Sequence[Callable[[], Workload]], *, copies: int, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The report of all workloads, each made when its turn comes."""
    started_at = datetime.now(UTC)
    threads_max = len(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    baselines: dict[str, dict[str, float]] = {}
    for make in workloads:
        workload = make()
        bench = DeltaBench(workload, copies=copies, rounds=rounds, threads_max=threads_max)
        bench.run(say)
        rows += bench.report_rows()
        baselines[workload.name] = bench.baseline_gb_s()
    fastest = next(iter(baselines.values()))
    return head("bench delta", started_at) | {
        "kernels": kernels().name,
        "setup": {"copies": copies, "rounds": rounds, "threads_max": threads_max},
        "baseline": {**fastest, "by_data": baselines},
        "rows": rows,
        "ok": all(row["roundtrip"] for row in rows),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """The rows as one table for each workload."""
    for data, base in report["baseline"]["by_data"].items():
        rows = [row for row in report["rows"] if row["data"] == data]
        title = f"{data}, {rows[0]['density']:.2%} changed, {report['kernels']} kernels"
        table = Table(title=title, title_justify="left")
        for column in ("format", "threads", "B/changed", "encode", "decode", "pairs", "exact"):
            table.add_column(column, justify="left" if column == "format" else "right")
        for row in rows:
            pairs = row.get("decode_pairs_vs_memcpy")
            table.add_row(
                row["format"], str(row["threads"]), f"{row['bytes_per_change']:.3f}",
                f"{row['encode_vs_not_equal']:.2f}", f"{row['decode_vs_memcpy']:.2f}",
                "" if pairs is None else f"{pairs:.2f}", "yes" if row["roundtrip"] else "NO",
            )  # fmt: skip
        console.print(table)
        console.print(
            f"encode: share of np.not_equal, here {base['not_equal_gb_s']} GB/s; decode, in place or to\n"
            f"pairs of index and value: share of memcpy, here {base['memcpy_gb_s']} GB/s\n"
        )
