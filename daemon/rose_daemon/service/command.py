"""`rose token`: a token for one user of the gateway or of the relay."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from rose.errors import ConfigError
from rose_daemon.service.tokens import Scope, make_token

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@app.command()
def token(
    name: Annotated[str, typer.Argument(help="Whose it is.")],
    scope: Annotated[Literal["read", "submit", "admin"], typer.Argument(help="What it allows.")],
    directory: Annotated[
        Path, typer.Argument(help="What `scheduler.tokens_dir` or `relay.tokens_dir` names.")
    ],
) -> None:
    """Make a token: look (read), use (submit) or operate (admin)."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a name", "letters, digits, dashes and underscores")
    path = make_token(directory, name, Scope[scope.upper()])
    print(f"wrote {path}; the server takes it after `systemctl reload` (SIGHUP) or a restart")
