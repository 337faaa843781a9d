"""`rose bench relay`: the embedded relay beside plain TCP, on loopback, in one interleaved run."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rose.weights.container import EncodedVersion
from rose.weights.relay.local import RelayClient
from rose_daemon.bench.plain_tcp import PlainTcp
from rose_daemon.bench.transfer import JOB, Puller, anchor, push, relay_process, sender_process
from rose_daemon.harness.summary import head

WAYS = ("push", "pull", "same-host pull")


def measure(*, nbytes: int, rounds: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The report.  Each round moves the version once by every way; the first warms up and does not count."""
    started_at = datetime.now(UTC)
    version = anchor(nbytes, seed)
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch, "rose.toml")
        config.write_text(f"schema = 1\n[relay]\ncapacity_bytes = {3 * nbytes + (16 << 20)}\n")
        with relay_process(config) as url, sender_process() as port:
            taken = asyncio.run(_rounds(url, port, version, rounds, say))
    moved = version.manifest.delta_bytes
    return head("bench relay", started_at) | {
        "setup": {"bytes": moved, "buckets": len(version.buckets), "rounds": rounds, "seed": seed},
        "gb_s": {way: _spread([moved / each[way] / 1e9 for each in taken]) for way in ("tcp", *WAYS)},
        "ratio_to_tcp": {way: _spread([each["tcp"] / each[way] for each in taken]) for way in WAYS},
    }


async def _rounds(
    url: str, port: int, version: EncodedVersion, rounds: int, say: Callable[[str], None]
) -> list[dict[str, float]]:
    taken = []
    memory = memoryview(bytearray(version.manifest.delta_bytes))
    with PlainTcp("127.0.0.1", port) as sender:
        async with RelayClient(url, shared_memory=False) as far, RelayClient(url) as near:
            over_tcp, from_memory = Puller(far, version.manifest), Puller(near, version.manifest)
            for number in range(rounds + 1):
                seconds = {"tcp": await asyncio.to_thread(_timed, lambda: sender.fill(memory))}
                seconds["push"] = await push(far, version, parallel=1)
                seconds["pull"] = await over_tcp.pull(parallel=1)
                seconds["same-host pull"] = await from_memory.pull()
                await far.delete(JOB, version.manifest.version)
                if number:
                    taken.append(seconds)
                    say(", ".join(f"{way} {took_s * 1e3:.0f} ms" for way, took_s in seconds.items()))
    return taken


def _timed(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """One row a way."""
    setup = report["setup"]
    table = Table(
        title=f"{setup['bytes'] / 1e6:.0f} MB in {setup['buckets']} buckets, {setup['rounds']} rounds",
        title_justify="left",
    )
    for column in ("", "GB/s", "of plain TCP", "lowest", "highest"):
        table.add_column(column, justify="right" if column else "left")
    for way, speed in report["gb_s"].items():
        ratio = report["ratio_to_tcp"].get(way)
        shares = [f"{ratio[key]:.2f}" for key in ("median", "min", "max")] if ratio else ["", "", ""]
        table.add_row("plain TCP" if way == "tcp" else way, f"{speed['median']:.2f}", *shares)
    console.print(table)
