"""Several versions as one: what a late joiner applies instead of a chain.

    v4, v5, ... v9  (v4 built on v3)  ->  one delta from v3 to v9, or an anchor if there is one among them

Works on the versions' files alone, without the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rose.errors import NotFound, WrongBase
from rose.weights import container, encoding
from rose.weights.container import EncodedVersion
from rose.weights.manifest import Manifest, main_job
from rose.weights.patches import Patch, check_base


def squash(directories: Sequence[Path]) -> EncodedVersion:
    """One version that does what these, in order, do.

    What comes before the last anchor is left out.  Positions that changed and changed back count as changed.
    Raises WrongBase if one does not follow the one before it byte for byte, CorruptDelta, NotFound if there
    are none.
    """
    if not directories:
        raise NotFound("no versions to squash")
    first = last = container.read_manifest(directories[0])
    merged: dict[str, Patch] = {}
    for number, directory in enumerate(directories):
        manifest = container.read_manifest(directory)
        if number:
            _check_follows(last, manifest)
        if manifest.base_version is None:
            first, merged = manifest, {}
        for patch in container.read_patches(directory):
            merged[patch.name] = patch if patch.name not in merged else merge(merged[patch.name], patch)
        last = manifest
    return encoding.encode_squashed(first, last, merged.values())


def merge(earlier: Patch, later: Patch) -> Patch:
    """The patch that has the effect of both; where both write, the later one stays."""
    if later.indices is None:
        return later
    if earlier.indices is None:
        values = earlier.values.copy()
        values[later.indices] = later.values
        return Patch(later.name, later.dtype, later.shape, None, values)
    # np.unique answers the first of equal entries: the later patch goes first.
    indices, order = np.unique(np.concatenate([later.indices, earlier.indices]), return_index=True)
    values = np.concatenate([later.values, earlier.values])[order]
    return Patch(later.name, later.dtype, later.shape, indices, values)


def _check_follows(before: Manifest, manifest: Manifest) -> None:
    if manifest.version <= before.version or main_job(manifest.job) != main_job(before.job) or manifest.undo:
        raise WrongBase(f"version {manifest.version} does not follow version {before.version}")
    if manifest.base_version not in (None, before.version):
        raise WrongBase(
            f"version {manifest.version} is built on {manifest.base_version}, not {before.version}"
        )
    check_base(manifest, before.target_digests)
