"""What operators look at: how much of a model changed, and whether files hold what they promise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from rose.errors import WrongBase
from rose.units import JobId, WeightVersion
from rose.weights import container
from rose.weights.bits import State
from rose.weights.manifest import Manifest
from rose.weights.store import WeightStore

_COMMON = frozenset({"model", "layers", "language_model", "weight"})


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What changed in one kind of tensor, or in a whole model."""

    kind: str
    parameters: int
    elements: int
    changed: int
    dense_bytes: int

    @property
    def density(self) -> float:
        """Share of elements that changed."""
        return self.changed / self.elements if self.elements else 0.0


class VersionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One version in a list."""

    version: WeightVersion
    base_version: WeightVersion | None
    delta_bytes: int
    dense_bytes: int
    changed: int
    elements: int


def kind_of(name: str) -> str:
    """The kind of a parameter: its checkpoint name without layer and expert numbers.

    `model.layers.7.mlp.experts.3.up_proj.weight` is `mlp.experts.up_proj`.
    """
    parts = [part for part in name.split(".") if not part.isdecimal() and part not in _COMMON]
    return ".".join(parts) or name


def changes(manifest: Manifest) -> tuple[Change, ...]:
    """What a version changes, by kind, as its manifest says."""
    return _by_kind((each.name, each.elements, each.changed, each.nbytes) for each in manifest.parameters)


def compare(old: State, new: State) -> tuple[Change, ...]:
    """What differs between two states of one model, by kind.  Raises WrongBase if they are of two models."""
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new or not old[name].same_form(new[name]):
            raise WrongBase(f"two models: {name} is in one only, or of another dtype or shape")
    return _by_kind(
        (name, bits.words.size, int(np.count_nonzero(old[name].words != bits.words)), bits.nbytes)
        for name, bits in new.items()
    )


def total(parts: Iterable[Change]) -> Change:
    """All kinds together."""
    return _sum("all", list(parts))


def summary(manifest: Manifest) -> VersionSummary:
    """A version's line in a list."""
    return VersionSummary(
        version=manifest.version,
        base_version=manifest.base_version,
        delta_bytes=manifest.delta_bytes,
        dense_bytes=manifest.dense_bytes,
        changed=manifest.changed,
        elements=manifest.elements,
    )


def verify_staged(store: WeightStore, job: JobId, versions: Iterable[WeightVersion]) -> Iterator[Manifest]:
    """Read every byte of staged versions, and check that each delta continues the one before it.

    Yields each manifest that holds.  Raises CorruptDelta, WrongBase or NotFound at the first that does not.
    """
    seen: dict[WeightVersion, Manifest] = {}
    for version in versions:
        manifest = store.manifest(job, version)
        container.read_patches(store.path(job, version))
        if manifest.base_version is not None and (base := seen.get(manifest.base_version)) is not None:
            container.check_base(manifest, base.target_digests)
        seen[version] = manifest
        yield manifest


def _by_kind(parameters: Iterable[tuple[str, int, int, int]]) -> tuple[Change, ...]:
    """Sums over (name, elements, changed, bytes), in order of kind."""
    grouped: dict[str, list[Change]] = {}
    for name, elements, changed, nbytes in parameters:
        kind = kind_of(name)
        one = Change(kind=kind, parameters=1, elements=elements, changed=changed, dense_bytes=nbytes)
        grouped.setdefault(kind, []).append(one)
    return tuple(_sum(kind, parts) for kind, parts in sorted(grouped.items()))


def _sum(kind: str, parts: list[Change]) -> Change:
    return Change(
        kind=kind,
        parameters=sum(part.parameters for part in parts),
        elements=sum(part.elements for part in parts),
        changed=sum(part.changed for part in parts),
        dense_bytes=sum(part.dense_bytes for part in parts),
    )
