"""A host's side of coded versions: decoded once, kept beside the version as patches for all engines.

    v<n>/                  the version as it came
    v<n>/patches/          the same as (index, value) pairs and whole parameters

Patches need no base and are verified by whoever reads them, so they need not outlive a crash of the machine:
what is torn is decoded again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from rose.errors import CorruptDelta, NotFound
from rose.weights import container, encoding, files
from rose.weights import manifest as manifests
from rose.weights.bits import Bits, State
from rose.weights.digests import digest
from rose.weights.history import ChangeHistory, Notes
from rose.weights.manifest import MANIFEST_NAME, Manifest, Parameter, tied_names
from rose.weights.patches import Patch, apply_patch

_PATCHES = "patches"
_OVERLAID_MAX = 8
"""Parameters kept patched: slices of one are decoded together."""


def manifest_digest(manifest: Manifest) -> str:
    """`manifest.identity` of a version; what a host decoded has that of the version as it travelled."""
    return manifest.origin.digest if manifest.origin else manifests.identity(manifest)


def patches_path(version_dir: Path) -> Path:
    """The directory of a staged version's patches.  Raises NotFound if it was not decoded, CorruptDelta."""
    if not container.read_manifest(version_dir).coded:
        return version_dir
    if not (path := version_dir / _PATCHES).is_dir():
        raise NotFound(f"{version_dir}: not decoded on this host yet")
    return path


def decode_staged(
    version_dir: Path, base: State, *, threads: int = 1, history: ChangeHistory | None = None
) -> Path:
    """Decode a staged version against its base, and answer the directory of its patches.

    Where that is done already it costs reading them.  A history that is given takes the version in once it is
    decoded.  Raises WrongBase or CorruptDelta, OSError; then there are no patches.
    """
    manifest = container.read_manifest(version_dir)
    if not manifest.coded:
        return version_dir
    final = version_dir / _PATCHES
    if _whole(final, manifest):
        return final
    draft = version_dir / f".{_PATCHES}.partial"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        _decode_into(draft, version_dir, manifest, base, threads, history)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    shutil.rmtree(final, ignore_errors=True)
    return draft.rename(final)


def _decode_into(
    draft: Path,
    version_dir: Path,
    manifest: Manifest,
    base: State,
    threads: int,
    history: ChangeHistory | None,
) -> None:
    """Write the patches some parameters at a time, and the manifest when all are there."""
    tied = tied_names(manifest, base)
    left = {each.name: each for each in manifest.parameters if each.name not in tied}
    kept = encoding.DecodedVersion(manifest)
    notes = Notes()

    def keep(patches: Sequence[Patch], digests: Mapping[str, tuple[str | None, str]]) -> None:
        for name, data in kept.add(patches, digests).items():
            files.write(draft / name, data, durable=False)

    for batch in container.read_batches(version_dir, base, threads=threads, history=history):
        mine = [patch for patch in batch if patch.name in left]
        if history is not None and manifest.base_version is not None:
            for patch in mine:
                notes.add(patch, base[patch.name])
        keep(mine, {patch.name: _digests(left.pop(patch.name), base, patch) for patch in mine})
    keep((), {name: _digests(parameter, base, None) for name, parameter in left.items()})
    files.write(draft / MANIFEST_NAME, manifests.encode(kept.manifest()), durable=False)
    if history is not None:
        history.arrived(manifest, notes)


class Overlay(Mapping[str, Bits]):
    """A state with versions applied on top, parameter by parameter as they are asked for.

    `directories` hold patches, in order.  Raises CorruptDelta.
    """

    def __init__(self, state: State, directories: Sequence[Path]) -> None:
        self._state = state
        self._patches: dict[str, list[Patch]] = {}
        for directory in directories:
            for patch in container.read_patches(directory):
                self._patches.setdefault(patch.name, []).append(patch)
        self._patched = lru_cache(_OVERLAID_MAX)(self._apply)

    def __getitem__(self, name: str) -> Bits:
        return self._patched(name) if name in self._patches else self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def _apply(self, name: str) -> Bits:
        bits = self._state[name]
        for patch in self._patches[name]:
            bits = apply_patch(bits, patch)
        return bits


def _digests(parameter: Parameter, base: State, patch: Patch | None) -> tuple[str | None, str]:
    """Of all of the parameter before (None in an anchor) and after; computed where no trainer rank knew."""
    if parameter.target_digest is not None:
        return parameter.base_digest, parameter.target_digest
    held = base[parameter.name]
    before = digest(held.words)
    after = before if patch is None else digest(apply_patch(held, patch).words)
    return (None if parameter.slices[0].base_digest is None else before), after


def _whole(patches: Path, manifest: Manifest) -> bool:
    """Whether these are patches of the very version, every byte of them."""
    try:
        found = container.read_manifest(patches)
        if found.origin is None or found.origin.digest != manifest_digest(manifest):
            return False
        container.read_patches(patches)
    except CorruptDelta:
        return False
    return True
