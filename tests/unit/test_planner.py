"""Who holds what: tables of layouts, and every layout against plain NumPy slicing."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import ConfigError, WrongBase
from rose.weights import boxes
from rose.weights.boxes import Box, Shape, chunks, intersect, localise, runs, size_of, subtract, take, whole
from rose.weights.planner import (
    Layout,
    Shard,
    expert_range,
    fused,
    kind_of,
    missing_parts,
    placed,
    plan_reads,
    slices,
    stage_layers,
    writers,
)

HIDDEN, VOCAB, HEADS, KV_HEADS, HEAD = 8, 130, 4, 2, 2
FORM: dict[str, Shape] = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "lm_head.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
}
for _layer in range(3):
    _path = f"model.layers.{_layer}."
    FORM |= {
        _path + "input_layernorm.weight": (HIDDEN,),
        _path + "self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
        _path + "self_attn.q_proj.bias": (HEADS * HEAD,),
        _path + "self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        _path + "self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        _path + "self_attn.q_norm.weight": (HEAD,),
        _path + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        _path + "mlp.gate.weight": (4, HIDDEN),
    }
    for _expert in range(4):
        FORM |= {
            f"{_path}mlp.experts.{_expert}.gate_proj.weight": (12, HIDDEN),
            f"{_path}mlp.experts.{_expert}.up_proj.weight": (12, HIDDEN),
            f"{_path}mlp.experts.{_expert}.down_proj.weight": (HIDDEN, 12),
        }
L0 = "model.layers.0."


def layouts(tp: int = 1, pp: int = 1, ep: int = 1, tied: bool = False) -> list[Layout]:
    return [
        Layout(
            tp_rank=tp_rank, tp_size=tp, pp_rank=pp_rank, pp_size=pp, ep_rank=ep_rank, ep_size=ep,
            layers=3, kv_heads=KV_HEADS, experts=4, tied=tied,
        )
        for pp_rank, tp_rank, ep_rank in product(range(pp), range(tp), range(ep))
    ]  # fmt: skip


def count(box: Box, shape: Shape, into: np.ndarray) -> None:
    into.reshape(shape)[tuple(slice(first, last) for first, last in box)] += 1


# ---- tensor parallelism -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rank_1_of_2"),
    [
        (L0 + "self_attn.q_proj.weight", ((4, 8), (0, 8))),
        (L0 + "self_attn.q_proj.bias", ((4, 8),)),
        (L0 + "self_attn.k_proj.weight", ((2, 4), (0, 8))),
        (L0 + "self_attn.o_proj.weight", ((0, 8), (4, 8))),
        (L0 + "self_attn.q_norm.weight", ((0, 2),)),
        (L0 + "input_layernorm.weight", ((0, 8),)),
        (L0 + "mlp.gate.weight", ((0, 4), (0, 8))),
        (L0 + "mlp.experts.3.up_proj.weight", ((6, 12), (0, 8))),
        (L0 + "mlp.experts.3.down_proj.weight", ((0, 8), (6, 12))),
        ("model.embed_tokens.weight", ((96, 130), (0, 8))),  # 130 rows are padded to 192
        ("lm_head.weight", ((96, 130), (0, 8))),
    ],
)
def test_tensor_parallel_slices(name: str, rank_1_of_2: Box) -> None:
    assert slices(FORM, layouts(tp=2)[1])[name] == rank_1_of_2


def test_few_heads_are_repeated_over_many_ranks() -> None:
    boxes_of_k = [slices(FORM, each)[L0 + "self_attn.k_proj.weight"] for each in layouts(tp=4)]
    assert boxes_of_k == [((0, 2), (0, 8)), ((0, 2), (0, 8)), ((2, 4), (0, 8)), ((2, 4), (0, 8))]


def test_a_rank_may_hold_padding_alone() -> None:
    form = {"model.embed_tokens.weight": (60, 8)}
    held = [slices(form, each) for each in layouts(tp=2)]
    assert held == [
        {"model.embed_tokens.weight": ((0, 32), (0, 8))},
        {"model.embed_tokens.weight": ((32, 60), (0, 8))},
    ]
    assert slices({"lm_head.weight": (16, 8)}, layouts(tp=4)[3]) == {}


def test_what_cannot_be_cut_or_told_is_refused() -> None:
    with pytest.raises(ConfigError, match="equal parts"):
        slices({"a.up_proj.weight": (7, 4)}, layouts(tp=2)[0])
    with pytest.raises(ConfigError, match="cannot tell"):
        kind_of("model.layers.0.mystery.weight", (4, 4))
    assert slices({"mystery": (4, 4)}, layouts(tp=2)[1], {"mystery": "row"}) == {"mystery": ((0, 4), (2, 4))}
    for bad in ({"tp_rank": 2, "tp_size": 2}, {"tp_size": 2}, {"pp_size": 2}, {"ep_size": 2}):
        with pytest.raises(ConfigError):
            Layout(**bad)


# ---- pipelines, experts, ties -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "size", "expected"),
    [
        (4, 2, [2, 2]),
        (5, 2, [3, 2]),
        (7, 3, [2, 3, 2]),
        (8, 3, [3, 3, 2]),
        (10, 4, [2, 3, 3, 2]),
        (3, 1, [3]),
    ],
)
def test_pipeline_stages(layers: int, size: int, expected: list[int]) -> None:
    stages = [stage_layers(layers, rank, size) for rank in range(size)]
    assert [len(stage) for stage in stages] == expected
    assert [layer for stage in stages for layer in stage] == list(range(layers))


@pytest.mark.parametrize(
    ("experts", "size", "expected"), [(8, 4, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (2, 4, [1, 1, 0, 0])]
)
def test_experts_are_dealt_out(experts: int, size: int, expected: list[int]) -> None:
    ranges = [expert_range(experts, rank, size) for rank in range(size)]
    assert [len(each) for each in ranges] == expected
    assert [expert for each in ranges for expert in each] == list(range(experts))


def test_ends_of_the_pipeline_hold_embedding_and_head() -> None:
    first, last = (slices(FORM, each) for each in layouts(pp=2))
    assert "model.embed_tokens.weight" in first
    assert "lm_head.weight" not in first
    assert {"lm_head.weight", "model.norm.weight"} <= last.keys()
    assert "model.embed_tokens.weight" not in last


def test_a_tied_head_is_the_embedding_and_is_on_both_ends() -> None:
    """A delta that names only the embedding changes the head too; nobody asks for the head by its name."""
    first, last = (slices(FORM, each) for each in layouts(pp=2, tied=True))
    for held in (first, last):
        assert "lm_head.weight" not in held
        assert held["model.embed_tokens.weight"] == whole((VOCAB, HIDDEN))


def test_whole_experts_under_expert_parallelism() -> None:
    held = slices(FORM, Layout(tp_rank=1, tp_size=2, ep_rank=1, ep_size=2, kv_heads=2, experts=4))
    present = {name for name in held if ".experts." in name and name.startswith(L0)}
    assert present == {
        name for name in FORM if name.startswith(L0) and (".experts.2." in name or ".experts.3." in name)
    }
    assert held[L0 + "mlp.experts.2.up_proj.weight"] == whole((12, HIDDEN))
    assert held[L0 + "self_attn.q_proj.weight"] == ((4, 8), (0, 8))


# ---- DTensor and FSDP ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "mesh", "placements", "expected"),
    [
        (
            (10, 4),
            (4,),
            (Shard(0),),
            [((0, 3), (0, 4)), ((3, 6), (0, 4)), ((6, 9), (0, 4)), ((9, 10), (0, 4))],
        ),
        ((2, 4), (4,), (Shard(0),), [((0, 1), (0, 4)), ((1, 2), (0, 4)), ((2, 2), (0, 4)), ((2, 2), (0, 4))]),
        ((4, 6), (2,), (Shard(1),), [((0, 4), (0, 3)), ((0, 4), (3, 6))]),
        ((4,), (2,), (None,), [((0, 4),), ((0, 4),)]),
    ],
)
def test_placements_of_one_mesh_dimension(
    shape: Shape, mesh: tuple[int, ...], placements: tuple[Shard | None, ...], expected: list[Box]
) -> None:
    assert [placed(shape, mesh, (rank,), placements) for rank in range(mesh[0])] == expected


def test_fsdp_over_tensor_parallelism_covers_everything_once() -> None:
    shape = (7, 6)
    seen = np.zeros(math.prod(shape), int)
    for data, tensor in product(range(3), range(2)):
        count(placed(shape, (3, 2), (data, tensor), (Shard(0), Shard(0))), shape, seen)
    assert np.all(seen == 1)


def test_it_is_what_torch_does() -> None:
    """`Shard` cuts as torch.chunk does; with fewer chunks than ranks, the last ranks hold nothing."""
    torch = pytest.importorskip("torch")
    for size, ranks in product(range(1, 12), range(1, 6)):
        lengths = [len(chunk) for chunk in torch.chunk(torch.zeros(size), ranks)]
        found = [size_of(placed((size,), (ranks,), (rank,), (Shard(0),))) for rank in range(ranks)]
        assert found == lengths + [0] * (ranks - len(lengths))


# ---- fused ------------------------------------------------------------------------------------------


def test_a_fused_tensor_is_its_local_parts_one_below_the_other() -> None:
    held = slices(FORM, layouts(tp=2)[1])
    parts = [L0 + f"self_attn.{part}_proj.weight" for part in "qkv"]
    assert [(piece.first, piece.box[0]) for piece in fused(parts, held)] == [
        (0, (4, 8)),
        (4, (2, 4)),
        (6, (2, 4)),
    ]
    assert missing_parts(parts, parts[:1]) == (parts[1], parts[2])
    assert missing_parts(parts, reversed(parts)) == ()


# ---- between layouts ----------------------------------------------------------------------------------


GIVERS = [
    layouts(),
    layouts(tp=2),
    layouts(tp=4),
    layouts(pp=2),
    layouts(tp=2, pp=3),
    layouts(ep=2),
    layouts(ep=4),
]


@pytest.mark.parametrize("trainer", range(len(GIVERS)))
@pytest.mark.parametrize("engine", range(len(GIVERS)))
def test_any_layout_can_read_from_any_other_and_reads_nothing_twice(trainer: int, engine: int) -> None:
    held = [slices(FORM, each) for each in GIVERS[trainer]]
    for number, layout in enumerate(GIVERS[engine]):
        wanted = slices(FORM, layout)
        reads = plan_reads(held, wanted, prefer=number)
        for name, box in wanted.items():
            seen, need = (np.zeros(math.prod(FORM[name]), int) for _ in range(2))
            count(box, FORM[name], need)
            for read in reads:
                if read.name == name:
                    assert intersect(read.box, held[read.rank][name]) == read.box
                    count(read.box, FORM[name], seen)
            assert np.array_equal(seen, need), name


def test_what_nobody_holds_is_refused() -> None:
    held = [{"w": ((0, 2), (0, 4))}, {"w": ((3, 4), (0, 4))}]
    with pytest.raises(WrongBase, match="nobody holds"):
        plan_reads(held, {"w": ((0, 4), (0, 4))})
    with pytest.raises(WrongBase):
        plan_reads([], {"w": ((0, 4),)})


@pytest.mark.parametrize("ranks", GIVERS)
def test_trainer_ranks_push_everything_once_without_a_gather(ranks: list[Layout]) -> None:
    held = [slices(FORM, each) for each in ranks]
    pushes = writers(held)
    for name, shape in FORM.items():
        seen = np.zeros(math.prod(shape), int)
        for rank, each in enumerate(pushes):
            for push in each:
                if push.name == name:
                    assert push.rank == rank
                    count(push.box, shape, seen)
        assert np.all(seen == 1), name


def test_replicas_are_dealt_out_among_ranks() -> None:
    held = [{f"norm{number}.weight": whole((8,)) for number in range(8)} for _ in range(4)]
    assert [len(each) for each in writers(held)] == [2, 2, 2, 2]


# ---- geometry against NumPy ----------------------------------------------------------------------------


@st.composite
def shapes_and_boxes(draw: st.DrawFn, count_of_boxes: int = 1) -> tuple[Shape, list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    found = []
    for _ in range(count_of_boxes):
        ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
        found.append(tuple((first, last) for first, last in ends))
    return shape, found


@settings(deadline=None)
@given(shapes_and_boxes(), st.integers(1, 9))
def test_runs_and_chunks_are_the_box(case: tuple[Shape, list[Box]], chunk: int) -> None:
    shape, (box,) = case
    flat = np.arange(math.prod(shape), dtype=np.int64)
    starts, length = runs(shape, box)
    positions = (starts[:, None] + np.arange(length)[None, :]).reshape(-1)
    assert np.array_equal(positions, take(flat, shape, box))
    assert np.array_equal(chunks(shape, box, chunk), np.unique(positions // chunk))


@settings(deadline=None)
@given(shapes_and_boxes(2))
def test_subtract_and_intersect_share_out_the_box(case: tuple[Shape, list[Box]]) -> None:
    shape, (box, hole) = case
    seen, need = (np.zeros(math.prod(shape), int) for _ in range(2))
    count(box, shape, need)
    for part in subtract(box, hole):
        count(part, shape, seen)
    if (shared := intersect(box, hole)) is not None:
        count(shared, shape, seen)
    assert np.array_equal(seen, need)


@settings(deadline=None)
@given(shapes_and_boxes(), st.data())
def test_a_global_change_cut_to_a_rank_is_the_ranks_dense_slice(
    case: tuple[Shape, list[Box]], data: st.DataObject
) -> None:
    """Sparse (index, value) lists in checkpoint coordinates, column and row splits alike."""
    shape, (box,) = case
    size = math.prod(shape)
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, size - 1)))), np.int64)
    base = np.zeros(size, np.uint16)
    target = base.copy()
    values = np.arange(1, positions.size + 1, dtype=np.uint16)
    target[positions] = values
    local = take(base, shape, box).copy()
    where, what = localise(shape, box, positions, values)
    assert np.all(where[1:] > where[:-1])
    local[where] = what
    assert np.array_equal(local, take(target, shape, box))


def test_a_box_within_a_box() -> None:
    outer = boxes.split((8, 6), 0, 4, 8)
    assert boxes.within(outer, ((1, 2), (0, 3))) == ((5, 6), (0, 3))
