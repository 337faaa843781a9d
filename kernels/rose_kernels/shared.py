"""The C library for shared memory: atomic words that several processes use at once."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from rose_kernels.library import built_library

_LIBRARY = "_rose_shared"
_ABI = 2

_POINTER, _I32, _I64, _U64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
_PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "rose_board_publish": (None, (_POINTER,)),
    "rose_board_read": (_I32, (_POINTER,)),
    "rose_bell_ring": (None, (_POINTER,)),
    "rose_bell_nudge": (None, (_POINTER,)),
    "rose_bell_await": (None, (_POINTER, ctypes.c_uint32)),
    "rose_ledger_init": (_I32, (_POINTER, _I64, _I64, _U64)),
    "rose_ledger_check": (_I32, (_POINTER,)),
    "rose_ledger_capacity": (_I64, (_POINTER,)),
    "rose_ledger_page_bytes": (_I64, (_POINTER,)),
    "rose_ledger_scope": (_U64, (_POINTER,)),
    "rose_ledger_used": (_I64, (_POINTER,)),
    "rose_ledger_look": (None, (_POINTER, _POINTER)),
    "rose_ledger_join": (_I32, (_POINTER, _U64, _I64)),
    "rose_ledger_acquire": (_I64, (_POINTER, _I32, _U64, _I64, _I64)),
    "rose_ledger_release": (_I64, (_POINTER, _I32, _U64, _I64)),
    "rose_ledger_leave": (_I64, (_POINTER, _I32, _U64)),
    "rose_ledger_set_limit": (_I32, (_POINTER, _I32, _U64, _I64, _I64)),
}


def declare(library: Any) -> Any:
    """Tell ctypes the types of the library's functions; raises OSError if it is not of this version."""
    if not hasattr(library, "rose_shared_abi") or library.rose_shared_abi() != _ABI:
        raise OSError(f"{library._name} is not of this version of ROSE")
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def load(path: Path) -> Any:
    """A library from a file.  Its calls keep the GIL: none blocks, and each takes less than a microsecond."""
    return declare(ctypes.PyDLL(str(path)))


@cache
def shared_library() -> Any | None:
    """The library built with this package, or None if there is none that works here."""
    path = built_library(_LIBRARY)
    if path is None:
        return None
    try:
        return load(path)
    except OSError:
        return None
