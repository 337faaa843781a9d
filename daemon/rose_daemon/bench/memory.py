"""Memory sharing measured: a serving and a rollout engine on one budget of KV memory, and bursts on serving.

The same bursts meet serving alone (the replica inactive), serving that lends what it does not use, and
serving whose memory was divided once and for all (`static`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rose import wire
from rose.boards import WatchedBoard
from rose.client import Job
from rose.config import ReplicaConfig
from rose.core.readings import LimitStatus, ReplicaReading, SlackReading, Unknown
from rose.errors import EngineFailed, TimedOut
from rose.traces import TraceRequest
from rose.units import MIB, NS_PER_MS, NS_PER_S
from rose_daemon.bench.memory_watch import BurstMemory, MemoryWatch, burst_memory, pss_bytes
from rose_daemon.bench.probe import REPLICA, Probe
from rose_daemon.demo.checkpoints import make_model_files
from rose_daemon.demo.models import DemoModels
from rose_daemon.harness.directory import clean
from rose_daemon.harness.generator import LoadGenerator, Replay
from rose_daemon.harness.interrupts import Interrupts
from rose_daemon.harness.load import ClosedLoad, RequestRecord, completion_body, open_client
from rose_daemon.harness.screen import Screen
from rose_daemon.harness.stack import SERVING_NAME, Cores, Stack, StackPlan, pin_this_process

HEADROOM_SHARE = 0.2
_STEADY_S = 3.0
"""Memory that did not change for this long is settled."""
_SETTLE_TIMEOUT_S = 40.0
_CHANGE_TIMEOUT_S = 30.0
_LOOK_S = 0.02
_PAUSE_S = 2.0
"""After a burst: longer than the window after which serving lends again."""


class MemoryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    directory: Path
    shared_mib: int = 160
    bursts: int = 8
    burst_requests: int = 32
    burst_prompt_tokens: int = 1700
    burst_output_tokens: int = 120
    burst_s: float = 1.0
    """Over which the requests of a burst arrive."""
    concurrency: int = 24
    rollout_prompt_tokens: int = 1600
    rollout_output_tokens: int = 200
    seed: int = 1


class BurstRun(msgspec.Struct, kw_only=True):
    """One burst."""

    records: list[RequestRecord]
    preemptions: int
    shortages: int
    memory: BurstMemory | None = None
    """None where nothing is shared."""


class Activation(msgspec.Struct, frozen=True, kw_only=True):
    """From inactive to active."""

    pss_active_bytes: int
    """Of the whole replica, loaded."""
    pss_inactive_bytes: int
    kv_inactive_bytes: int
    """Physical memory of its KV cache while it is inactive."""
    active_ms: list[float]
    """From the order to the report that the engine is active, for each try."""
    first_answer_ms: list[float]
    """From the order to the answer of a request that was waiting for it."""


class MemoryMeasured(msgspec.Struct, kw_only=True):
    """Everything that was measured."""

    started_at: datetime
    options: MemoryOptions
    alone: list[BurstRun] = []
    shared: list[BurstRun] = []
    static: list[BurstRun] = []
    activation: Activation | None = None
    rollout_tokens_per_s: dict[str, float] = {}


class MemoryBench:
    """One benchmark."""

    def __init__(self, options: MemoryOptions, screen: Screen, interrupts: Interrupts) -> None:
        self._options = options
        self._screen = screen
        self._interrupts = interrupts
        self._measured = MemoryMeasured(started_at=datetime.now(UTC), options=options)
        rng = random.Random(options.seed)
        self._arrivals = [_burst(options, rng) for _ in range(options.bursts)]

    async def run(self) -> MemoryMeasured:
        """Measure.  Raises RoseError; always stops what it started."""
        cores = Cores.of_this_machine()
        models = await asyncio.to_thread(make_model_files, self._options.directory)
        pin_this_process(cores.host)
        async with self._stack(shared_plan(self._options, cores, models)) as pair:
            await self._measure_shared(pair)
        async with self._stack(static_plan(self._options, cores, models)) as pair:
            await self._measure_static(pair)
        return self._measured

    @contextlib.asynccontextmanager
    async def _stack(self, plan: StackPlan) -> AsyncIterator[_Pair]:
        clean(plan.directory)  # the scheduler would take up the job of a former run again
        async with Stack(plan, self._screen) as stack:
            self._interrupts.hurry = stack.hurry
            await stack.launch()
            await stack.ready()
            async with open_client() as client:
                pair = _Pair(stack, await stack.start_generator(), client, self._options)
                await pair.prepare()
                yield pair

    async def _measure_shared(self, pair: _Pair) -> None:
        watch = await pair.watch()
        await pair.fill()  # what was never touched is not there to be given back
        pss_active = await asyncio.to_thread(pss_bytes, await pair.replica_pid())
        self._measured.activation = await self._activations(pair, pss_active)
        await pair.switch(active=False)
        self._measured.alone = await self._bursts(pair, "alone")
        await pair.switch(active=True)
        async with pair.rolling_out() as load:
            began_s, tokens = time.monotonic(), load.tokens
            self._measured.shared = await self._bursts(pair, "shared", watch)
            self._measured.rollout_tokens_per_s["shared"] = (load.tokens - tokens) / (
                time.monotonic() - began_s
            )

    async def _measure_static(self, pair: _Pair) -> None:
        async with pair.rolling_out() as load:
            began_s, tokens = time.monotonic(), load.tokens
            self._measured.static = await self._bursts(pair, "static")
            self._measured.rollout_tokens_per_s["static"] = (load.tokens - tokens) / (
                time.monotonic() - began_s
            )

    async def _activations(self, pair: _Pair, pss_active: int) -> Activation:
        active_ms, first_ms, pss, kv = [], [], 0, 0
        for _ in range(self._options.bursts):
            await pair.switch(active=False)
            kv = max(kv, pair.replica().kv_resident_bytes)
            pss = await asyncio.to_thread(pss_bytes, await pair.replica_pid())
            order_ns = time.monotonic_ns()
            active_ms.append(await pair.switch(active=True))
            await pair.answer()
            first_ms.append((time.monotonic_ns() - order_ns) / NS_PER_MS)
        self._screen.say(f"inactive to active: {max(active_ms):.0f} ms at most")
        return Activation(
            pss_active_bytes=pss_active,
            pss_inactive_bytes=pss,
            kv_inactive_bytes=kv,
            active_ms=active_ms,
            first_answer_ms=first_ms,
        )

    async def _bursts(self, pair: _Pair, mode: str, watch: MemoryWatch | None = None) -> list[BurstRun]:
        runs = []
        for index, requests in enumerate(self._arrivals):
            self._screen.show("mode", f"{mode}, burst {index + 1} of {len(self._arrivals)}")
            runs.append(await pair.burst(requests, self._options.seed + index, watch))
            taken = runs[-1].memory
            if taken is not None:
                took = "never" if taken.take_back_ms is None else f"{taken.take_back_ms:.0f} ms"
                self._screen.say(f"burst {index + 1}: {taken.taken_share:.0%} of what was lent, {took}")
        self._screen.show("mode", "")
        return runs


class _Pair:
    """The two engines of one stack, under load."""

    def __init__(
        self, stack: Stack, generator: LoadGenerator, client: aiohttp.ClientSession, options: MemoryOptions
    ) -> None:
        self._stack = stack
        self._generator = generator
        self._client = client
        self._options = options
        self._probe = Probe(stack)
        self._slack = WatchedBoard(stack.boards.slack(SERVING_NAME), SlackReading)
        self._replica = WatchedBoard(stack.boards.replica(REPLICA), ReplicaReading)
        self._job: Job | None = None
        self._rl_step = 0

    async def prepare(self) -> None:
        """Pay for what engines make lazily, and have a job hold the lease."""
        await self._replay([TraceRequest(0, 64, 8)] * 2, seed=0)
        url, job = self._stack.gateway_url, self._stack.config.job.id
        model = self._stack.replica(REPLICA).model
        self._job = await asyncio.to_thread(
            lambda: Job.create(url, job, model=model, n_rl=0, n_serving_max=1)
        )
        await self.answer()

    async def watch(self) -> MemoryWatch:
        """A look at the memory of both workers."""
        pids = [
            (await self._probe.workers(self._client, target))[0]
            for target in (self._stack.serving, self._stack.replica(REPLICA))
        ]
        return MemoryWatch(self._stack.boards, SERVING_NAME, REPLICA, pids)

    async def replica_pid(self) -> int:
        """The replica's first process."""
        return int((await self._stack.replica_status(REPLICA))["pid"])

    def replica(self) -> ReplicaReading:
        """The rollout engine's board.  Raises EngineFailed."""
        reading: ReplicaReading = _known(self._replica)
        return reading

    async def fill(self) -> None:
        """Have rollout touch all the memory it was granted."""
        async with self.rolling_out():
            await self._settled()

    @contextlib.asynccontextmanager
    async def rolling_out(self) -> AsyncIterator[ClosedLoad]:
        """Rollout load meanwhile."""
        options = self._options
        load = ClosedLoad(self._client, self._stack.replica(REPLICA), options.seed)
        asking = asyncio.create_task(
            load.run(options.concurrency, options.rollout_prompt_tokens, options.rollout_output_tokens)
        )
        try:
            yield load
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            await self._probe.drain(self._client)

    async def answer(self) -> None:
        """One answer of the rollout engine.  Raises EngineFailed."""
        target = self._stack.replica(REPLICA)
        body = completion_body(target, [1, 2, 3], 1, temperature=0.0)
        async with self._client.post(f"{target.url}/v1/completions", json=body) as response:
            answer = await response.json(content_type=None)
        if response.status != 200 or answer["choices"][0]["finish_reason"] != "length":
            raise EngineFailed(
                f"{REPLICA} does not answer: {str(answer)[:200]}", f"see {self._stack.log_dir}"
            )

    async def switch(self, *, active: bool) -> float:
        """Activate or deactivate the replica; milliseconds until its engine said so.  Raises TimedOut."""
        began_ns = time.monotonic_ns()
        await self._stack.control(wire.ActivityRequest(REPLICA, active=active))
        deadline_s = time.monotonic() + _CHANGE_TIMEOUT_S
        while not await self._has_changed(active):
            if time.monotonic() > deadline_s:
                raise TimedOut(f"{REPLICA} did not change in {_CHANGE_TIMEOUT_S:.0f} s")
            await asyncio.sleep(_LOOK_S)
        return (time.monotonic_ns() - began_ns) / NS_PER_MS

    async def _has_changed(self, active: bool) -> bool:
        reading = self.replica()
        small = reading.kv_budget_blocks == 1 and reading.limit_status == LimitStatus.APPLIED
        return bool((await self._stack.replica_status(REPLICA))["active"]) if active else small

    async def burst(
        self, requests: list[TraceRequest], seed: int, watch: MemoryWatch | None = None
    ) -> BurstRun:
        """One burst, with rollout thawed and grown before it."""
        self._rl_step += 1
        assert self._job is not None
        await asyncio.to_thread(self._job.begin_step, self._rl_step, 0)
        await self._settled()
        before = _known(self._slack)
        if watch is not None:
            watch.start()
            await asyncio.sleep(_LOOK_S)
        records = await self._replay(requests, seed)
        await asyncio.sleep(_PAUSE_S)
        after = _known(self._slack)
        return BurstRun(
            records=records,
            preemptions=after.preemptions - before.preemptions,
            shortages=after.kv_shortages - before.kv_shortages,
            memory=None if watch is None else self._memory(watch),
        )

    @staticmethod
    def _memory(watch: MemoryWatch) -> BurstMemory:
        return burst_memory(watch.stop(), round(HEADROOM_SHARE * watch.capacity_bytes))

    async def _settled(self) -> None:
        """Until the rollout engine's memory has not grown for a while."""
        deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
        most, since_s = -1, time.monotonic()
        while time.monotonic() - since_s < _STEADY_S and time.monotonic() < deadline_s:
            await asyncio.sleep(_LOOK_S)
            held = self.replica().kv_resident_bytes
            if held > most:
                most, since_s = held, time.monotonic()

    async def _replay(self, requests: list[TraceRequest], seed: int) -> list[RequestRecord]:
        records: list[RequestRecord] = []
        await self._generator.replay(
            Replay(target=self._stack.serving, seed=seed, requests=requests), records
        )
        return records


def _known(board: WatchedBoard[Any]) -> Any:
    reading = board.read(time.monotonic_ns(), None)
    if isinstance(reading, Unknown):
        raise EngineFailed(f"{board.path.name} cannot be read: {reading}")
    return reading


def _burst(options: MemoryOptions, rng: random.Random) -> list[TraceRequest]:
    at_ns = sorted(int(rng.random() * options.burst_s * NS_PER_S) for _ in range(options.burst_requests))
    return [TraceRequest(when, options.burst_prompt_tokens, options.burst_output_tokens) for when in at_ns]


def shared_plan(options: MemoryOptions, cores: Cores, models: DemoModels) -> StackPlan:
    """Both engines on one budget."""
    return _plan(options, cores, models, "shared", shared_kv_bytes=options.shared_mib * MIB)


def static_plan(options: MemoryOptions, cores: Cores, models: DemoModels) -> StackPlan:
    """Half of it for each."""
    half = options.shared_mib * MIB // 2
    return _plan(options, cores, models, "static", kv_bytes=half)


def _plan(
    options: MemoryOptions, cores: Cores, models: DemoModels, name: str, *, kv_bytes: int = 0, **more: Any
) -> StackPlan:
    from rose_daemon.node.settings import kv_block_bytes  # noqa: PLC0415 (not for --help)

    def blocks(model: Path) -> int:
        return kv_bytes // kv_block_bytes(model, 32)

    replica = ReplicaConfig(
        id=REPLICA,
        kind="opportunistic",
        model=str(models.rollout),
        cpus=(cores.shared,),
        api_cpus=(cores.host,),
        kv_blocks=blocks(models.rollout),
        sequences_max=options.concurrency,
    )
    return StackPlan(
        directory=options.directory / name,
        serving_model=models.serving,
        replicas=(replica,),
        cores=cores,
        headroom_share=HEADROOM_SHARE if more else 0.02,
        serving_kv_blocks=blocks(models.serving),
        **more,
    )
