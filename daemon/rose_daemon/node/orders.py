"""What rosed answers on its control socket."""

from __future__ import annotations

from typing import Any, assert_never

from rose import wire
from rose.core.effects import Say
from rose.core.events import ActivityRequested, DrainRequested, GateOverridden, NodeEvent, ReclaimRequested
from rose.core.lifecycle import Phase
from rose.core.nodeview import ReplicaView
from rose.core.readings import GateMode
from rose.errors import ConfigError, NotFound, NotReady, RoseError
from rose.units import JobId, ReplicaId, WeightVersion
from rose_daemon.node.driver import NodeDriver

_MODES = {mode.name.lower(): mode for mode in GateMode}


class Orders:
    """Operators' requests, turned into events for the machine."""

    def __init__(self, driver: NodeDriver) -> None:
        self._driver = driver

    async def answer(self, request: wire.ControlRequest) -> wire.Reply:
        """The reply to a request.  Raises RoseError with what to tell the operator."""
        return wire.Reply(body=self._body(request))

    def _body(self, request: wire.ControlRequest) -> dict[str, Any]:
        match request:
            case wire.StatusRequest():
                return self._driver.status()
            case wire.ReclaimRequest(replica=replica, reason=reason):
                return self._reclaim(replica, reason)
            case wire.GateRequest(replica=replica, mode=mode, token_cap=token_cap):
                return self._gate(replica, mode, token_cap)
            case wire.DrainRequest() | wire.ActivityRequest():
                return self._use(request)
            case wire.LendRequest(on=on, reset=reset):
                self._driver.lending.switch(off=not on, reset=reset)
                return {"lending": self._driver.lending.view()}
            case wire.PinRequest(job=job, version=version):
                return self._pin(job, version)
            case _:
                assert_never(request)

    def _reclaim(self, replica: ReplicaId, reason: str) -> dict[str, Any]:
        self._view(replica)
        for effect in self._driver.decide(ReclaimRequested(replica, reason)):
            if isinstance(effect, Say) and effect.code == "reclaim_ignored":
                raise RoseError(f"{replica}: {effect.text}")
        memory = self._view(replica).memory
        assert memory is not None  # or the request would have been ignored
        return {"kv_budget_blocks": memory.budget_blocks, "state": memory.state}

    def _use(self, request: wire.DrainRequest | wire.ActivityRequest) -> dict[str, Any]:
        """Take a replica out of use, or back; its memory too, where that is asked for."""
        replica = request.replica
        self._view(replica)
        event: NodeEvent
        if isinstance(request, wire.DrainRequest):
            event = DrainRequested(replica, request.drain)
        else:
            event = ActivityRequested(replica, request.active)
        for effect in self._driver.decide(event):
            if isinstance(effect, Say) and effect.code == "activity_ignored":
                raise RoseError(f"{replica}: {effect.text}")
        return {"state": self._view(replica).state}

    def _gate(self, replica: ReplicaId, mode: str | None, token_cap: int) -> dict[str, Any]:
        if mode is not None and mode not in _MODES:
            raise ConfigError(f"{mode!r} is no gate mode", f"one of {', '.join(_MODES)}")
        if token_cap < 0:
            raise ConfigError(f"{token_cap} tokens a step make no sense", "0 leaves them as configured")
        self._view(replica)
        self._driver.decide(GateOverridden(replica, None if mode is None else int(_MODES[mode]), token_cap))
        return {"mode": self._view(replica).gate.mode}

    def _pin(self, job: JobId, version: WeightVersion | None) -> dict[str, Any]:
        """Refused unless every engine can get there with what lies on this host."""
        if job != self._driver.config.job.id:
            raise NotFound(
                f"this host does not work for job {job}", f"it works for {self._driver.config.job.id}"
            )
        if version is not None:
            self._check_way_back(version)
        try:
            self._driver.pin(version)
        except OSError as error:
            raise RoseError(f"the pin could not be kept: {error}", "see node.state_dir") from None
        view = self._driver.machine.view()
        return {"version": version, "replicas": {each.id: each.weight_version for each in view.replicas}}

    def _check_way_back(self, version: WeightVersion) -> None:
        machine = self._driver.machine
        if not 0 <= version <= machine.shelf.newest:
            raise NotFound(f"there is no version {version}", f"the newest is {machine.shelf.newest}")
        for replica, hosted in machine.replicas.items():
            if hosted.life.phase is not Phase.RUNNING:
                continue
            if hosted.life.applying is not None:
                raise NotReady(f"{replica} is being updated", "ask again in a moment")
            if not machine.shelf.leads_back(hosted.life.held, version):
                raise NotFound(
                    f"{replica} holds version {hosted.life.held}; the way to {version} is not on this host",
                    f"the copy here is at {self._driver.keeper.version}; see node.weights_undo_max",
                )

    def _view(self, replica: ReplicaId) -> ReplicaView:
        views = {view.id: view for view in self._driver.machine.view().replicas}
        if replica not in views:
            raise NotFound(f"this host has no replica {replica}", f"it has: {', '.join(views) or 'none'}")
        return views[replica]
