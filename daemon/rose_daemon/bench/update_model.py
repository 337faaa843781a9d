"""A synthetic model of any size whose weights move as those of an Adam chain do."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rose.units import MIB
from rose.weights import tensorfile
from rose.weights.bits import Bits
from rose_daemon.bench.delta_data import adam_chain

LEARNING_RATE = 1.75e-6
"""About 1.9% of the weights change in a step."""
RING_ELEMENTS = 16 * MIB
"""Of the chain; larger models repeat it.  No format here looks for repetitions that far apart."""
_FILE_BYTES = 256 * MIB
_WIDTHS = ((64 * MIB, 2048), (4 * MIB, 512), (0, 64))
"""From how many elements on a model is how wide."""


def shapes(elements: int) -> dict[str, tuple[int, ...]]:
    """Parameters of a Llama-like model of about so many elements, an eighth of them embeddings."""
    width = next(width for least, width in _WIDTHS if elements >= least)
    inner, heads = width * 11 // 4, width // 4
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (width,),
        "mlp.down_proj": (width, inner),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "post_attention_layernorm": (width,),
        "self_attn.k_proj": (heads, width),
        "self_attn.o_proj": (width, width),
        "self_attn.q_proj": (width, width),
        "self_attn.v_proj": (heads, width),
    }
    per_layer = sum(int(np.prod(shape)) for shape in layer.values())
    layers = max(1, elements * 7 // 8 // per_layer)
    rows = max(1, (elements - layers * per_layer) // width)
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, width)}
    for number in range(layers):
        found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return found


class SyntheticModel:
    """Such a model at each of the last steps of a chain; step 0 is the checkpoint."""

    def __init__(self, elements: int, rings: npt.NDArray[np.uint16]) -> None:
        self._shapes = shapes(elements)
        self._rings = rings
        self.elements = sum(int(np.prod(shape)) for shape in self._shapes.values())

    @classmethod
    def make(cls, directory: Path, elements: int, steps: int, seed: int) -> SyntheticModel:
        """A model that can take so many steps, with its checkpoint in `directory`."""
        chain = adam_chain(min(RING_ELEMENTS, elements), LEARNING_RATE, seed)
        rings = np.stack(deque(chain, maxlen=steps + 1))
        directory.mkdir()
        np.save(directory / "rings.npy", rings)
        model = cls(elements, rings)
        (directory / "config.json").write_text(
            json.dumps(
                {
                    "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 2048,
                    "num_hidden_layers": 1, "torch_dtype": "bfloat16",
                }
            ),
            encoding="utf-8",
        )  # fmt: skip
        model._write_checkpoint(directory)
        return model

    @classmethod
    def open(cls, directory: Path, elements: int) -> SyntheticModel:
        """The model that `make` left there."""
        return cls(elements, np.load(directory / "rings.npy", mmap_mode="r"))

    def state(self, step: int) -> dict[str, Bits]:
        """All parameters after a step, in memory of their own."""
        words = np.empty(self.elements, np.uint16)
        ring = self._rings[step]
        for first in range(0, words.size, ring.size):
            part = words[first : first + ring.size]
            part[:] = ring[: part.size]
        state, first = {}, 0
        for name, shape in self._shapes.items():
            stop = first + int(np.prod(shape))
            state[name] = Bits("BF16", shape, words[first:stop])
            first = stop
        return state

    def _write_checkpoint(self, directory: Path) -> None:
        state = self.state(0)
        for number, names in enumerate(_files(state)):
            data = tensorfile.encode({name: state[name] for name in names}, {"format": "pt"})
            (directory / f"model-{number:05}.safetensors").write_bytes(data)


def _files(state: Mapping[str, Bits]) -> Sequence[list[str]]:
    """Names of the parameters by file."""
    found: list[list[str]] = [[]]
    room = _FILE_BYTES
    for name, bits in state.items():
        if found[-1] and bits.nbytes > room:
            found.append([])
            room = _FILE_BYTES
        found[-1].append(name)
        room -= bits.nbytes
    return found
