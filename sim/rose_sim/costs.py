"""How long an engine's steps take: a fit to profiled tables, scaled by roofline to other models and GPUs.

    prefill of n tokens after p:   max(base + n * token, floor) + attention * (n * p + n^2 / 2)
    decode of b requests:          batch[b] + context[b] * (sum of their context lengths)
    both in one step:              prefill + (batch[b] - batch[1]) + context[b] * (sum); weights are read once

All coefficients are multiples of four picoseconds, so that sums over many steps are exact, even of steps that
take one and a half times as long.  The forms are the roofline's (compute and attention of prefill, weights
and KV reads of decode); the coefficients are least squares of relative errors.
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np

from rose_sim.hardware import GPUS, MODELS, Gpu, ModelShape
from rose_sim.loop import PS_PER_MS, PS_PER_US
from rose_sim.tables import BATCHES, PREFILL_TOKENS, PROFILES, Profile

BATCH_MAX = 512
MEMORY_EFFICIENCY = 0.8
"""Of the peak bandwidth, for KV reads where no table tells (as aiconfigurator scales it)."""
STEP_OVERHEAD_PS = 300 * PS_PER_US
"""Host time between two steps (facts: 0.1 to 3 ms); none of the tables holds it."""


class StepCost(msgspec.Struct, frozen=True):
    """Coefficients for one model on one group of GPUs, in picoseconds."""

    base: int
    token: int
    attention: int
    """Per prompt token and token of its context."""
    floor: int
    """A step cannot be shorter than reading the weights once."""
    batch: tuple[int, ...]
    """Index: number of decoding requests."""
    context: tuple[int, ...]
    """Per token of context, index as `batch`."""
    overhead: int = STEP_OVERHEAD_PS

    def prefill_ps(self, tokens: int, past: int = 0) -> int:
        """One chunk alone in a step."""
        body = max(self.base + tokens * self.token, self.floor) + self.overhead
        return body + self.attention * (2 * tokens * past + tokens * tokens) // 2

    def decode_ps(self, batch: int, context_sum: int) -> int:
        """One token for each of `batch` requests."""
        index = min(batch, BATCH_MAX)
        return self.batch[index] + self.context[index] * context_sum + self.overhead

    def scaled(self, *, prefill: float = 1.0, decode: float = 1.0) -> StepCost:
        """Steps take this many times as long; the host's overhead stays."""
        return StepCost(
            base=exact(self.base * prefill),
            token=exact(self.token * prefill),
            attention=exact(self.attention * prefill),
            floor=exact(self.floor * decode),
            batch=tuple(exact(value * decode) for value in self.batch),
            context=tuple(exact(value * decode) for value in self.context),
            overhead=self.overhead,
        )


def exact(value_ps: float) -> int:
    """A coefficient: the nearest multiple of four picoseconds, at least four."""
    return max(4, 4 * round(value_ps / 4))


@functools.cache
def step_cost(model: ModelShape, gpu: Gpu, tp: int) -> StepCost:
    """The cost of `model` on `tp` GPUs of one kind."""
    if tp < 1:
        raise ValueError(f"tensor parallelism must be above 0, not {tp}")
    profile = _reference(model, gpu, tp)
    cost = _fitted(profile)
    reference, known = MODELS[profile.model], GPUS[profile.gpu]
    per_gpu = profile.tp / tp
    compute = known.tflops / gpu.tflops * per_gpu
    memory = known.bandwidth_tb_s / gpu.bandwidth_tb_s * per_gpu
    gemm = compute * model.gemm_flop_per_token / reference.gemm_flop_per_token
    attention = compute * model.attention_flop / reference.attention_flop
    weights = memory * model.weight_bytes / reference.weight_bytes
    kv = memory * model.kv_bytes_per_token / reference.kv_bytes_per_token
    communication = _all_reduce_ps(model, gpu, tp) - _all_reduce_ps(reference, known, profile.tp) * gemm
    return StepCost(
        base=exact(cost.base * model.layers / reference.layers),
        token=exact(cost.token * gemm + communication),
        attention=exact(cost.attention * attention),
        floor=exact(cost.floor * weights),
        batch=tuple(exact(value * weights) for value in cost.batch),
        context=tuple(exact(value * kv) for value in cost.context),
    )


def _all_reduce_ps(model: ModelShape, gpu: Gpu, tp: int) -> float:
    """Per token: two ring all-reduces a layer (bytes over links; latency is in the tables)."""
    size = 2 * model.layers * model.hidden * 2 * 2 * (tp - 1) / tp
    return size / (gpu.nvlink_gb_s * 1e9) * 1e12


def _reference(model: ModelShape, gpu: Gpu, tp: int) -> Profile:
    """The table that is nearest: the model's own, else the same GPU, else the next of kin."""
    kin = {"H800": "H100", "H20": "H200"}.get(gpu.name, gpu.name)
    kin = kin if any(profile.gpu == kin for profile in PROFILES) else "H100"

    def distance(profile: Profile) -> tuple[bool, bool, bool]:
        return (profile.gpu != kin, (profile.tp == 1) != (tp == 1), profile.model != model.name)

    return min((profile for profile in PROFILES), key=distance)


@functools.cache
def _fitted_by_name(model: str, gpu: str, tp: int) -> StepCost:
    profile = next(each for each in PROFILES if each[:3] == (model, gpu, tp))
    shape, known = MODELS[model], GPUS[gpu]
    base, token, attention = _fit_prefill(profile)
    kv_ps = shape.kv_bytes_per_token / (MEMORY_EFFICIENCY * known.bandwidth_tb_s * tp)
    knots = _fit_decode(profile, kv_ps, shape.weight_bytes / (MEMORY_EFFICIENCY * known.bandwidth_tb_s * tp))
    batches = np.arange(BATCH_MAX + 1)
    slope = (knots[-1][0] - knots[-2][0]) / (BATCHES[-1] - BATCHES[-2])
    beyond = np.maximum(0, batches - BATCHES[-1]) * slope
    batch = np.maximum.accumulate(np.interp(batches, BATCHES, [each[0] for each in knots]) + beyond)
    context = np.interp(batches, BATCHES, [each[1] for each in knots])
    return StepCost(
        base=base,
        token=token,
        attention=attention,
        floor=round(float(batch[1])),
        batch=tuple(round(float(value)) for value in batch),
        context=tuple(max(1, round(float(value))) for value in context),
    )


def _fitted(profile: Profile) -> StepCost:
    return _fitted_by_name(profile.model, profile.gpu, profile.tp)


def _fit_prefill(profile: Profile) -> tuple[int, int, int]:
    lengths = np.array(PREFILL_TOKENS, dtype=float)
    times = np.array(profile.prefill_ms) * PS_PER_MS
    columns = np.stack([np.ones_like(lengths), lengths, lengths**2 / 2], axis=1)
    base, token, attention = np.linalg.lstsq(columns / times[:, None], np.ones_like(times), rcond=None)[0]
    return max(0, round(float(base))), round(float(token)), round(float(attention))


def _fit_decode(profile: Profile, kv_ps: float, weights_ps: float) -> list[tuple[float, float]]:
    """(time without context, time per token of context) at each of BATCHES."""
    if not profile.decode_ms:
        return [(weights_ps * (1 + batch / 128), kv_ps) for batch in BATCHES]
    knots = []
    for index, batch in enumerate(BATCHES):
        contexts = np.array(list(profile.decode_ms), dtype=float)
        times = np.array([row[index] for row in profile.decode_ms.values()]) * PS_PER_MS
        if len(contexts) == 1:
            knots.append((float(times[0] - kv_ps * batch * contexts[0]), kv_ps))
            continue
        columns = np.stack([np.ones_like(contexts), batch * contexts], axis=1)
        alone, context = np.linalg.lstsq(columns / times[:, None], np.ones_like(times), rcond=None)[0]
        knots.append((float(alone), float(context)))
    return knots
