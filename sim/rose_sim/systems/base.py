"""What a system decides; the defaults are those of a fixed cluster beside a serving fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from rose_sim.fleet import Replica
from rose_sim.serving import Choose, least_loaded
from rose_sim.transfer import broadcast_s

if TYPE_CHECKING:
    from rose_sim.sharing import Sharing
    from rose_sim.world import World


class Order(NamedTuple):
    """Something to do to a replica later."""

    replica: Replica
    version: int
    mark: int = 0
    """Of the engine's present life: an order for an earlier one is void."""


class System:
    """One policy.  `source` says where its behaviour is described, `assumptions` what was filled in."""

    name: ClassVar[str]
    source: ClassVar[str]
    assumptions: ClassVar[tuple[str, ...]] = ()
    trains: ClassVar[bool] = True
    """False: serving alone is watched."""
    shares_serving: ClassVar[bool] = False
    """Rollout engines live on the serving GPUs."""
    own_elastic: ClassVar[bool] = False
    """Elastic rollout engines on GPUs of their own (spot, functions)."""
    affinity: ClassVar[bool] = True
    """Turns go where their trajectory's prefix is."""
    hardware_affinity: ClassVar[bool] = False
    """Turns of a task prefer the kind of GPU that suits it, in a pool of several kinds."""
    staleness: ClassVar[int] = 0
    """Above 0: rollout and training overlap."""

    def __init__(self, world: World) -> None:
        self.world = world

    def sharing(self, number: int) -> Sharing:
        """The device policy of serving engine `number`."""
        return self.world.plain_device(number)

    def choose(self) -> Choose:
        """How serving requests are spread."""
        return least_loaded

    def allocate(self, step: int) -> tuple[int, float]:
        """Get elastic GPUs for a step: (ps before rollout may begin, seconds spent on getting them)."""
        return 0, 0.0

    def weights_s(self, step: int) -> float:
        """From the end of training until dedicated engines run the new version."""
        return broadcast_s(self.world.rollout_model)

    def deliver(self, step: int, version: int) -> None:
        """Bring `version` to the engines."""
        for replica in self.world.dedicated:
            self.world.fleet.update(replica, version)

    def release(self, step: int) -> None:
        """Rollouts of the step are over."""

    def deliver_later(self, replica: Replica, version: int, delay_ps: int) -> None:
        """An elastic engine takes `version` after a while, unless the job has gone on by then."""
        self.world.loop.after(delay_ps, self._delivered, Order(replica, version))

    def _delivered(self, _now_ps: int, order: Order) -> None:
        if order.version >= self.world.version:
            self.arrived(order.replica, order.version)

    def arrived(self, replica: Replica, version: int) -> None:
        """The weights are there."""
        self.world.fleet.bring_up(replica, version)
