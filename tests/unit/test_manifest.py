"""Manifests: what is decoded is right in every field and relation, or it is CorruptDelta."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from weight_states import delta, model

from rose.errors import CorruptDelta
from rose.units import JobId, WeightVersion
from rose.weights import manifest as manifests
from rose.weights.encoding import encode_version
from rose.weights.manifest import BUCKET_BYTES_MAX, MANIFEST_BYTES_MAX, valid_job

MANIFEST = delta()[2].manifest
ENCODED = manifests.encode(MANIFEST)


def edited(edit: Callable[[dict[str, Any]], None]) -> bytes:
    document = json.loads(ENCODED)
    edit(document)
    return json.dumps(document).encode()


def parameter(document: dict[str, Any], name: str = "layers.0.mlp.weight") -> dict[str, Any]:
    return next(entry for entry in document["parameters"] if entry["name"] == name)


def test_encoding_is_canonical_and_survives_a_round_trip() -> None:
    assert manifests.decode(ENCODED) == MANIFEST
    assert manifests.encode(manifests.decode(ENCODED)) == ENCODED


def test_it_accounts_for_the_whole_model() -> None:
    state = model()
    assert MANIFEST.elements == sum(bits.words.size for bits in state.values())
    assert MANIFEST.dense_bytes == sum(bits.nbytes for bits in state.values())
    assert MANIFEST.target_digests.keys() == state.keys()
    assert 0 < MANIFEST.changed < MANIFEST.elements


def test_unchanged_parameters_are_listed_too() -> None:
    embed = next(entry for entry in MANIFEST.parameters if entry.name == "embed.weight")
    assert (embed.mode, embed.changed, embed.shards) == ("same", 0, ())


HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "unknown key": lambda d: d.update(surprise=1),
    "other schema": lambda d: d.update(schema=2),
    "negative version": lambda d: d.update(version=-1),
    "huge version": lambda d: d.update(version=1 << 60),
    "version a string": lambda d: d.update(version="1"),
    "built on itself": lambda d: d.update(base_version=1),
    "built on a later one": lambda d: d.update(base_version=9),
    "anchor of a delta": lambda d: d.update(base_version=None),
    "job climbs out": lambda d: d.update(job="../../etc"),
    "job is dots": lambda d: d.update(job=".."),
    "job with a newline": lambda d: d.update(job="job\n"),
    "bucket climbs out": lambda d: d["buckets"][0].update(name="../bucket-00000.safetensors"),
    "bucket absolute": lambda d: d["buckets"][0].update(name="/etc/passwd"),
    "bucket is the manifest": lambda d: d["buckets"][0].update(name="manifest.json"),
    "bucket twice": lambda d: d["buckets"].append(d["buckets"][0]),
    "bucket unused": lambda d: d["buckets"].append({**d["buckets"][0], "name": "bucket-00009.safetensors"}),
    "bucket missing": lambda d: d.update(buckets=[]),
    "bucket too large": lambda d: d["buckets"][0].update(size=BUCKET_BYTES_MAX + 1),
    "bucket empty": lambda d: d["buckets"][0].update(size=0),
    "digest short": lambda d: d["buckets"][0].update(digest="ab"),
    "digest upper case": lambda d: d["buckets"][0].update(digest="A" * 32),
    "fingerprint of another model": lambda d: d.update(fingerprint="0" * 32),
    "parameter twice": lambda d: d["parameters"].append(d["parameters"][-1]),
    "parameters out of order": lambda d: d["parameters"].reverse(),
    "parameter gone": lambda d: d["parameters"].pop(0),
    "name with a quote": lambda d: parameter(d).update(name='a"b'),
    "name empty": lambda d: parameter(d).update(name=""),
    "name too long": lambda d: parameter(d).update(name="z" * 600),
    "dtype unknown": lambda d: parameter(d).update(dtype="F4"),
    "dtype of another width": lambda d: parameter(d).update(dtype="F32"),
    "shape huge": lambda d: parameter(d).update(shape=[1 << 39, 1 << 39]),
    "shape negative": lambda d: parameter(d).update(shape=[-1, 2]),
    "shape of ten dimensions": lambda d: parameter(d).update(shape=[1] * 10),
    "shape smaller": lambda d: parameter(d).update(shape=[2]),
    "changed too many": lambda d: parameter(d).update(changed=1 << 30),
    "changed none": lambda d: parameter(d).update(changed=0),
    "changed contradicts shards": lambda d: parameter(d).update(changed=1),
    "mode unknown": lambda d: parameter(d).update(mode="zip"),
    "mode same but moved": lambda d: parameter(d).update(mode="same"),
    "mode dense with holes": lambda d: parameter(d).update(mode="dense"),
    "base digest missing": lambda d: parameter(d).update(base_digest=None),
    "digests equal though moved": lambda d: parameter(d).update(base_digest=parameter(d)["target_digest"]),
    "digests differ though same": lambda d: parameter(d, "embed.weight").update(base_digest="0" * 32),
    "shards gone": lambda d: parameter(d).update(shards=[]),
    "shard outside": lambda d: parameter(d)["shards"][0].update(stop=1 << 30),
    "shard backwards": lambda d: parameter(d)["shards"][0].update(start=1 << 30),
    "shard overfull": lambda d: parameter(d)["shards"][0].update(start=parameter(d)["shards"][0]["stop"] - 1),
    "shard empty": lambda d: parameter(d)["shards"][0].update(entries=0),
    "two shards in a bucket": lambda d: parameter(d)["shards"].append(parameter(d)["shards"][0]),
    "shard in no bucket": lambda d: parameter(d)["shards"][0].update(bucket="bucket-00007.safetensors"),
}


@pytest.mark.parametrize("edit", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_contradiction_is_refused(edit: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(CorruptDelta):
        manifests.decode(edited(edit))


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"job": "\xff"}', b"[" * 100_000, b'{"parameters":' * 5_000],
    ids=["empty", "object", "array", "null", "not utf-8", "bad string", "deep arrays", "deep objects"],
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptDelta):
        manifests.decode(data)


def test_one_beyond_the_size_limit_is_refused_unread() -> None:
    with pytest.raises(CorruptDelta, match="limit"):
        manifests.decode(bytes(MANIFEST_BYTES_MAX + 1))


def test_random_damage_is_refused_or_changes_nothing_that_is_not_checked_elsewhere() -> None:
    """Whatever still decodes differs only in digests, versions or the job: those are checked against data."""
    rng = random.Random(7)
    for _ in range(3000):
        damaged = bytearray(ENCODED)
        for _ in range(rng.randint(1, 3)):
            position = rng.randrange(len(damaged))
            match rng.randrange(3):
                case 0:
                    damaged[position] = rng.randrange(256)
                case 1:
                    del damaged[position : position + rng.randint(1, 40)]
                case _:
                    damaged[position:position] = bytes([rng.randrange(256)])
        try:
            decoded = manifests.decode(bytes(damaged))
        except CorruptDelta:
            continue
        assert decoded.fingerprint == MANIFEST.fingerprint
        assert [p.shape for p in decoded.parameters] == [p.shape for p in MANIFEST.parameters]


def test_a_version_must_be_above_its_base() -> None:
    base = model()
    with pytest.raises(CorruptDelta, match="cannot be built on"):
        encode_version(JobId("j"), WeightVersion(3), WeightVersion(3), base, base)


def test_job_ids_are_safe_names() -> None:
    assert valid_job("grpo-7b_run.3")
    for job in ("", ".", "..", "a/b", "a\\b", "-x", "a b", "job\n", "x" * 129, "é"):
        assert not valid_job(job)


def test_it_is_immutable() -> None:
    with pytest.raises(AttributeError):
        MANIFEST.version = WeightVersion(2)  # type: ignore[misc]
    assert msgspec.structs.replace(MANIFEST, version=WeightVersion(2)) != MANIFEST
