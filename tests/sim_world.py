"""A small cluster for tests of the simulator."""

from __future__ import annotations

import msgspec
from rose_sim.reproduce import scenario
from rose_sim.results import Outcome
from rose_sim.scenario import Scenario
from rose_sim.sweep import alter


def small(**changes: str) -> Scenario:
    """Four borrowed and two dedicated GPUs, 32 short episodes a step."""
    settings = {
        "serving.gpus": "4", "serving.rate_rps": "1.0", "serving.period_s": "3600.0",
        "rollout.dedicated_gpus": "2",
        "rollout.borrowed_gpus_max": "4", "rollout.trajectories_per_gpu_max": "8",
        "rollout.gate_mode": "strict",
        "rl.groups": "4", "rl.group_size": "8", "rl.steps": "2", "rl.train_s": "5.0",
        "trajectories.turns_median": "4.0", "trajectories.turns_max": "12",
        "trajectories.response_median": "120.0", "trajectories.env_s_median": "0.5",
    }  # fmt: skip
    found = scenario("8b")
    for name, value in (
        settings | {name.replace("__", "."): value for name, value in changes.items()}
    ).items():
        found = alter(found, name, value)
    return found


def plain(outcome: Outcome) -> bytes:
    return msgspec.json.encode(outcome)
