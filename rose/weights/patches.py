"""Patches: new bits of parameters, in the form in which they are applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from rose.errors import CorruptDelta, WrongBase
from rose.weights import manifest as manifests
from rose.weights.bits import Bits, State, Words
from rose.weights.digests import digest
from rose.weights.manifest import Manifest

Indices = npt.NDArray[np.int64]

_BLOCK_BYTES = 1 << 19
"""Fits a core's own cache beside the block it is copied from."""


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """New bits of one parameter: all of them (`indices` None), or those at `indices`.

    Indices count elements flattened in checkpoint order, strictly increasing, within the shape; `values` are
    raw little-endian words as wide as an element, one per index.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    indices: Indices | None
    values: Words


def apply_patch(bits: Bits, patch: Patch) -> Bits:
    """The patched tensor, in memory of its own.  Raises WrongBase if the patch is of another form."""
    require_form(bits, patch)
    patched = bits.copy()
    write_patch(patched, patch)
    return patched


def require_form(bits: Bits, patch: Patch) -> None:
    """Raises WrongBase if the patch is of another form than the tensor."""
    if (bits.dtype, bits.shape) != (patch.dtype, patch.shape):
        raise WrongBase(f"{patch.name}: {patch.dtype} {patch.shape} cannot patch {bits.dtype} {bits.shape}")


def write_patch(bits: Bits, patch: Patch) -> None:
    """Write the patch over a tensor of its form, in place."""
    bits.words[slice(None) if patch.indices is None else patch.indices] = patch.values


def digest_patched(words: Words, indices: Indices | None, values: Words) -> tuple[str, str]:
    """Digests of a tensor's bytes, and of what they are after a patch (`indices` rising; None: all of it).

    In blocks that stay in the cache: a patched copy of a large tensor would cost more than hashing it twice.
    """
    if indices is None:
        return digest(words), digest(values)
    before, after = xxhash.xxh3_128(), xxhash.xxh3_128()
    step = _BLOCK_BYTES // words.itemsize
    block = np.empty(min(step, words.size), words.dtype)
    cuts = np.searchsorted(indices, np.arange(0, words.size + step, step))
    for number, first in enumerate(range(0, words.size, step)):
        part = words[first : first + step]
        before.update(part.data)
        patched = block[: part.size]
        np.copyto(patched, part)
        mine = slice(cuts[number], cuts[number + 1])
        patched[indices[mine] - first] = values[mine]
        after.update(patched.data)
    return before.hexdigest(), after.hexdigest()


def apply_to_state(state: State, patches: Iterable[Patch]) -> dict[str, Bits]:
    """The state after the patches; `state` is left as it is, parameters not patched are shared with it.

    Raises WrongBase if a patch names a parameter that the state lacks, or of another form.
    """
    patched = dict(state)
    for patch in patches:
        if patch.name not in state:
            raise WrongBase(f"{patch.name}: no such parameter in the base")
        patched[patch.name] = apply_patch(state[patch.name], patch)
    return patched


def check_base(manifest: Manifest, digests: Mapping[str, str]) -> None:
    """Check that digests held are those the delta was built on (an anchor fits any).  Raises WrongBase.

    Names that are tied to what is held (`manifest.tied_names`) need not be there.
    """
    tied = manifests.tied_names(manifest, digests)
    names = {parameter.name for parameter in manifest.parameters}
    if digests.keys() != names - tied:
        odd = sorted((digests.keys() ^ names) - tied)
        raise WrongBase(f"version {manifest.version} is of another model: {', '.join(odd[:3])}")
    for parameter in manifest.parameters:
        if parameter.name in tied:
            continue
        if parameter.base_digest is not None and parameter.base_digest != digests[parameter.name]:
            raise WrongBase(
                f"{parameter.name}: the bytes held are not those of version {manifest.base_version}"
            )


def check_target(manifest: Manifest, digests: Mapping[str, str]) -> None:
    """Check that digests computed after applying are the promised ones.  Raises CorruptDelta."""
    tied = manifests.tied_names(manifest, digests)
    for name, expected in manifest.target_digests.items():
        if name not in tied and digests.get(name) != expected:
            raise CorruptDelta(f"{name}: the bytes are not those of version {manifest.version}")
