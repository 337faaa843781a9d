"""RL episodes: multi-turn trajectories with long tails, drawn from a step's own stream of random numbers.

Every system that is compared on a scenario plays the same episodes.
"""

from __future__ import annotations

from math import ceil, exp, floor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rose_sim.loop import PS_PER_S, stream
from rose_sim.scenario import Rl, Scenario, Trajectories

FIRST, SECOND = "first", "second"
"""Names of the two tasks that a scenario may have."""


class TurnPlan(NamedTuple):
    """One LLM call and what comes after it."""

    output: int
    observation: int
    """Tokens the environment adds to the context."""
    env_ps: int
    """Time the environment takes."""


class Episode:
    """One trajectory to play; its turns, and how far it has come."""

    __slots__ = (
        "context",
        "finished_ps",
        "group",
        "id",
        "next_turn",
        "prompt",
        "reset_ps",
        "started_ps",
        "task",
        "turns",
    )

    def __init__(
        self, name: str, group: int, prompt: int, reset_ps: int, turns: list[TurnPlan], task: str = FIRST
    ) -> None:
        self.id = name
        self.group = group
        self.prompt = prompt
        self.reset_ps = reset_ps
        self.turns = turns
        self.task = task
        self.context = prompt
        self.next_turn = 0
        self.started_ps = -1
        self.finished_ps = -1


class Batch(NamedTuple):
    """The episodes of one RL step, by group."""

    groups: list[list[Episode]]
    useful: list[bool]
    """Whether the group counts for training (DAPO drops groups whose rewards do not differ)."""
    needed: int
    """Useful groups that end the step."""


def demand(rl: Rl, step: int) -> float:
    """Trajectories generated in a step, over the batch.

    GRPO: 1.  DAPO: from 1 to `demand_max`, as more or fewer groups have rewards that differ; spread over the
    steps by the radical inverse of the step's number, squared (ours: only the maximum is published).
    """
    if rl.algorithm == "grpo":
        return 1.0
    share, value, number = 0.5, 0.0, step
    while number:
        value += share * (number & 1)
        share, number = share / 2, number >> 1
    return 1.0 + (rl.demand_max - 1.0) * value * value


def draw(scenario: Scenario, step: int) -> Batch:
    """The episodes of one step."""
    rl = scenario.rl
    rng = stream(scenario.seed, "episodes", step)
    count = ceil(rl.groups * demand(rl, step))
    useful = [True] * count
    if count > rl.groups:
        useful = [False] * count
        for index in rng.permutation(count)[: rl.groups].tolist():
            useful[index] = True
    size = rl.group_size
    episodes = _episodes(scenario, scenario.trajectories, FIRST, step, count * size, rng)
    groups = [episodes[index * size : (index + 1) * size] for index in range(count)]
    if scenario.second_task is not None:
        own = stream(scenario.seed, "episodes", SECOND, step)
        others = _episodes(scenario, scenario.second_task, SECOND, step, count * size, own)
        for index in range(count):  # spread evenly over the batch
            if floor((index + 1) * rl.second_share) > floor(index * rl.second_share):
                groups[index] = others[index * size : (index + 1) * size]
    for number, group in enumerate(groups):
        for episode in group:
            episode.group = number
    return Batch(groups, useful, rl.groups)


def _episodes(
    scenario: Scenario, shape: Trajectories, task: str, step: int, count: int, rng: np.random.Generator
) -> list[Episode]:
    turns = np.clip(
        np.rint(_lognormal(rng, shape.turns_median, shape.turns_sigma, count)), 1, shape.turns_max
    )
    lengths = turns.astype(np.int64)
    total = int(lengths.sum())
    talk = np.repeat(_lognormal(rng, shape.response_median, shape.response_sigma, count), lengths)
    outputs = np.clip(np.rint(talk * _lognormal(rng, 1.0, shape.turn_sigma, total)), 1, shape.response_max)
    seen = np.maximum(1, np.rint(_lognormal(rng, shape.observation_median, shape.observation_sigma, total)))
    env = np.rint(_lognormal(rng, shape.env_s_median, shape.env_sigma, total) * 1e6)
    reset = np.rint(_lognormal(rng, shape.reset_s, shape.env_sigma, count) * 1e6)
    plans = zip(
        outputs.astype(int).tolist(), seen.astype(int).tolist(), env.astype(int).tolist(), strict=True
    )
    found = []
    for number, (length, reset_us) in enumerate(
        zip(lengths.tolist(), reset.astype(int).tolist(), strict=True)
    ):
        own = [next(plans) for _ in range(length)]
        fitted = _fitted(own, shape, scenario.rollout.context_tokens_max)
        name = f"s{step}-{number}" if task == FIRST else f"s{step}-{task}-{number}"
        found.append(Episode(name, 0, shape.prompt_tokens, reset_us * (PS_PER_S // 1_000_000), fitted, task))
    return found


def _fitted(plans: list[tuple[int, int, int]], shape: Trajectories, context_max: int) -> list[TurnPlan]:
    """The turns up to the end of the context window."""
    context = shape.prompt_tokens
    found = []
    for output, observation, env_us in plans:
        room = context_max - context
        if room < 2:
            break
        found.append(TurnPlan(min(output, room - 1), observation, env_us * (PS_PER_S // 1_000_000)))
        context += output + observation
    return found


def _lognormal(rng: np.random.Generator, median: float, sigma: float, count: int) -> NDArray[np.float64]:
    return median * np.exp(sigma * rng.standard_normal(count))


class Shape(NamedTuple):
    """What a workload looks like, whatever runs it."""

    turns_mean: float
    output_tokens_mean: float
    prefill_share: float
    """Tokens that are prefilled once (prompts and observations), over all tokens."""
    sent_share: float
    """Prompt tokens as sent with every turn, prefixes again and again, over all tokens so counted."""
    context_max: int


def shape(batch: Batch) -> Shape:
    """Statistics of a batch."""
    turns = outputs = prompts = fresh = episodes = longest = 0
    for group in batch.groups:
        for episode in group:
            context = episode.prompt
            episodes += 1
            fresh += episode.prompt
            for plan in episode.turns:
                turns += 1
                prompts += context
                outputs += plan.output
                context += plan.output
                longest = max(longest, context)
                context += plan.observation
                fresh += plan.observation
    return Shape(
        turns / episodes,
        outputs / episodes,
        fresh / (fresh + outputs),
        prompts / (prompts + outputs),
        longest,
    )


def density(scenario: Scenario, step: int) -> float:
    """Share of the weights that a step changes: the first ones change many more."""
    network = scenario.network
    early = (network.dense_density - network.density) * exp(-step / network.dense_steps)
    return min(1.0, network.density + max(0.0, early))
