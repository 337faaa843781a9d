"""This host's own copy of a job's checkpoint: kept at one version, and able to go back without a download.

    <state_dir>/weights/<job>/copy/checkpoint/   safetensors files and config, loadable like the original
                                  undo/v<n>/     the way back from version n to the one before it
                                  record.json    which version the files hold, with all digests

A change of version goes: undo on stable storage -> record says a move began -> files written in place ->
record says the new version.  Whoever opens a copy whose record speaks of a move takes the move back, so after
a crash at any byte the copy is exactly the version before or the version after.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec
import numpy as np

from rose.errors import CorruptDelta, NotFound, NotReady, WrongBase
from rose.units import MIB, JobId, WeightVersion
from rose.weights import container, encoding, files, tensorfile
from rose.weights.bits import Bits, State
from rose.weights.checkpoint import open_checkpoint
from rose.weights.decoding import manifest_digest
from rose.weights.digests import DIGEST_PATTERN, digest, digest_state
from rose.weights.manifest import Digest, Manifest, main_job
from rose.weights.patches import Patch, check_base, check_target, digest_patched, require_form, write_patch
from rose.weights.store import version_name

_RECORD_BYTES_MAX = 64 * MIB
_Map = np.memmap[tuple[int, ...], np.dtype[np.uint8]]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `record.json` holds."""

    schema: Literal[1] = 1
    job: JobId
    version: WeightVersion
    origin: Annotated[str, msgspec.Meta(pattern=DIGEST_PATTERN)] | None
    """Digest of the version's manifest; None for the checkpoint the copy was made from."""
    digests: dict[str, Digest]
    """Of every parameter, in `version`."""
    undoing: str | None = None
    """A move began: the files hold a mixture that this undo directory turns into its version."""
    earlier: tuple[tuple[WeightVersion, str | None], ...] = ()
    """(version, origin) of those that undo directories lead back to, oldest first."""


@dataclass(frozen=True, slots=True)
class Undo:
    """A directory that leads engines from version `base` back to `version`."""

    version: WeightVersion
    base: WeightVersion
    path: Path


class HostCopy:
    """One job's checkpoint on this host.  One process at a time may hold it open; close it.

    All methods block on files; nothing but them writes into the directory.  `undo_max` is how many versions
    can be taken back, at least 1.
    """

    def __init__(self, directory: Path, record: _Record, lock: int, undo_max: int) -> None:
        if undo_max < 1:
            raise ValueError("undo_max must be at least 1")
        self.directory = directory
        self._record = record
        self._lock = lock
        self._undo_max = undo_max
        self._state, self._maps = _map_writable(self.checkpoint)

    # ---- open and make --------------------------------------------------------------------------

    @classmethod
    def open(cls, directory: Path, job: JobId, *, undo_max: int = 4) -> Self:
        """The copy that lies there, taken back to its last whole version if a move was cut short.

        Raises NotFound if there is none, NotReady if another process holds it, CorruptDelta if it is damaged.
        """
        if not (directory / "record.json").exists():
            raise NotFound(f"{directory}: no copy of a checkpoint there")
        lock = _lock(directory)
        try:
            record = _read_record(directory)
            if record.job != job:
                raise CorruptDelta(f"{directory}: belongs to job {record.job}")
            copy = cls(directory, record, lock, undo_max)
            copy._recover()
        except BaseException:
            os.close(lock)
            raise
        return copy

    @classmethod
    def create(cls, directory: Path, job: JobId, source: Path, *, undo_max: int = 4) -> Self:
        """Copy the checkpoint directory `source` as version 0; what lay there before is replaced.

        Raises NotFound or CorruptDelta if `source` is no checkpoint, NotReady, OSError.
        """
        directory.mkdir(parents=True, exist_ok=True)
        lock = _lock(directory)
        try:
            (directory / "record.json").unlink(missing_ok=True)  # first: there is no copy until it is back
            for part in ("checkpoint", "undo"):
                shutil.rmtree(directory / part, ignore_errors=True)
            (directory / "undo").mkdir()
            state = _copy_checkpoint(source, directory / "checkpoint")
            record = _Record(job=job, version=WeightVersion(0), origin=None, digests=digest_state(state))
            del state
            _write_record(directory, record)
            return cls(directory, record, lock, undo_max)
        except BaseException:
            os.close(lock)
            raise

    def close(self) -> None:
        """Let go of the files and the lock."""
        if self._lock >= 0:
            self._state, self._maps = {}, []
            os.close(self._lock)
            self._lock = -1

    # ---- what it holds --------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Path:
        """The checkpoint directory.  Must not be read while `advance` or `rewind` runs."""
        return self.directory / "checkpoint"

    @property
    def version(self) -> WeightVersion:
        """The version its files hold."""
        return self._record.version

    @property
    def origin(self) -> str | None:
        """`manifest_digest` of that version; None for the checkpoint it was made from."""
        return self._record.origin

    @property
    def digests(self) -> dict[str, str]:
        """Digest of every parameter, as of that version."""
        return dict(self._record.digests)

    @property
    def state(self) -> State:
        """Views of the mapped files.  Read only."""
        return dict(self._state)

    def undos(self) -> tuple[Undo, ...]:
        """The ways back, from the newest version on down, without a gap.  Includes those of rewound ones."""
        found = []
        for entry in (self.directory / "undo").iterdir():
            try:
                manifest = container.read_manifest(entry)
            except CorruptDelta:
                continue  # a draft that a crash left; it is written anew when it is needed
            if manifest.undo and manifest.base_version is not None and entry.name == _undo_name(manifest):
                found.append(Undo(manifest.version, manifest.base_version, entry))
        return tuple(sorted(found, key=lambda undo: -undo.base))

    @property
    def can_rewind(self) -> bool:
        """Whether there is a way back from the version it holds."""
        return bool(self._record.earlier) and (self.directory / "undo" / version_name(self.version)).is_dir()

    def verify(self) -> None:
        """Compute all digests from the files.  Raises CorruptDelta naming a parameter that differs."""
        for name, bits in self._state.items():
            if digest(bits.words) != self._record.digests.get(name):
                raise CorruptDelta(f"{name}: the copy does not hold the bytes of version {self.version}")

    # ---- move -----------------------------------------------------------------------------------

    def advance(self, version_dir: Path) -> Undo:
        """Go to a staged version that follows the one held; answers the way back.

        Raises WrongBase (of another model, or it does not follow) or CorruptDelta with nothing changed.
        """
        manifest = container.read_manifest(version_dir)
        if manifest.undo or main_job(manifest.job) != self._record.job:
            raise WrongBase(f"{version_dir}: not a version of {self._record.job}")
        check_base(manifest, self._record.digests)
        patches = [patch for patch in container.read_patches(version_dir) if patch.name in self._state]
        undo = encoding.encode_undo(manifest, self.version, self._state, patches, self._record.digests)
        self._prove(manifest, patches)
        earlier = (*self._record.earlier, (self.version, self.origin))[-self._undo_max :]
        path = self._write_undo(undo)
        self._move(
            path,
            patches,
            msgspec.structs.replace(
                self._record,
                version=manifest.version,
                origin=manifest_digest(manifest),
                digests={name: manifest.target_digests[name] for name in self._state},
                earlier=earlier,
            ),
        )
        self._prune()
        return Undo(undo.manifest.version, manifest.version, path)

    def rewind(self) -> WeightVersion:
        """Go back to the version before; answers it.  Raises NotFound if there is no way back."""
        path = self.directory / "undo" / version_name(self.version)
        if not self.can_rewind:
            raise NotFound(f"version {self.version} of {self._record.job} cannot be taken back on this host")
        manifest = container.read_manifest(path)
        version, origin = self._record.earlier[-1]
        if manifest.version != version:
            raise CorruptDelta(f"{path}: leads to version {manifest.version}, not {version}")
        check_base(manifest, self._record.digests)
        patches = container.read_patches(path)
        self._prove(manifest, patches)
        self._move(path, patches, self._taken_back(manifest, version, origin))
        return self.version

    # ---- inside ---------------------------------------------------------------------------------

    def _prove(self, manifest: Manifest, patches: Iterable[Patch]) -> None:
        """Check in scratch memory that the patches turn what the files hold into what is promised."""
        parameters = {parameter.name: parameter for parameter in manifest.parameters}
        for patch in patches:
            bits, parameter = self._state[patch.name], parameters[patch.name]
            require_form(bits, patch)
            before, after = digest_patched(bits.words, patch.indices, patch.values)
            if parameter.base_digest not in (None, before):
                raise CorruptDelta(
                    f"{patch.name}: the copy does not hold the bytes of version {self.version}"
                )
            if after != parameter.target_digest:
                raise CorruptDelta(f"{patch.name}: the patch does not give the promised bytes")

    def _write_undo(self, undo: container.EncodedVersion) -> Path:
        path = self.directory / "undo" / _undo_name(undo.manifest)
        shutil.rmtree(path, ignore_errors=True)
        container.write_version(path, undo)
        files.sync_directory(path.parent)
        return path

    def _move(self, undo: Path, patches: Iterable[Patch], arrived: _Record) -> None:
        """Write the patches into the files, so that a crash between any two bytes can be taken back."""
        self._save(msgspec.structs.replace(self._record, undoing=undo.name))
        self._write(patches)
        self._save(arrived)

    def _write(self, patches: Iterable[Patch]) -> None:
        for patch in patches:
            write_patch(self._state[patch.name], patch)
        for mapped in self._maps:
            mapped.flush()

    def _recover(self) -> None:
        """Take a move back that was cut short.  Doing it twice is doing it once."""
        if self._record.undoing is None:
            return
        path = self.directory / "undo" / self._record.undoing
        manifest = container.read_manifest(path)
        origin = dict((*self._record.earlier, (self.version, self.origin))).get(manifest.version)
        arrived = self._taken_back(manifest, manifest.version, origin)
        self._write(container.read_patches(path))
        check_target(manifest, digest_state(self._state))
        self._save(arrived)

    def _taken_back(self, manifest: Manifest, version: WeightVersion, origin: str | None) -> _Record:
        earlier = tuple(entry for entry in self._record.earlier if entry[0] < version)
        return msgspec.structs.replace(
            self._record,
            version=version,
            origin=origin,
            digests=manifest.target_digests,
            earlier=earlier,
            undoing=None,
        )

    def _save(self, record: _Record) -> None:
        _write_record(self.directory, record)
        self._record = record

    def _prune(self) -> None:
        """Keep `undo_max` ways back, and those from rewound versions, for engines that lag behind."""
        kept = {version for version, _ in self._record.earlier}
        for undo in self.undos():
            if undo.base <= self.version and undo.version not in kept:
                shutil.rmtree(undo.path)


def audit(directory: Path, job: JobId) -> WeightVersion:
    """Compute all digests of a copy that another process may hold; answers the version that it is.

    Raises NotFound, CorruptDelta naming a parameter that differs, NotReady if the copy moved meanwhile.
    """
    if not (directory / "record.json").exists():
        raise NotFound(f"this host keeps no copy of the checkpoint of {job}")
    record = _read_record(directory)
    found = digest_state(open_checkpoint(directory / "checkpoint").state)
    if record.undoing is not None or _read_record(directory) != record:
        raise NotReady("the copy moved to another version meanwhile", "ask again")
    if wrong := sorted(
        name for name in record.digests | found if record.digests.get(name) != found.get(name)
    ):
        raise CorruptDelta(f"{wrong[0]}: the copy does not hold the bytes of version {record.version}")
    return record.version


def _undo_name(manifest: Manifest) -> str:
    assert manifest.base_version is not None
    return version_name(manifest.base_version)


def _lock(directory: Path) -> int:
    """Hold the directory until the descriptor is closed or the process ends.  Raises NotReady."""
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise NotReady(f"{directory}: another process holds this copy") from None
    return descriptor


def _read_record(directory: Path) -> _Record:
    data = files.read_file(directory / "record.json", _RECORD_BYTES_MAX).tobytes()
    try:
        return msgspec.json.decode(data, type=_Record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptDelta(f"{directory / 'record.json'}: {error}") from None


def _write_record(directory: Path, record: _Record) -> None:
    files.replace_durably(directory / "record.json", msgspec.json.encode(record))


def _copy_checkpoint(source: Path, destination: Path) -> State:
    """Copy a checkpoint directory so that every tensor lies aligned; answers what is in the copy."""
    destination.mkdir()
    for name, file in open_checkpoint(source).files.items():
        shutil.copyfile(source / name, destination / name)
        if not _aligned(np.memmap(destination / name, dtype=np.uint8, mode="r")):
            files.write_durably(destination / name, tensorfile.encode(file.tensors, file.metadata))
    for entry in source.iterdir():
        if entry.is_file() and entry.suffix != ".safetensors":
            shutil.copyfile(entry, destination / entry.name)
    files.sync_directory(destination)
    state, _ = _map_writable(destination)
    return state


def _map_writable(checkpoint: Path) -> tuple[dict[str, Bits], list[_Map]]:
    """The parameters as writable views of the mapped files.  Raises NotFound, CorruptDelta."""
    state: dict[str, Bits] = {}
    maps: list[_Map] = []
    for name in open_checkpoint(checkpoint).files:
        mapped = np.memmap(checkpoint / name, dtype=np.uint8, mode="r+")
        if not _aligned(mapped):
            raise CorruptDelta(f"{name}: its tensors do not lie where they can be written")
        state |= tensorfile.parse(mapped).tensors
        maps.append(mapped)
    return dict(sorted(state.items())), maps


def _aligned(mapped: _Map) -> bool:
    """Whether every tensor can be a view of the file's bytes, which writing in place takes."""
    tensors = tensorfile.parse(mapped).tensors.values()
    return all(np.may_share_memory(bits.words, mapped) for bits in tensors if bits.words.size)
