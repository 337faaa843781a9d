"""The scheduler process: puts the parts together, runs them, takes them apart."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog
import uvloop
from aiohttp import web

from rose.config import SchedulerConfig
from rose.config_rules import is_loopback
from rose.core.effects import (
    ClusterEffect,
    DispatchTurn,
    FailTurn,
    GrantLease,
    RevokeLease,
    StopTurn,
    TellStep,
)
from rose.errors import ConfigError, NotReady, RoseError
from rose.units import JobId
from rose_daemon import sdnotify
from rose_daemon.curve import require_private
from rose_daemon.scheduler import workers
from rose_daemon.scheduler.dispatch import Dispatcher
from rose_daemon.scheduler.driver import ClusterDriver, settings_of
from rose_daemon.scheduler.export import ExportApi
from rose_daemon.scheduler.fleet import FleetApi
from rose_daemon.scheduler.forecasts import Forecasts
from rose_daemon.scheduler.garbage import collect_seldom
from rose_daemon.scheduler.gateway import Gateway
from rose_daemon.scheduler.jobs import JobDesk
from rose_daemon.scheduler.nodes import NodeLink
from rose_daemon.scheduler.output import Answer
from rose_daemon.scheduler.pacing import Pacer
from rose_daemon.scheduler.server import IDLE_TIMEOUT_S, ControlApi, Sources, build_app
from rose_daemon.scheduler.store import Store
from rose_daemon.scheduler.telemetry import Gauges, Telemetry
from rose_daemon.scheduler.text_api import TextApi
from rose_daemon.scheduler.tracing import open_tracer
from rose_daemon.scheduler.turns import Turn
from rose_daemon.scheduler.upstream import Upstream
from rose_daemon.scheduler.worker_api import WorkerApi
from rose_daemon.scheduler.workers import Workers
from rose_daemon.service.changes import changed_keys
from rose_daemon.service.supervision import announce, on_reload, probe_http, reachable
from rose_daemon.service.tls import renew, server_context
from rose_daemon.service.tokens import Keyring

_SHUTDOWN_S = 3.0
_BEAT_S_MAX = 0.5
_CHECKPOINT_S = 2.0
_BACKLOG = 4096
"""Connections that may wait to be taken; what comes beyond is dropped, and tried again after a second."""
_LINGER_S = 1.0
"""How long the rest of a refused request is read, so that its sender gets to see the answer."""

log = structlog.get_logger()


def check(config: SchedulerConfig) -> Keyring:
    """Refuse unsafe or unreadable settings before anything starts; answers the clients' tokens.

    Raises ConfigError.
    """
    require_private(config.control, config.curve_dir)
    tokens = Keyring.read("scheduler", config.token_file, config.tokens_dir)
    private = tokens and (config.tls_cert or config.tls_elsewhere)
    if not private and not is_loopback(config.gateway_host):
        raise ConfigError(
            f"scheduler.gateway_host: {config.gateway_host} can be reached from other hosts",
            "set [scheduler] token_file or tokens_dir, and tls_cert, or listen on 127.0.0.1",
        )
    return tokens


class Scheduler:
    """All parts of one scheduler.  Make it inside the running loop that it is to use.

    Raises RoseError when the state directory or the control port cannot be used.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._tokens = check(config)
        self._tls = server_context("scheduler", config.tls_cert, config.tls_key)
        self._started_s = time.monotonic()
        self.id = uuid.uuid4().hex[:12]
        self.tracer = open_tracer(config.otlp_traces_endpoint, self.id)
        self.store = Store(Path(config.state_dir))
        self.telemetry = Telemetry(self._gauges)
        self.driver = ClusterDriver(settings_of(config), self.store, self.telemetry)
        try:
            self.nodes = NodeLink(
                config.control,
                self.id,
                self.driver.machine,
                self.driver.feed,
                telemetry=self.telemetry,
                curve_dir=config.curve_dir,
            )
        except RoseError:
            self.store.close()
            raise
        self.desk = JobDesk(self.store, self.driver.feed)
        self.forecasts = Forecasts(self.desk, self.driver.machine)
        self.upstream = Upstream(Pacer(config.stream_spacing_max_ms / 1000))
        self.dispatcher = Dispatcher(
            feed=self.driver.feed,
            replica=self.driver.machine.replica,
            keep=self._keep,
            cache_salt=self.desk.cache_salt,
            upstream=self.upstream,
            telemetry=self.telemetry,
            turn_stall_s=config.turn_stall_timeout_s,
        )
        self.workers = Workers(
            config.workers,
            self.id,
            min(_BEAT_S_MAX, config.stall_timeout_ms / 4000),
            store=self.store,
            upstream=self.upstream,
            feed=self.driver.feed,
        )
        self.driver.connect(self._perform_on_turns, self._perform_on_nodes)
        self.driver.restore()
        self._runner: web.AppRunner | None = None
        self._serving: asyncio.Task[None] | None = None
        self.gateway_url = ""
        self.address = ("", 0)

    async def start(self) -> None:
        """Serve nodes and clients from now on.  Raises RoseError when the gateway's port cannot be had."""
        self._serving = asyncio.create_task(self._serve())
        gateway = Gateway(self.desk, self.dispatcher, self.store, self.tracer)
        fleet = FleetApi(self.desk, self.dispatcher, self.driver.machine.job_view, self.workers.flush)
        sources = Sources(
            job=self._job,
            status=self.status,
            metrics=self.telemetry.exposition,
            drain=self.driver.feed,
            trajectories=self._trajectories,
            explain=self.driver.chronicle.find,
        )
        app = build_app(
            gateway,
            [
                *fleet.routes(),
                *WorkerApi(self.workers).routes(),
                *ExportApi(self.desk, self.store).routes(),
                *TextApi(self.desk, self.driver.machine.job_view, self.upstream.forward).routes(),
                *self.forecasts.routes(),
            ],
            ControlApi(self.desk, sources),
            tokens=self._tokens,
            body_bytes_max=self._config.body_bytes_max,
        )
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=IDLE_TIMEOUT_S,
            lingering_time=_LINGER_S,
            shutdown_timeout=_SHUTDOWN_S,
        )
        await self._runner.setup()
        host, port = self._config.gateway_host, self._config.gateway_port
        try:
            await web.TCPSite(self._runner, host, port, ssl_context=self._tls, backlog=_BACKLOG).start()
        except OSError as error:
            raise NotReady(
                f"scheduler.gateway_port: cannot listen on {host}:{port}: {error.strerror or error}",
                "is another scheduler running? Set [scheduler] gateway_port to a free port",
            ) from None
        self.address = self._runner.addresses[0][:2]
        self.gateway_url = f"{self._scheme}://{self.address[0]}:{self.address[1]}"

    def reload(self, config: SchedulerConfig) -> list[str]:
        """Take over tokens and certificate of settings read again; answers the keys that need a restart.

        Raises ConfigError, and changes nothing, if they are not usable.
        """
        tokens = check(config)
        if self._tls is not None and config.tls_cert:
            renew(self._tls, "scheduler", config.tls_cert, config.tls_key)
        self._tokens.replace(tokens)
        waiting = changed_keys(self._config, config, ("token_file", "tokens_dir"))
        return [f"scheduler.{key}" for key in waiting]

    async def probe(self) -> str:
        """What does not work yet; "" once the gateway answers."""
        host, port = self.address
        return await probe_http(f"{self._scheme}://{reachable(host)}:{port}/health")

    @property
    def _scheme(self) -> str:
        return "https" if self._tls else "http"

    async def failed(self) -> None:
        """Wait until a part fails, and raise its error."""
        assert self._serving is not None, "not started"
        await asyncio.shield(self._serving)

    async def close(self) -> None:
        """Answer what is in flight, close all sockets and the store."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        await self.dispatcher.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self.tracer.close()
        self.nodes.close()
        self.store.close()

    def status(self) -> dict[str, Any]:
        """The document of GET /rose/v1/status."""
        view = msgspec.to_builtins(self.driver.machine.view(time.monotonic_ns()))
        return {
            "scheduler": self.id,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "turns": self.dispatcher.book.snapshot(),
            "nodes": view["nodes"],
            "replicas": view["replicas"],
            "jobs": view["jobs"],
            "pins": view["pins"],
        }

    # ---- inside ------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.nodes.run())
            group.create_task(self.driver.run())
            group.create_task(self.dispatcher.keep_streams_alive())
            group.create_task(self.workers.run())
            group.create_task(self.forecasts.run())
            group.create_task(self._checkpoints())

    async def _checkpoints(self) -> None:
        """Wait for the disk in a thread, so that streams do not."""
        while True:
            await asyncio.sleep(_CHECKPOINT_S)
            await asyncio.to_thread(self.store.checkpoint)

    def _job(self, job: JobId) -> dict[str, Any] | None:
        view = self.driver.machine.job_view(job)
        document: dict[str, Any] | None = None if view is None else msgspec.to_builtins(view)
        return document

    def _trajectories(self, most: int, job: JobId | None) -> list[dict[str, Any]]:
        views = self.driver.machine.trajectories(time.monotonic_ns(), most, job)
        return [msgspec.to_builtins(view) for view in views]

    def _keep(self, turn: Turn, answer: Answer) -> None:
        if turn.named and (dropped := self.store.put_answer(turn.job, turn.request.digest, answer)):
            self.telemetry.dropped("stored_answer", dropped)

    def _perform_on_turns(self, effect: ClusterEffect) -> None:
        match effect:
            case DispatchTurn():
                self.dispatcher.dispatch(effect)
            case StopTurn():
                self.dispatcher.stop(effect)
            case FailTurn():
                self.dispatcher.fail(effect)
            case _:
                raise AssertionError(f"not an effect on turns: {effect!r}")

    def _perform_on_nodes(self, effect: ClusterEffect) -> None:
        # Engines that ROSE does not manage are told nothing: to the machine they are a node, to ZMQ not.
        if isinstance(effect, (TellStep, GrantLease, RevokeLease)) and effect.node != workers.NODE:
            self.nodes.perform(effect)

    def _gauges(self) -> Gauges:
        view = self.driver.machine.view(time.monotonic_ns())
        counts = self.dispatcher.book.snapshot()
        states: dict[tuple[tuple[str, str], ...], float] = {}
        for node in view.nodes:
            key = (("state", str(node.state)),)
            states[key] = states.get(key, 0) + 1
        by_replica = {(("replica", str(replica.replica)),): replica for replica in view.replicas}
        return {
            ("rose_turn_counts", "Turns and attempts since start, by kind"): {
                (("kind", kind),): float(value) for kind, value in counts.items()
            },
            ("rose_nodes", "Nodes, by state"): states,
            ("rose_job_trajectories_stale", "Trajectories aborted as over-stale since start"): {
                (("job", str(job.job)),): float(job.trajectories_stale) for job in view.jobs
            },
            ("rose_replica_turns_in_flight", "Turns in flight"): {
                key: float(replica.turns_in_flight) for key, replica in by_replica.items()
            },
            ("rose_replica_weight_version", "Weight version as last reported"): {
                key: float(replica.weight_version)
                for key, replica in by_replica.items()
                if replica.weight_version is not None
            },
            ("rose_replica_eligible", "1 if the replica takes turns of its job now"): {
                key: float(replica.eligible) for key, replica in by_replica.items()
            },
        }


@contextlib.asynccontextmanager
async def running(config: SchedulerConfig) -> AsyncIterator[Scheduler]:
    """A scheduler that serves inside this loop, for as long as the block runs.  Raises RoseError."""
    scheduler = Scheduler(config)
    try:
        await scheduler.start()
        yield scheduler
    finally:
        await scheduler.close()


async def _main(config: SchedulerConfig, load: Callable[[], SchedulerConfig]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with running(config) as scheduler:
        log.info("scheduler_ready", gateway=scheduler.gateway_url, control=scheduler.nodes.address)
        on_reload(lambda: scheduler.reload(load()))
        announcing = asyncio.create_task(announce(scheduler.probe))
        collecting = asyncio.create_task(collect_seldom(lambda: not scheduler.dispatcher.book.live))
        failed = asyncio.create_task(scheduler.failed())
        stopping = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait({failed, stopping}, return_when=asyncio.FIRST_COMPLETED)
        announcing.cancel()
        collecting.cancel()
        sdnotify.notify("STOPPING=1")
        if failed in done:
            failed.result()
        failed.cancel()
        stopping.cancel()
    log.info("scheduler_stopped")


def run(config: SchedulerConfig, load: Callable[[], SchedulerConfig]) -> None:
    """Run until SIGINT or SIGTERM; `load` reads the settings again.  Raises RoseError if it cannot start."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(config, load))
