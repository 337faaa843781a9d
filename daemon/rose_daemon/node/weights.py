"""The weight agent: watches the relay, stages versions on this host, and updates engines.

A version counts as applied only when the digests that the engine computes from its live parameters equal
those of the trainer, for every parameter.

Versions that an earlier rosed staged are not trusted by their name: another run of the job may have made
them.  They are used once the relay names the same manifest, at the price of reading them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import structlog

from rose.config import Config
from rose.core.effects import ApplyVersion, PullVersion
from rose.core.events import (
    NodeEvent,
    VersionAvailable,
    VersionsPruned,
    VersionStaged,
    VersionStageFailed,
    WeightsApplied,
    WeightsRefused,
)
from rose.core.shelf import Staged
from rose.errors import CorruptDelta, RoseError, WrongBase
from rose.units import NS_PER_MS, JobId, WeightVersion
from rose.weights import receiver
from rose.weights.inspection import changes
from rose.weights.manifest import VERSION_MAX, Manifest, squashed_job, stateful_job
from rose.weights.relay import Relay, VersionGone, VersionStat
from rose.weights.stateful import require_same_weights
from rose.weights.store import WeightStore
from rose_daemon.node.engines import Engines
from rose_daemon.node.keeper import CopyKeeper
from rose_daemon.node.rounds import ENGINE_GONE, Outcome, UpdateRounds
from rose_daemon.node.updates import Staging, Update, UpdateHistory

_POLL_WAIT_S = 20.0
_BACKOFF_S = (0.5, 15.0)

log = structlog.get_logger("rosed.weights")


class WeightAgent:
    """Carries out PullVersion and ApplyVersion, and reports every version that the relay has.

    The machine asks for one pull at a time and one update an engine at a time; each call has a deadline.
    """

    def __init__(
        self,
        config: Config,
        relay: Relay,
        engines: Engines,
        emit: Callable[[NodeEvent], None],
        clock_ns: Callable[[], int],
        keeper: CopyKeeper,
    ) -> None:
        self._job = config.job.id
        self._timeout_s = config.node.weights_timeout_s
        self._keep = config.node.weights_keep
        self._store = WeightStore(Path(config.node.state_dir))
        self._relay = relay
        self._rounds = UpdateRounds(engines, self._timeout_s, clock_ns)
        self._emit = emit
        self._clock_ns = clock_ns
        self._keeper = keeper
        self._squashed: list[VersionAvailable] = []
        self._published: dict[WeightVersion, VersionStat] = {}
        """What the relay says of versions that were not staged yet."""
        self.history = UpdateHistory()
        self.relay_error = ""
        """Why the relay could not be asked last time; empty while it answers."""

    async def watch(self) -> None:
        """Report new versions until cancelled; outlives any fault of the relay."""
        known = WeightVersion(0)
        backoff_s = _BACKOFF_S[0]
        while True:
            try:
                newest = await self._relay.latest(self._job, known, _POLL_WAIT_S)
                committed = (await self._relay.stat(self._job)).committed
                squashed = (
                    () if newest is None else (await self._relay.stat(squashed_job(self._job))).committed
                )
            except RoseError as error:
                if not self.relay_error:
                    log.warning("relay cannot be asked", code="relay_unavailable", error=str(error))
                self.relay_error = error.what
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _BACKOFF_S[1])
                continue
            self.relay_error, backoff_s = self._behind(committed, known), _BACKOFF_S[0]
            fresh = [each for each in committed if each.version > known]
            self._published.update((each.version, each) for each in fresh)
            self._tell(fresh, squashed)
            known = max(known, newest or known, *(each.version for each in committed))

    def _behind(self, committed: Sequence[VersionStat], known: WeightVersion) -> str:
        """What is wrong where the relay has older versions only than it had before; empty otherwise.

        A trainer that begins anew under the same job id does that: its versions can follow nothing here.
        """
        if not committed or committed[-1].version >= known:
            return ""
        text = (
            f"the newest version of {self._job} at the relay is {committed[-1].version}, it was {known}: "
            "if the trainer began anew under the same job id, restart rosed to follow it"
        )
        if text != self.relay_error:
            log.warning(text, code="job_id_reused")
        return text

    def _tell(self, versions: Iterable[VersionStat], squashed: Iterable[VersionStat]) -> None:
        """Report what is new, all of it before anything is fetched."""
        found = [
            VersionAvailable(
                self._job,
                each.version,
                each.base_version,
                anchor=each.base_version is None,
                nbytes=each.bytes,
            )
            for each in versions
        ]
        shortcuts = [
            VersionAvailable(self._job, each.version, each.base_version, nbytes=each.bytes, squashed=True)
            for each in squashed
        ]
        found += [event for event in shortcuts if event not in self._squashed]
        self._squashed = shortcuts or self._squashed
        for number, event in enumerate(found, 1):
            self._emit(msgspec.structs.replace(event, more=number < len(found)))

    async def pull(self, order: PullVersion) -> None:
        """Stage a version; VersionStaged or VersionStageFailed follows."""
        try:
            staged = await self._stage_stateful(order) or await self._stage(
                order, squashed_job(order.job) if order.squashed else order.job
            )
        except CorruptDelta as error:
            self._stage_failed(order, f"corrupt_version: {error.what}")
        except WrongBase as error:
            self._stage_failed(order, f"wrong_base: {error.what}")
        except RoseError as error:
            self._stage_failed(order, f"relay: {error.what}")
        except OSError as error:
            self._stage_failed(order, f"store: {error}")
        else:
            pulled, patches, decode_ms = staged
            base_version = pulled.manifest.base_version
            self._note_staging(pulled, decode_ms)
            self._emit(VersionStaged(order.job, order.version, base_version, str(patches)))
            self._keeper.staged(Staged(order.version, base_version, str(patches)))

    async def _stage(
        self, order: PullVersion, job: JobId, check: Callable[[Manifest], None] = lambda manifest: None
    ) -> tuple[receiver.Pulled, Path, float]:
        """Pull what lies under `job` and decode it: the directory of patches, the ms that decoding took."""
        directory = self._store.destination(order.job, order.version)
        pulled = await receiver.pull(
            self._relay, job, order.version, directory, timeout_s=self._timeout_s, check=check
        )
        began_ns = self._clock_ns()
        patches = await self._keeper.decode(pulled.path)
        return pulled, patches, (self._clock_ns() - began_ns) / NS_PER_MS

    async def _stage_stateful(self, order: PullVersion) -> tuple[receiver.Pulled, Path, float] | None:
        """The version in its stateful form, if there is one and this host remembers enough to decode it.

        It must promise what the version does: an offer may be left over from an attempt that failed.
        """
        history = self._keeper.history
        if order.squashed or history is None or not history.span:
            return None
        version = (await self._relay.manifest(order.job, order.version)).manifest
        if await asyncio.to_thread(self._store.holds, version):
            return None

        def check(offered: Manifest) -> None:
            require_same_weights(offered, version)
            if not history.covers(offered):
                raise WrongBase(f"version {order.version} takes a history that this host does not have")

        try:
            return await self._stage(order, stateful_job(order.job), check)
        except VersionGone:
            return None
        except (CorruptDelta, WrongBase) as error:
            log.info("stateful delta is not used", code="stateful_unused", reason=error.what)
            return None

    async def apply(self, order: ApplyVersion) -> None:
        """Update an engine and check its digests; WeightsApplied or WeightsRefused follows."""
        started_ns = self._clock_ns()
        async with self._keeper.engines_first():
            outcome = await self._rounds.go(order)
        self._note(order, started_ns, outcome)
        if outcome.reason:
            refusal = WeightsRefused(
                order.replica,
                order.version,
                outcome.held,
                outcome.reason,
                held_back=outcome.held_back,
                mixed=outcome.mixed,
            )
            self._emit(refusal)
        else:
            self._emit(WeightsApplied(order.replica, order.version))

    async def prune(self, oldest_held: WeightVersion) -> None:
        """Delete staged versions that neither engines, which hold `oldest_held` or more, nor the copy need.

        Without a copy all of them are kept: the newest one is decoded on top of those before it.
        """
        copy = self._keeper.version
        if copy is None:
            return
        needed = range(min(oldest_held, copy) + 1, VERSION_MAX + 1)
        try:
            gone = await asyncio.to_thread(self._store.prune, self._job, self._keep, needed)
        except OSError as error:
            log.warning("versions cannot be deleted", code="prune_failed", error=str(error))
            return
        if gone:
            log.info("versions deleted", code="pruned", versions=gone)
            self._emit(VersionsPruned(self._job, gone))

    def _stage_failed(self, order: PullVersion, reason: str) -> None:
        self._emit(VersionStageFailed(order.job, order.version, reason))

    def _note_staging(self, pulled: receiver.Pulled, decode_ms: float) -> None:
        manifest = pulled.manifest
        published = self._published.get(manifest.version)
        self._published = {
            version: stat for version, stat in self._published.items() if version > manifest.version
        }
        staging = Staging(
            version=manifest.version,
            base_version=manifest.base_version,
            at_ns=self._clock_ns(),
            encode_ms=None if published is None else published.encode_ms,
            push_ms=None if published is None else published.push_ms,
            pull_ms=pulled.pull_ms,
            verify_ms=pulled.verify_ms,
            decode_ms=decode_ms,
            delta_bytes=manifest.delta_bytes,
            kinds=changes(manifest),
        )
        self.history.add_staging(staging)
        facts = msgspec.to_builtins(staging)
        del facts["kinds"]
        log.info("version staged", code="staged", job=manifest.job, **facts)

    def _note(self, order: ApplyVersion, started_ns: int, outcome: Outcome) -> None:
        if outcome.held_back or outcome.reason == ENGINE_GONE:
            return  # no attempt of its own
        now_ns = self._clock_ns()
        answer, manifest, reason = outcome.answer, outcome.manifest, outcome.reason
        update = Update(
            replica=order.replica,
            version=order.version,
            base_version=order.base_version,
            ok=not reason,
            reason=reason,
            at_ns=now_ns,
            total_ms=(now_ns - started_ns) / NS_PER_MS,
            engine_ms=answer.ms if answer else {},
            changed=answer.changed if answer else 0,
            delta_bytes=manifest.wire_bytes if manifest else 0,
            dense_bytes=manifest.dense_bytes if manifest else 0,
            parameters_verified=len(manifest.parameters) if manifest else 0,
        )
        self.history.add(update)
        log.info("weight update", code="applied" if update.ok else "refused", **msgspec.to_builtins(update))
