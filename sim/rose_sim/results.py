"""What a run showed, in figures that do not depend on when or where it ran."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from rose_sim.fleet import JOB
from rose_sim.job import StepRecord
from rose_sim.loop import seconds

if TYPE_CHECKING:
    from rose_sim.world import World


class Latency(msgspec.Struct, frozen=True):
    """Of serving requests, in milliseconds."""

    p50: float
    p99: float
    mean: float


class Timeline(msgspec.Struct, frozen=True):
    """Minute by minute."""

    serving_busy: list[float]
    """Mean share of the minute that serving engines worked."""
    gate_open: list[float]
    """Mean share of the minute for which rollout was let run on serving GPUs; empty where none shares."""
    rollout_tokens_per_s: list[float]
    lent_memory_gb: list[float]
    """KV memory in use by rollout engines on serving GPUs, at the minute's end."""


class Outcome(msgspec.Struct, kw_only=True):
    """One system on one scenario."""

    system: str
    simulated_s: float
    events: int
    steps: list[StepRecord]
    throughput: float
    """Trajectories that count for training, per second."""
    rollout_s: float
    step_s: float
    rollout_share: float
    allocation_overhead: float
    """Share of the steps' time."""
    requests: int
    within_budget_share: float
    ttft_ms: Latency
    tpot_ms: Latency
    slo_ok: bool
    """P99 of TTFT and of TPOT within their budgets."""
    serving_busy_share: float
    serving_bandwidth_share: float
    gate_open_share: float
    kv_cuts: int
    faults: dict[str, int]
    """What went wrong on purpose."""
    turns: dict[str, int]
    turns_sent: int
    trajectories_stale: int
    """Aborted as over-stale."""
    prefix_hit_share: float
    rollout_tokens: int
    borrowed_tokens: int
    timeline: Timeline


def collect(world: World) -> Outcome:
    """Read a finished world."""
    scenario = world.scenario
    records = [] if world.job is None else world.job.records
    counted = records[1:] if world.system.staleness and len(records) > 1 else records
    time_s = sum(record.step_s for record in counted)
    batch = scenario.rl.groups * scenario.rl.group_size
    span_ps = max(1, world.loop.now_ps)
    serving = [device.serving.work() for device in world.devices]
    moved = sum(
        work.steps * world.serving_model.weight_bytes
        + work.context_steps * world.serving_model.kv_bytes_per_token
        for work in serving
    )
    peak = world.gpu.bandwidth_tb_s * 1e12 * scenario.serving.tp * seconds(span_ps) * max(1, len(serving))
    engines = [replica.engine for replica in [*world.dedicated, *world.elastic]]
    computed = sum(engine.work().prefill_tokens for engine in engines)
    cached = sum(engine.cached_tokens for engine in engines)
    ttft = world.load.ttft_ms if world.load else array("d")
    tpot = world.load.tpot_ms if world.load else array("d")
    ttft_ms, tpot_ms = _latency(ttft), _latency(tpot)
    spec = scenario.serving
    gates = [device.opened_ps() for device in world.devices]
    counts = world.fleet.machine.counts()
    job = world.fleet.machine.job_view(JOB)
    return Outcome(
        system=world.system.name,
        simulated_s=seconds(world.loop.now_ps),
        events=world.loop.events,
        steps=records,
        throughput=len(counted) * batch / time_s if time_s else 0.0,
        rollout_s=_mean([record.rollout_s for record in counted]),
        step_s=_mean([record.step_s for record in counted]),
        rollout_share=sum(record.rollout_s for record in counted) / time_s if time_s else 0.0,
        allocation_overhead=sum(record.allocation_s for record in counted) / time_s if time_s else 0.0,
        requests=len(ttft),
        within_budget_share=_within(ttft, spec.ttft_ms) * _within(tpot, spec.tpot_ms),
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        slo_ok=ttft_ms.p99 <= spec.ttft_ms and tpot_ms.p99 <= spec.tpot_ms,
        serving_busy_share=_mean([work.busy_ps / span_ps for work in serving]),
        serving_bandwidth_share=moved / peak,
        gate_open_share=_mean([share / span_ps for share in gates]),
        kv_cuts=sum(device.cuts for device in world.devices),
        faults=dict(world.faults.counts),
        turns={name: getattr(counts, name) for name in counts.__struct_fields__},
        turns_sent=0 if world.job is None else world.job.player.turns_sent,
        trajectories_stale=0 if job is None else job.trajectories_stale,
        prefix_hit_share=cached / (cached + computed) if cached + computed else 0.0,
        rollout_tokens=sum(engine.work().decode_tokens for engine in engines),
        borrowed_tokens=sum(replica.engine.work().decode_tokens for replica in world.elastic),
        timeline=world.timeline.read(),
    )


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _within(values: array[float], budget: float) -> float:
    return float(np.mean(np.frombuffer(values) <= budget)) if len(values) else 1.0


def _latency(values: array[float]) -> Latency:
    if not len(values):
        return Latency(0.0, 0.0, 0.0)
    found = np.frombuffer(values)
    p50, p99 = np.percentile(found, (50, 99))
    return Latency(float(p50), float(p99), float(found.mean()))
