"""`rose bench gateway`: what the gateway costs, measured beside the same load without it.

Engines that only send chunks when they are due, the real scheduler process in front of them, and a load that
asks either directly or through the gateway, in turns of the same run.
"""

from __future__ import annotations

import asyncio
import os
import random
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

JOB = "bench"
KNEE_TTFT_MS = 10.0
"""At the knee, first tokens come at most this much later at the 99th percentile than on an idle machine."""
_START_S = 30.0
_SHORT = Ask(prompt_tokens=32, output_tokens=4)
_KNEE_STREAMS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
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
    children: list[Child]
    http: aiohttp.ClientSession


@dataclass
class Measured:
    """What was found."""

    options: GatewayOptions
    started_at: datetime
    direct: list[Figures] = field(default_factory=list)
    through: list[Figures] = field(default_factory=list)
    cpu_s: float = 0.0
    """Of the scheduler process, while the load went through it."""
    knee_direct: list[tuple[int, Figures]] = field(default_factory=list)
    knee_through: list[tuple[int, Figures]] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    """(turns so far, resident bytes of the scheduler)."""
    left_over: dict[str, int] = field(default_factory=dict)


class GatewayBench:
    """Runs all of it.  `say` is told what is being done."""

    def __init__(self, options: GatewayOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say

    async def run(self) -> Measured:
        """Measure.  Raises RoseError."""
        options = self._options
        measured = Measured(options, datetime.now(UTC))
        world = await self._start()
        try:
            await self._ratio(world, measured)
            if options.knee:
                measured.knee_direct = await self._climb(world.engines, "direct")
                measured.knee_through = await self._climb([world.gateway], "through the gateway")
            await self._memory(world, measured)
            await self._disconnects(world, measured)
        finally:
            await world.http.close()
            for child in reversed(world.children):
                await child.stop(5.0)
        return measured

    # ---- phases ------------------------------------------------------------------------------------

    async def _ratio(self, world: World, measured: Measured) -> None:
        options = self._options
        ask = Ask()
        for number in range(options.rounds):
            self._say(
                f"round {number + 1} of {options.rounds}: {options.streams} streams, direct and through"
            )
            seed = options.seed + number
            order = [("direct", world.engines), ("through", [world.gateway])]
            for name, urls in order if number % 2 == 0 else reversed(order):
                before_s = _cpu_s(world.scheduler)
                figures = await run_for(urls, options.streams, ask, options.duration_s, seed)
                getattr(measured, name).append(figures)
                if name == "through":
                    measured.cpu_s += _cpu_s(world.scheduler) - before_s
                await self._quiet(world)

    async def _climb(self, urls: list[str], how: str) -> list[tuple[int, Figures]]:
        """More and more streams, until first tokens come too late."""
        found: list[tuple[int, Figures]] = []
        seconds = max(2.0, self._options.duration_s / 3)
        for streams in _KNEE_STREAMS:
            self._say(f"knee, {how}: {streams} streams")
            late_ms = KNEE_TTFT_MS + (p99(found[0][1]) if found else float("inf"))
            figures = await run_for(urls, streams, Ask(), seconds, self._options.seed)
            if p99(figures) > late_ms:  # once may be chance: something else wanted the machine
                again = await run_for(urls, streams, Ask(), seconds, self._options.seed)
                figures = min(figures, again, key=p99)
            found.append((streams, figures))
            if p99(figures) > late_ms + KNEE_TTFT_MS:
                break
        return found

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

    async def _start(self) -> World:
        options = self._options
        self._say(f"starting {options.engines} engines and the scheduler")
        engines, ports = await self._engines()
        port = random.Random(time.time_ns()).randrange(20_000, 60_000)
        config = options.directory / "rose.toml"
        config.write_text(
            f'[scheduler]\ncontrol = "ipc://{options.directory}/control"\ngateway_port = {port}\n'
            f'state_dir = "{options.directory}/state"\n'
        )
        rose = [sys.executable, "-m", "rose.cli.main", "scheduler", "--config", str(config)]
        rose += ["--log-level", "warning"]
        scheduler = await spawn("scheduler", rose, options.directory / "scheduler.log", environ=os.environ)
        urls = [f"http://127.0.0.1:{each}" for each in ports]
        world = World(
            f"http://127.0.0.1:{port}", urls, scheduler, [engines, scheduler], aiohttp.ClientSession()
        )
        try:
            await self._register(world)
        except BaseException:
            await world.http.close()
            for child in world.children:
                await child.stop(5.0)
            raise
        return world

    async def _engines(self) -> tuple[Child, list[int]]:
        options = self._options
        command = [sys.executable, "-m", "rose_daemon.bench.gateway_engines"]
        command += ["--engines", str(options.engines), "--token-ms", str(options.token_ms)]
        log = options.directory / "engines.log"
        child = await spawn("engines", command, log, environ=os.environ, stdout=asyncio.subprocess.PIPE)
        assert child.process.stdout is not None
        line = await asyncio.wait_for(child.process.stdout.readline(), _START_S)
        if not line.startswith(b"ready "):
            raise child.failure()
        return child, [int(port) for port in line.split()[1:]]

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


def _cpu_s(child: Child) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS


def _resident_bytes(child: Child) -> int:
    pages = Path(f"/proc/{child.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")
