"""The demo's drill: one emergency cut of the KV budget that must take turns in flight with it."""

from __future__ import annotations

import asyncio
import time

from rose import wire
from rose.boards import WatchedBoard
from rose.core.readings import ReplicaReading, Unknown
from rose.errors import RoseError
from rose.units import ReplicaId
from rose_daemon.demo.ledger import TurnLedger
from rose_daemon.demo.report import CutRecord
from rose_daemon.harness.screen import Screen
from rose_daemon.harness.stack import Stack

_LOOK_PERIOD_S = 0.02
_EFFECT_TIMEOUT_S = 2.0


class CutDrill:
    """Orders a cut when more than what would remain is in use; in the next step again if no turn moved."""

    def __init__(self, stack: Stack, replica: ReplicaId, ledger: TurnLedger, screen: Screen) -> None:
        self.cuts: list[CutRecord] = []
        self._ledger = ledger
        self._stack = stack
        self._replica = replica
        self._screen = screen
        self._board = WatchedBoard(stack.boards.replica(replica), ReplicaReading)

    async def during(self, rl_step: int) -> None:
        """Watch a step's rollout and order the cut, once a step; nothing once turns have moved."""
        if self._ledger.rerouted:
            return
        share = self._stack.config.memory.cut_share
        while True:
            await asyncio.sleep(_LOOK_PERIOD_S)
            reading = self._board.read(time.monotonic_ns(), None)
            if isinstance(reading, Unknown) or not reading.running:
                continue
            if reading.kv_used_blocks > int(reading.kv_budget_blocks * share):
                await self._order(rl_step, reading)
                return

    async def _order(self, rl_step: int, before: ReplicaReading) -> None:
        try:
            await self._stack.control(wire.ReclaimRequest(self._replica, "demo"))
        except RoseError as error:
            self._screen.say(f"the cut was refused: {error}")
            return
        after = await self._effect(before)
        cut = CutRecord(
            rl_step=rl_step,
            before_blocks=before.kv_budget_blocks,
            after_blocks=after.kv_budget_blocks,
            used_blocks=before.kv_used_blocks,
            aborted=after.aborted_requests - before.aborted_requests,
        )
        self.cuts.append(cut)
        blocks = f"{cut.before_blocks} -> {cut.after_blocks} KV blocks"
        self._screen.say(f"emergency cut: {blocks}, {cut.aborted} turns aborted")

    async def _effect(self, before: ReplicaReading) -> ReplicaReading:
        """The engine's report once it obeys the smaller budget; its latest one if it never does."""
        latest = before
        deadline_s = time.monotonic() + _EFFECT_TIMEOUT_S
        while latest.kv_budget_blocks >= before.kv_budget_blocks and time.monotonic() < deadline_s:
            await asyncio.sleep(_LOOK_PERIOD_S)
            reading = self._board.read(time.monotonic_ns(), None)
            latest = before if isinstance(reading, Unknown) else reading
        return latest
