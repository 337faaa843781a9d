"""`rose sim whatif`: how much rollout capacity a serving fleet can lend, from its own trace.

The fleet is simulated twice, alone and with rollout engines that always have work; the difference is what
lending costs its users, and the tokens are what lending brings.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.stats import beta

from rose.errors import ConfigError
from rose.traces import Trace
from rose_sim.loop import PS_PER_S, ps, stream
from rose_sim.reports import SCHEMA, costs
from rose_sim.results import collect
from rose_sim.scenario import Rl, Rollout, Scenario, Serving, Trajectories
from rose_sim.traces import read_trace
from rose_sim.world import World

HOUR_S = 3600
HEADROOM_STEP = 0.05


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked."""

    trace: Path
    gpus: int
    gpu: str
    tp: int
    serving_model: str
    rollout_model: str
    ttft_ms: float
    tpot_ms: float
    rate_rps: float | None
    hours: float
    seed: int
    serving_profile: str = ""
    rollout_profile: str = ""


def answer(question: Question) -> dict[str, Any]:
    """Simulate, and say what can be lent.  Raises ConfigError for a trace or a fleet that cannot be used."""
    started = time.perf_counter()
    if question.gpus % question.tp:
        raise ConfigError(f"{question.gpus} GPUs are no multiple of the {question.tp} of an engine")
    trace = _trace(question)
    scenario = _scenario(question, len(trace.at_ns) / (question.hours * HOUR_S))
    alone = World(scenario, "serverlessllm", trace=trace)
    without = alone.run()
    peak_kv = _watch_kv(alone)
    lent = World(scenario, "rose", trace=trace)
    hours = _by_hour(lent, question)
    outcome = collect(lent)
    broken = round((1 - outcome.within_budget_share) * outcome.requests)
    low, high = _clopper_pearson(broken, outcome.requests)
    headroom = min(0.5, max(0.1, HEADROOM_STEP * np.ceil(1.5 * peak_kv / HEADROOM_STEP)))
    usable = [device for device in lent.devices if device.gate_open_ps > 0.2 * lent.loop.now_ps]
    notes = list(trace.notes)
    if trace.span_ns < question.hours * HOUR_S * 1e9 * 0.95:
        notes.append(f"the trace is {trace.span_ns / 1e9 / HOUR_S:.2f} h long")
    notes.append("the admission gate is the strict one: rollout runs while serving is idle")
    return {
        "schema": SCHEMA,
        "command": "sim whatif",
        "question": {**msgspec.structs.asdict(question), "trace": str(question.trace)},
        "hours": hours,
        "rollout_tokens_per_s": outcome.borrowed_tokens / outcome.simulated_s,
        "lendable_gpu_hours": sum(row["lendable_gpu_hours"] for row in hours),
        "slo": {
            "requests": outcome.requests,
            "broken_share": 1 - outcome.within_budget_share,
            "broken_share_ci": [low, high],
            "broken_share_alone": 1 - without.within_budget_share,
            "ttft_p99_ms": outcome.ttft_ms.p99,
            "tpot_p99_ms": outcome.tpot_ms.p99,
            "ttft_p99_ms_alone": without.ttft_ms.p99,
            "tpot_p99_ms_alone": without.tpot_ms.p99,
        },
        "recommended": {
            "headroom_share": round(float(headroom), 2),
            "token_cap": scenario.rollout.token_cap,
            "n_serving": len(usable) * question.tp,
        },
        "notes": notes,
        **costs(started),
    }


def _trace(question: Question) -> Trace:
    trace = read_trace(question.trace)
    keep = trace.at_ns <= question.hours * HOUR_S * 1e9
    if question.rate_rps is not None:
        rate = len(trace.at_ns) / max(1e-9, trace.span_ns / 1e9)
        if question.rate_rps > rate:
            raise ConfigError(f"the trace has {rate:.2f} requests/s; it can be thinned, not made denser")
        keep &= stream(question.seed, "thin").uniform(0, 1, len(keep)) < question.rate_rps / rate
    if not keep.any():
        raise ConfigError(f"{question.trace}: no request is left", "ask for more hours, or a higher rate")
    return Trace(
        trace.source, trace.at_ns[keep], trace.prompt_tokens[keep], trace.output_tokens[keep], trace.notes
    )


def _scenario(question: Question, rate_rps: float) -> Scenario:
    """Rollout that never runs out of work: more trajectories than slots, in one endless step."""
    slots = 16 * (question.gpus + question.tp)
    return Scenario(
        name="whatif",
        seed=question.seed,
        gpu=question.gpu,
        duration_s=question.hours * HOUR_S,
        serving=Serving(
            model=question.serving_model,
            gpus=question.gpus,
            tp=question.tp,
            ttft_ms=question.ttft_ms,
            tpot_ms=question.tpot_ms,
            profile=question.serving_profile,
            rate_rps=rate_rps,
            trace=str(question.trace),
        ),
        rollout=Rollout(
            model=question.rollout_model,
            tp=question.tp,
            profile=question.rollout_profile,
            dedicated_gpus=question.tp,
            borrowed_gpus_max=question.gpus,
        ),
        rl=Rl(groups=max(1, slots // 8), group_size=16, steps=1_000_000, train_s=0.0),
        trajectories=Trajectories(
            turns_median=10,
            turns_sigma=0.5,
            turns_max=50,
            prompt_tokens=1000,
            response_median=300,
            response_sigma=0.7,
            observation_median=200,
            env_s_median=1.0,
        ),
    )


def _by_hour(world: World, question: Question) -> list[dict[str, float | int]]:
    """Run hour by hour; what changed in each."""
    job = world.job
    assert job is not None
    world.loop.at(0, job.begin)
    rows: list[dict[str, float | int]] = []
    end_ps, hour = ps(question.hours * HOUR_S), 0
    opened = busy = requests = 0
    while world.loop.now_ps < end_ps:
        began = world.loop.now_ps
        world.loop.run(min(end_ps, (hour + 1) * HOUR_S * PS_PER_S))
        span = world.loop.now_ps - began
        opened_now = sum(device.opened_ps() for device in world.devices)
        busy_now = sum(device.serving.work().busy_ps for device in world.devices)
        arrived = world.load.arrived if world.load else 0
        share = (opened_now - opened) / (span * len(world.devices))
        rows.append(
            {
                "hour": hour,
                "rate_rps": (arrived - requests) / (span / PS_PER_S),
                "serving_busy_share": (busy_now - busy) / (span * len(world.devices)),
                "gate_open_share": share,
                "lendable_gpu_hours": share * question.gpus * span / PS_PER_S / HOUR_S,
            }
        )
        opened, busy, requests, hour = opened_now, busy_now, arrived, hour + 1
    return rows


def _watch_kv(world: World) -> float:
    """Most KV memory that serving held at once on an engine, as a share of the device."""
    per_token = world.serving_model.kv_bytes_per_token
    memory = world.gpu.memory_bytes * world.scenario.serving.tp
    return max(device.serving.kv.peak for device in world.devices) * per_token / memory


def _clopper_pearson(broken: int, total: int) -> tuple[float, float]:
    """Exact 95% interval of a share."""
    if total == 0:
        return 0.0, 1.0
    low = 0.0 if broken == 0 else float(beta.ppf(0.025, broken, total - broken + 1))
    high = 1.0 if broken == total else float(beta.ppf(0.975, broken + 1, total - broken))
    return low, high
