"""The receiver: a version is on the host whole and verified, or it is not there."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import msgspec
import pytest
from weight_states import JOB, MemoryRelay, delta, fail_once, model, same, stepped

from rose.errors import CorruptDelta, NotReady, TimedOut
from rose.units import WeightVersion
from rose.weights import container, encoding, files
from rose.weights.container import read_patches
from rose.weights.encoding import encode_version
from rose.weights.patches import apply_to_state
from rose.weights.receiver import pull
from rose.weights.relay import RelayUnavailable, VersionGone
from rose.weights.relay.ranges import PARALLEL
from rose.weights.store import WeightStore

V1 = WeightVersion(1)
BASE, TARGET, ENCODED = delta()


@pytest.fixture
def relay() -> MemoryRelay:
    relay = MemoryRelay()
    relay.publish(ENCODED)
    return relay


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path)


@pytest.fixture
def destination(store: WeightStore) -> Path:
    return store.destination(JOB, V1)


def holds_target(directory: Path) -> bool:
    return same(apply_to_state(BASE, read_patches(directory)), TARGET)


async def test_a_pulled_version_gives_the_target(
    relay: MemoryRelay, store: WeightStore, destination: Path
) -> None:
    pulled = await pull(relay, JOB, V1, destination)
    assert pulled.path == destination
    assert pulled.manifest == ENCODED.manifest
    assert pulled.pull_ms > 0
    assert pulled.verify_ms > 0
    assert store.versions(JOB) == (1,)
    assert holds_target(store.path(JOB, V1))


async def test_pulling_again_fetches_nothing(relay: MemoryRelay, destination: Path) -> None:
    await pull(relay, JOB, V1, destination)
    relay.calls.clear()
    await pull(relay, JOB, V1, destination)
    assert relay.calls == ["manifest"]


async def test_a_version_the_relay_lacks_leaves_nothing(relay: MemoryRelay, store: WeightStore) -> None:
    with pytest.raises(VersionGone):
        await pull(relay, JOB, WeightVersion(7), store.destination(JOB, WeightVersion(7)))
    assert store.versions(JOB) == ()


async def test_a_bad_bucket_stages_nothing_and_the_next_pull_works(
    relay: MemoryRelay, store: WeightStore, destination: Path
) -> None:
    (bucket,) = relay.vault._committed[JOB, V1].buckets.values()
    bucket.block.data[100] ^= 1
    with pytest.raises(CorruptDelta):
        await pull(relay, JOB, V1, destination)
    assert store.versions(JOB) == ()
    bucket.block.data[100] ^= 1
    await pull(relay, JOB, V1, destination)
    assert holds_target(destination)


async def test_a_bucket_that_lies_with_right_digests_stages_nothing(
    store: WeightStore, destination: Path
) -> None:
    """Its own digest is right, but what is in it is not what the manifest says."""
    relay = MemoryRelay()
    empty = container.tensorfile.encode({}, {"format": "rose-delta", "job": JOB, "version": "1"})
    (bucket,) = ENCODED.manifest.buckets
    lying = msgspec.structs.replace(bucket, size=len(empty), digest=container.digest(empty))
    manifest = msgspec.structs.replace(ENCODED.manifest, buckets=(lying,))
    relay.publish(container.EncodedVersion(manifest, {bucket.name: empty}))
    with pytest.raises(CorruptDelta):
        await pull(relay, JOB, V1, destination)
    assert store.versions(JOB) == ()
    assert not destination.with_name(".v1.partial").exists()


async def test_a_broken_pull_goes_on_with_what_had_arrived(
    destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.weights.shards.BUCKET_BYTES_MAX", 2048)
    monkeypatch.setattr(encoding.plan_buckets, "__kwdefaults__", {"limit_bytes": 2048})
    encoded = encode_version(JOB, V1, None, None, TARGET)
    assert len(encoded.buckets) > PARALLEL + 2
    relay = MemoryRelay()
    relay.publish(encoded)
    fetched = [0]

    def fail_later(call: str) -> None:
        fetched[0] += call == "get_into"
        if fetched[0] == PARALLEL + 2:  # begun when two have arrived
            raise RelayUnavailable("cable pulled")

    relay.before = fail_later
    with pytest.raises(RelayUnavailable):
        await pull(relay, JOB, V1, destination)
    relay.calls.clear()
    relay.before = lambda call: None
    await pull(relay, JOB, V1, destination)
    assert relay.calls.count("get_into") <= len(encoded.buckets) - 2
    assert holds_target(destination)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def test_half_a_bucket_from_a_killed_process_is_fetched_again(
    relay: MemoryRelay, destination: Path
) -> None:
    partial = destination.with_name(".v1.partial")
    partial.mkdir(parents=True)
    (name,) = ENCODED.buckets
    (partial / name).write_bytes(ENCODED.buckets[name][:100])
    (partial / "bucket-00009.safetensors").write_bytes(b"of another version")
    await pull(relay, JOB, V1, destination)
    assert holds_target(destination)
    assert names_in(destination) == [name, "manifest.json"]


async def test_a_damaged_staged_version_is_pulled_again(relay: MemoryRelay, destination: Path) -> None:
    await pull(relay, JOB, V1, destination)
    (name,) = ENCODED.buckets
    (destination / name).write_bytes(b"rot")
    await pull(relay, JOB, V1, destination)
    assert holds_target(destination)


async def test_a_version_left_by_an_earlier_run_is_replaced(relay: MemoryRelay, destination: Path) -> None:
    container.write_version(destination, encode_version(JOB, V1, WeightVersion(0), BASE, stepped(BASE, 99)))
    await pull(relay, JOB, V1, destination)
    assert holds_target(destination)


async def test_a_relay_that_restarts_during_the_pull_is_waited_for(
    relay: MemoryRelay, destination: Path
) -> None:
    def restart(call: str) -> None:
        if call == "get_into" and not relay.restarts:
            relay.restart()
            asyncio.get_running_loop().call_later(0.3, relay.publish, ENCODED)

    relay.before = restart
    await pull(relay, JOB, V1, destination, timeout_s=20)
    assert holds_target(destination)


async def test_a_relay_that_comes_back_empty_is_not_waited_for_for_ever(
    relay: MemoryRelay, destination: Path
) -> None:
    relay.before = lambda call: relay.restart() if call == "get_into" else None
    with pytest.raises(TimedOut):
        await pull(relay, JOB, V1, destination, timeout_s=0.5)


async def test_two_pulls_of_one_version_do_not_mix(relay: MemoryRelay, destination: Path) -> None:
    outcomes = await asyncio.gather(
        pull(relay, JOB, V1, destination), pull(relay, JOB, V1, destination), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes if isinstance(outcome, Exception)] == [NotReady]
    assert holds_target(destination)
    await pull(relay, JOB, V1, destination)


async def test_a_full_disk_leaves_no_version(
    relay: MemoryRelay, store: WeightStore, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.write_durably
    fail = fail_once("write", OSError(errno.ENOSPC, "No space left on device"))

    def write_or_fail(path: Path, data: bytes) -> None:
        if path.suffix == ".safetensors":
            fail("write")
        write(path, data)

    monkeypatch.setattr(files, "write_durably", write_or_fail)
    with pytest.raises(OSError, match="No space"):
        await pull(relay, JOB, V1, destination)
    assert store.versions(JOB) == ()
    await pull(relay, JOB, V1, destination)
    assert holds_target(destination)


async def test_deltas_pulled_in_order_lead_to_the_newest(store: WeightStore) -> None:
    relay = MemoryRelay()
    states = [model()]
    for version in (1, 2, 3):
        states.append(stepped(states[-1], version))
        relay.publish(encode_version(JOB, WeightVersion(version), WeightVersion(version - 1), *states[-2:]))
        await pull(relay, JOB, WeightVersion(version), store.destination(JOB, WeightVersion(version)))
    state = states[0]
    for directory in store.chain(JOB, WeightVersion(0), WeightVersion(3)):
        state = apply_to_state(state, read_patches(directory))
    assert same(state, states[3])
