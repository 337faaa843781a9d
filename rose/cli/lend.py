"""`rose lend off` and `rose lend on`: the switch of a host's lending."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rose import config as configuration
from rose import switch, wire
from rose.cli.control import NobodyListens, ask
from rose.cli.options import ConfigOption, SocketOption, socket_path
from rose.cli.status import lending_line
from rose.config import Config
from rose.errors import ConfigError, RoseError, TimedOut

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
    """Lend nothing from now on, or lend again.  It stands until the other is ordered, over restarts too.

    While rosed does not run, nothing is lent; the switch is set for the one that starts next.
    """
    on = position is Position.on
    if reset and not on:
        raise ConfigError("--reset goes with `rose lend on`")
    order = wire.LendRequest(on, reset)
    path = socket_path(config, socket)
    body: dict[str, Any] | None
    try:
        body = ask(path, order)
    except (NobodyListens, TimedOut) as silence:
        if socket is not None or reset:  # whose state it is cannot be told, or rosed has to do it
            raise
        body = _recorded(configuration.load(config), order, silence)
    if body is None:
        then = "may lend" if on else "lends nothing"
        print(f"lending: {position.value}, recorded; rosed does not run: the next that starts {then}")
    else:
        print(f"lending: {lending_line(body['lending'])}")


def _recorded(config: Config, order: wire.LendRequest, silence: RoseError) -> dict[str, Any] | None:
    """Set the switch of a rosed that does not answer; its answer, if it does by now.

    Raises RoseError if the switch cannot be set, or if a rosed is there and hangs.
    """
    state_dir = Path(config.node.state_dir)
    try:
        path = switch.put(state_dir, off=not order.on)
    except OSError as error:
        text = f"{silence.what}; and {state_dir / switch.NAME} cannot be written: {error.strerror}"
        raise RoseError(text, "run as rosed's user, or root; see node.state_dir") from None
    if isinstance(silence, TimedOut):
        hint = f"{path} is set, so that it counts once rosed was restarted; its gates close by themselves"
        raise TimedOut(silence.what, hint) from None
    try:
        # One that began meanwhile may have read the switch before; it listens first, and reads then.
        return ask(config.control_socket, order)
    except NobodyListens:
        return None
