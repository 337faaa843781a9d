"""The rollout engine's scheduler on a real engine: gate, caps, KV budget, prefix keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rose.core.readings import LimitStatus

pytestmark = pytest.mark.engine

SCENARIO = Path(__file__).parent / "scenarios" / "rollout_engine.py"
Facts = dict[str, Any]


@pytest.fixture(scope="module", params=["sync", "async"])
def facts(
    request: pytest.FixtureRequest, demo_models: Any, tmp_path_factory: pytest.TempPathFactory
) -> Facts:
    """What one run of the scenario (about 20 s) found."""
    run_dir = tmp_path_factory.mktemp("run")
    command = [sys.executable, str(SCENARIO), str(demo_models.rollout), str(run_dir), request.param]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ROSE_")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    facts: Facts = json.loads(found[0].removeprefix("FACTS "))
    expected = "RolloutScheduler" if request.param == "sync" else "RolloutAsyncScheduler"
    assert facts["scheduler"] == expected
    assert facts["batch_queue"] == (1 if request.param == "sync" else 2)
    return facts


def test_outputs_vary_enough_to_compare(facts: Facts) -> None:
    assert min(facts["distinct"]) >= 20


def test_a_cap_below_the_batch_leaves_tokens_identical(facts: Facts) -> None:
    assert facts["cap_identical"]


def test_a_flapping_gate_leaves_tokens_identical(facts: Facts) -> None:
    assert facts["flap_identical"]
    assert facts["flap"]["transitions"] >= 10
    assert facts["flap"]["closed_ns"] > 0


def test_a_closed_gate_schedules_nothing_and_loses_nothing(facts: Facts) -> None:
    assert facts["closed_scheduled_tokens"] == 0
    assert facts["closed_then_open_identical"]


def test_a_cut_ends_no_more_requests_than_it_must_with_what_they_have(facts: Facts) -> None:
    ended = [outcome for outcome in facts["cut_outcome"] if outcome["finish"] == "abort"]
    assert len(ended) == 3
    assert {outcome["stop"] for outcome in ended} == {"rose:kv_budget_cut"}
    assert all(0 < outcome["count"] < 148 and outcome["prefix_of_reference"] for outcome in ended)
    assert facts["cut_aborted"] == len(ended)


def test_a_cut_spares_the_others(facts: Facts) -> None:
    spared = [outcome for outcome in facts["cut_outcome"] if outcome["finish"] != "abort"]
    assert len(spared) == 5
    assert all(outcome["count"] == 148 and outcome["prefix_of_reference"] for outcome in spared)


def test_a_cut_is_answered_and_no_more_blocks_are_held(facts: Facts) -> None:
    cut = facts["cut"]
    assert 0 < cut["held_after"] <= cut["blocks"]
    assert cut["reported_revision"] == cut["revision"]
    assert cut["reported_budget"] == cut["blocks"]
    assert cut["limit_status"] == LimitStatus.APPLIED
    assert facts["used_after_cut"] == 0


def test_the_memory_of_parked_blocks_is_given_back(facts: Facts) -> None:
    cut = facts["cut"]
    block_bytes = 5 * 2 * 3 * 32 * 32 * 2  # layers, K and V, KV heads, their size, tokens, bfloat16
    assert cut["resident_before"] > cut["in_use_bytes"] >= cut["resident_after"] > 0
    assert cut["in_use_bytes"] <= (cut["blocks"] + 2) * block_bytes


def test_parked_blocks_neither_fail_a_cache_reset_nor_come_back_by_it(facts: Facts) -> None:
    assert facts["reset_while_parked"]
    assert facts["free_after_reset"]


def test_what_the_budget_can_never_hold_is_ended_not_preempted_for_ever(facts: Facts) -> None:
    assert facts["over_budget"] == {"finish": "abort", "stop": "rose:over_budget", "count": 0}
    outgrown = facts["outgrown"]
    assert (outgrown["finish"], outgrown["stop"]) == ("abort", "rose:over_budget")
    assert 4 * 32 - 60 <= outgrown["count"] + 1 <= 4 * 32 - 60 + 2  # as many tokens as four blocks hold
    assert facts["rejected"] == 2


def test_regrowing_gives_every_block_back(facts: Facts) -> None:
    assert facts["regrow_identical"]
    assert facts["free_after_regrow"]


def test_a_budget_is_applied_without_any_request(facts: Facts) -> None:
    assert facts["idle_budget"] == 40


def test_contradictory_policies_are_refused_and_said_so(facts: Facts) -> None:
    assert facts["conflict"] == LimitStatus.CONFLICT
    assert facts["stale"] == LimitStatus.STALE
    assert facts["accepted_again"] == LimitStatus.APPLIED


def test_kv_of_another_weight_version_is_never_matched(facts: Facts) -> None:
    assert facts["cached_same_version"] >= 160
    assert facts["cached_new_version"] == 0
    assert facts["cached_after_rollback"] == facts["cached_same_version"]
    assert facts["cached_from_mixed"] == 0


def test_what_the_plugin_costs_a_step_is_reported(facts: Facts) -> None:
    assert 0 < facts["overhead_us"]["p50"] <= facts["overhead_us"]["p99"]
