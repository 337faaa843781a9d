"""What ROSE makes of NVML's answers, over a fake NVML.  Unknown is never a number, and never idle."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_nvml import GIB, FakeGpu, FakeNvml, many
from rose_daemon.node.device import GpuDevice
from rose_daemon.telemetry import faults
from rose_daemon.telemetry.faults import FaultLog
from rose_daemon.telemetry.gpu import GpuSample, GpuWatch
from rose_daemon.telemetry.kernel_log import KernelLines, KernelLog
from rose_daemon.telemetry.normalise import (
    GpuMemory,
    GpuReading,
    HostMemory,
    attribute,
    memory_of,
    normalise,
    reason_of,
)
from rose_daemon.telemetry.nvml import Failed, NvmlReader, RawMemory, RawProcess

from rose.boards import Owner, process_start_ticks
from rose.core.readings import Unknown
from rose.units import NS_PER_S

HOST = HostMemory(120 * GIB, 60 * GIB)
H100 = "NVIDIA H100 80GB HBM3"
CODES = (1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 18, 999, 4242)


def readings(nvml: FakeNvml, host: HostMemory | Unknown = HOST) -> tuple[GpuReading, ...]:
    return tuple(normalise(raw, host) for raw in NvmlReader(lambda: nvml).sweep().devices)


def reading(gpu: FakeGpu, host: HostMemory | Unknown = HOST) -> GpuReading:
    (only,) = readings(FakeNvml(gpu), host)
    return only


class Watch:
    """A watch whose looks are taken by hand, so that no test waits for a clock."""

    def __init__(self, nvml: FakeNvml, wanted: str = "", kmsg: Path = Path("/nonexistent")) -> None:
        reader = NvmlReader(lambda: nvml)
        self.watch = GpuWatch(wanted, lambda: HOST, reader=reader, kernel_log=KernelLog(kmsg))

    def look(self) -> GpuSample:
        return self.watch._look()


# ---- values ---------------------------------------------------------------------------------------


def test_a_healthy_gpu_is_read() -> None:
    gpu = FakeGpu(processes=[(27, 20 * GIB), (28, None)], clock_reasons=0x1 | 0x4 | 0x40)
    assert reading(gpu) == GpuReading(
        number=0,
        uuid="GPU-0",
        pci="00000000:3B:00.0",
        name=H100,
        memory=GpuMemory(80 * GIB, 30 * GIB, 50 * GIB),
        utilisation=0.4,
        processes=(RawProcess(27, 20 * GIB), RawProcess(28, None)),
        throttled=("power_cap", "thermal_hardware"),
        mig=False,
    )


@pytest.mark.parametrize("code", CODES)
def test_every_error_code_is_unknown_with_a_stable_reason(code: int) -> None:
    questions = ("MemoryInfo", "UtilizationRates", "ComputeRunningProcesses", "CurrentClocksEventReasons")
    gpu = FakeGpu(errors={f"nvmlDeviceGet{name}": code for name in questions})
    seen = reading(gpu)
    reason = reason_of(Failed(code))
    assert reason.replace("_", "").isalnum()
    for value in (seen.memory, seen.utilisation, seen.processes, seen.throttled):
        assert value == Unknown(reason)


@pytest.mark.parametrize("name", ["NVIDIA GB10", "NVIDIA Thor", "Orin (nvgpu)", "NVIDIA Jetson AGX Orin"])
def test_a_part_without_memory_of_its_own_shows_the_hosts(name: str) -> None:
    gpu = FakeGpu(name=name, utilisation=0, errors={"nvmlDeviceGetMemoryInfo": 3})
    seen = reading(gpu)
    assert seen.name == name
    assert seen.memory == GpuMemory(120 * GIB, 60 * GIB, 60 * GIB, unified=True)
    assert reading(gpu, Unknown("meminfo_unreadable")).memory == Unknown("meminfo_unreadable")


@pytest.mark.parametrize(
    "name", [H100, "NVIDIA A100-SXM4-80GB", "NVIDIA GH200 480GB", "NVIDIA GB200", "", "x"]
)
def test_any_other_part_without_an_answer_is_unknown_and_not_the_host(name: str) -> None:
    assert memory_of(Failed(3), name, HOST) == Unknown("nvml_not_supported")


def test_headroom_of_a_unified_part_is_the_least_that_any_source_says() -> None:
    raw = RawMemory(120 * GIB, int(6.4 * GIB), int(7.4 * GIB))
    memory = memory_of(raw, "NVIDIA GB10", HostMemory(120 * GIB, 100 * GIB))
    assert isinstance(memory, GpuMemory)
    assert memory.free_bytes == int(7.4 * GIB)
    ceiling = memory_of(raw, "NVIDIA GB10", HostMemory(120 * GIB, 3 * GIB))
    assert isinstance(ceiling, GpuMemory)
    assert ceiling.free_bytes == 3 * GIB
    full = memory_of(RawMemory(120, 118, 60), "NVIDIA GB10", HostMemory(120, 100))
    assert isinstance(full, GpuMemory)
    assert full.free_bytes == 2


@pytest.mark.parametrize(
    "raw", [RawMemory(0, 0, 0), RawMemory(10, 11, 0), RawMemory(10, 0, 11), RawMemory(-1, 0, 0)]
)
def test_numbers_that_contradict_each_other_are_unknown(raw: RawMemory) -> None:
    seen = memory_of(raw, H100, HOST)
    assert seen == Unknown("memory_contradictory") or (isinstance(seen, GpuMemory) and seen.free_bytes <= 10)
    assert memory_of(RawMemory(0, 0, 0), H100, HOST) == Unknown("memory_contradictory")


def test_unknown_use_of_a_slice_never_compares_as_idle() -> None:
    part = FakeGpu(uuid="MIG-1", total=20 * GIB, used=GIB, free=19 * GIB)
    part.errors = {"nvmlDeviceGetUtilizationRates": 3}
    nvml = FakeNvml(FakeGpu(slices=[part], errors={"nvmlDeviceGetUtilizationRates": 3}))
    seen = GpuSample(readings(nvml), "", {}).find("MIG-1")
    assert isinstance(seen, GpuReading)
    assert seen.mig is True
    assert seen.memory == GpuMemory(20 * GIB, GIB, 19 * GIB)
    assert seen.utilisation == Unknown("nvml_not_supported")
    assert seen.utilisation != 0
    assert seen.utilisation  # nor does it pass for a zero
    with pytest.raises(TypeError):
        _ = seen.utilisation < 0.1  # type: ignore[operator]


def test_the_device_is_found_by_uuid_index_and_address() -> None:
    sample = GpuSample(readings(FakeNvml(*many(3))), "", {})
    for wanted in ("GPU-2", "gpu-2", "2", "00000000:02:00.0"):
        found = sample.find(wanted)
        assert isinstance(found, GpuReading)
        assert found.uuid == "GPU-2"
    assert sample.find("") == Unknown("gpu_not_named")
    assert sample.find("7") == sample.find("GPU-9") == Unknown("gpu_not_found")
    assert GpuSample((), "driver_not_loaded", {}).find("") == Unknown("driver_not_loaded")
    only = GpuSample(readings(FakeNvml(FakeGpu())), "", {}).find("")
    assert isinstance(only, GpuReading)


# ---- whose memory ---------------------------------------------------------------------------------

MEMORY = GpuMemory(80 * GIB, 47 * GIB, 33 * GIB)


def test_all_that_is_not_provably_rollouts_is_charged_to_serving() -> None:
    processes = (RawProcess(27, 30 * GIB), RawProcess(40, 13 * GIB), RawProcess(99, GIB))
    assert attribute(MEMORY, processes, {27}, {40}) == (34 * GIB, True)
    assert attribute(MEMORY, processes, {27}, set()) == (47 * GIB, True)


@pytest.mark.parametrize(
    "processes",
    [
        (RawProcess(4111, 30 * GIB), RawProcess(4112, 17 * GIB)),  # the host's pids, seen from a container
        (),
        (RawProcess(27, None), RawProcess(40, GIB)),
        (RawProcess(27, GIB), RawProcess(40, None)),
        (RawProcess(40, GIB),),
        Unknown("nvml_no_permission"),
    ],
)
def test_a_pid_that_is_not_visible_is_not_one_that_uses_nothing(
    processes: tuple[RawProcess, ...] | Unknown,
) -> None:
    assert attribute(MEMORY, processes, {27}, {40}) == (47 * GIB, False)


# ---- one device's trouble is nobody else's -----------------------------------------------------------


def test_a_gpu_that_falls_off_the_bus_stops_no_other() -> None:
    gpus = many(8)
    nvml = FakeNvml(*gpus)
    watch = Watch(nvml, "GPU-3")
    watch.look()
    gpus[3].lost()
    sample = watch.look()
    assert [isinstance(each.memory, GpuMemory) for each in sample.readings].count(True) == 7
    assert sample.troubles == {"GPU-3": faults.GPU_LOST}
    lost = sample.find("3")
    assert isinstance(lost, GpuReading)
    assert str(lost) == "GPU-3 (PCI 00000000:03:00.0)", "named although it does not answer any more"
    assert faults.drains(sample.trouble_of(lost))
    nvml.gpus.pop()  # the driver counts one less, and the last of the eight still answers to no index
    assert {each.uuid for each in watch.look().readings} == {f"GPU-{number}" for number in range(8)}


def test_one_lost_before_it_was_ever_seen_is_named_by_its_index() -> None:
    gpus = many(2)
    gpus[0].lost()
    sample = Watch(FakeNvml(*gpus), "1").look()
    assert sample.troubles == {"0": faults.GPU_LOST}
    assert isinstance(sample.find("1"), GpuReading)


def test_unknown_errors_in_a_row_mean_that_access_is_lost() -> None:
    gpus = many(2)
    watch = Watch(FakeNvml(*gpus), "0")
    gpus[0].errors = {"nvmlDeviceGetMemoryInfo": 999}
    assert [watch.look().troubles.get("GPU-0", "") for _ in range(4)] == ["", "", *["gpu_access_lost"] * 2]
    assert not faults.drains(faults.ACCESS_LOST)
    assert "daemon-reload" in faults.advice(faults.ACCESS_LOST)
    gpus[0].errors = {}
    assert watch.look().troubles == {}


def test_a_fatal_xid_is_trouble_for_good_and_an_applications_is_not() -> None:
    gpus = many(2)
    nvml = FakeNvml(*gpus)
    watch = Watch(nvml)
    watch.look()
    nvml.events = [(gpus[0], 31), (gpus[1], 31), (gpus[1], 48)]
    sample = watch.look()
    assert sample.readings[0].xids == (31,)
    assert sample.troubles == {"GPU-1": "gpu_xid_48"}
    assert "ECC" in faults.advice("gpu_xid_48")
    assert watch.look().troubles == {"GPU-1": "gpu_xid_48"}


@pytest.mark.parametrize(
    ("lines", "trouble"),
    [
        (["NVRM: Xid (PCI:0000:01:00): 79, pid=7, GPU has fallen off the bus."], "gpu_lost"),
        (["NVRM: Xid (PCI:0000:01:00): 48, DBE"], "gpu_xid_48"),
        (["NVRM: Xid (PCI:0000:01:00 GPU-I:05): 95, pid=7, name=python, Uncontained"], "gpu_xid_95"),
        (["NVRM: Xid (PCI:0000:01:00 GPU-I:05): 31, pid=7, MMU fault"], ""),
        (["NVRM: GPU 0000:01:00.0: GPU has fallen off the bus."], "gpu_lost"),
        (
            [
                "NVRM: The NVIDIA GPU 0000:01:00.0",
                "NVRM: (PCI ID: 10de:2330) installed in this system has",
                "NVRM: fallen off the bus and is not responding to commands.",
            ],
            "gpu_lost",
        ),
        (["NVRM: Xid (PCI:0000:01:00): 31, pid=7, MMU fault"], ""),
        (["NVRM: GPU 0000:09:00.0: GPU has fallen off the bus."], ""),
        (["usb 1-1: device has fallen off the bus", "nvidia: loading", ""], ""),
    ],
)
def test_the_kernels_log_is_heard_with_and_without_xid_numbers(lines: list[str], trouble: str) -> None:
    seen, state, kernel = readings(FakeNvml(*many(2))), faults.GpuFaults(), KernelLines()
    for line in lines:
        if (fault := kernel.take(line)) is not None:
            state.kernel_said(fault, seen)
    assert [state.observe(each) for each in seen] == ["", trouble]


@pytest.mark.parametrize("address", ["", "1", "01:00", "0000:01", "::", ".", "0000:01:00:00.0", "0000:1:0"])
@pytest.mark.parametrize(("gpus", "trouble"), [(1, "gpu_xid_95"), (2, "")])
def test_an_address_that_is_none_is_the_only_devices_and_stops_no_reader(
    address: str, gpus: int, trouble: str
) -> None:
    """A reader that raises would be a thread that ended, and no GPU would be read any more."""
    seen, state = readings(FakeNvml(*many(gpus))), faults.GpuFaults()
    state.kernel_said(faults.KernelFault(address, 95), seen)
    assert [state.observe(each) for each in seen] == [trouble] * gpus


def test_kernel_records_are_read_as_they_come(tmp_path: Path) -> None:
    kmsg = tmp_path / "kmsg"
    os.mkfifo(kmsg)
    keep = os.open(kmsg, os.O_RDWR)
    log = KernelLog(kmsg)
    try:
        assert not log.readable  # a pipe cannot be sought in; the real one can
    finally:
        os.close(keep)
    kmsg.unlink()
    kmsg.write_text("6,1,1,-;NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.\n")
    log = KernelLog(kmsg)
    assert log.readable
    assert log.faults() == [], "old news"
    with kmsg.open("a") as file:
        file.write("4,2,2,-;NVRM: Xid (PCI:0000:01:00): 79, lost\n SUBSYSTEM=pci\n")
    assert [fault.xid for fault in log.faults()] == [79]
    assert not KernelLog(tmp_path / "nothing").readable


# ---- the library ------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [9, 12])
def test_a_driver_that_comes_late_needs_no_restart(code: int) -> None:
    nvml = FakeNvml(FakeGpu(), init_code=code)
    watch = Watch(nvml)
    for _ in range(60):
        assert watch.look().find("") == Unknown("driver_not_loaded")
    nvml.init_code = 0
    assert isinstance(watch.look().find(""), GpuReading)
    assert nvml.inits == 1


def test_a_missing_package_is_a_reason_like_any_other() -> None:
    def load() -> object:
        raise ImportError("no module named pynvml")

    sweep = NvmlReader(load).sweep()
    assert sweep.failure is not None
    assert reason_of(sweep.failure) == "pynvml_missing"


@pytest.mark.parametrize("code", [1, 18, 999])
def test_a_library_that_lost_its_state_is_begun_anew(code: int) -> None:
    nvml = FakeNvml(FakeGpu())
    watch = Watch(nvml)
    watch.look()
    nvml.count_code = code
    broken = watch.look().find("")
    assert isinstance(broken, GpuReading), "its name is remembered"
    assert broken.memory == Unknown(reason_of(Failed(code)))
    nvml.count_code = 0
    well = watch.look().find("")
    assert isinstance(well, GpuReading)
    assert isinstance(well.memory, GpuMemory)
    assert nvml.inits == 1


# ---- a call that hangs ------------------------------------------------------------------------------


@pytest.fixture
def hanging() -> Iterator[tuple[FakeNvml, GpuWatch]]:
    release = threading.Event()
    nvml = FakeNvml(FakeGpu())
    watch = GpuWatch(
        "",
        lambda: HOST,
        reader=NvmlReader(lambda: nvml),
        kernel_log=KernelLog(Path("/nonexistent")),
        period_s=0.01,
        limit_ns=NS_PER_S // 5,
    )
    watch.sampler.start()
    until(lambda: watch.sampler.samples > 2)
    nvml.gpus[0].hang = release
    yield nvml, watch
    release.set()
    watch.sampler.stop()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_hanging_driver_call_ages_the_sample_and_holds_up_nobody(
    hanging: tuple[FakeNvml, GpuWatch],
) -> None:
    nvml, watch = hanging
    device = GpuDevice(watch)
    serving = Owner(os.getpid(), process_start_ticks(os.getpid()))
    until(lambda: isinstance(watch.reading(time.monotonic_ns()), Unknown))
    threads = threading.active_count()
    began = time.monotonic()
    for _ in range(50):
        observed = device.memory(serving, [])
        assert isinstance(observed.free_bytes, Unknown)
        assert observed.free_bytes.reason == "telemetry_stale"
        assert observed.free_bytes.age_ns is not None
        assert observed.free_bytes.age_ns > NS_PER_S // 5
        assert isinstance(device.utilisation(), Unknown)
        assert device.health().trouble == ""
    assert time.monotonic() - began < 60
    assert nvml.outstanding_max == 1
    assert threading.active_count() == threads
    began = time.monotonic()
    device.close()
    assert time.monotonic() - began < 60


def test_readings_come_back_with_the_call() -> None:
    release = threading.Event()
    nvml = FakeNvml(FakeGpu(hang=release))
    watch = GpuWatch("", lambda: HOST, reader=NvmlReader(lambda: nvml), period_s=0.01)
    watch.sampler.start()
    assert watch.reading(time.monotonic_ns()) == Unknown("not_observed")
    release.set()
    until(lambda: isinstance(watch.reading(time.monotonic_ns()), GpuReading))
    assert watch.sampler.stop()


# ---- the device as rosed sees it --------------------------------------------------------------------


def test_serving_is_found_among_the_devices_processes() -> None:
    me = Owner(os.getpid(), process_start_ticks(os.getpid()))
    nvml = FakeNvml(FakeGpu(processes=[(me.pid, 20 * GIB)]))
    watch = GpuWatch("", lambda: HOST, reader=NvmlReader(lambda: nvml), period_s=0.01)
    watch.sampler.start()
    until(lambda: isinstance(watch.reading(time.monotonic_ns()), GpuReading))
    device = GpuDevice(watch)
    seen = device.memory(me, [])
    assert (seen.serving_bytes, seen.free_bytes, seen.total_bytes) == (30 * GIB, 50 * GIB, 80 * GIB)
    assert seen.attributed
    assert not device.memory(None, []).attributed
    assert not device.memory(Owner(me.pid, 1), []).attributed
    assert device.utilisation() == 0.4
    assert "GPU-0" in device.name()
    device.close()


# ---- logs ------------------------------------------------------------------------------------------


def test_ten_thousand_failures_are_a_line_a_minute_and_a_count() -> None:
    log = FaultLog()
    tried = [log.failed("NVML", "driver_not_loaded", number * NS_PER_S) for number in range(10_000)]
    lines = [line for line in tried if line is not None]
    assert len(lines) <= 10_000 / 60 + 1
    assert lines[0] == "driver_not_loaded"
    assert log.fine("NVML") == "well again after 10000 failures"
    assert log.fine("NVML") is None


def test_a_fault_that_comes_and_goes_is_no_flood_either() -> None:
    log = FaultLog()
    lines: list[str | None] = []
    for second in range(0, 3600, 2):
        lines.append(log.failed("GPU-0", f"fault_{second % 3}", second * NS_PER_S))
        lines.append(log.fine("GPU-0"))
    assert sum(line is not None for line in lines) <= 2 * 61
