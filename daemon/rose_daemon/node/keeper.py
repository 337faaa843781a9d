"""The keeper of this host's copy of the checkpoint: it follows what is staged, or goes back to the pin.

The copy moves after the engines, so an update never waits for it.  It gives each version's way back
(`UndoReady`), and engines that restart a checkpoint to load without a download.  While an engine loads from
it, the copy stands still.

A copy that an earlier rosed left is used only once the version it holds is known to be the job's present one:
another run of the job may have made it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

from rose.config import Config, ReplicaConfig
from rose.core.events import NodeEvent, UndoReady
from rose.core.shelf import Staged, VersionShelf
from rose.errors import CorruptDelta, NotFound, RoseError, WrongBase
from rose.units import WeightVersion
from rose.weights import container
from rose.weights.bits import State
from rose.weights.checkpoint import open_checkpoint
from rose.weights.decoding import Overlay, decode_staged, manifest_digest, patches_path
from rose.weights.digests import digest_state
from rose.weights.history import ChangeHistory
from rose.weights.hostcopy import HostCopy, Undo
from rose.weights.manifest import Manifest, squashed_job, stateful_job
from rose.weights.relay import Relay
from rose.weights.store import WeightStore, version_name

_ASK_RELAY_S = 3.0
_HEAD_START_S = 0.1
"""Of engines, when there is a new version: they are told of it meanwhile."""

_T = TypeVar("_T")

log = structlog.get_logger("rosed.copy")


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint on this host that an engine may start from, instead of version 0."""

    path: Path
    version: WeightVersion
    digests: dict[str, str]
    """What the engine must hold once it has loaded it."""


class CopyKeeper:
    """Owns the copy; everything but `run` may be called at any time.  `run` is one task, cancelled to end."""

    def __init__(self, config: Config, relay: Relay, emit: Callable[[NodeEvent], None]) -> None:
        self._job = config.job.id
        self._undo_max = config.node.weights_undo_max
        self._model = Path(config.replicas[0].model) if config.replicas else None
        self._store = WeightStore(Path(config.node.state_dir))
        self._directory = self._store.directory(self._job) / "copy"
        self._threads = config.node.weights_threads
        self._checkpoints: dict[Path, asyncio.Task[dict[str, str] | None]] = {}
        self._relay = relay
        self._emit = emit
        self._shelf = VersionShelf()
        self.history = ChangeHistory() if config.node.weights_stateful else None
        """What the versions that were decoded here changed; None: not kept."""
        self._copy: HostCopy | None = None
        self._known = False
        """The version that the copy holds is the job's, not that of an earlier run."""
        self._wanted = asyncio.Event()
        self._looked = asyncio.Event()
        """It is known whether an earlier rosed left a copy."""
        self._still = asyncio.Condition()
        self._readers = 0
        self._updates = 0
        """Engines that are being updated."""
        self._moving = False

    @property
    def version(self) -> WeightVersion | None:
        """What the copy holds; None while there is none."""
        return None if self._copy is None else self._copy.version

    def staged(self, staged: Staged) -> None:
        """A version lies verified on this host."""
        self._shelf.arrived(staged)
        self._wanted.set()

    def pin(self, version: WeightVersion | None) -> None:
        """Go no further than `version`, and back if beyond it."""
        self._shelf.pin = version
        self._wanted.set()

    @contextlib.asynccontextmanager
    async def source(self, section: ReplicaConfig) -> AsyncIterator[Source | None]:
        """What an engine of this replica may load; None: its checkpoint.  The copy stands still meanwhile."""
        async with self._reading():
            yield await self._offer(section)

    async def checkpoint(self, section: ReplicaConfig) -> Source | None:
        """The replica's own checkpoint and its digests; None where it is no directory of safetensors files.

        Read once: whoever replaces a checkpoint restarts rosed.
        """
        path = Path(section.model)
        if path not in self._checkpoints:
            self._checkpoints[path] = asyncio.create_task(asyncio.to_thread(_digests_of, path))
        digests = await asyncio.shield(self._checkpoints[path])
        return None if digests is None else Source(path, WeightVersion(0), digests)

    async def promised(self, section: ReplicaConfig, version: WeightVersion) -> Source | None:
        """What an engine that says it holds `version` must hold, by its checkpoint or the relay.

        None where neither tells.
        """
        if version == 0:
            return await self.checkpoint(section)
        with contextlib.suppress(TimeoutError, RoseError):
            async with asyncio.timeout(_ASK_RELAY_S):
                committed = await self._relay.manifest(self._job, version)
            return Source(Path(section.model), version, committed.manifest.target_digests)
        return None

    async def decode(self, version_dir: Path) -> Path:
        """The directory of a staged version's patches, decoded here if need be; once for all engines.

        The base is the copy, taken on or back to the version it takes, or the checkpoint: digests tell.
        Raises WrongBase if neither is it, CorruptDelta, OSError.
        """
        manifest = await asyncio.to_thread(container.read_manifest, version_dir)
        if not manifest.coded:
            return version_dir
        async with self._reading():
            return await self._in_thread(self._decode, version_dir, manifest)

    @contextlib.asynccontextmanager
    async def engines_first(self) -> AsyncIterator[None]:
        """An engine is being updated: the copy does not begin to move meanwhile, which would slow it down."""
        self._updates += 1
        try:
            yield
        finally:
            self._updates -= 1
            async with self._still:
                self._still.notify_all()

    def distrust(self) -> None:
        """An engine that loaded the copy holds other bytes: make it anew before anybody uses it again."""
        self._known = False
        if self._copy is not None:
            self._copy.close()
            self._copy = None
        self._wanted.set()

    async def run(self) -> None:
        """Move the copy whenever there is somewhere to go.  A copy that cannot be kept is done without."""
        try:
            if self._undo_max == 0 or self._model is None:
                return await self._idle()
            self._copy = await self._in_thread(self._open)
            self._looked.set()
            while True:
                self._wanted.clear()
                while await self._move():
                    pass
                await self._wanted.wait()
                await asyncio.sleep(_HEAD_START_S)
        except (RoseError, OSError) as error:
            log.error("no copy of the checkpoint is kept", code="copy_failed", error=str(error))
        finally:
            if self._copy is not None:
                self._copy.close()
                self._copy = None
        return await self._idle()

    # ---- inside ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[None]:
        """The copy, if there is one, stands still meanwhile."""
        await self._looked.wait()
        async with self._still:
            await self._still.wait_for(lambda: not self._moving)
            self._readers += 1
        try:
            yield
        finally:
            async with self._still:
                self._readers -= 1
                self._still.notify_all()

    def _decode(self, version_dir: Path, manifest: Manifest) -> Path:
        refused = WrongBase(f"version {manifest.version} of {self._job}: this host holds no base of it")
        for base in self._bases(manifest.base_version):
            try:
                return decode_staged(version_dir, base, threads=self._threads, history=self.history)
            except WrongBase as error:
                refused = error
        raise refused

    def _bases(self, version: WeightVersion | None) -> Iterator[State]:
        """States that may be `version` (None: of the form of an anchor), the likeliest first."""
        if self._copy is not None:
            with contextlib.suppress(NotFound, WrongBase, CorruptDelta):
                yield self._at(version, self._copy.version, self._copy.state, self._copy.undos())
        if self._model is not None:
            checkpoint = open_checkpoint(self._model).state
            with contextlib.suppress(NotFound, WrongBase, CorruptDelta):
                yield self._at(version, WeightVersion(0), checkpoint, ())

    def _at(
        self, version: WeightVersion | None, held: WeightVersion, state: State, undos: Sequence[Undo]
    ) -> State:
        """`state`, which is `held`, taken to `version`.  Raises NotFound, WrongBase, CorruptDelta."""
        if version in (None, held):
            return state
        if version > held:
            chain = self._store.chain(self._job, held, version)
            return Overlay(state, [patches_path(path) for path in chain])
        back = {undo.base: undo for undo in undos}
        directories = []
        while held > version:
            if held not in back:
                raise NotFound(f"version {held} cannot be taken back on this host")
            directories.append(back[held].path)
            held = back[held].version
        return Overlay(state, directories)

    async def _idle(self) -> None:
        self._looked.set()
        await asyncio.Event().wait()

    @staticmethod
    async def _in_thread(call: Callable[..., _T], *arguments: object) -> _T:
        """As asyncio.to_thread, but a cancelled caller waits for the thread, which may write to the copy."""
        work = asyncio.create_task(asyncio.to_thread(call, *arguments))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})
            raise

    def _open(self) -> HostCopy | None:
        """The copy that an earlier rosed left, if it is whole."""
        try:
            return HostCopy.open(self._directory, self._job, undo_max=self._undo_max)
        except NotFound:
            return None
        except CorruptDelta as error:
            log.warning("the copy of the checkpoint is made anew", code="copy_damaged", error=str(error))
            return None

    def _make(self) -> HostCopy:
        assert self._model is not None
        return HostCopy.create(self._directory, self._job, self._model, undo_max=self._undo_max)

    async def _move(self) -> bool:
        """One step towards where the copy should be; False if it is there."""
        async with self._still:
            await self._still.wait_for(lambda: not self._readers and not self._updates)
            self._moving = True
        try:
            if self._copy is None:
                self._copy = await self._in_thread(self._make)
            return await self._step(self._copy)
        finally:
            async with self._still:
                self._moving = False
                self._still.notify_all()

    async def _step(self, copy: HostCopy) -> bool:
        if self._shelf.beyond_pin(copy.version):
            return await self._rewind(copy)
        self._recognise(copy)
        step = self._shelf.next_step(copy.version)
        if step is None:
            return False
        try:
            undo = await self._in_thread(copy.advance, Path(step.path))
        except (CorruptDelta, WrongBase) as error:
            self._shelf.distrust(step.version)
            if copy.origin is None and isinstance(error, WrongBase):
                log.warning("version does not fit the checkpoint", code="copy_left_behind", error=str(error))
                return True  # a new copy would be the same
            log.warning("the copy of the checkpoint is made anew", code="copy_diverged", error=str(error))
            await self._remake(copy)
            return True
        self._known = True
        self._tell(undo)
        log.info("copy of the checkpoint moved", code="copy_moved", version=copy.version)
        return True

    async def _rewind(self, copy: HostCopy) -> bool:
        try:
            await self._in_thread(copy.rewind)
        except (NotFound, CorruptDelta, WrongBase) as error:
            log.warning("the copy of the checkpoint is made anew", code="copy_diverged", error=str(error))
            await self._remake(copy)
        log.info("copy of the checkpoint moved back", code="copy_moved", version=self.version)
        return True

    async def _remake(self, copy: HostCopy) -> None:
        copy.close()
        self._copy, self._known = None, False
        self._copy = await self._in_thread(self._make)

    def _recognise(self, copy: HostCopy) -> None:
        """What the copy holds is the job's if it was staged in this run with the same manifest."""
        if self._known or copy.origin is None or copy.version not in self._shelf.staged:
            return
        with contextlib.suppress(CorruptDelta):
            manifest = container.read_manifest(self._directory.parent / version_name(copy.version))
            if manifest_digest(manifest) == copy.origin:
                self._recognised(copy)

    def _recognised(self, copy: HostCopy) -> None:
        self._known = True
        for undo in copy.undos():
            self._tell(undo)

    def _tell(self, undo: Undo) -> None:
        self._emit(UndoReady(self._job, undo.version, undo.base, str(undo.path)))

    async def _offer(self, section: ReplicaConfig) -> Source | None:
        copy = self._copy
        if copy is None or copy.origin is None or Path(section.model) != self._model:
            return None
        if self._shelf.beyond_pin(copy.version):
            return None
        if not self._known and await self._relay_confirms(copy):
            self._recognised(copy)
        return Source(copy.checkpoint, copy.version, copy.digests) if self._known else None

    async def _relay_confirms(self, copy: HostCopy) -> bool:
        for job in (self._job, stateful_job(self._job), squashed_job(self._job)):
            with contextlib.suppress(TimeoutError, RoseError):
                async with asyncio.timeout(_ASK_RELAY_S):
                    committed = await self._relay.manifest(job, copy.version)
                if manifest_digest(committed.manifest) == copy.origin:
                    return True
        return False


def _digests_of(checkpoint: Path) -> dict[str, str] | None:
    try:
        return digest_state(open_checkpoint(checkpoint).state)
    except (NotFound, CorruptDelta, OSError) as error:
        log.warning("the checkpoint cannot be verified", code="checkpoint_unread", error=str(error))
        return None
