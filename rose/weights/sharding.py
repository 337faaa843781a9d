"""How a trainer's ranks hold a model: the rectangles of each, and which of them pushes what.

Nothing is sent here: where every rank's part lies follows from the placements that all of them know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from rose.errors import ConfigError
from rose.weights import boxes, planner
from rose.weights.bits import UnsupportedTensor
from rose.weights.boxes import Box, Shape
from rose.weights.planner import Layout, Read


@dataclass(frozen=True)
class Sharding:
    """`shapes` of whole parameters by checkpoint name, and per rank the boxes it holds."""

    shapes: Mapping[str, Shape]
    held: tuple[Mapping[str, Box], ...]

    @classmethod
    def of_layouts(cls, shapes: Mapping[str, Shape], layouts: Sequence[Layout]) -> Self:
        """Tensor, pipeline and expert parallelism, a layout per rank.  Raises ConfigError."""
        return cls(shapes, tuple(planner.slices(shapes, layout) for layout in layouts))

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Any], world: int) -> Self:
        """What a rank's state dict says of all ranks: DTensors by their placements, others are replicated.

        FSDP2 (`fully_shard`) makes DTensors.  Raises UnsupportedTensor for placements that cannot be
        published in parts.
        """
        held: list[dict[str, Box]] = [{} for _ in range(world)]
        for name, tensor in tensors.items():
            for rank, box in enumerate(_boxes_of(name, tensor, world)):
                if box is not None and boxes.size_of(box):
                    held[rank][name] = box
        return cls({name: tuple(tensor.shape) for name, tensor in tensors.items()}, tuple(held))

    @cached_property
    def pushes(self) -> tuple[tuple[Read, ...], ...]:
        """Per rank the parts it pushes: every element of the model once."""
        return planner.writers(self.held)

    def require_whole(self) -> None:
        """Raises ConfigError if some element of a parameter is with no rank."""
        counts = dict.fromkeys(self.shapes, 0)
        for pushes in self.pushes:
            for part in pushes:
                counts[part.name] += boxes.size_of(part.box)
        for name, shape in self.shapes.items():
            if counts[name] != boxes.size_of(boxes.whole(shape)):
                raise ConfigError(f"{name}: no rank holds all of its parts, so it cannot be published")


def local_tensor(tensor: Any) -> Any:
    """The part of a DTensor that is on this rank; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _boxes_of(name: str, tensor: Any, world: int) -> list[Box | None]:
    """What each rank holds of a tensor; None: it is outside the tensor's mesh."""
    shape = tuple(tensor.shape)
    if not hasattr(tensor, "placements"):
        return [boxes.whole(shape)] * world
    placements = [_placement(name, each) for each in tensor.placements]
    mesh = np.asarray(tensor.device_mesh.mesh)
    found: list[Box | None] = [None] * world
    for coordinates in np.ndindex(mesh.shape):
        found[int(mesh[coordinates])] = planner.placed(shape, mesh.shape, coordinates, placements)
    return found


def _placement(name: str, placement: Any) -> planner.Shard | None:
    kind = type(placement).__name__
    if kind == "Shard":
        return planner.Shard(int(placement.dim))
    if kind == "Replicate":
        return None
    raise UnsupportedTensor(f"{name}: a tensor placed as {placement} cannot be published in parts")
