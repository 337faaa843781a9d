"""Which kernels this process uses: the C library if it was built, else NumPy."""

from __future__ import annotations

import os
import threading
import warnings

from rose_kernels.delta import native
from rose_kernels.delta.kernel import Kernels
from rose_kernels.delta.reference import ReferenceKernels

ENVIRONMENT = "ROSE_DELTA_KERNELS"
"""Set to `numpy` or `portable` to do without the C library, or without this CPU's vector instructions."""

_lock = threading.Lock()
_selected: Kernels | None = None


def kernels() -> Kernels:
    """The kernels in use, chosen at the first call; says once if they are the slow ones."""
    global _selected  # noqa: PLW0603 - a process has one set of kernels
    with _lock:
        if _selected is None:
            _selected = _select(os.environ.get(ENVIRONMENT, ""))
        return _selected


def _select(wanted: str) -> Kernels:
    if wanted not in ("", "numpy", "portable"):
        raise ValueError(f"{ENVIRONMENT} is {wanted!r}; it may be numpy or portable")
    if wanted == "numpy":
        return ReferenceKernels()
    path = native.library_path()
    why = "it was not built, as no C compiler worked when ROSE was installed"
    if path is not None:
        try:
            return native.load(path, portable=wanted == "portable")
        except OSError as error:
            why = str(error)
    warnings.warn(
        f"weight deltas are coded with NumPy, many times slower than with the C library: {why}",
        RuntimeWarning,
        stacklevel=3,
    )
    return ReferenceKernels()
