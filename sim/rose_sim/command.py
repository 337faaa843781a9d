"""`rose sim`: run scenarios, reproduce the paper's figures, plan a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rose.errors import ConfigError
from rose.outputs import check_report_path

if TYPE_CHECKING:
    from rose_sim.measured import Measured

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)


def writable(path: Path | None) -> Path | None:
    """Callback of options that name a report: a run is not to be lost for want of a folder."""
    if str(path) != "-":
        check_report_path(path)
    return path


Json = Annotated[
    Path | None,
    typer.Option("--json", help="Write the report here; `-` for standard output.", callback=writable),
]
Png = Annotated[
    Path | None, typer.Option("--png", help="Draw the report here (extra `plot`).", callback=writable)
]
Html = Annotated[
    Path | None, typer.Option("--html", help="Write a report with plots here.", callback=writable)
]

# The modules that simulate take a second to import: not for --help.


@app.callback()
def _root() -> None:
    """Trace-driven simulation of ROSE and of the systems it is compared with."""


@app.command()
def run(
    scenario: Annotated[Path, typer.Argument(help="A scenario file; see docs/simulator.md.")],
    system: Annotated[
        list[str] | None, typer.Option(help="Only this system (may be given again); default: the scenario's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the scenario's.")] = None,
    single_steps: Annotated[
        bool, typer.Option("--single-steps", help="Step through every engine step: slow, and equal.")
    ] = False,
    json_file: Json = None,
    html_file: Html = None,
    png_file: Png = None,
) -> None:
    """Run a scenario and show what each system did."""
    from rose_sim.reports import run_report, show_run, write_json  # noqa: PLC0415

    report = run_report(scenario, system or None, seed, single_steps=single_steps)
    if json_file is not None:
        write_json(json_file, report)
    if html_file is not None:
        from rose_sim.html import run_page  # noqa: PLC0415

        html_file.write_text(run_page(report), encoding="utf-8")
    if png_file is not None:
        from rose_sim.png import draw_run  # noqa: PLC0415

        draw_run(report, png_file)
    if str(json_file) != "-":
        show_run(report, Console(highlight=False))


@app.command()
def reproduce(
    sensitivity: Annotated[
        bool,
        typer.Option("--sensitivity/--no-sensitivity", help="Also vary the fitted inputs by 20%: minutes."),
    ] = True,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes for that; default: one a core.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of load and episodes.")] = 1,
    json_file: Json = None,
    html_file: Html = None,
    png_file: Png = None,
) -> None:
    """Compare the simulator with the paper's figures, row by row.

    Exit code 1 when a row that counts as hard lies outside its tolerance.
    """
    from rose_sim.reports import show_reproduction, write_json  # noqa: PLC0415
    from rose_sim.reproduce import reproduction  # noqa: PLC0415

    with Console(highlight=False, stderr=True).status("simulating"):
        report = reproduction(seed=seed, sensitivity=sensitivity, workers=workers or os.cpu_count() or 1)
    if json_file is not None:
        write_json(json_file, report)
    if html_file is not None:
        from rose_sim.html import reproduction_page  # noqa: PLC0415

        html_file.write_text(reproduction_page(report), encoding="utf-8")
    if png_file is not None:
        from rose_sim.png import draw_reproduction  # noqa: PLC0415

        draw_reproduction(report, png_file)
    if str(json_file) != "-":
        show_reproduction(report, Console(highlight=False))
    raise typer.Exit(0 if report["ok"] else 1)


@app.command()
def whatif(
    trace: Annotated[Path, typer.Option(help="Serving trace: Azure, BurstGPT, Mooncake or vLLM bench.")],
    gpus: Annotated[int, typer.Option(min=1, help="Serving GPUs.")],
    serving_model: Annotated[str, typer.Option(help="Name, or a Hugging Face config.json.")],
    rollout_model: Annotated[str, typer.Option(help="Name, or a Hugging Face config.json.")],
    ttft_ms: Annotated[float, typer.Option(min=1, help="TTFT budget.")],
    tpot_ms: Annotated[float, typer.Option(min=1, help="TPOT budget.")],
    gpu_type: Annotated[str, typer.Option(help="H800, H100, H200, H20 or A100.")] = "H100",
    tp: Annotated[int, typer.Option(min=1, help="GPUs an engine.")] = 1,
    rate: Annotated[float | None, typer.Option(help="Thin the trace to this mean rate, 1/s.")] = None,
    hours: Annotated[float, typer.Option(min=0.1, help="How much of the trace to simulate.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of thinning and rollout load.")] = 1,
    serving_profile: Annotated[
        Path | None, typer.Option(help="Measured serving engine: of `rose profile` or `rose sim calibrate`.")
    ] = None,
    rollout_profile: Annotated[Path | None, typer.Option(help="Measured rollout engine.")] = None,
    caps: Annotated[
        str, typer.Option(help="Token caps of a rollout step to try, comma-separated.")
    ] = "64,128,256,512,1024,2048",
    risk: Annotated[
        float, typer.Option(min=0, max=1, help="By how much the share of late requests may grow.")
    ] = 0.001,
    json_file: Json = None,
) -> None:
    """Say how much rollout capacity a serving fleet can lend, and at what risk."""
    from rose_sim.reports import show_whatif, write_json  # noqa: PLC0415
    from rose_sim.whatif import Question, answer, parse_caps  # noqa: PLC0415

    question = Question(
        trace=trace,
        gpus=gpus,
        gpu=gpu_type,
        tp=tp,
        serving_model=serving_model,
        rollout_model=rollout_model,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        rate_rps=rate,
        hours=hours,
        seed=seed,
        serving_profile=str(serving_profile or ""),
        rollout_profile=str(rollout_profile or ""),
        caps=parse_caps(caps),
        risk=risk,
    )
    screen = Console(highlight=False, stderr=True)
    with screen.status("") as status:
        report = answer(question, status.update)
    if json_file is not None:
        write_json(json_file, report)
    if str(json_file) != "-":
        show_whatif(report, Console(highlight=False))


@app.command()
def sweep(
    scenario: Annotated[Path, typer.Argument(help="A scenario file.")],
    vary: Annotated[list[str], typer.Option(help="TABLE.KEY=V1,V2,...; given again: all combinations.")],
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    json_file: Json = None,
) -> None:
    """Run a scenario for every combination of some settings."""
    from rose_sim.reports import show_sweep, write_json  # noqa: PLC0415
    from rose_sim.sweep import sweep_report  # noqa: PLC0415

    console = Console(highlight=False, stderr=True)
    report = sweep_report(scenario, vary, workers, console)
    if json_file is not None:
        write_json(json_file, report)
    if str(json_file) != "-":
        show_sweep(report, Console(highlight=False))


Former = Annotated[
    Path, typer.Option("--from", help="measured.json of `rose bench coserve`, or the report.json beside it.")
]
Rounds = Annotated[str, typer.Option(help="Only these rounds, comma-separated; default: all.")]


@app.command()
def calibrate(
    former: Former,
    rounds: Rounds = "",
    out: Annotated[Path, typer.Option(help="Where the calibration goes.", callback=writable)] = Path(
        "calibration.json"
    ),
) -> None:
    """Fit the cost model to a measured run: step times, the API server, the cost of sharing a core."""
    from rose_sim import calibration  # noqa: PLC0415
    from rose_sim.coserving import with_throughput  # noqa: PLC0415
    from rose_sim.reports import show_calibration  # noqa: PLC0415

    measured = _measured(former, rounds)
    found = calibration.calibrate(measured, former)
    found = with_throughput(found, measured)
    calibration.write(out, found)
    console = Console(highlight=False)
    show_calibration(found, console)
    console.print(f"calibration: {out}", soft_wrap=True)


@app.command()
def fidelity(
    former: Former,
    calibration: Annotated[Path, typer.Option(help="From `rose sim calibrate`, of another run or rounds.")],
    rounds: Rounds = "",
    same_speed: Annotated[
        bool,
        typer.Option(
            "--same-speed", help="Take the machine's speed from rollout-alone of the predicted run."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the draws from what was measured.")] = 1,
    json_file: Json = None,
) -> None:
    """Predict a measured run from what was sent in it, and hold the prediction against what was measured.

    Exit code 1 when a figure lies outside its tolerance: p50 of TTFT and TPOT 15%, p99 the measured bootstrap
    interval or 30%, rollout throughput 10%.  Shared machines are not equally fast at all times: --same-speed
    scales all steps so that rollout-alone agrees, and leaves that row out.
    """
    from rose_sim.calibration import read  # noqa: PLC0415
    from rose_sim.fidelity import fidelity as compare  # noqa: PLC0415
    from rose_sim.reports import show_fidelity, write_json  # noqa: PLC0415

    measured = _measured(former, rounds)
    report = compare(read(calibration), measured, former, seed, same_speed=same_speed)
    if json_file is not None:
        write_json(json_file, report)
    if str(json_file) != "-":
        show_fidelity(report, Console(highlight=False))
    raise typer.Exit(0 if report["ok"] else 1)


def _measured(path: Path, rounds: str) -> Measured:
    from rose_sim.measured import read_measured  # noqa: PLC0415

    measured = read_measured(path)
    if not rounds:
        return measured
    try:
        numbers = {int(part) for part in rounds.split(",")}
    except ValueError:
        raise ConfigError(f"--rounds: {rounds!r} is not a comma-separated list of numbers") from None
    return measured.rounds(numbers)


@app.command()
def systems() -> None:
    """List the systems that can be compared, with their sources and assumptions."""
    from rose_sim.systems import SYSTEMS  # noqa: PLC0415

    for name, system in SYSTEMS.items():
        typer.echo(f"{name}: {system.source}")
        for assumption in system.assumptions:
            typer.echo(f"    {assumption}")
