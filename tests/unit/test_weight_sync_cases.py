"""Faults of weight sync that others have met, as the kinds that they are; each receiver is held to each.

A sender that moved on past a failed delta, pruned chains and wrong bases, fused parameters that come in two
parts, tied embeddings, updates cut short, and hostile positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weight_states import JOB, MemoryRelay, fail_once, model, same, stepped

from rose.errors import CorruptDelta, RoseError, WrongBase
from rose.units import WeightVersion
from rose.weights import Publisher, container, encoding, tensorfile
from rose.weights.bits import Bits, State
from rose.weights.checkpoint import materialise
from rose.weights.container import EncodedVersion, write_version
from rose.weights.digests import digest_state
from rose.weights.encoding import encode_version
from rose.weights.hostcopy import HostCopy
from rose.weights.relay import RelayUnavailable
from rose.weights.relay.blocking import BlockingRelay
from rose.weights.store import WeightStore

torch = pytest.importorskip("torch")

V1, V2, V9, V10 = (WeightVersion(version) for version in (1, 2, 9, 10))


def torch_model(state: State, fused: bool = False) -> Any:
    """A module with these parameters; `fused` holds q, k and v of `attn` as one, as engines do."""
    root = torch.nn.Module()
    tensors = {
        name: torch.from_numpy(bits.words.copy().view("<i2")).view(torch.bfloat16).reshape(bits.shape)
        for name, bits in state.items()
    }
    if fused:
        parts = [f"attn.{part}_proj.weight" for part in "qkv"]
        module = torch.nn.Module()
        module.output_partition_sizes = [tensors[part].shape[0] for part in parts]
        tensors["attn.qkv_proj.weight"] = torch.cat([tensors.pop(part) for part in parts])
        root.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        root.add_module("attn", torch.nn.Module())
        root.attn.add_module("qkv_proj", module)
    for name, tensor in tensors.items():
        owner = root
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def live_of(module: Any, version: int = 0) -> Any:
    from rose.engines.live import LiveWeights  # noqa: PLC0415

    return LiveWeights(module, version=version)


def bf16(shape: tuple[int, ...], seed: int) -> Bits:
    rng = np.random.default_rng(seed)
    return Bits("BF16", shape, rng.integers(0x3C00, 0x3F80, int(np.prod(shape))).astype("<u2"))


def small_model() -> dict[str, Bits]:
    return {
        "attn.k_proj.weight": bf16((8, 16), 1),
        "attn.q_proj.weight": bf16((16, 16), 2),
        "attn.v_proj.weight": bf16((8, 16), 3),
        "embed_tokens.weight": bf16((32, 16), 4),
        "norm.weight": bf16((16,), 5),
    }


def moved(state: State, seed: int, *names: str) -> dict[str, Bits]:
    """The state with one element in ten changed, of the named parameters or of all."""
    rng = np.random.default_rng(seed)
    after = {name: bits.copy() for name, bits in state.items()}
    for name in names or state:
        after[name].words[rng.random(after[name].words.size) < 0.1] ^= 5
    return after


def written(path: Path, version: int, base: State | None, target: State, base_version: int = 0) -> Path:
    at = None if base is None else WeightVersion(base_version)
    write_version(path, encode_version(JOB, WeightVersion(version), at, base, target))
    return path


class Receiver:
    """One of the things that take versions in: how it takes one, and what it holds."""

    def __init__(self, take: Callable[[Path], object], held: Callable[[], State]) -> None:
        self.take, self.held = take, held


@pytest.fixture(params=["engine", "copy", "checkpoint"])
def receiver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Receiver]:
    """A receiver at version 0 of the small model."""
    source = tmp_path / "model"
    source.mkdir()
    (source / "model.safetensors").write_bytes(tensorfile.encode(small_model(), {}))
    if request.param == "engine":
        live = live_of(torch_model(small_model(), fused=True))

        def take(path: Path) -> None:
            manifest = container.read_manifest(path)
            live.apply(live.stage(path, manifest.version, live.version))

        yield Receiver(
            take,
            lambda: {name: Bits(p.dtype, p.shape, p.read().copy()) for name, p in live.parameters.items()},
        )
        live.close()
    elif request.param == "copy":
        copy = HostCopy.create(tmp_path / "copy", JOB, source)
        yield Receiver(copy.advance, lambda: copy.state)
        copy.close()
    else:
        state: dict[str, State] = {"now": small_model()}

        def build(path: Path) -> None:
            materialise(source, [path], tmp_path / "out")
            state["now"] = tensorfile.parse(
                np.fromfile(tmp_path / "out" / "model.safetensors", np.uint8)
            ).tensors

        yield Receiver(build, lambda: state["now"])


# ---- a sender that moves on past a failure ------------------------------------------------------------


@pytest.mark.parametrize("call", ["put_bucket", "commit"])
def test_positions_of_a_version_that_failed_are_sent_again(call: str) -> None:
    """The snapshot advances when the version is committed, not when it was sent."""
    base, relay = model(), MemoryRelay()
    first, second = stepped(base, 1), stepped(stepped(base, 1), 2)
    with Publisher(BlockingRelay(relay), JOB, base) as publisher:
        relay.before = fail_once(call)
        with pytest.raises(RelayUnavailable):
            publisher.publish(V1, first)
        report = publisher.publish(V2, second)
    assert report.base_version == 0
    expected = encode_version(JOB, V2, WeightVersion(0), base, second).manifest.changed
    assert report.changed == expected > encode_version(JOB, V2, V1, first, second).manifest.changed


# ---- pruned chains, wrong bases, damaged files --------------------------------------------------------


def test_a_gap_is_refused_and_changes_no_byte(receiver: Receiver, tmp_path: Path) -> None:
    """Version 10, built on version 9, comes to one that holds version 0."""
    nine = moved(small_model(), 9)
    path = written(tmp_path / "v10", 10, nine, moved(nine, 10), base_version=9)
    with pytest.raises(WrongBase):
        receiver.take(path)
    assert same(receiver.held(), small_model())


def test_a_chain_whose_first_versions_are_gone_is_no_chain(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    nine = moved(small_model(), 9)
    written(store.destination(JOB, V10), 10, nine, moved(nine, 10), base_version=9)
    with pytest.raises(RoseError):
        store.chain(JOB, WeightVersion(0), V10)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("file", ["manifest.json", "bucket-00000.safetensors"])
def test_missing_short_and_damaged_files_change_no_byte(
    receiver: Receiver, tmp_path: Path, damage: Callable[[Path], None], file: str
) -> None:
    path = written(tmp_path / "v1", 1, small_model(), moved(small_model(), 1))
    damage(path / file)
    with pytest.raises((CorruptDelta, WrongBase)):
        receiver.take(path)
    assert same(receiver.held(), small_model())


@pytest.mark.parametrize("odd", ["dtype", "shape", "name"])
def test_a_version_of_another_model_changes_no_byte(receiver: Receiver, tmp_path: Path, odd: str) -> None:
    foreign = small_model()
    bits = foreign.pop("norm.weight")
    foreign |= {
        "dtype": {"norm.weight": Bits("F16", bits.shape, bits.words)},
        "shape": {"norm.weight": Bits("BF16", (4, 4), bits.words)},
        "name": {"other.weight": bits},
    }[odd]
    path = written(tmp_path / "v1", 1, foreign, moved(foreign, 1))
    with pytest.raises((WrongBase, CorruptDelta)):
        receiver.take(path)
    assert same(receiver.held(), small_model())


# ---- fused parameters that come in parts --------------------------------------------------------------


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets so small that the parts of a fused parameter lie in different ones."""
    monkeypatch.setattr("rose.weights.shards.BUCKET_BYTES_MAX", 1800)
    monkeypatch.setattr(encoding.plan_buckets, "__kwdefaults__", {"limit_bytes": 1800})


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.usefixtures("small_buckets")
def test_parts_of_a_fused_parameter_may_come_apart(receiver: Receiver, tmp_path: Path, whole: bool) -> None:
    target = moved(small_model(), 1)
    path = written(tmp_path / "v1", 1, None if whole else small_model(), target)
    manifest = container.read_manifest(path)
    homes = {
        shard.bucket for each in manifest.parameters if each.name.startswith("attn.") for shard in each.shards
    }
    assert len(homes) > 1
    receiver.take(path)
    assert same(receiver.held(), target)


@pytest.mark.usefixtures("small_buckets")
def test_a_fused_parameter_is_not_written_while_a_part_is_missing(receiver: Receiver, tmp_path: Path) -> None:
    path = written(tmp_path / "v1", 1, small_model(), moved(small_model(), 1))
    for bucket in sorted(path.glob("bucket-*"))[1:]:
        bucket.unlink()
    with pytest.raises(CorruptDelta):
        receiver.take(path)
    assert same(receiver.held(), small_model())


def test_one_part_alone_leaves_the_others_as_they_are(receiver: Receiver, tmp_path: Path) -> None:
    target = moved(small_model(), 1, "attn.q_proj.weight")
    receiver.take(written(tmp_path / "v1", 1, small_model(), target))
    assert same(receiver.held(), target)


# ---- tied embeddings ----------------------------------------------------------------------------------


def test_a_delta_of_the_embedding_changes_a_tied_head(tmp_path: Path) -> None:
    module = torch_model(small_model())
    module.lm_head = torch.nn.Module()
    module.lm_head.weight = module.embed_tokens.weight
    live = live_of(module)
    target = moved(small_model(), 1, "embed_tokens.weight")
    live.apply(live.stage(written(tmp_path / "v1", 1, small_model(), target), 1, 0))
    assert module.lm_head.weight is module.embed_tokens.weight
    assert np.array_equal(live.parameters["embed_tokens.weight"].read(), target["embed_tokens.weight"].words)
    live.close()


@pytest.mark.parametrize("whole", [True, False])
def test_a_version_that_names_the_tied_head_too_is_taken(
    receiver: Receiver, tmp_path: Path, whole: bool
) -> None:
    """A trainer's state dict has both names; engines and checkpoints have one."""
    base, target = small_model(), moved(small_model(), 1)
    tied_base, tied_target = (
        {**state, "lm_head.weight": state["embed_tokens.weight"]} for state in (base, target)
    )
    receiver.take(written(tmp_path / "v1", 1, None if whole else tied_base, tied_target))
    assert same(receiver.held(), target)


def test_a_head_of_its_own_is_no_tied_one(receiver: Receiver, tmp_path: Path) -> None:
    base = {**small_model(), "lm_head.weight": small_model()["embed_tokens.weight"]}
    path = written(tmp_path / "v1", 1, base, moved(base, 1, "lm_head.weight"))
    with pytest.raises(WrongBase):
        receiver.take(path)
    assert same(receiver.held(), small_model())


def test_a_copy_with_tied_names_goes_back_too(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "model.safetensors").write_bytes(tensorfile.encode(small_model(), {}))
    target = moved(small_model(), 1)
    tied_base, tied_target = (
        {**state, "lm_head.weight": state["embed_tokens.weight"]} for state in (small_model(), target)
    )
    copy = HostCopy.create(tmp_path / "copy", JOB, source)
    copy.advance(written(tmp_path / "v1", 1, tied_base, tied_target))
    assert copy.digests == digest_state(target)
    copy.rewind()
    assert same(copy.state, small_model())
    copy.close()


# ---- hostile positions --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["beyond the end", "negative", "twice", "one value short"])
def test_hostile_positions_are_refused_before_anything_is_written(
    receiver: Receiver, tmp_path: Path, kind: str
) -> None:
    """The digests of the lying bucket are right; what is in it is not."""
    encoded = encode_version(JOB, V1, WeightVersion(0), small_model(), moved(small_model(), 1))
    ((name, data),) = encoded.buckets.items()
    file = tensorfile.parse(np.frombuffer(data, np.uint8))
    tensors = {key: bits.copy() for key, bits in file.tensors.items()}
    name_of = "attn.q_proj.weight"
    indices, values = tensors[f"{name_of}.idx"], tensors[f"{name_of}.val"]
    if kind == "beyond the end":
        indices.words[-1] = 16 * 16
    elif kind == "negative":
        indices.words[0] = 0xFFFFFFFF
    elif kind == "twice":
        indices.words[1] = indices.words[0]
    else:
        tensors[f"{name_of}.val"] = Bits(values.dtype, (values.words.size - 1,), values.words[:-1])
    data = tensorfile.encode(tensors, file.metadata)
    (bucket,) = encoded.manifest.buckets
    lying = bucket.__class__(name=name, size=len(data), digest=container.digest(data))
    manifest = container.manifests.decode(
        container.manifests.encode(encoded.manifest)
        .replace(bucket.digest.encode(), lying.digest.encode())
        .replace(f'"size":{bucket.size}'.encode(), f'"size":{lying.size}'.encode())
    )
    write_version(tmp_path / "v1", EncodedVersion(manifest, {name: data}))
    with pytest.raises(CorruptDelta):
        receiver.take(tmp_path / "v1")
    assert same(receiver.held(), small_model())
