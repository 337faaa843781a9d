"""Versions in the delta codec: every bit comes back, and nothing that lies is believed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec
import numpy as np
import pytest
from weight_states import JOB, model, same, stepped, tensor

from rose.errors import CorruptDelta, WrongBase
from rose.units import WeightVersion
from rose.weights import boxes
from rose.weights import manifest as manifests
from rose.weights.bits import ITEMSIZE, Bits, State
from rose.weights.coding import Coding
from rose.weights.container import EncodedVersion, check_buckets, decode_patches
from rose.weights.digests import digest, digest_state
from rose.weights.encoding import encode_coded
from rose.weights.manifest import Manifest, Parameter, Slice
from rose.weights.patches import apply_to_state

V0, V1 = WeightVersion(0), WeightVersion(1)
SLICED = Coding(slice_bytes_max=512)


def coded(base: State | None, target: State, how: Coding = SLICED) -> EncodedVersion:
    return encode_coded(JOB, V1, None if base is None else V0, base, target, how=how)


def arrived(encoded: EncodedVersion, base: State | None, *, threads: int = 1) -> State:
    check_buckets(encoded.manifest, encoded.buckets)
    patches = decode_patches(encoded.manifest, encoded.buckets, base, threads=threads)
    return apply_to_state(base or {}, patches) if base else {p.name: bits_of(p) for p in patches}


def bits_of(patch: object) -> Bits:
    return Bits(patch.dtype, patch.shape, patch.values)  # type: ignore[attr-defined]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("how", [Coding(), SLICED, Coding(classes=1)])
def test_every_bit_comes_back(share: float, threads: int, how: Coding) -> None:
    base = model(1)
    target = stepped(base, 2, share) if share else base
    encoded = coded(base, target, how)
    assert same(arrived(encoded, base, threads=threads), target)


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_every_dtype(dtype: str) -> None:
    base, target = {"w": tensor(dtype, (37, 64), 1)}, {"w": tensor(dtype, (37, 64), 2)}
    for before in (base, None):
        encoded = coded(before, target)
        assert np.array_equal(arrived(encoded, before)["w"].words, target["w"].words)
        assert encoded.manifest.delta_bytes < 2 * target["w"].nbytes + 4096


@pytest.mark.parametrize("how", [Coding(), SLICED])
def test_an_anchor_needs_no_base_and_takes_any(how: Coding) -> None:
    target = model(3)
    encoded = coded(None, target, how)
    whole = {name: bits for name, bits in target.items() if bits.words.size}
    assert same({**arrived(encoded, None)}, whole)
    assert same(arrived(encoded, model(9)), target)


def test_random_bits_are_never_much_larger_than_dense() -> None:
    base, target = ({"w": tensor("BF16", (512, 1024), seed)} for seed in (1, 2))
    for before in (base, None):
        assert coded(before, target, Coding()).manifest.delta_bytes < 1.002 * target["w"].nbytes


def test_a_step_takes_less_than_a_byte_per_changed_element() -> None:
    """Weights of a normal distribution, moved as far as Adam moves them at a learning rate of RL."""
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, 1 << 21).astype(np.float32)
    moved = weights + rng.choice([-1, 1], weights.size).astype(np.float32) * np.float32(1e-6)
    base, target = (
        {"w": Bits("BF16", (1 << 10, 1 << 11), ((values.view(np.uint32) + 0x8000) >> 16).astype("<u2"))}
        for values in (weights, moved)
    )
    manifest = coded(base, target, Coding()).manifest
    assert 0.005 < manifest.changed / manifest.elements < 0.05
    assert manifest.delta_bytes < manifest.changed
    assert {p.mode for p in manifest.parameters} == {"coded"}


def test_fewer_classes_where_tables_cost_more_than_they_save() -> None:
    base = {"w": tensor("BF16", (256, 256), 1)}
    target = stepped(base, 1, 0.001)
    sizes = {k: coded(base, target, Coding(classes=k)).manifest.delta_bytes for k in (1, 4, 8)}
    assert sizes[8] <= sizes[4] <= sizes[1]


def test_the_outcome_depends_on_threads_in_no_way() -> None:
    base = model(4)
    target = stepped(base, 5)
    one, two = (coded(base, target, Coding(threads=n, slice_bytes_max=512)) for n in (1, 2))
    assert one == two


def test_the_manifest_tells_what_changed_where() -> None:
    base = model(5)
    target = stepped(base, 6)
    manifest = coded(base, target).manifest
    for parameter in manifest.parameters:
        changed = int(np.count_nonzero(base[parameter.name].words != target[parameter.name].words))
        assert parameter.changed == changed == sum(part.changed for part in parameter.slices)
    assert manifest.target_digests == digest_state(target)
    assert manifest.coded
    assert {p.name for p in manifest.parameters if p.mode == "same"} == {"embed.weight", "empty"}


# ---- what lies ----


def test_another_base_is_refused() -> None:
    base = model(1)
    encoded = coded(base, stepped(base, 2))
    other = {**base, "layers.0.mlp.weight": base["layers.0.mlp.weight"].copy()}
    other["layers.0.mlp.weight"].words[7] ^= 1
    with pytest.raises(WrongBase, match="not those that the delta was made on"):
        decode_patches(encoded.manifest, encoded.buckets, other)
    with pytest.raises(WrongBase, match="to be decoded"):
        decode_patches(encoded.manifest, encoded.buckets)


@pytest.mark.parametrize("anchor", [False, True])
def test_a_model_of_another_form_is_refused_before_anything_is_allocated(anchor: bool) -> None:
    base = model(1)
    encoded = coded(None if anchor else base, stepped(base, 2))
    for name, odd in (
        ("layers.0.mlp.weight", tensor("BF16", (32, 64), 1)),
        ("layers.0.norm.weight", tensor("BF16", (32,), 1)),
    ):
        with pytest.raises(WrongBase):
            decode_patches(encoded.manifest, encoded.buckets, {**base, name: odd})
    smaller = {name: bits for name, bits in base.items() if name != "layers.0.mlp.weight"}
    with pytest.raises(WrongBase):
        decode_patches(encoded.manifest, encoded.buckets, smaller)


def resealed(encoded: EncodedVersion, buckets: Mapping[str, bytes]) -> Manifest:
    """The manifest with the digests of these buckets, as a liar would write it."""
    sealed = tuple(
        msgspec.structs.replace(each, size=len(buckets[each.name]), digest=digest(buckets[each.name]))
        for each in encoded.manifest.buckets
    )
    return msgspec.structs.replace(encoded.manifest, buckets=sealed)


def test_no_flipped_bit_is_believed_whatever_the_digests_say() -> None:
    """Every byte of every bucket, with the digest of the bucket made to fit."""
    base = {name: bits for name, bits in model(1).items() if name != "layers.0.mlp.weight"}
    encoded = coded(base, stepped(base, 2, 0.1))
    (name,) = encoded.buckets
    data = encoded.buckets[name]
    rng = np.random.default_rng(1)
    target = digest_state(stepped(base, 2, 0.1))
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(rng.integers(8))
        buckets = {name: bytes(damaged)}
        with contextlib.suppress(CorruptDelta):
            patches = decode_patches(resealed(encoded, buckets), buckets, base)
            # A name in the file's own header, which nothing depends on.
            assert digest_state(apply_to_state(base, patches)) == target


def tampered(encoded: EncodedVersion, name: str, **changes: object) -> Manifest:
    """The manifest with a parameter's first stored slice changed, checked as one that arrives."""

    def edit(parameter: Parameter) -> Parameter:
        at = next(i for i, part in enumerate(parameter.slices) if part.bucket)
        parts = list(parameter.slices)
        parts[at] = msgspec.structs.replace(parts[at], **changes)
        return msgspec.structs.replace(parameter, slices=tuple(parts))

    edited = tuple(edit(p) if p.name == name else p for p in encoded.manifest.parameters)
    return manifests.decode(manifests.encode(msgspec.structs.replace(encoded.manifest, parameters=edited)))


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 0},
        {"offset": 1 << 30},
        {"length": 1},
        {"length": 1 << 39},
        {"bucket": "bucket-00099.safetensors"},
        {"bucket": None},
        {"raw": True},
        {"tables": None},
        {"tables": 77},
        {"changed": 1 << 35},
        {"box": ((0, 64), (0, 32))},
        {"box": ((0, 0), (0, 32))},
        {"box": ((0, 8),)},
        {"box": ((0, 65), (0, 32))},
        {"box": None},
        {"target_digest": None},
        {"target_digest": "0" * 32},
        {"base_digest": None},
        {"base_digest": "0" * 32},
    ],
)
def test_slices_that_lie_are_refused(changes: dict[str, object]) -> None:
    base = model(1)
    encoded = coded(base, stepped(base, 2))
    with pytest.raises((CorruptDelta, WrongBase)):
        decode_patches(tampered(encoded, "layers.0.mlp.weight", **changes), encoded.buckets, base)


def test_slices_must_tile_their_parameter() -> None:
    base = model(1)
    encoded = coded(base, stepped(base, 2))
    parameter = next(p for p in encoded.manifest.parameters if p.name == "layers.0.mlp.weight")
    first, second, *rest = parameter.slices
    moved = msgspec.structs.replace(second, box=first.box)
    for wrong in ((first, first, *rest), (first, moved, *rest), (second, *rest), (*parameter.slices, first)):
        odd = msgspec.structs.replace(parameter, slices=wrong)
        parameters = tuple(odd if p is parameter else p for p in encoded.manifest.parameters)
        with pytest.raises(CorruptDelta):
            manifests.check(msgspec.structs.replace(encoded.manifest, parameters=parameters))


def test_slices_of_any_rectangles_are_put_together() -> None:
    """As ranks of a trainer hold them: columns, and rows of unequal height."""
    shape = (12, 10)
    rng = np.random.default_rng(3)
    words = rng.integers(0, 1 << 16, 120).astype("<u2")
    cuts = [((0, 5), (0, 4)), ((5, 12), (0, 4)), ((0, 12), (4, 9)), ((0, 12), (9, 10))]
    total = np.zeros(120, "<u2")
    seen: list[int] = []
    for box in cuts:
        part = boxes.take(words, shape, box)
        seen += boxes.globalise(shape, box, np.arange(part.size)).tolist()
        assert np.array_equal(words[boxes.globalise(shape, box, np.arange(part.size))], part)
        boxes.put(total, shape, box, part)
    assert sorted(seen) == list(range(120))
    assert np.array_equal(total, words)


@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (1000,), (1, 1000), (7, 11, 13), (3, 1, 1)])
@pytest.mark.parametrize("most", [1, 5, 64, 10_000])
def test_a_box_is_cut_into_pieces_in_order(shape: tuple[int, ...], most: int) -> None:
    pieces = boxes.cut(boxes.whole(shape), most)
    positions = np.arange(int(np.prod(shape, dtype=np.int64)))
    found = [boxes.take(positions, shape, piece) for piece in pieces]
    assert np.array_equal(np.concatenate(found), positions)
    assert all(part.size <= most for part in found)


def test_an_unsliced_manifest_is_as_small_as_it_can_be() -> None:
    base = model(1)
    (part,) = (
        part
        for parameter in coded(base, stepped(base, 2), Coding()).manifest.parameters
        for part in parameter.slices
        if parameter.name == "layers.0.mlp.weight"
    )
    assert isinstance(part, Slice)
    assert (part.box, part.base_digest, part.target_digest) == (None, None, None)
