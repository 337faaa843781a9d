"""Systems that rent GPUs of their own for rollout: spot machines and functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rose_sim.fleet import Replica
from rose_sim.loop import ps, stream
from rose_sim.systems.base import Order, System
from rose_sim.transfer import dense_relay_s

if TYPE_CHECKING:
    from rose_sim.world import World

# Scale-out of RLBoost+ on ROLL by billions of weights (PEARL): preparation, finalisation, activation.
_SCALE_OUT_S = {8: (56.3, 11.1, 6.3), 30: (67.1, 17.9, 6.1)}
REMOVALS_PER_HOUR = 0.61
"""Spot machines taken away, per machine (bamboo's p3 trace: 167 removals, 11.4 h, 24 machines)."""
AVAILABLE = 0.75
"""Mean share of the wanted spot machines that are there (the same trace: 24.0 of 32)."""


class RlBoostPlus(System):
    """RLBoost on ROLL: spot GPUs join the rollout of a step, and may be taken away."""

    name = "rlboost+"
    source = (
        "RLBoost (arXiv 2510.19225); latencies of its re-implementation on ROLL: PEARL (arXiv 2609.35158)"
    )
    assumptions: ClassVar[tuple[str, ...]] = (
        "spot GPUs are released for training and asked for again when a step begins",
        "as many spot GPUs are wanted as ROSE may borrow; life and share available from the p3 trace",
        "weights are pulled while an engine is prepared (its own transfer path), so they cost no extra time",
        "an interrupted turn goes on elsewhere with its tokens (RLBoost's migration)",
        "each turn joins the shortest queue (its rule), wherever its trajectory ran before",
    )
    own_elastic = True
    affinity = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._rng = stream(self.world.scenario.seed, "spot")
        self._removals: dict[Replica, int] = {}

    def scale_out_s(self) -> float:
        """From asking for a spot machine to its first turn."""
        size = self.world.rollout_model.parameters / 1e9
        return sum(_SCALE_OUT_S[min(_SCALE_OUT_S, key=lambda known: abs(known - size))])

    def allocate(self, step: int) -> tuple[int, float]:
        """Ask for the GPUs."""
        return 0, self.scale_out_s()

    def deliver(self, step: int, version: int) -> None:
        """Elastic engines take the version when they are there."""
        super().deliver(step, version)
        for replica in self.world.elastic:
            outage_s = 0.0
            if self._rng.random() > AVAILABLE:
                outage_s = float(self._rng.exponential(self._outage_s))
            self.deliver_later(replica, version, ps(outage_s + self.scale_out_s()))

    @property
    def _outage_s(self) -> float:
        return 3600 / REMOVALS_PER_HOUR * (1 - AVAILABLE) / AVAILABLE

    def arrived(self, replica: Replica, version: int) -> None:
        """The engine lives from now on, for a while."""
        super().arrived(replica, version)
        mark = self._removals[replica] = self._removals.get(replica, 0) + 1
        life_s = float(self._rng.exponential(3600 / REMOVALS_PER_HOUR))
        self.world.loop.after(ps(life_s), self._removed, Order(replica, version, mark))

    def _removed(self, _now_ps: int, order: Order) -> None:
        replica, version, mark = order
        if self._removals.get(replica) != mark or not replica.up:
            return
        self.world.fleet.take_down(replica, "spot_removed")
        outage_s = float(self._rng.exponential(self._outage_s))
        self.deliver_later(replica, version, ps(outage_s + self.scale_out_s()))

    def release(self, step: int) -> None:
        """Training needs no rollout GPUs."""
        for replica in self.world.elastic:
            self._removals[replica] = self._removals.get(replica, 0) + 1
            if replica.up:
                self.world.fleet.take_down(replica, "released")


class LambdaRl(System):
    """Rollout on serverless GPU functions: as elastic as ROSE, but cold at every step."""

    name = "lambda-rl"
    source = "the paper's serverless baseline; no public artefact is known"
    assumptions: ClassVar[tuple[str, ...]] = (
        "functions are allocated anew at every step, and the rollout waits for them",
        "a cold start is 40 s for the container and engine, and the dense model through the relay",
        "functions end after 15 minutes: their turns go on elsewhere, and a new one starts cold",
    )
    own_elastic = True
    container_s = 40.0
    limit_s = 900.0

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._marks: dict[Replica, int] = {}

    def cold_start_s(self) -> float:
        """From the call to the first turn."""
        return self.container_s + dense_relay_s(self.world.rollout_model, self.world.scenario.network)

    def allocate(self, step: int) -> tuple[int, float]:
        """Ask for the GPUs."""
        return ps(self.cold_start_s()), self.cold_start_s()

    def deliver(self, step: int, version: int) -> None:
        """Elastic engines take the version when they are there."""
        super().deliver(step, version)
        for replica in self.world.elastic:
            self.deliver_later(replica, version, ps(self.cold_start_s()))

    def arrived(self, replica: Replica, version: int) -> None:
        """The engine lives from now on, for a while."""
        super().arrived(replica, version)
        mark = self._marks[replica] = self._marks.get(replica, 0) + 1
        self.world.loop.after(ps(self.limit_s), self._expired, Order(replica, version, mark))

    def _expired(self, _now_ps: int, order: Order) -> None:
        replica, version, mark = order
        if self._marks.get(replica) != mark or not replica.up:
            return
        self.world.fleet.take_down(replica, "function_limit")
        self.deliver_later(replica, version, ps(self.cold_start_s()))

    def release(self, step: int) -> None:
        """Training needs no rollout GPUs."""
        for replica in self.world.elastic:
            self._marks[replica] = self._marks.get(replica, 0) + 1
            if replica.up:
                self.world.fleet.take_down(replica, "released")
