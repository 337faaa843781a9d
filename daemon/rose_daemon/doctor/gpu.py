"""The GPU side: driver, NVML, memory mapping, MPS.  All of it is needed where `device.kind` is cuda only."""

from __future__ import annotations

import importlib
import re
import shutil
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

from rose.config import Config
from rose_daemon.doctor.finding import HOST, Finding, Findings, Roots, Status, error, missing, ok, warning
from rose_daemon.telemetry import faults
from rose_daemon.telemetry.normalise import reason_of
from rose_daemon.telemetry.nvml import NvmlReader, Sweep

ResultT = TypeVar("ResultT")

_PATIENCE_S = 5.0
_FOR_CUDA = "not needed: device.kind is cpu"


def checks(
    config: Config, roots: Roots = HOST, sweep: Callable[[], Sweep] = lambda: NvmlReader().sweep()
) -> Findings:
    """All of them.  Calls of the driver that hang are left behind after some seconds."""
    needed = config.device.kind == "cuda"
    driver = _driver(roots, needed)
    yield driver
    yield _nvml(needed, sweep)
    if driver.status is Status.OK:
        yield _device_nodes(roots)
    yield _mapping(needed)
    yield _mps(config)


def _why(text: str, needed: bool) -> str:
    return text if needed else f"{text} ({_FOR_CUDA})"


def _driver(roots: Roots, needed: bool) -> Finding:
    text = roots.text("proc", "driver/nvidia/version")
    if text is None:
        advice = "install the NVIDIA driver, or give the container its devices (nvidia-container-toolkit)"
        return missing("driver", _why("no NVIDIA driver is loaded", needed), advice, needed=needed)
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\S+)", text)
    return ok("driver", f"NVIDIA {found[1] if found else text.splitlines()[0]}")


def _nvml(needed: bool, sweep: Callable[[], Sweep]) -> Finding:
    if find_spec("pynvml") is None:
        text = _why("the package nvidia-ml-py is not installed", needed)
        return missing("nvml", text, 'pip install "rose-coserve[gpu]"', needed=needed)
    found = _within(sweep)
    if found is None:
        text = f"NVML did not answer within {_PATIENCE_S:.0f} s"
        return error("nvml", text, "see dmesg for NVRM and Xid lines")
    if found.failure is not None:
        reason = reason_of(found.failure)
        advice = faults.advice(reason) or "is the driver loaded, and of the version of its library?"
        return missing("nvml", _why(f"NVML does not work: {reason}", needed), advice, needed=needed)
    if not found.devices:
        return missing("nvml", _why("NVML lists no GPU", needed), "is one visible here?", needed=needed)
    names = ", ".join(f"{each.identity.name} {each.identity.uuid}" for each in found.devices)
    return ok("nvml", f"{len(found.devices)} devices: {names}")


def _device_nodes(roots: Roots) -> Finding:
    """Without these links `systemctl daemon-reload` takes the GPUs from running containers (fault 4)."""
    nodes = sorted(roots.dev.glob("nvidia[0-9]*"))
    lacking = [node.name for node in nodes if not (roots.dev / "char" / f"195:{node.name[6:]}").exists()]
    if lacking:
        text = f"no links below /dev/char for {', '.join(lacking)}"
        advice = "sudo nvidia-ctk system create-dev-char-symlinks --create-all"
        return warning("device_nodes", text, advice)
    return ok("device_nodes", f"{len(nodes)} devices, with links below /dev/char")


def _mapping(needed: bool) -> Finding:
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        text = _why("the package cuda-bindings is not installed", needed)
        return missing("vmm", text, 'pip install "rose-coserve[gpu]"', needed=needed)
    supported = _within(_virtual_memory)
    if supported is None or isinstance(supported, str):
        text = _why(f"the CUDA driver does not tell: {supported or 'it hangs'}", needed)
        return missing("vmm", text, "is the driver loaded?", needed=needed)
    if not supported:
        text = "the device cannot map memory by page"
        return warning("vmm", text, "KV memory cannot be given back from it in parts")
    return ok("vmm", "the device maps memory by page")


def _virtual_memory() -> bool | str:
    """Whether device 0 maps memory by page, or why that is not known.  Makes no context on the device."""
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
        (code,) = driver.cuInit(0)
        if int(code):
            return str(getattr(code, "name", code))
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        code, value = driver.cuDeviceGetAttribute(attribute, 0)
    except (ImportError, RuntimeError, AttributeError) as problem:
        return str(problem)
    return str(getattr(code, "name", code)) if int(code) else bool(value)


def _mps(config: Config) -> Finding:
    enabled, binary = config.mps.enabled, config.mps.control
    if shutil.which(binary) is None:
        text = f"{binary} is not found" + ("" if enabled else " (not needed: mps.enabled is false)")
        return missing("mps", text, "it comes with the NVIDIA driver: see mps.control", needed=enabled)
    if not enabled:
        return Finding("mps", Status.ABSENT, "mps.enabled is false: serving and rollout take turns")
    return ok("mps", f"{binary} is there; `rose status` says whether its daemon runs")


def _within(call: Callable[[], ResultT]) -> ResultT | None:
    """What `call` answers, or None if that takes too long: a driver may hang, and cannot be interrupted."""
    answers: list[ResultT] = []
    thread = threading.Thread(target=lambda: answers.append(call()), name="doctor", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return answers[0] if answers else None
