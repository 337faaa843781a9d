"""Squashing: one version does what a chain does, byte for byte, and is no larger."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_states import JOB, model, same, stepped

from rose.errors import NotFound, WrongBase
from rose.units import WeightVersion
from rose.weights.bits import Bits, State
from rose.weights.container import decode_patches, write_version
from rose.weights.digests import digest_state
from rose.weights.encoding import encode_version
from rose.weights.patches import Patch, apply_patch, apply_to_state, check_base, check_target
from rose.weights.squash import merge, squash


def chain(root: Path, states: list[State], anchors: tuple[int, ...] = ()) -> list[Path]:
    directories = []
    for version, (before, after) in enumerate(itertools.pairwise(states), 1):
        base = None if version in anchors else before
        base_version = None if version in anchors else WeightVersion(version - 1)
        directories.append(root / f"v{version}")
        write_version(directories[-1], encode_version(JOB, WeightVersion(version), base_version, base, after))
    return directories


def walk(count: int) -> list[State]:
    states: list[State] = [model()]
    for seed in range(1, count + 1):
        states.append(stepped(states[-1], seed))
    return states


@pytest.mark.parametrize("anchors", [(), (1,), (3,), (2, 4)])
def test_it_does_what_the_chain_does(tmp_path: Path, anchors: tuple[int, ...]) -> None:
    states = walk(5)
    directories = chain(tmp_path, states, anchors)
    encoded = squash(directories)
    manifest = encoded.manifest
    assert (manifest.version, manifest.base_version) == (5, None if anchors else 0)
    check_base(manifest, digest_state(states[0]))
    state = apply_to_state(states[0], decode_patches(manifest, encoded.buckets))
    check_target(manifest, digest_state(state))
    assert same(state, states[-1])
    chain_bytes = sum(file.stat().st_size for each in directories for file in each.glob("bucket-*"))
    assert manifest.delta_bytes < chain_bytes


def test_the_middle_of_a_chain(tmp_path: Path) -> None:
    states = walk(5)
    encoded = squash(chain(tmp_path, states)[2:4])
    assert (encoded.manifest.version, encoded.manifest.base_version) == (4, 2)
    assert same(apply_to_state(states[2], decode_patches(encoded.manifest, encoded.buckets)), states[4])


def test_one_version_stays_as_it_is(tmp_path: Path) -> None:
    (directory,) = chain(tmp_path, walk(1))
    encoded = squash([directory])
    assert dict(encoded.buckets) == {file.name: file.read_bytes() for file in directory.glob("bucket-*")}


def test_what_went_and_came_back_is_not_sent(tmp_path: Path) -> None:
    there = walk(1)
    encoded = squash(chain(tmp_path, [*there, there[0]]))
    assert encoded.manifest.changed == 0
    assert not encoded.buckets


def test_what_does_not_follow_is_refused(tmp_path: Path) -> None:
    directories = chain(tmp_path, walk(3))
    with pytest.raises(WrongBase):
        squash([directories[0], directories[2]])
    with pytest.raises(WrongBase):
        squash(directories[::-1])
    foreign = chain(tmp_path / "other", [model(), stepped(model(), 90), stepped(model(), 91)])
    with pytest.raises(WrongBase, match="not those of version 1"):
        squash([directories[0], foreign[1]])
    with pytest.raises(NotFound):
        squash([])


@st.composite
def patches(draw: st.DrawFn) -> Patch:
    size = 12
    if draw(st.integers(0, 3)) == 0:
        values = np.array(draw(st.lists(st.integers(0, 99), min_size=size, max_size=size)), np.uint16)
        return Patch("p", "BF16", (size,), None, values)
    indices = np.array(sorted(draw(st.sets(st.integers(0, size - 1), min_size=1))), np.int64)
    values = np.array(
        draw(st.lists(st.integers(0, 99), min_size=indices.size, max_size=indices.size)), np.uint16
    )
    return Patch("p", "BF16", (size,), indices, values)


@given(st.lists(patches(), min_size=1, max_size=6))
def test_merging_patches_is_applying_them_in_order(parts: list[Patch]) -> None:
    bits = Bits("BF16", (12,), np.full(12, 1000, np.uint16))
    expected, total = bits, parts[0]
    for part in parts:
        expected = apply_patch(expected, part)
    for part in parts[1:]:
        total = merge(total, part)
    assert np.array_equal(apply_patch(bits, total).words, expected.words)
    assert total.indices is None or np.all(total.indices[1:] > total.indices[:-1])
