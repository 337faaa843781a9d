"""Drives the cluster machine with the real clock: events in, effects out, every decision journalled."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import assert_never

import structlog

from rose.config import SchedulerConfig
from rose.core.cluster import ClusterMachine, ClusterSettings
from rose.core.effects import (
    ClusterEffect,
    DispatchTurn,
    FailTurn,
    ForgetTrajectory,
    GrantLease,
    RevokeLease,
    Say,
    StopTurn,
    TellStep,
)
from rose.core.events import (
    ClusterEvent,
    JobPaused,
    JobStepBegan,
    JobStepEnded,
    ReplicaDistrusted,
    ReplicaDrainRequested,
    Tick,
    VersionPublished,
)
from rose.units import NS_PER_S, ms_to_ns, s_to_ns
from rose_daemon.scheduler.chronicle import Chronicle
from rose_daemon.scheduler.store import Store
from rose_daemon.scheduler.telemetry import Telemetry
from rose_daemon.service.supervision import Heartbeat

_TICK_MAX_S = 0.25
"""The loop looks at the clock at least this often; it also flushes the journal then."""

log = structlog.get_logger()

Performer = Callable[[ClusterEffect], None]


def settings_of(config: SchedulerConfig) -> ClusterSettings:
    """The machine's settings from `[scheduler]`."""
    return ClusterSettings(
        stall_after_ns=ms_to_ns(config.stall_timeout_ms),
        suspect_after_ns=ms_to_ns(config.suspect_after_ms),
        dead_after_ns=ms_to_ns(config.dead_after_ms),
        turn_stall_ns=s_to_ns(config.turn_stall_timeout_s),
        queue_max=config.queue_max,
        lease_min_ns=s_to_ns(config.lease_min_s),
        borrow_kv_share_max=config.borrow_kv_share_max,
    )


class ClusterDriver:
    """The one place that steps the machine.

    Effects are performed in order, before the next event is taken in: an event fed while effects are being
    performed waits its turn.
    """

    def __init__(self, settings: ClusterSettings, store: Store, telemetry: Telemetry) -> None:
        self.chronicle = Chronicle(time.time)
        self.machine = ClusterMachine(settings)
        self._store = store
        self._telemetry = telemetry
        self._turns: Performer | None = None
        self._nodes: Performer | None = None
        self._waiting: deque[ClusterEvent] = deque()
        self._stepping = False

    def connect(self, turns: Performer, nodes: Performer) -> None:
        """Name who performs the effects about turns, and those that are messages to nodes."""
        self._turns, self._nodes = turns, nodes

    def feed(self, event: ClusterEvent) -> None:
        """Take in an event now (or right after the present one) and perform what the machine decides."""
        self._waiting.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._waiting:
                self._step(self._waiting.popleft())
        finally:
            self._stepping = False

    def restore(self) -> None:
        """Feed what the store remembers, as if it had just happened."""
        for job, record in self._store.jobs().items():
            self.feed(record.spec)
            if record.paused:
                self.feed(JobPaused(job, paused=True))
            if record.published_version is not None:
                self.feed(VersionPublished(job, record.published_version))
            if record.rl_step is not None and record.required_version is not None:
                self.feed(JobStepBegan(job, record.rl_step, record.required_version))
                if not record.step_open:
                    self.feed(JobStepEnded(job, record.rl_step))
        for replica in self._store.drains():
            self.feed(ReplicaDrainRequested(replica, drain=True, restored=True))
        for replica in self._store.suspended():
            self.feed(ReplicaDistrusted(replica))
        for pin in self._store.pins():
            self.feed(pin)

    async def run(self) -> None:
        """Tick at the machine's deadlines until cancelled."""
        heartbeat = Heartbeat()
        while True:
            now_ns = time.monotonic_ns()
            due_s = (self.machine.next_deadline_ns() - now_ns) / NS_PER_S
            await asyncio.sleep(min(max(due_s, 0.001), _TICK_MAX_S))
            # One more turn of the loop, so that messages that wait already are taken in before the tick:
            # else a scheduler that was held up would take its nodes for dead.
            await asyncio.sleep(0)
            if self.machine.next_deadline_ns() <= time.monotonic_ns():
                self.feed(Tick())
            if dropped := self._store.flush_journal():
                self._telemetry.dropped("journal_row", dropped)
            heartbeat.beat()

    def _step(self, event: ClusterEvent) -> None:
        now_ns = time.monotonic_ns()
        effects = self.machine.step(event, now_ns)
        if isinstance(event, ReplicaDrainRequested) and not event.restored:
            known = self.machine.replica(event.replica) is not None
            self._store.put_drain(event.replica, event.drain and known)
        if effects or not isinstance(event, Tick):
            self._store.record(now_ns, event, effects)
        self.chronicle.note(event, effects)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: ClusterEffect) -> None:
        assert self._turns is not None, "the driver is not connected"
        assert self._nodes is not None, "the driver is not connected"
        match effect:
            case DispatchTurn() | StopTurn() | FailTurn():
                self._turns(effect)
            case GrantLease() | RevokeLease() | TellStep():
                self._nodes(effect)
            case Say(level=level, code=code, text=text, subject=subject):
                log.log(_LEVELS.get(level, 20), code, text=text, subject=subject)
            case ForgetTrajectory():
                pass  # routing's own matter; journalled like everything else
            case _:
                assert_never(effect)


_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
