"""`rosed`: the host daemon.

    rosed --config FILE           run until SIGTERM or SIGINT; a second signal kills the engines at once
    rosed --config FILE --check   say whether FILE and this host would do, and exit

SIGHUP reads FILE again: what docs/operate.md lists counts from then on, other keys need a restart.

Exit codes are those of `rose.errors.Exit`.  Whatever is wrong with the configuration or the host is one line
and a hint, before anything was started.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import structlog
import uvloop

from rose import __version__, wire
from rose import config as configuration
from rose.cli.control import ask
from rose.config import Config
from rose.engines.vllm.launch import rollout_command
from rose.errors import ConfigError, RoseError
from rose.secret import read_secret
from rose.weights.relay.connecting import connect
from rose_daemon.node import preflight
from rose_daemon.node.control import ControlServer
from rose_daemon.node.driver import NodeDriver
from rose_daemon.node.engines import CommandBuilder
from rose_daemon.node.lending import without_lent
from rose_daemon.node.metrics import MetricsServer, NodeCollector
from rose_daemon.node.orders import Orders
from rose_daemon.node.reload import reconfigure
from rose_daemon.node.statedir import claim
from rose_daemon.service import logs
from rose_daemon.service.supervision import announce, on_reload, probe_http

_PROBE_S = 5.0

log = structlog.get_logger("rosed")


def main() -> None:
    """Entry point of `rosed`."""
    arguments = _parser().parse_args()
    logs.configure(arguments.log_level, "logfmt")
    try:
        config = configuration.load(arguments.config)
        preflight.check_host(config)
        if arguments.check:
            print(f"rosed: configuration and host are fine: {len(config.replicas)} replica(s)")
            return
        build = _builder(arguments.engine_builder)
        preflight.prepare_host(config)
        claim(Path(config.node.state_dir))
        running = preflight.with_ports(without_lent(config))
        uvloop.run(serve(running, build, lambda: without_lent(configuration.load(arguments.config))))
    except RoseError as error:
        print(f"rosed: {error.what}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        raise SystemExit(int(error.code)) from None


async def serve(config: Config, build: CommandBuilder, load: Callable[[], Config]) -> None:
    """Run until a signal; `load` reads the settings again.  Raises RoseError when it cannot start."""
    token = read_secret(config.engine_token_file, "node.token_file")
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        relay = await stack.enter_async_context(
            connect(config.relay, timeout_s=config.node.weights_timeout_s)
        )
        driver = NodeDriver(config, token, relay, session, build)
        control = ControlServer(config.control_socket, Orders(driver).answer)
        await control.start()
        stack.push_async_callback(control.close)
        if config.node.metrics_port:
            collector = NodeCollector(driver.machine.view, driver.weights.history, driver.lending.lender.view)
            metrics = MetricsServer(collector, config.node.metrics_port)
            await metrics.start()
            stack.push_async_callback(metrics.close)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, driver.stop)
        log.info("rosed runs", code="started", node=config.node.id, socket=str(config.control_socket))
        on_reload(lambda: reconfigure(driver, load()))
        announcing = asyncio.create_task(announce(lambda: _probe(driver)))
        try:
            await driver.run()
        finally:
            announcing.cancel()
        log.info("rosed ends", code="stopped", node=config.node.id)


async def _probe(driver: NodeDriver) -> str:
    """What does not work yet of this very daemon; "" if all does."""
    if not driver.ticked.is_set():
        return "the control loop has not run"
    try:
        await asyncio.to_thread(ask, driver.config.control_socket, wire.StatusRequest(), _PROBE_S)
    except RoseError as error:
        return error.what
    port = driver.config.node.metrics_port
    return await probe_http(f"http://127.0.0.1:{port}/metrics") if port else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rosed", description="ROSE host daemon.")
    parser.add_argument("--config", "-c", type=Path, help="rose.toml; default as for `rose`")
    parser.add_argument("--check", action="store_true", help="check configuration and host, then exit")
    parser.add_argument("--log-level", choices=logs.LEVELS, default="info")
    parser.add_argument("--version", action="version", version=f"rosed {__version__}")
    # MODULE:FUNCTION that builds the engines' command lines, for tests and for runs with the mock engine.
    parser.add_argument("--engine-builder", default="", help=argparse.SUPPRESS)
    return parser


def _builder(name: str) -> CommandBuilder:
    if not name:
        return rollout_command
    module, _, function = name.partition(":")
    try:
        builder: CommandBuilder = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--engine-builder {name}: {error}") from None
    return builder


if __name__ == "__main__":
    main()
