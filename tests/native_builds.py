"""C sources of the tests, compiled together with the library they look into."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_SOURCES = ROOT / "kernels" / "csrc"
_FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{_SOURCES}")


@cache
def build(folder: Path, name: str, *options: str, sources: tuple[str, ...], compiler: str = "gcc") -> Path:
    """Compile tests/native/`name`.c and library sources into `folder`; skips the test without a compiler."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    if "-static" in options and not _has_static_libc(compiler):
        pytest.skip(f"{compiler} has no static C library")
    output = folder / f"{compiler}-{name}"
    inputs = [ROOT / "tests" / "native" / f"{name}.c", *(_SOURCES / source for source in sources)]
    command = [compiler, *_FLAGS, *options, "-o", output, *inputs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output


def _has_static_libc(compiler: str) -> bool:
    """The compiler answers a path for what it has, and the bare name for what it has not."""
    command = [compiler, "-print-file-name=libc.a"]
    return "/" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def stepping_ledger(folder: Path) -> Path:
    """The ledger as a library that stops at each access to shared memory, see tests/native/ledger_steps.c."""
    options = ("-shared", "-fPIC", "-DROSE_LEDGER_STEP=rose_test_step")
    return build(folder, "ledger_steps", *options, sources=("boards.c", "ledger.c"))
