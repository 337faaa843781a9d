"""The parameters of a running model as its checkpoint names them: fused ones apart, padding left out.

A worker under tensor parallelism holds a box of each parameter.  Which one follows from the sizes that
vLLM's layers note of themselves and from the planner; a layer whose tensor has another shape is refused.
No vLLM here: it works on any torch module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from rose.errors import RoseError
from rose.weights import boxes, planner
from rose.weights.bits import Words, as_bits
from rose.weights.boxes import Box
from rose.weights.planner import Kind, Layout

_WORD_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LiveParameter(NamedTuple):
    """One checkpoint parameter inside the running model, or this rank's part of it."""

    name: str
    dtype: str
    """A safetensors dtype name."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    box: Box
    """What of it is here; it may be nothing."""
    words: torch.Tensor
    """Flat integer view of the live memory."""

    def read(self) -> Words:
        """Its bits now, flat, in checkpoint order (on a CPU a view, from a GPU a copy)."""
        return as_bits(self.words).words

    @property
    def whole(self) -> bool:
        """Whether all of the parameter is here."""
        return self.box == boxes.whole(self.shape)


def live_parameters(model: torch.nn.Module, *, rank: int = 0, ranks: int = 1) -> Iterator[LiveParameter]:
    """What rank `rank` of `ranks` (tensor parallelism) holds, in an order that is the same on all of them.

    Raises RoseError where a layer does not compute from its plain parameter (packed or quantised), or is cut
    in a way that is not known here.
    """
    modules = dict(model.named_modules())
    fused: dict[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    for name, parameter in model.named_parameters():
        data = parameter.data
        if not data.is_contiguous() or data.numel() == 0:
            raise RoseError(
                f"{name}: not held as plain values (shape {tuple(data.shape)}), so it cannot be updated live",
                "live weights need an unquantised model",
            )
        path, _, leaf = name.rpartition(".")
        owner, _, module_name = path.rpartition(".")
        module = modules[path]
        layout = Layout(tp_rank=rank, tp_size=ranks, kv_heads=getattr(module, "total_num_kv_heads", 1))
        parts = fused.get(module_name)
        if parts is None:
            yield _part(name, data, _kind(module, leaf, ranks), module, layout)
            continue
        first = 0
        for number, (part, rows) in enumerate(zip(parts, module.output_partition_sizes, strict=True)):
            kind = _kind(module, leaf, ranks)
            if kind == "column" and number and hasattr(module, "total_num_kv_heads"):
                kind = "kv"
            yield _part(f"{owner}.{part}.{leaf}", data[first : first + rows], kind, module, layout)
            first += rows


def _kind(module: Any, leaf: str, ranks: int) -> Kind:
    """How a layer's parameter is cut, by the sizes that the layer says it has, whole and here."""
    if hasattr(module, "org_vocab_size"):
        return "vocab"
    if ranks == 1:
        return "replicated"
    rows = getattr(module, "output_size_per_partition", None)
    if rows is not None and rows < module.output_size:
        return "column"
    columns = getattr(module, "input_size_per_partition", None)
    if columns is not None and columns < module.input_size and leaf == "weight":
        return "row"
    return "replicated"


def _part(name: str, data: torch.Tensor, kind: Kind, module: Any, layout: Layout) -> LiveParameter:
    shape = _whole_shape(tuple(int(size) for size in data.shape), kind, module, layout)
    nothing: Box = ((shape[0], shape[0]), *boxes.whole(shape[1:])) if shape else ()
    box = planner.slices({name: shape}, layout, {name: kind}).get(name, nothing)
    held = boxes.shape_of(box)
    if kind == "vocab":
        data = data[: held[0]]  # behind them come rows of padding
    if tuple(data.shape) != held:
        raise RoseError(
            f"{name}: its part here has the shape {tuple(data.shape)}, where {held} was expected",
            "live weights cannot follow how this layer is cut over ranks",
        )
    words = data.reshape(-1).view(_WORD_TYPES[data.element_size()])
    assert words.data_ptr() == data.data_ptr() or not words.numel()
    assert words.numel() == math.prod(held)
    return LiveParameter(name, as_bits(data[:0]).dtype, shape, box, words)


def _whole_shape(local: tuple[int, ...], kind: Kind, module: Any, layout: Layout) -> tuple[int, ...]:
    match kind:
        case "vocab":
            return (module.org_vocab_size, *local[1:])
        case "column":
            return (local[0] * layout.tp_size, *local[1:])
        case "row":
            return (local[0], local[1] * layout.tp_size, *local[2:])
        case "kv":
            return (local[0] // module.num_kv_heads * layout.kv_heads, *local[1:])
        case "replicated":
            return local
