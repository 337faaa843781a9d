"""What is wrong with a GPU, judged from readings and the kernel's log; and saying so without flooding it."""

from __future__ import annotations

import re
from typing import NamedTuple

from rose.core.readings import Unknown
from rose.units import NS_PER_S
from rose_daemon.telemetry.normalise import GpuReading

ACCESS_LOST_AFTER = 3
"""So many unknown errors in a row mean that this process may not touch the device any more."""
GPU_LOST = "gpu_lost"
ACCESS_LOST = "gpu_access_lost"
_ADVICE = {
    GPU_LOST: "it needs a reset or a reboot; its replicas are drained",
    ACCESS_LOST: "a container lost its device rules, as after `systemctl daemon-reload`: recreate it, and "
    "check that /dev/char/195:* links to the NVIDIA nodes",
    "driver_mismatch": "the driver was upgraded under running processes: restart rosed and the engines",
    "pynvml_missing": 'install ROSE with its extra: pip install "rose-coserve[gpu]"',
    "driver_not_loaded": "waiting for the driver",
}
_FATAL_XIDS = {
    48: "double-bit ECC error",
    62: "halt of an internal micro-controller",
    64: "failed page retirement or row remapping",
    74: "NVLink error",
    79: "fallen off the bus",
    95: "uncontained ECC error",
    119: "GSP timeout",
    120: "GSP error",
}
"""Errors (NVIDIA's Xid catalogue) after which a device is of no use before a reset."""
_LOST_XID = 79
_ADDRESS = re.compile(r"([0-9a-f]+):([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-9a-f]+)?")


class KernelFault(NamedTuple):
    """A line of the kernel's log about a GPU."""

    pci: str
    """Empty if the line names none."""
    xid: int | None


class GpuFaults:
    """The trouble each GPU is in, from one reading to the next.  A lost device stays lost: only a restart of
    rosed, after the operator's repair, forgets it."""

    def __init__(self) -> None:
        self._unknown_errors: dict[str, int] = {}
        self._lost: dict[str, str] = {}

    def observe(self, reading: GpuReading) -> str:
        """Its trouble now: a stable code, or "" for none."""
        key = reading.uuid or str(reading.number)
        reason = reading.memory.reason if isinstance(reading.memory, Unknown) else ""
        if reason == "gpu_lost":
            self._lost.setdefault(key, GPU_LOST)
        if fatal := [xid for xid in reading.xids if xid in _FATAL_XIDS]:
            self._lost.setdefault(key, _lost_to(fatal[0]))
        if key in self._lost:
            return self._lost[key]
        in_a_row = self._unknown_errors.get(key, 0) + 1 if reason == "nvml_unknown_error" else 0
        self._unknown_errors[key] = in_a_row
        return ACCESS_LOST if in_a_row >= ACCESS_LOST_AFTER else ""

    def kernel_said(self, fault: KernelFault, readings: tuple[GpuReading, ...]) -> None:
        """Mark the device that a kernel line names; without a whole address the only one, or none."""
        if fault.xid is not None and fault.xid not in _FATAL_XIDS:
            return
        named = [each for each in readings if _same_pci(fault.pci, each.pci)]
        if _bus(fault.pci) is None and len({each.number for each in readings}) == 1:
            named = list(readings)
        for reading in named:
            self._lost.setdefault(reading.uuid or str(reading.number), _lost_to(fault.xid))


def _same_pci(one: str, other: str) -> bool:
    """Whether two PCI addresses mean one device: kernel and NVML write domain and function differently."""
    bus = _bus(one)
    return bus is not None and bus == _bus(other)


def _bus(pci: str) -> tuple[int, str, str] | None:
    """Domain, bus and device; None for what is no whole address."""
    match = _ADDRESS.fullmatch(pci.lower())
    return match and (int(match[1], 16), match[2], match[3])


def _lost_to(xid: int | None) -> str:
    return GPU_LOST if xid in {None, _LOST_XID} else f"gpu_xid_{xid}"


def drains(trouble: str) -> bool:
    """Whether the device is gone for good, as against out of reach for now."""
    return trouble == GPU_LOST or trouble.startswith("gpu_xid_")


def advice(trouble: str) -> str:
    """What an operator can do about it, or what it means; "" where there is nothing to add."""
    if trouble.startswith("gpu_xid_"):
        return f"{_FATAL_XIDS[int(trouble.rpartition('_')[2])]}: {_ADVICE[GPU_LOST]}"
    return _ADVICE.get(trouble, "")


class FaultLog:
    """Says each subject's fault at most once a minute, and how often it occurred when it is over."""

    def __init__(self, period_ns: int = 60 * NS_PER_S) -> None:
        self._period_ns = period_ns
        self._said_ns: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._open: set[str] = set()

    def failed(self, subject: str, fault: str, now_ns: int) -> str | None:
        """The line to write about a failure, or None while one was written lately."""
        self._counts[subject] = count = self._counts.get(subject, 0) + 1
        said_ns = self._said_ns.get(subject)
        if said_ns is not None and now_ns - said_ns < self._period_ns:
            return None
        self._said_ns[subject] = now_ns
        self._open.add(subject)
        return f"{fault} (failure {count})" if count > 1 else fault

    def fine(self, subject: str) -> str | None:
        """The line to write about a recovery; None if no failure was written of since the last one."""
        if subject not in self._open:
            return None
        self._open.remove(subject)
        count = self._counts.pop(subject)
        return f"well again after {count} failure{'s' if count > 1 else ''}"
