"""The C kernels, built with the package and called through ctypes, which releases the GIL for each call."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rose_kernels.delta.elements import Bytes, Indices, Words
from rose_kernels.delta.errors import CorruptDelta
from rose_kernels.delta.kernel import Changes, Histograms, SpanSymbols
from rose_kernels.delta.plan import Plan
from rose_kernels.delta.tables import GAP_SYMBOLS, SLOTS, VALUE_SYMBOLS, Frequencies, GroupTables
from rose_kernels.library import built_library

_ABI = 1
_CORRUPT = -1
_LIBRARY = "_rose_delta"
_ENCODER_SYMBOL_BYTES = 16

_FUNCTIONS = (
    "rose_encoder_tables", "rose_decoder_tables", "rose_scan", "rose_scan_scratch_bytes", "rose_pack",
    "rose_pack_bound", "rose_unpack", "rose_unpack_scratch_bytes", "rose_apply", "rose_apply_scratch_bytes",
    "rose_scatter", "rose_exchange", "rose_bytes_pack", "rose_bytes_pack_bound", "rose_bytes_unpack",
)  # fmt: skip


def library_path() -> Path | None:
    """Where the compiled library lies, or None if none was built for this Python."""
    return built_library(_LIBRARY)


def load(path: Path, *, portable: bool = False) -> NativeKernels:
    """Kernels from a library; `portable` leaves out this CPU's vector instructions.

    Raises OSError if it cannot be loaded or is not of this version.
    """
    if sys.byteorder != "little":
        raise OSError("the C kernels are for little-endian machines")
    library = ctypes.CDLL(str(path))
    if not hasattr(library, "rose_delta_abi") or library.rose_delta_abi() != _ABI:
        raise OSError(f"{path} is not of this version of ROSE")
    if missing := [name for name in _FUNCTIONS if not hasattr(library, name)]:
        raise OSError(f"{path} was built of older sources: it has no {missing[0]}")
    for name in _FUNCTIONS:
        getattr(library, name).restype = ctypes.c_int64
    return NativeKernels(library, portable=portable)


def _at(array: npt.NDArray[Any] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def _checked(result: int) -> int:
    if result == _CORRUPT:
        raise CorruptDelta("a chunk does not decode")
    assert result >= 0, "a kernel was called with buffers that are too small"
    return result


def _require_fit(base: Words, plan: Plan, history: Bytes | None) -> None:
    """What the kernels cannot check: dtype, contiguity, alignment, and that a history covers the base."""
    if base.dtype != plan.element.word or not (base.flags.c_contiguous and base.flags.aligned):
        raise ValueError(f"{base.dtype} is not aligned, contiguous {plan.element.word}")
    if (history is not None) != plan.stateful:
        raise ValueError("a history is given exactly if the tables use one")
    if history is not None and (
        history.dtype != np.uint8 or history.shape != base.shape or not history.flags.c_contiguous
    ):
        raise ValueError("a history has one byte per element")


class _Arena(threading.local):
    """Per thread: buffers of the worst case, kept between calls.  Untouched pages cost no memory."""

    def __init__(self) -> None:
        self._held: dict[str, npt.NDArray[Any]] = {}

    def take(self, name: str, count: int, dtype: Any) -> npt.NDArray[Any]:
        held = self._held.get(name)
        if held is None or held.size < count or held.dtype != dtype:
            held = self._held[name] = np.empty(max(count, 1), dtype)
        return held


class _Packer:
    def __init__(self, kernels: NativeKernels, tables: GroupTables) -> None:
        self._kernels = kernels
        self._expected = np.ascontiguousarray(tables.expected, np.uint32)
        self._gaps = kernels.encoder_tables(tables.gaps)
        self._values = kernels.encoder_tables(tables.values)
        self._value_contexts = len(tables.values)

    def pack(self, symbols: SpanSymbols) -> list[bytes]:
        library = self._kernels.library
        chunks, contexts = symbols.counts.shape
        raw_bytes = int(symbols.raw_ends[-1]) if chunks else 0
        capacity = _checked(library.rose_pack_bound(*_int64(symbols.changed, raw_bytes, contexts, chunks)))
        out = self._kernels.arena.take("packed", capacity, np.uint8)
        ends = np.empty(chunks, np.int64)
        _checked(
            library.rose_pack(
                _at(symbols.counts), _at(self._expected), *_int64(contexts, chunks), _at(symbols.gap_symbols),
                _at(symbols.value_symbols), _at(symbols.value_contexts), *_int64(symbols.changed),
                _at(symbols.raw), _at(symbols.raw_ends), _at(self._gaps), _at(self._values),
                *_int64(self._value_contexts), _at(out), *_int64(out.size), _at(ends),
            )
        )  # fmt: skip
        starts = [0, *ends.tolist()]
        return [out[start:end].tobytes() for start, end in pairwise(starts)]


class _Unpacker:
    def __init__(self, kernels: NativeKernels, tables: GroupTables) -> None:
        self._kernels = kernels
        self._plan = tables.plan
        self._expected = np.ascontiguousarray(tables.expected, np.uint32)
        self._gaps = kernels.decoder_tables(tables.gaps)
        self._values = kernels.decoder_tables(tables.values)

    def unpack(
        self,
        payloads: Sequence[memoryview],
        base: Words,
        history: Bytes | None,
        chunk_elements: int,
        first: int,
    ) -> tuple[Indices, Words]:
        joined, ends = self._joined(payloads, base, history, chunk_elements)
        library, arena = self._kernels.library, self._kernels.arena
        scratch = arena.take(
            "ranks", int(library.rose_unpack_scratch_bytes(*_int64(chunk_elements))), np.uint8
        )
        indices = arena.take("indices", base.size, np.int64)
        values = arena.take(f"values{base.itemsize}", base.size, base.dtype)
        found = np.empty(len(payloads), np.int64)
        count = _checked(
            library.rose_unpack(
                _at(self._plan.packed), _at(joined), _at(ends), _at(base), _at(history),
                *_int64(base.size, chunk_elements, first), _at(self._expected), _at(self._gaps),
                _at(self._values), _at(scratch), *_int64(scratch.size), _at(indices), _at(values), _at(found),
            )
        )  # fmt: skip
        return indices[:count].copy(), values[:count].copy()

    def apply(
        self, payloads: Sequence[memoryview], base: Words, history: Bytes | None, chunk_elements: int
    ) -> int:
        joined, ends = self._joined(payloads, base, history, chunk_elements)
        if not base.flags.writeable:
            raise ValueError("the base is read-only")
        library = self._kernels.library
        scratch_bytes = int(library.rose_apply_scratch_bytes(*_int64(chunk_elements)))
        scratch = self._kernels.arena.take("apply", scratch_bytes, np.uint8)
        return _checked(
            library.rose_apply(
                _at(self._plan.packed), _at(joined), _at(ends), _at(base), _at(history),
                *_int64(base.size, chunk_elements), _at(self._expected), _at(self._gaps), _at(self._values),
                _at(scratch), *_int64(scratch.size),
            )
        )  # fmt: skip

    def _joined(
        self, payloads: Sequence[memoryview], base: Words, history: Bytes | None, chunk_elements: int
    ) -> tuple[Bytes, Indices]:
        _require_fit(base, self._plan, history)
        if len(payloads) != -(-base.size // chunk_elements):
            raise ValueError(f"{len(payloads)} payloads for {base.size} elements")
        return np.frombuffer(b"".join(payloads), np.uint8), np.cumsum([len(item) for item in payloads])


def _int64(*numbers: int) -> tuple[ctypes.c_int64, ...]:
    return tuple(ctypes.c_int64(number) for number in numbers)


class NativeKernels:
    """See `kernel.Kernels`."""

    def __init__(self, library: Any, *, portable: bool) -> None:
        self.library = library
        self.arena = _Arena()
        self.name = "avx2" if library.rose_delta_use(int(not portable)) else "portable"

    def encoder_tables(self, rows: Frequencies) -> Bytes:
        """Frequencies made ready for encoding."""
        rows = np.ascontiguousarray(rows)
        out = np.zeros(rows.size * _ENCODER_SYMBOL_BYTES, np.uint8)
        _checked(self.library.rose_encoder_tables(_at(rows), *_int64(*rows.shape), _at(out)))
        return out

    def decoder_tables(self, rows: Frequencies) -> npt.NDArray[np.uint32]:
        """Frequencies made ready for decoding."""
        rows = np.ascontiguousarray(rows)
        out = np.empty((len(rows), SLOTS), np.uint32)
        _checked(self.library.rose_decoder_tables(_at(rows), *_int64(*rows.shape), _at(out)))
        return out

    def scan(
        self, plan: Plan, base: Words, target: Words, history: Bytes | None, chunk_elements: int
    ) -> tuple[SpanSymbols, Histograms]:
        """See `kernel.Kernels`."""
        _require_fit(base, plan, history)
        _require_fit(target, plan, history)
        if base.shape != target.shape:
            raise ValueError("base and target differ in size")
        n, chunks = base.size, -(-base.size // chunk_elements)

        def scan(*out: Any) -> int:
            return int(
                self.library.rose_scan(
                    _at(plan.packed), _at(base), _at(target), _at(history), *_int64(n, chunk_elements), *out
                )
            )

        return self._symbols(plan, scan, n, chunks, chunk_elements)

    def symbolise(self, plan: Plan, changes: Changes) -> tuple[SpanSymbols, Histograms]:
        """See `kernel.Kernels`."""
        lists = (changes.places, np.uint32), (changes.steps, np.uint16), (changes.ends, np.int64)
        if any(array.dtype != dtype or not array.flags.c_contiguous for array, dtype in lists):
            raise ValueError("a list of changes is of contiguous uint32, uint16 and int64")
        chunks = changes.ends.size
        # Asked for when first used: a library from before there were lists does all else.
        symbolise = self.library.rose_symbolise
        symbolise.restype = ctypes.c_int64

        def listed(*out: Any) -> int:
            places, steps, ends = changes.places, changes.steps, changes.ends
            done = symbolise(_at(plan.packed), _at(places), _at(steps), _at(ends), *_int64(chunks), *out)
            if done < 0:
                raise ValueError("no elements have such changes under this plan")
            return int(done)

        most = int(np.diff(changes.ends, prepend=0).max(initial=0))
        return self._symbols(plan, listed, changes.places.size, chunks, most)

    def _symbols(
        self, plan: Plan, call: Callable[..., int], changed_max: int, chunks: int, chunk_changed_max: int
    ) -> tuple[SpanSymbols, Histograms]:
        """Have a kernel put out symbols, into buffers for so many changes."""
        scratch_bytes = int(self.library.rose_scan_scratch_bytes(*_int64(chunk_changed_max)))
        scratch = self.arena.take("scan", scratch_bytes, np.uint8)
        gaps, values, contexts = (
            self.arena.take(name, changed_max, np.uint8) for name in ("gaps", "values", "contexts")
        )
        raw = self.arena.take("raw", 4 * changed_max + 16 * chunks, np.uint8)
        counts = np.empty((chunks, plan.contexts), np.uint32)
        raw_ends = np.empty(chunks, np.int64)
        gap_histogram = np.zeros((plan.contexts, GAP_SYMBOLS), np.uint32)
        value_histogram = np.zeros((plan.value_contexts, VALUE_SYMBOLS), np.uint32)
        changed = _checked(
            call(
                _at(scratch), *_int64(scratch.size), _at(counts), _at(gaps), _at(values), _at(contexts),
                _at(gap_histogram), _at(value_histogram), _at(raw), *_int64(raw.size), _at(raw_ends),
            )
        )  # fmt: skip
        raw_bytes = int(raw_ends[-1]) if chunks else 0
        symbols = SpanSymbols(
            counts, gaps[:changed].copy(), values[:changed].copy(), contexts[:changed].copy(),
            raw[:raw_bytes].copy(), raw_ends,
        )  # fmt: skip
        return symbols, Histograms(gap_histogram.astype(np.int64), value_histogram.astype(np.int64))

    def packer(self, tables: GroupTables) -> _Packer:
        """See `kernel.Kernels`."""
        return _Packer(self, tables)

    def unpacker(self, tables: GroupTables) -> _Unpacker:
        """See `kernel.Kernels`."""
        return _Unpacker(self, tables)

    def scatter(self, target: Words, indices: Indices, values: Words) -> None:
        """See `kernel.Kernels`."""
        if indices.shape != values.shape or values.dtype != target.dtype or not target.flags.c_contiguous:
            raise ValueError("one value per index, of the target's dtype")
        indices, values = np.ascontiguousarray(indices, np.int64), np.ascontiguousarray(values)
        width = ctypes.c_int32(target.itemsize)
        done = self.library.rose_scatter(
            _at(target), *_int64(target.size), width, _at(indices), _at(values), *_int64(indices.size)
        )
        if done < 0:
            raise IndexError("an index lies outside the tensor")

    def exchange(self, target: Words, indices: Indices, values: Words) -> tuple[Words, bool]:
        """See `kernel.Kernels`."""
        if indices.shape != values.shape or values.dtype != target.dtype or not target.flags.c_contiguous:
            raise ValueError("one value per index, of the target's dtype")
        indices, values = np.ascontiguousarray(indices, np.int64), np.ascontiguousarray(values)
        before = np.empty_like(values)
        width = ctypes.c_int32(target.itemsize)
        wrong = self.library.rose_exchange(
            _at(target), *_int64(target.size), width, _at(indices), _at(values), _at(before),
            *_int64(indices.size),
        )  # fmt: skip
        if wrong < 0:
            raise IndexError("an index lies outside the tensor")
        return before, wrong == 0

    def pack_plane(self, plane: Bytes, table: Frequencies) -> bytes:
        """See `kernel.Kernels`."""
        plane = np.ascontiguousarray(plane, np.uint8)
        tables = self.encoder_tables(table.reshape(1, -1))
        out = self.arena.take(
            "packed", int(self.library.rose_bytes_pack_bound(*_int64(plane.size))), np.uint8
        )
        length = _checked(
            self.library.rose_bytes_pack(
                _at(plane), *_int64(plane.size), _at(tables), _at(out), *_int64(out.size)
            )
        )
        return out[:length].tobytes()

    def unpack_plane(self, coded: memoryview, table: Frequencies, count: int) -> Bytes:
        """See `kernel.Kernels`."""
        tables = self.decoder_tables(table.reshape(1, -1))
        plane = np.empty(count, np.uint8)
        data = np.frombuffer(coded, np.uint8)
        _checked(
            self.library.rose_bytes_unpack(
                _at(data), *_int64(data.size), _at(tables), _at(plane), *_int64(count)
            )
        )
        return plane
