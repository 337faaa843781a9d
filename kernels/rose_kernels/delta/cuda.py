"""Deltas of tensors on an NVIDIA GPU, through CuPy: compared and listed there, entropy-coded on the host.

group = encode_group([device_shard("BF16", old, new)])      # torch tensors or CuPy arrays
The bytes are those of the same shards on the host.  Importing this needs CuPy (extra `gpu`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from rose_kernels.delta.choice import choose_plan
from rose_kernels.delta.codec import Settings, encode_group
from rose_kernels.delta.device import SOURCE, DeviceArray, DeviceShard
from rose_kernels.delta.elements import BY_NAME

try:
    import cupy
except ImportError as error:
    raise ImportError(
        f"rose_kernels.delta.cuda needs CuPy, which does not import here ({error}): pip install cupy-cuda13x",
        name=error.name,
    ) from error

_INTEGERS: Mapping[int, str] = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_CHECK_ELEMENTS = 1 << 29
_CHECK_IDENTITY_ELEMENTS = (1 << 24) + 12345
_CHECK_BITS_ELEMENTS = 1 << 20
_CHECK_ROUNDS = 3
_CHECK_THREADS = 4


class CupyDevice:
    """One GPU: see `device.Device`."""

    arrays: Any = cupy

    def __init__(self, number: int) -> None:
        self._number = number
        self._module = cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=("--std=c++17",))

    def current(self) -> AbstractContextManager[object]:
        """See `device.Device`."""
        chosen: AbstractContextManager[object] = cupy.cuda.Device(self._number)
        return chosen

    def run(self, kernel: str, blocks: int, threads: int, *arguments: object) -> None:
        """See `device.Device`."""
        given = tuple(
            np.int64(item or 0) if item is None or isinstance(item, int) else item for item in arguments
        )
        self._module.get_function(kernel)((blocks,), (threads,), given)

    def to_host(self, array: DeviceArray) -> npt.NDArray[Any]:
        """See `device.Device`."""
        return np.asarray(cupy.asnumpy(array))


@cache
def gpu(number: int) -> CupyDevice:
    """A GPU by its CUDA ordinal, with the kernels compiled for it; CuPy keeps those on disk."""
    return CupyDevice(number)


def words(dtype: str, tensor: Any) -> DeviceArray:
    """The bits of a contiguous torch tensor or CuPy array of this safetensors dtype, flat, without a copy.

    Work queued on torch's current stream is waited for, on the GPU.  Raises ValueError.
    """
    element = BY_NAME[dtype]
    if not isinstance(tensor, cupy.ndarray):
        if not (tensor.is_cuda and tensor.is_contiguous() and tensor.element_size() == element.itemsize):
            raise ValueError(f"not a contiguous {dtype} tensor on a GPU")
        # CuPy knows no bfloat16 or float8.
        integers = getattr(import_module("torch"), _INTEGERS[element.itemsize])
        tensor = cupy.from_dlpack(tensor.detach().reshape(-1).view(integers))
    if tensor.dtype.itemsize != element.itemsize:
        raise ValueError(f"{tensor.dtype} is not as wide as {dtype}")
    return tensor.reshape(-1).view(element.word)


def device_shard(
    dtype: str,
    base: Any,
    target: Any,
    history: Any = None,
    digests: tuple[bytes | None, bytes | None] = (None, None),
) -> DeviceShard:
    """A shard for `encode_group` from torch tensors or CuPy arrays, of one GPU."""
    old, new = words(dtype, base), words(dtype, target)
    past = None if history is None else words("U8", history)
    if any(item is not None and item.device != new.device for item in (old, past)):
        raise ValueError("base, target and history lie on different GPUs")
    return DeviceShard(dtype, old, new, gpu(new.device.id), past, digests)


# ---- a check on a real GPU ----------------------------------------------------------------------


def gpu_check() -> dict[str, float | int | str]:
    """Figures of `make gpu-check`: the same bytes as on the host, and how fast 1 GiB of bf16 is gone through.

    Needs torch.  Raises AssertionError where device and host differ.
    """
    settings = Settings(threads=_CHECK_THREADS)
    old, new = _pair(_CHECK_IDENTITY_ELEMENTS)
    shard = device_shard("BF16", old, new)
    group = encode_group([shard], settings)
    assert group == encode_group([shard.on_host()], settings), "device and host give different bytes"
    for dtype in ("BF16", "F16", "F8_E4M3", "F8_E5M2"):  # any bits, NaN and infinities among them
        few = device_shard(dtype, *_random_bits(dtype))
        assert encode_group([few]) == encode_group([few.on_host()]), f"{dtype}: different bytes"
    del shard, old, new
    shard = device_shard("BF16", *_pair(_CHECK_ELEMENTS))
    gigabytes = shard.target.nbytes / 1e9
    plan = choose_plan(shard.element, [shard], settings.classes, settings.value_classes)
    list_s = _fastest_s(lambda: shard.changes(plan, 1 << settings.chunk_log2))
    encode_s = _fastest_s(lambda: encode_group([shard], settings))
    copy_s = _fastest_s(lambda: cupy.asnumpy(shard.target))
    return {
        "identical bytes": "BF16, F16, F8_E4M3, F8_E5M2",
        "changed %": 100 * group.shards[0].changed / _CHECK_IDENTITY_ELEMENTS,
        "B a change": group.nbytes / max(1, group.shards[0].changed),
        "list GB/s": gigabytes / list_s,
        f"encode GB/s, {_CHECK_THREADS} threads": gigabytes / encode_s,
        "plain copy to host GB/s": gigabytes / copy_s,
    }


def _pair(elements: int) -> tuple[Any, Any]:
    """bf16 weights before and after a step as Adam makes it: all moved as far, about 1 % over a boundary."""
    torch = import_module("torch")
    torch.manual_seed(7)
    before = torch.randn(elements, device="cuda").mul_(0.02)
    old = before.to(torch.bfloat16)
    before += 1.5e-6 * torch.randn(elements, device="cuda").sign_()
    return old, before.to(torch.bfloat16)


def _random_bits(dtype: str) -> list[Any]:
    """Any bits, and others: a tenth of the elements differ."""
    rng = np.random.default_rng(7)
    word = BY_NAME[dtype].word
    old = rng.integers(0, 1 << 8 * word.itemsize, _CHECK_BITS_ELEMENTS).astype(word)
    new = np.where(rng.random(old.size) < 0.1, rng.permutation(old), old).astype(word)
    return [cupy.asarray(old), cupy.asarray(new)]


def _fastest_s(call: Callable[[], object]) -> float:
    """Of a few calls after one that warms up; each ends with its outcome on the host."""
    times = []
    for _ in range(_CHECK_ROUNDS + 1):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times[1:])
