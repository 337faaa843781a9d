"""`rose top`: this host and its job at a glance, with keys to drain replicas and to stop lending."""

from __future__ import annotations

import json
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
SCHEMA = 1

Read = tuple[dict[str, Any] | None, str, dict[str, Any] | None, str]
"""rosed's status, and the scheduler's, each with the reason where there is none."""


@app.command()
def top(
    readonly: Annotated[bool, typer.Option("--readonly", help="Without keys that change anything.")] = False,
    period: Annotated[float, typer.Option("--period", min=0.2, help="Seconds between two looks.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what it would show, once, as JSON.")] = False,
    url: UrlOption = None,
    config: ConfigOption = None,
    socket: SocketOption = None,
) -> None:
    """Show host, gate, lending, memory, replicas and jobs until q is pressed."""
    if not as_json and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "`rose top` needs a terminal", "--json, or `rose status` and `rose nodes`, print once"
        )
    path = socket or configuration.load(config).control_socket
    scheduler = scheduler_of(config, url) if url or config or not socket else None

    def read() -> Read:
        return *_try(lambda: ask(path, wire.StatusRequest())), *_jobs(scheduler)

    if as_json:
        print(json.dumps(document(read()), indent=2))
        return
    try:
        from rose.cli.screen import Snapshot, Top  # noqa: PLC0415 (textual takes long to import)
    except ModuleNotFoundError as error:
        raise RoseError(
            f"`rose top` needs {error.name}, which is not installed", 'pip install "rose-coserve[top]"'
        ) from None

    def look() -> Snapshot:
        return Snapshot(*read())

    def order(request: wire.ControlRequest) -> None:
        ask(path, request)

    Top(look, None if readonly else order, period).run()


def document(read: Read) -> dict[str, Any]:
    """What the screen shows, as JSON: the answers of rosed and of the scheduler, null where there is none."""
    node, node_error, fleet, fleet_error = read
    return {
        "schema": SCHEMA,
        "command": "top",
        "host": node,
        "host_error": node_error,
        "scheduler": fleet,
        "scheduler_error": fleet_error,
    }


def _try(read: Any) -> tuple[dict[str, Any] | None, str]:
    try:
        return read(), ""
    except RoseError as error:
        return None, error.what


def _jobs(scheduler: Any) -> tuple[dict[str, Any] | None, str]:
    return (None, "") if scheduler is None else _try(scheduler.status)
