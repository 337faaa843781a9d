"""`rose relay`: run the embedded relay until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Annotated

import msgspec
import typer
import uvloop

from rose import config as configuration
from rose.cli.options import ConfigOption
from rose.config import RelayConfig
from rose_daemon import sdnotify
from rose_daemon.relay.server import serving

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def relay(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Port; 0: any.")] = None,
) -> None:
    """Run the relay that weight versions go through."""
    settings = configuration.load(config).relay
    if host is not None:
        settings = msgspec.structs.replace(settings, host=host)
    if port is not None:
        settings = msgspec.structs.replace(settings, port=port)
    by_config = host is None and port is None
    uvloop.run(_run(settings, by_config=by_config))


async def _run(settings: RelayConfig, *, by_config: bool) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with serving(settings) as url:
        print(f"relay listening on {url}", file=sys.stderr, flush=True)
        if by_config and url.rstrip("/") != settings.address.rstrip("/"):
            print(f"note: nodes and trainers look for it at [relay] url, {settings.address}", file=sys.stderr)
        sdnotify.notify("READY=1")
        await stop.wait()
        sdnotify.notify("STOPPING=1")
