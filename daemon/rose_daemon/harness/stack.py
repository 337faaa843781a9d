"""A whole ROSE host as child processes on this machine: relay, rose-scheduler, rosed, a serving engine.

The rollout engines are rosed's children.  Everything listens on 127.0.0.1, on free ports.  `stop` ends what
`start` began and nothing else; should this process be killed, the children end by themselves and the
reaper sweeps up after them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from rose import wire
from rose.boards import BoardPaths
from rose.cli.control import ask
from rose.config import CONFIG_NAME, Config, ReplicaConfig, load
from rose.engines.vllm.launch import EngineShape, serving_command
from rose.errors import ConfigError, EngineFailed, NotReady, RoseError, TimedOut
from rose.secret import read_secret
from rose.units import ReplicaId
from rose_daemon.harness.generator import COMMAND, LoadGenerator
from rose_daemon.harness.load import Target
from rose_daemon.harness.marked import end_marked, marked_environ, marked_pids
from rose_daemon.harness.processes import Child, Placement, spawn, until
from rose_daemon.harness.screen import Screen

ResultT = TypeVar("ResultT")

SERVING_NAME = "serving"
GENERATOR_NAME = "load-generator"
SERVING_SHAPE = EngineShape(block_tokens=32, context_tokens_max=2048, sequences_max=32)
START_TIMEOUT_S = 300.0
STOP_GRACE_S = 15.0
_READY_STATE = "ready"


class Cores(msgspec.Struct, frozen=True):
    """The two cores: `shared` plays the accelerator, `host` runs everything else."""

    shared: int
    host: int

    @classmethod
    def of_this_machine(cls) -> Cores:
        """The first two cores this process may use.  Raises ConfigError when there are fewer."""
        allowed = sorted(os.sched_getaffinity(0))
        if len(allowed) < 2:
            raise ConfigError("two CPU cores are needed, this process may use one", "give it a second core")
        return cls(allowed[0], allowed[1])


def pin_this_process(core: int) -> None:
    """Bind all threads of this process; those made later inherit it."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


class StackPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to start."""

    directory: Path
    """Configuration, logs, state."""
    serving_model: Path
    replicas: tuple[ReplicaConfig, ...]
    """With port 0: filled in with free ports."""
    cores: Cores
    ttft_slo_ms: float = 250
    tpot_slo_ms: float = 60
    token_cap: int = 512
    """Most rollout tokens of a step."""
    headroom_share: float = 0.2
    """Of the host's memory: rollout's KV budget is cut when less is free."""
    shared_kv_bytes: int = 0
    """KV memory that serving and the opportunistic replicas share; 0: each has its own."""
    serving_kv_blocks: int = 256
    """0: as many as there is memory for."""
    step_log: bool = False
    """Have the serving engine log its steps (`ReplicaConfig` says it for the others)."""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def configuration(plan: StackPlan, run_dir: Path, ports: Sequence[int]) -> dict[str, Any]:
    """The document of `rose.toml` for the plan; `ports`: serving, gateway, control, relay, then replicas."""
    serving, gateway, control, relay, *engines = ports
    return {
        "schema": 1,
        "node": {
            "state_dir": str(plan.directory / "state"),
            "run_dir": str(run_dir),
            # In the run directory, as the path of a unix socket must be short.
            "control_socket": str(run_dir / "rosed.sock"),
            "engine_start_timeout_s": START_TIMEOUT_S,
        },
        "device": {"kind": "cpu", "id": "cpu-0", "cpus": [plan.cores.shared]},
        "serving": {
            "name": SERVING_NAME,
            "url": f"http://127.0.0.1:{serving}",
            "ttft_slo_ms": plan.ttft_slo_ms,
            "tpot_slo_ms": plan.tpot_slo_ms,
        },
        "admission": {"token_cap": plan.token_cap},
        # Measured, not acted upon: what is compared must run all the time.
        "lending": {"harm_share_max": 1.0, "switchback_share": 0, "drill_period_s": 0},
        "memory": {"headroom_share": plan.headroom_share, "shared_kv_bytes": plan.shared_kv_bytes},
        "scheduler": {
            "control": f"tcp://127.0.0.1:{control}",
            "gateway_port": gateway,
            "state_dir": str(plan.directory / "state" / "scheduler"),
        },
        "relay": {"url": f"http://127.0.0.1:{relay}", "port": relay, "capacity_bytes": 256 << 20},
        "replicas": [
            msgspec.to_builtins(msgspec.structs.replace(replica, port=port))
            for replica, port in zip(plan.replicas, engines, strict=True)
        ],
    }


def toml(document: Mapping[str, Any]) -> str:
    """A document of scalars, tables of scalars and lists, and lists of such tables, as TOML."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in document.items() if not _is_table(value)]
    for key, value in document.items():
        for table in (value if isinstance(value, list) else [value]) if _is_table(value) else ():
            lines += ["", f"[[{key}]]" if isinstance(value, list) else f"[{key}]"]
            lines += [f"{name} = {json.dumps(item)}" for name, item in table.items()]
    return "\n".join(lines) + "\n"


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


class Stack:
    """The running processes.  An async context manager: leaving it stops them."""

    def __init__(self, plan: StackPlan, screen: Screen) -> None:
        self.plan = plan
        self.stack_id = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.run_dir = Path("/dev/shm") / f"rose-{self.stack_id}"
        self.boards = BoardPaths(self.run_dir)
        self.config_path = plan.directory / CONFIG_NAME
        self.log_dir = plan.directory / "logs"
        self.children: dict[str, Child] = {}
        self.config = Config()
        self._screen = screen
        self._reaper: Child | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hurry = False

    # ---- life -----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def launch(self) -> None:
        """Start everything; `ready` waits for it.  Raises EngineFailed, ConfigError."""
        self._prepare()
        self._reaper = await spawn(
            "reaper",
            [sys.executable, "-m", "rose_daemon.harness.reaper", self.stack_id, str(self.run_dir)],
            self.log_dir / "reaper.log",
            environ=os.environ | {"PYTHONSAFEPATH": "1"},
            stdin=asyncio.subprocess.PIPE,
        )
        host = Placement([self.plan.cores.host])
        rose = [sys.executable, "-m", "rose.cli.main"]
        config = ["--config", str(self.config_path)]
        await self.add("relay", [*rose, "relay", *config], placement=host)
        await self.add("scheduler", [*rose, "scheduler", *config], placement=host)
        await self.add("rosed", [sys.executable, "-m", "rose_daemon.rosed", *config], placement=host)
        await self._start_serving()

    async def add(
        self,
        name: str,
        command: Sequence[str],
        *,
        placement: Placement | None = None,
        environ: Mapping[str, str] = os.environ,
        piped: bool = False,
    ) -> Child:
        """Start one more process of this stack; should it end by itself, `guard` raises."""
        child = await spawn(
            name,
            command,
            self.log_dir / f"{name}.log",
            environ=_without_overrides(environ) | marked_environ(self.stack_id) | {"PYTHONSAFEPATH": "1"},
            placement=placement,
            stdin=asyncio.subprocess.PIPE if piped else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if piped else None,
        )
        self.children[name] = child
        self._watchers.append(asyncio.create_task(self._watch(child)))
        return child

    async def start_generator(self) -> LoadGenerator:
        """Start the process that loads serving."""
        host = Placement([self.plan.cores.host])
        return LoadGenerator(await self.add(GENERATOR_NAME, COMMAND, placement=host, piped=True))

    async def guard(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Do `work`; raises EngineFailed as soon as a process of the stack ends unasked.

        A RoseError out of a task group inside `work` is raised as itself.
        """
        task = asyncio.create_task(work)
        both: set[asyncio.Future[Any]] = {task, self._failed}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return task.result()
        except BaseExceptionGroup as group:
            if (error := _only_error(group)) is not None:
                raise error from None
            raise
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    def hurry(self) -> None:
        """From now on kill instead of asking (a second Ctrl-C)."""
        self._hurry = True

    async def stop(self) -> None:
        """End every process of the stack, and remove its boards."""
        for watcher in self._watchers:
            watcher.cancel()
        self._failed.cancel()
        self._screen.show("stopping", ", ".join(self.children))
        await asyncio.gather(*(self._stop_child(child) for child in self.children.values()))
        self._screen.show("stopping", "")
        await asyncio.to_thread(end_marked, self.stack_id, 0.0 if self._hurry else 2.0)
        if self._reaper is not None and self._reaper.process.stdin is not None:
            self._reaper.process.stdin.write(b"\n")
            self._reaper.process.stdin.close()
            await self._reaper.process.wait()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    async def _stop_child(self, child: Child) -> None:
        stopping = asyncio.create_task(child.stop(STOP_GRACE_S))
        while not stopping.done():
            await asyncio.wait({stopping}, timeout=0.1)
            if self._hurry and child.running:
                child.process.kill()
        await stopping

    async def _watch(self, child: Child) -> None:
        await child.process.wait()
        if not self._failed.done():
            self._failed.set_exception(child.failure())

    # ---- start ----------------------------------------------------------------------------------

    def _prepare(self) -> None:
        state = self.plan.directory / "state"
        state.mkdir(parents=True, exist_ok=True)
        self.run_dir.mkdir(mode=0o700)
        ports = free_ports(4 + len(self.plan.replicas))
        self.config_path.write_text(toml(configuration(self.plan, self.run_dir, ports)), encoding="utf-8")
        self.config = load(self.config_path, {})
        token = self.config.engine_token_file
        if not token.exists():
            token.touch(mode=0o600)
            token.write_text(secrets.token_hex(32), encoding="ascii")

    async def _start_serving(self) -> None:
        """Start the serving engine as an operator would: by hand, with the plugin."""
        serving = self.config.serving
        command = serving_command(
            model=str(self.plan.serving_model),
            port=int(serving.url.rpartition(":")[2]),
            run_dir=str(self.run_dir),
            token_file=str(self.config.engine_token_file),
            name=serving.name,
            ttft_slo_ms=serving.ttft_slo_ms,
            tpot_slo_ms=serving.tpot_slo_ms,
            cpus=(self.plan.cores.shared,),
            api_cpus=(self.plan.cores.host,),
            step_log=self.plan.step_log,
            kv_shared_bytes=self.plan.shared_kv_bytes,
            shape=SERVING_SHAPE._replace(kv_blocks=self.plan.serving_kv_blocks),
        )
        await self.add("serving", command.argv, environ=command.env)

    async def ready(self) -> None:
        """Wait until everything answers.  Raises EngineFailed when a process ends, TimedOut."""
        await self.guard(self._all_ready())

    async def _all_ready(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as client:
            checks: dict[str, Callable[[], Awaitable[bool]]] = {
                "relay": lambda: _answers(client, f"{self.config.relay.address}/health"),
                "scheduler": lambda: _answers(client, f"{self.gateway_url}/health"),
                "rosed": self._rosed_answers,
                "serving": lambda: _answers(client, f"{self.serving.url}/health"),
            }
            for section in self.config.replicas:
                checks[section.id] = lambda replica=section.id: self._replica_ready(replica)  # type: ignore[misc]
            waiting = dict.fromkeys(checks)

            async def wait(name: str) -> None:
                try:
                    await until(name, checks[name], START_TIMEOUT_S, period_s=0.5)
                except TimedOut as error:
                    raise TimedOut(
                        error.what, f"see {self.log_dir} and {self.config.node.state_dir}"
                    ) from None
                waiting.pop(name)
                self._screen.say(f"{name} is ready")
                self._screen.show("starting", ", ".join(waiting))

            self._screen.show("starting", ", ".join(waiting))
            async with asyncio.TaskGroup() as tasks:
                for name in checks:
                    tasks.create_task(wait(name))

    async def _rosed_answers(self) -> bool:
        try:
            await self.status()
        except NotReady:
            return False
        return True

    async def _replica_ready(self, replica: ReplicaId) -> bool:
        try:
            state = (await self.replica_status(replica)).get("state")
        except NotReady:
            return False
        if state == "failed":
            raise EngineFailed(
                f"rollout engine {replica} did not start", f"see the logs below {self.log_dir.parent}"
            )
        return state == _READY_STATE

    # ---- what runs ------------------------------------------------------------------------------

    @property
    def gateway_url(self) -> str:
        """Where agents call."""
        return f"http://127.0.0.1:{self.config.scheduler.gateway_port}"

    @property
    def serving(self) -> Target:
        """The serving engine."""
        return Target(self.config.serving.url, "serving")

    def replica(self, replica: ReplicaId) -> Target:
        """A rollout engine, past the gateway."""
        section = self.config.replica(replica)
        return Target(f"http://127.0.0.1:{section.port}", section.served_name)

    @property
    def engine_token(self) -> str:
        """Secret of the engines' own endpoints."""
        return read_secret(self.config.engine_token_file, "node.token_file")

    async def control(self, request: wire.ControlRequest) -> dict[str, Any]:
        """Ask rosed.  Raises NotReady, TimedOut, or rosed's refusal."""
        return await asyncio.to_thread(ask, self.config.control_socket, request)

    async def status(self) -> dict[str, Any]:
        """What `rose status --json` shows."""
        return await self.control(wire.StatusRequest())

    async def replica_status(self, replica: ReplicaId) -> dict[str, Any]:
        """One replica in the status; raises NotReady while rosed does not know it."""
        for entry in (await self.status()).get("replicas", ()):
            if entry.get("id") == replica:
                return dict(entry)
        raise NotReady(f"rosed does not report replica {replica}")

    def pids(self) -> list[int]:
        """Every living process of the stack, grandchildren included."""
        return marked_pids(self.stack_id)


def _only_error(group: BaseExceptionGroup[BaseException]) -> RoseError | None:
    """The first of the errors in a group, when all of them are for the user to act on."""
    errors, others = group.split(RoseError)
    if errors is None or others is not None:
        return None
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, RoseError)
    return first


def _without_overrides(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment less ROSE_<SECTION>__<KEY>: the stack's rose.toml says it all."""
    return {key: text for key, text in environ.items() if not (key.startswith("ROSE_") and "__" in key)}


async def _answers(client: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with client.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
