"""`rose lend off` and `rose lend on`: the switch of a host's lending."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from rose import wire
from rose.cli.control import ask
from rose.cli.options import ConfigOption, SocketOption, socket_path
from rose.cli.status import lending_line
from rose.errors import ConfigError

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class Position(StrEnum):
    """Of the switch."""

    on = "on"
    off = "off"


@app.command()
def lend(
    position: Annotated[Position, typer.Argument(help="`off` stops rollout at its next step.")],
    reset: Annotated[
        bool, typer.Option("--reset", help="With `on`: start with a full error budget, knowing of the harm.")
    ] = False,
    config: ConfigOption = None,
    socket: SocketOption = None,
) -> None:
    """Lend nothing from now on, or lend again.  It stands until the other is ordered, over restarts too."""
    on = position is Position.on
    if reset and not on:
        raise ConfigError("--reset goes with `rose lend on`")
    body = ask(socket_path(config, socket), wire.LendRequest(on, reset))
    print(f"lending: {lending_line(body['lending'])}")
