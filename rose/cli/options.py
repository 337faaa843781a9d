"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rose import config

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="rose.toml; default: $ROSE_CONFIG, ./rose.toml, /etc/rose/rose.toml."
    ),
]
SocketOption = Annotated[
    Path | None,
    typer.Option("--socket", help="Control socket of rosed; default: the one that rose.toml names."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def socket_path(config_file: Path | None, socket: Path | None) -> Path:
    """The control socket to talk to.  Raises ConfigError when it takes a rose.toml and that is bad."""
    return socket or config.load(config_file).control_socket
