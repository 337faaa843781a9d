"""`rose keys`: CURVE keys for the control plane."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rose_daemon.curve import NODE, NODES_DIR, SCHEDULER, make_keys

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def keys(
    whose: Annotated[Literal["scheduler", "node"], typer.Argument(help="Which host this is.")],
    directory: Annotated[Path, typer.Argument(help="What `scheduler.curve_dir` names.")],
) -> None:
    """Make this host's key pair for the control plane, and say what to copy where."""
    public, secret = make_keys(directory, SCHEDULER if whose == "scheduler" else NODE)
    print(f"wrote {public} and {secret}; the second is secret and stays here")
    if whose == "scheduler":
        print(f"copy {public} to scheduler.curve_dir of every node")
        print(f"copy every node's node.key to {directory / NODES_DIR}/<node id>.key")
    else:
        print(f"copy {public} to <scheduler.curve_dir>/{NODES_DIR}/<node id>.key on the scheduler's host")
        print(f"copy the scheduler's scheduler.key to {directory}")
