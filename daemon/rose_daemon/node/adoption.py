"""Engines that outlived their rosed: their records, proof of who they are, and how to hold on to them.

The warden of an engine writes `engine-<replica>.json` into the run directory before it starts the engine,
and takes it away with itself.  Whoever connects to the warden's socket becomes its lifeline; the kernel says
which process listens there, so that no other one can be taken for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import select
import signal
import socket
import struct
from pathlib import Path
from typing import Any

import msgspec

from rose.boards import Owner
from rose.config import Config, ReplicaConfig
from rose.core.adoption import EngineIdentity
from rose.core.readings import GatePolicy, GateTransition, ReplicaReading, StepRecord
from rose.engines.vllm.launch import EngineCommand
from rose.units import ReplicaId
from rose_daemon.node import warden

_GOES_BY = ("ROSE_ENGINE_", "VLLM_", "CUDA_", "NVIDIA_", "OMP_", "NCCL_", "HF_", "TORCH", "LD_", "PYTHON")
"""Beginnings of the names of what an engine goes by; the rest differs from start to start of a service."""
_SHARED = (GatePolicy, ReplicaReading, GateTransition, StepRecord)
_PEER = struct.Struct("3i")
_TRIES, _TRY_S, _ANSWER_S = 20, 0.1, 10.0
_KILLED = 128 + signal.SIGKILL


class EngineRecord(msgspec.Struct, frozen=True):
    """The file: an engine's warden, and what was started."""

    identity: EngineIdentity
    pid: int
    start_ticks: int
    socket: str

    @property
    def owner(self) -> Owner:
        """The warden."""
        return Owner(self.pid, self.start_ticks)


def record_path(config: Config, replica: ReplicaId) -> Path:
    """Where the record of the replica's engine lies."""
    return Path(config.node.run_dir) / f"engine-{replica}.json"


def identity(config: Config, section: ReplicaConfig, command: EngineCommand) -> EngineIdentity:
    """What is started by `command`; that of the configured checkpoint, whatever copy of it is loaded."""
    env = sorted(item for item in command.env.items() if item[0].startswith(_GOES_BY))
    layouts = [(kind.__name__, kind._fields) for kind in _SHARED]
    return EngineIdentity(
        node=config.node.id,
        replica=section.id,
        port=section.port,
        command=_digest((msgspec.to_builtins(section), command.argv, env)),
        boards=_digest(layouts),
    )


def _digest(content: object) -> str:
    return hashlib.blake2b(msgspec.json.encode(content), digest_size=16).hexdigest()


def order(config: Config, found: EngineIdentity) -> dict[str, str] | None:
    """What to tell the warden (`warden.ADOPTION`); None where engines end with their rosed."""
    if not config.node.adopt_grace_s:
        return None
    content: dict[str, Any] = {
        "grace_s": config.node.adopt_grace_s,
        "directory": config.node.run_dir,
        "record": str(record_path(config, ReplicaId(found.replica))),
        "body": {"identity": msgspec.to_builtins(found)},
    }
    return {warden.ADOPTION: msgspec.json.encode(content).decode()}


def records(run_dir: Path) -> list[EngineRecord]:
    """Of the wardens that live; files of others are taken away."""
    found = []
    for path in sorted(run_dir.glob("engine-*.json")):
        with contextlib.suppress(OSError):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=EngineRecord)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                record = None
            if record is not None and record.owner.alive():
                found.append(record)
            else:
                path.unlink(missing_ok=True)
                if record is not None:
                    (run_dir / Path(record.socket).name).unlink(missing_ok=True)
    return found


def ports_held(run_dir: Path) -> dict[str, int]:
    """Ports of engines that may be taken over, by replica."""
    return {record.identity.replica: record.identity.port for record in records(run_dir)}


class AdoptedProcess:
    """A warden that is not our child.  It ends when told, and tells how its engine ended."""

    def __init__(self, owner: Owner, pidfd: int, lifeline: socket.socket) -> None:
        self._owner = owner
        self._pidfd = pidfd
        self._lifeline = lifeline
        self._end = asyncio.create_task(self._watch())

    @property
    def pid(self) -> int:
        """Pid of the warden."""
        return self._owner.pid

    async def wait(self) -> int:
        """Until it has ended; its exit code, 137 if it was killed."""
        return await asyncio.shield(self._end)

    def send_signal(self, number: int, /) -> None:
        """As of a child.  Raises ProcessLookupError."""
        if self._pidfd < 0:
            raise ProcessLookupError(self.pid)
        signal.pidfd_send_signal(self._pidfd, number)

    async def _watch(self) -> int:
        loop, said = asyncio.get_running_loop(), b""
        try:
            with contextlib.suppress(OSError):
                while data := await loop.sock_recv(self._lifeline, 64):
                    said += data
            await asyncio.to_thread(select.select, [self._pidfd], [], [])  # it is about to end
        finally:
            self._lifeline.close()
            os.close(self._pidfd)
            self._pidfd = -1
        return int(said) if said.strip().isdigit() else _KILLED


async def take_over(record: EngineRecord) -> AdoptedProcess | None:
    """Become the lifeline of the engine's warden; None if it is not there, or somebody else's."""
    try:
        pidfd = os.pidfd_open(record.pid)
    except OSError:
        return None
    for _ in range(_TRIES):
        lifeline = socket.socket(socket.AF_UNIX)
        lifeline.setblocking(False)
        try:
            async with asyncio.timeout(_ANSWER_S):
                if await _accepted(record, lifeline):
                    return AdoptedProcess(record.owner, pidfd, lifeline)
        except (OSError, TimeoutError):
            lifeline.close()
            break
        lifeline.close()
        await asyncio.sleep(_TRY_S)  # it has not noticed yet that its rosed is gone
    os.close(pidfd)
    return None


async def _accepted(record: EngineRecord, lifeline: socket.socket) -> bool:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(lifeline, record.socket)
    pid, _, _ = _PEER.unpack(lifeline.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if pid != record.pid or not record.owner.alive():
        raise ConnectionRefusedError(record.socket)
    return await loop.sock_recv(lifeline, len(warden.ADOPTED)) == warden.ADOPTED
