"""The pair of engines under load: one run of one mode."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import aiohttp

from rose import wire
from rose.errors import EngineFailed
from rose.traces import TraceRequest
from rose.units import NS_PER_S
from rose_daemon.bench.idle_priority import idle_priority
from rose_daemon.bench.inject import Injector
from rose_daemon.bench.probe import REPLICA, Counters, Probe
from rose_daemon.bench.runs import CoserveOptions, Drill, GateCosts, Mode, Run, Trial
from rose_daemon.harness.generator import LoadGenerator, Replay
from rose_daemon.harness.load import ClosedLoad, RequestRecord, open_client
from rose_daemon.harness.stack import Stack

REFERENCE_S = 15.0
"""Length of a `rollout-alone` run: nothing varies in it."""
RAMP_S = 2.0
"""Between the start of the rollout load and the first serving request."""
WARM_UP_S = 3.0


class Pair:
    """A serving and a rollout engine that are up, and the load generator."""

    def __init__(self, stack: Stack, generator: LoadGenerator, options: CoserveOptions) -> None:
        self.probe = Probe(stack)
        self.costs: dict[Mode, GateCosts] = {}
        """Boards at the end of the latest run of each mode."""
        self._stack = stack
        self._generator = generator
        self._options = options

    async def warm_up(self, requests: Sequence[TraceRequest]) -> None:
        """The first requests of an engine pay for what is made lazily.  Raises EngineFailed."""
        records = await self._replay(requests, seed=0)
        if failed := [record.error for record in records if record.error]:
            raise EngineFailed(f"serving does not answer: {failed[0]}", f"see {self._stack.log_dir}")
        async with open_client() as client:
            rollout = ClosedLoad(client, self._stack.replica(REPLICA), seed=0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WARM_UP_S):
                    await self._roll_out(rollout)
            await self.probe.drain(client)

    async def trial(self, requests: Sequence[TraceRequest], duration_s: float, seed: int) -> Trial:
        """How busy these requests keep serving alone.  Raises EngineFailed."""
        await self._set_gate(Mode.ALONE)
        async with open_client() as client:
            before = await self.probe.counters(client)
            await self._replay(requests, seed)
            after = await self.probe.counters(client)
        busy_s = (after.slack.busy_ns - before.slack.busy_ns) / NS_PER_S
        if not busy_s:
            raise EngineFailed("serving answered, and its board shows no step", f"see {self._stack.log_dir}")
        return Trial(len(requests) / duration_s, busy_s / duration_s)

    async def run(self, mode: Mode, index: int, requests: Sequence[TraceRequest], duration_s: float) -> Run:
        """One mode in one round, at least as long as `duration_s`."""
        await self._set_gate(mode)
        seed = self._options.seed + index
        async with open_client() as client, self._priority(client, mode):
            self.probe.forget_steps()
            rollout = ClosedLoad(client, self._stack.replica(REPLICA), seed)
            async with self._rolling_out(rollout, mode):
                before = await self.probe.counters(client)
                if mode is Mode.ROLLOUT_ALONE:
                    await asyncio.sleep(min(REFERENCE_S, duration_s))
                    records = []
                else:
                    records = await self._serve(requests, seed, duration_s)
                after = await self.probe.counters(client)
            await self.probe.drain(client)  # and so no step is in flight that the log does not have yet
            self.probe.collect_steps()
        self.costs[mode] = GateCosts(after.slack, after.replica)
        run = _run(mode, index, before, after)
        run.records, run.rollout_errors = records, len(rollout.errors)
        run.serving_steps = self.probe.serving_steps.within(before.at_ns, after.at_ns)
        run.rollout_steps = self.probe.rollout_steps.within(before.at_ns, after.at_ns)
        run.gaps = list(self.probe.rollout_steps.gaps)
        return run

    async def drill(
        self, mode: Mode, index: int, requests: Sequence[TraceRequest], duration_s: float
    ) -> Drill:
        """A run during which the device is held up now and then."""
        async with open_client() as client:
            serving, rollout = [
                await self.probe.workers(client, target)
                for target in (self._stack.serving, self._stack.replica(REPLICA))
            ]
        seed = self._options.seed + index
        injector = Injector(seed, serving, rollout, self.probe.serving_works, self.probe.rollout_works)
        injecting = asyncio.create_task(injector.run())
        try:
            run = await self.run(mode, index, requests, duration_s)
        finally:
            injecting.cancel()
            await asyncio.wait({injecting})
        if not injecting.cancelled():
            injecting.result()
        return Drill(run, injector.injections)

    async def _set_gate(self, mode: Mode) -> None:
        order = self._options.order(mode)
        await self._stack.control(wire.GateRequest(REPLICA, order.mode, order.token_cap))

    @contextlib.asynccontextmanager
    async def _priority(self, client: aiohttp.ClientSession, mode: Mode) -> AsyncIterator[None]:
        """In mode `priority`, the rollout worker under SCHED_IDLE."""
        if mode is not Mode.PRIORITY:
            yield
            return
        with idle_priority(await self.probe.workers(client, self._stack.replica(REPLICA))):
            yield

    @contextlib.asynccontextmanager
    async def _rolling_out(self, load: ClosedLoad, mode: Mode) -> AsyncIterator[None]:
        """The rollout load, where the mode has one."""
        if mode is Mode.ALONE:
            yield
            return
        loading = asyncio.create_task(self._roll_out(load))
        try:
            await asyncio.sleep(RAMP_S)
            yield
        finally:
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading

    async def _roll_out(self, load: ClosedLoad) -> None:
        options = self._options
        await load.run(options.concurrency, options.rollout_prompt_tokens, options.rollout_output_tokens)

    async def _serve(
        self, requests: Sequence[TraceRequest], seed: int, duration_s: float
    ) -> list[RequestRecord]:
        end_s = time.monotonic() + duration_s
        records = await self._replay(requests, seed)
        await asyncio.sleep(max(0.0, end_s - time.monotonic()))
        return records

    async def _replay(self, requests: Sequence[TraceRequest], seed: int) -> list[RequestRecord]:
        records: list[RequestRecord] = []
        replay = Replay(target=self._stack.serving, seed=seed, requests=list(requests))
        await self._generator.replay(replay, records)
        return records


def _run(mode: Mode, index: int, before: Counters, after: Counters) -> Run:
    """What the counters say of a run."""
    elapsed_ns = after.at_ns - before.at_ns
    return Run(
        mode=mode,
        round=index,
        elapsed_s=elapsed_ns / NS_PER_S,
        rollout_tokens=after.generated - before.generated,
        serving_busy_share=(after.slack.busy_ns - before.slack.busy_ns) / elapsed_ns,
        rollout_busy_share=(after.replica.busy_ns - before.replica.busy_ns) / elapsed_ns,
        gate_transitions=after.replica.gate_transitions - before.replica.gate_transitions,
        kv_budget_share=after.replica.kv_budget_blocks / max(1, after.replica.kv_total_blocks),
        started_ns=before.at_ns,
        ended_ns=after.at_ns,
    )
