"""`rose scheduler`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rose.config import load
from rose_daemon.scheduler.process import run
from rose_daemon.service import logs

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def scheduler(
    config: Annotated[
        Path | None, typer.Option(help="rose.toml; default: $ROSE_CONFIG, ./rose.toml, /etc/rose/rose.toml.")
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Least severe log line to write.")
    ] = "info",
) -> None:
    """Place replicas, route turns, and serve the OpenAI-compatible gateway, until interrupted."""
    logs.configure(log_level, "json")
    run(load(config).scheduler, lambda: load(config).scheduler)
