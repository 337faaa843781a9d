"""Weights on a GPU: compared there with the version before, so that only what changed comes to the host.

    trainer's tensor ─┐                    indices, new bits ──▶ the host's copy: digests, self-check
                      ├─ compare, compact ─┤
    version before  ──┘                    ranks, steps      ──▶ symbols and rANS on the host

The version before is kept on the GPU beside the tensors.  Bytes and manifests are those of the same tensors
on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy.typing as npt
from rose_kernels import delta
from rose_kernels.delta.device import Device, DeviceArray, DeviceShard

from rose.errors import ConfigError
from rose.weights.bits import Bits, State, as_state, torch_dtype
from rose.weights.patches import Patch

_CUDA = "rose_kernels.delta.cuda"
"""Imported when it is used: it takes CuPy."""
Distant = Mapping[str, DeviceShard]
"""What of a state lies on a device, with its base: to be compared there."""


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """A tensor's bits on a device, flat."""

    dtype: str
    shape: tuple[int, ...]
    words: DeviceArray
    device: Device


Lay = Callable[[object], Laid | None]


def on_gpu(tensor: object) -> Laid | None:
    """The bits of a contiguous CUDA tensor of torch whose changes can be coded sparsely; else None."""
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is None or not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
        return None
    dtype = torch_dtype(tensor)
    if dtype is None or not delta.FORMATS[dtype].can_be_sparse or not tensor.is_contiguous():
        return None
    cuda = import_module(_CUDA)
    words = cuda.words(dtype, tensor)
    return Laid(dtype, tuple(int(size) for size in tensor.shape), words, cuda.gpu(words.device.id))


def require_cupy() -> None:
    """Raises ConfigError where CuPy does not import."""
    try:
        import_module(_CUDA)
    except ImportError as error:
        raise ConfigError(f"on_gpu takes CuPy: {error}", 'pip install "rose-coserve[gpu]"') from None


class DeviceBases:
    """The version before, where its tensors lie.  As much memory there as the tensors take."""

    def __init__(self, lay: Lay) -> None:
        self._lay = lay
        self._bases: dict[str, tuple[Device, DeviceArray]] = {}

    def compare(self, state: Mapping[str, object], held: State) -> tuple[dict[str, Bits], Distant]:
        """The state on the host, and what of it can be encoded where it lies.

        `held` is the version before.  A tensor that changed costs its changes' way to the host, and a copy of
        the held one in host memory; what lies elsewhere, or is of another form than before, comes whole.
        """
        laid = {name: found for name, value in state.items() if (found := self._lay(value)) is not None}
        laid = {name: each for name, each in laid.items() if _fits(each, held.get(name))}
        target = as_state({name: value for name, value in state.items() if name not in laid})
        shards: dict[str, DeviceShard] = {}
        for name, each in laid.items():
            device, xp = each.device, each.device.arrays
            with device.current():
                if self._bases.get(name, (None,))[0] is not device:
                    self._bases[name] = device, xp.asarray(held[name].words)
                base = self._bases[name][1]
                at = xp.flatnonzero(base != each.words)
                indices, values = device.to_host(at), device.to_host(each.words[at])
            shards[name] = DeviceShard(each.dtype, base, each.words, device)
            target[name] = _patched(held[name], indices, values)
        return dict(sorted(target.items())), shards

    def advance(self, patches: Iterable[Patch]) -> None:
        """A version is committed: it is what the next one is compared with."""
        for patch in patches:
            if patch.name not in self._bases:
                continue
            device, base = self._bases[patch.name]
            with device.current():
                values = device.arrays.asarray(patch.values)
                if patch.indices is None:
                    base[:] = values
                else:
                    base[device.arrays.asarray(patch.indices)] = values


def part_of(shard: DeviceShard, first: int, elements: int) -> DeviceShard:
    """A run of the shard's elements, as views."""
    here = slice(first, first + elements)
    return replace(shard, base=shard.base[here], target=shard.target[here])


def _fits(laid: Laid, held: Bits | None) -> bool:
    return held is not None and (held.dtype, held.shape) == (laid.dtype, laid.shape)


def _patched(held: Bits, indices: npt.NDArray[Any], values: npt.NDArray[Any]) -> Bits:
    """The held tensor itself if nothing changed."""
    if not indices.size:
        return held
    words = held.words.copy()
    words[indices] = values
    return Bits(held.dtype, held.shape, words)
