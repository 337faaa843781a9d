"""A weight update of an engine: staged on all ranks, paused, written on all ranks or on none, resumed.

    stage   reads and verifies, while generation goes on
    apply   pauses, writes, resumes under the new version; can be taken back
    undo    takes it back likewise
    settle  lets go of the way back

Whatever fails between pause and resume without all ranks being known to hold one version leaves the engine
paused for good: it answers `weights_mixed` from then on, and whoever started it has to end it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

from rose.engines.live import RANKS_DIFFER
from rose.engines.vllm.bell import GateBell

_POLL_S = (0.002, 0.02)
"""Shortest and longest pause between questions how a staging goes."""

Answer = dict[str, Any]


class UpdateCycle:
    """One engine's updates.  One call at a time; answers with `error` are refusals."""

    def __init__(self, bell: GateBell) -> None:
        self._bell = bell
        self.engine: Any = None
        """vLLM's engine client, once it is there."""
        self.mixed = ""
        """Why nobody knows what the weights are; empty while they are known."""

    async def update(self, version: int, base_version: int, path: str, *, abort_in_flight: bool) -> Answer:
        """All of it."""
        started = time.monotonic()
        staged = await self.stage(version, base_version, path)
        if "error" in staged:
            return staged
        applied = await self.apply(version, abort_in_flight=abort_in_flight)
        if "error" in applied:
            return applied
        total_ms = (time.monotonic() - started) * 1e3
        await self.settle()
        return applied | {"ms": {**staged["ms"], **applied["ms"], "total": total_ms}}

    async def stage(self, version: int, base_version: int, path: str) -> Answer:
        """Read and verify a version directory on all ranks.  Settles what was applied before."""
        if self.mixed:
            return self._refusal()
        await self._ask("rose_discard_weights")  # what a cancelled update may have left
        state = _one_of(await self._ask("rose_stage_weights", path, version, base_version))
        pause_s = _POLL_S[0]
        while state["state"] == "staging":
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])
            state = _one_of(await self._ask("rose_stage_state"))
        if state["state"] != "staged":
            return {"error": state["state"]} | state
        return {"version": version, "changed": state["changed"], "ms": {"stage": state["stage_ms"]}}

    async def apply(self, version: int, *, abort_in_flight: bool) -> Answer:
        """Write what is staged on every rank, or leave every rank as it was."""
        if self.mixed:
            return self._refusal()
        pausing = time.monotonic()
        async with self._bell.ringing():
            await self._pause(abort_in_flight=abort_in_flight)
            outcome = await self._resuming(self._write(version))
        if "error" in outcome:
            return outcome
        ms = {"pause": (time.monotonic() - pausing) * 1e3, "apply": outcome["apply_ms"]}
        return {"version": version, "changed": outcome["changed"], "ms": ms}

    async def undo(self, *, abort_in_flight: bool) -> Answer:
        """Take the latest `apply` back on every rank, if it is not settled."""
        if self.mixed:
            return self._refusal()
        async with self._bell.ringing():
            await self._pause(abort_in_flight=abort_in_flight)
            return await self._resuming(self._take_back())

    async def settle(self) -> Answer:
        """What was applied stays."""
        if self.mixed:
            return self._refusal()
        return (await self._ask("rose_discard_weights"))[0]

    async def digests(self) -> Answer:
        """Of all live parameters, by checkpoint name, over all ranks."""
        return _united(await self._ask("rose_weight_digests"))

    # ---- inside ---------------------------------------------------------------------------------

    async def _write(self, version: int) -> Answer:
        answers = await self._ask("rose_apply_weights", version)
        failed = [answer for answer in answers if "error" in answer]
        if not failed:
            await self.engine.update_weight_version(str(version))
            return answers[0] | {"apply_ms": max(answer["apply_ms"] for answer in answers)}
        if len(failed) < len(answers) or any(answer["error"] == "weights_mixed" for answer in failed):
            undone = await self._take_back(tell=False)
            if "error" in undone:
                return undone
        return failed[0]

    async def _take_back(self, *, tell: bool = True) -> Answer:
        answers = await self._ask("rose_undo_weights")
        for answer in answers:
            if "error" in answer:
                return answer
        held = {answer["version_held"] for answer in answers}
        if len(held) != 1:
            return {"error": "weights_mixed", "detail": f"ranks hold versions {sorted(held)}"}
        if tell:
            await self.engine.update_weight_version(str(held.copy().pop()))
        return answers[0]

    async def _pause(self, *, abort_in_flight: bool) -> None:
        mode = "abort" if abort_in_flight else "keep"
        paused = False
        try:
            # Not `pause_generation`, which sleeps 20 ms for the looks of it.
            await self.engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)
            paused = True
        finally:
            if not paused:  # nothing was written
                await self.engine.resume_generation()

    async def _resuming(self, work: Awaitable[Answer]) -> Answer:
        """Resume after the work, unless what the ranks hold is not known then."""
        self.mixed = "an update was cut short while it wrote"
        outcome = await work
        if outcome.get("error") == "weights_mixed":
            self.mixed = outcome.get("detail", "") or self.mixed
            return outcome
        self.mixed = ""
        await self.engine.resume_generation()
        return outcome

    def _refusal(self) -> Answer:
        return {"error": "weights_mixed", "detail": self.mixed}

    async def _ask(self, method: str, *arguments: Any) -> list[Answer]:
        """What every rank answers."""
        async with self._bell.ringing():
            answers: list[Answer] = await self.engine.collective_rpc(method, args=arguments)
        return answers


def _one_of(states: list[Answer]) -> Answer:
    """The state of a staging: that of the rank that is furthest from having staged."""
    rank = {"staged": 0, "staging": 1}
    return max(states, key=lambda state: rank.get(state["state"], 2))


def _united(answers: list[Answer]) -> Answer:
    """One version and one digest a parameter; what ranks do not agree on has none that could be right."""
    digests: dict[str, str] = {}
    for answer in answers:
        for name, digest in answer["digests"].items():
            if digests.setdefault(name, digest) != digest:
                digests[name] = RANKS_DIFFER
    versions = {answer["version"] for answer in answers}
    if len(versions) != 1:
        return {"error": "weights_mixed", "detail": f"ranks hold versions {sorted(versions)}"}
    return {"version": versions.pop(), "digests": digests}
