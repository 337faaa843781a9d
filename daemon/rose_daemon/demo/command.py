"""`rose demo`: the whole system on this machine, and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rose.outputs import check_report_path
from rose_daemon.harness.directory import working_in
from rose_daemon.harness.interrupts import INTERRUPTED, Interrupts
from rose_daemon.harness.load import Budgets
from rose_daemon.harness.replay import ReplayPlan
from rose_daemon.harness.screen import Screen
from rose_daemon.harness.summary import write_reports

app = typer.Typer(rich_markup_mode=None, add_completion=False)

DIRECTORY = Path("out/demo")


@app.command()
def demo(
    duration: Annotated[
        float,
        typer.Option(min=1, max=86_400, help="Seconds of rollout, at least; serving has load all the time."),
    ] = 120.0,
    steps: Annotated[int, typer.Option(min=1, help="RL steps, at least.")] = 3,
    groups: Annotated[int, typer.Option(min=1, max=1000, help="Groups of four episodes in a step.")] = 8,
    trace: Annotated[
        Path | None, typer.Option(help="Azure LLM inference CSV to replay; default: a generated trace.")
    ] = None,
    offset: Annotated[float, typer.Option(min=0, max=1e7, help="Seconds of the trace to skip.")] = 0.0,
    rate: Annotated[float, typer.Option(min=0.01, max=1000, help="Mean serving requests a second.")] = 4.0,
    size_divisor: Annotated[float, typer.Option(help="How much shorter requests are than recorded.")] = 8.0,
    ttft_ms: Annotated[float, typer.Option(min=1, help="TTFT budget.")] = 250.0,
    tpot_ms: Annotated[float, typer.Option(min=1, help="TPOT budget.")] = 60.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Of the trace, the prompts and the lakes.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Where configuration, logs and report go.")] = DIRECTORY,
    keep: Annotated[bool, typer.Option("--keep", help="Keep models, state, a checkpoint a version.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here as well.")] = None,
) -> None:
    """Run relay, scheduler, rosed, a serving engine and two rollout engines, train through them, and report.

    Exit code 0 when all is well; 5 when more than 0.5% of serving requests broke their budget; 1 when a turn
    was lost or ran twice, or an engine did not run the trainer's weights.
    """
    # What the demo needs takes seconds to import: not for --help.
    from rose_daemon.demo import report as reports  # noqa: PLC0415
    from rose_daemon.demo.episodes import EpisodePlan  # noqa: PLC0415
    from rose_daemon.demo.run import Demo, DemoOptions  # noqa: PLC0415

    check_report_path(json_file)
    options = DemoOptions(
        directory=out.resolve(),
        steps=steps,
        duration_s=duration,
        trace=ReplayPlan(
            path=trace,
            offset_s=offset,
            duration_s=max(duration, 60.0),
            rate_rps=rate,
            size_divisor=size_divisor,
        ),
        budgets=Budgets(ttft_ms, tpot_ms),
        episodes=EpisodePlan(groups=groups),
        seed=seed,
        keep=keep,
    )
    console = Console(highlight=False)
    with working_in(options.directory, keep=keep), Screen(console) as screen:
        interrupts = Interrupts(screen.say)
        found = interrupts.run(Demo(options, screen, interrupts).run())
    if found is None:
        console.print("interrupted; everything that was started has ended")
        raise typer.Exit(INTERRUPTED)
    report = reports.build(found)
    reports.show(report, console)
    write_reports(report, options.directory, json_file, console)
    raise typer.Exit(report["exit_code"])
