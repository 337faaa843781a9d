"""`rosed`: the host daemon.

    rosed --config FILE           run until SIGTERM or SIGINT; a second signal kills the engines at once
    rosed --config FILE --check   say whether FILE and this host would do, and exit

Exit codes are those of `rose.errors.Exit`.  Whatever is wrong with the configuration or the host is one line
and a hint, before anything was started.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import structlog
import uvloop

from rose import __version__
from rose import config as configuration
from rose.config import Config
from rose.engines.vllm.launch import rollout_command
from rose.errors import ConfigError, RoseError
from rose.secret import read_secret
from rose.weights.relay.connecting import connect
from rose_daemon import sdnotify
from rose_daemon.node import logs, preflight
from rose_daemon.node.control import ControlServer
from rose_daemon.node.driver import NodeDriver
from rose_daemon.node.engines import CommandBuilder
from rose_daemon.node.metrics import MetricsServer, NodeCollector
from rose_daemon.node.orders import Orders

log = structlog.get_logger("rosed")


def main() -> None:
    """Entry point of `rosed`."""
    arguments = _parser().parse_args()
    logs.configure(arguments.log_level)
    try:
        config = configuration.load(arguments.config)
        preflight.check_host(config)
        if arguments.check:
            print(f"rosed: configuration and host are fine: {len(config.replicas)} replica(s)")
            return
        build = _builder(arguments.engine_builder)
        preflight.prepare_host(config)
        uvloop.run(serve(preflight.with_ports(config), build))
    except RoseError as error:
        print(f"rosed: {error.what}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        raise SystemExit(int(error.code)) from None


async def serve(config: Config, build: CommandBuilder) -> None:
    """Run the daemon until a signal.  Raises RoseError when it cannot start."""
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
            collector = NodeCollector(driver.machine.view, driver.weights.history)
            metrics = MetricsServer(collector, config.node.metrics_port)
            await metrics.start()
            stack.push_async_callback(metrics.close)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, driver.stop)
        log.info("rosed runs", code="started", node=config.node.id, socket=str(config.control_socket))
        sdnotify.notify("READY=1")
        await driver.run()
        log.info("rosed ends", code="stopped", node=config.node.id)


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
