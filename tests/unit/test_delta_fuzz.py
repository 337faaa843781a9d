"""The C kernels under sanitizers for addresses and undefined behaviour; `make fuzz-delta` runs many more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "kernels" / "fuzz" / "run.py"


def environ() -> dict[str, str]:
    """vLLM, once imported, preloads libraries into what is started; sanitizers insist on coming first."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def sanitizers_work(folder: Path) -> bool:
    program = folder / "probe"
    source = folder / "probe.c"
    source.write_text("int main(void) { return 0; }\n")
    command = ["gcc", "-fsanitize=address,undefined", "-o", str(program), str(source)]
    if shutil.which("gcc") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        return False
    return subprocess.run([str(program)], env=environ(), capture_output=True, check=False).returncode == 0


def run(*options: str, env: dict[str, str]) -> None:
    """Run the fuzzer, which must find nothing."""
    done = subprocess.run(
        [sys.executable, str(RUN), *options], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "encode and decode as expected" in done.stdout
    assert "no fault" in done.stdout


def test_damaged_inputs_under_sanitizers(tmp_path: Path) -> None:
    if not sanitizers_work(tmp_path):
        pytest.skip("gcc's sanitizers do not work here")
    run("--count", "2000", "--seed", "3", env=environ())


def test_the_portable_kernels_built_for_arm64_give_the_same_bytes() -> None:
    """Run under emulation: what was encoded on this machine decodes, and encodes to the same."""
    if shutil.which("qemu-aarch64") is None or shutil.which("aarch64-linux-gnu-gcc") is None:
        pytest.skip("qemu-aarch64 or its compiler is not installed")
    env = environ() | {"CC": "aarch64-linux-gnu-gcc -static"}
    run("--run-with", "qemu-aarch64", "--count", "200", "--seed", "4", env=env)
