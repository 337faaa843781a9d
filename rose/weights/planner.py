"""Who holds which part of which parameter, and what has to be read from whom.

Coordinates are always those of the checkpoint: a fused tensor of an engine is a sequence of pieces of
checkpoint parameters, a tied one is an alias.  Everything here is pure: names and shapes in, boxes out.

Splits follow vLLM (`vllm.model_executor.layers.linear`, `vocab_parallel_embedding`, `fused_moe`) and torch's
`Shard` placements, which cut a dimension into pieces of ceil(size / ranks).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from rose.errors import ConfigError, WrongBase
from rose.weights import boxes
from rose.weights.boxes import Box, Shape

Kind: TypeAlias = Literal["column", "row", "kv", "vocab", "replicated"]
"""How tensor parallelism cuts a parameter: `column` by dimension 0, `row` by dimension 1, `kv` by whole heads
that are repeated where there are more ranks than heads, `vocab` by dimension 0 of the padded vocabulary."""

_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"(?:^|\.)(?:k_proj|v_proj)\.(?:weight|bias)$", "kv"),
    (r"(?:^|\.)(?:q_proj|gate_proj|up_proj|fc1|w1|w3)\.(?:weight|bias)$", "column"),
    (r"(?:^|\.)(?:o_proj|down_proj|out_proj|fc2|w2)\.weight$", "row"),
    (r"(?:^|\.)(?:o_proj|down_proj|out_proj|fc2|w2)\.bias$", "replicated"),
    (r"(?:^|\.)(?:embed_tokens|lm_head)\.weight$", "vocab"),
    (r"norm\w*\.(?:weight|bias)$", "replicated"),
    (r"(?:^|\.)(?:gate|router|shared_expert_gate)\.(?:weight|bias)$", "replicated"),
)
"""By name; the first that fits."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_FIRST_STAGE = re.compile(r"(?:^|\.)embed_tokens\.")
_VOCAB_PADDING = 64


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an engine or a trainer; sizes of 1 mean that this kind of parallelism is not used."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    """Experts are dealt out whole; else tensor parallelism cuts each of them."""
    layers: int = 0
    """Transformer layers of the model, for pp_size above 1."""
    kv_heads: int = 0
    """Key-value heads of the model, for tp_size above 1."""
    experts: int = 0
    """Experts of a layer, for ep_size above 1."""
    tied: bool = False
    """The output head is the embedding: the last stage needs the embedding too, and `lm_head` is an alias."""

    def __post_init__(self) -> None:
        for kind in ("tp", "pp", "ep"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            if not 0 <= rank < size:
                raise ConfigError(f"{kind} rank {rank} of {size}: no such rank")
        for size, need, name in (
            (self.tp_size, self.kv_heads, "kv_heads"),
            (self.pp_size, self.layers, "layers"),
            (self.ep_size, self.experts, "experts"),
        ):
            if size > 1 and need < 1:
                raise ConfigError(f"a layout over {size} ranks needs {name}")


class Piece(NamedTuple):
    """Rows of a fused local tensor, and the part of a checkpoint parameter that they are."""

    name: str
    box: Box
    first: int
    """Row of the fused tensor at which the piece begins."""


class Read(NamedTuple):
    """A part of a parameter, and the rank that has it."""

    rank: int
    name: str
    box: Box


# ---- tensor, pipeline and expert parallelism --------------------------------------------------------


def kind_of(name: str, shape: Shape) -> Kind:
    """How tensor parallelism cuts a parameter, by its name.  Raises ConfigError where that cannot be told."""
    for pattern, kind in _KINDS:
        if re.search(pattern, name):
            return kind
    if len(shape) <= 1:
        return "replicated"
    raise ConfigError(f"{name}: cannot tell how tensor parallelism cuts it", "name its kind")


def slices(
    form: Mapping[str, Shape], layout: Layout, kinds: Mapping[str, Kind] | None = None
) -> dict[str, Box]:
    """What a rank holds of each checkpoint parameter; parameters of which it holds nothing are left out.

    `kinds` overrules what names tell.  Raises ConfigError if a dimension cannot be cut evenly.
    """
    held: dict[str, Box] = {}
    for name, shape in form.items():
        if layout.tied and name.endswith("lm_head.weight"):
            continue  # the same memory as the embedding: it comes with that
        if not _on_stage(name, layout) or not _has_expert(name, layout):
            continue
        kind = (kinds or {}).get(name) or kind_of(name, shape)
        whole_expert = layout.ep_size > 1 and _EXPERT.search(name)
        box = boxes.whole(shape) if whole_expert else _cut(name, shape, kind, layout)
        if boxes.size_of(box):
            held[name] = box
    return held


def stage_layers(layers: int, rank: int, size: int) -> range:
    """Layers of a pipeline stage; as vLLM, what is left over goes to the stages before the last."""
    counts = [layers // size] * size
    for stage in range(2, layers % size + 2):
        counts[-stage] += 1
    return range(sum(counts[:rank]), sum(counts[: rank + 1]))


def expert_range(experts: int, rank: int, size: int) -> range:
    """Experts of a rank, in one run; the first ranks take one more where they do not divide evenly."""
    base, more = divmod(experts, size)
    first = rank * base + min(rank, more)
    return range(first, first + base + (rank < more))


def _on_stage(name: str, layout: Layout) -> bool:
    if layout.pp_size == 1:
        return True
    if layer := _LAYER.search(name):
        return int(layer[1]) in stage_layers(layout.layers, layout.pp_rank, layout.pp_size)
    last = layout.pp_rank == layout.pp_size - 1
    if _FIRST_STAGE.search(name):
        return layout.pp_rank == 0 or (layout.tied and last)
    return last


def _has_expert(name: str, layout: Layout) -> bool:
    expert = _EXPERT.search(name)
    if layout.ep_size == 1 or expert is None:
        return True
    return int(expert[1]) in expert_range(layout.experts, layout.ep_rank, layout.ep_size)


def _cut(name: str, shape: Shape, kind: Kind, layout: Layout) -> Box:
    rank, size = layout.tp_rank, layout.tp_size
    if kind == "replicated" or size == 1:
        return boxes.whole(shape)
    if kind == "vocab":
        padded = -(-shape[0] // _VOCAB_PADDING) * _VOCAB_PADDING
        rows = _even(name, padded, size)
        return boxes.split(shape, 0, rank * rows, (rank + 1) * rows)
    if kind == "kv":
        heads = layout.kv_heads
        rows = _even(name, shape[0], heads)  # of one head
        if size > heads:
            head = rank // _even(name, size, heads)
            return boxes.split(shape, 0, head * rows, (head + 1) * rows)
        mine = _even(name, heads, size) * rows
        return boxes.split(shape, 0, rank * mine, (rank + 1) * mine)
    dimension = 0 if kind == "column" else 1
    part = _even(name, shape[dimension], size)
    return boxes.split(shape, dimension, rank * part, (rank + 1) * part)


def _even(name: str, size: int, parts: int) -> int:
    if size % parts:
        raise ConfigError(f"{name}: {size} cannot be cut into {parts} equal parts")
    return size // parts


# ---- FSDP and DTensor -------------------------------------------------------------------------------


class Shard(NamedTuple):
    """A DTensor placement: this mesh dimension cuts `dimension`."""

    dimension: int


def placed(shape: Shape, mesh: Sequence[int], rank: Sequence[int], placements: Sequence[Shard | None]) -> Box:
    """What a rank holds of a DTensor: mesh sizes, the rank's coordinates, and a placement per mesh dimension.

    None replicates.  Placements apply from left to right, each to what the ones before left, as torch does.
    FSDP2 is a mesh of one dimension with `Shard(0)`.
    """
    box = boxes.whole(shape)
    for size, coordinate, placement in zip(mesh, rank, placements, strict=True):
        if placement is None:
            continue
        length = boxes.shape_of(box)[placement.dimension]
        part = -(-length // size)
        local = boxes.split(
            boxes.shape_of(box), placement.dimension, coordinate * part, (coordinate + 1) * part
        )
        box = boxes.within(box, local)
    return box


# ---- fused and tied parameters ----------------------------------------------------------------------


def fused(parts: Sequence[str], held: Mapping[str, Box]) -> tuple[Piece, ...]:
    """The pieces of a local fused tensor (qkv_proj, gate_up_proj), whose parts lie one below the other."""
    pieces: list[Piece] = []
    row = 0
    for name in parts:
        box = held[name]
        pieces.append(Piece(name, box, row))
        row += box[0][1] - box[0][0]
    return tuple(pieces)


def missing_parts(parts: Sequence[str], arrived: Iterable[str]) -> tuple[str, ...]:
    """Parts of a fused tensor that have not come: it must not be used before they have."""
    there = set(arrived)
    return tuple(name for name in parts if name not in there)


# ---- from one layout to another -----------------------------------------------------------------------


def plan_reads(
    held: Sequence[Mapping[str, Box]], wanted: Mapping[str, Box], *, prefer: int = 0
) -> tuple[Read, ...]:
    """Which parts to read from which rank so that `wanted` is covered, every element exactly once.

    `held` is what each rank has, replicas included; ranks are asked from `prefer` on, so that readers with
    different preferences spread over replicas.  Raises WrongBase if some element is with nobody.
    """
    reads: list[Read] = []
    order = [(prefer + step) % len(held) for step in range(len(held))] if held else []
    for name in sorted(wanted):
        left = [wanted[name]] if boxes.size_of(wanted[name]) else []
        for rank in order:
            source = held[rank].get(name)
            if source is None or not left:
                continue
            found = [shared for box in left if (shared := boxes.intersect(box, source)) is not None]
            reads += [Read(rank, name, box) for box in found]
            left = [rest for box in left for rest in boxes.subtract(box, source)]
        if left:
            raise WrongBase(f"{name}: nobody holds {left[0]}")
    return tuple(reads)


def writers(held: Sequence[Mapping[str, Box]]) -> tuple[tuple[Read, ...], ...]:
    """Which parts each trainer rank pushes, so that replicas are pushed once and nobody gathers.

    The first rank of a replicated part pushes it, except that norms and other small replicas are dealt out
    in turn, by order of name.
    """
    pushes: list[list[Read]] = [[] for _ in held]
    for number, name in enumerate(sorted({name for each in held for name in each})):
        done: list[Box] = []
        for step in range(len(held)):
            rank = (number + step) % len(held)
            if (box := held[rank].get(name)) is None:
                continue
            left = [box]
            for other in done:
                left = [rest for part in left for rest in boxes.subtract(part, other)]
            pushes[rank] += [Read(rank, name, part) for part in left if boxes.size_of(part)]
            done.append(box)
    return tuple(tuple(each) for each in pushes)
