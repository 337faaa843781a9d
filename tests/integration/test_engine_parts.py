"""Parts of the plugin on vLLM's own classes, without an engine: live weights, KV budget, version check."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from rose.engines.vllm.settings import PluginSettings
from rose.errors import RoseError
from rose.units import JobId, WeightVersion
from rose.weights.bits import Bits, as_bits
from rose.weights.container import write_version
from rose.weights.digests import digest_state
from rose.weights.encoding import encode_version

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine

State = dict[str, Bits]


def toy_model() -> Any:
    """A fused projection, a padded embedding, a plain norm: as vLLM holds them."""
    torch.manual_seed(0)

    class Toy(torch.nn.Module):  # type: ignore[misc, name-defined]
        packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

        def __init__(self) -> None:
            super().__init__()
            self.attn = torch.nn.Module()
            self.attn.qkv_proj = torch.nn.Linear(4, 16, bias=True, dtype=torch.bfloat16)
            self.attn.qkv_proj.output_partition_sizes = [8, 4, 4]
            self.embed = torch.nn.Embedding(10, 4, dtype=torch.bfloat16)
            self.embed.org_vocab_size = 7
            self.norm = torch.nn.LayerNorm(4, bias=False, dtype=torch.bfloat16)

    return Toy()


def live_of(model: Any) -> Any:
    from rose.engines.live import LiveWeights  # noqa: PLC0415 (imports torch)

    return LiveWeights(model)


def state_of(live: Any) -> State:
    return {name: Bits(p.dtype, p.shape, p.read().copy()) for name, p in live.parameters.items()}


def stepped(state: State) -> State:
    after = {}
    for name, bits in state.items():
        words = bits.words.copy()
        words[:: max(1, words.size // 3)] ^= 3
        after[name] = Bits(bits.dtype, bits.shape, words)
    return after


def write(path: Path, base: State | None, target: State, version: int = 1) -> Path:
    base_version = None if base is None else WeightVersion(version - 1)
    write_version(path, encode_version(JobId("j"), WeightVersion(version), base_version, base, target))
    return path


def test_parameters_have_the_names_and_shapes_of_the_checkpoint() -> None:
    model = toy_model()
    live = live_of(model)
    shapes = {name: parameter.shape for name, parameter in live.parameters.items()}
    assert shapes == {
        "attn.q_proj.weight": (8, 4),
        "attn.k_proj.weight": (4, 4),
        "attn.v_proj.weight": (4, 4),
        "attn.q_proj.bias": (8,),
        "attn.k_proj.bias": (4,),
        "attn.v_proj.bias": (4,),
        "embed.weight": (7, 4),
        "norm.weight": (4,),
    }
    expected = as_bits(model.attn.qkv_proj.weight.data[8:12]).words
    assert np.array_equal(live.parameters["attn.k_proj.weight"].read(), expected)


def test_a_delta_and_an_anchor_lead_to_the_same_bytes(tmp_path: Path) -> None:
    live, other = live_of(toy_model()), live_of(toy_model())
    before = state_of(live)
    target = stepped(before)
    live.apply(live.stage(write(tmp_path / "delta", before, target), 1, 0))
    other.apply(other.stage(write(tmp_path / "anchor", None, target), 1, 0))
    assert live.digests() == {"version": 1, "digests": digest_state(target)} == other.digests()
    back = write(tmp_path / "back", target, before, version=2)
    live.apply(live.stage(back, 2, 1))
    assert live.digests()["digests"] == digest_state(before)


def test_padding_rows_are_left_alone(tmp_path: Path) -> None:
    model = toy_model()
    live = live_of(model)
    padding = model.embed.weight.data[7:].clone()
    before = state_of(live)
    live.apply(live.stage(write(tmp_path / "v1", before, stepped(before)), 1, 0))
    assert torch.equal(model.embed.weight.data[7:], padding)


@pytest.mark.parametrize("fail_at", [0, 3, 7])
def test_a_write_that_fails_half_way_is_taken_back(tmp_path: Path, fail_at: int) -> None:
    from rose.engines.live import ApplyFailed  # noqa: PLC0415

    live = live_of(toy_model())
    before = state_of(live)
    staged = live.stage(write(tmp_path / "v1", before, stepped(before)), 1, 0)
    writes = list(staged.writes)
    spoiled = writes[fail_at]
    outside = torch.full_like(spoiled.indices, 1 << 30) if spoiled.indices is not None else None
    writes[fail_at] = spoiled._replace(
        indices=outside, words=spoiled.words[:-1] if outside is None else spoiled.words
    )
    with pytest.raises(ApplyFailed, match="taken back"):
        live.apply(staged._replace(writes=tuple(writes)))
    assert live.digests() == {"version": 0, "digests": digest_state(before)}
    live.apply(staged)
    assert live.version == 1


def test_bits_that_do_not_stay_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rose.engines import live as module  # noqa: PLC0415

    live = live_of(toy_model())
    before = state_of(live)
    staged = live.stage(write(tmp_path / "v1", before, stepped(before)), 1, 0)
    do, calls = module._Write.do, []

    def lossy(self: Any, words: Any) -> Any:
        calls.append(self)
        lost = len(calls) == 5
        before, same = do(self, words ^ 1 if lost else words)
        return before, same and not lost

    monkeypatch.setattr(module._Write, "do", lossy)
    with pytest.raises(module.ApplyFailed, match="reads back"):
        live.apply(staged)
    monkeypatch.undo()
    assert live.digests()["digests"] == digest_state(before)


def test_what_was_applied_can_be_taken_back_until_it_is_settled(tmp_path: Path) -> None:
    live = live_of(toy_model())
    before = state_of(live)
    target = stepped(before)
    live.apply(live.stage(write(tmp_path / "v1", before, target), 1, 0))
    assert live.undo_applied() == {"version_held": 0}
    assert live.digests() == {"version": 0, "digests": digest_state(before)}
    assert live.undo_applied() == {"version_held": 0}, "there is nothing more to take back"
    live.apply(live.stage(tmp_path / "v1", 1, 0))
    assert live.discard() == {"version_held": 1}
    assert live.undo_applied() == {"version_held": 1}, "it was settled"
    assert live.digests() == {"version": 1, "digests": digest_state(target)}


@pytest.mark.parametrize("when", ["in the middle", "afterwards"])
def test_an_undo_that_fails_is_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Nothing is held that could be named, and no later version may be put on top of it."""
    from rose.engines import live as module  # noqa: PLC0415

    live = live_of(toy_model())
    before = state_of(live)
    path = write(tmp_path / "v1", before, stepped(before))
    live.stage_in_background(str(path), 1, 0)
    while live.stage_state()["state"] == "staging":
        pass
    do, calls = module._Write.do, []

    def lossy(self: Any, words: Any) -> Any:
        calls.append(self)
        lost = len(calls) >= 5
        before, same = do(self, words ^ 1 if lost else words)
        return before, same and not lost

    if when == "in the middle":
        monkeypatch.setattr(module._Write, "do", lossy)
        outcome = live.apply_staged(1)
    else:
        assert live.apply_staged(1)["version"] == 1
        monkeypatch.setattr(module._Write, "do", lossy)
        outcome = live.undo_applied()
    assert outcome["error"] == "weights_mixed"
    assert "version_held" not in outcome
    monkeypatch.undo()
    live.stage_in_background(str(path), 1, live.version)
    while (state := live.stage_state())["state"] == "staging":
        pass
    assert (state["state"], state["error"]) == ("refused", "weights_mixed")


def test_staging_in_the_background_is_one_at_a_time(tmp_path: Path) -> None:
    live = live_of(toy_model())
    before = state_of(live)
    path = str(write(tmp_path / "v1", before, stepped(before)))
    assert live.stage_state() == {"state": "idle"}
    assert live.apply_staged(1) == {"error": "not_staged", "version_held": 0}
    assert live.stage_in_background(path, 1, 0) == {"state": "staging"}
    assert live.stage_in_background(path, 1, 0)["state"] == "busy"
    while (state := live.stage_state())["state"] == "staging":
        pass
    assert (state["state"], state["changed"]) == ("staged", live._staging.result().changed)
    assert live.apply_staged(2)["error"] == "not_staged"
    assert live.apply_staged(1)["version"] == 1
    assert live.stage_state() == {"state": "idle"}
    live.stage_in_background(path, 1, 0)
    assert live.discard() == {"version_held": 1}
    live.stage_in_background(str(tmp_path / "none"), 2, 1)
    while (state := live.stage_state())["state"] == "staging":
        pass
    assert (state["state"], state["error"], state["version_held"]) == ("refused", "corrupt_delta", 1)
    assert live.stage_in_background(path, 2, 1) == {"state": "staging"}  # the place is free again
    live.close()


def test_what_cannot_be_updated_is_refused_at_start() -> None:
    from rose.engines.live import LiveWeights  # noqa: PLC0415

    packed = toy_model()
    packed.norm.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    with pytest.raises(RoseError, match=r"norm\.weight"):
        LiveWeights(packed)


# ---- KV budget on vLLM's own block pool -----------------------------------------------------------


def budget_of(blocks: int, group_blocks: int = 1) -> tuple[Any, Any]:
    from vllm.v1.core.block_pool import BlockPool  # noqa: PLC0415

    from rose.engines.vllm.kv_budget import KvBudget  # noqa: PLC0415

    pool = BlockPool(blocks, enable_caching=True, hash_block_size=16)
    holders = SimpleNamespace(req_to_blocks={})
    coordinator = SimpleNamespace(single_type_managers=[holders])
    manager = SimpleNamespace(block_pool=pool, coordinator=coordinator)
    scheduler: Any = SimpleNamespace(kv_cache_manager=manager, block_size=16, requests={})
    return KvBudget(scheduler, group_blocks), pool


def held_by(budget: Any, **blocks: list[Any]) -> None:
    """These requests hold these blocks, and computed all their tokens."""
    budget._managers[0].req_to_blocks = blocks
    for name, held in blocks.items():
        budget._scheduler.requests[name] = SimpleNamespace(num_computed_tokens=16 * len(held))


def test_a_budget_parks_and_gives_back() -> None:
    budget, pool = budget_of(65)
    assert (budget.total_blocks, budget.used_blocks) == (64, 0)
    assert budget.set(10)
    assert pool.get_num_free_blocks() == 10
    taken = pool.get_new_blocks(10)
    assert sorted(block.block_id for block in taken) == list(range(1, 11))
    assert budget.used_blocks == 10
    assert budget.set(64)
    assert pool.get_num_free_blocks() == 54
    pool.free_blocks(taken)
    assert (pool.get_num_free_blocks(), budget.used_blocks) == (64, 0)


def test_a_block_that_is_still_held_defers_the_budget() -> None:
    budget, pool = budget_of(33)
    taken = pool.get_new_blocks(20)
    assert not budget.set(10)
    assert budget.used_blocks == 20
    pool.free_blocks(taken)
    assert budget.set(10)
    assert pool.get_num_free_blocks() == 10


def test_a_cut_takes_free_blocks_first_wherever_they_are() -> None:
    budget, pool = budget_of(33)
    low, high = pool.get_new_blocks(4), pool.get_new_blocks(28)[-4:]
    pool.free_blocks(pool.blocks[5:29])
    held_by(budget, low=low, high=high)
    assert budget.victims(8) == []
    assert budget.set(8)
    assert budget.used_blocks == 8
    assert not budget.parked[[block.block_id for block in low + high]].any()


def test_victims_are_the_cheapest_and_no_more_than_needed() -> None:
    budget, pool = budget_of(33)
    long, short, middle = pool.get_new_blocks(12), pool.get_new_blocks(3), pool.get_new_blocks(6)
    held_by(budget, long=long, short=short, middle=[pool.null_block, *middle])
    assert budget.victims(21) == []
    assert budget.victims(20) == ["short"]
    assert budget.victims(14) == ["short", "middle"]
    assert budget.victims(9) == ["long"]  # the two others together would not do


def test_what_others_share_costs_nothing_to_compute_anew() -> None:
    budget, pool = budget_of(33)
    prefix, own, alone = pool.get_new_blocks(10), pool.get_new_blocks(4), pool.get_new_blocks(6)
    pool.touch(prefix)  # a second holder
    held_by(budget, one=prefix + own[:2], two=prefix + own[2:], alone=alone)
    assert budget.victims(18) == ["one"]  # longest of all, but cheapest
    assert budget.victims(16) == ["one", "two"]


def test_whole_groups_come_free() -> None:
    budget, pool = budget_of(33, group_blocks=4)
    taken = pool.get_new_blocks(32)
    one, two = taken[:11], taken[11:23]  # blocks 1 to 11 and 12 to 23; the rest is free
    pool.free_blocks(taken[23:])
    held_by(budget, one=one, two=two)
    assert budget.victims(23) == []
    assert budget.set(24)
    assert budget.parked[25:].all()
    victims = budget.victims(20)
    assert victims == ["one"]
    pool.free_blocks(one)
    del budget._managers[0].req_to_blocks["one"]
    assert budget.set(20)
    assert budget.parked_blocks == 12
    groups = np.flatnonzero(budget.parked) // 4
    assert set(groups) == {6, 7, 8, 2} or set(groups) == {6, 7, 8, 1}


def test_parking_spares_what_the_prefix_cache_holds() -> None:
    budget, pool = budget_of(17)
    blocks = pool.get_new_blocks(16)
    cached = blocks[-4:]
    for number, block in enumerate(cached):
        block._block_hash = bytes([number]) * 36
        pool.cached_block_hash_to_block.insert(block._block_hash, block)
    pool.free_blocks(blocks)
    assert budget.set(4)
    assert sorted(np.flatnonzero(~budget.parked)) == [0, *(block.block_id for block in cached)]
    assert budget.set(2)
    assert sum(block.block_hash is not None for block in cached) == 2


def test_what_fits_counts_whole_blocks() -> None:
    budget, _ = budget_of(33)
    assert budget.fits(512)
    assert not budget.fits(513)
    budget.set(2)
    assert budget.fits(32)
    assert not budget.fits(33)
    assert budget.fits(33, budget_blocks=3)


def test_low_numbers_are_taken_first_whatever_the_order_of_freeing() -> None:
    budget, pool = budget_of(33)
    blocks = pool.get_new_blocks(32)
    rng = np.random.default_rng(0)
    pool.free_blocks([blocks[index] for index in rng.permutation(32)])
    assert [block.block_id for block in pool.get_new_blocks(5)] == [1, 2, 3, 4, 5]
    assert [block.block_id for block in pool.get_new_blocks(1)] == [6]
    assert budget.used_blocks == 6


def test_the_same_blocks_are_parked_again_after_a_reset() -> None:
    budget, pool = budget_of(17)
    blocks = pool.get_new_blocks(16)
    for number, block in enumerate(blocks[-4:]):
        block._block_hash = bytes([number]) * 36
        pool.cached_block_hash_to_block.insert(block._block_hash, block)
    pool.free_blocks(blocks)
    budget.set(4)
    parked = budget.parked.copy()
    with budget.all_unparked():
        assert pool.get_num_free_blocks() == 16
        for block in blocks[-4:]:
            pool._maybe_evict_cached_block(block)  # now these, with the highest numbers, would be chosen
    assert np.array_equal(budget.parked, parked)
    assert pool.get_num_free_blocks() == 4


def test_blocks_whose_memory_is_not_gone_yet_still_count() -> None:
    from rose.engines.vllm.kv_elastic import ElasticKv  # noqa: PLC0415
    from rose.engines.vllm.kv_pages import SharedPages  # noqa: PLC0415

    budget, pool = budget_of(33)
    taken = pool.get_new_blocks(32)
    pool.free_blocks(taken[:8])
    budget.set(24)
    given_back = budget.parked.copy()  # 1 to 8
    pool.free_blocks(taken[24:])
    budget.set(16)  # 25 to 32 as well, whose memory is on its way out
    books = SimpleNamespace(capacity_pages=13, free_pages=0, acquire=lambda pages: 0)
    elastic: Any = ElasticKv.__new__(ElasticKv)
    elastic.budget, elastic.memory = budget, SimpleNamespace(given_back=given_back)
    elastic.pages = SharedPages(books, books, block_bytes=1 << 20)  # type: ignore[arg-type]
    elastic.pages.held = 13  # for 0 and 9 to 32
    assert elastic.affordable(24) == 17  # the page of the null block had room for one more
    elastic.memory.given_back = budget.parked.copy()
    assert elastic.affordable(24) == 24


# ---- plugin ---------------------------------------------------------------------------------------


def test_an_untested_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.version  # noqa: PLC0415

    from rose.engines.vllm.plugin import check_version  # noqa: PLC0415

    given = {"role": "rollout", "name": "r0", "run_dir": "/r", "token_file": "/t"}
    check_version(PluginSettings(**given))
    for other in ("0.31.2", "0.33.0", "1.32.0", "0.320.1"):
        monkeypatch.setattr(vllm.version, "__version__", other)
        with pytest.raises(RoseError, match=other.replace(".", r"\.")):
            check_version(PluginSettings(**given))
        check_version(PluginSettings(**given, allow_untested=True))


def test_without_settings_the_plugin_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # noqa: PLC0415

    from rose.engines.vllm.plugin import register  # noqa: PLC0415

    for name in [name for name in os.environ if name.startswith("ROSE_ENGINE_")]:
        monkeypatch.delenv(name)
    before = SpinCondition.wait
    register()
    assert SpinCondition.wait is before
