"""Which requests serving gets: a file or the generated stand-in, cut and scaled for a small machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rose.traces import Trace, TraceRequest, Window, generate, read_azure, window
from rose.units import NS_PER_S

GENERATED_PERIOD_S = 120.0
"""The stand-in's day, so that a short run sees its peak and its trough."""
GENERATED_RPS = 10.0
"""More than a small machine takes: thinned to the plan's rate."""


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a trace, thinned to a mean rate; sizes divided and clamped."""

    path: Path | None
    offset_s: float = 0.0
    duration_s: float = 120.0
    rate_rps: float = 4.0
    size_divisor: float = 8.0
    prompt_tokens_min: int = 8
    prompt_tokens_max: int = 256
    output_tokens_min: int = 4
    output_tokens_max: int = 64


class Replay(msgspec.Struct, frozen=True):
    """What to send, and how a report describes it."""

    requests: list[TraceRequest]
    description: dict[str, Any]


def plan_replay(plan: ReplayPlan, seed: int) -> Replay:
    """Read or generate the trace and cut it.  The same seed gives the same requests.  Raises ConfigError."""
    rng = np.random.default_rng(seed)
    if plan.path is None:
        span_s = plan.offset_s + plan.duration_s
        trace = generate(rng, duration_s=span_s, rate_rps=GENERATED_RPS, period_s=GENERATED_PERIOD_S)
    else:
        trace = read_azure(plan.path)
    rate_scale = min(1.0, plan.rate_rps / _rate_rps(trace, plan))
    cut = Window(
        offset_s=plan.offset_s,
        duration_s=plan.duration_s,
        rate_scale=rate_scale,
        size_divisor=plan.size_divisor,
        prompt_tokens_min=plan.prompt_tokens_min,
        prompt_tokens_max=plan.prompt_tokens_max,
        output_tokens_min=plan.output_tokens_min,
        output_tokens_max=plan.output_tokens_max,
    )
    requests = window(trace, cut, rng)
    return Replay(
        requests,
        {
            "trace": trace.source,
            "offset": plan.offset_s,
            "duration_s": plan.duration_s,
            "size_divisor": plan.size_divisor,
            "rate_scale": round(rate_scale, 4),
            "requests_per_s": round(len(requests) / plan.duration_s, 3),
            "prompt_tokens_mean": round(sum(one.prompt_tokens for one in requests) / len(requests), 1),
            "output_tokens_mean": round(sum(one.output_tokens for one in requests) / len(requests), 1),
            "seed": seed,
            "notes": list(trace.notes),
        },
    )


def _rate_rps(trace: Trace, plan: ReplayPlan) -> float:
    """Mean rate of the stretch; tiny rather than 0, so that an empty one is refused where it is cut."""
    start_ns = round(plan.offset_s * NS_PER_S)
    end_ns = start_ns + round(plan.duration_s * NS_PER_S)
    count = int(np.count_nonzero((trace.at_ns >= start_ns) & (trace.at_ns < end_ns)))
    return max(count / plan.duration_s, 1e-9)
