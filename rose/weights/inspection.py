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
    coded_bytes: int | None = None
    """What it takes in buckets; None where two states are compared."""

    @property
    def bytes_per_changed(self) -> float | None:
        """Bytes stored per changed element; None where nothing changed or was stored."""
        return self.coded_bytes / self.changed if self.coded_bytes is not None and self.changed else None

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
    return _by_kind(
        (each.name, each.elements, each.changed, each.nbytes, each.stored_bytes)
        for each in manifest.parameters
    )


def compare(old: State, new: State) -> tuple[Change, ...]:
    """What differs between two states of one model, by kind.  Raises WrongBase if they are of two models."""
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new or not old[name].same_form(new[name]):
            raise WrongBase(f"two models: {name} is in one only, or of another dtype or shape")
    return _by_kind(
        (name, bits.words.size, int(np.count_nonzero(old[name].words != bits.words)), bits.nbytes, None)
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
        container.check_buckets(manifest, container.read_buckets(store.path(job, version), manifest))
        if manifest.base_version is not None and (base := seen.get(manifest.base_version)) is not None:
            _check_follows(manifest, base)
        seen[version] = manifest
        yield manifest


def _check_follows(manifest: Manifest, base: Manifest) -> None:
    """Check what both know of the bytes between them.  Raises WrongBase."""
    known = base.target_digests
    if manifest.fingerprint != base.fingerprint:
        raise WrongBase(f"version {manifest.version} is of another model than version {base.version}")
    for parameter in manifest.parameters:
        held = known.get(parameter.name)
        if None not in (held, parameter.base_digest) and held != parameter.base_digest:
            raise WrongBase(
                f"{parameter.name}: version {manifest.version} is not built on the bytes of {base.version}"
            )


def _by_kind(parameters: Iterable[tuple[str, int, int, int, int | None]]) -> tuple[Change, ...]:
    """Sums over (name, elements, changed, bytes, bytes stored), in order of kind."""
    grouped: dict[str, list[Change]] = {}
    for name, elements, changed, dense, coded in parameters:
        kind = kind_of(name)
        one = Change(
            kind=kind, parameters=1, elements=elements, changed=changed, dense_bytes=dense, coded_bytes=coded
        )
        grouped.setdefault(kind, []).append(one)
    return tuple(_sum(kind, parts) for kind, parts in sorted(grouped.items()))


def _sum(kind: str, parts: list[Change]) -> Change:
    stored = [part.coded_bytes for part in parts]
    return Change(
        kind=kind,
        parameters=sum(part.parameters for part in parts),
        elements=sum(part.elements for part in parts),
        changed=sum(part.changed for part in parts),
        dense_bytes=sum(part.dense_bytes for part in parts),
        coded_bytes=None if None in stored else sum(size for size in stored if size is not None),
    )
