"""The container: every bit survives the round trip, and no damaged byte gets through."""

from __future__ import annotations

import os
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from weight_states import JOB, delta, model, same, stepped, tensor

from rose.errors import CorruptDelta, WrongBase
from rose.units import WeightVersion
from rose.weights import manifest as manifests
from rose.weights import tensorfile
from rose.weights.bits import ITEMSIZE, Bits, State, word_dtype
from rose.weights.container import EncodedVersion, decode_patches, read_patches, write_version
from rose.weights.digests import digest, digest_state
from rose.weights.encoding import encode_version
from rose.weights.manifest import BUCKET_BYTES_MAX, MANIFEST_NAME, Manifest
from rose.weights.patches import Patch, apply_to_state, check_base, check_target, digest_patched
from rose.weights.shards import Demand, plan_buckets

V0, V1 = WeightVersion(0), WeightVersion(1)


def round_trip(base: State, target: State) -> dict[str, Bits]:
    encoded = encode_version(JOB, V1, V0, base, target)
    return apply_to_state(base, decode_patches(encoded.manifest, encoded.buckets))


# ---- round trips ----


def test_a_delta_gives_the_target_and_its_digests() -> None:
    base, target, encoded = delta()
    patches = decode_patches(encoded.manifest, encoded.buckets)
    applied = apply_to_state(base, patches)
    assert same(applied, target)
    check_base(encoded.manifest, digest_state(base))
    check_target(encoded.manifest, digest_state(applied))
    assert [patch.name for patch in patches] == sorted(
        name for name in base if name not in ("embed.weight", "empty")
    )


def test_applying_twice_is_applying_once_and_leaves_the_base_alone() -> None:
    base, target, encoded = delta()
    before = digest_state(base)
    patches = decode_patches(encoded.manifest, encoded.buckets)
    assert same(apply_to_state(apply_to_state(base, patches), patches), target)
    assert digest_state(base) == before


def test_an_anchor_gives_the_target_from_any_base() -> None:
    target = model(1)
    encoded = encode_version(JOB, V1, None, None, target)
    assert same(apply_to_state(model(5), decode_patches(encoded.manifest, encoded.buckets)), target)
    check_base(encoded.manifest, digest_state(model(5)))


def test_nothing_changed_is_a_version_without_buckets() -> None:
    base = model()
    encoded = encode_version(JOB, V1, V0, base, base)
    assert encoded.buckets == {}
    assert decode_patches(encoded.manifest, encoded.buckets) == []
    assert encoded.manifest.changed == 0


@settings(max_examples=150, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(sorted(ITEMSIZE)), size=st.integers(0, 40))
def test_any_bits_to_any_bits(data: st.DataObject, dtype: str, size: int) -> None:
    words = hnp.arrays(word_dtype(dtype), size)
    base = {"w": Bits(dtype, (size,), data.draw(words))}
    target = {"w": Bits(dtype, (size,), data.draw(words))}
    assert same(round_trip(base, target), target)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (0x0000, 0x8000),  # zero and minus zero
        (0x7F80, 0xFF80),  # infinities
        (0x7FC0, 0x7FC1),  # two NaNs
        (0x7FC0, 0x3F80),  # a NaN and one
        (0x0001, 0x8001),  # subnormals
    ],
)
def test_values_that_compare_oddly_are_compared_by_their_bits(old: int, new: int) -> None:
    base = {"w": Bits("BF16", (64,), np.full(64, old, np.uint16))}
    target = {"w": base["w"].copy()}
    target["w"].words[17] = new
    encoded = encode_version(JOB, V1, V0, base, target)
    assert encoded.manifest.changed == 1
    (patch,) = decode_patches(encoded.manifest, encoded.buckets)
    assert patch.indices is not None
    assert (patch.indices.tolist(), patch.values.tolist()) == ([17], [new])


def test_equal_nans_are_no_change() -> None:
    base = {"w": Bits("BF16", (4,), np.full(4, 0x7FC0, np.uint16))}
    assert encode_version(JOB, V1, V0, base, {"w": base["w"].copy()}).manifest.changed == 0


def test_each_parameter_takes_its_smaller_form() -> None:
    base = {
        "few": tensor("BF16", (300,), 0),
        "many": tensor("BF16", (300,), 1),
        "half": tensor("F32", (300,), 2),
    }
    target = {name: bits.copy() for name, bits in base.items()}
    target["few"].words[:99] ^= 1  # 99 * 6 bytes < 600
    target["many"].words[:100] ^= 1  # 100 * 6 bytes = 600
    target["half"].words[:149] ^= 1  # 149 * 8 bytes < 1200
    manifest = encode_version(JOB, V1, V0, base, target).manifest
    assert {p.name: p.mode for p in manifest.parameters} == {"few": "coo", "many": "dense", "half": "coo"}


def test_encoding_again_gives_the_same_bytes() -> None:
    first, second = delta()[2], delta()[2]
    assert manifests.encode(first.manifest) == manifests.encode(second.manifest)
    assert first.buckets == second.buckets


def test_buckets_are_safetensors_files_for_others_too(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    encoded = delta()[2]
    write_version(tmp_path / "v1", encoded)
    loaded = safetensors.load_file(tmp_path / "v1" / "bucket-00000.safetensors")
    patch = next(
        p for p in decode_patches(encoded.manifest, encoded.buckets) if p.name == "layers.0.mlp.weight"
    )
    assert np.array_equal(loaded["layers.0.mlp.weight.val"], patch.values)


def test_large_parameters_are_cut_over_buckets() -> None:
    elements = BUCKET_BYTES_MAX // 2 + 1000
    base = {"big": Bits("BF16", (elements,), np.zeros(elements, np.uint16)), "tail": tensor("BF16", (10,), 0)}
    target = {
        "big": Bits("BF16", (elements,), np.arange(elements).astype(np.uint16)),
        "tail": base["tail"].copy(),
    }
    target["tail"].words[3] ^= 5
    encoded = encode_version(JOB, V1, V0, base, target)
    assert len(encoded.buckets) == 2
    assert all(len(data) <= BUCKET_BYTES_MAX for data in encoded.buckets.values())
    assert same(apply_to_state(base, decode_patches(encoded.manifest, encoded.buckets)), target)


def test_states_of_two_models_are_refused() -> None:
    base = model()
    for odd in ({**base, "more": tensor("F32", (1,), 0)}, {**base, "scale": tensor("F32", (), 0)}):
        with pytest.raises(WrongBase):
            encode_version(JOB, V1, V0, base, odd)


# ---- shards ----


@given(
    sizes=st.lists(st.integers(1, 60), max_size=12),
    entry_bytes=st.integers(1, 12),
    limit_bytes=st.integers(40, 200),
)
def test_buckets_hold_every_entry_once_and_stay_within_the_limit(
    sizes: list[int], entry_bytes: int, limit_bytes: int
) -> None:
    demands = [Demand(f"p{number}", size, entry_bytes, 5) for number, size in enumerate(sizes)]
    stored: dict[str, int] = {}
    for bucket in plan_buckets(demands, reserved_bytes=10, limit_bytes=limit_bytes):
        assert 10 + sum(5 + (place.last - place.first) * entry_bytes for place in bucket) <= limit_bytes
        assert len({place.name for place in bucket}) == len(bucket)
        for place in bucket:
            assert place.first == stored.get(place.name, 0)
            stored[place.name] = place.last
    assert stored == {demand.name: demand.entries for demand in demands}


def test_an_entry_larger_than_a_bucket_is_an_error_not_a_loop() -> None:
    with pytest.raises(ValueError, match="not one entry"):
        list(plan_buckets([Demand("p", 1, 100, 5)], reserved_bytes=10, limit_bytes=50))


# ---- damage ----


def test_random_damage_of_buckets_is_always_found() -> None:
    _, _, encoded = delta()
    rng = random.Random(11)
    (name,) = encoded.buckets
    for _ in range(2000):
        damaged = bytearray(encoded.buckets[name])
        position = rng.randrange(len(damaged))
        if rng.random() < 0.5:
            damaged[position] ^= 1 << rng.randrange(8)
        else:
            del damaged[position : position + rng.randint(1, 64)]
        with pytest.raises(CorruptDelta):
            decode_patches(encoded.manifest, {name: bytes(damaged)})


def test_random_damage_under_a_right_digest_never_crashes_nor_leaves_the_bounds() -> None:
    """A liar can compute digests too: then every bound must hold by itself."""
    base, _, encoded = delta()
    rng = random.Random(13)
    (bucket,) = encoded.manifest.buckets
    for _ in range(4000):
        damaged = bytearray(encoded.buckets[bucket.name])
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            patches = decode_patches(forged(encoded.manifest, bytes(damaged)), {bucket.name: bytes(damaged)})
            apply_to_state(base, patches)
        except (CorruptDelta, WrongBase):
            continue
        for patch in patches:
            assert (patch.dtype, patch.shape) == (base[patch.name].dtype, base[patch.name].shape)
            if patch.indices is not None:
                assert np.all(np.diff(patch.indices) > 0)
                assert patch.indices[0] >= 0
                assert patch.indices[-1] < base[patch.name].words.size


def forged(manifest: Manifest, data: bytes) -> Manifest:
    """The manifest, made to fit other bytes."""
    (bucket,) = manifest.buckets
    changed = msgspec.structs.replace(bucket, size=len(data), digest=digest(data))
    return msgspec.structs.replace(manifest, buckets=(changed,))


def resealed(encoded: EncodedVersion, **tensors: Bits | None) -> tuple[Manifest, dict[str, bytes]]:
    """The version with tensors of its one bucket replaced or left out, and all digests right."""
    (name,) = encoded.buckets
    parsed = tensorfile.parse(np.frombuffer(encoded.buckets[name], np.uint8))
    kept = {**parsed.tensors, **tensors}
    data = tensorfile.encode({key: bits for key, bits in kept.items() if bits is not None}, parsed.metadata)
    return forged(encoded.manifest, data), {name: data}


def u32(*values: int) -> Bits:
    return Bits("U32", (len(values),), np.array(values, np.uint32))


@pytest.mark.parametrize(
    "indices",
    [
        u32(0, 0, 5),
        u32(5, 3, 6),
        u32(0, 1, 2**32 - 1),
        u32(0, 1),
        u32(0, 1, 2, 3),
        None,
        Bits("F32", (3,), np.array([0, 1, 2], np.uint32)),
        Bits("U64", (3,), np.array([0, 1, 2**63], np.uint64)),
    ],
    ids=[
        "twice",
        "unsorted",
        "outside",
        "too few",
        "too many",
        "missing",
        "other dtype",
        "negative if signed",
    ],
)
def test_bad_indices_are_refused(indices: Bits | None) -> None:
    base = {"w": tensor("BF16", (100,), 0)}
    target = {"w": base["w"].copy()}
    target["w"].words[[2, 30, 70]] ^= 1
    manifest, buckets = resealed(encode_version(JOB, V1, V0, base, target), **{"w.idx": indices})
    with pytest.raises(CorruptDelta):
        decode_patches(manifest, buckets)


@pytest.mark.parametrize(
    "tensors",
    [
        {"w.val": None},
        {"w.val": u32(1, 2, 3)},
        {"w.val": Bits("U16", (2,), np.zeros(2, np.uint16))},
        {"x.val": u32(1)},
    ],
    ids=["missing", "other width", "too few", "a stranger"],
)
def test_bad_values_are_refused(tensors: dict[str, Bits | None]) -> None:
    base = {"w": tensor("BF16", (100,), 0)}
    target = {"w": base["w"].copy()}
    target["w"].words[[2, 30, 70]] ^= 1
    manifest, buckets = resealed(encode_version(JOB, V1, V0, base, target), **tensors)
    with pytest.raises(CorruptDelta):
        decode_patches(manifest, buckets)


def test_a_bucket_of_another_version_is_refused() -> None:
    base = model()
    first = encode_version(JOB, V1, V0, base, stepped(base, 1))
    second = encode_version(JOB, WeightVersion(2), V0, base, stepped(base, 1))
    (name,) = first.buckets
    with pytest.raises(CorruptDelta, match="another version"):
        decode_patches(forged(first.manifest, second.buckets[name]), second.buckets)


def test_a_patch_that_does_not_fit_the_state_is_refused() -> None:
    base, _, encoded = delta()
    patches = decode_patches(encoded.manifest, encoded.buckets)
    with pytest.raises(WrongBase):
        apply_to_state({name: bits for name, bits in base.items() if name != "scale"}, patches)
    with pytest.raises(WrongBase):
        apply_to_state({**base, "scale": tensor("F32", (), 0)}, patches)


def test_digests_of_another_base_or_target_are_refused() -> None:
    base, target, encoded = delta()
    with pytest.raises(WrongBase, match=r"^layers\.0\.mlp\.weight: "):
        check_base(encoded.manifest, {**digest_state(base), "layers.0.mlp.weight": "0" * 32})
    with pytest.raises(WrongBase, match="another model"):
        check_base(encoded.manifest, {"w": "0" * 32})
    with pytest.raises(CorruptDelta):
        check_target(encoded.manifest, digest_state(base))
    check_target(encoded.manifest, digest_state(target))


# ---- directories ----


def test_a_directory_reads_back(tmp_path: Path) -> None:
    base, target, encoded = delta()
    write_version(tmp_path / "v1", encoded)
    assert same(apply_to_state(base, read_patches(tmp_path / "v1")), target)
    with pytest.raises(FileExistsError):
        write_version(tmp_path / "v1", encoded)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [MANIFEST_NAME, "bucket-00000.safetensors"])
@pytest.mark.parametrize("fault", ["missing", "empty", "longer", "link", "pipe", "directory", "unreadable"])
def test_odd_files_are_refused(tmp_path: Path, name: str, fault: str) -> None:
    directory = tmp_path / "v1"
    write_version(directory, delta()[2])
    path = directory / name
    data = path.read_bytes()
    path.unlink()
    match fault:
        case "empty":
            path.write_bytes(b"")
        case "longer":
            path.write_bytes(data + b"x")
        case "link":
            (tmp_path / "elsewhere").write_bytes(data)
            path.symlink_to(tmp_path / "elsewhere")
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "unreadable":
            path.write_bytes(data)
            path.chmod(0)
            if os.access(path, os.R_OK):
                pytest.skip("root reads everything")
    with pytest.raises(CorruptDelta):
        read_patches(directory)


# ---- safetensors ----


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        (2**63).to_bytes(8, "little"),
        (100).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}x",
        (9).to_bytes(8, "little") + b'{"a":"\xff"}',
        (200_000).to_bytes(8, "little") + b'{"a":' * 40_000,
    ],
)
def test_what_is_no_safetensors_file_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptDelta):
        tensorfile.parse(np.frombuffer(data, np.uint8))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "U8", "shape": [4], "data_offsets": [0, 5]},
        {"dtype": "U8", "shape": [4], "data_offsets": [1, 5]},
        {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
        {"dtype": "U8", "shape": [-4], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [-2, -2], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [4], "data_offsets": [4, 0]},
        {"dtype": "U9", "shape": [4], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [2**62, 2**62], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": 4, "data_offsets": [0, 4]},
        {"dtype": "U8"},
    ],
)
def test_bad_headers_are_refused(entry: dict[str, object]) -> None:
    header = msgspec.json.encode({"a": entry})
    data = len(header).to_bytes(8, "little") + header + b"abcd"
    with pytest.raises(CorruptDelta):
        tensorfile.parse(np.frombuffer(data, np.uint8))


def test_foreign_files_with_unaligned_tensors_are_read() -> None:
    header = msgspec.json.encode(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "BF16", "shape": [2], "data_offsets": [1, 5]},
        }
    )
    data = len(header).to_bytes(8, "little") + header + b"\x07\x01\x00\x02\x00"
    parsed = tensorfile.parse(np.frombuffer(data, np.uint8))
    assert parsed.tensors["b"].words.tolist() == [1, 2]


def test_patches_own_no_trap_for_the_engine() -> None:
    """Indices are int64 and values contiguous, as torch wants them."""
    _, _, encoded = delta()
    for patch in decode_patches(encoded.manifest, encoded.buckets):
        assert isinstance(patch, Patch)
        assert patch.values.flags.c_contiguous
        assert patch.values.flags.aligned
        assert patch.indices is None or patch.indices.dtype == np.int64


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "F64"])
@pytest.mark.parametrize("elements", [0, 1, 1000, 300_000])
@pytest.mark.parametrize("share", [0.0, 0.001, 1.0])
def test_digests_of_a_patched_tensor_are_those_of_a_patched_copy(
    dtype: str, elements: int, share: float
) -> None:
    """Blocks end between, before and after changes."""
    words, values = (tensor(dtype, (elements,), seed).words for seed in (1, 2))
    rng = np.random.default_rng(3)
    indices = np.sort(rng.choice(elements, round(share * elements), replace=False)).astype(np.int64)
    after = words.copy()
    after[indices] = values[indices]
    assert digest_patched(words, indices, values[indices]) == (digest(words), digest(after))
    assert digest_patched(words, None, values) == (digest(words), digest(values))
