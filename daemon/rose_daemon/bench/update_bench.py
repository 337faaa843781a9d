"""From `publish()` to all replicas committed, over an emulated long link, every stage apart.

Trainer and relay are at the near end, rosed with light engines at the far end: real processes throughout, but
for the engines, which hold real weights and generate nothing.  Beside it, on the same link, the same change
as COO and as whole weights, without any of the checks, files and engines that ours includes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rose.units import MIB
from rose_daemon.bench.delta_peers import LINKED
from rose_daemon.bench.link import Link
from rose_daemon.bench.transfer import RELAY_PORT, relay_process, secured
from rose_daemon.bench.update_host import host
from rose_daemon.bench.update_model import SyntheticModel
from rose_daemon.bench.worker import worker

GOALS = {"total_ms": 2500.0, "pause_ms": 100.0}
STAGES = (
    "encode", "self-check", "push", "announce", "pull", "verify", "decode", "hand over", "stage", "pause",
    "prove", "rest",
)  # fmt: skip
"""In their order: see docs/weights.md."""
_ELEMENT_BYTES = 2


def measure(
    link: Link, *, model_bytes: int, updates: int, replicas: int, streams: int, congestion: str, seed: int,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """The report of `updates` updates, after one that warms up.  Raises RoseError."""
    elements = model_bytes // _ELEMENT_BYTES
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="rose-bench-") as scratch:
        base = Path(scratch)
        model = SyntheticModel.make(base / "model", elements, updates + 1, seed)
        say(f"a model of {model.elements * _ELEMENT_BYTES / MIB:.0f} MiB in {len(model.state(0))} tensors")
        sections = {
            name: secured(
                base, link.near.address, capacity_bytes=2 * model_bytes + 64 * MIB, streams=streams,
                congestion=congestion, near=name == "near",
            )
            for name in ("near", "far")
        }  # fmt: skip
        configs = {name: base / f"{name}.toml" for name in sections}
        for name, section in sections.items():
            configs[name].write_text(f"schema = 1\n{section}", encoding="utf-8")
        common = (base / "model", elements)
        with relay_process(configs["near"], host="0.0.0.0", port=RELAY_PORT, prefix=link.near.prefix):
            trainer = ("rose_daemon.bench.update_trainer", configs["near"], *common, threads)
            with worker(*trainer, prefix=link.near.prefix) as near:
                taken = []
                with host(
                    base, sections["far"], base / "model",
                    replicas=replicas, threads=threads, prefix=link.far.prefix,
                ) as far:  # fmt: skip
                    far.await_ready()
                    for step in range(1, updates + 2):
                        published = near.ask("publish", step)
                        status = far.await_version(step)
                        each = timeline(published, status, step)
                        if step > 1:
                            taken.append(each)
                            say(f"version {step} committed by all after {each['total_ms']:.0f} ms")
                puller = ("rose_daemon.bench.update_puller", configs["far"], *common)
                with worker(*puller, prefix=link.far.prefix) as far_peer:
                    peers = {}
                    for name in LINKED:
                        peers[name] = near.ask("peer", name, updates + 1) | far_peer.ask(name, updates + 1)
                        peers[name]["total_ms"] = sum(
                            took for key, took in peers[name].items() if key.endswith("_ms")
                        )
                        say(f"{name}: {peers[name]['bytes'] / 1e6:.0f} MB, {peers[name]['total_ms']:.0f} ms")
    return summarise(taken, peers) | {
        "model_bytes": model.elements * _ELEMENT_BYTES, "replicas": replicas, "threads": threads,
    }  # fmt: skip


def timeline(published: Mapping[str, Any], status: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Milliseconds of each stage of one update, as the last replica to commit saw them.

    `published` is the trainer's answer, `status` rosed's, both by one monotonic clock.  Stages lie one after
    the other; what lies between them is `announce` (trainer's return to the pull), `hand over` and `rest`.
    """
    staging = next(each for each in status["stagings"] if each["version"] == version)
    updates = [each for each in status["updates"] if each["version"] == version and each["ok"]]
    last = max(updates, key=lambda each: float(each["at_monotonic_s"]))
    engine, staged_ms = last["engine_ms"], staging["pull_ms"] + staging["verify_ms"] + staging["decode_ms"]
    pull_began_s = staging["at_monotonic_s"] - staged_ms / 1e3
    asked_s = last["at_monotonic_s"] - last["ms"] / 1e3
    total_ms = (last["at_monotonic_s"] - published["began_monotonic_s"]) * 1e3
    stages = {
        "encode": published["encode_ms"],
        "self-check": published["self_check_ms"],
        "push": published["push_ms"],
        "announce": max(0.0, (pull_began_s - published["ended_monotonic_s"]) * 1e3),
        "pull": staging["pull_ms"],
        "verify": staging["verify_ms"],
        "decode": staging["decode_ms"],
        "hand over": (asked_s - staging["at_monotonic_s"]) * 1e3,
        "stage": engine["stage"],
        "pause": engine["pause"],
        "prove": last["ms"] - engine["stage"] - engine["pause"],
    }
    return {
        "version": version,
        "bytes": published["bytes"],
        "density": published["density"],
        "bytes_per_changed": published["bytes_per_changed"],
        "total_ms": total_ms,
        "pause_ms": max(each["engine_ms"]["pause"] for each in updates),
        "stages_ms": stages | {"rest": total_ms - sum(stages.values())},
    }


def summarise(taken: Sequence[Mapping[str, Any]], peers: Mapping[str, Any]) -> dict[str, Any]:
    """Medians over the updates, and whether the goals were met."""
    medians = {
        key: round(statistics.median(each[key] for each in taken), 4)
        for key in ("bytes", "density", "bytes_per_changed", "total_ms", "pause_ms")
    }
    stages = {
        stage: round(statistics.median(each["stages_ms"][stage] for each in taken), 1) for stage in STAGES
    }
    return medians | {
        "stages_ms": stages,
        "goals": {key: {"at_most": most, "met": medians[key] <= most} for key, most in GOALS.items()},
        "peers": dict(peers),
        "updates": list(taken),
    }


def show(report: Mapping[str, Any], console: Console) -> None:
    """The stages, and what others' formats take."""
    table = Table(
        title=f"update of {report['model_bytes'] / MIB:.0f} MiB, {report['density']:.2%} changed, to "
        f"{report['replicas']} replicas",
        title_justify="left",
    )
    for column in ("", "ours, ms", *(f"{name}, ms" for name in report["peers"])):
        table.add_column(column, justify="right" if column else "left")
    for stage in STAGES:
        key = f"{stage}_ms"
        others = (f"{peer[key]:.0f}" if key in peer else "" for peer in report["peers"].values())
        table.add_row(stage, f"{report['stages_ms'][stage]:.0f}", *others)
    totals = (f"{peer['total_ms']:.0f}" for peer in report["peers"].values())
    table.add_row("publish() to all committed", f"{report['total_ms']:.0f}", *totals, end_section=True)
    sizes = (f"{peer['bytes'] / 1e6:.1f} MB" for peer in report["peers"].values())
    table.add_row("sent", f"{report['bytes'] / 1e6:.1f} MB", *sizes)
    console.print(table)
    for key, goal in report["goals"].items():
        met = "met" if goal["met"] else "NOT met"
        console.print(
            f"{key.removesuffix('_ms')}: {report[key]:.0f} ms, goal {goal['at_most']:.0f} ms: {met}"
        )
    console.print("others: no checks, no files, no engines; decode writes into memory on the host")
