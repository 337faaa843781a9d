"""The device that serving and rollout share, as rosed watches it: a GPU through NVML, or the host's cores."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from rose.boards import Owner
from rose.config import Config, DeviceConfig
from rose.core.events import DeviceObserved, MemoryObserved
from rose.core.readings import Unknown
from rose_daemon.node import host
from rose_daemon.node.warden import descendants, parents
from rose_daemon.telemetry import faults
from rose_daemon.telemetry.gpu import GpuWatch
from rose_daemon.telemetry.normalise import HostMemory, attribute


class Device(Protocol):
    """What rosed asks of the shared device.  Calls may read /proc, so they belong in a thread."""

    def memory(self, serving: Owner | Unknown | None, rollout_pids: Iterable[int]) -> MemoryObserved:
        """Its memory, and whose it is."""

    def utilisation(self) -> float | Unknown:
        """Its busy share; on a CPU since the last call."""

    def health(self) -> DeviceObserved:
        """What is wrong with it, if anything."""

    def name(self) -> str:
        """What it is, for people."""

    def close(self) -> None:
        """Stop watching."""


def open_device(config: Config) -> Device:
    """The device that `rose.toml` names, watched from now on."""
    if config.device.kind == "cpu":
        return CpuDevice(config.device)
    watch = GpuWatch(config.device.gpu, host_memory)
    watch.sampler.start()
    return GpuDevice(watch)


def host_memory() -> HostMemory | Unknown:
    """Memory of the host, which parts without their own share."""
    total, available = host.meminfo("MemTotal"), host.meminfo("MemAvailable")
    if isinstance(total, Unknown) or isinstance(available, Unknown):
        return total if isinstance(total, Unknown) else Unknown("meminfo_incomplete")
    return HostMemory(total, available)


class CpuDevice:
    """Cores and memory of the host."""

    def __init__(self, device: DeviceConfig) -> None:
        self._device = device
        self._use = host.CpuUse(device.cpus)

    def memory(self, serving: Owner | Unknown | None, rollout_pids: Iterable[int]) -> MemoryObserved:
        """Anonymous and shared memory of the engines' processes, and what the host has left."""
        return host.device_memory(self._device.memory_bytes, serving, rollout_pids)

    def utilisation(self) -> float | Unknown:
        """Busy share of the cores since the last call."""
        return self._use.sample()

    def health(self) -> DeviceObserved:
        """A CPU is always well."""
        return DeviceObserved("")

    def name(self) -> str:
        """The cores."""
        return f"CPU cores {','.join(map(str, self._device.cpus))}"

    def close(self) -> None:
        """Nothing to stop."""


class GpuDevice:
    """One GPU or MIG slice."""

    def __init__(self, watch: GpuWatch) -> None:
        self._watch = watch

    def memory(self, serving: Owner | Unknown | None, rollout_pids: Iterable[int]) -> MemoryObserved:
        """As NVML says; all use is charged to serving unless its processes are found among the device's."""
        reading = self._watch.reading(time.monotonic_ns())
        memory = reading if isinstance(reading, Unknown) else reading.memory
        if isinstance(reading, Unknown) or isinstance(memory, Unknown):
            unknown = memory if isinstance(memory, Unknown) else Unknown("not_observed")
            return MemoryObserved(unknown, unknown, unknown, attributed=False)
        parent_of = parents()
        roots = [serving.pid] if isinstance(serving, Owner) and serving.alive() else []
        whose = attribute(
            memory,
            reading.processes,
            {pid for root in roots for pid in (root, *descendants(root, parent_of))},
            {pid for root in rollout_pids for pid in (root, *descendants(root, parent_of))},
        )
        return MemoryObserved(whose.serving_bytes, memory.free_bytes, memory.total_bytes, whose.known)

    def utilisation(self) -> float | Unknown:
        """As NVML says; unknown on a MIG slice."""
        reading = self._watch.reading(time.monotonic_ns())
        return reading if isinstance(reading, Unknown) else reading.utilisation

    def health(self) -> DeviceObserved:
        """Lost, out of reach, or nothing known to be wrong."""
        trouble = self._watch.trouble(time.monotonic_ns())
        return DeviceObserved(trouble, faults.drains(trouble), faults.advice(trouble))

    def name(self) -> str:
        """Name, UUID and PCI address, as far as NVML told."""
        reading = self._watch.reading(time.monotonic_ns())
        if isinstance(reading, Unknown):
            return f"GPU ({reading})"
        slowed = "" if isinstance(reading.throttled, Unknown) else ", ".join(reading.throttled)
        return f"{reading.name} {reading}" + (f", slowed by {slowed}" if slowed else "")

    def close(self) -> None:
        """Stop; a driver call that hangs is left behind."""
        self._watch.sampler.stop()
