"""Co-serving measured: one serving and one rollout engine on the same core, under different gates.

Every mode of a round meets the same arrivals, rounds are interleaved, and one pair of engines serves all
modes, so modes differ in nothing but what stands between the two engines.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import msgspec

from rose.config import ReplicaConfig
from rose.traces import TraceRequest
from rose_daemon.bench.idle_priority import why_not
from rose_daemon.bench.pair import Pair
from rose_daemon.bench.probe import REPLICA
from rose_daemon.bench.runs import BUSY_TARGET, GATED, CoserveOptions, Measured, Mode, Run
from rose_daemon.demo.checkpoints import make_model_files
from rose_daemon.demo.models import DemoModels
from rose_daemon.harness.interrupts import Interrupts
from rose_daemon.harness.replay import ReplayPlan, plan_replay
from rose_daemon.harness.screen import Screen
from rose_daemon.harness.stack import Cores, Stack, StackPlan, pin_this_process
from rose_daemon.harness.stats import percentile

TRIAL_S = 20.0
TRIALS_MAX = 3
BUSY_TOLERANCE = 0.04
RUN_S = (20.0, 120.0)
"""Shortest and longest run that a wanted number of requests may lead to."""
SPARE = 1.05
"""Thinning a trace to a rate is a matter of chance: aim a little higher than the requests wanted."""
DRILL_S = 60.0
HEADROOM_SHARE = 0.02
"""The gate is measured here, not memory: what else runs on this machine shall not cut rollout's KV budget."""


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
        self._trace = trace
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
        options, cores = self._options, self._measured.cores
        if Mode.PRIORITY in options.modes and (reason := why_not()):
            self._measured.skipped[Mode.PRIORITY] = reason
            self._screen.say(f"mode {Mode.PRIORITY} is left out: {reason}")
        models = await asyncio.to_thread(make_model_files, options.directory)
        pin_this_process(cores.host)
        async with Stack(stack_plan(options, cores, models), self._screen) as stack:
            self._interrupts.hurry = stack.hurry
            await stack.launch()
            await stack.ready()
            pair = Pair(stack, await stack.start_generator(), options)
            await stack.guard(self._measure(pair))
        return self._measured

    async def _measure(self, pair: Pair) -> None:
        async with pair.probe.collecting():
            await pair.warm_up(self._arrivals[0][:4])
            if self._options.calibrate:
                await self._calibrate(pair)
            modes = [mode for mode in self._options.modes if mode not in self._measured.skipped]
            for index in range(self._options.rounds):
                # Each round begins with another mode, so that none always follows the same one.
                turn = index % len(modes)
                for mode in (*modes[turn:], *modes[:turn]):
                    await self._round(pair, mode, index)
            self._measured.gates = {mode: pair.costs[mode] for mode in GATED if mode in pair.costs}
            if self._options.inject:
                await self._drill(pair)

    async def _round(self, pair: Pair, mode: Mode, index: int) -> None:
        self._screen.show("mode", f"{mode}, round {index + 1}")
        duration_s = self._measured.traces[index]["duration_s"]
        run = await pair.run(mode, index, self._arrivals[index], duration_s)
        self._measured.runs.append(run)
        if mode in GATED and not index:
            self._measured.gate_open[mode] = pair.probe.gate_open(run.started_ns, run.ended_ns)
        self._screen.say(f"round {index + 1} of {self._options.rounds}: {_line(run)}")

    async def _calibrate(self, pair: Pair) -> None:
        """Find the rate at which serving alone is as busy as wanted, and plan the rounds for it."""
        trace, seed = self._options.trace, self._options.seed
        for _ in range(TRIALS_MAX):
            self._screen.show("calibration", f"{trace.rate_rps:.2f} requests a second")
            replay = plan_replay(msgspec.structs.replace(trace, duration_s=TRIAL_S), seed)
            trial = await pair.trial(replay.requests, TRIAL_S, seed)
            self._measured.calibration.append(trial)
            load = f"{trial.rate_rps:.2f} requests a second"
            self._screen.say(f"calibration: {load} keep serving {trial.busy_share:.0%} busy")
            trace = msgspec.structs.replace(trace, rate_rps=trial.rate_rps * BUSY_TARGET / trial.busy_share)
            if abs(trial.busy_share - BUSY_TARGET) <= BUSY_TOLERANCE:
                break
        self._screen.show("calibration", "")
        self._plan(trace)

    async def _drill(self, pair: Pair) -> None:
        """Each gated mode once more, with delays on purpose."""
        replay = plan_replay(msgspec.structs.replace(self._trace, duration_s=DRILL_S), self._options.seed)
        for mode in (mode for mode in self._options.modes if mode in GATED):
            self._screen.show("mode", f"{mode}, with injected delays")
            drill = await pair.drill(mode, 0, replay.requests, DRILL_S)
            self._measured.drills.append(drill)
            self._screen.say(f"{len(drill.injections)} injected delays: {_line(drill.run)}")


def stack_plan(options: CoserveOptions, cores: Cores, models: DemoModels) -> StackPlan:
    """One serving and one opportunistic rollout engine, workers on the same core."""
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
        step_log=True,
    )
    return StackPlan(
        directory=options.directory,
        serving_model=models.serving,
        replicas=(replica,),
        cores=cores,
        ttft_slo_ms=options.budgets.ttft_ms,
        tpot_slo_ms=options.budgets.tpot_ms,
        token_cap=options.token_cap,
        headroom_share=HEADROOM_SHARE,
        step_log=True,
    )


def _line(run: Run) -> str:
    parts = [str(run.mode)]
    if run.records:
        p99 = percentile([one.ttft_ms for one in run.records if one.ttft_ms is not None], 99)
        parts.append(f"{len(run.records)} requests, p99 TTFT {p99 or 0:.0f} ms")
    if run.mode is not Mode.ALONE:
        parts.append(f"{run.rollout_tokens / run.elapsed_s:.0f} rollout tokens/s")
    return ", ".join([*parts, f"serving busy {run.serving_busy_share:.0%}"])
