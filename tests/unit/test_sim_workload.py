"""Scenarios, episodes, transfers and the KV ledger."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rose_sim.episodes import demand, density, draw, shape
from rose_sim.hardware import MODELS
from rose_sim.kv import KvLedger, blocks_up
from rose_sim.reproduce import scenario
from rose_sim.scenario import read
from rose_sim.sweep import alter
from rose_sim.transfer import dense_relay_s, sparse_bytes, sparse_relay_s

from rose.errors import ConfigError

SMALL = scenario("8b")
BIG = scenario("32b")


def test_episodes_come_from_the_seed_and_the_step_alone() -> None:
    def turns(seed: int, step: int) -> list[object]:
        batch = draw(msgspec.structs.replace(SMALL, seed=seed), step)
        return [episode.turns for group in batch.groups for episode in group]

    assert turns(1, 5) == turns(1, 5)
    assert turns(1, 5) != turns(1, 6)
    assert turns(1, 5) != turns(2, 5)


@pytest.mark.parametrize("base", [SMALL, BIG], ids=lambda base: base.name)
def test_episodes_keep_to_the_context_window(base) -> None:
    batch = draw(base, 7)
    assert len(batch.groups) == base.rl.groups
    for group in batch.groups:
        assert len(group) == base.rl.group_size
        for episode in group:
            context = episode.prompt
            for plan in episode.turns:
                assert plan.output >= 1
                assert context + plan.output < base.rollout.context_tokens_max
                context += plan.output + plan.observation
    assert shape(batch).context_max < base.rollout.context_tokens_max


def test_dapo_demands_up_to_its_maximum_and_marks_just_enough_groups() -> None:
    rl = msgspec.structs.replace(SMALL.rl, algorithm="dapo")
    demands = [demand(rl, step) for step in range(1, 51)]
    assert min(demands) < 1.1
    assert max(demands) == pytest.approx(rl.demand_max, rel=0.1)
    batch = draw(msgspec.structs.replace(SMALL, rl=rl), 3)
    assert sum(batch.useful) == batch.needed == rl.groups
    assert len(batch.groups) == len(batch.useful) > rl.groups


def test_early_steps_change_more_weights_and_no_delta_outgrows_the_model() -> None:
    shares = [density(BIG, step) for step in range(60)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.3
    assert 0.03 < shares[-1] < 0.04
    model = MODELS[BIG.rollout.model]
    assert sparse_bytes(model, BIG, 0) == model.weight_bytes
    assert sparse_bytes(model, BIG, 50) < model.weight_bytes / 8


@pytest.mark.parametrize(("name", "seconds"), [("Qwen3-8B", 38.6), ("Qwen3-14B", 84.1), ("Qwen3-32B", 157.0)])
def test_the_dense_relay_takes_what_rollart_measured(name: str, seconds: float) -> None:
    assert dense_relay_s(MODELS[name], BIG.network) == pytest.approx(seconds, rel=0.2)


def test_a_thin_wire_is_the_limit_where_end_hosts_are_faster() -> None:
    model = MODELS["Qwen3-32B"]
    slow = alter(BIG, "network.gbps", "1")
    assert dense_relay_s(model, slow.network) > 5 * dense_relay_s(model, BIG.network)
    assert sparse_relay_s(model, slow, 50) > sparse_relay_s(model, BIG, 50)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "missing required"),
        ("name = 1", "Expected `str`"),
        ("x = [", "not TOML"),
        ("unknown = 1\n", "unknown"),
    ],
)
def test_a_bad_scenario_says_what_is_wrong(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("serving.gpus", "-1"), ("rl.groups", "0"), ("rollout.headroom_share", "1.5"), ("serving.tp", "4"),
     ("network.density", "0.0"), ("rl.train_s", "-1.0"), ("schema", "2"), ("serving.rate_rps", "0.0")],
)  # fmt: skip
def test_values_out_of_range_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError):
        alter(SMALL, name, value)


def test_altering_what_is_not_there_is_refused() -> None:
    assert alter(SMALL, "serving.rate_rps", "3.5").serving.rate_rps == 3.5
    for name in ("serving.nothing", "nothing.gpus", "name.x"):
        with pytest.raises(ConfigError, match="no setting"):
            alter(SMALL, name, "1")
    with pytest.raises(ConfigError, match="Expected"):
        alter(SMALL, "serving.rate_rps", "fast")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), capacity=st.integers(64, 5000))
def test_the_kv_ledger_never_holds_more_than_there_is(seed: int, capacity: int) -> None:
    rng = np.random.default_rng(seed)
    ledger = KvLedger(capacity, keep_prefixes=True)
    running: list[tuple[int, int]] = []
    for _ in range(200):
        if running and rng.random() < 0.5:
            key, tokens = running.pop(int(rng.integers(len(running))))
            ledger.release(key, tokens, int(rng.integers(0, tokens + 1)))
        else:
            key, tokens = int(rng.integers(0, 12)), int(rng.integers(1, 2000))
            kept = ledger.prefix(key)
            hit = ledger.admit(key, tokens)
            if hit is not None:
                assert hit == kept
                running.append((key, tokens))
            else:
                assert ledger.running + blocks_up(tokens) > capacity
        assert ledger.running == sum(blocks_up(tokens) for _, tokens in running)
        assert ledger.kept >= 0
        assert ledger.used <= capacity
    ledger.clear()
    assert ledger.kept == 0
