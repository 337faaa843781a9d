"""`make gpu-check`: what ROSE does on an NVIDIA GPU, on this machine, in eight minutes at most.

    python tests/gpu/check.py [--json FILE] [--only NAME]...

Needs torch and, for some checks, cuda-bindings, nvidia-ml-py, cupy, numpy and msgspec, but neither vLLM nor
an installed ROSE.  Each check runs in a process of its own; what lacks something is skipped and says so.
Where there is no GPU nothing runs, and that is said.  Exit code 1 if a check failed or took too long.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import memory_checks
import sharing_checks
from harness import ROOT, Check, Outcome, run_apart, run_here, table

TOTAL_S = 480.0
_NVML = "libnvidia-ml.so.1"
_NAME_BYTES = 96

CHECKS = (
    Check("readings", "NVML through rosed's reader", sharing_checks.readings, 30),
    Check("arena", "map and unmap GPU memory, beside plain allocation", memory_checks.arena, 80),
    Check("exchange", "two processes hand memory over through the ledger", memory_checks.exchange, 90),
    Check("contention", "the ledger under contention", memory_checks.contention, 40),
    Check("host copy", "16 GB from the host in under 5 s", memory_checks.host_copy, 90),
    Check("gate", "a rollout loop behind the board and the admission", sharing_checks.gate, 50),
    Check("mps", "a share of the GPU's threads", sharing_checks.mps, 50),
    Check("delta", "changed weights found and packed on the GPU", sharing_checks.delta, 50),
)


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class NvmlFailed(Exception):
    """The driver's library is not there, or answered an error code."""


def devices() -> list[str]:
    """One line for each GPU, as NVML describes it, without any package; raises NvmlFailed."""
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError as error:
        raise NvmlFailed(str(error)) from None

    def call(function: str, *arguments: object) -> None:
        code = getattr(nvml, function)(*arguments)
        if code != 0:
            raise NvmlFailed(f"{function} answered {code}")

    call("nvmlInit_v2")
    try:
        count = ctypes.c_uint()
        call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        lines = []
        for index in range(count.value):
            handle, memory = ctypes.c_void_p(), _Memory()
            name = ctypes.create_string_buffer(_NAME_BYTES)
            call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
            call("nvmlDeviceGetName", handle, name, _NAME_BYTES)
            call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
            lines.append(f"GPU {index}: {name.value.decode()}, {memory.total / 2**30:.0f} GiB")
        return lines
    finally:
        nvml.nvmlShutdown()


def build_libraries(root: Path = ROOT) -> str:
    """Build the C libraries that this Python does not find, as pyproject.toml says; what went wrong, or "".

    Needs only a C compiler: the machine with the GPU may have no ROSE installed, and no new setuptools.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    for module in project["tool"]["setuptools"]["ext-modules"]:
        package, _, name = module["name"].rpartition(".")
        folder = root / "kernels" / package
        if any((folder / f"{name}{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
            continue
        output, sources = folder / f"{name}.so", [root / source for source in module["sources"]]
        command = ["cc", "-shared", "-fPIC", *module["extra-compile-args"], "-o", output, *sources]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{name} was not built: {error}"
        if done.returncode != 0:
            return f"{name} was not built: {done.stderr.strip()[-200:]}"
    return ""


def run_all(checks: Sequence[Check], total_s: float = TOTAL_S) -> list[Outcome]:
    """One after the other, each within its own limit and all within `total_s`."""
    end_s = time.monotonic() + total_s
    outcomes = []
    for check in checks:
        left_s = end_s - time.monotonic()
        if left_s < 1:
            outcomes.append(Outcome(check.name, check.what, "timed out", 0.0, {}, "no time was left for it"))
            continue
        command = [sys.executable, str(Path(__file__).resolve()), "--here", check.name]
        outcomes.append(run_apart(check, command, min(check.limit_s, left_s)))
        print(table(outcomes[-1:]), flush=True)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="gpu-check", description="Check ROSE on this machine's GPU.")
    parser.add_argument("--json", type=Path, default=Path("out/gpu-check.json"), help="where the report goes")
    parser.add_argument(
        "--only", action="append", choices=[check.name for check in CHECKS], help="run only this"
    )
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here:
        run_here(next(check for check in CHECKS if check.name == options.here))
        return 0
    try:
        found = devices()
    except NvmlFailed as error:
        print(f"gpu-check: skipped, no usable NVIDIA GPU here ({error})")
        return 0
    if not found:
        print("gpu-check: skipped, the driver reports no GPU")
        return 0
    print("\n".join(found))
    if trouble := build_libraries():
        print(f"gpu-check: {trouble}")
    chosen = [check for check in CHECKS if not options.only or check.name in options.only]
    outcomes = run_all(chosen)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "devices": found,
        "python": platform.python_version(),
        "checks": [o._asdict() for o in outcomes],
    }
    options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    counts = {
        status: sum(o.status == status for o in outcomes)
        for status in dict.fromkeys(o.status for o in outcomes)
    }
    print(
        "gpu-check: "
        + ", ".join(f"{count} {status}" for status, count in counts.items())
        + f"; {options.json}"
    )
    return int(any(outcome.status in ("failed", "timed out") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
