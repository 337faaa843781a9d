"""ROSE itself."""

from __future__ import annotations

from typing import ClassVar

from rose_sim.loop import ps
from rose_sim.sharing import Sharing
from rose_sim.systems.base import System
from rose_sim.transfer import sparse_relay_s

PCIE_GB_S = 25.0
"""Host to device, per GPU."""
MAPPING_S = 1.0
"""Mapping pages, waking the engine."""


class Rose(System):
    """Borrows serving GPUs within the SLO; the policy objects are those of `rose.core`."""

    name = "rose"
    source = "ROSE (arXiv 2605.06534); rose.core of this repository"
    assumptions: ClassVar[tuple[str, ...]] = (
        "gate, memory policy and scheduler are the real ones, in the mode that the scenario names",
        "host copies of the weights are activated over PCIe at 25 GB/s a GPU",
        "borrowed engines take turns when a step's sparse delta has come through the relay",
    )
    shares_serving = True

    def sharing(self, number: int) -> Sharing:
        """The gate and the memory policy of `rose.core`."""
        return self.world.gated_device(number)

    def activation_s(self) -> float:
        """From host memory to a running engine."""
        world = self.world
        per_gpu_gb = world.rollout_model.weight_bytes / 1e9 / world.scenario.rollout.tp
        return MAPPING_S + per_gpu_gb / PCIE_GB_S

    def allocate(self, step: int) -> tuple[int, float]:
        """Thaw the budgets, activate the engines."""
        for device in self.world.devices:
            device.step_began()
        return 0, self.activation_s()

    def deliver(self, step: int, version: int) -> None:
        """Sparse, through the relay."""
        super().deliver(step, version)
        world = self.world
        delay = max(sparse_relay_s(world.rollout_model, world.scenario, step), self.activation_s())
        for replica in world.elastic:
            self.deliver_later(replica, version, ps(delay))
