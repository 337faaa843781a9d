"""Element formats: how wide an element is, where its exponent lies, and whether it is a float."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""Flat array of the raw bits of elements: little-endian unsigned words as wide as an element."""
Bytes: TypeAlias = npt.NDArray[np.uint8]
Indices: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """One row of the table in docs/delta-format.md; `exponent_bits` 0 for what is no float."""

    code: int
    name: str
    itemsize: int
    exponent_shift: int = 0
    exponent_bits: int = 0

    @property
    def word(self) -> np.dtype[Any]:
        """NumPy dtype of an element's raw bits."""
        return np.dtype(f"<u{self.itemsize}")

    @property
    def exponent_mask(self) -> int:
        """The exponent is `(bits >> exponent_shift) & exponent_mask`."""
        return (1 << self.exponent_bits) - 1

    @property
    def is_float(self) -> bool:
        """Whether steps count representable values rather than integers."""
        return self.exponent_bits > 0

    @property
    def can_be_sparse(self) -> bool:
        """Whether changes can be coded by exponent class: floats of 8 or 16 bits."""
        return self.is_float and self.itemsize <= 2


_FORMATS = (
    ElementFormat(0, "BF16", 2, 7, 8),
    ElementFormat(1, "F16", 2, 10, 5),
    ElementFormat(2, "F8_E4M3", 1, 3, 4),
    ElementFormat(3, "F8_E5M2", 1, 2, 5),
    ElementFormat(4, "F32", 4, 23, 8),
    ElementFormat(5, "F64", 8, 52, 11),
    ElementFormat(8, "U8", 1),
    ElementFormat(9, "U16", 2),
    ElementFormat(10, "U32", 4),
    ElementFormat(11, "U64", 8),
)

BY_CODE: Mapping[int, ElementFormat] = {item.code: item for item in _FORMATS}
BY_NAME: Mapping[str, ElementFormat] = {item.name: item for item in _FORMATS} | {
    other: next(item for item in _FORMATS if item.name == name)
    for other, name in (
        ("BOOL", "U8"), ("I8", "U8"), ("F8_E8M0", "U8"), ("I16", "U16"), ("I32", "U32"), ("I64", "U64"),
    )
}  # fmt: skip
"""By safetensors dtype name; integers and anything quantised by their width alone."""


def order(words: Words, element: ElementFormat) -> Words:
    """Bits as unsigned integers whose differences, modulo the width, count representable values; and back.

    Floats are sign and magnitude; inverting the magnitude of negative ones makes them two's complement, in
    the order of their values with -0 just below +0.  Doing it twice gives the bits again.  Integers stay as
    they are.
    """
    if not element.is_float:
        return words
    sign_bit = 8 * element.itemsize - 1
    magnitude = words.dtype.type((1 << sign_bit) - 1)
    return np.asarray(words ^ (words >> sign_bit) * magnitude, words.dtype)
