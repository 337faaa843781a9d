"""The host's machine: what rosed does, as a pure function of what it saw.

`NodeMachine.step(event, now_ns)` answers effects, to be carried out in order.  The driver (rosed, or the
simulator) reports every outcome back as an event:

- before the first `Tick`, `EngineReady(adopted=True)` for every engine of an earlier rosed that still runs,
  and `VersionStaged` for every version that lies verified on this host; the first `Tick` starts the rest;
- then `Tick` every few tens of milliseconds, observations as they are made, outcomes as they come.

Outdated news (an engine that is gone, an update told twice) changes nothing.  No event makes it raise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from rose.core.effects import NodeEffect, PullVersion, ReportNow, Say
from rose.core.events import (
    ActivityRequested,
    DeviceObserved,
    DrainRequested,
    DrillRequested,
    EngineExited,
    EngineReady,
    EngineStarted,
    GateOverridden,
    LeaseChanged,
    LendingDecided,
    MemoryObserved,
    NodeEvent,
    PinRequested,
    PolicyChanged,
    ReclaimRequested,
    ReplicaObserved,
    ReplicaOrder,
    ReplicaReport,
    SchedulerConnected,
    SchedulerLost,
    ServingObserved,
    ShutdownRequested,
    StepBegan,
    Tick,
    UndoReady,
    VersionAvailable,
    VersionsPruned,
    VersionStaged,
    VersionStageFailed,
    WeightsApplied,
    WeightsRefused,
)
from rose.core.hosted import HostedReplica, follow_policy
from rose.core.invariants import check_effects, check_node, snapshot
from rose.core.lifecycle import Phase, ReplicaState
from rose.core.lockstep import next_updates
from rose.core.nodeview import NodeSettings, NodeView, UnknownSignal
from rose.core.shelf import Staged, VersionShelf
from rose.core.terms import set_terms
from rose.core.watch import DeviceWatch, Edges, ServingWatch, unknown_signal
from rose.units import NS_PER_S, JobId, ReplicaId, WeightVersion

_USABLE = {ReplicaState.READY, ReplicaState.UPDATING, ReplicaState.INACTIVE, ReplicaState.DRAINING}


class NodeMachine:
    """All decisions of one host.

    `now_ns` is CLOCK_MONOTONIC; where it runs backwards, time stands still.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.replicas = {each.replica: HostedReplica(settings, each) for each in settings.replicas}
        self.shelf = VersionShelf()
        self._now_ns = 0
        self._begun = self._more_to_come = False
        self._shutting_down = False
        self._scheduler_session: str | None = None
        self._rl_step = 0
        self._required_version = WeightVersion(0)
        self._serving = ServingWatch(settings.serving)
        self._device = DeviceWatch(settings)
        self._lends = any(hosted.memory for hosted in self.replicas.values())
        self._reported: tuple[object, ...] = ()
        self._said = Edges()

    def step(self, event: NodeEvent, now_ns: int) -> list[NodeEffect]:
        """Take one event in; answer what to do, in order."""
        self._now_ns = max(self._now_ns, now_ns)
        hosted = list(self.replicas.values())
        before = snapshot(hosted, self.shelf)
        effects = self._handle(event)
        effects += self._reconcile()
        check_node(hosted, self.shelf, self.settings.weight_attempts_max)
        check_effects(before, hosted, self.shelf, effects)
        return effects

    # ---- events ---------------------------------------------------------------------------------

    def _handle(self, event: NodeEvent) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        match event:
            case Tick():
                self._begun, self._more_to_come = True, False
            case ServingObserved() | MemoryObserved() | DeviceObserved() | ReplicaObserved():
                effects = self._observe(event)
            case EngineStarted() | EngineReady() | EngineExited():
                effects = self._engine(event)
            case VersionAvailable() | VersionStaged() | VersionStageFailed() | VersionsPruned():
                effects = self._version(event)
            case UndoReady() | PinRequested():
                effects = self._back(event)
            case WeightsApplied() | WeightsRefused():
                effects = self._weights(event)
            case SchedulerConnected() | SchedulerLost():
                effects = self._scheduler(event)
            case StepBegan():
                effects = self._step_began(event)
            case (
                ReclaimRequested()
                | GateOverridden()
                | DrainRequested()
                | ActivityRequested()
                | LeaseChanged()
            ):
                effects = self._order(event)
            case LendingDecided() | DrillRequested():
                effects = set_terms(self.replicas, event, self._now_ns)
            case PolicyChanged() | ShutdownRequested():
                effects = self._everywhere(event)
            case _:
                assert_never(event)
        return effects

    def _observe(
        self, event: ServingObserved | MemoryObserved | DeviceObserved | ReplicaObserved
    ) -> list[NodeEffect]:
        match event:
            case ServingObserved(slack=slack, healthy=healthy):
                self._serving.observed(slack, healthy)
                return self._say_serving()
            case MemoryObserved():
                self._device.memory_observed(event, self._now_ns)
                said, taken_bytes = list[NodeEffect](), 0
                for hosted in self.replicas.values():  # all would grow by the same bytes
                    more, grown_bytes = hosted.memory_observed(
                        self._device.memory(self._now_ns),
                        self._now_ns,
                        may_grow=self._device_free(hosted),
                        taken_bytes=taken_bytes,
                    )
                    said += more
                    taken_bytes += grown_bytes
                return said
            case DeviceObserved():
                if self._device.observed(event):
                    for hosted in self.replicas.values():
                        if hosted.memory:
                            hosted.drain(True)
                return self._device.say(event.advice, self._now_ns) if self._lends else []
            case ReplicaObserved(replica=replica, reading=reading):
                if (known := self.replicas.get(replica)) is None:
                    return self._stranger(replica)
                return known.observed(reading, self._now_ns)
            case _:
                assert_never(event)

    def _engine(self, event: EngineStarted | EngineReady | EngineExited) -> list[NodeEffect]:
        hosted = self.replicas.get(event.replica)
        if hosted is None:
            return self._stranger(event.replica)
        match event:
            case EngineStarted(pid=pid):
                hosted.life.started(pid)
                return []
            case EngineReady():
                return self._engine_ready(hosted, event)
            case EngineExited():
                return self._engine_exited(hosted, event)
            case _:
                assert_never(event)

    def _engine_ready(self, hosted: HostedReplica, event: EngineReady) -> list[NodeEffect]:
        if not hosted.ready(event.weight_version, self._now_ns, adopted=event.adopted):
            return []
        if self._shutting_down:
            return hosted.retire(self._now_ns)
        text = f"engine {'found running' if event.adopted else 'ready'} on version {event.weight_version}"
        return [Say("info", "engine_ready", text, event.replica)]

    def _engine_exited(self, hosted: HostedReplica, event: EngineExited) -> list[NodeEffect]:
        level = "info" if hosted.life.phase is Phase.STOPPING else "error"
        if not hosted.exited(event.reason, self._now_ns, restart=not self._shutting_down):
            return []
        how = "never became ready" if event.code is None else f"exited with code {event.code}"
        return [Say(level, "engine_exited", f"engine {how}: {event.reason}", event.replica)]

    def _version(
        self, event: VersionAvailable | VersionStaged | VersionStageFailed | VersionsPruned
    ) -> list[NodeEffect]:
        if event.job != self.settings.job:
            return self._foreign_job(event.job)
        match event:
            case VersionAvailable(version=version, base_version=base, nbytes=nbytes):
                self._more_to_come = event.more
                if not event.squashed:
                    self.shelf.available(version, base, anchor=event.anchor, nbytes=nbytes)
                elif base is not None:
                    self.shelf.offered_squashed(version, base, nbytes)
                return []
            case VersionStaged(version=version, base_version=base, path=path):
                if self.shelf.arrived(Staged(version, base, path)):
                    return []
                text = f"version {version} on base {base} is none that can follow another"
                return [Say("warning", "version_implausible", text, event.job)]
            case VersionStageFailed(version=version, reason=reason):
                pause_ns = self.shelf.failed(version, self._now_ns)
                text = (
                    f"version {version} could not be staged, next try in {pause_ns // NS_PER_S} s: {reason}"
                )
                return [Say("warning", "stage_failed", text, event.job)]
            case VersionsPruned(versions=versions):
                for version in versions:
                    self.shelf.pruned(version)
                return []
            case _:
                assert_never(event)

    def _back(self, event: UndoReady | PinRequested) -> list[NodeEffect]:
        if event.job != self.settings.job:
            return self._foreign_job(event.job)
        match event:
            case UndoReady(version=version, base_version=base, path=path):
                if self.shelf.undo_ready(Staged(version, base, path)):
                    return []
                text = f"version {version} is not a way back from version {base}"
                return [Say("warning", "version_implausible", text, event.job)]
            case PinRequested(version=version):
                if version is not None and version < 0:
                    return [Say("warning", "version_implausible", f"{version} is no version", event.job)]
                self.shelf.pin = version
                if version is None:
                    return [Say("info", "weights_follow", "engines follow new versions", event.job)]
                return [Say("info", "weights_pinned", f"engines are held at version {version}", event.job)]
            case _:
                assert_never(event)

    def _weights(self, event: WeightsApplied | WeightsRefused) -> list[NodeEffect]:
        hosted = self.replicas.get(event.replica)
        if hosted is None:
            return self._stranger(event.replica)
        match event:
            case WeightsApplied(version=version):
                return hosted.applied(version, self._now_ns)
            case WeightsRefused():
                return hosted.refused(event, self.shelf, self._now_ns)
            case _:
                assert_never(event)

    def _scheduler(self, event: SchedulerConnected | SchedulerLost) -> list[NodeEffect]:
        match event:
            case SchedulerConnected(session=session):
                self._scheduler_session = session
                return [Say("info", "scheduler_connected", "the scheduler knows this node", session)]
            case SchedulerLost():
                lost, self._scheduler_session = self._scheduler_session, None
                if lost is None:
                    return []
                text = "the scheduler is silent; replicas stay as they are"
                return [Say("warning", "scheduler_lost", text, lost)]
            case _:
                assert_never(event)

    def _step_began(self, event: StepBegan) -> list[NodeEffect]:
        """Told once a step, or again after a lost answer: the same step thaws once.

        Another number thaws even if it is lower, as a trainer that resumes from a checkpoint counts back.
        """
        if event.job != self.settings.job:
            return self._foreign_job(event.job)
        self._required_version = event.required_version
        if event.rl_step == self._rl_step:
            return []
        self._rl_step = event.rl_step
        for hosted in self.replicas.values():
            if hosted.memory:
                hosted.memory.step_began()
        return []

    def _order(self, event: ReplicaOrder) -> list[NodeEffect]:
        """What the operator wants of a replica, or the scheduler."""
        hosted = self.replicas.get(event.replica)
        if hosted is None:
            return self._stranger(event.replica)
        match event:
            case ReclaimRequested(reason=reason):
                return hosted.reclaim(reason)
            case GateOverridden(mode=mode, token_cap=token_cap):
                return hosted.override_gate(mode, token_cap)
            case DrainRequested(drain=drain):
                hosted.drain(drain)
                text = "out of use: no new turns" if drain else "back in use"
                return [Say("info", "drained" if drain else "undrained", text, event.replica)]
            case ActivityRequested(active=active):
                return hosted.switch(active)
            case LeaseChanged(leased=leased):
                hosted.dormancy.leased = leased
                return []
            case _:
                assert_never(event)

    def _device_free(self, hosted: HostedReplica) -> bool:
        """Whether no other engine on the replica's device starts or changes its activity.

        Two that measure its memory at once would charge each other's to themselves.
        """
        return hosted.memory is None or not any(
            other.life.phase is Phase.STARTING or other.dormancy.changing(self._now_ns)
            for other in self.replicas.values()
            if other.memory and other is not hosted and other.settings.device == hosted.settings.device
        )

    def _everywhere(self, event: PolicyChanged | ShutdownRequested) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        if isinstance(event, PolicyChanged):
            self.settings, effects = follow_policy(event, self.settings, self.replicas.values())
            return effects
        self._shutting_down = True
        for hosted in self.replicas.values():
            effects += hosted.retire(self._now_ns)
        return effects

    # ---- what follows from any event ------------------------------------------------------------

    def _reconcile(self) -> list[NodeEffect]:
        """Gate policies first (an engine that starts finds its board), then processes, weights, report."""
        effects = self._device.say("", self._now_ns) if self._begun and self._lends else []
        for hosted in self.replicas.values():
            if hosted.memory:
                hosted.device_closed = self._device.closes(self._now_ns)
                effects += hosted.change_activity(self._now_ns, device_free=self._device_free(hosted))
            effects += hosted.publish_gate(self._rl_step, self._now_ns)
        if self._begun and not self._shutting_down:
            for hosted in self.replicas.values():
                effects += hosted.life.advance(self._now_ns, may_start=self._device_free(hosted))
            effects += next_updates(self.replicas.values(), self.shelf, self._now_ns)
            effects += [] if self._more_to_come else self._pull()
        routed_by = tuple(
            (report.state, report.weight_version, report.kv_budget_tokens) for report in self.reports()
        )
        if routed_by != self._reported:
            self._reported = routed_by
            effects.append(ReportNow())
        return effects

    def _pull(self) -> list[NodeEffect]:
        live = [hosted for hosted in self.replicas.values() if hosted.life.phase is Phase.RUNNING]
        heading = [
            hosted.life.applying.version if hosted.life.applying else hosted.life.held for hosted in live
        ]
        pull = self.shelf.next_pull(heading, self._now_ns)
        if pull is not None:
            return [PullVersion(self.settings.job, *pull)]
        said: list[NodeEffect] = []
        for hosted in live:
            stuck = self.shelf.newest if self.shelf.dead_end(hosted.life.held) else None
            if self._said.changed("weights_no_path", hosted.settings.replica, stuck) and stuck:
                text = f"version {hosted.life.held} leads nowhere: no delta on it and no anchor up to {stuck}"
                said.append(Say("warning", "weights_no_path", text, hosted.settings.replica))
        return said

    # ---- things to say once ---------------------------------------------------------------------

    def _say_serving(self) -> list[NodeEffect]:
        name, trouble = self.settings.serving, self._serving.trouble
        if not self._said.changed("serving", name, trouble):
            return []
        if trouble is None:
            return [Say("info", "serving_seen", "the serving engine can be seen again", name)]
        state, reason = trouble
        text = f"{state.value}: {reason}; strict gates stay closed"
        return [Say("warning", f"serving_{state.value}", text, name)]

    def _stranger(self, replica: ReplicaId) -> list[NodeEffect]:
        if not self._said.changed("replica_unknown", "", replica):
            return []
        return [Say("warning", "replica_unknown", "this node has no such replica", replica)]

    def _foreign_job(self, job: JobId) -> list[NodeEffect]:
        if not self._said.changed("foreign_job", "", job):
            return []
        return [Say("warning", "foreign_job", f"this node works for {self.settings.job}", job)]

    # ---- what others see ------------------------------------------------------------------------

    def reports(self) -> tuple[ReplicaReport, ...]:
        """What the scheduler is told of each replica, for the registration and every heartbeat.

        `ReportNow` asks for one at once when a state, a weight version or a budget changed.  Gates open and
        close many times a second: they ride in the periodic heartbeat.
        """
        share = self._serving.view(self._now_ns).kv_used_share
        return tuple(hosted.report(share) for hosted in self.replicas.values())

    @property
    def oldest_held(self) -> WeightVersion | None:
        """The lowest version that a running engine holds; None where one is starting, or none runs."""
        phases = {hosted.life.phase for hosted in self.replicas.values()}
        running = [each.life.held for each in self.replicas.values() if each.life.phase is Phase.RUNNING]
        return None if Phase.STARTING in phases else min(running, default=None)

    def view(self) -> NodeView:
        """What `rose status` shows, as of the latest step."""
        device = self._device.memory(self._now_ns)
        replicas = tuple(hosted.view(device) for hosted in self.replicas.values())
        lent = next((view for view in replicas if view.kind == "opportunistic"), None)
        return NodeView(
            node=self.settings.node,
            job=self.settings.job,
            now_ns=self._now_ns,
            healthy=self._serving.trouble is None
            and not self._device.trouble
            and all(view.state in _USABLE for view in replicas),
            scheduler_session=self._scheduler_session,
            rl_step=self._rl_step,
            required_version=self._required_version,
            newest_version=self.shelf.newest,
            staged_versions=self.shelf.staged,
            pulling_version=self.shelf.pulling.version if self.shelf.pulling else None,
            pinned_version=self.shelf.pin,
            serving=self._serving.view(self._now_ns),
            gate=lent.gate if lent else None,
            memory=lent.memory if lent else None,
            replicas=replicas,
            unknown=tuple(self._unknown_signals()),
            device_trouble=self._device.trouble,
        )

    def _unknown_signals(self) -> Iterable[UnknownSignal]:
        yield from self._serving.unknown_signals()
        if self._lends:
            yield from self._device.unknown_signals(self._now_ns)
        for hosted in self.replicas.values():
            name = f"replica.{hosted.settings.replica}"
            yield from unknown_signal(
                name, hosted.reading, "confirmation of KV budgets; its gate counts as closed"
            )


__all__ = ["NodeMachine", "NodeSettings", "NodeView", "ReplicaState"]
