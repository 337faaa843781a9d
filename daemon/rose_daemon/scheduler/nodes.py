"""The control plane towards nodes: a ZMQ ROUTER that rosed's DEALER connects to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
import zmq
import zmq.asyncio

from rose.core.cluster import ClusterMachine
from rose.core.effects import ClusterEffect, GrantLease, RevokeLease, TellStep
from rose.core.events import ClusterEvent, NodeHeartbeat, NodeLeft, NodeRegistered
from rose.errors import ConfigError, NotReady
from rose.units import NodeId
from rose.wire import (
    MESSAGE_BYTES_MAX,
    PROTOCOL,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Lease,
    Register,
    Step,
    ToNode,
    ToScheduler,
    Unregistered,
    Welcome,
    pack,
    unpack_to_scheduler,
)
from rose_daemon.curve import Nodes, require_private
from rose_daemon.scheduler.telemetry import Telemetry

_QUEUE_MESSAGES = 1000
_KEYS_EVERY_S = 5.0

log = structlog.get_logger()


class NodeLink:
    """Receives from all nodes and answers each on the connection it last spoke on."""

    def __init__(
        self,
        address: str,
        scheduler: str,
        machine: ClusterMachine,
        feed: Callable[[ClusterEvent], None],
        *,
        telemetry: Telemetry,
        curve_dir: str = "",
    ) -> None:
        """Listen on `address`; `curve_dir` "" means without CURVE.  Raises RoseError."""
        require_private(address, curve_dir)
        self._scheduler = scheduler
        self._machine = machine
        self._feed = feed
        self._telemetry = telemetry
        self._peers: dict[NodeId, bytes] = {}
        self._complained: set[bytes] = set()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        # A node that reconnects under its old identity takes over from the dead connection.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._allowed: Nodes | None = None
        try:
            if curve_dir:
                self._allowed = Nodes(Path(curve_dir), self._context)
                self._allowed.secure(self._socket)
            self._socket.bind(address)
        except ConfigError:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            raise NotReady(
                f"scheduler.control: cannot listen on {address}: {error}",
                "is another scheduler running? Set [scheduler] control to a free port",
            ) from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def run(self) -> None:
        """Take in messages until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self._allowed is not None:
                group.create_task(self._keep_keys_fresh(self._allowed))
            while True:
                frames = await self._socket.recv_multipart(copy=False)
                identity = frames[0].bytes
                try:
                    message = unpack_to_scheduler(frames[-1].bytes)
                except msgspec.DecodeError as error:
                    self._complain(identity, "garbage_message", str(error))
                    continue
                if self._allowed is not None and (node := self._allowed.node_of(frames[-1])) != message.node:
                    text = f"the key of node {node} speaks as {message.node}; dropped"
                    self._complain(identity, "node_impostor", text)
                    continue
                self._receive(identity, message)

    @staticmethod
    async def _keep_keys_fresh(allowed: Nodes) -> None:
        """A node's key counts soon after its file came or went, without a restart."""
        while True:
            await asyncio.sleep(_KEYS_EVERY_S)
            try:
                allowed.refresh()
            except ConfigError as error:
                log.warning("curve_keys_unreadable", text=error.what)

    def close(self) -> None:
        """Close the socket."""
        if self._allowed is not None:
            self._allowed.close()
        self._context.destroy(linger=0)

    def perform(self, effect: ClusterEffect) -> None:
        """Send what the machine wants a node to know.  What cannot be sent now is dropped and counted.

        Nothing is lost by that: steps are told again with each heartbeat's answer, and leases, which a node
        only shows, when it registers anew.
        """
        match effect:
            case TellStep(node=node, job=job, rl_step=rl_step, required_version=version):
                self._send(node, Step(job, rl_step, version))
            case GrantLease(node=node, replica=replica, job=job, lease=lease):
                self._send(node, Lease(replica, job, lease, granted=True))
            case RevokeLease(node=node, replica=replica, job=job, lease=lease):
                self._send(node, Lease(replica, job, lease, granted=False))
            case _:
                raise AssertionError(f"not an effect on nodes: {effect!r}")

    def _receive(self, identity: bytes, message: ToScheduler) -> None:
        match message:
            case Register():
                self._register(identity, message)
            case Heartbeat(node=node, session=session):
                if not self._machine.knows(node, session):
                    self._reply(identity, Unregistered(session, self._machine.replaced(node, session)))
                    return
                self._peers[node] = identity
                self._feed(NodeHeartbeat(node, session, message.sequence, message.replicas))
                self._send(node, HeartbeatAck(message.sequence, self._machine.turns_in_flight(node)))
                for step in self._machine.steps(node):
                    self.perform(step)
            case Goodbye(node=node, session=session):
                self._feed(NodeLeft(node, session))
                self._peers.pop(node, None)

    def _register(self, identity: bytes, message: Register) -> None:
        if message.protocol != PROTOCOL:
            text = f"node {message.node} speaks protocol {message.protocol}, this scheduler {PROTOCOL}"
            self._complain(identity, "protocol_mismatch", text)
            return
        if self._machine.replaced(message.node, message.session):
            self._complain(identity, "node_replaced", f"another daemon is node {message.node} by now")
            self._reply(identity, Unregistered(message.session, replaced=True))
            return
        # The welcome goes first: it tells the node which session the messages after it belong to.
        self._peers[message.node] = identity
        known = self._machine.knows(message.node, message.session)
        self._send(message.node, Welcome(message.session, self._scheduler))
        self._feed(NodeRegistered(message.node, message.session, message.replicas))
        if known:  # it was cut off for a while
            for lease in self._machine.leases(message.node):
                self.perform(lease)

    def _complain(self, identity: bytes, kind: str, text: str) -> None:
        """Count every bad message, log the first of each connection."""
        self._telemetry.dropped(kind)
        if identity not in self._complained and len(self._complained) < _QUEUE_MESSAGES:
            self._complained.add(identity)
            log.warning(kind, text=text)

    def _send(self, node: NodeId, message: ToNode) -> None:
        identity = self._peers.get(node)
        if identity is None:
            self._telemetry.dropped("node_message")
            return
        self._reply(identity, message)

    def _reply(self, identity: bytes, message: ToNode) -> None:
        sending = self._socket.send_multipart([identity, pack(message)], zmq.NOBLOCK)
        # Not waited for: without blocking, the outcome is there at once.
        assert isinstance(sending, asyncio.Future)
        if sending.done() and isinstance(sending.exception(), zmq.Again):
            self._telemetry.dropped("node_message")
