"""The delta formats of other systems, re-implemented to be measured beside ours.

They are written in NumPy over libzstd: their sizes are theirs, their speeds are those of this form of them.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rose.errors import NotReady

Words = npt.NDArray[Any]
Coded = Sequence[bytes]


class Peer(Protocol):
    """A delta format: `decode` turns the base into the target in place."""

    name: str

    def encode(self, base: Words, target: Words) -> Coded:
        """The delta as the buffers that would be sent."""
        ...

    def decode(self, coded: Coded, words: Words) -> None:
        """Apply the delta to `words`, which holds the base."""
        ...


class Zstd:
    """zstd level 1, from the system's library.  Raises NotReady where there is none."""

    def __init__(self) -> None:
        path = ctypes.util.find_library("zstd")
        if path is None:
            raise NotReady("libzstd is not installed", "on Debian or Ubuntu: apt-get install libzstd1")
        self._library = ctypes.CDLL(path)
        for name in ("ZSTD_compress", "ZSTD_decompress", "ZSTD_compressBound"):
            getattr(self._library, name).restype = ctypes.c_size_t

    def compress(self, data: Words) -> bytes:
        """The array's bytes, compressed, behind their length."""
        data = np.ascontiguousarray(data)
        out = np.empty(int(self._library.ZSTD_compressBound(ctypes.c_size_t(data.nbytes))), np.uint8)
        size = self._library.ZSTD_compress(
            ctypes.c_void_p(out.ctypes.data), ctypes.c_size_t(out.size), ctypes.c_void_p(data.ctypes.data),
            ctypes.c_size_t(data.nbytes), ctypes.c_int(1),
        )  # fmt: skip
        return data.nbytes.to_bytes(8, "little") + out[:size].tobytes()

    def expand(self, data: bytes, dtype: Any) -> Words:
        """What `compress` was given."""
        size = int.from_bytes(data[:8], "little")
        out = np.empty(size, np.uint8)
        done = self._library.ZSTD_decompress(
            ctypes.c_void_p(out.ctypes.data), ctypes.c_size_t(size), data[8:], ctypes.c_size_t(len(data) - 8)
        )
        assert done == size
        return out.view(dtype)


class Coo:
    """int32 positions and new values: the ROSE paper, SparseRL-Sync, vLLM's sparse patches."""

    name = "coo"

    def encode(self, base: Words, target: Words) -> Coded:
        """See `Peer`."""
        at = np.flatnonzero(base != target)
        return at.astype("<i4").tobytes(), target[at].tobytes()

    def decode(self, coded: Coded, words: Words) -> None:
        """See `Peer`."""
        words[np.frombuffer(coded[0], "<i4")] = np.frombuffer(coded[1], words.dtype)


class Dense:
    """All new values: systems that send whole weights."""

    name = "dense"

    def encode(self, base: Words, target: Words) -> Coded:
        """See `Peer`."""
        return (target.tobytes(),)

    def decode(self, coded: Coded, words: Words) -> None:
        """See `Peer`."""
        np.copyto(words, np.frombuffer(coded[0], words.dtype))


class CooZstd:
    """COO, both arrays compressed."""

    name = "coo+zstd"

    def __init__(self, zstd: Zstd) -> None:
        self._zstd = zstd

    def encode(self, base: Words, target: Words) -> Coded:
        """See `Peer`."""
        at = np.flatnonzero(base != target)
        return self._zstd.compress(at.astype("<i4")), self._zstd.compress(target[at])

    def decode(self, coded: Coded, words: Words) -> None:
        """See `Peer`."""
        words[self._zstd.expand(coded[0], "<i4")] = self._zstd.expand(coded[1], words.dtype)


class GapXorZstd:
    """16-bit gaps and XORs, compressed: NeMo-RL.  Longer gaps are bridged by changes of nothing."""

    name = "u16-gap+xor+zstd"

    def __init__(self, zstd: Zstd) -> None:
        self._zstd = zstd

    def encode(self, base: Words, target: Words) -> Coded:
        """See `Peer`."""
        at = np.flatnonzero(base != target)
        gaps = np.diff(at, prepend=0)
        bridges = gaps // 0xFFFF
        places = np.arange(at.size) + np.cumsum(bridges)
        short = np.full(at.size + int(bridges.sum()), 0xFFFF, "<u2")
        xors = np.zeros(short.size, base.dtype)
        short[places] = gaps - bridges * 0xFFFF
        xors[places] = base[at] ^ target[at]
        return self._zstd.compress(short), self._zstd.compress(xors)

    def decode(self, coded: Coded, words: Words) -> None:
        """See `Peer`."""
        at = np.cumsum(self._zstd.expand(coded[0], "<u2"), dtype=np.int64)
        words[at] ^= self._zstd.expand(coded[1], words.dtype)


class VarintZstd:
    """Gaps of 7 bits a byte and XORs, compressed."""

    name = "varint+zstd"

    def __init__(self, zstd: Zstd) -> None:
        self._zstd = zstd

    def encode(self, base: Words, target: Words) -> Coded:
        """See `Peer`."""
        at = np.flatnonzero(base != target)
        gaps = np.diff(at, prepend=0)
        lengths = 1 + (gaps >= 1 << 7) + (gaps >= 1 << 14) + (gaps >= 1 << 21) + (gaps >= 1 << 28)
        starts = np.cumsum(lengths) - lengths
        out = np.zeros(int(lengths.sum()), np.uint8)
        for place in range(int(lengths.max(initial=0))):
            here = lengths > place
            more = (lengths[here] > place + 1).astype(np.uint8) << 7
            out[starts[here] + place] = (gaps[here] >> 7 * place & 0x7F).astype(np.uint8) | more
        return self._zstd.compress(out), self._zstd.compress(base[at] ^ target[at])

    def decode(self, coded: Coded, words: Words) -> None:
        """See `Peer`."""
        data = self._zstd.expand(coded[0], np.uint8)
        ends = np.flatnonzero(data < 0x80)
        starts = np.append(0, ends[:-1] + 1)
        gaps = np.zeros(ends.size, np.int64)
        for place in range(int((ends - starts).max(initial=-1)) + 1):
            here = starts + place <= ends
            gaps[here] |= (data[starts[here] + place] & 0x7F).astype(np.int64) << 7 * place
        words[np.cumsum(gaps)] ^= self._zstd.expand(coded[1], words.dtype)


class DenseXorZstd:
    """The XOR of everything, compressed: slime, miles, SkyRL."""

    name = "dense-xor+zstd"

    def __init__(self, zstd: Zstd) -> None:
        self._zstd = zstd

    def encode(self, base: Words, target: Words) -> Coded:
        """See `Peer`."""
        return (self._zstd.compress(base ^ target),)

    def decode(self, coded: Coded, words: Words) -> None:
        """See `Peer`."""
        words ^= self._zstd.expand(coded[0], words.dtype)


LINKED: Mapping[str, Callable[[], Peer]] = {"coo": Coo, "dense": Dense}
"""Those that `rose bench link` sends beside ours."""


def peers() -> list[Peer]:
    """All of them that this machine can run: without libzstd, only COO."""
    try:
        zstd = Zstd()
    except NotReady:
        return [Coo()]
    return [Coo(), CooZstd(zstd), GapXorZstd(zstd), VarintZstd(zstd), DenseXorZstd(zstd)]
