"""rosed's loop: observations become events for the node machine, and its effects are carried out.

Everything runs in one asyncio loop; the only threads are short-lived ones that read /proc and weight files.
The machine is fed by one queue, so that an event that arises while effects are carried out waits its turn.
Gates are renewed at the end of every tick and by nothing else: a loop that hangs lets them close.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, assert_never
from urllib.parse import urlsplit

import aiohttp
import msgspec
import structlog

from rose.boards import BoardPaths, Owner, WatchedBoard
from rose.config import Config
from rose.config_rules import is_loopback
from rose.core.effects import (
    ApplyVersion,
    NodeEffect,
    PublishGate,
    PullVersion,
    ReportNow,
    Say,
    StartEngine,
    StopEngine,
    TakeBackMeasured,
)
from rose.core.events import (
    DeviceObserved,
    MemoryObserved,
    NodeEvent,
    PinRequested,
    ReplicaObserved,
    ReplicaReport,
    ServingObserved,
    ShutdownRequested,
    Tick,
    UndoReady,
    WeightsApplied,
)
from rose.core.node import NodeMachine
from rose.core.readings import GateTransition, ReplicaReading, SlackReading, Unknown
from rose.journals import DECISIONS, GATES, GateEntry
from rose.rings import RingReader
from rose.units import NS_PER_S, ReplicaId, WeightVersion, ms_to_ns
from rose.weights.relay import Relay
from rose.weights.store import WeightStore
from rose_daemon import sdnotify
from rose_daemon.node import host
from rose_daemon.node.device import open_device
from rose_daemon.node.engine_http import EngineClient, EngineRefused, EngineUnreachable
from rose_daemon.node.engines import CommandBuilder, Engine, Engines
from rose_daemon.node.gates import Gates
from rose_daemon.node.inferred import InferredBoard
from rose_daemon.node.journal import Journal
from rose_daemon.node.keeper import CopyKeeper
from rose_daemon.node.lending import LendingDesk
from rose_daemon.node.link import SchedulerLink
from rose_daemon.node.mps import TIME_SLICE, open_mps
from rose_daemon.node.settings import node_settings, stop_grace_ns
from rose_daemon.node.sharing import SharedMemory
from rose_daemon.node.status import Surroundings, status_body, supervisor_line
from rose_daemon.node.weights import WeightAgent
from rose_daemon.service.supervision import Heartbeat
from rose_daemon.telemetry.engine_metrics import Averages
from rose_daemon.telemetry.serving import MetricsWatch, probe

_MEMORY_PERIOD_S = 1.0
_MPS_PERIOD_S = 5.0
_ANSWERS_S = 0.5
"""Time that the answers of aborted requests have to leave an engine before it is asked to end."""
_CANCEL_S = 0.2
_NOT_PROBED = Unknown("not_observed")

log = structlog.get_logger("rosed")


class NodeDriver:
    """One host's daemon, without its control socket and metrics port.

    `config` names a port for every replica.  Use `run` once, and `stop` from anywhere in the loop to end it.
    """

    def __init__(
        self, config: Config, token: str, relay: Relay, session: aiohttp.ClientSession, build: CommandBuilder
    ) -> None:
        self.config = config
        self.machine = NodeMachine(node_settings(config))
        paths = BoardPaths(Path(config.node.run_dir))
        self._slack = WatchedBoard(paths.slack(config.serving.name), SlackReading)
        self._replica_boards = {
            section.id: WatchedBoard(paths.replica(section.id), ReplicaReading) for section in config.replicas
        }
        self._stale_ns = ms_to_ns(config.admission.board_stale_ms)
        self.gates = Gates(paths, ms_to_ns(config.node.gate_lease_ms))
        self._journal = Journal(Path(config.node.state_dir) / DECISIONS, config.node.journal_bytes_max)
        self._store = WeightStore(Path(config.node.state_dir))
        self.keeper = CopyKeeper(config, relay, self.emit)
        self._gate_journal = Journal(Path(config.node.state_dir) / GATES, config.node.journal_bytes_max)
        self._transitions = {
            section.id: RingReader(paths.transitions(section.id), GateTransition)
            for section in config.replicas
        }
        self._mps = open_mps(config)
        self.engines = Engines(
            config,
            self._mps.builder(build) if self._mps else build,
            lambda url: EngineClient(session, url, token),
            self.emit,
            self._run_errand,
            self.keeper,
            self._ease_out if self._mps else None,
        )
        self.link = SchedulerLink(config, self.reports, self.emit, time.monotonic_ns)
        self.weights = WeightAgent(config, relay, self.engines, self.emit, time.monotonic_ns, self.keeper)
        self.lending = LendingDesk(config, self.emit, self.machine, self.engines)
        self._session = session
        self._healthy: bool | Unknown = _NOT_PROBED
        self._metrics = MetricsWatch(ms_to_ns(config.serving.metrics_stale_ms))
        self._averages = Averages()
        self._inferred: InferredBoard | None = None
        if config.serving.mode == "metrics":
            self._inferred = InferredBoard(config, paths.slack(config.serving.name), self.gates.ring)
        self._serving: Owner | Unknown | None = None
        self._device = open_device(config)
        self._utilisation: float | Unknown = _NOT_PROBED
        self._memory = MemoryObserved(_NOT_PROBED, _NOT_PROBED, _NOT_PROBED)
        self._shared = SharedMemory(paths.ledger) if config.memory.shared_kv_bytes else None
        self._lent = tuple(each.id for each in config.replicas if each.kind == "opportunistic")
        self._queue: deque[NodeEvent] = deque()
        self._moved = asyncio.Event()
        """An engine or the copy came to hold another version: some staged ones may not be needed any more."""
        self._feeding = False
        self._stopping = asyncio.Event()
        self._failure: BaseException | None = None
        self._errands: set[asyncio.Task[None]] = set()
        self.ticked = asyncio.Event()
        """The control loop has gone round once: boards were read, gates were written."""
        self._started_at = datetime.now(UTC)
        self._started_ns = time.monotonic_ns()

    # ---- events and effects ---------------------------------------------------------------------

    def emit(self, event: NodeEvent) -> None:
        """Feed the machine, and carry out what it decides."""
        self._queue.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._queue:
                self.decide(self._queue.popleft())
        finally:
            self._feeding = False

    def decide(self, event: NodeEvent) -> list[NodeEffect]:
        """Feed one event and carry out its effects; answers them.  For operators' orders; all else emits."""
        now_ns = time.monotonic_ns()
        if self._mps is not None:
            self._mps.heard(event, self._lent, self._serving)
        self.lending.heard(event, now_ns)
        effects = self.machine.step(event, now_ns)
        self._journal.write(now_ns, event, effects)
        for effect in effects:
            self._carry_out(effect, now_ns)
        if isinstance(event, WeightsApplied | UndoReady):
            self._moved.set()
        return effects

    def _carry_out(self, effect: NodeEffect, now_ns: int) -> None:
        match effect:
            case Say(level=level, code=code, text=text, subject=subject):
                log.log(_LEVELS[level], text, code=code, subject=subject)
            case StartEngine(replica=replica, attempt=attempt):
                self._clear_replica_board(replica)
                self.engines.start(replica, attempt)
            case StopEngine(replica=replica, grace_ns=grace_ns, reason=reason):
                self.engines.stop(replica, grace_ns / NS_PER_S, reason)
            case PublishGate(replica=replica, policy=policy):
                self.gates.publish(replica, policy, now_ns)
            case PullVersion():
                self._run_errand(self.weights.pull(effect))
            case ApplyVersion():
                self._run_errand(self.weights.apply(effect))
            case ReportNow():
                self.link.report_now()
            case TakeBackMeasured(replica=replica, blocks=blocks, duration_ns=duration_ns):
                self.lending.took_back(replica, blocks, duration_ns)
            case _:
                assert_never(effect)

    def _clear_replica_board(self, replica: ReplicaId) -> None:
        """Take away what a former engine left, so that its last words are not taken for the new one's."""
        self._replica_boards[replica].path.unlink(missing_ok=True)

    def _run_errand(self, errand: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errand_done)
        return task

    def _errand_done(self, task: asyncio.Task[None]) -> None:
        self._errands.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A fault of ours.  The machine waits for an outcome that will not come: end, and be restarted.
            log.critical("errand failed", code="internal_error", error=repr(error))
            self._failure = error
            self._stopping.set()

    def reports(self) -> tuple[ReplicaReport, ...]:
        """What the scheduler is told; KV use of serving falls back on its metrics."""
        share = self._metrics.latest(time.monotonic_ns()).kv_used_share
        if isinstance(share, Unknown):
            return self.machine.reports()
        return tuple(
            msgspec.structs.replace(report, serving_kv_used_share=share)
            if report.serving_kv_used_share is None and report.kind == "opportunistic"
            else report
            for report in self.machine.reports()
        )

    def pin(self, version: WeightVersion | None) -> None:
        """Hold engines at a version, across restarts of rosed too; None lets them follow.  Raises OSError."""
        self._store.set_pin(self.config.job.id, version)
        self.keeper.pin(version)
        self.decide(PinRequested(self.config.job.id, version))

    # ---- life -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Begin the ordered shutdown; a second call kills the engines at once."""
        if self._stopping.is_set():
            self.engines.kill()
        self._stopping.set()

    async def run(self) -> None:
        """Until `stop`.  Whatever way it ends, engines and boards of ours are gone afterwards."""
        if (pin := self._store.pin(self.config.job.id)) is not None:
            self.keeper.pin(pin)
            self.emit(PinRequested(self.config.job.id, pin))
        await self.engines.adopt()
        self.lending.begin()
        tasks = [
            asyncio.create_task(work, name=name)
            for name, work in (
                ("tick", self._tick()),
                ("memory", self._watch_memory()),
                ("serving", self._watch_serving()),
                ("mps", self._watch_mps()),
                ("relay", self.weights.watch()),
                ("copy", self.keeper.run()),
                ("prune", self._prune()),
                ("lending", self.lending.run()),
                ("scheduler", self.link.run()),
            )
        ]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            await self._shut_down(tasks)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if self._failure is not None:
            raise self._failure

    async def _prune(self) -> None:
        while True:
            await self._moved.wait()
            self._moved.clear()
            if (oldest := self.machine.oldest_held) is not None:
                await self.weights.prune(oldest)

    async def _shut_down(self, tasks: list[asyncio.Task[None]]) -> None:
        """In order: no new work, the scheduler knows, gates closed, engines ended, traces removed."""
        sdnotify.notify("STOPPING=1")
        left = set(tasks)
        while left:  # a wait_for that ends in the same moment loses the cancellation: say it again
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=_CANCEL_S)
        await self.link.close()
        self.emit(ShutdownRequested())
        self.gates.close()
        await self.engines.close(stop_grace_ns(self.config) / NS_PER_S)
        for errand in self._errands:
            errand.cancel()
        await asyncio.gather(*self._errands, return_exceptions=True)
        if self._inferred is not None:
            self._inferred.close()
        for board in self._replica_boards.values():
            board.path.unlink(missing_ok=True)
        self._fetch_transitions()
        for ring in self._transitions.values():
            ring.path.unlink(missing_ok=True)
        self._journal.close()
        self._gate_journal.close()
        self.lending.close()
        await asyncio.to_thread(self._device.close)

    async def _tick(self) -> None:
        period_s = self.config.node.tick_ms / 1000
        heartbeat = Heartbeat()
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            now_ns = time.monotonic_ns()
            self._observe_boards(now_ns)
            self.emit(Tick())
            self.gates.renew(time.monotonic_ns())
            self._journal.flush()
            self._fetch_transitions()
            heartbeat.beat()
            self.ticked.set()
            # A late tick is not made up for: the next one comes a full period later.
            next_s = max(next_s + period_s, loop.time())
            await asyncio.sleep(next_s - loop.time())

    def _fetch_transitions(self) -> None:
        """Bring what the gates did since the last tick to the disk."""
        for replica, ring in self._transitions.items():
            for transition in ring.fetch():
                self._gate_journal.append(GateEntry.of(replica, transition))
        self._gate_journal.flush()

    def _observe_boards(self, now_ns: int) -> None:
        if self.config.serving.url:
            inferred = self._inferred
            slack = inferred.read(now_ns) if inferred else self._slack.read(now_ns, self._stale_ns)
            self.emit(ServingObserved(slack, self._healthy))
        for replica, board in self._replica_boards.items():
            self.emit(ReplicaObserved(replica, board.read(now_ns, self._stale_ns)))
        if self._shared is not None:
            self._memory = self._shared.observe(now_ns)
            self.emit(self._memory)

    async def _watch_memory(self) -> None:
        told = ""
        while True:
            self._utilisation = self._device.utilisation()
            self._serving = await asyncio.to_thread(self._find_serving)
            if self._shared is None:
                self._memory = await asyncio.to_thread(self._read_memory)
                self.emit(self._memory)
            self.emit(self._health())
            line = supervisor_line(self.machine.view(), self._memory, bool(self._lent))
            if line != told:
                told = line
                sdnotify.notify(f"STATUS={line}")
            await asyncio.sleep(_MEMORY_PERIOD_S)

    def _read_memory(self) -> MemoryObserved:
        pids = [engine.pid for replica in self._lent if (engine := self.engines.get(replica))]
        return self._device.memory(self._serving, pids)

    def _find_serving(self) -> Owner | Unknown | None:
        """The serving engine's process: who writes its board, or else who listens on its port."""
        url = self.config.serving.url
        if not url:
            return None
        if self._inferred is None:
            return self._slack.owner or Unknown("serving_not_seen")
        if not (isinstance(self._serving, Owner) and self._serving.alive()):
            parts = urlsplit(url)
            local = is_loopback(parts.hostname or "")
            port = parts.port or (443 if parts.scheme == "https" else 80)
            return host.listener(port) if local else Unknown("serving_not_local")
        return self._serving

    async def _watch_mps(self) -> None:
        while self._mps is not None:
            await asyncio.to_thread(self._mps.look, self._serving)
            for replica in self._lent:
                engine = self.engines.get(replica)
                if engine and (ignored := self._mps.ignored_limits(engine.pid)):
                    grace_s = stop_grace_ns(self.config) / NS_PER_S
                    self.engines.stop(replica, grace_s, f"mps_limit_mismatch: {'; '.join(ignored)}")
            await asyncio.sleep(_MPS_PERIOD_S)
        await asyncio.Event().wait()

    async def _ease_out(self, engine: Engine) -> None:
        """Before an engine that shares the GPU is asked to end: no new turns, and none in flight."""
        self.link.report_now()
        with contextlib.suppress(EngineUnreachable, EngineRefused):
            if await engine.client.abort_all():
                await asyncio.sleep(_ANSWERS_S)

    def _health(self) -> DeviceObserved:
        """The device's own trouble first, then what MPS made of it."""
        health = self._device.health()
        if health.trouble or self._mps is None:
            return health
        return self._mps.health(self._serving)

    async def _watch_serving(self) -> None:
        serving = self.config.serving
        period_s = (serving.metrics_ms if self._inferred else serving.probe_ms) / 1000
        while self.config.serving.url:
            url = self.config.serving.url.rstrip("/")
            self._healthy, metrics = await probe(self._session, url, max(1.0, period_s))
            now_ns = time.monotonic_ns()
            self._metrics.observe(metrics, now_ns)
            self._averages.observe(metrics)
            if self._inferred is not None:
                known = metrics if isinstance(metrics, Unknown) else self._metrics.latest(now_ns)
                self._inferred.observe(known, now_ns)
            await asyncio.sleep(period_s)
        await asyncio.Event().wait()

    # ---- what operators see ---------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """JSON of `rose status`."""
        leases = {replica: lease.job for replica, lease in self.link.leases.items()}
        around = Surroundings(
            started_at=self._started_at,
            uptime_s=(time.monotonic_ns() - self._started_ns) / NS_PER_S,
            device_name=self._device.name(),
            sharing=self._mps.mode if self._mps else TIME_SLICE,
            utilisation=self._utilisation,
            memory_bytes=self._memory.total_bytes,
            scheduler_address=self.link.address,
            metrics=self._metrics.latest(time.monotonic_ns()),
            averages=self._averages,
            turns_in_flight=self.link.turns_in_flight if self.link.registered else None,
            leases=leases,
            relay_error=self.weights.relay_error,
            journal_lost=self._journal.lost + self._gate_journal.lost + self.lending.lost,
            gate_transitions_lost=sum(ring.dropped + ring.torn for ring in self._transitions.values()),
        )
        body = status_body(self.config, self.machine.view(), around, self.weights.history)
        return {**body, "lending": self.lending.view()}


_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
