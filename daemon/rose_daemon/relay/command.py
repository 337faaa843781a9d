"""`rose relay`: run the embedded relay until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import msgspec
import typer
import uvloop

from rose import config as configuration
from rose.cli.options import ConfigOption
from rose.config import RelayConfig
from rose_daemon import sdnotify
from rose_daemon.relay.server import listening
from rose_daemon.service import logs
from rose_daemon.service.supervision import announce, on_reload, probe_http, reachable

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def relay(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Port; 0: any.")] = None,
) -> None:
    """Run the relay that weight versions go through."""
    named = {name: value for name, value in (("host", host), ("port", port)) if value is not None}

    def load() -> RelayConfig:
        return msgspec.structs.replace(configuration.load(config).relay, **named)

    logs.configure("info", "json")
    uvloop.run(_run(load(), load, by_config=not named))


async def _run(settings: RelayConfig, load: Callable[[], RelayConfig], *, by_config: bool) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with listening(settings) as relay:
        url = relay.url
        print(f"relay listening on {url}", file=sys.stderr, flush=True)
        if by_config and url.rstrip("/") != settings.address.rstrip("/"):
            print(f"note: nodes and trainers look for it at [relay] url, {settings.address}", file=sys.stderr)
        on_reload(lambda: relay.reload(load()))
        scheme = "https" if relay.tls else "http"
        health = f"{scheme}://{reachable(settings.host)}:{relay.port}/health"
        announcing = asyncio.create_task(announce(lambda: probe_http(health)))
        await stop.wait()
        announcing.cancel()
        sdnotify.notify("STOPPING=1")
