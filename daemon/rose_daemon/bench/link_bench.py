"""`rose bench link`: an anchor over an emulated long link, beside what iperf3 makes of the same link."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rose.errors import RoseError
from rose.weights.relay.ranges import PARALLEL
from rose_daemon.bench import update_bench
from rose_daemon.bench.link import Link, LinkSpec, emulated_link
from rose_daemon.bench.transfer import RELAY_PORT, relay_process, secured
from rose_daemon.bench.worker import Worker, worker
from rose_daemon.harness.summary import head

_REFERENCE_S = 4
_REST_S = 2
"""Before each transfer: what the one before left on the wire and in queues is not part of it."""
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_WAYS = ("push", "pull")
_LOAD_MAX = 0.5
"""Processes that wanted to run before: above it the measurement is not alone."""
TARGETS = {"no loss": 0.92, "with loss": 0.8}
"""Share of the link's rate, as measured without loss, that a pull should reach."""


def measure(
    spec: LinkSpec, *, loss_ppm: int, nbytes: int, rounds: int, streams: int, congestion: str,
    model_bytes: int, updates: int, replicas: int, say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """The report.  Raises RoseError where no link can be made."""
    started_at, load = datetime.now(UTC), os.getloadavg()[0]
    if missing := [name for name in ("iperf3", "openssl") if shutil.which(name) is None]:
        raise RoseError(f"{' and '.join(missing)} are not installed", "tools/debian.sh installs iperf3")
    with emulated_link(spec) as link:
        update = None
        if model_bytes:
            update = update_bench.measure(
                link, model_bytes=model_bytes, updates=updates, replicas=replicas, streams=streams,
                congestion=congestion, seed=spec.seed, say=say,
            )  # fmt: skip
        with _far_end(link, nbytes, streams, congestion, spec.seed) as far:
            phases = {}
            for name, ppm in (("no loss", 0), ("with loss", loss_ppm)):
                link.set_loss(ppm)
                phases[name] = [_round(link, far, streams, name, say) for _ in range(rounds)]
            moved = far.ready["bytes"]
    used = congestion or f"{_CONGESTION.read_text(encoding='ascii').strip()} (the system's)"
    rate = statistics.median(each["iperf3"] for each in phases["no loss"])
    return head("bench link", started_at) | {
        "load_before": round(load, 2),
        "link": {**asdict(spec), "queue_bytes": spec.queue, "loss_ppm": loss_ppm},
        "setup": {
            "bytes": moved, "rounds": rounds, "buckets_at_a_time": PARALLEL, "streams": streams,
            "congestion": used, "iperf3_streams": streams, "tls": True,
        },
        "link_mbit_s": round(rate, 1),
        "mbit_s": {
            name: {way: _median(each[way] for each in taken) for way in ("iperf3", *_WAYS)}
            for name, taken in phases.items()
        },
        "share_of_link": {
            name: {way: round(statistics.median(each[way] for each in taken) / rate, 3) for way in _WAYS}
            for name, taken in phases.items()
        },
        "rounds": phases,
        "targets": {"pull": TARGETS},
        "update": update,
    }  # fmt: skip


def _round(link: Link, far: Worker, streams: int, phase: str, say: Callable[[str], None]) -> dict[str, float]:
    taken = {"iperf3": _iperf3(link, streams)}
    for way in _WAYS:
        time.sleep(_REST_S)
        taken[way] = far.ready["bytes"] * 8 / far.ask(way) / 1e6
    say(f"{phase}: " + ", ".join(f"{way} {rate:.0f} Mbit/s" for way, rate in taken.items()))
    return taken


def _iperf3(link: Link, streams: int) -> float:
    """Mbit/s that iperf3 receives at the far end, slow start left out."""
    server = subprocess.Popen(
        [*link.far.prefix, "iperf3", "-s", "-1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        client = [*link.near.prefix, "iperf3", "-c", link.far.address, "-J", "-O", "1"]
        for _ in range(50):
            done = subprocess.run(
                [*client, "-t", str(_REFERENCE_S), "-P", str(streams)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            received = json.loads(done.stdout).get("end", {}).get("sum_received")
            if done.returncode == 0 and received:
                return float(received["bits_per_second"]) / 1e6
            time.sleep(0.1)  # its server is not listening yet
        raise RoseError(f"iperf3 failed: {json.loads(done.stdout).get('error', 'without a reason')}")
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def _far_end(link: Link, nbytes: int, streams: int, congestion: str, seed: int) -> Iterator[Worker]:
    """A relay at the near end, a worker at the far end."""
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch, "rose.toml")
        section = secured(
            Path(scratch), link.near.address, capacity_bytes=2 * nbytes + (64 << 20), streams=streams,
            congestion=congestion,
        )  # fmt: skip
        config.write_text(f"schema = 1\n{section}", encoding="utf-8")
        with (
            relay_process(config, host=link.near.address, port=RELAY_PORT, prefix=link.near.prefix),
            worker("rose_daemon.bench.link_worker", config, nbytes, seed, prefix=link.far.prefix) as far,
        ):
            yield far


def _median(values: Iterator[float]) -> float:
    return round(statistics.median(values), 1)


def show(report: dict[str, Any], console: Console) -> None:
    """One row a phase and way."""
    link, setup = report["link"], report["setup"]
    wire = f"{link['rate_mbit']:.0f} Mbit/s, {2 * link['delay_ms']:.0f} ms round trip"
    table = Table(title=f"{setup['bytes'] / 1e6:.0f} MB over {wire}", title_justify="left")
    for column in ("", "iperf3", "push", "pull", "push, of the link", "pull, of the link"):
        table.add_column(column, justify="right" if column else "left")
    for phase, rates in report["mbit_s"].items():
        shares = report["share_of_link"][phase]
        name = phase if phase == "no loss" else f"{link['loss_ppm']} ppm lost"
        table.add_row(
            name,
            *(f"{rates[way]:.0f}" for way in ("iperf3", *_WAYS)),
            *(f"{shares[way]:.3f}" for way in _WAYS),
        )
    console.print(table)
    if report["load_before"] > _LOAD_MAX:
        load = f"load {report['load_before']} when it began"
        console.print(f"[red]others were busy on this machine ({load}): its figures are worth little")
    console.print(f"Mbit/s; the link: what iperf3 receives without loss, {report['link_mbit_s']} Mbit/s")
