"""`rose top`: this host and its job at a glance, with keys to drain replicas and to stop lending."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from rose import config as configuration
from rose import wire
from rose.cli.control import ask
from rose.cli.fleet import UrlOption, scheduler_of
from rose.cli.options import ConfigOption, SocketOption
from rose.errors import ConfigError, RoseError

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def top(
    readonly: Annotated[bool, typer.Option("--readonly", help="Without keys that change anything.")] = False,
    period: Annotated[float, typer.Option("--period", min=0.2, help="Seconds between two looks.")] = 1.0,
    url: UrlOption = None,
    config: ConfigOption = None,
    socket: SocketOption = None,
) -> None:
    """Show host, gate, lending, memory, replicas and jobs until q is pressed."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("`rose top` needs a terminal", "`rose status` and `rose nodes` print once")
    try:
        from rose.cli.screen import Snapshot, Top  # noqa: PLC0415 (textual takes long to import)
    except ModuleNotFoundError as error:
        raise RoseError(
            f"`rose top` needs {error.name}, which is not installed", 'pip install "rose-coserve[top]"'
        ) from None
    path = socket or configuration.load(config).control_socket
    scheduler = scheduler_of(config, url) if url or config or not socket else None

    def look() -> Snapshot:
        return Snapshot(*_try(lambda: ask(path, wire.StatusRequest())), *_jobs(scheduler))

    def order(request: wire.ControlRequest) -> None:
        ask(path, request)

    Top(look, None if readonly else order, period).run()


def _try(read: Any) -> tuple[dict[str, Any] | None, str]:
    try:
        return read(), ""
    except RoseError as error:
        return None, error.what


def _jobs(scheduler: Any) -> tuple[dict[str, Any] | None, str]:
    return (None, "") if scheduler is None else _try(scheduler.status)
