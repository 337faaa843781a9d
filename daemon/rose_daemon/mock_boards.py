"""The boards of the mock engine."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from rose.boards import BoardWriter, WatchedBoard
from rose.core.readings import NEVER, GatePolicy, ReplicaReading, SlackReading
from rose.engines.vllm.settings import PluginSettings

if TYPE_CHECKING:
    from rose_daemon.mock_engine import MockState


class Boards:
    """Publishes the board that the real engine's scheduler plugin would."""

    def __init__(self, state: MockState, settings: PluginSettings) -> None:
        self._state = state
        paths = settings.boards
        self._slack = (
            BoardWriter(paths.slack(settings.name), SlackReading) if state.role == "serving" else None
        )
        self._replica = (
            BoardWriter(paths.replica(settings.name), ReplicaReading) if state.role == "rollout" else None
        )
        self._gate = WatchedBoard(paths.gate(settings.name), GatePolicy)

    async def run(self) -> None:
        """Publish every 20 ms until cancelled."""
        while True:
            now_ns, running = time.monotonic_ns(), len(self._state.requests)
            if self._slack is not None:
                slack = dict.fromkeys(SlackReading._fields, 0)
                slack |= {"stamp_ns": now_ns, "running": running, "kv_total_blocks": 1024}
                slack |= {"ttft_deadline_ns": NEVER, "tpot_deadline_ns": NEVER}
                self._slack.publish(SlackReading(**slack))
            if self._replica is not None:
                reading = dict.fromkeys(ReplicaReading._fields, 0)
                reading |= {"stamp_ns": now_ns, "gate_open": 1, "running": running}
                reading |= {"tokens": self._state.tokens, "aborted_requests": self._state.aborted}
                reading |= {
                    "kv_total_blocks": 1024,
                    "weight_version": self._state.version,
                    "kv_resident_bytes": -1,
                }
                policy = self._gate.read(now_ns, None) if self._state.obeys else None
                if isinstance(policy, GatePolicy):
                    reading |= {"policy_revision": policy.revision, "gate_open": int(policy.mode > 0)}
                    reading["kv_budget_blocks"] = policy.kv_budget_blocks or reading["kv_total_blocks"]
                self._replica.publish(ReplicaReading(**reading))
            await asyncio.sleep(0.02)
