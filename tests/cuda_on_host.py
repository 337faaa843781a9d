"""The kernels of changes.cu on the host: compiled by a C++ compiler, see tests/native/cuda_blocks.h."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from rose_kernels.delta.device import SOURCE

ROOT = Path(__file__).parents[1]
_FLAGS = (
    "-std=c++17",
    "-O2",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-shared",
    "-fPIC",
    "-U_FORTIFY_SOURCE",
)


class HostDevice:
    """A `device.Device` whose arrays are NumPy's."""

    arrays: Any = np

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.runs: list[str] = []

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def run(self, kernel: str, blocks: int, threads: int, *arguments: object) -> None:
        self.runs.append(kernel)
        given = [ctypes.c_uint32(blocks), ctypes.c_uint32(threads)]
        for item in arguments:
            if isinstance(item, np.ndarray):
                assert item.flags.c_contiguous
                given.append(ctypes.c_void_p(item.ctypes.data))
            else:
                given.append(ctypes.c_int64(int(item or 0)))
        getattr(self._library, f"run_{kernel}")(*given)

    def to_host(self, array: Any) -> npt.NDArray[Any]:
        return np.array(array)


@cache
def host_device(folder: Path) -> HostDevice:
    """Built into `folder`; skips the test without a C++ compiler."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    output = folder / "delta_changes.so"
    source = ROOT / "tests" / "native" / "delta_changes.cpp"
    command = ["g++", *_FLAGS, f"-I{SOURCE.parent}", "-x", "c++", source, "-o", output]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return HostDevice(output)
