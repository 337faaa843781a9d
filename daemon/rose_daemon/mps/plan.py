"""Where a GPU's control daemon lives, and what its processes find in their environment.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rose.config import MpsConfig
from rose.errors import ConfigError
from rose.units import MIB

PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
LOG_DIRECTORY = "CUDA_MPS_LOG_DIRECTORY"
THREAD_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class MpsPlan(NamedTuple):
    """One GPU under MPS.  Its daemon sees that GPU alone, so the GPU's index is 0 to all its clients."""

    uuid: str
    directory: Path
    thread_percentage: int
    memory_bytes: int
    """Device memory that the rollout engine may take; 0: no limit."""

    @classmethod
    def of(cls, config: MpsConfig, uuid: str) -> MpsPlan:
        """The plan for the GPU of that UUID (`GPU-...` or `MIG-...`)."""
        return cls(uuid, Path(config.run_dir) / uuid, config.thread_percentage, config.memory_bytes)

    @property
    def pipe_directory(self) -> Path:
        """Where the daemon is spoken to."""
        return self.directory / "pipe"

    def daemon_environ(self) -> dict[str, str]:
        """For the control daemon, and for every call of its command."""
        return {
            PIPE_DIRECTORY: str(self.pipe_directory),
            LOG_DIRECTORY: str(self.directory / "log"),
            VISIBLE_DEVICES: self.uuid,
        }

    def serving_environ(self) -> dict[str, str]:
        """What the operator adds to the serving engine's environment: where the daemon is, and no limit."""
        return {PIPE_DIRECTORY: str(self.pipe_directory), VISIBLE_DEVICES: self.uuid}

    def rollout_environ(self) -> dict[str, str]:
        """What a rollout engine gets on top of its environment."""
        environ = self.serving_environ() | {THREAD_PERCENTAGE: str(self.thread_percentage)}
        if self.memory_bytes:
            environ[MEMORY_LIMIT] = pinned_limit(self.memory_bytes, self.uuid, (self.uuid,))
        return environ


def pinned_limit(memory_bytes: int, device: str, visible: Sequence[str]) -> str:
    """The value of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, such as `0=10240M`.

    A value in any other form (no index, a UUID for one, `MB`) is ignored by MPS in silence, so `device` (an
    index or UUID) becomes its index among those `visible` to the daemon.  Raises ConfigError.
    """
    if memory_bytes < MIB:
        raise ConfigError(f"mps.memory_bytes: {memory_bytes} is less than a MiB", "0 means no limit")
    if device.isdigit() and int(device) < len(visible):
        index = int(device)
    elif device in visible:
        index = visible.index(device)
    else:
        raise ConfigError(f"MPS: {device} is none of the daemon's devices ({', '.join(visible)})")
    return f"{index}={memory_bytes // MIB}M"


def differences(wanted: dict[str, str], found: dict[str, str]) -> list[str]:
    """Which of the variables a process does not have as wanted, read back from its environment."""
    return [
        f"{name} is {found.get(name, 'not set')}, not {value}"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
