"""`rose profile`: measure a model's steps, for its latency model to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rose.config import DeviceConfig
from rose.errors import ConfigError
from rose.profile import Profile
from rose_daemon.harness.interrupts import INTERRUPTED, Interrupts

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def profile(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory.")],
    out: Annotated[Path, typer.Option(help="File to write the profile to.")] = Path("profile.json"),
    device: Annotated[str, typer.Option(help="`cpu` or `cuda`.")] = "cpu",
    cpus: Annotated[str, typer.Option(help="Cores of the worker, comma-separated (device cpu).")] = "0",
    context: Annotated[int, typer.Option(min=512, help="Longest context of the engine.")] = 1024,
    log: Annotated[Path | None, typer.Option(help="Log of the engine; default: beside the profile.")] = None,
) -> None:
    """Measure how long prefills and decodes of a model take on this host, while nothing else runs there."""
    # The plugin's launcher and the load generator: not for --help.
    from rose_daemon.profile.measure import ProfileOptions, measure  # noqa: PLC0415

    options = ProfileOptions(
        model=model,
        device=DeviceConfig(kind=_kind(device), cpus=_cores(cpus)),
        context_tokens_max=context,
        log=(log or out.with_suffix(".engine.log")).resolve(),
    )
    console = Console(highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=1.0)
        interrupts = Interrupts(console.print)
        measured = interrupts.run(
            measure(options, lambda what, share: bar.update(task, description=what, completed=share))
        )
    if measured is None:
        console.print("interrupted; the engine has ended")
        raise typer.Exit(INTERRUPTED)
    measured.save(out)
    console.print(summary(measured))
    console.print(f"profile: {out}", soft_wrap=True)


def summary(measured: Profile) -> str:
    """Medians by size, two lines."""
    lines = []
    for name, steps in (("prefill", measured.prefill), ("decode", measured.decode)):
        by_load: dict[int, list[int]] = {}
        for step in steps:
            by_load.setdefault(step.load, []).append(step.duration_ns)
        medians = (f"{load}: {sorted(of)[len(of) // 2] / 1e6:.1f}" for load, of in sorted(by_load.items()))
        lines.append(f"{name} ms by {'tokens' if name == 'prefill' else 'sequences'}: {', '.join(medians)}")
    return "\n".join(lines)


def _kind(device: str) -> Literal["cpu", "cuda"]:
    if device == "cpu":
        return "cpu"
    if device == "cuda":
        return "cuda"
    raise ConfigError(f"--device: {device!r} is neither cpu nor cuda")


def _cores(cpus: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in cpus.split(","))
    except ValueError:
        raise ConfigError(f"--cpus: {cpus!r} is not a comma-separated list of cores") from None
