"""From NVML's answers to readings.  Pure functions: a number is a fact, everything else `Unknown(reason)`.

Parts without memory of their own (GB10 and the Jetsons) share the host's: there NVML answers "not supported",
or numbers in which page cache counts as free or does not, depending on driver and configuration.  What is
free is then the least of what all sources say.  Only parts known for it are read like that: the same answer
from any other GPU means that nothing is known of its memory.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeVar

from rose.core.readings import Unknown
from rose_daemon.telemetry.nvml import NO_BINDING, Failed, RawDevice, RawMemory, RawProcess

ValueT = TypeVar("ValueT")

NOT_SUPPORTED = 3
GPU_LOST = 15
UNKNOWN_ERROR = 999

_REASONS = {
    NO_BINDING: "pynvml_missing",
    1: "nvml_uninitialised",
    NOT_SUPPORTED: "nvml_not_supported",
    4: "nvml_no_permission",
    6: "nvml_not_found",
    7: "nvml_insufficient_size",
    9: "driver_not_loaded",
    10: "nvml_timeout",
    12: "driver_not_loaded",  # its library comes with the driver
    13: "nvml_function_not_found",
    GPU_LOST: "gpu_lost",
    16: "gpu_reset_required",
    18: "driver_mismatch",
    UNKNOWN_ERROR: "nvml_unknown_error",
}
_UNIFIED = re.compile(r"\b(GB10|Thor|Orin|Xavier|Tegra)\b")
"""Names of parts whose memory is the host's."""
_THROTTLED = {
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x20: "thermal_software",
    0x40: "thermal_hardware",
    0x80: "power_brake",
}
"""Bits of nvmlClocksEventReasons that mean "slower than it could be"; idle and user settings do not."""


class HostMemory(NamedTuple):
    """MemTotal and MemAvailable of the host, in bytes."""

    total_bytes: int
    available_bytes: int


class GpuMemory(NamedTuple):
    """Memory of a device, in bytes."""

    total_bytes: int
    used_bytes: int
    free_bytes: int
    """What can be taken now: never more than `total - used`, nor than the host can give on unified parts."""
    unified: bool = False


class GpuReading(NamedTuple):
    """One GPU or MIG slice."""

    number: int
    uuid: str
    pci: str
    name: str
    memory: GpuMemory | Unknown
    utilisation: float | Unknown
    """Busy share in [0, 1]."""
    processes: tuple[RawProcess, ...] | Unknown
    throttled: tuple[str, ...] | Unknown
    mig: bool | Unknown
    xids: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.uuid or f'GPU {self.number}'} (PCI {self.pci or 'unknown'})"


class Attribution(NamedTuple):
    """Whose the used memory of a device is."""

    serving_bytes: int
    """All of it that is not provably rollout's."""
    known: bool
    """False where the serving engine's processes were not found: then everything is charged to it."""


def reason_of(failure: Failed) -> str:
    """Stable code of an NVML error."""
    return _REASONS.get(failure.code, f"nvml_error_{failure.code}")


def is_unified(name: str) -> bool:
    """Whether a part of that name has no memory of its own."""
    return bool(_UNIFIED.search(name))


def normalise(raw: RawDevice, host: HostMemory | Unknown) -> GpuReading:
    """The reading of one device."""
    return GpuReading(
        number=raw.number,
        uuid=raw.identity.uuid,
        pci=raw.identity.pci,
        name=raw.identity.name,
        memory=memory_of(raw.memory, raw.identity.name, host),
        utilisation=_utilisation(raw.utilisation),
        processes=_known(raw.processes),
        throttled=_throttled(raw.clock_reasons),
        mig=_known(raw.mig),
        xids=raw.xids,
    )


def memory_of(raw: RawMemory | Failed, name: str, host: HostMemory | Unknown) -> GpuMemory | Unknown:
    """Memory of a device of that name."""
    unified = is_unified(name)
    if isinstance(raw, Failed):
        if not (unified and raw.code == NOT_SUPPORTED):
            return Unknown(reason_of(raw))
        if isinstance(host, Unknown):
            return host
        used_bytes = host.total_bytes - host.available_bytes
        return _plausible(GpuMemory(host.total_bytes, used_bytes, host.available_bytes, unified=True))
    free_bytes = min(raw.free, raw.total - raw.used)
    if unified:
        if isinstance(host, Unknown):
            return host
        free_bytes = min(free_bytes, host.available_bytes)
    return _plausible(GpuMemory(raw.total, raw.used, free_bytes, unified))


def _plausible(memory: GpuMemory) -> GpuMemory | Unknown:
    fits = 0 <= memory.used_bytes <= memory.total_bytes and 0 <= memory.free_bytes <= memory.total_bytes
    return memory if fits and memory.total_bytes > 0 else Unknown("memory_contradictory")


def _utilisation(percent: int | Failed) -> float | Unknown:
    if isinstance(percent, Failed):
        return Unknown(reason_of(percent))
    return percent / 100 if 0 <= percent <= 100 else Unknown("utilisation_contradictory")


def _throttled(bits: int | Failed) -> tuple[str, ...] | Unknown:
    if isinstance(bits, Failed):
        return Unknown(reason_of(bits))
    return tuple(name for bit, name in _THROTTLED.items() if bits & bit)


def _known(value: ValueT | Failed) -> ValueT | Unknown:
    return Unknown(reason_of(value)) if isinstance(value, Failed) else value


def attribute(
    memory: GpuMemory,
    processes: tuple[RawProcess, ...] | Unknown,
    serving: Collection[int],
    rollout: Collection[int],
) -> Attribution:
    """Split the used memory between serving and rollout, by their pids.

    "Not in the list" is not "uses nothing": inside a container NVML lists the host's pids.
    """
    if isinstance(processes, Unknown):
        return Attribution(memory.used_bytes, known=False)
    held: Mapping[int, int | None] = {each.pid: each.used_bytes for each in processes}
    ours = {pid: used for pid, used in held.items() if pid in serving or pid in rollout}
    if None in ours.values() or not any(pid in held for pid in serving):
        return Attribution(memory.used_bytes, known=False)
    rollout_bytes = sum(used or 0 for pid, used in ours.items() if pid in rollout)
    return Attribution(max(0, memory.used_bytes - rollout_bytes), known=True)
