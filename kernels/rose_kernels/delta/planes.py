"""The dense mode: elements as byte planes, each raw, constant, or order-0 coded.

For what has no base (anchors), what changed nearly everywhere, and formats without exponent classes.
"""

from __future__ import annotations

import numpy as np

from rose_kernels.delta.buffers import Cursor
from rose_kernels.delta.elements import Bytes, ElementFormat, Words, order
from rose_kernels.delta.errors import CorruptDelta
from rose_kernels.delta.kernel import Kernels
from rose_kernels.delta.tables import frequencies, get_frequencies, put_frequencies

_RAW, _CONSTANT, _CODED = 0, 1, 2


def encode(kernels: Kernels, element: ElementFormat, base: Words | None, target: Words) -> bytes:
    """One chunk: as steps from `base`, or by itself if that is None.  At most one byte a plane above raw."""
    numbers = _to_numbers(element, base, target)
    planes = numbers.view(np.uint8).reshape(-1, element.itemsize)
    return b"".join(
        _encode_plane(kernels, np.ascontiguousarray(planes[:, place])) for place in range(element.itemsize)
    )


def decode(
    kernels: Kernels, element: ElementFormat, base: Words | None, payload: memoryview, count: int
) -> Words:
    """The chunk's new bits.  Raises CorruptDelta."""
    cursor = Cursor(payload)
    planes = np.empty((count, element.itemsize), np.uint8)
    for place in range(element.itemsize):
        planes[:, place] = _decode_plane(kernels, cursor, count)
    if cursor.left:
        raise CorruptDelta(f"{cursor.left} bytes after the last plane")
    return _from_numbers(element, base, planes.view(element.word).reshape(-1))


def _to_numbers(element: ElementFormat, base: Words | None, target: Words) -> Words:
    top = 8 * element.itemsize - 1
    if base is None:
        if not element.is_float:
            return target.astype(element.word)  # a copy of its own: it is viewed as bytes
        return (target << 1 | target >> top).astype(element.word)  # the exponent into the top byte
    step = order(target, element) - order(base, element)
    sign = np.where(step >> top != 0, ~step.dtype.type(0), step.dtype.type(0))
    return np.asarray((step << 1) ^ sign, element.word)


def _from_numbers(element: ElementFormat, base: Words | None, numbers: Words) -> Words:
    top = 8 * element.itemsize - 1
    if base is None:
        if not element.is_float:
            return numbers
        return (numbers >> 1 | numbers << top).astype(element.word)
    step = numbers >> 1 ^ np.where(numbers & 1 != 0, ~numbers.dtype.type(0), numbers.dtype.type(0))
    return order((order(base, element) + step).astype(element.word), element)


def _encode_plane(kernels: Kernels, plane: Bytes) -> bytes:
    histogram = np.bincount(plane, minlength=256)
    if histogram[plane[0]] == plane.size:
        return bytes((_CONSTANT, plane[0]))
    table = frequencies(histogram.reshape(1, -1))[0]
    entropy = float(-(histogram * np.log2(np.maximum(table, 1) / 4096.0)).sum()) / 8
    if entropy < plane.size:
        coded = kernels.pack_plane(plane, table)
        whole = bytes((_CODED,)) + put_frequencies(table) + len(coded).to_bytes(4, "little") + coded
        if len(whole) <= plane.size:
            return whole
    return bytes((_RAW,)) + plane.tobytes()


def _decode_plane(kernels: Kernels, cursor: Cursor, count: int) -> Bytes:
    kind = cursor.uint(1)
    if kind == _RAW:
        return np.frombuffer(cursor.take(count), np.uint8)
    if kind == _CONSTANT:
        return np.full(count, cursor.uint(1), np.uint8)
    if kind != _CODED:
        raise CorruptDelta(f"a plane of unknown kind {kind}")
    table = get_frequencies(cursor, 256)
    if not table.any():
        raise CorruptDelta("a coded plane without symbols")
    return kernels.unpack_plane(cursor.take(cursor.uint(4)), table, count)
