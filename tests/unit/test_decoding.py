"""What a host makes of a coded version: patches, made once, never trusted unread."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from weight_states import JOB, model, same, stepped

from rose.errors import CorruptDelta, NotFound, WrongBase
from rose.units import WeightVersion
from rose.weights import coding, container
from rose.weights.bits import Bits
from rose.weights.container import read_manifest, read_patches, write_version
from rose.weights.decoding import Overlay, decode_staged, manifest_digest, patches_path
from rose.weights.encoding import encode_coded, encode_version
from rose.weights.patches import apply_to_state

STATES = [model()]
for _version in range(1, 4):
    STATES.append(stepped(STATES[-1], _version))


def stage(root: Path, version: int, *, anchor: bool = False) -> Path:
    path = root / f"v{version}"
    base_version, base = (None, None) if anchor else (WeightVersion(version - 1), STATES[version - 1])
    write_version(path, encode_coded(JOB, WeightVersion(version), base_version, base, STATES[version]))
    return path


@pytest.mark.parametrize("anchor", [False, True])
def test_patches_need_no_base_and_remember_where_they_come_from(tmp_path: Path, anchor: bool) -> None:
    staged = stage(tmp_path, 1, anchor=anchor)
    with pytest.raises(NotFound):
        patches_path(staged)
    patches = decode_staged(staged, STATES[0], threads=2)
    assert patches == patches_path(staged)
    assert same(apply_to_state(STATES[0], read_patches(patches)), STATES[1])
    sent, kept = read_manifest(staged), read_manifest(patches)
    assert not kept.coded
    assert (kept.target_digests, kept.base_version) == (sent.target_digests, sent.base_version)
    assert manifest_digest(kept) == manifest_digest(sent)
    assert kept.wire_bytes == sent.delta_bytes


def test_it_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = stage(tmp_path, 1)
    decode_staged(staged, STATES[0])
    monkeypatch.setattr(container, "read_batches", None)
    assert patches_path(staged) == decode_staged(staged, {})


@pytest.mark.parametrize("damage", ["torn", "rotten", "gone", "of another version"])
def test_patches_that_are_not_whole_are_made_again(tmp_path: Path, damage: str) -> None:
    staged = stage(tmp_path, 1)
    patches = decode_staged(staged, STATES[0])
    bucket = next(patches.glob("bucket-*"))
    if damage == "torn":
        bucket.write_bytes(bucket.read_bytes()[:-1])
    elif damage == "rotten":
        bucket.write_bytes(bytes([*bucket.read_bytes()[:-1], 255]))
    elif damage == "gone":
        bucket.unlink()
    else:
        other = encode_coded(JOB, WeightVersion(1), WeightVersion(0), STATES[0], STATES[2])
        for entry in [*staged.glob("bucket-*"), staged / "manifest.json"]:
            entry.unlink()
        write_version(tmp_path / "other", other)
        for entry in (tmp_path / "other").iterdir():
            entry.rename(staged / entry.name)
    target = STATES[2] if damage == "of another version" else STATES[1]
    assert same(apply_to_state(STATES[0], read_patches(decode_staged(staged, STATES[0]))), target)


def test_nothing_is_left_of_what_cannot_be_decoded(tmp_path: Path) -> None:
    staged = stage(tmp_path, 1)
    with pytest.raises(WrongBase):
        decode_staged(staged, STATES[2])
    bucket = next(staged.glob("bucket-*"))
    bucket.write_bytes(bytes(bucket.stat().st_size))
    with pytest.raises(CorruptDelta):
        decode_staged(staged, STATES[0])
    with pytest.raises(NotFound):
        patches_path(staged)


def test_a_version_that_needs_no_base_is_its_own_patches(tmp_path: Path) -> None:
    encoded = encode_version(JOB, WeightVersion(1), WeightVersion(0), STATES[0], STATES[1])
    write_version(tmp_path / "v1", encoded)
    assert decode_staged(tmp_path / "v1", {}) == patches_path(tmp_path / "v1") == tmp_path / "v1"


def test_an_overlay_is_the_later_version(tmp_path: Path) -> None:
    paths = [decode_staged(stage(tmp_path, number), STATES[number - 1]) for number in (1, 2)]
    overlay = Overlay(STATES[0], paths)
    assert same(dict(overlay), STATES[2])
    assert len(overlay) == len(STATES[0])
    third = decode_staged(stage(tmp_path, 3), overlay)
    assert same(apply_to_state(STATES[2], read_patches(third)), STATES[3])
    assert same(STATES[0], model()), "nothing below is written"


def test_tied_parameters_are_left_out(tmp_path: Path) -> None:
    """The trainer names the output head beside the embedding; this host holds the embedding only."""
    states = [{**state, "lm_head.weight": state["embed.weight"]} for state in (model(), model())]
    words = states[1]["embed.weight"].words.copy()
    words[5] ^= 1
    moved = Bits("BF16", (40, 16), words)
    states[1] |= {"embed.weight": moved, "lm_head.weight": moved}
    encoded = encode_coded(JOB, WeightVersion(1), WeightVersion(0), *states)
    write_version(tmp_path / "v1", encoded)
    held = {name: bits for name, bits in states[0].items() if name != "lm_head.weight"}
    patches = decode_staged(tmp_path / "v1", held)
    assert "lm_head.weight" not in read_manifest(patches).target_digests
    assert np.array_equal(apply_to_state(held, read_patches(patches))["embed.weight"].words, words)


@pytest.mark.parametrize("anchor", [False, True])
def test_a_large_version_is_never_held_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anchor: bool
) -> None:
    monkeypatch.setattr(coding, "_BUCKET_BYTES", 1 << 20)
    monkeypatch.setattr(container, "_BATCH_BYTES", 1 << 20)
    rng = np.random.default_rng(1)
    names = [f"model.layers.{number}.w" for number in range(64)]
    before = {
        name: Bits("BF16", (1 << 19,), rng.integers(0, 1 << 16, 1 << 19).astype("<u2")) for name in names
    }
    after = {name: bits.copy() for name, bits in before.items()}
    for name in names[1:]:
        after[name].words[::2] ^= 1
    base = (None, None) if anchor else (WeightVersion(0), before)
    write_version(tmp_path / "v1", encode_coded(JOB, WeightVersion(1), *base, after))
    tracemalloc.start()
    patches = decode_staged(tmp_path / "v1", before)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < sum(bits.nbytes for bits in before.values()) / 2
    kept = read_manifest(patches)
    assert len(kept.buckets) > 30
    assert [each.name for each in kept.parameters] == sorted(names)
    assert same(apply_to_state(before, read_patches(patches)), after)


def test_a_version_that_is_damaged_late_leaves_no_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "_BATCH_BYTES", 1)
    staged = stage(tmp_path, 1)
    late = "layers.0.quantised"
    other = {**STATES[0], late: STATES[2][late]}
    with pytest.raises(WrongBase):
        decode_staged(staged, other)
    assert sorted(path.name for path in staged.iterdir() if path.is_dir()) == []
