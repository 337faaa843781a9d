"""A stand-in for the module `pynvml`: what ROSE uses of it, over devices that tests describe.

Error codes and exceptions behave as in the real one (`tests/conformance/test_nvml.py` runs both).  Give
`FakeNvml(...)` where the module is expected.
"""

# ruff: noqa: N802

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
NVML_ERROR_TIMEOUT = 10


class NVMLError(Exception):
    """Carries the code in `value`, as the real one does."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


@dataclass
class FakeGpu:
    """One device.  `errors` maps a function's name to the code that it answers with."""

    uuid: str = "GPU-0"
    name: str = "NVIDIA H100 80GB HBM3"
    bus_id: str = "00000000:3B:00.0"
    total: int = 80 * GIB
    used: int = 30 * GIB
    free: int = 50 * GIB
    utilisation: int = 40
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    clock_reasons: int = 0
    slices: list[FakeGpu] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    hang: threading.Event | None = None
    """While given and not set, questions about the memory do not come back."""

    def lost(self) -> None:
        """Fallen off the bus: every question about it is answered with that."""
        self.errors = dict.fromkeys(_ABOUT_A_DEVICE, 15)


def many(count: int) -> list[FakeGpu]:
    """Devices that differ in name and address alone."""
    return [FakeGpu(f"GPU-{number}", bus_id=f"00000000:{number:02X}:00.0") for number in range(count)]


class FakeNvml:
    """The module.  `init_code` is what nvmlInit answers with; 0 is success."""

    NVMLError = NVMLError
    nvmlEventTypeXidCriticalError = 8  # noqa: N815

    def __init__(self, *gpus: FakeGpu, init_code: int = 0) -> None:
        self.gpus = list(gpus)
        self.init_code = init_code
        self.count_code = 0
        self.inits = 0
        self.calls = 0
        self.outstanding = 0
        self.outstanding_max = 0
        self.events: list[tuple[FakeGpu, int]] = []

    # ---- the library ----------------------------------------------------------------------------

    def nvmlInit(self) -> None:
        if self.init_code:
            raise NVMLError(self.init_code)
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self.inits -= 1

    def nvmlDeviceGetCount(self) -> int:
        if self.count_code:
            raise NVMLError(self.count_code)
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if index >= len(self.gpus):
            raise NVMLError(2)
        return self._ask("nvmlDeviceGetHandleByIndex", self.gpus[index], lambda gpu: gpu)

    # ---- one device -----------------------------------------------------------------------------

    def _ask(self, function: str, gpu: FakeGpu, answer: Callable[[FakeGpu], Any]) -> Any:
        self.calls += 1
        if (code := gpu.errors.get(function)) is not None:
            raise NVMLError(code)
        return answer(gpu)

    def nvmlDeviceGetUUID(self, handle: FakeGpu) -> str:
        return self._ask("nvmlDeviceGetUUID", handle, lambda gpu: gpu.uuid)

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str:
        return self._ask("nvmlDeviceGetName", handle, lambda gpu: gpu.name)

    def nvmlDeviceGetPciInfo(self, handle: FakeGpu) -> Any:
        def answer(gpu: FakeGpu) -> Any:
            return SimpleNamespace(busId=gpu.bus_id.encode())

        return self._ask("nvmlDeviceGetPciInfo", handle, answer)

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu) -> Any:
        self.outstanding += 1
        self.outstanding_max = max(self.outstanding_max, self.outstanding)
        try:
            if handle.hang is not None:
                handle.hang.wait()
            return self._ask(
                "nvmlDeviceGetMemoryInfo",
                handle,
                lambda gpu: SimpleNamespace(total=gpu.total, used=gpu.used, free=gpu.free),
            )
        finally:
            self.outstanding -= 1

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> Any:
        def answer(gpu: FakeGpu) -> Any:
            return SimpleNamespace(gpu=gpu.utilisation, memory=0)

        return self._ask("nvmlDeviceGetUtilizationRates", handle, answer)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu) -> list[Any]:
        def answer(gpu: FakeGpu) -> Any:
            return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes]

        return self._ask("nvmlDeviceGetComputeRunningProcesses", handle, answer)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: FakeGpu) -> int:
        return self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle, lambda gpu: gpu.clock_reasons)

    # ---- MIG ------------------------------------------------------------------------------------

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:
        return self._ask("nvmlDeviceGetMigMode", handle, lambda gpu: [int(bool(gpu.slices))] * 2)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        return self._ask("nvmlDeviceGetMaxMigDeviceCount", handle, lambda _gpu: 7)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> FakeGpu:
        if index >= len(handle.slices):
            raise NVMLError(6)
        return handle.slices[index]

    # ---- events ---------------------------------------------------------------------------------

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, handle: FakeGpu, _types: int, _events: object) -> None:
        self._ask("nvmlDeviceRegisterEvents", handle, lambda _gpu: None)

    def nvmlEventSetWait_v2(self, _events: object, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "nobody has time to wait"
        if not self.events:
            raise NVMLError(NVML_ERROR_TIMEOUT)
        gpu, xid = self.events.pop(0)
        return SimpleNamespace(device=gpu, eventType=8, eventData=xid)


_ABOUT_A_DEVICE = tuple(name for name in vars(FakeNvml) if name.startswith("nvmlDeviceGet"))
