"""Samples a run once a simulated minute, for plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose_sim.loop import PS_PER_S
from rose_sim.results import Timeline

if TYPE_CHECKING:
    from rose_sim.world import World

PERIOD_PS = 60 * PS_PER_S


class Recorder:
    """Takes the differences of the engines' counters."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._busy = self._tokens = self._opened = 0
        self._gates: list[float] = []
        self._shares: list[float] = []
        self._rates: list[float] = []
        self._lent: list[float] = []
        world.loop.after(PERIOD_PS, self._sample)

    def read(self) -> Timeline:
        """What was sampled so far."""
        return Timeline(self._shares, self._gates, self._rates, self._lent)

    def _sample(self, _now_ps: int, _: object) -> None:
        world = self._world
        busy = sum(device.serving.work().busy_ps for device in world.devices)
        tokens = sum(each.engine.work().decode_tokens for each in [*world.dedicated, *world.elastic])
        count = max(1, len(world.devices))
        self._shares.append(round((busy - self._busy) / (PERIOD_PS * count), 6))
        self._rates.append(round((tokens - self._tokens) / 60, 3))
        lent = 0
        if world.system.shares_serving:
            opened = sum(device.opened_ps() for device in world.devices)
            self._gates.append(round((opened - self._opened) / (PERIOD_PS * count), 6))
            self._opened = opened
            lent = sum(each.engine.kv.used for each in world.elastic) * world.rollout_model.kv_bytes_per_token
        self._lent.append(round(lent / 1e9, 3))
        self._busy, self._tokens = busy, tokens
        world.loop.after(PERIOD_PS, self._sample)
