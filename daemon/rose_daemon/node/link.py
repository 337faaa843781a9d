"""The link to rose-scheduler: register, heartbeat, and what the scheduler tells us.

A ZMQ DEALER that reconnects for ever.  Messages are never queued for a scheduler that is not there
(ZMQ_IMMEDIATE): a heartbeat that cannot be sent is dropped, as the next one says more.

A session lasts as long as the scheduler knows it.  After a silence this node registers again in the same one,
as its engines are untouched and a new session would move all their turns.  Only a scheduler that says it does
not know the session gets a new one.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog
import zmq
import zmq.asyncio

from rose import wire
from rose.config import Config
from rose.core.events import (
    LeaseChanged,
    NodeEvent,
    ReplicaReport,
    SchedulerConnected,
    SchedulerLost,
    StepBegan,
)
from rose.errors import ConfigError
from rose.units import NS_PER_MS, NS_PER_S, ReplicaId
from rose_daemon.curve import require_private, secure_node

_BACKOFF_S = (0.25, 2.0)
_REPLACED_S = 30.0
"""Pause before the scheduler is asked again whether another daemon still has our name."""
"""First and longest wait between two registrations."""
_QUEUE_MAX = 16
_RECONNECT_MS = (100, 2000)
_GOODBYE_LINGER_MS = 500

log = structlog.get_logger("rosed.link")


class SchedulerLink:
    """Keeps this node registered.  `run` is to be a task; `close` says goodbye."""

    def __init__(
        self,
        config: Config,
        reports: Callable[[], Sequence[ReplicaReport]],
        emit: Callable[[NodeEvent], None],
        clock_ns: Callable[[], int],
    ) -> None:
        self.address = config.scheduler.control
        require_private(self.address, config.scheduler.curve_dir)
        self._curve_dir = config.scheduler.curve_dir
        self._node = config.node.id
        self._heartbeat_s = config.node.heartbeat_ms / 1000
        self._silence_ns = round(
            max(config.scheduler.suspect_after_ms, 3 * config.node.heartbeat_ms) * NS_PER_MS
        )
        self._reports = reports
        self._emit = emit
        self._clock_ns = clock_ns
        self._context = zmq.asyncio.Context()
        self._socket = self._connect()
        self._now_wanted = asyncio.Event()
        self._session = uuid.uuid4().hex
        self._session_over = False
        self._heard_ns = 0
        self._sequence = 0
        self.registered = False
        self.replaced = False
        """Another daemon goes by our node id, and came later."""
        self.turns_in_flight: dict[ReplicaId, int] = {}
        """Per replica, as the scheduler last said."""
        self.leases: dict[ReplicaId, wire.Lease] = {}
        """Leases that the scheduler granted on our replicas."""
        self.garbage = 0
        """Messages that did not decode; dropped."""

    def report_now(self) -> None:
        """Send the next heartbeat at once."""
        self._now_wanted.set()

    async def run(self) -> None:
        """Stay registered until cancelled.  Raises what `emit` raises."""
        parts = [asyncio.create_task(self._listen()), asyncio.create_task(self._stay_registered())]
        try:
            ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in ended:
                part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _stay_registered(self) -> None:
        backoff_s = _BACKOFF_S[0]
        while True:
            if self.registered:
                backoff_s = _BACKOFF_S[0]
                await self._beat()
            else:
                await self._register()
                await self._pause(_REPLACED_S if self.replaced else backoff_s)
                backoff_s = min(2 * backoff_s, _BACKOFF_S[1])

    async def close(self) -> None:
        """Say goodbye, if anybody listens, and close the socket."""
        if self.registered:
            await self._send(wire.Goodbye(self._node, self._session))
        self._socket.close(linger=_GOODBYE_LINGER_MS)
        self._context.term()

    def _connect(self) -> zmq.asyncio.Socket:
        connection = self._context.socket(zmq.DEALER)
        connection.setsockopt(zmq.IMMEDIATE, 1)
        connection.setsockopt(zmq.SNDHWM, _QUEUE_MAX)
        connection.setsockopt(zmq.RCVHWM, _QUEUE_MAX * 16)
        connection.setsockopt(zmq.MAXMSGSIZE, wire.MESSAGE_BYTES_MAX)
        connection.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
        connection.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])
        connection.setsockopt(zmq.LINGER, 0)
        if self._curve_dir:
            try:
                secure_node(connection, Path(self._curve_dir))
            except ConfigError:
                connection.close()
                self._context.term()
                raise
        connection.connect(self.address)
        return connection

    async def _register(self) -> None:
        if self._session_over:
            self._session, self._sequence, self._session_over = uuid.uuid4().hex, 0, False
        await self._send(wire.Register(wire.PROTOCOL, self._node, self._session, tuple(self._reports())))

    async def _beat(self) -> None:
        """One heartbeat, then wait for the next one's time; notices a scheduler that fell silent."""
        if self._clock_ns() - self._heard_ns > self._silence_ns:
            self._lose("scheduler_silent")
            return
        self._sequence += 1
        reports = tuple(self._reports())
        await self._send(wire.Heartbeat(self._node, self._session, self._sequence, reports))
        await self._pause(self._heartbeat_s)

    async def _pause(self, seconds: float) -> None:
        """Wait, or be woken by `report_now` or an answer."""
        try:
            async with asyncio.timeout(seconds):
                await self._now_wanted.wait()
        except TimeoutError:
            return
        self._now_wanted.clear()

    async def _send(self, message: wire.ToScheduler) -> None:
        try:
            await self._socket.send(wire.pack(message), flags=zmq.NOBLOCK)
        except zmq.Again:
            log.debug("message dropped", code="scheduler_unreachable", kind=type(message).__name__)
            self._knock_again()

    def _knock_again(self) -> None:
        """ZMQ gives up on a peer that refused our key, as a scheduler does that has not been given it yet."""
        if self._curve_dir:
            with suppress(zmq.ZMQError):  # ENOENT: it has given up
                self._socket.disconnect(self.address)
            self._socket.connect(self.address)

    async def _listen(self) -> None:
        while True:
            data = await self._socket.recv()
            try:
                message = wire.unpack_to_node(data)
            except msgspec.DecodeError as error:
                self.garbage += 1
                if self.garbage == 1:
                    log.warning("message dropped", code="garbage", error=str(error))
                continue
            self._handle(message)

    def _handle(self, message: wire.ToNode) -> None:
        now_ns = self._clock_ns()
        match message:
            case wire.Welcome(session=session):
                if session == self._session:
                    self._heard_ns = now_ns
                    self._session_over = self.replaced = False
                    if not self.registered:
                        self.registered = True
                        self._now_wanted.set()
                        self._emit(SchedulerConnected(session))
            case wire.HeartbeatAck(turns_in_flight=turns):
                self._heard_ns = now_ns
                self.turns_in_flight = dict(turns)
            case wire.Unregistered(session=session, replaced=replaced):
                if session != self._session:
                    return
                if replaced:
                    self._stand_back()
                    return
                self._session_over = True  # unless a welcome follows, to a registration sent meanwhile
                if self.registered:
                    self._lose("scheduler_restarted")
                    self._now_wanted.set()
            case wire.Step(job=job, rl_step=rl_step, required_version=version):
                self._heard_ns = now_ns
                self._emit(StepBegan(job, rl_step, version))
            case wire.Lease(replica=replica, granted=granted):
                self._heard_ns = now_ns
                if granted:
                    self.leases[replica] = message
                else:
                    self.leases.pop(replica, None)
                self._emit(LeaseChanged(replica, granted))

    def _stand_back(self) -> None:
        """Another daemon took our place: our session stays, as asking again with it takes nothing back."""
        if self.replaced:
            return
        self.replaced = True
        text = f"another daemon goes by the name of node {self._node}: turns go to that one"
        log.error(text, code="node_id_taken")
        if self.registered:
            self._lose("node_id_taken")

    def _lose(self, code: str) -> None:
        silent_s = (self._clock_ns() - self._heard_ns) / NS_PER_S
        log.warning("scheduler lost", code=code, silent_s=round(silent_s, 1))
        self.registered = False
        self.turns_in_flight = {}
        self.leases.clear()
        self._emit(SchedulerLost())
