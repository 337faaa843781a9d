"""Bringing engines to a version, alone or in lock-step: all of them change, or none does.

    stage on all  ->  apply on all  ->  digests of all are the trainer's  ->  settle
                 no: all stay     no: undo on all            no: undo on all

Engines verify and write at the same time; each pauses for its own writing only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from rose.core.effects import ApplyVersion
from rose.errors import CorruptDelta
from rose.units import ReplicaId, WeightVersion, s_to_ns
from rose.weights import container
from rose.weights.manifest import Manifest, tied_names
from rose_daemon.node.engine_http import Digests, EngineClient, EngineRefused, EngineUnreachable, UpdateAnswer
from rose_daemon.node.engines import Engines

ENGINE_GONE = "engine_gone"
_MIXED = "weights_mixed"
_BUSY_RETRY_S = 0.5

_T = TypeVar("_T")
_Key = tuple[WeightVersion, tuple[ReplicaId, ...]]


class Outcome(NamedTuple):
    """What became of one engine's update; no reason: it runs the version, by its digests."""

    reason: str = ""
    held: WeightVersion | None = None
    """What it holds after a refusal, if that is known."""
    held_back: bool = False
    mixed: bool = False
    answer: UpdateAnswer | None = None
    manifest: Manifest | None = None


class UpdateRounds:
    """Carries out ApplyVersion.  Every call of an engine has a deadline, so every round ends."""

    def __init__(self, engines: Engines, timeout_s: float, clock_ns: Callable[[], int]) -> None:
        self._engines = engines
        self._timeout_s = timeout_s
        self._clock_ns = clock_ns
        self._open: dict[_Key, Round] = {}

    async def go(self, order: ApplyVersion) -> Outcome:
        """Do what is ordered.  Raises nothing."""
        together = self._join(order)
        try:
            return await self._attempt(order, together)
        except EngineRefused as error:
            held = None if error.version_held is None else WeightVersion(error.version_held)
            return Outcome(f"{error.error}: {error.what}", held, mixed=error.error == _MIXED)
        except EngineUnreachable as error:
            return Outcome(f"engine_unreachable: {error.what}")
        except (CorruptDelta, OSError) as error:
            return Outcome(f"corrupt_version: {error}")
        finally:
            together.leave(order.replica)
            if together.over and self._open.get(together.key) is together:
                del self._open[together.key]

    def _join(self, order: ApplyVersion) -> Round:
        """The round of those it goes with; a new one if it took part in that which is still open."""
        members = order.together or (order.replica,)
        found = self._open.get((order.version, members)) if order.together else None
        if found is None or order.replica in found.joined:
            found = Round((order.version, members))
            if order.together:
                self._open[found.key] = found
        found.joined.add(order.replica)
        return found

    async def _attempt(self, order: ApplyVersion, together: Round) -> Outcome:
        engine = self._engines.get(order.replica)
        if engine is None:
            return Outcome(ENGINE_GONE)
        manifest = await asyncio.to_thread(container.read_manifest, Path(order.path))
        member = _Member(engine.client, order, manifest, self._timeout_s)
        return await (self._in_step(member, together) if order.together else self._alone(member))

    async def _in_step(self, member: _Member, together: Round) -> Outcome:
        order = member.order
        staged = await self._unless_there(order.version, member.stage)
        if staged is None:
            # By an earlier update whose answer was lost.  The others follow, or come back to it.
            together.settled(order.replica)
            return await member.verified(None)
        if not await together.all("staged", order.replica):
            return Outcome("another replica could not stage it", order.base_version, held_back=True)
        applied = await member.apply()
        if not await together.all("applied", order.replica):
            return await member.taken_back("another replica could not apply it")
        outcome = await member.verified(_joined(staged, applied))
        if outcome.reason:
            return await member.taken_back(outcome.reason, own=True)
        if not await together.all("verified", order.replica):
            return await member.taken_back("another replica did not reach its digests")
        with contextlib.suppress(EngineRefused, EngineUnreachable):
            await member.settle()  # else the next staging does
        return outcome

    async def _alone(self, member: _Member) -> Outcome:
        return await member.verified(await self._unless_there(member.order.version, member.update))

    async def _unless_there(self, version: WeightVersion, call: Callable[[], Awaitable[_T]]) -> _T | None:
        """The engine's answer; None if it holds the version already, by an earlier update's lost answer.

        An engine that is busy is still at an update that we gave up waiting for: it is asked again.
        """
        busy_until_ns = self._clock_ns() + s_to_ns(self._timeout_s)
        while True:
            try:
                return await call()
            except EngineRefused as error:
                if error.version_held == version:
                    return None
                if error.error != "busy" or self._clock_ns() >= busy_until_ns:
                    raise
            await asyncio.sleep(_BUSY_RETRY_S)


class Round:
    """Replicas that go to one version together.  A phase succeeds once all of them say so."""

    def __init__(self, key: _Key) -> None:
        self.key = key
        self._members = frozenset(key[1])
        self.joined: set[ReplicaId] = set()
        self._settled: set[ReplicaId] = set()
        self._left: set[ReplicaId] = set()
        self._failed = False
        self._said: dict[str, set[ReplicaId]] = {}
        self._changed = asyncio.Event()

    async def all(self, phase: str, replica: ReplicaId) -> bool:
        """This replica has come through the phase: True when all have, False as soon as one cannot."""
        self._said.setdefault(phase, set()).add(replica)
        self._wake()
        while not self._failed:
            if self._said[phase] | self._settled >= self._members:
                return True
            await self._changed.wait()
        return False

    def settled(self, replica: ReplicaId) -> None:
        """This replica is there already: nobody waits for it."""
        self._settled.add(replica)
        self._wake()

    def leave(self, replica: ReplicaId) -> None:
        """Its part is over; if it has not come through all phases, nobody else can."""
        through = replica in self._settled or replica in self._said.get("verified", ())
        self._failed = self._failed or not through
        self._left.add(replica)
        self._wake()

    @property
    def over(self) -> bool:
        """Whether all have left."""
        return self._left >= self._members

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _Member(NamedTuple):
    """One engine, and what is asked of it."""

    client: EngineClient
    order: ApplyVersion
    manifest: Manifest
    timeout_s: float

    async def update(self) -> UpdateAnswer:
        order, abort = self.order, self.order.abort_in_flight
        return await self.client.update(
            order.version, order.base_version, order.path, abort_in_flight=abort, timeout_s=self.timeout_s
        )

    async def stage(self) -> UpdateAnswer:
        order = self.order
        return await self.client.stage(
            order.version, order.base_version, order.path, timeout_s=self.timeout_s
        )

    async def apply(self) -> UpdateAnswer:
        abort = self.order.abort_in_flight
        return await self.client.apply(self.order.version, abort_in_flight=abort, timeout_s=self.timeout_s)

    async def settle(self) -> None:
        await self.client.settle(timeout_s=self.timeout_s)

    async def taken_back(self, reason: str, *, own: bool = False) -> Outcome:
        """Have it undo what it wrote: for another replica's sake, or for its `own` failure."""
        abort = self.order.abort_in_flight
        held = await self.client.undo(abort_in_flight=abort, timeout_s=self.timeout_s)
        return Outcome(reason, held, held_back=not own and held == self.order.base_version)

    async def verified(self, answer: UpdateAnswer | None) -> Outcome:
        """Whether its live parameters are those of the version; no answer: it says it was there already."""
        live = await self.client.digests(self.timeout_s)
        if reason := _difference(self.manifest, live):
            return Outcome(reason, self.order.version if answer is None else None)
        return Outcome(answer=answer, manifest=self.manifest)


def _joined(staged: UpdateAnswer, applied: UpdateAnswer) -> UpdateAnswer:
    """As one update's answer: the total leaves out what each waited for the others."""
    ms = staged.ms | applied.ms
    total_ms = staged.ms.get("stage", 0.0) + applied.ms.get("pause", 0.0)
    return UpdateAnswer(applied.version, applied.changed, ms | {"total": total_ms})


def _difference(manifest: Manifest, live: Digests) -> str:
    """Why the engine does not run this version, by its own digests; empty if it does."""
    if live.version != manifest.version:
        return f"wrong_version: the engine says {live.version} after an update to {manifest.version}"
    tied = tied_names(manifest, live.digests)
    wanted = {name: digest for name, digest in manifest.target_digests.items() if name not in tied}
    wrong = sorted(name for name, digest in wanted.items() if live.digests.get(name) != digest)
    if wrong:
        return f"digest_mismatch: {len(wrong)} of {len(wanted)} parameters, first {wrong[0]}"
    return ""
