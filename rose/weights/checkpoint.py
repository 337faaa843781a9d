"""Checkpoint directories: read as bits, and written anew as a later version of them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rose.errors import CorruptDelta, NotFound
from rose.weights import container, files, tensorfile
from rose.weights.bits import Bits
from rose.weights.digests import digest_state
from rose.weights.patches import apply_to_state, check_base, check_target
from rose.weights.tensorfile import TensorFile


@dataclass(frozen=True)
class Checkpoint:
    """A safetensors checkpoint: its files by name, mapped into memory."""

    directory: Path
    files: dict[str, TensorFile]

    @property
    def state(self) -> dict[str, Bits]:
        """All parameters, in order of name."""
        tensors = {name: bits for file in self.files.values() for name, bits in file.tensors.items()}
        return dict(sorted(tensors.items()))


def open_checkpoint(directory: Path) -> Checkpoint:
    """Map the safetensors files of a checkpoint directory.

    Raises NotFound if there are none, CorruptDelta if one is malformed or two hold the same parameter.
    """
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise NotFound(f"{directory}: no safetensors files there")
    files: dict[str, TensorFile] = {}
    seen: set[str] = set()
    for path in paths:
        try:
            files[path.name] = tensorfile.parse(_map(path))
        except CorruptDelta as error:
            raise CorruptDelta(f"{path}: {error.what}") from None
        if twice := seen & files[path.name].tensors.keys():
            raise CorruptDelta(f"{path}: {min(twice)} is in another file too")
        seen |= files[path.name].tensors.keys()
    return Checkpoint(directory, files)


def materialise(checkpoint_dir: Path, version_dirs: Sequence[Path], out_dir: Path) -> dict[str, str]:
    """Write the checkpoint that results from applying versions in order; answers its digests.

    `out_dir` appears whole or not at all and can be loaded like `checkpoint_dir`: same files, same names, and
    the config and tokenizer files with them.  Raises WrongBase if a version does not fit what is before it,
    CorruptDelta, NotFound, FileExistsError.
    """
    checkpoint = open_checkpoint(checkpoint_dir)
    state = checkpoint.state
    digests = digest_state(state)
    for directory in version_dirs:
        manifest = container.read_manifest(directory)
        check_base(manifest, digests)
        patches = [patch for patch in container.read_patches(directory, state) if patch.name in state]
        state = apply_to_state(state, patches)
        digests |= digest_state({patch.name: state[patch.name] for patch in patches})
        check_target(manifest, digests)
    if out_dir.exists():
        raise FileExistsError(f"{out_dir} is there already")
    draft = out_dir.with_name(f".{out_dir.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for name, file in checkpoint.files.items():
        tensors = {parameter: state[parameter] for parameter in file.tensors}
        files.write_durably(draft / name, tensorfile.encode(tensors, file.metadata))
    for entry in checkpoint_dir.iterdir():
        if entry.is_file() and entry.suffix != ".safetensors":
            shutil.copy2(entry, draft / entry.name)
    files.sync_directory(draft)
    draft.rename(out_dir)
    return digests


def _map(path: Path) -> np.memmap[tuple[int, ...], np.dtype[np.uint8]]:
    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except ValueError:  # an empty file cannot be mapped
        raise CorruptDelta("empty") from None
