"""`rose bench gateway`: what the gateway costs, measured beside the same load without it.

Engines that only send chunks when they are due, the real scheduler process in front of them, and a load that
asks either directly or through the gateway, in turns of the same run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from rose.errors import EngineFailed
from rose_daemon.bench.gateway_engines import MODEL
from rose_daemon.bench.gateway_load import Ask, Figures, hang_up, p99, run_for, run_turns
from rose_daemon.harness.processes import Child, spawn, until
from rose_daemon.node.engines import free_port

JOB = "bench"
KNEE_TTFT_MS = 10.0
"""At the knee, first tokens come at most this much later at the 99th percentile than directly and without
haste."""
_KNEE_TURNS_MIN = 300
_START_S = 30.0
_SHORT = Ask(prompt_tokens=32, output_tokens=4)
_KNEE_STREAMS = (*range(64, 769, 64), *range(896, 1409, 128), 1664, 2048)
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class GatewayOptions:
    """What to measure."""

    directory: Path
    streams: int = 64
    engines: int = 8
    token_ms: float = 10.0
    rounds: int = 3
    duration_s: float = 10.0
    turns: int = 5_000
    disconnects: int = 1_000
    knee: bool = True
    seed: int = 1


@dataclass
class World:
    """What runs."""

    gateway: str
    engines: list[str]
    scheduler: Child
    engine_process: Child
    http: aiohttp.ClientSession


@dataclass
class Measured:
    """What was found."""

    options: GatewayOptions
    started_at: datetime
    direct: list[Figures] = field(default_factory=list)
    through: list[Figures] = field(default_factory=list)
    cpu_direct_s: dict[str, float] = field(default_factory=dict)
    """Processor time of each process while the load went directly to the engines."""
    cpu_through_s: dict[str, float] = field(default_factory=dict)
    """And while it went through the gateway."""
    knee_direct: list[tuple[int, Figures]] = field(default_factory=list)
    knee_through: list[tuple[int, Figures]] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    """(turns so far, resident bytes of the scheduler)."""
    left_over: dict[str, int] = field(default_factory=dict)

    @property
    def idle_ms(self) -> float:
        """99th percentile of the time to the first token in the best direct round: both knees go by it."""
        return min(map(p99, self.direct))


class GatewayBench:
    """Runs all of it.  `say` is told what is being done."""

    def __init__(self, options: GatewayOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say

    async def run(self) -> Measured:
        """Measure.  Raises RoseError."""
        measured = Measured(self._options, datetime.now(UTC))
        # Whatever ends it, also in the middle of starting, what was started is stopped.
        async with contextlib.AsyncExitStack() as stack:
            world = await self._start(stack)
            await self._ratio(world, measured)
            if self._options.knee:
                await self._knees(world, measured)
            await self._memory(world, measured)
            await self._disconnects(world, measured)
        return measured

    # ---- phases ------------------------------------------------------------------------------------

    async def _ratio(self, world: World, measured: Measured) -> None:
        options = self._options
        direct = (world.engines, measured.direct, measured.cpu_direct_s)
        through = ([world.gateway], measured.through, measured.cpu_through_s)
        for number in range(options.rounds):
            self._say(
                f"round {number + 1} of {options.rounds}: {options.streams} streams, direct and through"
            )
            for urls, found, cpu_s in (direct, through) if number % 2 == 0 else (through, direct):
                before_s = _cpu_s(world)
                figures = await run_for(
                    urls, options.streams, Ask(), options.duration_s, options.seed + number
                )
                for name, now_s in _cpu_s(world).items():
                    cpu_s[name] = cpu_s.get(name, 0.0) + now_s - before_s[name]
                if not figures.ttft_ms:
                    text = f"no turn ended within {options.duration_s:g} s"
                    raise EngineFailed(text, "use a longer --duration, or a shorter --token-ms")
                found.append(figures)
                await self._quiet(world)

    async def _knees(self, world: World, measured: Measured) -> None:
        """More and more streams, both ways in turns, each until its first tokens come too late."""
        climbing = {
            "direct": (world.engines, measured.knee_direct),
            "through the gateway": ([world.gateway], measured.knee_through),
        }
        late_ms = measured.idle_ms + KNEE_TTFT_MS
        for streams in _KNEE_STREAMS:
            for way, (urls, found) in list(climbing.items()):
                self._say(f"knee: {streams} streams, {way}")
                figures = await self._climb(urls, streams, late_ms)
                found.append((streams, figures))
                # One step late by far may be other work on the machine; two in a row are a knee.
                if len(found) > 1 and all(p99(each) > late_ms + KNEE_TTFT_MS for _, each in found[-2:]):
                    del climbing[way]

    async def _climb(self, urls: list[str], streams: int, late_ms: float) -> Figures:
        """One step, long enough for a 99th percentile; a late one again."""
        options = self._options
        turns_per_s = streams * 1000 / options.token_ms / Ask().output_tokens
        seconds = max(2.0, options.duration_s / 3, _KNEE_TURNS_MIN / turns_per_s)
        figures = await run_for(urls, streams, Ask(), seconds, options.seed)
        if p99(figures) > late_ms:  # once may be chance: something else wanted the machine
            again = await run_for(urls, streams, Ask(), seconds, options.seed)
            figures = min(figures, again, key=p99)
        return figures

    async def _memory(self, world: World, measured: Measured) -> None:
        options = self._options
        parts = 10
        for part in range(parts + 1):
            measured.memory.append((part * options.turns // parts, _resident_bytes(world.scheduler)))
            if part == parts:
                break
            # The same trajectories in each part: the pins of ever new ones are bounded, but far above this.
            self._say(f"memory: {part * options.turns // parts} of {options.turns} turns")
            turns = (part + 1) * options.turns // parts - part * options.turns // parts
            figures = await run_turns([world.gateway], options.streams, _SHORT, turns, options.seed)
            if figures.errors:
                raise EngineFailed(f"{figures.errors} of {turns} turns failed", f"see {world.scheduler.log}")

    async def _disconnects(self, world: World, measured: Measured) -> None:
        options = self._options
        self._say(f"{options.disconnects} clients hang up")
        await hang_up(
            world.gateway,
            options.disconnects,
            Ask(),
            at_once=options.streams,
            within_s=0.3,
            seed=options.seed,
        )
        await self._quiet(world)
        turns = await self._turns(world)
        running = [await self._get(f"{url}/running") for url in world.engines]
        measured.left_over = {
            "in_flight": turns["in_flight"],
            "queued": turns["queued"],
            "running_on_engines": sum(one["running"] for one in running),
            "cancelled": turns["cancelled"],
            "unaccounted": turns["arrived"] - turns["finished"] - turns["failed"] - turns["cancelled"],
        }

    async def _quiet(self, world: World) -> None:
        """Wait until nothing of the last load is in flight (or tell so later)."""
        deadline_s = time.monotonic() + 5
        while time.monotonic() < deadline_s:
            turns = await self._turns(world)
            if not turns["in_flight"] and not turns["queued"]:
                return
            await asyncio.sleep(0.1)

    async def _turns(self, world: World) -> dict[str, int]:
        turns: dict[str, int] = (await self._get(f"{world.gateway}/rose/v1/status"))["turns"]
        return turns

    async def _get(self, url: str) -> Any:
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            return await response.json()

    # ---- processes ---------------------------------------------------------------------------------

    async def _start(self, stack: contextlib.AsyncExitStack) -> World:
        """Engines and scheduler; the stack ends them."""
        options = self._options
        self._say(f"starting {options.engines} engines and the scheduler")
        engines = await self._spawn(
            stack,
            "engines",
            [
                "rose_daemon.bench.gateway_engines",
                "--engines",
                options.engines,
                "--token-ms",
                options.token_ms,
            ],
            stdout=asyncio.subprocess.PIPE,
        )
        assert engines.process.stdout is not None
        async with asyncio.timeout(_START_S):
            line = await engines.process.stdout.readline()
        if not line.startswith(b"ready "):
            raise engines.failure()
        urls = [f"http://127.0.0.1:{int(port)}" for port in line.split()[1:]]
        port = free_port("127.0.0.1")
        config = options.directory / "rose.toml"
        config.write_text(
            f'[scheduler]\ncontrol = "ipc://{options.directory}/control"\ngateway_port = {port}\n'
            f'state_dir = "{options.directory}/state"\n'
        )
        rose = ["rose.cli.main", "scheduler", "--config", config, "--log-level", "warning"]
        scheduler = await self._spawn(stack, "scheduler", rose)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        world = World(f"http://127.0.0.1:{port}", urls, scheduler, engines, http)
        await self._register(world)
        return world

    async def _spawn(
        self, stack: contextlib.AsyncExitStack, name: str, module: list[object], stdout: int | None = None
    ) -> Child:
        command = [sys.executable, "-m", *map(str, module)]
        log = self._options.directory / f"{name}.log"
        child = await spawn(name, command, log, environ=os.environ, stdout=stdout)
        stack.push_async_callback(child.stop, 5.0)
        return child

    async def _register(self, world: World) -> None:
        """The engines as workers, and a job on all of them."""

        async def answers() -> bool:
            if not world.scheduler.running:
                raise world.scheduler.failure()
            try:
                async with world.http.get(f"{world.gateway}/health") as response:
                    return bool(response.status == 200)
            except aiohttp.ClientError:
                return False

        await until("the gateway", answers, _START_S)
        for url in world.engines:
            async with world.http.post(f"{world.gateway}/workers", json={"url": url}) as response:
                response.raise_for_status()
        # No cap that the load could meet: what is measured is the gateway, not its admission.
        spec = {"job": JOB, "model": MODEL, "n_rl": len(world.engines), "n_serving_max": 0}
        spec["trajectories_per_replica_max"] = 4096
        async with world.http.post(f"{world.gateway}/rose/v1/jobs", json=spec) as response:
            response.raise_for_status()

        async def eligible() -> bool:
            status = await self._get(f"{world.gateway}/rose/v1/status")
            return sum(bool(replica["eligible"]) for replica in status["replicas"]) == len(world.engines)

        await until("the engines", eligible, _START_S)


def _cpu_s(world: World) -> dict[str, float]:
    """User and system time of each process so far."""
    own = os.times()
    return {
        "scheduler": _child_cpu_s(world.scheduler),
        "engines": _child_cpu_s(world.engine_process),
        "client": own.user + own.system,
    }


def _child_cpu_s(child: Child) -> float:
    fields = Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS


def _resident_bytes(child: Child) -> int:
    pages = Path(f"/proc/{child.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")
