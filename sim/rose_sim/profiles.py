"""Profiles that the latency models of `rose.core` start from (paper: T-hat is profiled offline).

Engines calibrate the same models online; here they keep what was profiled, so that an answer of the gate does
not depend on how many steps were put into one event.
"""

from __future__ import annotations

from rose.core.admission import AdmissionGate
from rose.core.slo import SlackTracker
from rose_sim.costs import StepCost
from rose_sim.loop import PS_PER_NS

ROLLOUT_CONTEXT, ROLLOUT_BATCH = 8192, 8
"""A rollout step is profiled beside a half-full batch of agents in mid-trajectory."""
SERVING_CONTEXTS = (512, 1024, 2048, 4096)
"""Of serving requests; the spread of their decode times becomes the margin of the model."""
SERVING_BATCHES = (1, 2, 4, 8, 16, 32)
_REPEATS = 4


def profile_gate(gate: AdmissionGate, cost: StepCost, token_cap: int, beside_halves: int) -> None:
    """T_rollout of chunks up to the cap, alone and beside serving (`beside_halves` / 2 times as long)."""
    for tokens in _powers(token_cap):
        alone_ps = cost.prefill_ps(tokens, ROLLOUT_CONTEXT)
        alone_ps += cost.context[ROLLOUT_BATCH] * ROLLOUT_BATCH * ROLLOUT_CONTEXT
        for _ in range(_REPEATS):
            gate.observe_step(tokens, alone_ps // PS_PER_NS)
            gate.observe_step(tokens, alone_ps * beside_halves // (2 * PS_PER_NS), co_running=1)


def profile_serving(tracker: SlackTracker, cost: StepCost, step_tokens_max: int, beside_halves: int) -> None:
    """T_prefill of prompts that fit a step, T_decode over batches and contexts; alone and beside rollout."""
    steps = [
        (tokens, 0, cost.prefill_ps(tokens)) for tokens in _powers(step_tokens_max) for _ in range(_REPEATS)
    ]
    steps += [
        (0, batch, cost.decode_ps(batch, batch * context))
        for batch in SERVING_BATCHES
        for context in SERVING_CONTEXTS
    ]
    for tokens, batch, alone_ps in steps:
        tracker.observe_step(tokens, batch, alone_ps // PS_PER_NS)
        tracker.observe_step(tokens, batch, alone_ps * beside_halves // (2 * PS_PER_NS), co_running=1)


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, which is the last."""
    found = [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent < most]
    return [*found, most]
