"""The control daemon of one GPU: start it, ask it, stop it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from rose.config import Config
from rose.errors import NotReady
from rose_daemon.mps import release
from rose_daemon.mps.plan import MpsPlan
from rose_daemon.telemetry.gpu import GpuSample
from rose_daemon.telemetry.normalise import HostMemory, normalise, reason_of
from rose_daemon.telemetry.nvml import NvmlReader

_START_S = 20.0


class MpsControl(NamedTuple):
    """Speaks to the daemon that `plan` describes, through NVIDIA's own command."""

    binary: str
    plan: MpsPlan

    def clients(self) -> dict[int, int] | None:
        """Client pid -> server pid; None while the daemon does not answer."""
        try:
            return release.clients(self.binary, str(self.plan.pipe_directory))
        except release.ControlFailed:
            return None

    def start(self) -> None:
        """Start the daemon unless it runs.  Raises NotReady."""
        if self.clients() is not None:
            return
        environ = self.plan.daemon_environ()
        try:
            for name in ("pipe", "log"):
                (self.plan.directory / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            started = subprocess.run(
                [self.binary, "-d"],
                env=os.environ | environ,
                capture_output=True,
                text=True,
                timeout=_START_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotReady(f"MPS: {self.binary} -d: {error}", "it comes with the NVIDIA driver") from None
        if started.returncode or self.clients() is None:
            said = (started.stderr or started.stdout).strip() or "it does not answer"
            raise NotReady(f"MPS: {self.binary} -d: {said}", f"see {self.plan.directory / 'log'}")

    def stop(self) -> None:
        """End the daemon.  Raises NotReady while it has clients."""
        clients = self.clients()
        if clients is None:
            return
        if clients:
            pids = ", ".join(map(str, sorted(clients)))
            raise NotReady(f"MPS: processes {pids} are on it", "stop them first: without it they fail")
        try:
            release.ask(self.binary, str(self.plan.pipe_directory), "quit")
        except release.ControlFailed as error:
            raise NotReady(f"MPS: {error}") from None

    def before_kill(self) -> tuple[str, ...]:
        """Arguments of `release.py` for the warden, which adds the pids."""
        return (str(Path(release.__file__)), self.binary, str(self.plan.pipe_directory))


def open_control(config: Config) -> MpsControl:
    """The control of the GPU that `rose.toml` names.  Raises NotReady when NVML cannot tell its UUID."""
    return MpsControl(config.mps.control, MpsPlan.of(config.mps, _uuid(config.device.gpu)))


def _uuid(gpu: str) -> str:
    """The UUID of the device; asked for only where `gpu` is none."""
    if gpu.startswith(("GPU-", "MIG-")):
        return gpu
    sweep = NvmlReader().sweep()
    host = HostMemory(1, 1)  # nobody looks at memory here
    sample = GpuSample(
        tuple(normalise(raw, host) for raw in sweep.devices),
        reason_of(sweep.failure) if sweep.failure else "",
        {},
    )
    found = sample.find(gpu)
    if (uuid := getattr(found, "uuid", "")) == "":
        raise NotReady(f"device.gpu: {gpu or 'the only GPU'} is not found: {found}", "name it by its UUID")
    return str(uuid)
