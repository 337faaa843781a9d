"""The fake NVML answers as the real one does: the same suite runs over both, where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_nvml
import pytest
from fake_nvml import FakeGpu, FakeNvml
from rose_daemon.telemetry.normalise import GpuMemory, HostMemory, normalise
from rose_daemon.telemetry.nvml import Failed, NvmlReader, import_nvml

from rose.core.readings import Unknown

HOST = HostMemory(64 << 30, 32 << 30)


def real() -> Any:
    pynvml = import_nvml()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(f"no usable NVIDIA GPU here ({error})")
    pynvml.nvmlShutdown()
    return pynvml


@pytest.fixture(params=[lambda: FakeNvml(FakeGpu(processes=[(1, 5)])), real], ids=["fake", "real"])
def nvml(request: pytest.FixtureRequest) -> Any:
    make: Callable[[], Any] = request.param
    return make()


def test_every_function_that_rose_calls_exists_in_both() -> None:
    pynvml = import_nvml()
    names = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert len(names) > 15
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_error_codes_are_those_of_the_real_library() -> None:
    pynvml = import_nvml()
    assert (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NOT_FOUND) == (3, 6)
    assert (pynvml.NVML_ERROR_INSUFFICIENT_SIZE, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND) == (7, 13)
    assert (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN) == (15, 999)
    assert pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH == 18
    assert pynvml.NVML_ERROR_TIMEOUT == fake_nvml.NVML_ERROR_TIMEOUT
    assert pynvml.nvmlEventTypeXidCriticalError == FakeNvml.nvmlEventTypeXidCriticalError
    for code in (3, 15, 999):
        with pytest.raises(pynvml.NVMLError) as caught:
            raise pynvml.NVMLError(code)
        assert caught.value.value == fake_nvml.NVMLError(code).value == code


def test_clock_reasons_are_those_of_the_real_library() -> None:
    pynvml = import_nvml()
    assert (pynvml.nvmlClocksEventReasonSwPowerCap, pynvml.nvmlClocksThrottleReasonHwSlowdown) == (4, 8)
    assert (pynvml.nvmlClocksEventReasonSwThermalSlowdown, pynvml.nvmlClocksEventReasonGpuIdle) == (0x20, 1)
    assert pynvml.nvmlClocksThrottleReasonHwThermalSlowdown == 0x40
    assert pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown == 0x80


def test_a_sweep_names_every_device_and_knows_or_does_not_know_each_value(nvml: Any) -> None:
    reader = NvmlReader(lambda: nvml)
    for _ in range(2):
        sweep = reader.sweep()
        assert sweep.failure is None
        assert sweep.devices
        for raw in sweep.devices:
            reading = normalise(raw, HOST)
            assert reading.uuid.startswith(("GPU-", "MIG-"))
            assert reading.pci
            assert reading.name
            assert isinstance(reading.memory, (GpuMemory, Unknown))
            if isinstance(reading.memory, GpuMemory):
                assert 0 <= reading.memory.free_bytes <= reading.memory.total_bytes
                assert reading.memory.used_bytes <= reading.memory.total_bytes
            assert isinstance(reading.utilisation, Unknown) or 0 <= reading.utilisation <= 1
            assert isinstance(reading.throttled, (tuple, Unknown))


def test_a_device_that_is_not_there_is_an_error_and_not_a_crash(nvml: Any) -> None:
    nvml.nvmlInit()
    with pytest.raises(nvml.NVMLError) as caught:
        nvml.nvmlDeviceGetHandleByIndex(4096)
    assert Failed(caught.value.value).code in {2, 6}
    nvml.nvmlShutdown()
