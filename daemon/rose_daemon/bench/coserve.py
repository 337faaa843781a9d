"""Co-serving measured: one serving and one rollout engine on the same core, under different gates.

Every mode of a round meets the same arrivals, rounds are interleaved, and one pair of engines serves all
modes, so modes differ in nothing but what stands between the two engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from rose import wire
from rose.boards import WatchedBoard
from rose.config import ReplicaConfig
from rose.core.readings import ReplicaReading, SlackReading, Unknown
from rose.errors import EngineFailed, NotReady
from rose.traces import TraceRequest
from rose.units import NS_PER_S, ReplicaId
from rose_daemon.bench.idle_priority import idle_priority, why_not
from rose_daemon.bench.runs import (
    BUSY_TARGET,
    GATED,
    CoserveOptions,
    GateCosts,
    Measured,
    Mode,
    Run,
    Trial,
)
from rose_daemon.demo.checkpoints import make_model_files
from rose_daemon.harness.generator import LoadGenerator, Replay
from rose_daemon.harness.interrupts import Interrupts
from rose_daemon.harness.load import ClosedLoad, RequestRecord, Target, open_client
from rose_daemon.harness.replay import ReplayPlan, plan_replay
from rose_daemon.harness.screen import Screen
from rose_daemon.harness.stack import SERVING_NAME, Cores, Stack, StackPlan, pin_this_process
from rose_daemon.harness.stats import percentile

REPLICA = ReplicaId("opportunistic-0")
REFERENCE_S = 15.0
"""Length of a `rollout-alone` run: nothing varies in it."""
RAMP_S = 2.0
"""Between the start of the rollout load and the first serving request."""
DRAIN_TIMEOUT_S = 60.0
TRIAL_S = 20.0
TRIALS_MAX = 3
BUSY_TOLERANCE = 0.04
RUN_S = (20.0, 120.0)
"""Shortest and longest run that a wanted number of requests may lead to."""
SPARE = 1.05
"""Thinning a trace to a rate is a matter of chance: aim a little higher than the requests wanted."""


class _Counters(msgspec.Struct, frozen=True):
    at_ns: int
    slack: SlackReading
    replica: ReplicaReading
    generated: int


class Coserve:
    """One benchmark."""

    def __init__(self, options: CoserveOptions, screen: Screen, interrupts: Interrupts) -> None:
        self._options = options
        self._screen = screen
        self._interrupts = interrupts
        cores = Cores.of_this_machine()
        self._measured = Measured(started_at=datetime.now(UTC), options=options, cores=cores)
        self._arrivals: list[list[TraceRequest]] = []
        self._plan(options.trace)  # what is wrong with the trace shows before anything starts

    def _plan(self, trace: ReplayPlan) -> None:
        """Cut a stretch of the trace for each round, one behind the other, as long as the requests take."""
        if self._options.requests:
            wanted_s = SPARE * self._options.requests / self._options.rounds / trace.rate_rps
            trace = msgspec.structs.replace(trace, duration_s=min(max(wanted_s, RUN_S[0]), RUN_S[1]))
        offset_s = trace.offset_s
        self._arrivals, self._measured.traces = [], []
        for index in range(self._options.rounds):
            stretch = msgspec.structs.replace(trace, offset_s=offset_s)
            replay = plan_replay(stretch, self._options.seed + index)
            offset_s = replay.end_s
            self._arrivals.append(replay.requests)
            self._measured.traces.append(replay.description)

    async def run(self) -> Measured:
        """Measure.  Raises RoseError; always stops what it started."""
        cores, options = self._measured.cores, self._options
        if Mode.PRIORITY in options.modes and (reason := why_not()):
            self._measured.skipped[Mode.PRIORITY] = reason
            self._screen.say(f"mode {Mode.PRIORITY} is left out: {reason}")
        models = await asyncio.to_thread(make_model_files, options.directory)
        context_tokens = options.rollout_prompt_tokens + options.rollout_output_tokens
        replica = ReplicaConfig(
            id=REPLICA,
            kind="opportunistic",
            model=str(models.rollout),
            cpus=(cores.shared,),
            api_cpus=(cores.host,),
            kv_blocks=1024,
            context_tokens_max=max(1024, context_tokens),
            sequences_max=max(16, options.concurrency),
        )
        plan = StackPlan(
            directory=options.directory,
            serving_model=models.serving,
            replicas=(replica,),
            cores=cores,
            ttft_slo_ms=options.budgets.ttft_ms,
            tpot_slo_ms=options.budgets.tpot_ms,
            token_cap=options.token_cap,
        )
        pin_this_process(cores.host)
        async with Stack(plan, self._screen) as stack:
            self._interrupts.hurry = stack.hurry
            await stack.launch()
            await stack.ready()
            await stack.guard(self._rounds(stack, await stack.start_generator()))
        return self._measured

    async def _rounds(self, stack: Stack, generator: LoadGenerator) -> None:
        options = self._options
        await self._warm_up(stack, generator)
        if options.calibrate:
            await self._calibrate(stack, generator)
        modes = [mode for mode in options.modes if mode not in self._measured.skipped]
        for index in range(options.rounds):
            # Each round begins with another mode, so that none always follows the same one.
            turn = index % len(modes)
            for mode in (*modes[turn:], *modes[:turn]):
                run = await self._run(stack, generator, mode, index)
                self._measured.runs.append(run)
                self._screen.say(f"round {index + 1} of {options.rounds}: {_line(run)}")

    async def _warm_up(self, stack: Stack, generator: LoadGenerator) -> None:
        """The first requests of an engine pay for what is made lazily."""
        warm: list[RequestRecord] = []
        await generator.replay(Replay(target=stack.serving, seed=0, requests=self._arrivals[0][:4]), warm)
        if failed := [record.error for record in warm if record.error]:
            raise EngineFailed(f"serving does not answer: {failed[0]}", f"see {stack.log_dir}")
        async with open_client() as client:
            rollout = ClosedLoad(client, stack.replica(REPLICA), seed=0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed_loop(rollout), 3.0)
            await self._drain(stack, client)

    async def _calibrate(self, stack: Stack, generator: LoadGenerator) -> None:
        """Find the rate at which serving alone is as busy as wanted, and plan the rounds for it."""
        trace = self._options.trace
        await stack.control(wire.GateRequest(REPLICA, "closed"))
        for _ in range(TRIALS_MAX):
            self._screen.show("calibration", f"{trace.rate_rps:.2f} requests a second")
            replay = plan_replay(msgspec.structs.replace(trace, duration_s=TRIAL_S), self._options.seed)
            async with open_client() as client:
                before = await self._counters(stack, client)
                await generator.replay(
                    Replay(target=stack.serving, seed=self._options.seed, requests=replay.requests), []
                )
                after = await self._counters(stack, client)
            busy_s = (after.slack.busy_ns - before.slack.busy_ns) / NS_PER_S
            trial = Trial(len(replay.requests) / TRIAL_S, busy_s / TRIAL_S)
            self._measured.calibration.append(trial)
            load = f"{trial.rate_rps:.2f} requests a second"
            self._screen.say(f"calibration: {load} keep serving {trial.busy_share:.0%} busy")
            if not busy_s:
                raise EngineFailed("serving answered, and its board shows no step", f"see {stack.log_dir}")
            trace = msgspec.structs.replace(trace, rate_rps=trial.rate_rps * BUSY_TARGET / trial.busy_share)
            if abs(trial.busy_share - BUSY_TARGET) <= BUSY_TOLERANCE:
                break
        self._screen.show("calibration", "")
        self._plan(trace)

    async def _run(self, stack: Stack, generator: LoadGenerator, mode: Mode, index: int) -> Run:
        self._screen.show("mode", f"{mode}, round {index + 1}")
        order = self._options.order(mode)
        await stack.control(wire.GateRequest(REPLICA, order.mode, order.token_cap))
        async with open_client() as client, self._priority(stack, client, mode):
            rollout = ClosedLoad(client, stack.replica(REPLICA), self._options.seed + index)
            loading = asyncio.create_task(self._rollout(rollout, mode))
            try:
                await asyncio.sleep(0.0 if mode is Mode.ALONE else RAMP_S)
                before = await self._counters(stack, client)
                records = await self._serve(stack, generator, mode, index)
                after = await self._counters(stack, client)
            finally:
                loading.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await loading
            await self._drain(stack, client)
        if mode in GATED:
            self._measured.gates[mode] = GateCosts(after.slack, after.replica)
        elapsed_ns = after.at_ns - before.at_ns
        return Run(
            mode=mode,
            round=index,
            elapsed_s=elapsed_ns / NS_PER_S,
            records=records,
            rollout_tokens=after.generated - before.generated,
            rollout_errors=len(rollout.errors),
            serving_busy_share=(after.slack.busy_ns - before.slack.busy_ns) / elapsed_ns,
            rollout_busy_share=(after.replica.busy_ns - before.replica.busy_ns) / elapsed_ns,
            gate_transitions=after.replica.gate_transitions - before.replica.gate_transitions,
        )

    @contextlib.asynccontextmanager
    async def _priority(self, stack: Stack, client: aiohttp.ClientSession, mode: Mode) -> AsyncIterator[None]:
        """In mode `priority`, the rollout worker under SCHED_IDLE."""
        if mode is not Mode.PRIORITY:
            yield
            return
        about = await engine_facts(client, stack.replica(REPLICA), stack.engine_token)
        with idle_priority(worker["pid"] for worker in about["workers"]):
            yield

    async def _closed_loop(self, load: ClosedLoad) -> None:
        options = self._options
        await load.run(options.concurrency, options.rollout_prompt_tokens, options.rollout_output_tokens)

    async def _rollout(self, load: ClosedLoad, mode: Mode) -> None:
        if mode is not Mode.ALONE:
            await self._closed_loop(load)

    async def _serve(
        self, stack: Stack, generator: LoadGenerator, mode: Mode, index: int
    ) -> list[RequestRecord]:
        """Replay the round's arrivals; the run lasts at least as long as the trace's stretch."""
        duration_s = self._measured.traces[index]["duration_s"]
        if mode is Mode.ROLLOUT_ALONE:
            await asyncio.sleep(min(REFERENCE_S, duration_s))
            return []
        records: list[RequestRecord] = []
        end_s = time.monotonic() + duration_s
        seed = self._options.seed + index
        await generator.replay(
            Replay(target=stack.serving, seed=seed, requests=self._arrivals[index]), records
        )
        await asyncio.sleep(max(0.0, end_s - time.monotonic()))
        return records

    async def _drain(self, stack: Stack, client: aiohttp.ClientSession) -> None:
        """Abort what is left in the rollout engine; the next run begins with an idle one."""
        url = f"{stack.replica(REPLICA).url}/rose/v1/abort"
        headers = {"Authorization": f"Bearer {stack.engine_token}"}
        board = WatchedBoard(stack.boards.replica(REPLICA), ReplicaReading)
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        while time.monotonic() < deadline_s:
            async with client.post(url, json={"all": True}, headers=headers) as response:
                if response.status != 200:
                    raise EngineFailed(f"{url} answered {response.status}: {(await response.text())[:200]}")
            await asyncio.sleep(0.3)
            reading = _read(board)
            if not reading.running and not reading.waiting:
                return
        raise EngineFailed(f"{REPLICA} still has requests {DRAIN_TIMEOUT_S:.0f} s after they were aborted")

    async def _counters(self, stack: Stack, client: aiohttp.ClientSession) -> _Counters:
        slack = WatchedBoard(stack.boards.slack(SERVING_NAME), SlackReading)
        replica = WatchedBoard(stack.boards.replica(REPLICA), ReplicaReading)
        generated = await generated_tokens(client, stack.replica(REPLICA))
        return _Counters(time.monotonic_ns(), _read(slack), _read(replica), generated)


def _read(board: WatchedBoard[Any]) -> Any:
    reading = board.read(time.monotonic_ns(), None)
    if isinstance(reading, Unknown):
        raise NotReady(f"{board.path}: {reading}")
    return reading


async def generated_tokens(client: aiohttp.ClientSession, target: Target) -> int:
    """Tokens an engine has generated since its start, from its metrics.  Raises EngineFailed."""
    try:
        async with client.get(f"{target.url}/metrics") as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineFailed(f"{target.url}/metrics: {error}") from None
    for family in text_string_to_metric_families(text):
        if family.name == "vllm:generation_tokens":
            return int(sum(one.value for one in family.samples if one.name.endswith("_total")))
    raise EngineFailed(f"{target.url}/metrics has no vllm:generation_tokens_total")


async def engine_facts(client: aiohttp.ClientSession, target: Target, token: str) -> dict[str, Any]:
    """What an engine says of itself, its processes included.  Raises EngineFailed."""
    url = f"{target.url}/rose/v1/engine"
    try:
        async with client.get(url, headers={"Authorization": f"Bearer {token}"}) as response:
            if response.status == 200:
                return dict(await response.json())
            raise EngineFailed(f"{url} answered {response.status}: {(await response.text())[:200]}")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineFailed(f"{url}: {error}") from None


def _line(run: Run) -> str:
    parts = [str(run.mode)]
    if run.records:
        p99 = percentile([one.ttft_ms for one in run.records if one.ttft_ms is not None], 99)
        parts.append(f"{len(run.records)} requests, p99 TTFT {p99 or 0:.0f} ms")
    if run.mode is not Mode.ALONE:
        parts.append(f"{run.rollout_tokens / run.elapsed_s:.0f} rollout tokens/s")
    return ", ".join([*parts, f"serving busy {run.serving_busy_share:.0%}"])
