"""What goes wrong with a Mooncake Store, and what the relay makes of it: on a real `mooncake_master`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import mooncake_world
import msgspec
import numpy as np
import pytest
from mooncake_world import JOB, Master, content, fetch, publish, relay_on, version
from rose_daemon.relay import mooncake as served
from rose_daemon.relay.server import serving

from rose.config import RelayConfig
from rose.units import WeightVersion
from rose.weights.publisher import Publisher
from rose.weights.relay import Relay, RelayFull, RelayUnavailable, VersionGone
from rose.weights.relay.blocking import BlockingRelay
from rose.weights.relay.connecting import connect
from rose.weights.relay.http import BadRequest
from rose.weights.relay.local import RelayClient
from rose.weights.relay.mooncake_store import MooncakeStore, ObjectLost

LENT_BYTES = 32 << 20


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    if reason := mooncake_world.why_not():
        pytest.skip(reason)
    with Master(lease="1s", client_ttl_s=2) as master, mooncake_world.one_connection(master, LENT_BYTES):
        yield master


async def published_until_full(relay: Relay) -> AsyncIterator[int]:
    for number in range(1, 65):
        try:
            await publish(relay, version(number))
        except RelayFull:
            return
        yield number
    pytest.fail("it is never full")


# ---- objects stay, and keys are new ----


async def test_a_full_store_refuses_and_evicts_nothing(master: Master) -> None:
    """Here the store is smaller than the relay was told; Mooncake would evict at 90% what is not pinned."""
    async with relay_on(master) as config, connect(config) as relay:
        kept = [number async for number in published_until_full(relay)]
        assert len(kept) >= 0.8 * (LENT_BYTES >> 20)
        await asyncio.sleep(1.5)  # evictions happen behind
        for number in kept:
            assert await fetch(relay, version(number)) == content(version(number))
        assert (await relay.stat(JOB)).versions == tuple(kept)


async def test_other_bytes_after_an_abort_are_what_readers_get(master: Master) -> None:
    """A put to an existing key would keep the bytes of the aborted attempt."""
    aborted, wanted = version(1), version(2)
    async with relay_on(master) as config, connect(config) as relay:
        (bucket,) = aborted.manifest.buckets
        number = WeightVersion(2)
        await relay.put_bucket(JOB, number, bucket.name, content(aborted), bucket.digest)
        await relay.abort(JOB, number)
        await publish(relay, wanted)
        assert await fetch(relay, wanted) == content(wanted)


# ---- what the store says is looked at ----


async def test_a_put_that_came_to_nothing_is_made_again_under_another_key(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a writer that died in the middle of one."""
    put, tried = MooncakeStore.put, []

    def first_one_fails(self: MooncakeStore, key: str, data: memoryview) -> None:
        if "bucket" in key:
            tried.append(key)
            if len(tried) == 1:
                raise ObjectLost(key)
        put(self, key, data)

    monkeypatch.setattr(MooncakeStore, "put", first_one_fails)
    async with relay_on(master) as config, connect(config) as relay:
        await publish(relay, version(1))
        assert len(set(tried)) == 2
        assert await fetch(relay, version(1)) == content(version(1))


async def test_a_bucket_that_is_not_in_the_store_is_not_taken_for_staged(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MooncakeStore, "put", lambda _self, _key, _data: None)
    encoded = version(1)
    (bucket,) = encoded.manifest.buckets
    async with mooncake_served(master, monkeypatch) as config, connect(config, timeout_s=1) as relay:
        with pytest.raises(RelayUnavailable, match="0 bytes of"):
            await relay.put_bucket(JOB, WeightVersion(1), bucket.name, content(encoded), bucket.digest)
        stat = await relay.stat(JOB)
        assert (stat.staged, stat.used_bytes) == ((), 0)


@asynccontextmanager
async def mooncake_served(master: Master, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RelayConfig]:
    """A relay that does not look at its store by itself."""
    monkeypatch.setattr(served, "_WATCH_PERIOD_S", 3600)
    async with relay_on(master) as config:
        yield config


async def test_a_writer_that_vanishes_holds_its_room_for_a_while_only(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(_self: MooncakeStore, key: str, _data: memoryview) -> None:
        if "bucket" in key:
            raise KeyboardInterrupt

    encoded = version(1)
    async with relay_on(master) as config, connect(config) as relay:
        with monkeypatch.context() as patch:
            patch.setattr(MooncakeStore, "put", vanish)
            with pytest.raises(KeyboardInterrupt):
                await publish(relay, encoded)
        assert (await relay.stat(JOB)).used_bytes > 0
        await publish(relay, encoded)
        monkeypatch.setattr(served, "TRANSFER_MAX_S", 0)
        used_bytes = (await relay.stat(JOB)).used_bytes
        assert used_bytes < 1.5 * len(content(encoded))


# ---- removal ----


async def test_what_a_reader_may_still_read_is_not_removed(master: Master) -> None:
    encoded = version(1)
    async with relay_on(master) as config, connect(config) as relay:
        await publish(relay, encoded)
        await fetch(relay, encoded)
        assert await relay.delete(JOB, WeightVersion(1))
        with pytest.raises(VersionGone):
            await fetch(relay, encoded)
        assert (await relay.stat(JOB)).used_bytes > 0
        for _ in range(100):
            if not (await relay.stat(JOB)).used_bytes:
                return
            await asyncio.sleep(0.1)
        pytest.fail("memory is not freed")


async def test_a_publisher_waits_for_room_before_it_deletes_more(master: Master) -> None:
    """Deleted versions under a lease take their time; versions must not go one after the other meanwhile."""
    rng = np.random.default_rng(1)
    states = [{"w": rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32)} for _ in range(6)]
    async with relay_on(master, capacity_bytes=18 << 20) as config:
        async with connect(config) as reader:
            with BlockingRelay(connect(config)) as relay:
                publisher = Publisher(relay, JOB, states[0], keep=1)
                for number in range(1, 5):
                    await asyncio.to_thread(publisher.publish, WeightVersion(number), states[number])
                for number in (await reader.stat(JOB)).versions:
                    manifest = (await reader.manifest(JOB, number)).manifest
                    for bucket in manifest.buckets:
                        destination = memoryview(bytearray(bucket.size))
                        await reader.get_into(JOB, number, bucket.name, destination)
                before = (await reader.stat(JOB)).versions
                await asyncio.to_thread(publisher.publish, WeightVersion(5), states[5])
                after = (await reader.stat(JOB)).versions
        assert after == (*before[1:], 5)


async def test_leftovers_of_a_relay_that_was_killed_are_removed(master: Master) -> None:
    """Its objects are pinned, so nothing else would ever remove them."""
    async with relay_on(master) as config, connect(config) as relay:
        store = MooncakeStore.connect(config)
        leftover = f"{config.mooncake_namespace}/job-1/e0/1/0/bucket-00000.safetensors"
        stranger = f"{config.mooncake_namespace}x/job-1/e0/1/0/bucket-00000.safetensors"
        for key in (leftover, stranger):
            store.put(key, memoryview(b"old"))
        await publish(relay, version(1))
        async with serving(config):
            assert store.missing([leftover, stranger]) == [leftover]
        store.remove(stranger, force=True)


# ---- the other kind ----


async def test_either_kind_of_client_is_told_of_the_other(master: Master) -> None:
    encoded = version(1, 1000)
    async with relay_on(master) as config, RelayClient(config.url, timeout_s=5) as embedded:
        with pytest.raises(BadRequest, match='kind = "mooncake"'):
            await publish(embedded, encoded)
    async with (
        serving(RelayConfig(port=0)) as url,
        connect(msgspec.structs.replace(config, url=url), timeout_s=5) as relay,
    ):
        with pytest.raises(BadRequest, match='kind = "embedded"'):
            await publish(relay, encoded)
