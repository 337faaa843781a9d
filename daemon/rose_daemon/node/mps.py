"""How engines share the GPU of this node: in turns, or through MPS where the operator opted in."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path

from rose.boards import Owner
from rose.config import Config, ReplicaConfig
from rose.core.events import DeviceObserved, EngineExited, EngineReady, NodeEvent
from rose.core.readings import Unknown
from rose.engines.vllm.launch import EngineCommand
from rose.units import ReplicaId
from rose_daemon.mps.control import MpsControl, open_control
from rose_daemon.mps.plan import differences
from rose_daemon.mps.watch import MpsFaults, sharing
from rose_daemon.node import warden
from rose_daemon.node.engines import CommandBuilder
from rose_daemon.node.warden import descendants, parents

TIME_SLICE = "time-slice"
_PROC = Path("/proc")


def open_mps(config: Config) -> NodeMps | None:
    """MPS as `rose.toml` has it; None: engines take turns.  Raises NotReady."""
    return NodeMps(open_control(config)) if config.mps.enabled else None


class NodeMps:
    """The node's part in MPS: the rollout engine's environment, who is a client, and faults."""

    def __init__(self, control: MpsControl) -> None:
        self._control = control
        self._clients: dict[int, int] | None = None
        self.faults = MpsFaults()
        self.mode = TIME_SLICE
        """`mps` once the serving engine was seen on our daemon."""

    def builder(self, build: CommandBuilder) -> CommandBuilder:
        """Commands of opportunistic engines get their share; all others are left as they are."""
        share = self._control.plan.rollout_environ()
        share |= {warden.BEFORE_KILL: json.dumps(self._control.before_kill())}

        def built(section: ReplicaConfig, config: Config) -> EngineCommand:
            command = build(section, config)
            if section.kind != "opportunistic":
                return command
            return command._replace(env=command.env | share)

        return built

    def look(self, serving: Owner | Unknown | None) -> None:
        """See who is on the daemon.  Runs NVIDIA's command and reads /proc: call it in a thread."""
        self._clients = self._control.clients()
        pids = [serving.pid, *descendants(serving.pid)] if isinstance(serving, Owner) else []
        self.mode = sharing(self._clients or {}, pids)

    def heard(self, event: NodeEvent, lent: Collection[ReplicaId], serving: Owner | Unknown | None) -> None:
        """What happened to engines tells of the server that they share."""
        match event:
            case EngineExited(replica=replica, reason=reason) if replica in lent:
                self.faults.exited(reason, serving if isinstance(serving, Owner) else None)
            case EngineReady(replica=replica) if replica in lent:
                self.faults.ready()
            case _:
                pass

    def health(self, serving: Owner | Unknown | None) -> DeviceObserved:
        """What the ends of rollout engines tell of the server."""
        return self.faults.health(serving if isinstance(serving, Owner) else None)

    def ignored_limits(self, root: int) -> list[str]:
        """What the clients among an engine's processes do not have as they should, by their environment."""
        tree = {root, *descendants(root, parents())}
        return [
            f"process {pid}: {fault}"
            for pid in sorted(tree & set(self._clients or ()))
            for fault in differences(self._control.plan.rollout_environ(), _environ(pid))
        ]


def _environ(pid: int) -> dict[str, str]:
    """Environment that a process was started with; empty if it is gone, or not ours to see."""
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in data.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
