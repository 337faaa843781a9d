"""Tensors as raw bits: what every part of the weight path works on.

Weights are compared, hashed and shipped by their bytes, never by their values: NaN payloads, negative
zeros and the dtypes that NumPy lacks (bfloat16, float8) all survive.  A tensor is its safetensors dtype
name, its shape, and one flat array of unsigned little-endian words as wide as its elements.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rose.errors import RoseError

Words: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""Flat array of uint8, uint16, uint32 or uint64, little-endian."""

ITEMSIZE: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes per element of the safetensors dtypes that can be shipped."""

_TORCH_NAMES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0", "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16",
    "uint32": "U32", "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64",
}  # fmt: skip

_NUMPY_NAMES: Mapping[str, str] = {
    "b1": "BOOL", "u1": "U8", "i1": "I8", "u2": "U16", "i2": "I16", "f2": "F16",
    "u4": "U32", "i4": "I32", "f4": "F32", "u8": "U64", "i8": "I64", "f8": "F64",
}  # fmt: skip

_WORD_DTYPES: Mapping[int, np.dtype[Any]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}


class UnsupportedTensor(RoseError):
    """A value of the state is not a tensor that can be shipped."""


@dataclass(frozen=True, slots=True, eq=False)
class Bits:
    """One tensor: safetensors dtype name, shape, flat words (length = product of the shape)."""

    dtype: str
    shape: tuple[int, ...]
    words: Words

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise UnsupportedTensor(f"dtype {self.dtype} cannot be shipped", f"known: {', '.join(ITEMSIZE)}")
        if self.words.dtype != word_dtype(self.dtype) or self.words.shape != (math.prod(self.shape),):
            raise UnsupportedTensor(
                f"{self.words.size} words of {self.words.dtype} are no {self.dtype} of shape {self.shape}"
            )

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.words.nbytes

    def copy(self) -> Bits:
        """The same tensor in memory of its own."""
        return Bits(self.dtype, self.shape, self.words.copy())

    def same_form(self, other: Bits) -> bool:
        """Whether dtype and shape agree."""
        return self.dtype == other.dtype and self.shape == other.shape


State: TypeAlias = Mapping[str, Bits]
"""Parameters by checkpoint name."""


def word_dtype(dtype: str) -> np.dtype[Any]:
    """The unsigned NumPy dtype that holds one element of a safetensors dtype."""
    return _WORD_DTYPES[ITEMSIZE[dtype]]


def empty_buffer(size: int) -> memoryview:
    """Writable memory of `size` bytes, not cleared.

    Clearing a bucket costs as much as receiving it, and NumPy asks the kernel for large pages.
    """
    return np.empty(size, dtype=np.uint8).data


def as_bits(value: object) -> Bits:
    """View a torch tensor (any device), a NumPy array or Bits as Bits, without a copy where possible.

    NumPy has no bfloat16: pass such bits as `Bits("BF16", shape, words)`.  Raises UnsupportedTensor.
    """
    if isinstance(value, Bits):
        return value
    if isinstance(value, np.ndarray):
        return _from_numpy(value)
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it; we never do
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_torch(value, torch)
    raise UnsupportedTensor(f"a {type(value).__name__} is not a tensor")


def as_state(tensors: Mapping[str, object]) -> dict[str, Bits]:
    """`as_bits` of every parameter, in order of name.  Raises UnsupportedTensor naming the parameter."""
    state: dict[str, Bits] = {}
    for name in sorted(tensors):
        try:
            state[name] = as_bits(tensors[name])
        except UnsupportedTensor as error:
            raise UnsupportedTensor(f"{name}: {error.what}", error.hint) from None
    return state


def _from_numpy(array: npt.NDArray[Any]) -> Bits:
    dtype = _NUMPY_NAMES.get(array.dtype.str[1:])
    if dtype is None:
        raise UnsupportedTensor(f"NumPy dtype {array.dtype} cannot be shipped")
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1)
    return Bits(dtype, tuple(array.shape), little.view(word_dtype(dtype)))


def torch_dtype(tensor: Any) -> str | None:
    """The safetensors dtype name of a torch tensor; None if it has none."""
    return _TORCH_NAMES.get(str(tensor.dtype).removeprefix("torch."))


def _from_torch(tensor: Any, torch: Any) -> Bits:
    dtype = torch_dtype(tensor)
    if dtype is None or tensor.layout != torch.strided:
        raise UnsupportedTensor(f"torch dtype {tensor.dtype} cannot be shipped")
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ITEMSIZE[dtype]]
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(integers).numpy()
    return Bits(dtype, tuple(int(size) for size in tensor.shape), flat.view(word_dtype(dtype)))
