"""`rose bench relay` and `rose bench link`: options of the measurements of weight transfer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rose.outputs import check_report_path
from rose.units import MIB
from rose_daemon.harness.screen import Screen
from rose_daemon.harness.summary import write_report


def relay(
    size_mb: Annotated[int, typer.Option("--mb", min=1, max=4096, help="Size of the version moved.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each way is measured.")] = 9,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the bytes.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
) -> None:
    """Push, pull and same-host pull through the embedded relay, beside plain TCP on loopback."""
    from rose_daemon.bench import relay as bench_relay  # noqa: PLC0415 - NumPy is not for --help

    check_report_path(json_file)
    console = Console(highlight=False)
    with Screen(console) as screen:
        report = bench_relay.measure(nbytes=size_mb * 1_000_000, rounds=rounds, seed=seed, say=screen.say)
    if json_file is not None:
        write_report(json_file, report)
    bench_relay.show(report, console)


def link(
    size_mb: Annotated[int, typer.Option("--mb", min=1, max=4096, help="Size of the version moved.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each is measured.")] = 3,
    rate: Annotated[float, typer.Option(min=1, max=10_000, help="Mbit/s of the link.")] = 1000,
    rtt_ms: Annotated[float, typer.Option("--rtt", min=0, max=1000, help="Round trip, ms.")] = 20,
    loss: Annotated[int, typer.Option(min=0, max=100_000, help="Packets lost in a million, then.")] = 100,
    streams: Annotated[int, typer.Option(min=1, max=64, help="As relay.streams.")] = 8,
    congestion: Annotated[str, typer.Option(help="As relay.congestion.")] = "",
    model_mib: Annotated[
        int, typer.Option("--model-mib", min=0, max=16384, help="Size of the model updated; 0: none.")
    ] = 1024,
    updates: Annotated[int, typer.Option(min=1, max=20, help="Updates measured, after one to warm up.")] = 3,
    replicas: Annotated[int, typer.Option(min=1, max=8, help="Engines of the host that is updated.")] = 2,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the bytes and the losses.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
) -> None:
    """A whole version, and an update from publish() to all replicas, over an emulated link.  Needs root."""
    from rose_daemon.bench import link_bench, update_bench  # noqa: PLC0415 - NumPy is not for --help
    from rose_daemon.bench.link import LinkSpec  # noqa: PLC0415

    check_report_path(json_file)
    console = Console(highlight=False)
    with Screen(console) as screen:
        report = link_bench.measure(
            LinkSpec(rate_mbit=rate, delay_ms=rtt_ms / 2, seed=seed),
            loss_ppm=loss,
            nbytes=size_mb * 1_000_000,
            rounds=rounds,
            streams=streams,
            congestion=congestion,
            model_bytes=model_mib * MIB,
            updates=updates,
            replicas=replicas,
            say=screen.say,
        )
    if json_file is not None:
        write_report(json_file, report)
    link_bench.show(report, console)
    if report["update"] is not None:
        update_bench.show(report["update"], console)
