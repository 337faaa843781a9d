"""Ask NVML about every GPU of the host.  Collects only: what the answers mean is for `normalise` to say.

The library is `pynvml` (package nvidia-ml-py) or anything with the same functions.  An error is an answer
like any other: one device's, or one question's, never stops the rest of the sweep.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

ValueT = TypeVar("ValueT")

NO_BINDING = -1
"""Stands in for an NVML code where the Python package is not installed."""
UNINITIALISED = 1
_XIDS_A_SWEEP_MAX = 64


class Failed(NamedTuple):
    """NVML answered with an error code."""

    code: int


class RawMemory(NamedTuple):
    """nvmlMemory_t, in bytes."""

    total: int
    used: int
    free: int


class RawProcess(NamedTuple):
    """A compute process; `used_bytes` is None where NVML does not tell."""

    pid: int
    used_bytes: int | None


class Identity(NamedTuple):
    """How a device is named: in ROSE's messages, by the kernel, and by its maker."""

    uuid: str
    pci: str
    name: str


NAMELESS = Identity("", "", "")


class RawDevice(NamedTuple):
    """All that one GPU, or one MIG slice, answered."""

    number: int
    """Index of the GPU; for a slice, that of its parent."""
    identity: Identity
    memory: RawMemory | Failed
    utilisation: int | Failed
    """Percent."""
    processes: tuple[RawProcess, ...] | Failed
    clock_reasons: int | Failed
    """Bits of nvmlClocksEventReasons."""
    mig: bool | Failed
    """Whether the GPU is cut into slices (True for a slice too)."""
    xids: tuple[int, ...] = ()
    """Error events since the last sweep."""


class Sweep(NamedTuple):
    """One round over all devices."""

    failure: Failed | None
    """The library as a whole; the devices are then those of earlier sweeps, each failed with that code."""
    devices: tuple[RawDevice, ...]


def import_nvml() -> Any:
    """The module `pynvml`.  Raises ImportError where the package nvidia-ml-py is not installed."""
    return importlib.import_module("pynvml")


class NvmlReader:
    """Sweeps; remembers who the devices are, so that one that is lost can still be named."""

    def __init__(self, load: Callable[[], Any] = import_nvml) -> None:
        self._load = load
        self._nvml: Any = None
        self._ready = False
        self._known: dict[int, Identity] = {}
        self._events: Any = None

    def sweep(self) -> Sweep:
        """Ask everything once.  Begins anew with the library when it was not there, or lost its state."""
        if not self._ready and (failure := self._begin()) is not None:
            return self._all_failed(failure)
        count = self._ask(self._nvml.nvmlDeviceGetCount)
        if isinstance(count, Failed):
            self._end()
            return self._all_failed(count)
        # A device that fell off the bus may be missing from the count; it is still asked for.
        indices = range(max(count, max(self._known, default=-1) + 1))
        found = [device for index in indices for device in self._gpu(index)]
        xids = self._xids()
        if any(device.memory == Failed(UNINITIALISED) for device in found):
            self._end()
        return Sweep(
            None, tuple(each._replace(xids=tuple(xids.get(each.identity.uuid, ()))) for each in found)
        )

    def _begin(self) -> Failed | None:
        try:
            self._nvml = self._load()
        except ImportError:
            return Failed(NO_BINDING)
        begun = self._ask(self._nvml.nvmlInit)
        self._ready = not isinstance(begun, Failed)
        self._events = None
        return begun if isinstance(begun, Failed) else None

    def _end(self) -> None:
        self._ready = False
        self._ask(self._nvml.nvmlShutdown)

    def _all_failed(self, failure: Failed) -> Sweep:
        return Sweep(failure, tuple(_failed(index, self._known[index], failure) for index in self._known))

    def _ask(self, question: Callable[..., ValueT], *arguments: Any) -> ValueT | Failed:
        try:
            return question(*arguments)
        except self._nvml.NVMLError as error:
            return Failed(int(error.value))

    def _gpu(self, index: int) -> list[RawDevice]:
        handle = self._ask(self._nvml.nvmlDeviceGetHandleByIndex, index)
        if isinstance(handle, Failed):
            return [_failed(index, self._known.get(index, NAMELESS), handle)]
        identity = self._identity(index, handle)
        mode = self._ask(self._nvml.nvmlDeviceGetMigMode, handle)
        mig = mode if isinstance(mode, Failed) else bool(mode[0])
        device = self._device(index, identity, handle, mig)
        return [device, *self._slices(index, identity, handle)] if mig is True else [device]

    def _identity(self, index: int, handle: Any) -> Identity:
        known = self._known.get(index)
        uuid = self._ask(self._nvml.nvmlDeviceGetUUID, handle)
        if isinstance(uuid, Failed) or (known is not None and known.uuid == uuid):
            return known or NAMELESS
        name = self._ask(self._nvml.nvmlDeviceGetName, handle)
        pci = self._ask(self._nvml.nvmlDeviceGetPciInfo, handle)
        bus_id = "" if isinstance(pci, Failed) else _text(pci.busId)
        self._known[index] = Identity(_text(uuid), bus_id, "" if isinstance(name, Failed) else _text(name))
        self._watch(handle)
        return self._known[index]

    def _slices(self, index: int, parent: Identity, handle: Any) -> list[RawDevice]:
        count = self._ask(self._nvml.nvmlDeviceGetMaxMigDeviceCount, handle)
        found = []
        for number in range(0 if isinstance(count, Failed) else count):
            part = self._ask(self._nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
            if isinstance(part, Failed):
                continue  # not every slot holds a slice
            uuid = self._ask(self._nvml.nvmlDeviceGetUUID, part)
            if not isinstance(uuid, Failed):
                found.append(self._device(index, parent._replace(uuid=_text(uuid)), part, mig=True))
        return found

    def _device(self, index: int, identity: Identity, handle: Any, mig: bool | Failed) -> RawDevice:
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        processes = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        return RawDevice(
            number=index,
            identity=identity,
            memory=memory
            if isinstance(memory, Failed)
            else RawMemory(int(memory.total), int(memory.used), int(memory.free)),
            utilisation=rates if isinstance(rates, Failed) else int(rates.gpu),
            processes=processes
            if isinstance(processes, Failed)
            else tuple(RawProcess(int(each.pid), _bytes(each.usedGpuMemory)) for each in processes),
            clock_reasons=reasons if isinstance(reasons, Failed) else int(reasons),
            mig=mig,
        )

    # ---- error events ---------------------------------------------------------------------------

    def _watch(self, handle: Any) -> None:
        """Ask to be told of the device's Xid errors; not every part can."""
        if self._events is None:
            events = self._ask(self._nvml.nvmlEventSetCreate)
            if isinstance(events, Failed):
                return
            self._events = events
        kind = self._nvml.nvmlEventTypeXidCriticalError
        self._ask(self._nvml.nvmlDeviceRegisterEvents, handle, kind, self._events)

    def _xids(self) -> dict[str, list[int]]:
        """Events that wait, by UUID; asks without waiting, so the last answer is a time-out."""
        found: dict[str, list[int]] = {}
        for _ in range(_XIDS_A_SWEEP_MAX if self._events is not None else 0):
            event = self._ask(self._nvml.nvmlEventSetWait_v2, self._events, 0)
            if isinstance(event, Failed):
                break
            uuid = self._ask(self._nvml.nvmlDeviceGetUUID, event.device)
            if not isinstance(uuid, Failed):
                found.setdefault(_text(uuid), []).append(int(event.eventData))
        return found


def _failed(index: int, identity: Identity, failure: Failed) -> RawDevice:
    return RawDevice(index, identity, failure, failure, failure, failure, failure)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


def _bytes(value: int | None) -> int | None:
    return None if value is None else int(value)
