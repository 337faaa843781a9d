"""xxh3-128 digests: of parameters, of buckets, and of a model's form.

They find damage and mix-ups; they are no signature (whoever may write to the relay is trusted).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from rose.weights.bits import State

Readable: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]
"""Anything with a contiguous buffer."""

DIGEST_PATTERN = r"^[0-9a-f]{32}\Z"


def digest(data: Readable) -> str:
    """xxh3-128 of the bytes, as 32 lower-case hex digits."""
    return xxhash.xxh3_128_hexdigest(data.data if isinstance(data, np.ndarray) else data)


def digest_state(state: State) -> dict[str, str]:
    """Digest of every parameter's bytes."""
    return {name: digest(bits.words) for name, bits in state.items()}


def fingerprint(parameters: Iterable[tuple[str, str, tuple[int, ...]]]) -> str:
    """Digest of a model's form: (name, dtype, shape) of all parameters, in any order.

    Two models with the same fingerprint can exchange deltas; their values may differ.
    """
    return digest(msgspec.json.encode(sorted(parameters)))


def fingerprint_state(state: State) -> str:
    """`fingerprint` of a state."""
    return fingerprint((name, bits.dtype, bits.shape) for name, bits in state.items())
