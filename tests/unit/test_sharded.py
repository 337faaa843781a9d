"""Publishing from many ranks: the sum of their parts is the model, whatever becomes of one of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from weight_states import JOB, MemoryRelay, fail_once, same, stepped, tensor

from rose.errors import ConfigError, RoseError, VersionConflict, WrongBase
from rose.units import WeightVersion
from rose.weights import boxes
from rose.weights import manifest as manifests
from rose.weights.bits import Bits, State, UnsupportedTensor
from rose.weights.coding import Coding
from rose.weights.container import EncodedVersion, decode_patches, read_manifest, write_version
from rose.weights.decoding import decode_staged
from rose.weights.digests import digest_state
from rose.weights.manifest import Manifest
from rose.weights.partial import fetch_part, part_bytes
from rose.weights.patches import apply_to_state, check_base, check_target
from rose.weights.planner import Layout
from rose.weights.relay.blocking import BlockingRelay
from rose.weights.reports import PublishReport
from rose.weights.sharded import ShardedPublisher
from rose.weights.sharding import Sharding


def llama(seed: int = 0) -> dict[str, Bits]:
    """A small model by the names and shapes of a real one."""
    shapes = {
        "model.embed_tokens.weight": (128, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (128, 16),
    }
    for layer in range(2):
        path = f"model.layers.{layer}"
        shapes |= {
            f"{path}.input_layernorm.weight": (16,),
            f"{path}.self_attn.q_proj.weight": (32, 16),
            f"{path}.self_attn.k_proj.weight": (16, 16),
            f"{path}.self_attn.v_proj.weight": (16, 16),
            f"{path}.self_attn.o_proj.weight": (16, 32),
            f"{path}.mlp.up_proj.weight": (64, 16),
            f"{path}.mlp.down_proj.weight": (16, 64),
        }
    return {name: tensor("BF16", shape, seed + at) for at, (name, shape) in enumerate(sorted(shapes.items()))}


STATES = [llama()]
for _version in range(1, 5):
    STATES.append(stepped(STATES[-1], _version, 0.05))
SHAPES = {name: bits.shape for name, bits in STATES[0].items()}
MODEL = {"layers": 2, "kv_heads": 2}
LAYOUTS = {
    "tp2": [Layout(tp_rank=rank, tp_size=2, **MODEL) for rank in range(2)],
    "tp4": [Layout(tp_rank=rank, tp_size=4, **MODEL) for rank in range(4)],
    "pp2": [Layout(pp_rank=rank, pp_size=2, **MODEL) for rank in range(2)],
    "tp2 pp2": [
        Layout(tp_rank=t, tp_size=2, pp_rank=p, pp_size=2, **MODEL) for p in range(2) for t in range(2)
    ],
    "dp3": [Layout(**MODEL) for _ in range(3)],
}


class AllGather:
    """An exchange between threads; a rank that dies breaks it for the others."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world, timeout=10)
        self._said: list[bytes] = [b""] * world

    def of(self, rank: int) -> Callable[[bytes], Sequence[bytes]]:
        def exchange(mine: bytes) -> Sequence[bytes]:
            self._said[rank] = mine
            self._barrier.wait()
            answers = list(self._said)
            self._barrier.wait()
            return answers

        return exchange


class Trainer:
    """Ranks as threads, each with a relay client of its own."""

    def __init__(self, relay: MemoryRelay, layouts: Sequence[Layout], **options: object) -> None:
        self.relay = relay
        self.sharding = Sharding.of_layouts(SHAPES, layouts)
        self.ranks = range(len(layouts))
        gather = AllGather(len(layouts))
        self.publishers = [
            ShardedPublisher(
                BlockingRelay(relay), JOB, self.part(rank, STATES[0]), self.sharding, rank, gather.of(rank),
                coding=Coding(slice_bytes_max=512), **options,  # type: ignore[arg-type]
            )
            for rank in self.ranks
        ]  # fmt: skip

    def part(self, rank: int, state: State) -> dict[str, Bits]:
        """What a rank holds of a state: its own copy of its boxes."""
        return {
            name: Bits(
                "BF16", boxes.shape_of(box), np.array(boxes.take(state[name].words, SHAPES[name], box))
            )
            for name, box in self.sharding.held[rank].items()
        }

    def publish(
        self, version: int, state: State, *, ranks: Sequence[int] | None = None
    ) -> list[PublishReport]:
        def one(rank: int) -> PublishReport:
            return self.publishers[rank].publish(WeightVersion(version), self.part(rank, state))

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            work = [pool.submit(one, rank) for rank in self.ranks]
        return [each.result() for each in work]

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()


def fetched(relay: MemoryRelay, version: int) -> tuple[Manifest, Mapping[str, bytes]]:
    key = (JOB, WeightVersion(version))
    manifest = manifests.decode(relay.vault.manifest(key))
    buckets = {}
    for bucket in manifest.buckets:
        with relay.vault.reading(key, bucket.name) as block:
            buckets[bucket.name] = bytes(block.data)
    return manifest, buckets


def received(relay: MemoryRelay, version: int, held: State) -> State:
    manifest, buckets = fetched(relay, version)
    check_base(manifest, digest_state(held))
    state = apply_to_state(held, decode_patches(manifest, buckets, held))
    check_target(manifest, digest_state(state))
    return state


@pytest.fixture
def relay() -> MemoryRelay:
    return MemoryRelay()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_ranks_push_is_the_trainers_model(relay: MemoryRelay, layout: str) -> None:
    trainer = Trainer(relay, LAYOUTS[layout])
    state: State = STATES[0]
    for version in (1, 2):
        reports = trainer.publish(version, STATES[version])
        state = received(relay, version, state)
        assert same(state, STATES[version])
        assert len({report.delta_bytes for report in reports}) == 1
        changed = sum(
            int(np.count_nonzero(STATES[version - 1][name].words != bits.words))
            for name, bits in STATES[version].items()
        )
        assert reports[0].changed == changed
    trainer.close()


def test_all_ranks_and_the_relay_tell_what_the_slowest_rank_took(relay: MemoryRelay) -> None:
    trainer = Trainer(relay, LAYOUTS["tp2 pp2"])
    reports = trainer.publish(1, STATES[1])
    taken = {(report.encode_ms, report.verify_ms) for report in reports}
    assert len(taken) == 1
    encode_ms, verify_ms = taken.pop()
    assert encode_ms > 0
    assert verify_ms > 0
    assert all(report.push_ms > 0 for report in reports)
    [told] = relay.vault.stat(JOB).committed
    assert told.encode_ms == pytest.approx(encode_ms + verify_ms)
    [again, *_] = trainer.publish(1, STATES[1])
    assert (again.repeated, again.encode_ms, again.verify_ms) == (True, 0.0, 0.0)
    trainer.close()


@pytest.mark.parametrize("option", [{"squash_every": 2}, {"stateful": True}, {"on_gpu": True}])
def test_what_no_rank_can_do_is_refused(relay: MemoryRelay, option: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        Trainer(relay, LAYOUTS["tp2"], **option)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp3"])
def test_every_element_is_pushed_once_and_by_who_holds_it(layout: str) -> None:
    sharding = Sharding.of_layouts(SHAPES, LAYOUTS[layout])
    seen = {name: np.zeros(shape, int) for name, shape in SHAPES.items()}
    for rank, parts in enumerate(sharding.pushes):
        for part in parts:
            assert boxes.intersect(sharding.held[rank][part.name], part.box) == part.box
            seen[part.name][tuple(slice(*edge) for edge in part.box)] += 1
    assert all((counts == 1).all() for counts in seen.values())


def test_a_host_completes_the_digests_that_no_rank_knows(relay: MemoryRelay, tmp_path: Path) -> None:
    """So that engines can be audited parameter by parameter, as ever."""
    trainer = Trainer(relay, LAYOUTS["tp2"])
    trainer.publish(1, STATES[1])
    manifest, buckets = fetched(relay, 1)
    cut = {each.name for each in manifest.parameters if each.target_digest is None}
    assert "model.layers.0.mlp.down_proj.weight" in cut
    write_version(tmp_path / "v1", EncodedVersion(manifest, buckets))
    kept = read_manifest(decode_staged(tmp_path / "v1", STATES[0]))
    assert kept.target_digests == digest_state(STATES[1])
    assert {each.name: each.base_digest for each in kept.parameters} == digest_state(STATES[0])
    trainer.close()


def test_parameters_that_no_step_moves_stay_the_same(relay: MemoryRelay, tmp_path: Path) -> None:
    trainer = Trainer(relay, LAYOUTS["tp2"])
    moved = "model.layers.1.mlp.down_proj.weight"
    state = {**STATES[0], moved: STATES[1][moved]}
    trainer.publish(1, state)
    manifest, buckets = fetched(relay, 1)
    write_version(tmp_path / "v1", EncodedVersion(manifest, buckets))
    kept = read_manifest(decode_staged(tmp_path / "v1", STATES[0]))
    assert [each.name for each in kept.parameters if each.mode != "same"] == [moved]
    assert same(received(relay, 1, STATES[0]), state)
    trainer.close()


def test_anchors_as_often_as_asked_and_after_a_restart_of_the_relay(relay: MemoryRelay) -> None:
    trainer = Trainer(relay, LAYOUTS["tp2"], anchor_every=2)
    bases = [trainer.publish(version, STATES[version])[0].base_version for version in (1, 2, 3)]
    assert bases == [0, None, 2]
    relay.restart()
    trainer._anchor_every = None  # type: ignore[attr-defined]
    assert trainer.publish(4, STATES[4])[0].base_version is None
    assert same(received(relay, 4, llama(99)), STATES[4])
    trainer.close()


def test_a_trainer_that_starts_again_begins_with_an_anchor(relay: MemoryRelay) -> None:
    former = Trainer(relay, LAYOUTS["tp2"])
    former.publish(1, STATES[1])
    former.close()
    trainer = Trainer(relay, LAYOUTS["pp2"])
    assert trainer.publish(2, STATES[2])[0].base_version is None
    assert same(received(relay, 2, llama(99)), STATES[2])
    trainer.close()


@pytest.mark.parametrize("call", ["put_bucket", "commit", "abort", "stat"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_rank_fails_with_leaves_no_half_and_can_be_repeated(
    relay: MemoryRelay, call: str, when: str
) -> None:
    trainer = Trainer(relay, LAYOUTS["tp2"], timeout_s=0.3)
    trainer.publish(1, STATES[1])
    setattr(relay, when, fail_once(call))
    with contextlib.suppress(RoseError):
        trainer.publish(2, STATES[2])
    assert relay.vault.stat(JOB).versions in {(1,), (1, 2)}
    relay.before = relay.after = lambda call: None
    for version in (2, 3):
        trainer.publish(version, STATES[version])
    manifest, _ = fetched(relay, 3)
    held = STATES[2] if manifest.base_version == 2 else llama(99)
    assert same(received(relay, 3, held), STATES[3])
    trainer.close()


def test_a_committed_version_may_be_published_again_but_not_changed(relay: MemoryRelay) -> None:
    trainer = Trainer(relay, LAYOUTS["tp2 pp2"])
    trainer.publish(1, STATES[1])
    assert all(report.repeated for report in trainer.publish(1, STATES[1]))
    with pytest.raises(VersionConflict, match="other weights"):
        trainer.publish(1, STATES[2])
    trainer.publish(2, STATES[2])
    assert same(received(relay, 2, STATES[1]), STATES[2])
    with pytest.raises(VersionConflict):
        trainer.publish(1, STATES[1])
    trainer.close()


def test_ranks_that_disagree_publish_nothing(relay: MemoryRelay) -> None:
    trainer = Trainer(relay, LAYOUTS["tp2"])
    with ThreadPoolExecutor(2) as pool:
        work = [
            pool.submit(
                trainer.publishers[rank].publish, WeightVersion(1 + rank), trainer.part(rank, STATES[1])
            )
            for rank in trainer.ranks
        ]
    for each in work:
        with pytest.raises(VersionConflict):
            each.result()
    assert relay.vault.stat(JOB).versions == ()
    trainer.close()


def test_a_rank_that_cannot_encode_tells_the_others(relay: MemoryRelay) -> None:
    trainer = Trainer(relay, LAYOUTS["tp2"])
    part = trainer.part

    def odd(rank: int, state: State) -> dict[str, Bits]:
        found = part(rank, state)
        if rank:
            del found["model.norm.weight"], found["model.layers.0.mlp.down_proj.weight"]
        return found

    trainer.part = odd  # type: ignore[method-assign]
    with pytest.raises(RoseError, match="rank 1 could not encode version 1"):
        trainer.publish(1, STATES[1])
    trainer.part = part  # type: ignore[method-assign]
    trainer.publish(1, STATES[1])
    assert same(received(relay, 1, STATES[0]), STATES[1])
    trainer.close()


def test_a_relay_without_room_loses_old_versions() -> None:
    relay = MemoryRelay(capacity_bytes=160_000)
    trainer = Trainer(relay, LAYOUTS["tp2"])
    state: State = STATES[0]
    for version in range(1, 12):
        state = stepped(state, 50 + version, 0.05)
        trainer.publish(version, state)
    versions = relay.vault.stat(JOB).versions
    assert versions[-1] == 11
    assert 1 not in versions
    trainer.close()


def test_a_sharding_with_holes_is_refused(relay: MemoryRelay) -> None:
    with pytest.raises(ConfigError, match="no rank holds"):
        Trainer(relay, LAYOUTS["pp2"][:1])


def test_a_tensor_of_another_shape_is_refused(relay: MemoryRelay) -> None:
    sharding = Sharding.of_layouts(SHAPES, LAYOUTS["tp2"])
    with pytest.raises(UnsupportedTensor, match="expected"):
        ShardedPublisher(BlockingRelay(relay), JOB, STATES[0], sharding, 0, lambda mine: [mine])


# ---- receivers with another layout ----


@pytest.mark.parametrize("trainer_layout", ["tp2", "pp2", "dp3"])
@pytest.mark.parametrize("layout", ["tp2", "tp4", "pp2", "tp2 pp2"])
@pytest.mark.parametrize("anchor", [False, True])
async def test_a_rank_fetches_what_it_needs_and_no_more(
    relay: MemoryRelay, trainer_layout: str, layout: str, *, anchor: bool
) -> None:
    trainer = Trainer(relay, LAYOUTS[trainer_layout], anchor_every=1 if anchor else None)
    trainer.publish(1, STATES[1])
    trainer.close()
    committed = await relay.manifest(JOB, WeightVersion(1))
    whole_bytes = sum(bucket.size for bucket in committed.manifest.buckets)
    for wanted in Sharding.of_layouts(SHAPES, LAYOUTS[layout]).held:
        base = {name: STATES[0][name] for name in wanted}
        patches = await fetch_part(relay, committed, wanted, base)
        state = apply_to_state(base, patches)
        for name, box in wanted.items():
            local = boxes.take(state[name].words, SHAPES[name], box)
            assert np.array_equal(local, boxes.take(STATES[1][name].words, SHAPES[name], box))
            outside = np.ones(SHAPES[name], bool)
            outside[tuple(slice(*edge) for edge in box)] = False
            flat = outside.reshape(-1)
            assert np.array_equal(state[name].words[flat], STATES[0][name].words[flat])
        assert 0 < part_bytes(committed.manifest, wanted) < whole_bytes


async def test_a_part_of_a_model_that_is_another_is_refused(relay: MemoryRelay) -> None:
    trainer = Trainer(relay, LAYOUTS["tp2"])
    trainer.publish(1, STATES[1])
    trainer.close()
    committed = await relay.manifest(JOB, WeightVersion(1))
    for wanted, base in (
        ({"other.weight": ((0, 1),)}, STATES[0]),
        ({"model.norm.weight": ((0, 1), (0, 1))}, STATES[0]),
        ({"model.norm.weight": ((0, 16),)}, STATES[2]),
        ({"model.norm.weight": ((0, 16),)}, {}),
    ):
        with pytest.raises(WrongBase):
            await fetch_part(relay, committed, wanted, base)
