"""Faults by seed: crashes of rollout engines, nodes that nobody hears, memory that operators take back.

Swarm testing: with `faults.swarm`, each seed leaves out some kinds altogether, so that one kind cannot hide
what another would show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rose_sim.fleet import Replica
from rose_sim.gated import Admitting, Gated
from rose_sim.loop import ps, stream

if TYPE_CHECKING:
    from rose_sim.world import World

HOUR_S = 3600.0


class FaultSwarm:
    """Lets things go wrong at exponential intervals, and counts them."""

    def __init__(self, world: World) -> None:
        self.counts = {"crashes": 0, "partitions": 0, "reclaims": 0}
        self._world = world
        self._spec = spec = world.scenario.faults
        self._rng = stream(world.scenario.seed, "faults")
        # Engines of other elastic systems come and go by rules of their own.
        gated = {device.rollout for device in world.devices if isinstance(device, Admitting)}
        self._replicas = [*world.dedicated, *(each for each in world.elastic if each.engine in gated)]
        self._devices = [device for device in world.devices if isinstance(device, Gated)]
        for rate, targets, call in (
            (spec.crashes_per_hour, len(self._replicas), self._crash),
            (spec.partitions_per_hour, len(self._replicas), self._part),
            (spec.reclaims_per_hour, len(self._devices), self._reclaim),
        ):
            happens = not spec.swarm or self._rng.random() < 0.5
            if happens and rate * targets > 0:
                self._plan(HOUR_S / (rate * targets), call)

    def _plan(self, mean_s: float, call: Callable[[], None]) -> None:
        def strike(_now_ps: int, _: object) -> None:
            call()
            self._plan(mean_s, call)

        self._world.loop.after(ps(float(self._rng.exponential(mean_s))), strike)

    def _any(self) -> Replica:
        return self._replicas[int(self._rng.integers(len(self._replicas)))]

    def _crash(self) -> None:
        replica = self._any()
        if replica.up:
            self.counts["crashes"] += 1
            self._world.fleet.take_down(replica, "engine_exited")
            self._world.loop.after(ps(self._spec.restart_s), self._restarted, replica)

    def _restarted(self, _now_ps: int, replica: Replica) -> None:
        self._world.fleet.bring_up(replica, replica.version)

    def _part(self) -> None:
        replica = self._any()
        if not replica.silent:
            self.counts["partitions"] += 1
            replica.silent = True
            self._world.loop.after(ps(self._spec.partition_s), self._healed, replica)

    def _healed(self, _now_ps: int, replica: Replica) -> None:
        replica.silent = False
        self._world.fleet.tell(replica)

    def _reclaim(self) -> None:
        device = self._devices[int(self._rng.integers(len(self._devices)))]
        self.counts["reclaims"] += device.reclaim("operator")
