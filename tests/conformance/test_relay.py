"""What every relay does, whatever it is made of.

To add an implementation, write a `RelayUnderTest` for it and name it in `under_test`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Protocol

import mooncake_world
import msgspec
import numpy as np
import pytest
from rose_daemon.relay.server import serving

from rose.config import RelayConfig
from rose.errors import CorruptDelta, VersionConflict
from rose.units import JobId, WeightVersion
from rose.weights.bits import Bits
from rose.weights.container import EncodedVersion
from rose.weights.digests import digest
from rose.weights.encoding import encode_version
from rose.weights.manifest import Bucket
from rose.weights.relay import EpochChanged, Relay, RelayFull, RelayUnavailable, VersionGone
from rose.weights.relay.connecting import connect
from rose.weights.relay.local import RelayClient

JOB = JobId("conformance")
V0, V1, V2 = WeightVersion(0), WeightVersion(1), WeightVersion(2)
CAPACITY_BYTES = 4 << 20


class RelayUnderTest(Protocol):
    """A relay of CAPACITY_BYTES that can be stopped and started again, empty."""

    async def start(self, stage_ttl_s: float = 600) -> None:
        """Start it, where it was before."""

    async def stop(self) -> None:
        """Stop it; what it held is lost."""

    def client(self, timeout_s: float = 10) -> Relay:
        """A new client, which the caller closes."""


class LocalRelay:
    """The embedded relay on loopback: over HTTP, or read from its memory."""

    def __init__(self, *, shared_memory: bool) -> None:
        self._shared_memory = shared_memory
        self._port = 0
        self._stack = AsyncExitStack()

    async def start(self, stage_ttl_s: float = 600) -> None:
        config = RelayConfig(port=self._port, capacity_bytes=CAPACITY_BYTES, stage_ttl_s=stage_ttl_s)
        url = await self._stack.enter_async_context(serving(config))
        self._port = int(url.rpartition(":")[2])

    async def stop(self) -> None:
        await self._stack.aclose()

    def client(self, timeout_s: float = 10) -> RelayClient:
        return RelayClient(
            f"http://127.0.0.1:{self._port}", timeout_s=timeout_s, shared_memory=self._shared_memory
        )


class StoreRelay:
    """A relay of kind mooncake, on a store that all tests of this file share."""

    def __init__(self, master: str) -> None:
        self._config = RelayConfig(
            kind="mooncake",
            port=0,
            capacity_bytes=CAPACITY_BYTES,
            mooncake_master=master,
            mooncake_lease_s=0.5,
            mooncake_namespace=mooncake_world.namespace(),
        )
        self._stack = AsyncExitStack()

    async def start(self, stage_ttl_s: float = 600) -> None:
        config = msgspec.structs.replace(self._config, stage_ttl_s=stage_ttl_s)
        url = await self._stack.enter_async_context(serving(config))
        self._config = msgspec.structs.replace(self._config, url=url, port=int(url.rpartition(":")[2]))

    async def stop(self) -> None:
        await self._stack.aclose()

    def client(self, timeout_s: float = 10) -> Relay:
        return connect(self._config, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def mooncake_master() -> Iterator[str]:
    """The address of a master."""
    if reason := mooncake_world.why_not():
        pytest.skip(reason)
    with mooncake_world.Master() as master, mooncake_world.one_connection(master, 256 << 20):
        yield master.address


@pytest.fixture(params=["http", "shared-memory", "mooncake"])
async def under_test(request: pytest.FixtureRequest) -> AsyncIterator[RelayUnderTest]:
    made: RelayUnderTest
    match request.param:
        case "http":
            made = LocalRelay(shared_memory=False)
        case "shared-memory":
            made = LocalRelay(shared_memory=True)
        case _:
            made = StoreRelay(request.getfixturevalue("mooncake_master"))
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def relay(under_test: RelayUnderTest) -> AsyncIterator[Relay]:
    client = under_test.client()
    yield client
    await client.aclose()


def version(number: int, elements: int = 50_000) -> EncodedVersion:
    """An anchor of 2 bytes an element: one bucket of its own bytes."""
    words = np.random.default_rng(number).integers(0, 1 << 16, elements, dtype=np.uint16)
    return encode_version(JOB, WeightVersion(number), None, None, {"w": Bits("BF16", (elements,), words)})


def only_bucket(encoded: EncodedVersion) -> tuple[Bucket, bytes]:
    (bucket,) = encoded.manifest.buckets
    return bucket, encoded.buckets[bucket.name]


async def stage(relay: Relay, encoded: EncodedVersion) -> None:
    for bucket in encoded.manifest.buckets:
        data = encoded.buckets[bucket.name]
        await relay.put_bucket(JOB, encoded.manifest.version, bucket.name, data, bucket.digest)


async def publish(relay: Relay, encoded: EncodedVersion) -> None:
    await stage(relay, encoded)
    assert await relay.commit(JOB, encoded.manifest.version, encoded.manifest) == ()


async def fetch(relay: Relay, encoded: EncodedVersion) -> bytes:
    bucket, _ = only_bucket(encoded)
    destination = bytearray(bucket.size)
    await relay.get_into(JOB, encoded.manifest.version, bucket.name, memoryview(destination))
    return bytes(destination)


async def until_used(relay: Relay, used_bytes: int) -> None:
    """Wait until no more than that is in use: memory that somebody may still read is freed later."""
    for _ in range(200):
        if (await relay.stat(JOB)).used_bytes <= used_bytes:
            return
        await asyncio.sleep(0.05)
    pytest.fail("memory is not freed")


# ---- what is published is what arrives ----


async def test_a_committed_version_is_read_as_it_was_written(relay: Relay) -> None:
    encoded = version(1)
    await publish(relay, encoded)
    assert (await relay.manifest(JOB, V1)).manifest == encoded.manifest
    assert await fetch(relay, encoded) == only_bucket(encoded)[1]
    stat = await relay.stat(JOB)
    assert stat.versions == (1,)
    assert stat.committed[0].bytes == encoded.manifest.delta_bytes
    assert stat.staged == ()
    assert stat.capacity_bytes == CAPACITY_BYTES


async def test_any_range_of_a_bucket_can_be_read(relay: Relay) -> None:
    encoded = version(1)
    await publish(relay, encoded)
    bucket, data = only_bucket(encoded)
    for offset, length in ((0, 1), (7, 1000), (bucket.size - 3, 3), (bucket.size, 0)):
        destination = bytearray(length)
        await relay.get_into(JOB, V1, bucket.name, memoryview(destination), offset=offset)
        assert destination == data[offset : offset + length]


async def test_a_range_beyond_the_bucket_is_an_error(relay: Relay) -> None:
    encoded = version(1)
    await publish(relay, encoded)
    bucket, _ = only_bucket(encoded)
    for offset in (bucket.size - 5, bucket.size, bucket.size + 1000):
        with pytest.raises(CorruptDelta):
            await relay.get_into(JOB, V1, bucket.name, memoryview(bytearray(10)), offset=offset)


async def test_a_version_without_buckets_can_be_committed(relay: Relay) -> None:
    state = {"w": Bits("BF16", (4,), np.zeros(4, np.uint16))}
    encoded = encode_version(JOB, V1, V0, state, state)
    assert await relay.commit(JOB, V1, encoded.manifest) == ()
    assert (await relay.stat(JOB)).committed[0].base_version == 0


async def test_jobs_do_not_see_each_other(relay: Relay) -> None:
    await publish(relay, version(1))
    other = JobId("other")
    assert (await relay.stat(other)).versions == ()
    assert await relay.latest(other, V0, 0) is None
    with pytest.raises(VersionGone):
        await relay.manifest(other, V1)


# ---- uncommitted is invisible ----


async def test_nothing_is_visible_before_the_commit(relay: Relay) -> None:
    encoded = version(1)
    await stage(relay, encoded)
    assert (await relay.stat(JOB)).versions == ()
    assert (await relay.stat(JOB)).staged == (1,)
    assert await relay.latest(JOB, V0, 0) is None
    with pytest.raises(VersionGone):
        await relay.manifest(JOB, V1)
    with pytest.raises(VersionGone):
        await fetch(relay, encoded)


async def test_a_commit_names_the_missing_buckets_and_changes_nothing(relay: Relay) -> None:
    encoded = version(1)
    bucket, _ = only_bucket(encoded)
    assert await relay.commit(JOB, V1, encoded.manifest) == (bucket.name,)
    other = b"other bytes under this name"
    await relay.put_bucket(JOB, V1, bucket.name, other, digest(other))
    assert await relay.commit(JOB, V1, encoded.manifest) == (bucket.name,)
    assert (await relay.stat(JOB)).versions == ()


async def test_an_aborted_version_is_gone_and_can_be_staged_anew(relay: Relay) -> None:
    other = b"other bytes under this name"
    encoded = version(1)
    bucket, _ = only_bucket(encoded)
    await relay.put_bucket(JOB, V1, bucket.name, other, digest(other))
    before = (await relay.stat(JOB)).used_bytes
    await relay.abort(JOB, V1)
    assert (await relay.stat(JOB)).used_bytes < before
    await relay.abort(JOB, V1)
    await publish(relay, encoded)
    assert await fetch(relay, encoded) == only_bucket(encoded)[1]


async def test_staged_versions_expire(under_test: RelayUnderTest) -> None:
    await under_test.stop()
    await under_test.start(stage_ttl_s=0.2)
    async with under_test.client() as relay:
        await publish(relay, version(2))
        await stage(relay, version(1))
        await asyncio.sleep(0.4)
        stat = await relay.stat(JOB)
        assert (stat.staged, stat.versions) == ((), (2,))


# ---- committed is immutable and stays ----


async def test_every_call_can_be_repeated(relay: Relay) -> None:
    encoded = version(1)
    for _ in range(2):
        await publish(relay, encoded)
    await relay.abort(JOB, V1)
    assert await fetch(relay, encoded) == only_bucket(encoded)[1]


async def test_a_bucket_does_not_change_under_its_name(relay: Relay) -> None:
    encoded = version(1)
    bucket, data = only_bucket(encoded)
    other = bytes(data[:-1]) + b"x"
    await stage(relay, encoded)
    with pytest.raises(VersionConflict):
        await relay.put_bucket(JOB, V1, bucket.name, other, digest(other))
    assert await relay.commit(JOB, V1, encoded.manifest) == ()
    with pytest.raises(VersionConflict):
        await relay.put_bucket(JOB, V1, bucket.name, other, digest(other))
    with pytest.raises(VersionConflict):
        await relay.put_bucket(JOB, V1, "bucket-00007.safetensors", other, digest(other))
    assert await fetch(relay, encoded) == data


async def test_a_committed_manifest_does_not_change(relay: Relay) -> None:
    encoded = version(1)
    await publish(relay, encoded)
    (parameter,) = encoded.manifest.parameters
    altered = msgspec.structs.replace(parameter, target_digest="0" * 32)
    with pytest.raises(VersionConflict):
        await relay.commit(JOB, V1, msgspec.structs.replace(encoded.manifest, parameters=(altered,)))
    assert (await relay.manifest(JOB, V1)).manifest == encoded.manifest


async def test_a_full_relay_refuses_and_evicts_nothing(relay: Relay) -> None:
    kept = version(1)
    await publish(relay, kept)
    number = 2
    full = None
    while full is None and number < 100:
        try:
            await publish(relay, version(number, 500_000))
            number += 1
        except RelayFull as error:
            full = error
    assert full is not None
    assert (await relay.stat(JOB)).versions == tuple(range(1, number))
    assert await fetch(relay, kept) == only_bucket(kept)[1]
    await relay.abort(JOB, WeightVersion(number))
    used_bytes = (await relay.stat(JOB)).used_bytes
    assert await relay.delete(JOB, V2)
    await until_used(relay, used_bytes - 1_000_000)
    await publish(relay, version(number, 500_000))


async def test_damage_on_the_way_is_refused_and_not_kept(relay: Relay) -> None:
    encoded = version(1)
    bucket, data = only_bucket(encoded)
    with pytest.raises(CorruptDelta):
        await relay.put_bucket(JOB, V1, bucket.name, data[:-1] + b"x", bucket.digest)
    assert await relay.commit(JOB, V1, encoded.manifest) == (bucket.name,)
    await publish(relay, encoded)


async def test_deleted_versions_are_gone_and_their_room_is_free(relay: Relay) -> None:
    before = (await relay.stat(JOB)).used_bytes
    encoded = version(1)
    await publish(relay, encoded)
    assert await relay.delete(JOB, V1)
    assert not await relay.delete(JOB, V1)
    with pytest.raises(VersionGone):
        await fetch(relay, encoded)
    await until_used(relay, before)


# ---- several at once ----


async def test_two_writers_of_the_same_bytes_both_succeed(relay: Relay) -> None:
    encoded = version(1, 500_000)
    await asyncio.gather(*(publish(relay, encoded) for _ in range(3)))
    assert await fetch(relay, encoded) == only_bucket(encoded)[1]


async def test_of_two_writers_of_other_bytes_one_wins_whole(under_test: RelayUnderTest) -> None:
    left, right = version(1, 300_000), version(2, 300_000)
    name = left.manifest.buckets[0].name
    rivals = [only_bucket(left), only_bucket(right)]
    async with under_test.client() as first, under_test.client() as second:
        outcomes = await asyncio.gather(
            *(
                relay.put_bucket(JOB, V1, name, data, bucket.digest)
                for relay, (bucket, data) in zip((first, second), rivals, strict=True)
            ),
            return_exceptions=True,
        )
        refused = [outcome for outcome in outcomes if outcome is not None]
        assert [type(outcome) for outcome in refused] == [VersionConflict]
        missing = await first.commit(JOB, V1, left.manifest)
        assert missing == (() if outcomes[0] is None else (name,))


async def test_many_readers_get_the_same_bytes_while_the_version_is_deleted(
    under_test: RelayUnderTest,
) -> None:
    encoded = version(1, 900_000)
    async with under_test.client() as relay:
        await publish(relay, encoded)
        readers = [asyncio.create_task(fetch(relay, encoded)) for _ in range(8)]
        await asyncio.sleep(0.005)
        await relay.delete(JOB, V1)
        for outcome in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(outcome, VersionGone) or outcome == only_bucket(encoded)[1]
        await until_used(relay, 0)


# ---- long-poll ----


async def test_a_waiting_reader_wakes_at_the_commit(under_test: RelayUnderTest) -> None:
    async with under_test.client() as reader, under_test.client() as writer:
        await publish(writer, version(1))
        waiting = asyncio.create_task(reader.latest(JOB, V1, 10))
        await stage(writer, version(3))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await publish(writer, version(3))
        async with asyncio.timeout(5):
            assert await waiting == 3


async def test_latest_answers_the_newest_at_once(relay: Relay) -> None:
    for number in (1, 3, 2):
        await publish(relay, version(number))
    async with asyncio.timeout(5):
        assert await relay.latest(JOB, V0, 30) == 3
        assert await relay.latest(JOB, V2, 30) == 3


async def test_latest_waits_no_longer_than_asked(relay: Relay) -> None:
    async with asyncio.timeout(5):
        assert await relay.latest(JOB, V0, 0.2) is None
        assert await relay.latest(JOB, V0, 0) is None


# ---- restarts ----


async def test_a_restarted_relay_is_empty_and_says_so(under_test: RelayUnderTest) -> None:
    encoded = version(1)
    bucket, data = only_bucket(encoded)
    async with under_test.client() as relay:
        await publish(relay, encoded)
        epoch = (await relay.manifest(JOB, V1)).epoch
        assert (await relay.stat(JOB)).epoch == epoch
        await under_test.stop()
        await under_test.start()
        stat = await relay.stat(JOB)
        assert (stat.epoch != epoch, stat.versions) == (True, ())
        destination = memoryview(bytearray(bucket.size))
        with pytest.raises(EpochChanged):
            await relay.get_into(JOB, V1, bucket.name, destination, epoch=epoch)
        await publish(relay, encoded)
        with pytest.raises(EpochChanged):
            await relay.get_into(JOB, V1, bucket.name, destination, epoch=epoch)
        await relay.get_into(JOB, V1, bucket.name, destination, epoch=stat.epoch)
        assert bytes(destination) == data


async def test_a_relay_that_is_away_is_waited_for(under_test: RelayUnderTest) -> None:
    async with under_test.client(timeout_s=20) as relay:
        await relay.stat(JOB)
        await under_test.stop()
        publishing = asyncio.create_task(publish(relay, version(1)))
        await asyncio.sleep(0.3)
        await under_test.start()
        await publishing
        assert (await relay.stat(JOB)).versions == (1,)


async def test_a_relay_that_stays_away_ends_every_call(under_test: RelayUnderTest) -> None:
    encoded = version(1)
    bucket, data = only_bucket(encoded)
    await under_test.stop()
    async with under_test.client(timeout_s=0.3) as relay, asyncio.timeout(20):
        for call in (
            relay.stat(JOB),
            relay.latest(JOB, V0, 0.1),
            relay.manifest(JOB, V1),
            relay.put_bucket(JOB, V1, bucket.name, data, bucket.digest),
            relay.commit(JOB, V1, encoded.manifest),
            relay.get_into(JOB, V1, bucket.name, memoryview(bytearray(8))),
            relay.abort(JOB, V1),
            relay.delete(JOB, V1),
        ):
            with pytest.raises(RelayUnavailable):
                await call
