"""Builds a scenario's engines, devices, fleet and job for one system, and runs them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rose.core.tokenmix import BANDWIDTH, COMPUTE
from rose.traces import Trace, generate
from rose_sim.costs import StepCost, step_cost
from rose_sim.engine import Engine
from rose_sim.faults import FaultSwarm
from rose_sim.fleet import Fleet, Replica, Turn
from rose_sim.gated import Gated
from rose_sim.hardware import Gpu, gpu, model
from rose_sim.job import AsyncJob, SyncJob
from rose_sim.loop import PS_PER_NS, PS_PER_S, Loop, ps, stream
from rose_sim.profiled import engines_of
from rose_sim.recorder import Recorder
from rose_sim.results import Outcome, collect
from rose_sim.scenario import Scenario
from rose_sim.serving import DisaggregatedLoad, ServingLoad
from rose_sim.sharing import TURNS, Contending, Sharing, Swapping
from rose_sim.steps import Request
from rose_sim.systems import get
from rose_sim.traces import read_trace

ALONE_S = 3600.0
"""How long serving alone is watched, unless the scenario says."""
MEMORY_SHARE = 0.9
"""Of the device, for weights and KV (vLLM's gpu_memory_utilization)."""


class World:
    """Everything of one run."""

    def __init__(
        self, scenario: Scenario, system: str, *, trace: Trace | None = None, slow: bool = False
    ) -> None:
        self.scenario = scenario
        self.loop = Loop()
        self.single_steps = slow
        self.serving_model = model(scenario.serving.model)
        self.rollout_model = model(scenario.rollout.model)
        self.gpu = gpu(scenario.gpu)
        self._serving, self._rollout = engines_of(scenario)
        self.dedicated: list[Replica] = []
        self.elastic: list[Replica] = []
        self.devices: list[Sharing] = []
        self.system = get(system)(self)
        self.fleet = Fleet(
            self.loop,
            affinity=self.system.affinity,
            hardware_affinity=self.system.hardware_affinity,
            on_turn=self._answered,
            on_stale=self._over_stale,
        )
        self.job = self._job() if self.system.trains else None
        self._memory = self.gpu.memory_bytes * scenario.serving.tp
        self._build()
        self.load = self._serving_load(trace) if self.devices else None
        self.timeline = Recorder(self)
        self.faults = FaultSwarm(self)

    @property
    def version(self) -> int:
        """The weights that the job's turns need now."""
        return 0 if self.job is None else len(self.job.records) + 1

    def run(self) -> Outcome:
        """Run to the end of the job, or for the scenario's duration."""
        collecting = gc.isenabled()
        gc.disable()  # next to nothing in here is cyclic, and the collector takes a fifth of the time
        try:
            return self._run()
        finally:
            if collecting:
                gc.enable()

    def _run(self) -> Outcome:
        limit = self.scenario.duration_s
        if self.job is None:
            self.loop.run(ps(limit if limit is not None else ALONE_S))
        else:
            self.loop.at(0, self.job.begin)
            self.loop.run(None if limit is None else ps(limit))
        return collect(self)

    # ---- devices, for the systems ------------------------------------------------------------------

    def plain_device(self, number: int) -> Sharing:
        """Serving alone."""
        kv = self._kv_tokens(self.serving_model.weight_bytes, self.serving_model.kv_bytes_per_token)
        return Sharing(self.loop, self._serving_engine(number, kv), None)

    def gated_device(self, number: int) -> Sharing:
        """ROSE's."""
        serving, rollout = self._resident_engines(number, self.scenario.rollout.token_cap)
        return Gated(
            self.loop,
            serving,
            rollout,
            self.scenario,
            memory_bytes=self._memory,
            weights_bytes=self._weights_bytes,
            kv_bytes=(self.serving_model.kv_bytes_per_token, self.rollout_model.kv_bytes_per_token),
        )

    def contending_device(
        self, number: int, *, step_tokens_max: int, eviction: tuple[int, int] | None = None
    ) -> Sharing:
        """Both models resident, nothing regulated."""
        serving, rollout = self._resident_engines(number, step_tokens_max)
        return Contending(self.loop, serving, rollout, eviction)

    def static_device(self, number: int) -> Sharing:
        """Half for each."""
        half = (round(self._memory * MEMORY_SHARE) - self._weights_bytes) // 2
        serving = self._serving_engine(number, half // self.serving_model.kv_bytes_per_token)
        tokens = half // self.rollout_model.kv_bytes_per_token
        rollout = self._rollout_engine(f"borrowed-{number}", tokens, 2048)
        serving.share(TURNS)
        rollout.share(TURNS)
        return Sharing(self.loop, serving, rollout)

    def swapping_device(self, number: int, load_ps: tuple[int, int], keep_alive_ps: int) -> Sharing:
        """One model at a time."""
        serving = self._serving_engine(
            number, self._kv_tokens(self.serving_model.weight_bytes, self.serving_model.kv_bytes_per_token)
        )
        rollout = self._rollout_engine(f"borrowed-{number}", self._rollout_kv_alone, 2048)
        return Swapping(self.loop, serving, rollout, load_ps=load_ps, keep_alive_ps=keep_alive_ps)

    # ---- inside ------------------------------------------------------------------------------------

    @property
    def _weights_bytes(self) -> int:
        return self.serving_model.weight_bytes + self.rollout_model.weight_bytes

    @property
    def _rollout_kv_alone(self) -> int:
        return self._kv_tokens(self.rollout_model.weight_bytes, self.rollout_model.kv_bytes_per_token)

    def _kv_tokens(self, weight_bytes: int, kv_bytes: int, kind: Gpu | None = None) -> int:
        memory = (kind or self.gpu).memory_bytes * self.scenario.rollout.tp
        return (round(memory * MEMORY_SHARE) - weight_bytes) // kv_bytes

    def _resident_engines(self, number: int, step_tokens_max: int) -> tuple[Engine, Engine]:
        free = round(self._memory * MEMORY_SHARE) - self._weights_bytes
        lent = self._memory - self._weights_bytes - round(self._memory * self.scenario.rollout.headroom_share)
        serving = self._serving_engine(number, free // self.serving_model.kv_bytes_per_token)
        tokens = lent // self.rollout_model.kv_bytes_per_token
        return serving, self._rollout_engine(f"borrowed-{number}", tokens, step_tokens_max)

    @property
    def _staleness(self) -> int:
        """Alpha; 0 where rollout waits for training."""
        asked = self.scenario.rl.staleness
        return self.system.staleness if asked is None or not self.system.staleness else asked

    def _job(self) -> SyncJob | AsyncJob:
        if self._staleness:
            return AsyncJob(self.loop, self.fleet, self.scenario, self.system, staleness=self._staleness)
        return SyncJob(self.loop, self.fleet, self.scenario, self.system)

    def _build(self) -> None:
        spec = self.scenario.rollout
        if self.job is not None:
            self._dedicate("dedicated", spec.dedicated_gpus // spec.tp, self.gpu)
            if spec.mixed_gpus:
                self._dedicate("mixed", spec.mixed_gpus // spec.tp, gpu(spec.mixed_gpu))
                self._tell_hardware()
        for number in range(self.scenario.serving.instances):
            device = self.system.sharing(number)
            self.devices.append(device)
            if device.rollout is not None:
                self.elastic.append(self._borrow(device, device.rollout))
        if self.system.own_elastic:
            for number in range(spec.borrowed_gpus_max // spec.tp):
                engine = self._rollout_engine(
                    f"elastic-{number}", self._rollout_kv_alone, spec.step_tokens_max
                )
                self.elastic.append(Replica(f"elastic-{number}", engine, borrowed=True))
        for replica in self.elastic:
            replica.up = not self.system.own_elastic
        for replica in [*self.dedicated, *self.elastic]:
            self.fleet.add(replica)
        if self.job is not None:
            self.fleet.submit_job(
                dedicated=len(self.dedicated),
                borrowed=spec.borrowed_gpus_max // spec.tp,
                cap=spec.replica_cap,
                staleness_max=self._staleness,
                abort_stale=bool(self._staleness) and self.scenario.rl.abort_stale,
            )

    def _dedicate(self, name: str, count: int, kind: Gpu) -> None:
        """Dedicated rollout engines on one kind of GPU."""
        spec = self.scenario.rollout
        for number in range(count):
            kv = self._kv_tokens(self.rollout_model.weight_bytes, self.rollout_model.kv_bytes_per_token, kind)
            engine = self._rollout_engine(f"{name}-{number}", kv, spec.step_tokens_max, kind)
            replica = Replica(engine.name, engine, borrowed=False)
            replica.gpu = kind
            self.dedicated.append(replica)

    def _tell_hardware(self) -> None:
        """Of two kinds, the one with more FLOPs a byte is rich in compute, the other in bandwidth."""
        ratios = {
            replica.gpu: replica.gpu.tflops / replica.gpu.bandwidth_tb_s
            for replica in self.dedicated
            if replica.gpu is not None
        }
        richest = max(ratios.values())
        for replica in self.dedicated:
            if replica.gpu is not None and len(set(ratios.values())) > 1:
                replica.hardware = COMPUTE if ratios[replica.gpu] == richest else BANDWIDTH

    def _borrow(self, device: Sharing, engine: Engine) -> Replica:
        replica = Replica(engine.name, engine, borrowed=True)
        replica.gate_open = device.gate_open
        replica.serving_kv_share = lambda: device.serving.kv.used / max(1, device.serving.kv.capacity)
        device.interrupt = self.fleet.interrupt
        if isinstance(device, Swapping):
            device.evict = lambda: self.fleet.take_down(replica, "model_evicted")
            device.restore = lambda: self.fleet.bring_up(replica, replica.version)
        return replica

    def _serving_engine(self, number: int, kv_tokens: int) -> Engine:
        spec = self.scenario.serving
        return self._engine(
            f"serving-{number}",
            self._serving.cost,
            kv_tokens,
            spec.requests_max,
            spec.step_tokens_max,
            on_first=lambda request, now: self.load.first_token(request, now) if self.load else None,
            on_finish=lambda request, now: self.load.finished(request, now) if self.load else None,
        )

    def _rollout_engine(
        self, name: str, kv_tokens: int, step_tokens_max: int, kind: Gpu | None = None
    ) -> Engine:
        spec = self.scenario.rollout
        return self._engine(
            name,
            self._rollout_cost(kind),
            kv_tokens,
            spec.replica_cap,
            step_tokens_max,
            on_first=None,
            on_finish=self._attempt_finished,
            keep_prefixes=True,
        )

    def _rollout_cost(self, kind: Gpu | None) -> StepCost:
        """On the scenario's kind of GPU, or on another."""
        if kind is None or kind == self.gpu:
            return self._rollout.cost
        return step_cost(self.rollout_model, kind, self.scenario.rollout.tp)

    def _engine(
        self,
        name: str,
        cost: StepCost,
        kv_tokens: int,
        requests_max: int,
        step_tokens_max: int,
        *,
        on_first: Callable[[Request, int], None] | None,
        on_finish: Callable[[Request, int], None],
        keep_prefixes: bool = False,
    ) -> Engine:
        return Engine(
            self.loop,
            name,
            cost,
            kv_tokens=kv_tokens,
            requests_max=requests_max,
            step_tokens_max=step_tokens_max,
            on_first=on_first,
            on_finish=on_finish,
            keep_prefixes=keep_prefixes,
            single_steps=self.single_steps,
        )

    def _serving_load(self, trace: Trace | None) -> ServingLoad:
        trace = serving_trace(self.scenario) if trace is None else trace
        period_ps = trace.span_ns * PS_PER_NS + PS_PER_S
        if self.scenario.serving.trace == "generated":
            period_ps = max(period_ps, ps(self.scenario.serving.period_s))
        spec, choose = self.scenario.serving, self.system.choose()
        if not spec.prefill_gpus:
            return ServingLoad(self.loop, self.devices, trace, choose, period_ps)
        return DisaggregatedLoad(
            self.loop,
            self.devices,
            trace,
            choose,
            period_ps,
            prefilling=spec.prefill_gpus // spec.tp,
            token_ps=ps(self.serving_model.kv_bytes_per_token / (spec.handover_gb_s * 1e9)),
        )

    def _attempt_finished(self, request: Request, now_ps: int) -> None:
        self.fleet.finished(request, now_ps)  # a method of ours, as the fleet comes after the first engines

    def _answered(self, turn: Turn, now_ps: int) -> None:
        assert self.job is not None
        self.job.player.answered(turn, now_ps)

    def _over_stale(self, turn: Turn) -> None:
        assert self.job is not None
        self.job.player.begin_again(turn)


def serving_trace(scenario: Scenario) -> Trace:
    """The scenario's serving load from its start on: a generated day, or a recorded trace, thinned."""
    spec = scenario.serving
    rng = stream(scenario.seed, "serving")
    if spec.trace == "generated":
        day = generate(
            rng,
            duration_s=spec.period_s,
            rate_rps=spec.rate_rps,
            amplitude=spec.amplitude,
            period_s=spec.period_s,
        )
        at = (day.at_ns - round(spec.start_s * 1e9)) % round(spec.period_s * 1e9)
    else:
        day = read_trace(Path(spec.trace))
        rate = len(day.at_ns) / ((day.span_ns + 1) / 1e9)
        keep = rng.uniform(0, 1, len(day.at_ns)) < spec.rate_rps / rate
        day = Trace(day.source, day.at_ns[keep], day.prompt_tokens[keep], day.output_tokens[keep], day.notes)
        at = day.at_ns
    order = np.argsort(at, kind="stable")
    prompts, outputs = day.prompt_tokens[order], day.output_tokens[order]
    return Trace(day.source, at[order], prompts, outputs, day.notes)


def simulate(scenario: Scenario, system: str, *, slow: bool = False, trace: Trace | None = None) -> Outcome:
    """Run one system on a scenario."""
    return World(scenario, system, slow=slow, trace=trace).run()
