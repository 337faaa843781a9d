"""The gate boards that this rosed writes: one policy for each replica, renewed as long as rosed is well."""

from __future__ import annotations

from pathlib import Path

from rose.boards import BoardPaths, BoardWriter
from rose.core.readings import GatePolicy
from rose.errors import RoseError
from rose.units import ReplicaId


class Gates:
    """Writes policies and keeps them alive.

    A policy says until when it holds.  `renew` moves that instant on every tick; when rosed hangs or dies
    nobody does, and every gate closes by itself.
    """

    def __init__(self, paths: BoardPaths, lease_ns: int) -> None:
        self._paths = paths
        self._lease_ns = lease_ns
        self._closed = False
        self._writers: dict[ReplicaId, BoardWriter[GatePolicy]] = {}
        self._policies: dict[ReplicaId, GatePolicy] = {}

    def policy(self, replica: ReplicaId) -> GatePolicy | None:
        """The policy last published for the replica."""
        return self._policies.get(replica)

    def publish(self, replica: ReplicaId, policy: GatePolicy, now_ns: int) -> None:
        """Make `policy` the replica's from now on, and wake its engine.  Raises RoseError."""
        if self._closed:
            return
        writer = self._writers.get(replica)
        if writer is None:
            writer = self._writers[replica] = self._writer(self._paths.gate(replica))
        self._policies[replica] = policy
        writer.publish(policy._replace(alive_until_ns=now_ns + self._lease_ns))
        writer.bell.ring()

    @staticmethod
    def _writer(path: Path) -> BoardWriter[GatePolicy]:
        try:
            return BoardWriter(path, GatePolicy)
        except OSError as error:
            hint = "check that node.run_dir is a tmpfs with room"
            raise RoseError(f"gate board {path} cannot be made: {error.strerror}", hint) from None

    def renew(self, now_ns: int) -> None:
        """Extend every policy: same revision, later end.  No bell, as nothing changed."""
        for replica, policy in self._policies.items():
            self._writers[replica].publish(policy._replace(alive_until_ns=now_ns + self._lease_ns))

    def ring(self) -> None:
        """Wake every engine that waits at its gate: the serving engine's board says something new."""
        for writer in self._writers.values():
            writer.bell.ring()

    def close(self) -> None:
        """Close every gate and take the boards away; nothing is published from now on."""
        self._closed = True
        for replica, writer in self._writers.items():
            writer.publish(self._policies[replica]._replace(alive_until_ns=0))
            writer.bell.ring()
            Path(writer.path).unlink(missing_ok=True)
        self._writers.clear()
        self._policies.clear()
