"""The link to the scheduler, against a scheduler that behaves, restarts, falls silent, or talks nonsense."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio
from rose_daemon.node import link as link_module
from rose_daemon.node.engines import free_port
from rose_daemon.node.link import SchedulerLink
from waiting import until

from rose import wire
from rose.config import Config, NodeConfig, SchedulerConfig
from rose.core.events import NodeEvent, ReplicaReport, SchedulerConnected, SchedulerLost, StepBegan
from rose.errors import ConfigError
from rose.units import JobId, NodeId, ReplicaId, WeightVersion

REPORT = ReplicaReport(
    ReplicaId("r"), "dedicated", "ready", "http://127.0.0.1:1", "rollout", WeightVersion(0)
)


class Scheduler:
    """A ROUTER that records what nodes send."""

    def __init__(self, port: int) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(f"tcp://127.0.0.1:{port}")
        self._peer = b""

    async def receive(self) -> wire.ToScheduler:
        async with asyncio.timeout(60):
            self._peer, data = await self._socket.recv_multipart()
        return wire.unpack_to_scheduler(data)

    async def send(self, message: wire.ToNode | bytes) -> None:
        data = message if isinstance(message, bytes) else wire.pack(message)
        await self._socket.send_multipart([self._peer, data])

    async def welcome(self) -> wire.Register:
        message = await self.receive()
        assert isinstance(message, wire.Register)
        await self.send(wire.Welcome(message.session, "scheduler-1"))
        return message

    async def heartbeat(self) -> wire.Heartbeat:
        while True:
            message = await self.receive()
            if isinstance(message, wire.Heartbeat):
                return message

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


class Node:
    def __init__(self, port: int, suspect_after_ms: int = 30_000) -> None:
        self.events: list[NodeEvent] = []
        config = Config(
            node=NodeConfig(id=NodeId("n"), heartbeat_ms=50),
            scheduler=SchedulerConfig(control=f"tcp://127.0.0.1:{port}", suspect_after_ms=suspect_after_ms),
        )
        self.link = SchedulerLink(config, lambda: (REPORT,), self.events.append, time.monotonic_ns)

    async def event(self, event: NodeEvent) -> None:
        await until(lambda: event in self.events)


@asynccontextmanager
async def node(port: int, **settings: int) -> AsyncIterator[Node]:
    made = Node(port, **settings)
    task = asyncio.create_task(made.link.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.link.close()


@pytest.fixture
def port() -> int:
    return free_port("127.0.0.1")


async def test_registers_beats_and_says_goodbye(port: int) -> None:
    scheduler = Scheduler(port)
    async with node(port) as made:
        registration = await scheduler.welcome()
        assert registration == wire.Register(wire.PROTOCOL, NodeId("n"), registration.session, (REPORT,))
        await made.event(SchedulerConnected(registration.session))
        beats = []
        for _ in range(3):
            beats.append(await scheduler.heartbeat())
            await scheduler.send(wire.HeartbeatAck(beats[-1].sequence, {ReplicaId("r"): 4}))
        assert [beat.sequence for beat in beats] == [1, 2, 3]
        assert {beat.session for beat in beats} == {registration.session}
        await scheduler.send(wire.Step(JobId("j"), 3, WeightVersion(2)))
        await made.event(StepBegan(JobId("j"), 3, WeightVersion(2)))
        assert made.link.turns_in_flight == {ReplicaId("r"): 4}
        await scheduler.send(wire.Lease(ReplicaId("r"), JobId("j"), 1, True))
        await scheduler.send(wire.Step(JobId("j"), 4, WeightVersion(2)))
        await made.event(StepBegan(JobId("j"), 4, WeightVersion(2)))
        assert made.link.leases[ReplicaId("r")].job == "j"
    while not isinstance(message := await scheduler.receive(), wire.Goodbye):
        pass
    assert message == wire.Goodbye(NodeId("n"), registration.session)
    scheduler.close()


async def test_waits_for_a_scheduler_that_comes_late(port: int) -> None:
    async with node(port):
        await asyncio.sleep(0.3)
        scheduler = Scheduler(port)
        await scheduler.welcome()
        await scheduler.heartbeat()
    scheduler.close()


async def test_registers_again_when_the_scheduler_forgot_it(port: int) -> None:
    scheduler = Scheduler(port)
    async with node(port) as made:
        first = await scheduler.welcome()
        await scheduler.heartbeat()
        await scheduler.send(wire.Unregistered(first.session))
        while not isinstance(second := await scheduler.receive(), wire.Register):
            pass
        assert second.session != first.session
        assert SchedulerLost() in made.events
        assert not made.link.registered
        await scheduler.send(wire.Unregistered(first.session))  # late news of the old session
        await scheduler.send(wire.Welcome(first.session, "scheduler-1"))
        await scheduler.send(wire.Welcome(second.session, "scheduler-1"))
        await made.event(SchedulerConnected(second.session))
        assert made.events.count(SchedulerConnected(first.session)) == 1
    scheduler.close()


async def test_a_silent_scheduler_counts_as_lost_until_it_answers_again(port: int) -> None:
    scheduler = Scheduler(port)
    async with node(port, suspect_after_ms=300) as made:
        first = await scheduler.welcome()
        await made.event(SchedulerLost())
        assert made.link.turns_in_flight == {}
        before = 0
        while not isinstance(second := await scheduler.receive(), wire.Register):
            before = second.sequence if isinstance(second, wire.Heartbeat) else before
        assert second.session == first.session, "a new one would move all turns of this node"
        await scheduler.send(wire.Welcome(second.session, "scheduler-1"))
        assert (await scheduler.heartbeat()).sequence > before, "or the scheduler would drop it as old"
        await until(lambda: made.events.count(SchedulerConnected(first.session)) == 2)
    scheduler.close()


async def test_a_daemon_that_another_of_its_name_replaced_keeps_away(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a new session it would oust the other one, which would do the same, and turns would never end."""
    monkeypatch.setattr(link_module, "_REPLACED_S", 0.1)
    scheduler = Scheduler(port)
    async with node(port) as made:
        first = await scheduler.welcome()
        await made.event(SchedulerConnected(first.session))
        await scheduler.send(wire.Unregistered(first.session, replaced=True))
        for _ in range(3):
            while not isinstance(again := await scheduler.receive(), wire.Register):
                pass
            assert again.session == first.session
            await scheduler.send(wire.Unregistered(again.session, replaced=True))
        assert made.link.replaced
        assert not made.link.registered
        assert made.events.count(SchedulerLost()) == 1
        while not isinstance(again := await scheduler.receive(), wire.Register):
            pass
        await scheduler.send(wire.Welcome(again.session, "scheduler-1"))  # the other one is gone
        await until(lambda: made.link.registered)
        assert not made.link.replaced
    scheduler.close()


async def test_a_session_that_is_over_is_not_asked_for_again(port: int) -> None:
    """The scheduler forgot this node while it heard nothing."""
    scheduler = Scheduler(port)
    async with node(port) as made:
        first = await scheduler.receive()
        assert isinstance(first, wire.Register)
        await scheduler.send(wire.Unregistered(first.session))
        second = await scheduler.welcome()
        assert second.session != first.session
        await made.event(SchedulerConnected(second.session))
    scheduler.close()


async def test_a_welcome_after_an_unregistered_counts(port: int) -> None:
    """A restarted scheduler found a heartbeat waiting, and then the registration."""
    scheduler = Scheduler(port)
    async with node(port) as made:
        first = await scheduler.receive()
        assert isinstance(first, wire.Register)
        await scheduler.send(wire.Unregistered(first.session))
        await scheduler.send(wire.Welcome(first.session, "scheduler-2"))
        assert (await scheduler.heartbeat()).session == first.session
        assert made.link.registered
    scheduler.close()


async def test_registering_again_at_once_is_the_same_session(port: int) -> None:
    scheduler = Scheduler(port)
    async with node(port) as made:
        first = await scheduler.receive()
        made.link.report_now()
        second = await scheduler.receive()
        assert isinstance(first, wire.Register)
        assert isinstance(second, wire.Register)
        for message in (first, second):
            await scheduler.send(wire.Welcome(message.session, "scheduler-1"))
        await scheduler.heartbeat()
        assert [event for event in made.events if isinstance(event, SchedulerConnected)] == [
            SchedulerConnected(first.session)
        ]
    scheduler.close()


async def test_a_fault_in_what_the_scheduler_said_is_not_swallowed(port: int) -> None:
    scheduler = Scheduler(port)
    made = Node(port)

    def fail(_: NodeEvent) -> None:
        raise AssertionError("a fault of ours")

    made.link._emit = fail
    task = asyncio.create_task(made.link.run())
    await scheduler.welcome()
    with pytest.raises(AssertionError, match="a fault of ours"):
        async with asyncio.timeout(60):
            await task
    await made.link.close()
    scheduler.close()


async def test_a_cancellation_is_not_lost_to_a_wake_up(port: int) -> None:
    """Both in one turn of the event loop: `asyncio.wait_for` of Python 3.11 forgets the cancellation."""
    made = Node(port)
    pausing = asyncio.create_task(made.link._pause(60))
    await asyncio.sleep(0.01)
    made.link.report_now()
    pausing.cancel()
    await asyncio.wait([pausing], timeout=60)
    assert pausing.cancelled()
    await made.link.close()


async def test_a_restarted_scheduler_finds_the_node_again(port: int) -> None:
    scheduler = Scheduler(port)
    async with node(port) as made:
        first = await scheduler.welcome()
        await made.event(SchedulerConnected(first.session))
        scheduler.close()
        await asyncio.sleep(0.1)
        scheduler = Scheduler(port)
        while not isinstance(message := await scheduler.receive(), wire.Register):
            if isinstance(message, wire.Heartbeat):
                await scheduler.send(wire.Unregistered(message.session))
        await scheduler.send(wire.Welcome(message.session, "scheduler-2"))
        await made.event(SchedulerConnected(message.session))
    scheduler.close()


async def test_nonsense_is_counted_and_dropped(port: int) -> None:
    scheduler = Scheduler(port)
    async with node(port) as made:
        registration = await scheduler.welcome()
        for garbage in (b"", b"\xc1", b"x" * 1000, wire.pack(registration)):
            await scheduler.send(garbage)
        await scheduler.send(wire.Step(JobId("j"), 1, WeightVersion(0)))
        await made.event(StepBegan(JobId("j"), 1, WeightVersion(0)))
        assert made.link.garbage == 4
    scheduler.close()


async def test_report_now_does_not_wait_for_the_period(port: int) -> None:
    scheduler = Scheduler(port)
    made = Node(port)
    made.link._heartbeat_s = 30
    task = asyncio.create_task(made.link.run())
    registration = await scheduler.welcome()
    await made.event(SchedulerConnected(registration.session))
    assert (await scheduler.heartbeat()).sequence == 1
    made.link.report_now()
    assert (await scheduler.heartbeat()).sequence == 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await made.link.close()
    scheduler.close()


def test_an_open_network_is_refused() -> None:
    config = Config(scheduler=SchedulerConfig(control="tcp://10.0.0.1:7701"))
    with pytest.raises(ConfigError, match="loopback"):
        SchedulerLink(config, tuple, print, time.monotonic_ns)
