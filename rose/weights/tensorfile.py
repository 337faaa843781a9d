"""The safetensors format: written plainly, read with every bound checked, without copies.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the data).  The
`safetensors` package cannot hand out views of bfloat16 to NumPy; our files stay readable by it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from rose.errors import CorruptDelta
from rose.weights.bits import ITEMSIZE, Bits, word_dtype

HEADER_BYTES_MAX = 100_000_000
"""The limit of the safetensors package."""
_METADATA = "__metadata__"
_ALIGN = 8


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class TensorFile:
    """A parsed file: its metadata, and its tensors as views of the buffer."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, Bits]


def encode(tensors: Mapping[str, Bits], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file.  Wide dtypes come first, so that every tensor is aligned."""
    order = sorted(tensors, key=lambda name: (-ITEMSIZE[tensors[name].dtype], name))
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        bits = tensors[name]
        header[name] = _Entry(bits.dtype, list(bits.shape), (offset, offset + bits.nbytes))
        offset += bits.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGN)
    parts: list[bytes | memoryview] = [
        len(text).to_bytes(8, "little"),
        text,
        *(tensors[name].words.view(np.uint8).data for name in order),
    ]
    return b"".join(parts)


def encode_blobs(blobs: Mapping[str, bytes], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """A safetensors file of byte strings, in their order; answers it, and where in it each begins."""
    header: dict[str, object] = {_METADATA: dict(metadata)}
    offsets = list(itertools.accumulate(map(len, blobs.values()), initial=0))
    for name, start, stop in zip(blobs, offsets, offsets[1:], strict=False):
        header[name] = _Entry("U8", [stop - start], (start, stop))
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGN)
    body = 8 + len(text)
    data = b"".join([len(text).to_bytes(8, "little"), text, *blobs.values()])
    return data, [body + offset for offset in offsets[:-1]]


def parse(data: npt.NDArray[np.uint8]) -> TensorFile:
    """Parse a whole file held (or mapped) in memory.  Raises CorruptDelta, whatever the bytes are."""
    if data.size < 8:
        raise CorruptDelta("not a safetensors file: shorter than its header length")
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    if header_bytes > min(HEADER_BYTES_MAX, data.size - 8):
        raise CorruptDelta(
            f"not a safetensors file: a header of {header_bytes} bytes in a file of {data.size}"
        )
    try:
        raw = msgspec.json.decode(data[8 : 8 + header_bytes].tobytes(), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(_METADATA, b"{}"), type=dict[str, str])
        entries = {name: msgspec.json.decode(text, type=_Entry) for name, text in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptDelta(f"not a safetensors file: {error}") from None
    return TensorFile(metadata, _views(data[8 + header_bytes :], entries))


def _views(body: npt.NDArray[np.uint8], entries: Mapping[str, _Entry]) -> dict[str, Bits]:
    views: dict[str, Bits] = {}
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if entry.dtype not in ITEMSIZE:
            raise CorruptDelta(f"{name[:80]}: dtype {entry.dtype[:40]!r} is not supported")
        if any(size < 0 for size in entry.shape) or len(entry.shape) > 8:
            raise CorruptDelta(f"{name[:80]}: bad shape")
        if (
            start != position
            or stop - start != math.prod(entry.shape) * ITEMSIZE[entry.dtype]
            or stop > body.size
        ):
            raise CorruptDelta(f"{name[:80]}: its data does not lie where the header says")
        words = _aligned(body[start:stop], ITEMSIZE[entry.dtype]).view(word_dtype(entry.dtype))
        views[name] = Bits(entry.dtype, tuple(entry.shape), words)
        position = stop
    if position != body.size:
        raise CorruptDelta(f"{body.size - position} bytes that belong to no tensor")
    return views


def _aligned(raw: npt.NDArray[np.uint8], itemsize: int) -> npt.NDArray[np.uint8]:
    """`raw`, or a copy of it where foreign files put wide elements at odd addresses."""
    return raw if raw.ctypes.data % itemsize == 0 else raw.copy()
