"""`rose bench`: measurements."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import uvloop
from rich.console import Console

from rose.outputs import check_report_path
from rose_daemon.bench import transfer_command
from rose_daemon.harness.directory import working_in
from rose_daemon.harness.interrupts import INTERRUPTED, Interrupts
from rose_daemon.harness.load import Budgets
from rose_daemon.harness.replay import ReplayPlan
from rose_daemon.harness.screen import Screen
from rose_daemon.harness.summary import write_report, write_reports

if TYPE_CHECKING:
    from rose_daemon.bench.runs import Measured

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)

_QUIET_VLLM = {
    "VLLM_PLUGINS": "",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
DIRECTORY = Path("out/bench-coserve")
MEMORY_DIRECTORY = Path("out/bench-memory")
GATEWAY_DIRECTORY = Path("out/bench-gateway")
MEASURED, PICTURE = "measured.json", "report.png"
QUICK_RUN_S = 20.0
RUN_S = 60.0
"""Where nothing else says how long a run is."""
FIRST_RATE_RPS = 5.5
"""Where the calibration begins: the rate of the Azure conversation trace."""


@app.callback()
def bench() -> None:
    """Measure ROSE on this machine."""


app.command()(transfer_command.relay)
app.command()(transfer_command.link)


@app.command()
def coserve(
    modes: Annotated[
        str,
        typer.Option(
            help="all, or comma-separated: alone, rollout-alone, naive, static, priority, rose-strict, "
            "rose-slack."
        ),
    ] = "all",
    quick: Annotated[
        bool, typer.Option("--quick", help="One short round: five minutes, wide intervals.")
    ] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Times that each mode is measured; default 3.")
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(min=1, max=86_400, help="Seconds of one run; default: as 1,000 requests a mode take."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Azure LLM inference CSV to replay; default: a generated trace.")
    ] = None,
    offset: Annotated[float, typer.Option(min=0, max=1e7, help="Seconds of the trace to skip.")] = 0.0,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1000, help="Serving requests a second; default: what keeps serving half busy."
        ),
    ] = None,
    size_divisor: Annotated[float, typer.Option(help="How much shorter prompts are than recorded.")] = 2.5,
    output_divisor: Annotated[float, typer.Option(help="How much shorter outputs are.")] = 12.0,
    prompt_max: Annotated[int, typer.Option(min=8, max=1536, help="Longest serving prompt.")] = 1024,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollout requests at a time.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt of a rollout request.")] = 640,
    output_tokens: Annotated[int, typer.Option(min=1, help="Answer to a rollout request.")] = 128,
    static_tokens: Annotated[
        int, typer.Option(min=1, max=512, help="Most tokens of a rollout step in mode static.")
    ] = 64,
    token_cap: Annotated[
        int, typer.Option(min=1, max=512, help="Most tokens of a rollout step in the other modes.")
    ] = 512,
    inject: Annotated[
        bool,
        typer.Option("--inject", help="Afterwards hold the device up on purpose, to test the blame for it."),
    ] = False,
    ttft_ms: Annotated[float, typer.Option(min=1, help="TTFT budget.")] = 250.0,
    tpot_ms: Annotated[float, typer.Option(min=1, help="TPOT budget.")] = 60.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Of the traces, the prompts, and the bootstrap.")
    ] = 1,
    former: Annotated[
        Path | None,
        typer.Option("--from", help="Measure nothing: report on a measured.json that a former run left."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where configuration, logs and report go.")] = DIRECTORY,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here as well.")] = None,
) -> None:
    """Serve a trace alone, and beside rollout that is gated, held back in simpler ways, or not at all.

    Every mode meets the same arrivals on the same pair of engines; about 16 minutes.  Exit code 5 when a
    rose mode broke a budget for more than 0.5% of its requests, not counting what serving alone breaks too.
    """
    # vLLM's models take seconds to make and import: not for --help.
    from rose_daemon.bench.coserve import Coserve  # noqa: PLC0415
    from rose_daemon.bench.runs import (  # noqa: PLC0415
        REQUESTS_WANTED,
        CoserveOptions,
        parse_modes,
        read_measured,
        write_measured,
    )

    console = Console(highlight=False)
    check_report_path(json_file)
    if former is not None:
        raise typer.Exit(_publish(read_measured(former), out.resolve(), json_file, console))
    if quick:
        rounds, duration = rounds or 1, duration or QUICK_RUN_S
    options = CoserveOptions(
        directory=out.resolve(),
        modes=parse_modes(modes),
        rounds=rounds or 3,
        trace=ReplayPlan(
            path=trace,
            offset_s=offset,
            duration_s=duration or RUN_S,
            rate_rps=rate or FIRST_RATE_RPS,
            size_divisor=size_divisor,
            output_divisor=output_divisor,
            prompt_tokens_max=prompt_max,
        ),
        calibrate=rate is None,
        requests=0 if duration else REQUESTS_WANTED,
        concurrency=concurrency,
        rollout_prompt_tokens=prompt_tokens,
        rollout_output_tokens=output_tokens,
        static_tokens=static_tokens,
        token_cap=token_cap,
        inject=inject,
        budgets=Budgets(ttft_ms, tpot_ms),
        seed=seed,
    )
    with working_in(options.directory, keep=False), Screen(console) as screen:
        interrupts = Interrupts(screen.say)
        measured = interrupts.run(Coserve(options, screen, interrupts).run())
    if measured is None:
        console.print("interrupted; everything that was started has ended")
        raise typer.Exit(INTERRUPTED)
    write_measured(options.directory / MEASURED, measured)
    raise typer.Exit(_publish(measured, options.directory, json_file, console))


def _publish(measured: Measured, directory: Path, json_file: Path | None, console: Console) -> int:
    """Show and write the report, and draw it where matplotlib is installed; the exit code."""
    from rose_daemon.bench import plot, table  # noqa: PLC0415
    from rose_daemon.bench import report as reports  # noqa: PLC0415

    report = reports.build(measured)
    table.show(report, console)
    write_reports(report, directory, json_file, console)
    if plot.available():
        plot.draw(measured, report, directory / PICTURE)
        console.print(f"picture: {directory / PICTURE}", soft_wrap=True)
    else:
        console.print("no picture: matplotlib is not installed (extra plot)")
    return int(report["exit_code"])


@app.command()
def memory(
    shared: Annotated[int, typer.Option(min=64, help="MiB of KV memory that both engines share.")] = 160,
    bursts: Annotated[int, typer.Option(min=1, help="Bursts in each mode.")] = 8,
    requests: Annotated[int, typer.Option(min=1, help="Serving requests of a burst.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt of a serving request.")] = 1700,
    output_tokens: Annotated[int, typer.Option(min=2, help="Answer to a serving request.")] = 120,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollout requests at a time.")] = 24,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of arrivals and prompts.")] = 1,
    out: Annotated[Path, typer.Option(help="Where configuration, logs and report go.")] = MEMORY_DIRECTORY,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here as well.")] = None,
) -> None:
    """Lend serving's idle KV memory to rollout, and take it back in bursts; beside a fixed division.

    About ten minutes.  Exit code 1 when a burst did not get half of what was lent back, serving preempted
    more than alone, a request failed, or an activation took longer than a second.
    """
    from rose_daemon.bench import memory_report  # noqa: PLC0415 (engines' modules are not for --help)
    from rose_daemon.bench.memory import MemoryBench, MemoryOptions  # noqa: PLC0415

    console = Console(highlight=False)
    check_report_path(json_file)
    options = MemoryOptions(
        directory=out.resolve(),
        shared_mib=shared,
        bursts=bursts,
        burst_requests=requests,
        burst_prompt_tokens=prompt_tokens,
        burst_output_tokens=output_tokens,
        concurrency=concurrency,
        seed=seed,
    )
    with working_in(options.directory, keep=False), Screen(console) as screen:
        interrupts = Interrupts(screen.say)
        measured = interrupts.run(MemoryBench(options, screen, interrupts).run())
    if measured is None:
        console.print("interrupted; everything that was started has ended")
        raise typer.Exit(INTERRUPTED)
    report = memory_report.build(measured)
    memory_report.show(report, console)
    write_reports(report, options.directory, json_file, console)
    raise typer.Exit(int(report["exit_code"]))


@app.command()
def delta(
    pair: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Two checkpoints to measure on, directories or safetensors files: OLD NEW."),
    ] = None,
    elements: Annotated[int, typer.Option(min=4096, help="Weights of each generated matrix.")] = 1 << 24,
    copies: Annotated[int, typer.Option(min=1, help="Copies that speeds are taken on, as one group.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each row is measured.")] = 7,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the generated weights.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
) -> None:
    """Sizes and speeds of weight deltas: our modes beside the formats of other systems.

    Without --pair, on the last of 24 Adam steps at three learning rates, which change 1.2, 1.9 and 4.9% of
    the weights.  Exit code 1 if anything did not decode to what was encoded.
    """
    from rose_daemon.bench import delta as bench_delta  # noqa: PLC0415 - NumPy is not for --help
    from rose_daemon.bench.delta_data import CHAINS, generate, of_pair  # noqa: PLC0415

    console = Console(highlight=False)
    workloads = (
        [partial(of_pair, *pair)]
        if pair is not None
        else [partial(generate, name, rate, elements, seed) for name, rate in CHAINS]
    )
    with Screen(console) as screen:
        report = bench_delta.measure(workloads, copies=copies, rounds=rounds, say=screen.say)
    if json_file is not None:
        write_report(json_file, report)
    bench_delta.show(report, console)
    raise typer.Exit(0 if report["ok"] else 1)


@app.command()
def gate(
    running: Annotated[int, typer.Option(min=1, max=256, help="Requests that run at once.")] = 64,
    steps: Annotated[int, typer.Option(min=10, max=400, help="Steps measured in each setting.")] = 400,
    device_ms: Annotated[
        float, typer.Option(min=0, max=1000, help="How long a step leaves the core to others.")
    ] = 3.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
) -> None:
    """What the plugins cost a step: the slack board in a serving engine, the gate in a rollout engine.

    On vLLM's own schedulers, in this process and without a device.
    """
    os.environ |= _QUIET_VLLM
    from rose_daemon.bench import gate as bench_gate  # noqa: PLC0415 - imports vLLM

    check_report_path(json_file)
    console = Console(highlight=False)
    options = bench_gate.GateOptions(running=running, steps=steps, device_ms=device_ms)
    with Screen(console) as screen:
        report = bench_gate.measure(options, screen.say)
    if json_file is not None:
        write_report(json_file, report)
    bench_gate.show(report, console)


@app.command()
def gateway(
    streams: Annotated[int, typer.Option(min=1, max=1024, help="Turns at a time.")] = 64,
    engines: Annotated[int, typer.Option(min=1, max=64, help="Mock engines.")] = 8,
    token_ms: Annotated[float, typer.Option(min=0.1, max=1000, help="Time of a token on an engine.")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, help="Times that both ways are measured.")] = 3,
    duration: Annotated[float, typer.Option(min=1, max=3600, help="Seconds of one run.")] = 10.0,
    turns: Annotated[int, typer.Option(min=10, help="Turns over which memory is watched.")] = 5_000,
    disconnects: Annotated[int, typer.Option(min=1, help="Clients that hang up.")] = 1_000,
    knee: Annotated[bool, typer.Option(help="Look for the load at which it saturates.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of prompts, lengths and hang-ups.")] = 1,
    out: Annotated[Path, typer.Option(help="Where configuration, logs and report go.")] = GATEWAY_DIRECTORY,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here as well.")] = None,
) -> None:
    """What the gateway costs: the same load on mock engines, directly and through it.

    Exit code 1 if a turn was left over after its client hung up.
    """
    # NumPy is not for --help.
    from rose_daemon.bench import gateway as bench_gateway  # noqa: PLC0415
    from rose_daemon.bench import gateway_report  # noqa: PLC0415

    console = Console(highlight=False)
    check_report_path(json_file)
    options = bench_gateway.GatewayOptions(
        directory=out.resolve(),
        streams=streams,
        engines=engines,
        token_ms=token_ms,
        rounds=rounds,
        duration_s=duration,
        turns=turns,
        disconnects=disconnects,
        knee=knee,
        seed=seed,
    )
    with working_in(options.directory, keep=False), Screen(console) as screen:
        interrupts = Interrupts(screen.say)
        work = bench_gateway.GatewayBench(options, screen.say).run()
        measured = interrupts.run(work, uvloop.new_event_loop)
    if measured is None:
        console.print("interrupted; everything that was started has ended")
        raise typer.Exit(INTERRUPTED)
    report = gateway_report.build(measured)
    gateway_report.show(report, console)
    write_reports(report, options.directory, json_file, console)
    raise typer.Exit(report["exit_code"])


@app.command()
def cluster(
    replicas: Annotated[int, typer.Option(min=4, help="Hosts, with one replica each.")] = 1_000,
    trajectories: Annotated[int, typer.Option(min=1, help="Trajectories in flight.")] = 16_000,
    decisions: Annotated[int, typer.Option(min=100, help="Routing decisions to measure.")] = 100_000,
    group: Annotated[int, typer.Option(min=1, help="Trajectories that share a first prompt.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
) -> None:
    """What a core of scheduling costs in a large cluster, and how well turns are placed.  Virtual time.

    Exit code 1 when a goal is missed or a turn failed.
    """
    from rose_daemon.bench import cluster as bench_cluster  # noqa: PLC0415 - NumPy is not for --help
    from rose_daemon.bench.cluster_load import ClusterLoad  # noqa: PLC0415

    console = Console(highlight=False)
    check_report_path(json_file)
    load = ClusterLoad(
        replicas=replicas, trajectories=trajectories, decisions=decisions, group=group, seed=seed
    )
    report = bench_cluster.measure(load)
    if json_file is not None:
        write_report(json_file, report)
    bench_cluster.show(report, console)
    raise typer.Exit(0 if report["ok"] else 1)
