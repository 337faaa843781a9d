"""ROSE itself."""

from __future__ import annotations

from typing import ClassVar

from rose_sim.loop import ps
from rose_sim.sharing import Sharing
from rose_sim.systems.base import System
from rose_sim.transfer import sparse_relay_s

PCIE_GB_S = 25.0
"""Host to device, per GPU."""
PAGE_BYTES = 2 << 20
MAP_PAGE_S = 37.5e-6
"""Mapping one page and giving access to it (Prism, measured on an A100)."""


class Rose(System):
    """Borrows serving GPUs within the SLO; the policy objects are those of `rose.core`."""

    name = "rose"
    source = "ROSE (arXiv 2605.06534); rose.core of this repository"
    assumptions: ClassVar[tuple[str, ...]] = (
        "gate, memory policy and scheduler are the real ones, in the mode that the scenario names",
        "weights are activated from host copies: PCIe at 25 GB/s a GPU, pages mapped at Prism's rate",
        "borrowed engines take turns when a step's sparse delta has come through the relay",
    )
    shares_serving = True

    def sharing(self, number: int) -> Sharing:
        """The gate and the memory policy of `rose.core`."""
        return self.world.gated_device(number)

    def activation_s(self) -> float:
        """From host memory to a running engine."""
        world = self.world
        tp = world.scenario.rollout.tp
        weights = world.rollout_model.weight_bytes / tp
        kv = world.elastic[0].engine.kv.capacity * world.rollout_model.kv_bytes_per_token / tp
        return weights / 1e9 / PCIE_GB_S + (weights + kv) / PAGE_BYTES * MAP_PAGE_S

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
