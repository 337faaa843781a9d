"""Rollout engine processes: start, readiness, exit, stop.

Every engine runs under a warden (`warden.py`) and ends with rosed.  Where `node.adopt_grace_s` is set it
waits that long behind its closed gate after rosed was killed, and the next rosed takes it over (`adopt`).
All others are started afresh, from the host's copy of the checkpoint, or the checkpoint itself and staged
deltas.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog

from rose.config import Config, ReplicaConfig
from rose.core.adoption import refusal, weights_refusal
from rose.core.events import EngineExited, EngineReady, EngineStarted, NodeEvent
from rose.engines.vllm.launch import EngineCommand
from rose.engines.vllm.settings import PluginSettings
from rose.units import ReplicaId, WeightVersion
from rose_daemon.node import adoption, warden
from rose_daemon.node.engine_http import EngineClient, EngineRefused, EngineUnreachable
from rose_daemon.node.keeper import CopyKeeper, Source
from rose_daemon.node.warden import KILL

CommandBuilder = Callable[[ReplicaConfig, Config], EngineCommand]
"""How to start a replica's engine; its port is never 0 here."""

_READY_POLL_S = 0.25
_KILL_S = 60.0
_ADOPT_S = 30.0
"""Time an engine that outlived its rosed has to answer and be verified."""
_UNREADABLE_MAX = 20
"""Answers of a healthy engine that it cannot read its own board, before it is given up."""
_START_MARK = "rosed: starting "
_LOG_TAIL_BYTES = 1 << 18
_LINE_CHARACTERS = 400
_EXCEPTION = re.compile(
    r"(?:\([^)]*\) ERROR \S+ \S+ \[[^]]*\] )?([A-Za-z_][\w.]*(?:Error|Exception|Failed): .+)"
)
"""The line that ends a traceback, as it is or behind the prefix of vLLM's logger."""

log = structlog.get_logger("rosed")


class EngineProcess(Protocol):
    """A warden: our child, or one that we took over."""

    @property
    def pid(self) -> int:
        """Its pid."""

    async def wait(self) -> int:
        """Until it has ended; the exit code."""

    def send_signal(self, number: int, /) -> None:
        """Raises ProcessLookupError."""


class Engine:
    """One running (or starting) engine."""

    def __init__(self, url: str, process: EngineProcess, client: EngineClient) -> None:
        self.url = url
        self.process = process
        self.client = client
        self.stop_reason = ""
        """Why we end it; empty while we do not."""

    @property
    def pid(self) -> int:
        """Pid of the warden, the root of the engine's processes."""
        return self.process.pid


class Engines:
    """The engines that this rosed started, by replica.  Reports what happens to them as events.

    Every replica of `config` has a port by now: see `preflight.with_ports`.
    """

    def __init__(
        self,
        config: Config,
        build: CommandBuilder,
        connect: Callable[[str], EngineClient],
        emit: Callable[[NodeEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        keeper: CopyKeeper,
        before_stop: Callable[[Engine], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._before_stop = before_stop
        self._config = config
        self._build = build
        self._connect = connect
        self._emit = emit
        self._task = spawn
        self._keeper = keeper
        self._running: dict[ReplicaId, Engine] = {}
        self._tasks: dict[ReplicaId, asyncio.Task[None]] = {}
        self._stop_once_spawned: dict[ReplicaId, tuple[float, str]] = {}
        self._stops: dict[ReplicaId, asyncio.Task[None]] = {}
        self._logs = Path(config.node.state_dir) / "logs"

    def get(self, replica: ReplicaId) -> Engine | None:
        """The replica's engine, if a process exists."""
        return self._running.get(replica)

    def log_path(self, replica: ReplicaId) -> Path:
        """Where the engine's output goes."""
        return self._logs / f"{replica}.log"

    def start(self, replica: ReplicaId, attempt: int) -> None:
        """Spawn the engine; EngineStarted, then EngineReady or EngineExited follow."""
        if (former := self._tasks.get(replica)) and not former.done():
            return
        self._tasks[replica] = self._task(self._live(replica, attempt))

    def stop(self, replica: ReplicaId, grace_s: float, reason: str) -> None:
        """End the engine: terminate, then kill after `grace_s`; EngineExited follows."""
        engine = self._running.get(replica)
        if engine is None:
            if (task := self._tasks.get(replica)) and not task.done():
                self._stop_once_spawned[replica] = (grace_s, reason)
            return
        if engine.stop_reason:
            return
        engine.stop_reason = reason or "stopped"
        self._stops[replica] = self._task(self._end(engine, grace_s))

    def kill(self) -> None:
        """End every engine now."""
        for engine in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                engine.process.send_signal(KILL)

    async def close(self, grace_s: float) -> None:
        """End every engine and wait until nothing of them is left."""
        for replica in tuple(self._tasks):
            self.stop(replica, grace_s, "shutdown")
        await asyncio.gather(*self._tasks.values(), *self._stops.values(), return_exceptions=True)

    async def adopt(self) -> None:
        """Take over what outlived a former rosed, and end what cannot be; before anything is started."""
        found = adoption.records(Path(self._config.node.run_dir))
        await asyncio.gather(*map(self._adopt, found))

    async def _adopt(self, record: adoption.EngineRecord) -> None:
        sections = {str(each.id): each for each in self._config.replicas}
        section = sections.get(record.identity.replica)
        process = await adoption.take_over(record)
        if process is None:
            return  # gone, or not to be had: whatever is left of it ends by itself
        wanted = None if section is None else adoption.identity(self._config, section, self._command(section))
        reason = refusal(record.identity, wanted) if self._config.node.adopt_grace_s else "not_configured"
        url = engine_url(section) if section else f"http://127.0.0.1:{record.identity.port}"
        engine = Engine(url, process, self._connect(url))
        version = WeightVersion(0)
        if section is not None and not reason:
            version, reason = await self._examine(section, engine)
        if section is None or reason:
            text = "an engine of a former rosed is ended"
            log.warning(text, code="adoption_refused", subject=record.identity.replica, reason=reason)
            grace_s = self._config.node.engine_stop_grace_s
            with contextlib.suppress(TimeoutError):  # its warden goes on trying
                async with asyncio.timeout(grace_s + _KILL_S):
                    await self._end(engine, grace_s)
            return
        self._running[section.id] = engine
        self._emit(EngineReady(section.id, version, adopted=True))
        self._emit(EngineStarted(section.id, process.pid))
        self._tasks[section.id] = self._task(self._outlive(section.id, engine))

    async def _examine(self, section: ReplicaConfig, engine: Engine) -> tuple[WeightVersion, str]:
        """The version that a found engine holds, and why it cannot be kept; empty if it can."""
        try:
            async with asyncio.timeout(_ADOPT_S):
                version = await self._first_answer(section.id, engine)
                promised = await self._keeper.promised(section, version)
                verified = None if promised is None else await self._loaded(engine, promised)
        except TimeoutError:
            return WeightVersion(0), "no_answer"
        except EngineRefused as error:
            return WeightVersion(0), f"refused: {error.what}"
        return version, weights_refusal(version, verified)

    async def _outlive(self, replica: ReplicaId, engine: Engine) -> None:
        """The rest of the life of an engine that was taken over."""
        try:
            code = await engine.process.wait()
        finally:
            del self._running[replica]
        self._emit(EngineExited(replica, code, engine.stop_reason or self._epitaph(replica, code)))

    async def _live(self, replica: ReplicaId, attempt: int) -> None:
        """One incarnation, from spawn to exit."""
        section = self._config.replica(replica)
        if not port_is_free(section.host, section.port):
            reason = f"port_in_use: {section.host}:{section.port} is taken by another process"
            self._emit(EngineExited(replica, None, reason))
            return
        async with contextlib.AsyncExitStack() as loading:
            source = await loading.enter_async_context(self._keeper.source(section))
            try:
                process = await self._spawn(section, attempt, source)
            except OSError as error:
                self._emit(EngineExited(replica, None, f"spawn_failed: {error}"))
                return
            url = engine_url(section)
            engine = self._running[replica] = Engine(url, process, self._connect(url))
            self._emit(EngineStarted(replica, process.pid))
            if (early := self._stop_once_spawned.pop(replica, None)) is not None:
                self.stop(replica, *early)
            exited = asyncio.create_task(process.wait())
            readiness = asyncio.create_task(self._await_ready(replica, engine, source))
            try:
                await asyncio.wait({exited, readiness}, return_when=asyncio.FIRST_COMPLETED)
                await loading.aclose()  # it has loaded, or never will: the copy may move on
                code = await exited
            finally:
                exited.cancel()
                readiness.cancel()
                await asyncio.gather(exited, readiness, return_exceptions=True)
                del self._running[replica]
        self._emit(EngineExited(replica, code, engine.stop_reason or self._epitaph(replica, code)))

    async def _spawn(
        self, section: ReplicaConfig, attempt: int, source: Source | None
    ) -> asyncio.subprocess.Process:
        node = self._config.node
        adoptable = adoption.order(
            self._config, adoption.identity(self._config, section, self._command(section))
        )
        if source is not None:
            section = msgspec.structs.replace(section, model=str(source.path))
        command = self._command(section)
        env = command.env | (adoptable or {})
        if source is not None:
            env = env | {f"{PluginSettings.PREFIX}WEIGHT_VERSION": str(source.version)}
        log = self.log_path(section.id)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{_START_MARK}{section.id}, attempt {attempt}, port {section.port}\n")
        keeper = (sys.executable, "-I", "-S", warden.__file__)
        limits = (str(log), str(node.log_bytes_max), str(node.engine_stop_grace_s), "--")
        return await asyncio.create_subprocess_exec(
            *keeper,
            *limits,
            *command.argv,
            env=env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=None,
            start_new_session=True,
        )

    def _command(self, section: ReplicaConfig) -> EngineCommand:
        if section.kind == "opportunistic" and not section.cpus:
            section = msgspec.structs.replace(section, cpus=self._config.device.cpus)
        return self._build(section, self._config)

    async def _await_ready(self, replica: ReplicaId, engine: Engine, source: Source | None) -> None:
        """Poll until the engine answers as the one we started.  Too long a wait is for the machine to end."""
        grace_s = self._config.node.engine_stop_grace_s
        try:
            version = await self._first_answer(replica, engine)
        except EngineRefused as error:
            self.stop(replica, grace_s, f"plugin_missing: {error.what}")
            return
        if source is not None and not await self._loaded(engine, source):
            self._keeper.distrust()
            self.stop(replica, grace_s, "copy_mismatch: it does not hold what the host's copy promises")
            return
        if source is None and version == 0:
            checkpoint = await self._keeper.checkpoint(self._config.replica(replica))
            if checkpoint is not None and await self._loaded(engine, checkpoint) is False:
                reason = f"checkpoint_mismatch: it does not hold the bytes of {checkpoint.path}"
                self.stop(replica, grace_s, reason)
                return
        self._emit(EngineReady(replica, version))

    async def _loaded(self, engine: Engine, source: Source) -> bool | None:
        """Whether the engine holds the version it was to load, by digests of its live parameters.

        None if it does not tell in names of the checkpoint; then it can never be updated either.
        """
        try:
            live = await engine.client.digests(self._config.node.weights_timeout_s)
        except (EngineRefused, EngineUnreachable) as error:
            log.warning("weights of an engine are not verified", code="unverified", error=str(error))
            return None
        if live.digests.keys().isdisjoint(source.digests):
            return None  # it names its parameters otherwise than checkpoints do
        alike = all(live.digests.get(name, digest) == digest for name, digest in source.digests.items())
        tied = {source.digests[name] for name in source.digests.keys() - live.digests.keys()}
        return live.version == source.version and alike and tied <= set(live.digests.values())

    async def _first_answer(self, replica: ReplicaId, engine: Engine) -> WeightVersion:
        unreadable = 0
        while True:
            try:
                if await engine.client.healthy():
                    info = await engine.client.info()
                    if info.role == "rollout" and info.name == replica:
                        return WeightVersion(info.weight_version)
                    raise EngineRefused(200, "foreign_engine", f"it is {info.role} {info.name}", None)
            except EngineUnreachable:
                pass
            except EngineRefused as error:
                unreadable += 1  # its board: at this moment, or for good where another scheduler runs
                if error.status != HTTPStatus.SERVICE_UNAVAILABLE or unreadable > _UNREADABLE_MAX:
                    raise
            await asyncio.sleep(_READY_POLL_S)

    async def _end(self, engine: Engine, grace_s: float) -> None:
        if self._before_stop is not None:
            await self._before_stop(engine)
        with contextlib.suppress(ProcessLookupError):
            engine.process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(grace_s):
                    await engine.process.wait()
            except TimeoutError:
                engine.process.send_signal(KILL)
        await self._await_end(engine)

    @staticmethod
    async def _await_end(engine: Engine) -> None:
        """A warden that may not kill what shares a GPU with others (see mps/release.py) goes on trying."""
        while True:
            try:
                async with asyncio.timeout(_KILL_S):
                    await engine.process.wait()
            except TimeoutError:
                text = f"the engine behind {engine.url} was not killed; its log says why"
                log.critical(text, code="engine_not_killed", pid=engine.pid)
            else:
                return

    def _epitaph(self, replica: ReplicaId, code: int) -> str:
        """Why an engine ended that nobody told to: its exit code, and the end of its log."""
        said = last_words(self.log_path(replica)) or "its log is empty"
        return f"exited_code_{code}: {said} (log: {self.log_path(replica)})"


def last_words(path: Path) -> str:
    """Why the engine that wrote this log ended: its first exception, or else its last line, shortened.

    The first exception of the latest start is the cause; those after it (vLLM reports one from each of its
    processes) are consequences.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = text.rpartition(_START_MARK)[2].splitlines()[1:]
    errors = (match[1] for line in lines if (match := _EXCEPTION.match(line)))
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return next(errors, last)[:_LINE_CHARACTERS]


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could bind there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def engine_url(section: ReplicaConfig) -> str:
    """Base URL of a replica's engine."""
    host = f"[{section.host}]" if ":" in section.host else section.host
    return f"http://{host}:{section.port}"
