"""Live weights over several ranks: each writes its part, all prove the whole, all change or none."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest

from rose.errors import CorruptDelta, RoseError, WrongBase
from rose.units import JobId, WeightVersion
from rose.weights import boxes, planner
from rose.weights.bits import Bits
from rose.weights.container import write_version
from rose.weights.digests import digest_state
from rose.weights.encoding import encode_version
from rose.weights.planner import Layout

torch = pytest.importorskip("torch")

from rose.engines.live import ApplyFailed, LiveWeights  # noqa: E402
from rose.engines.parameters import live_parameters  # noqa: E402

T = TypeVar("T")
State = dict[str, Bits]
RANKS = 2
VOCAB, HIDDEN = 70, 8
KV_HEADS = {"wide": 2, "narrow": 1}
"""In a narrow model both ranks hold the only key-value head."""


class ThreadRanks:
    """Ranks that are threads of this process."""

    class Meeting:
        """What they share."""

        def __init__(self, size: int) -> None:
            self.barrier = threading.Barrier(size, timeout=30)
            self.said: list[Any] = [None] * size
            self.sent: dict[tuple[int, int], queue.Queue[Any]] = {
                (sender, owner): queue.Queue() for sender in range(size) for owner in range(size)
            }

    def __init__(self, meeting: Meeting, index: int) -> None:
        self.meeting, self.index, self.size = meeting, index, len(meeting.said)

    def agree(self, mine: bytes) -> list[bytes]:
        self.meeting.said[self.index] = mine
        self.meeting.barrier.wait()
        said = list(self.meeting.said)
        self.meeting.barrier.wait()
        return said

    def gather(self, part: Any, sizes: Sequence[int], owner: int) -> list[Any]:
        if self.index != owner:
            self.meeting.sent[self.index, owner].put(part.clone())
            return []
        senders = (self.meeting.sent[rank, owner] for rank in range(self.size) if rank != owner)
        others = iter([sender.get(timeout=30) for sender in senders])
        parts = [part if rank == owner else next(others) for rank in range(self.size)]
        assert [each.numel() for each in parts] == list(sizes)
        return parts


def first_state(model: str) -> State:
    rng = np.random.default_rng(3)
    kv = 4 * KV_HEADS[model]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": (16, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (kv, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (kv, HIDDEN),
        "model.layers.0.self_attn.q_proj.bias": (16,),
        "model.layers.0.self_attn.k_proj.bias": (kv,),
        "model.layers.0.self_attn.v_proj.bias": (kv,),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, 16),
        "model.layers.0.mlp.gate_proj.weight": (12, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (12, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, 12),
        "model.norm.weight": (HIDDEN,),
    }
    return {
        name: Bits("BF16", shape, rng.integers(0x3C00, 0x3F80, int(np.prod(shape))).astype("<u2"))
        for name, shape in shapes.items()
    }


def stepped(state: State, seed: int = 5) -> State:
    rng = np.random.default_rng(seed)
    moved = {name: bits.copy() for name, bits in state.items()}
    for bits in moved.values():
        bits.words[rng.random(bits.words.size) < 0.2] ^= 1
    return moved


def module_of_rank(state: State, rank: int, model: str) -> Any:
    """What vLLM's layers hold and note of themselves: fused, cut, and padded."""
    heads = KV_HEADS[model]
    here = max(1, heads // RANKS)
    form = {name: bits.shape for name, bits in state.items()}
    held = planner.slices(form, Layout(tp_rank=rank, tp_size=RANKS, kv_heads=heads))

    def part(name: str) -> Any:
        bits = state[name]
        box = held.get(name, ((0, 0), *boxes.whole(bits.shape[1:])))
        words = boxes.take(bits.words, bits.shape, box).copy().view("<i2")
        return torch.from_numpy(words).view(torch.bfloat16).reshape(boxes.shape_of(box))

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        packed_modules_mapping: ClassVar = {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }

    root = Model()

    def add(path: str, tensors: dict[str, Any], **sizes: Any) -> None:
        owner = root
        *parents, leaf = path.split(".")
        for name in parents:
            if name not in dict(owner.named_children()):
                owner.add_module(name, torch.nn.Module())
            owner = owner.get_submodule(name)
        module = torch.nn.Module()
        for name, value in sizes.items():
            setattr(module, name, value)
        for name, tensor in tensors.items():
            module.register_parameter(name, torch.nn.Parameter(tensor.contiguous(), requires_grad=False))
        owner.add_module(leaf, module)

    rows = part("model.embed_tokens.weight")
    padded = torch.cat([rows, torch.zeros(64 - rows.shape[0], HIDDEN, dtype=torch.bfloat16)])
    add("model.embed_tokens", {"weight": padded}, org_vocab_size=VOCAB)
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    qkv = {
        leaf: torch.cat([part(f"{attention}.{each}_proj.{leaf}") for each in "qkv"])
        for leaf in ("weight", "bias")
    }
    mine = [8, 4 * here, 4 * here]
    add(
        f"{attention}.qkv_proj",
        qkv,
        output_partition_sizes=mine,
        output_size=RANKS * sum(mine),
        output_size_per_partition=sum(mine),
        total_num_kv_heads=heads,
        num_kv_heads=here,
    )
    row = {"output_size": HIDDEN, "output_size_per_partition": HIDDEN}
    o_proj = {"weight": part(f"{attention}.o_proj.weight")}
    add(f"{attention}.o_proj", o_proj, input_size=16, input_size_per_partition=8, **row)
    add(
        f"{mlp}.gate_up_proj",
        {"weight": torch.cat([part(f"{mlp}.{each}_proj.weight") for each in ("gate", "up")])},
        output_partition_sizes=[6, 6],
        output_size=24,
        output_size_per_partition=12,
    )
    down_proj = {"weight": part(f"{mlp}.down_proj.weight")}
    add(f"{mlp}.down_proj", down_proj, input_size=12, input_size_per_partition=6, **row)
    add("model.norm", {"weight": part("model.norm.weight")})
    return root


class Fleet:
    """All ranks of one engine, each called in a thread of its own."""

    def __init__(self, state: State, model: str) -> None:
        self.threads = ThreadPoolExecutor(RANKS)
        meeting = ThreadRanks.Meeting(RANKS)
        self.modules = [module_of_rank(state, rank, model) for rank in range(RANKS)]

        def made(rank: int) -> LiveWeights:
            return LiveWeights(self.modules[rank], ranks=ThreadRanks(meeting, rank))

        self.lives = list(self.threads.map(made, range(RANKS)))

    def each(self, call: Callable[[LiveWeights], T]) -> list[T]:
        return list(self.threads.map(call, self.lives))

    def stage(self, directory: Path, version: int, base: int) -> list[Any]:
        def staged(live: LiveWeights) -> Any:
            try:
                return live.stage(directory, version, base)
            except (WrongBase, CorruptDelta) as error:
                return error

        return self.each(staged)

    def digests(self) -> dict[str, str]:
        """As the endpoint unites them."""
        from rose.engines.vllm.updates import _united  # noqa: PLC0415

        digests: dict[str, str] = _united(self.each(LiveWeights.digests))["digests"]
        return digests


@pytest.fixture(params=["wide", "narrow"])
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def write(path: Path, base: State | None, target: State, version: int = 1) -> Path:
    base_version = None if base is None else WeightVersion(version - 1)
    write_version(path, encode_version(JobId("j"), WeightVersion(version), base_version, base, target))
    return path


def with_tied_head(state: State) -> State:
    return {**state, "lm_head.weight": state["model.embed_tokens.weight"]}


def test_ranks_name_whole_parameters_and_hold_boxes_of_them(model: str) -> None:
    state = first_state(model)
    for rank in range(RANKS):
        found = {
            each.name: each
            for each in live_parameters(module_of_rank(state, rank, model), rank=rank, ranks=RANKS)
        }
        assert {name: each.shape for name, each in found.items()} == {
            name: bits.shape for name, bits in state.items()
        }
        for name, each in found.items():
            expected = boxes.take(state[name].words, each.shape, each.box)
            assert np.array_equal(each.read(), expected), name
        assert found["model.norm.weight"].whole
        kv = found["model.layers.0.self_attn.k_proj.weight"]
        assert kv.whole == (model == "narrow")


@pytest.mark.parametrize("anchor", [False, True])
def test_an_update_of_all_ranks_is_the_trainers_whole_state(tmp_path: Path, model: str, anchor: bool) -> None:
    before, after = first_state(model), stepped(first_state(model))
    fleet = Fleet(before, model)
    assert fleet.digests() == digest_state(before)
    base = None if anchor else with_tied_head(before)
    directory = write(tmp_path / "v1", base, with_tied_head(after))
    staged = fleet.stage(directory, 1, 0)
    assert {each.changed for each in staged} == {staged[0].changed}
    assert fleet.digests() == digest_state(before), "nothing is written yet"
    for live, each in zip(fleet.lives, staged, strict=True):
        live.apply(each)
    assert fleet.digests() == digest_state(after)
    fleet.each(LiveWeights.take_back)
    assert fleet.digests() == digest_state(before)


def test_a_rank_that_cannot_read_the_files_ends_the_staging_of_all(tmp_path: Path, model: str) -> None:
    before = first_state(model)
    fleet = Fleet(before, model)
    directory = write(tmp_path / "v1", before, stepped(before))
    fleet.lives[1].version = 3
    for error in fleet.stage(directory, 1, 0):
        assert isinstance(error, WrongBase)
        assert "holds 3" in str(error)


def test_bytes_that_drifted_on_one_rank_are_found_whoever_proves_them(tmp_path: Path, model: str) -> None:
    before = first_state(model)
    directory = write(tmp_path / "v1", before, stepped(before))
    for name in before:
        for rank in range(RANKS):
            fleet = Fleet(before, model)
            words = fleet.lives[rank].parameters[name].words
            if not words.numel():
                continue
            words[-1] ^= 1
            outcome = fleet.stage(directory, 1, 0)
            assert all(isinstance(each, WrongBase) for each in outcome), (name, rank, outcome)
            assert name in str(outcome[0])
            assert fleet.digests()[name] != digest_state(before)[name], (name, rank)


def test_a_patch_that_lies_is_refused_by_all_ranks(tmp_path: Path, model: str) -> None:
    before, after = first_state(model), stepped(first_state(model))
    digests = digest_state(after)
    digests["model.layers.0.mlp.up_proj.weight"] = "0" * 32
    lying = encode_version(
        JobId("j"), WeightVersion(1), WeightVersion(0), before, after, target_digests=digests
    )
    write_version(tmp_path / "v1", lying)
    fleet = Fleet(before, model)
    outcome = fleet.stage(tmp_path / "v1", 1, 0)
    assert all(isinstance(each, CorruptDelta) for each in outcome)
    assert fleet.digests() == digest_state(before)


def test_where_one_rank_fails_to_write_the_others_can_be_taken_back(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rose.engines import live as module  # noqa: PLC0415

    before = first_state(model)
    fleet = Fleet(before, model)
    staged = fleet.stage(write(tmp_path / "v1", before, stepped(before)), 1, 0)
    fleet.lives[0].apply(staged[0])
    do, calls = module._Write.do, []

    def lossy(self: Any, words: Any) -> Any:
        calls.append(self)
        lost = len(calls) == 3
        before, same = do(self, words ^ 1 if lost else words)
        return before, same and not lost

    monkeypatch.setattr(module._Write, "do", lossy)
    with pytest.raises(ApplyFailed):
        fleet.lives[1].apply(staged[1])
    monkeypatch.undo()
    fleet.each(LiveWeights.take_back)
    assert [live.version for live in fleet.lives] == [0, 0]
    assert fleet.digests() == digest_state(before)


def test_a_layer_that_is_cut_in_an_unknown_way_is_refused(model: str) -> None:
    root = module_of_rank(first_state(model), 0, model)
    root.model.embed_tokens.org_vocab_size = 400
    with pytest.raises(RoseError, match="was expected"):
        list(live_parameters(root, ranks=RANKS))
