"""Whole clusters: determinism, exactness, conservation, and what the systems must show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from rose_sim.gated import Gated
from rose_sim.job import SyncJob
from rose_sim.loop import PS_PER_S
from rose_sim.sweep import alter
from rose_sim.systems import SYSTEMS
from rose_sim.world import World, simulate
from sim_world import plain, small


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(system: str) -> None:
    base = msgspec.structs.replace(small(), duration_s=400.0)
    first = plain(simulate(base, system))
    assert first == plain(simulate(base, system))
    assert first != plain(simulate(msgspec.structs.replace(base, seed=2), system))


@pytest.mark.parametrize("system", SYSTEMS)
def test_aggregated_steps_change_no_result(system: str) -> None:
    base = small(rl__steps="1", trajectories__turns_max="5")
    if not SYSTEMS[system].trains:
        base = msgspec.structs.replace(base, duration_s=300.0)
    fast, slow = simulate(base, system), simulate(base, system, slow=True)
    assert slow.events > 2 * fast.events
    assert plain(msgspec.structs.replace(slow, events=fast.events)) == plain(fast)


@pytest.mark.parametrize("rate_rps", ["0.5", "3.0", "8.0"])
def test_aggregated_steps_change_no_result_of_slack_admission(rate_rps: str) -> None:
    base = small(
        rl__steps="1", trajectories__turns_max="5", rollout__gate_mode="slack", serving__rate_rps=rate_rps
    )
    fast, slow = simulate(base, "rose"), simulate(base, "rose", slow=True)
    assert slow.events > 2 * fast.events
    assert fast.gate_open_share > 0
    assert plain(msgspec.structs.replace(slow, events=fast.events)) == plain(fast)


@pytest.mark.parametrize("gate_mode", ["strict", "slack"])
@pytest.mark.parametrize("seed", range(3))
def test_aggregated_steps_change_no_result_where_things_go_wrong(seed: int, gate_mode: str) -> None:
    faults = {
        "faults__crashes_per_hour": "40.0", "faults__restart_s": "15.0", "faults__partition_s": "40.0",
        "faults__partitions_per_hour": "60.0", "faults__reclaims_per_hour": "60.0",
    }  # fmt: skip
    settings = faults | {"trajectories__turns_max": "5", "rollout__gate_mode": gate_mode}
    base = msgspec.structs.replace(small(**settings), seed=seed)
    fast, slow = simulate(base, "rose"), simulate(base, "rose", slow=True)
    assert sum(fast.faults.values()) > 0
    assert plain(msgspec.structs.replace(slow, events=fast.events)) == plain(fast)


@pytest.mark.parametrize("system", [name for name, system in SYSTEMS.items() if system.trains])
def test_every_trajectory_ends_and_every_token_is_made_once(system: str) -> None:
    base = small()
    world = World(base, system)
    outcome = world.run()
    counts = outcome.turns
    assert outcome.steps
    assert counts["arrived"] == outcome.turns_sent
    assert counts["failed"] == counts["cancelled"] == 0
    assert counts["finished"] + counts["queued"] + counts["in_flight"] == counts["arrived"]
    if isinstance(world.job, SyncJob):
        assert [record.trajectories for record in outcome.steps] == [32, 32]
        tokens = sum(record.tokens for record in outcome.steps)
        assert outcome.rollout_tokens >= tokens
        if not counts["interrupted"]:
            assert outcome.rollout_tokens == tokens
    for replica in [*world.dedicated, *world.elastic]:
        kv = replica.engine.kv
        assert 0 <= kv.running <= kv.capacity
        assert kv.kept >= 0


def test_dapo_stops_when_enough_groups_are_useful() -> None:
    outcome = simulate(small(rl__algorithm="dapo", rl__first_step="3"), "rose")
    for record in outcome.steps:
        assert 32 <= record.trajectories <= record.launched
    assert outcome.turns["cancelled"] > 0
    assert outcome.turns["in_flight"] == 0


def test_async_rollout_overlaps_training() -> None:
    base = small(rl__steps="4", rl__train_s="30.0")
    assert simulate(base, "areal").throughput > simulate(base, "roll").throughput


def test_over_stale_trajectories_begin_again_and_are_counted() -> None:
    """The scheduler's own bound: with long episodes beside short training some lie too far back."""
    base = small(
        rl__steps="8", rl__train_s="1.0", trajectories__turns_max="40", trajectories__turns_sigma="1.2"
    )
    kept = simulate(base, "areal")
    bound = alter(base, "rl.abort_stale", "true")
    strict = simulate(bound, "areal")
    loose = simulate(alter(bound, "rl.staleness", "6"), "areal")
    assert kept.trajectories_stale == 0
    assert strict.trajectories_stale > loose.trajectories_stale
    for outcome in (strict, loose):
        assert outcome.turns["failed"] == outcome.trajectories_stale
        assert len(outcome.steps) == 8
    assert strict.throughput < kept.throughput
    assert simulate(bound, "roll").trajectories_stale == 0


def test_borrowed_gpus_help_and_the_gate_keeps_the_slo() -> None:
    base = small(rl__group_size="48", serving__rate_rps="0.5")
    rose, fixed = simulate(base, "rose"), simulate(base, "roll")
    assert rose.borrowed_tokens > 0
    assert rose.rollout_s < fixed.rollout_s
    assert rose.slo_ok
    assert 0.3 < rose.gate_open_share < 1


def test_the_gate_is_shut_while_serving_works() -> None:
    """The rollout engine starts no step while the serving engine of its device has a request."""
    world = World(small(serving__rate_rps="4.0"), "rose")
    device = world.devices[0]
    assert isinstance(device, Gated)
    seen = []

    def look(_now: int, _: object) -> None:
        rollout = device.rollout
        assert rollout is not None
        if device.serving.load:
            seen.append(rollout.allowed)
        world.loop.after(PS_PER_S // 50, look)

    world.loop.after(0, look)
    world.run()
    assert len(seen) > 100
    assert set(seen) == {0}


def test_serving_memory_pressure_cuts_the_rollout_budget_once_and_loses_no_turn() -> None:
    base = alter(
        small(rl__group_size="32", trajectories__response_median="900.0"), "rollout.headroom_share", "0.45"
    )
    world = World(base, "rose")
    outcome = world.run()
    assert outcome.kv_cuts > 0
    assert outcome.turns["finished"] == outcome.turns["arrived"]


def test_slack_admission_runs_rollout_beside_decodes_within_the_slo() -> None:
    strict = simulate(small(serving__rate_rps="3.0"), "rose")
    slack = simulate(small(serving__rate_rps="3.0", rollout__gate_mode="slack"), "rose")
    assert slack.gate_open_share > strict.gate_open_share
    assert slack.slo_ok
    assert slack.tpot_ms.p99 > strict.tpot_ms.p99


def test_spot_removals_and_function_limits_lose_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose_sim.systems.elastic.REMOVALS_PER_HOUR", 400.0)
    monkeypatch.setattr("rose_sim.systems.elastic.LambdaRl.limit_s", 20.0)
    for system in ("rlboost+", "lambda-rl"):
        outcome = simulate(small(rl__group_size="32", trajectories__response_median="600.0"), system)
        assert outcome.turns["interrupted"] > 0
        assert outcome.turns["finished"] == outcome.turns["arrived"]


def test_mean_over_seeds_is_monotone_in_load_and_memory() -> None:
    base = small(
        serving__gpus="2", serving__period_s="300.0", serving__rate_rps="0.5", rollout__dedicated_gpus="1",
        rollout__borrowed_gpus_max="2", rollout__trajectories_per_gpu_max="4", rl__groups="2", rl__steps="1",
        trajectories__turns_max="3", trajectories__response_sigma="0.3",
    )  # fmt: skip

    def times(name: str, values: Sequence[str]) -> list[NDArray[np.float64]]:
        """Rollout times of the same 30 seeds, for each value."""
        found = []
        for value in values:
            changed = alter(base, name, value)
            runs = [simulate(msgspec.structs.replace(changed, seed=seed), "rose") for seed in range(30)]
            found.append(np.array([run.rollout_s for run in runs]))
        return found

    def rises(found: Sequence[NDArray[np.float64]]) -> None:
        """Never falls from one value to the next by more than chance would have it, and rises over all."""
        for before, after in pairwise(found):
            change = after - before  # of the same seed each
            assert change.mean() > -2 * change.std(ddof=1) / math.sqrt(len(change)), found
        assert found[-1].mean() > found[0].mean()

    rises(times("serving.rate_rps", ("0.1", "0.5", "1.0", "2.0", "3.0")))
    rises(times("rollout.borrowed_gpus_max", ("2", "1", "0")))
    rises(times("rollout.trajectories_per_gpu_max", ("16", "8", "4", "2", "1")))
