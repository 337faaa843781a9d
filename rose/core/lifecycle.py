"""Life cycle of one rollout engine process on this host: start, restart with back-off, stop.

    stopped -> starting -> running -> stopping -> stopped
                  |           |          |
                  +---exit----+--exit----+--> backoff -> starting ...

What the scheduler sees (`ReplicaState`) follows from the phase and from what happens to a running engine;
nothing keeps a second copy of it.
"""

from __future__ import annotations

from enum import Enum, StrEnum

import msgspec

from rose.core.effects import ApplyVersion, NodeEffect, Say, StartEngine, StopEngine
from rose.units import NS_PER_S, ReplicaId, WeightVersion


class ReplicaState(StrEnum):
    """State of a replica, as reported; turns are sent only to `ready` ones."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    UPDATING = "updating"
    """The engine is going from one weight version to the next, or did not say where it ended."""
    INACTIVE = "inactive"
    """The engine runs and has given its KV memory back, as no job holds a lease; a lease activates it."""
    DRAINING = "draining"
    """Taken out of use by the operator: turns in flight finish, no new ones come."""
    FAILED = "failed"
    """The engine runs, but cannot follow the job's weights; `reason` says why."""
    BACKOFF = "backoff"
    """The process ended; it is started again after a growing pause."""
    STOPPING = "stopping"


class Phase(Enum):
    """Where the process is."""

    STOPPED = 0
    STARTING = 1
    RUNNING = 2
    STOPPING = 3
    BACKOFF = 4


class LifecycleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Patience with an engine process."""

    start_timeout_ns: int = 300 * NS_PER_S
    stop_grace_ns: int = 10 * NS_PER_S
    backoff_ns: int = 2 * NS_PER_S
    """Pause before the first restart; doubles with each failure in a row."""
    backoff_max_ns: int = 60 * NS_PER_S
    """Longest pause; an engine that ran this long starts with a clean slate."""


class EngineLife:
    """One engine process, and the weights it runs."""

    def __init__(self, replica: ReplicaId, settings: LifecycleSettings) -> None:
        self.replica = replica
        self._settings = settings
        self.phase = Phase.STOPPED
        self.pid = 0
        self.attempts = 0
        self.failures = 0
        self.since_ns = 0
        self.retry_at_ns = 0
        self.reason = ""
        """Why the engine is not usable, or last was not."""
        self.held = WeightVersion(0)
        self.applying: ApplyVersion | None = None
        self.unsure = False
        """An update had no answer: `held` may be wrong, so no turns until the engine told what it runs."""
        self.draining = False
        self.inactive = False
        self.failed = False

    @property
    def state(self) -> ReplicaState:
        """What to report."""
        if self.phase is not Phase.RUNNING:
            return ReplicaState[self.phase.name]
        if self.failed:
            return ReplicaState.FAILED
        if self.applying is not None or self.unsure:
            return ReplicaState.UPDATING
        if self.draining:
            return ReplicaState.DRAINING
        return ReplicaState.INACTIVE if self.inactive else ReplicaState.READY

    @property
    def has_process(self) -> bool:
        """Whether an engine process of ours may exist."""
        return self.phase in {Phase.STARTING, Phase.RUNNING, Phase.STOPPING}

    def advance(self, now_ns: int, *, may_start: bool = True) -> list[NodeEffect]:
        """Start what is due, if nothing else is under way on the device; give up on what never got ready."""
        if self.phase is Phase.STARTING and now_ns - self.since_ns >= self._settings.start_timeout_ns:
            return self.stop("start_timeout", now_ns)
        due = self.phase is Phase.BACKOFF and now_ns >= self.retry_at_ns
        if may_start and (due or self.phase is Phase.STOPPED):
            self._enter(Phase.STARTING, now_ns)
            self.attempts += 1
            return [StartEngine(self.replica, self.attempts)]
        return []

    def started(self, pid: int) -> None:
        """The process exists."""
        if self.has_process:
            self.pid = pid

    def ready(self, version: WeightVersion, now_ns: int, *, adopted: bool) -> bool:
        """The engine answers; False if the news is about a process that is gone, or is being stopped.

        `adopted`: the process was started by an earlier rosed and found alive.
        """
        expected = self.phase is Phase.STARTING
        found = adopted and self.phase in {Phase.STOPPED, Phase.BACKOFF}
        if not (expected or found):
            return False
        self._enter(Phase.RUNNING, now_ns)
        self.held, self.unsure, self.reason = version, False, ""
        return True

    def exited(self, reason: str, now_ns: int, *, restart: bool) -> bool:
        """The process ended; False if there was none."""
        if not self.has_process:
            return False
        lasted = self.phase is Phase.RUNNING and now_ns - self.since_ns >= self._settings.backoff_max_ns
        asked_for = self.phase is Phase.STOPPING
        self.failures = 1 if lasted else self.failures + 1
        self.reason = self.reason if asked_for else reason
        self.pid, self.applying, self.unsure, self.failed = 0, None, False, False
        self._enter(Phase.BACKOFF if restart else Phase.STOPPED, now_ns)
        self.retry_at_ns = now_ns + self.backoff_ns(self.failures)
        return True

    def stop(self, reason: str, now_ns: int) -> list[NodeEffect]:
        """End the process, if there is one."""
        if self.phase is Phase.BACKOFF:
            self._enter(Phase.STOPPED, now_ns)
        if self.phase not in {Phase.STARTING, Phase.RUNNING}:
            return []
        self._enter(Phase.STOPPING, now_ns)
        self.reason, self.applying = reason, None
        level = "info" if reason == "shutdown" else "error"
        return [
            Say(level, "engine_stopping", f"stopping the engine: {reason}", self.replica),
            StopEngine(self.replica, self._settings.stop_grace_ns, reason),
        ]

    def fail(self, reason: str) -> None:
        """The engine runs but is of no use to the job."""
        self.failed, self.reason = True, reason

    def restore(self) -> None:
        """The operator wants the replica back in use, whatever was wrong with it."""
        self.draining = self.failed = False

    def backoff_ns(self, failures: int) -> int:
        """Pause after so many failures in a row: doubling, up to the longest one."""
        doublings = min(max(failures - 1, 0), 32)
        return min(self._settings.backoff_ns << doublings, self._settings.backoff_max_ns)

    def _enter(self, phase: Phase, now_ns: int) -> None:
        self.phase, self.since_ns = phase, now_ns
