"""Experiments: disaggregated serving, pools of two kinds of GPU, faults by seed, budgets."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray
from rose_sim.reproduce import SCENARIOS
from rose_sim.scenario import read
from rose_sim.sweep import alter
from rose_sim.world import World, simulate
from sim_world import plain, small


def test_a_larger_budget_never_costs_rollout_in_the_mean_over_seeds() -> None:
    """Slack mode beside busy serving: budgets, and the token cap, let more rollout through."""
    base = small(
        serving__gpus="2", serving__period_s="300.0", serving__rate_rps="4.0", rollout__dedicated_gpus="1",
        rollout__borrowed_gpus_max="2", rollout__trajectories_per_gpu_max="4", rollout__gate_mode="slack",
        rl__groups="1", rl__steps="1", trajectories__turns_max="2", trajectories__response_sigma="0.3",
    )  # fmt: skip

    def shares(ttft_ms: int, tpot_ms: int) -> NDArray[np.float64]:
        changed = alter(alter(base, "serving.ttft_ms", f"{ttft_ms}.0"), "serving.tpot_ms", f"{tpot_ms}.0")
        changed = msgspec.structs.replace(changed, duration_s=30.0)
        runs = [simulate(msgspec.structs.replace(changed, seed=seed), "rose") for seed in range(30)]
        return np.array([run.gate_open_share for run in runs])

    found = [shares(*budgets) for budgets in ((100, 12), (150, 15), (200, 25), (300, 60), (500, 150))]
    for tighter, wider in pairwise(found):
        change = wider - tighter  # of the same seed each
        assert change.mean() > -2 * change.std(ddof=1) / math.sqrt(len(change)), found
    assert found[-1].mean() > found[0].mean()


def test_disaggregated_serving_hands_over_and_keeps_every_request() -> None:
    base = small(serving__prefill_gpus="1", serving__rate_rps="2.0", rollout__gate_mode="slack")
    world = World(base, "rose")
    outcome = world.run()
    assert world.load is not None
    assert outcome.requests > 50
    assert outcome.turns["finished"] == outcome.turns["arrived"]
    prefill, decoders = world.devices[0].serving.work(), [each.serving.work() for each in world.devices[1:]]
    assert prefill.prefill_tokens > 10 * sum(work.prefill_tokens for work in decoders)
    assert sum(work.decode_tokens for work in decoders) > 10 * prefill.decode_tokens
    together = simulate(alter(base, "serving.prefill_gpus", "0"), "rose")
    assert abs(outcome.requests - together.requests) <= 0.2 * together.requests


def test_single_steps_agree_on_disaggregated_serving() -> None:
    base = small(serving__prefill_gpus="1", rl__steps="1", trajectories__turns_max="5")
    fast, slow = simulate(base, "rose"), simulate(base, "rose", slow=True)
    assert plain(msgspec.structs.replace(slow, events=fast.events)) == plain(fast)


def test_hardware_affinity_sends_tasks_where_they_suit() -> None:
    base = read(SCENARIOS / "rollart.toml")
    base = alter(alter(base, "rl.groups", "16"), "rl.steps", "3")
    shares = {}
    for system in ("rollart", "rollart-flat"):
        world = World(base, system)
        world.run()
        rich = [each for each in world.dedicated if each.hardware == "compute"]
        prefilled = [
            sum(each.engine.work().prefill_tokens for each in pool) for pool in (rich, world.dedicated)
        ]
        shares[system] = prefilled[0] / prefilled[1]
        assert len(rich) == 8
        assert len(world.dedicated) == 20
    assert shares["rollart"] > shares["rollart-flat"]


FAULTS = {
    "faults.swarm": "true", "faults.crashes_per_hour": "40.0", "faults.restart_s": "15.0",
    "faults.partitions_per_hour": "60.0", "faults.partition_s": "40.0", "faults.reclaims_per_hour": "60.0",
}  # fmt: skip


def test_a_swarm_of_faults_loses_no_turn_and_ends_every_step() -> None:
    seen = dict.fromkeys(("crashes", "partitions", "reclaims"), 0)
    left_out = 0
    for seed in range(8):
        base = small(rl__group_size="16", trajectories__response_median="300.0")
        for name, value in FAULTS.items():
            base = alter(base, name, value)
        outcome = simulate(msgspec.structs.replace(base, seed=seed), "rose")
        assert [record.trajectories for record in outcome.steps] == [64, 64]
        assert outcome.turns["finished"] == outcome.turns["arrived"]
        assert outcome.turns["failed"] == 0
        left_out += 0 in outcome.faults.values()
        for name, count in outcome.faults.items():
            seen[name] += count
    assert all(seen.values()), seen
    assert left_out  # some seeds go without some kinds


def test_the_same_seed_brings_the_same_faults() -> None:
    base = small()
    for name, value in FAULTS.items():
        base = alter(base, name, value)
    assert plain(simulate(base, "rose")) == plain(simulate(base, "rose"))
