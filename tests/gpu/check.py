"""`make gpu-check`: what can be checked on a machine with an NVIDIA GPU.  Standard library only.

Where there is no GPU it says so and exits 0.  This release has no code that runs on a GPU, so beside naming
the devices there is nothing to check, and it says that too.
"""

from __future__ import annotations

import ctypes
import sys

_NAME_BYTES = 96
_NVML = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class NvmlFailed(Exception):
    """The driver's library is not there, or answered an error code."""


def devices() -> list[str]:
    """One line for each GPU, as NVML describes it; raises NvmlFailed."""
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


def main() -> int:
    """Print what is here and what was checked."""
    try:
        found = devices()
    except NvmlFailed as error:
        print(f"gpu-check: skipped, no usable NVIDIA GPU here ({error})")
        return 0
    if not found:
        print("gpu-check: skipped, the driver reports no GPU")
        return 0
    print("\n".join(found))
    print("gpu-check: nothing checked: this release has no GPU code yet (it runs vLLM on the CPU)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
