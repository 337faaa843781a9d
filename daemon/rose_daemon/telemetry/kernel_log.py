"""What the kernel's log says of GPUs (kmsg(4)): Xid errors, and devices that fell off the bus."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from rose.core.readings import Unknown
from rose_daemon.telemetry.faults import KernelFault

KMSG = Path("/dev/kmsg")
_RECORD_BYTES_MAX = 8192
_RECORDS_A_READ_MAX = 1000
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)(?: [^)]*)?\): (\d+)")
"""A MIG slice is named after the address, as in (PCI:0000:41:00 GPU-I:05)."""
_PCI = re.compile(r"\b[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?\b")


class KernelLines:
    """Finds faults in lines; remembers the address that the driver's lines named last.

    A device that falls off the bus is not always given an Xid number, and the driver breaks its message over
    several lines, the address in the first of them.
    """

    def __init__(self) -> None:
        self._pci = ""

    def take(self, line: str) -> KernelFault | None:
        """What a line says of a GPU; None if nothing."""
        if "NVRM" not in line:
            return None
        if (xid := _XID.search(line)) is not None:
            return KernelFault(_full(xid[1]), int(xid[2]))
        if (pci := _PCI.search(line)) is not None:
            self._pci = pci[0]
        return KernelFault(self._pci, None) if "fallen off the bus" in line else None


def _full(pci: str) -> str:
    """An address with its domain."""
    return pci if pci.count(":") > 1 else f"0000:{pci}"


class KernelLog:
    """New lines of the kernel's log, from the moment this is made."""

    def __init__(self, path: Path = KMSG) -> None:
        self._lines = KernelLines()
        self._descriptor: int | Unknown
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError:  # needs CAP_SYSLOG where kernel.dmesg_restrict is set
            self._descriptor = Unknown("kernel_log_unreadable")

    @property
    def readable(self) -> bool:
        """Whether faults can be seen here."""
        return not isinstance(self._descriptor, Unknown)

    def faults(self) -> list[KernelFault]:
        """Those that came since the last call; never waits."""
        found = []
        for record in self._records():
            # "priority,sequence,time,flags;text", then lines with a leading blank that hold key=value pairs.
            text = record.partition(";")[2].split("\n", 1)[0]
            if (fault := self._lines.take(text)) is not None:
                found.append(fault)
        return found

    def _records(self) -> list[str]:
        records: list[str] = []
        if isinstance(self._descriptor, Unknown):
            return records
        with contextlib.suppress(BlockingIOError):
            for _ in range(_RECORDS_A_READ_MAX):
                try:
                    data = os.read(self._descriptor, _RECORD_BYTES_MAX)
                except BrokenPipeError:
                    continue  # older lines were overwritten before they were read
                if not data:
                    break
                records.append(data.decode(errors="replace"))
        return records
