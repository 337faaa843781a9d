"""Which requests serving gets: a file or the generated stand-in, cut and scaled for a small machine."""

from __future__ import annotations

from collections.abc import Sequence
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
    """A stretch of a trace, brought to a mean rate; sizes divided and clamped."""

    path: Path | None
    offset_s: float = 0.0
    duration_s: float = 120.0
    """Of the replay."""
    rate_rps: float = 4.0
    size_divisor: float = 8.0
    output_divisor: float | None = None
    """Of outputs, where it is not that of prompts."""
    prompt_tokens_min: int = 8
    prompt_tokens_max: int = 256
    output_tokens_min: int = 4
    output_tokens_max: int = 64


class ReplayWindow(msgspec.Struct, frozen=True):
    """What to send, how a report describes it, and where in the trace the next stretch begins."""

    requests: list[TraceRequest]
    description: dict[str, Any]
    end_s: float


def plan_replay(plan: ReplayPlan, seed: int) -> ReplayWindow:
    """Read or generate the trace and cut it.  The same seed gives the same requests.  Raises ConfigError.

    A stretch with more requests than the rate asks for is thinned; one with fewer is made longer, and its
    clock runs faster.
    """
    rng = np.random.default_rng(seed)
    if plan.path is None:
        span_s = plan.offset_s + plan.duration_s
        trace = generate(rng, duration_s=span_s, rate_rps=GENERATED_RPS, period_s=GENERATED_PERIOD_S)
    else:
        trace = read_azure(plan.path)
    stretch_s, rate_scale = _stretch(trace, plan)
    speed = stretch_s / plan.duration_s
    cut = Window(
        offset_s=plan.offset_s,
        duration_s=stretch_s,
        rate_scale=rate_scale,
        speed=speed,
        size_divisor=plan.size_divisor,
        output_divisor=plan.output_divisor,
        prompt_tokens_min=plan.prompt_tokens_min,
        prompt_tokens_max=plan.prompt_tokens_max,
        output_tokens_min=plan.output_tokens_min,
        output_tokens_max=plan.output_tokens_max,
    )
    requests = window(trace, cut, rng)
    description = {
        "trace": trace.source,
        "offset": round(plan.offset_s, 3),
        "duration_s": plan.duration_s,
        "stretch_s": round(stretch_s, 3),
        "speed": round(speed, 4),
        "size_divisor": plan.size_divisor,
        "output_divisor": cut.outputs_divided_by,
        "rate_scale": round(rate_scale * speed, 4),
        "requests_per_s": round(len(requests) / plan.duration_s, 3),
        "peak_over_mean": _peak_over_mean(requests, plan.duration_s),
        "prompt_tokens_mean": round(sum(one.prompt_tokens for one in requests) / len(requests), 1),
        "output_tokens_mean": round(sum(one.output_tokens for one in requests) / len(requests), 1),
        "seed": seed,
        "notes": list(trace.notes),
    }
    return ReplayWindow(requests, description, plan.offset_s + stretch_s)


def _peak_over_mean(requests: Sequence[TraceRequest], duration_s: float) -> float:
    """Requests in the fullest second over those in a mean one."""
    seconds = np.bincount([one.at_ns // NS_PER_S for one in requests])
    return round(float(seconds.max()) * duration_s / len(requests), 2)


def _stretch(trace: Trace, plan: ReplayPlan) -> tuple[float, float]:
    """How much of the trace to use, in seconds, and which share of its requests."""
    wanted = max(1, round(plan.rate_rps * plan.duration_s))
    start_ns = round(plan.offset_s * NS_PER_S)
    first = int(np.searchsorted(trace.at_ns, start_ns, side="left"))
    end_ns = start_ns + round(plan.duration_s * NS_PER_S)
    count = int(np.searchsorted(trace.at_ns, end_ns, side="left")) - first
    if count >= wanted:
        return plan.duration_s, wanted / count
    # To just before the request after the last one wanted, or to the end of the trace.
    last = min(first + wanted, len(trace.at_ns) - 1)
    return max(plan.duration_s, (int(trace.at_ns[last]) - start_ns) / NS_PER_S), 1.0
