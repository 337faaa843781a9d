"""The GPUs of a host, watched from one thread; and the one that this node lends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import structlog

from rose.core.readings import Unknown
from rose.units import NS_PER_S
from rose_daemon.telemetry import faults
from rose_daemon.telemetry.faults import FaultLog, GpuFaults
from rose_daemon.telemetry.kernel_log import KernelLog
from rose_daemon.telemetry.normalise import GpuReading, HostMemory, normalise, reason_of
from rose_daemon.telemetry.nvml import NvmlReader
from rose_daemon.telemetry.sampler import Sampler

PERIOD_S = 1.0
LIMIT_NS = 5 * NS_PER_S
"""A sample older than this is unknown."""
_LIBRARY = "NVML"

log = structlog.get_logger("rosed")


class GpuSample(NamedTuple):
    """One look at all GPUs."""

    readings: tuple[GpuReading, ...]
    failure: str
    """Why NVML as a whole does not answer; empty if it does."""
    troubles: Mapping[str, str]
    """Trouble by UUID (by index, where that was never learnt); those that are well are not in it."""

    def trouble_of(self, reading: GpuReading) -> str:
        """A stable code, or "" for none."""
        return self.troubles.get(_key(reading), "")

    def find(self, wanted: str) -> GpuReading | Unknown:
        """The device of that UUID, index or PCI address; "" means the only one."""
        if not self.readings:
            return Unknown(self.failure or "gpu_not_found")
        whole = {each.number: each for each in reversed(self.readings)}
        if not wanted:
            return next(iter(whole.values())) if len(self.readings) == 1 else Unknown("gpu_not_named")
        if wanted.isdigit():
            return whole.get(int(wanted)) or Unknown("gpu_not_found")
        named = (each for each in self.readings if wanted.lower() in {each.uuid.lower(), each.pci.lower()})
        return next(named, Unknown("gpu_not_found"))


class GpuWatch:
    """Looks every second.  Says what is wrong with any GPU of the host, once a minute at most each."""

    def __init__(
        self,
        wanted: str,
        host_memory: Callable[[], HostMemory | Unknown],
        *,
        reader: NvmlReader | None = None,
        kernel_log: KernelLog | None = None,
        period_s: float = PERIOD_S,
        limit_ns: int = LIMIT_NS,
    ) -> None:
        self._wanted = wanted
        self._host_memory = host_memory
        self._reader = reader or NvmlReader()
        self._kernel_log = kernel_log or KernelLog()
        self._faults = GpuFaults()
        self._said = FaultLog()
        self.sampler = Sampler(self._look, period_s=period_s, limit_ns=limit_ns, name="nvml")

    def reading(self, now_ns: int) -> GpuReading | Unknown:
        """The device that is lent."""
        sample = self.sampler.latest(now_ns)
        return sample if isinstance(sample, Unknown) else sample.find(self._wanted)

    def trouble(self, now_ns: int) -> str:
        """What is wrong with it: a stable code, or "" for none (or where nothing is known of it)."""
        sample = self.sampler.latest(now_ns)
        reading = self.reading(now_ns)
        if isinstance(sample, Unknown) or isinstance(reading, Unknown):
            return ""
        return sample.trouble_of(reading)

    def _look(self) -> GpuSample:
        """Runs in the sampler's thread, as does all that it calls."""
        sweep = self._reader.sweep()
        host = self._host_memory()
        readings = tuple(normalise(raw, host) for raw in sweep.devices)
        for fault in self._kernel_log.faults():
            self._faults.kernel_said(fault, readings)
        troubles = {_key(each): trouble for each in readings if (trouble := self._faults.observe(each))}
        sample = GpuSample(readings, reason_of(sweep.failure) if sweep.failure else "", troubles)
        self._say(sample, time.monotonic_ns())
        return sample

    def _say(self, sample: GpuSample, now_ns: int) -> None:
        self._say_of(_LIBRARY, sample.failure, now_ns)
        for reading in () if sample.failure else sample.readings:
            memory = reading.memory.reason if isinstance(reading.memory, Unknown) else ""
            self._say_of(str(reading), sample.trouble_of(reading) or memory, now_ns)

    def _say_of(self, subject: str, fault: str, now_ns: int) -> None:
        if not fault:
            if (text := self._said.fine(subject)) is not None:
                log.info(text, code="gpu_well", subject=subject)
            return
        hint = faults.advice(fault)
        text = self._said.failed(subject, f"{fault}: {hint}" if hint else fault, now_ns)
        if text is not None:
            log.warning(text, code=fault, subject=subject)


def _key(reading: GpuReading) -> str:
    return reading.uuid or str(reading.number)
