"""What a relay makes of a Mooncake Store that loses objects: a real one, whose processes are killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import mooncake_world
import numpy as np
import pytest
from mooncake_world import JOB, Master, content, fetch, publish, relay_on, version

from rose.config import RelayConfig
from rose.units import WeightVersion
from rose.weights.publisher import Publisher
from rose.weights.relay import EpochChanged
from rose.weights.relay.blocking import BlockingRelay
from rose.weights.relay.connecting import connect


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    if reason := mooncake_world.why_not():
        pytest.skip(reason)
    with Master(lease="1s", client_ttl_s=2) as master, mooncake_world.one_connection(master, 32 << 20):
        yield master


async def test_a_restarted_master_makes_a_new_epoch_and_the_trainer_publishes_again() -> None:
    """As processes: `rose relay`, and a trainer here."""
    if reason := mooncake_world.why_not():
        pytest.skip(reason)
    state = {"w": np.arange(1000, dtype=np.float32)}
    with Master(client_ttl_s=2) as master:
        process, config = await asyncio.to_thread(relay_process, master)
        try:
            async with connect(config, timeout_s=20) as reader:
                with BlockingRelay(connect(config, timeout_s=20)) as relay:
                    publisher = Publisher(relay, JOB, state)
                    number = WeightVersion(1)
                    await asyncio.to_thread(publisher.publish, number, {"w": state["w"] + 1})
                    committed = await reader.manifest(JOB, number)
                    (bucket,) = committed.manifest.buckets
                    before, after = bytearray(bucket.size), bytearray(bucket.size)
                    await reader.get_into(JOB, number, bucket.name, memoryview(before))
                    await asyncio.to_thread(master.kill)
                    await asyncio.to_thread(master.start)
                    with pytest.raises(EpochChanged):
                        await reader.get_into(
                            JOB, number, bucket.name, memoryview(after), epoch=committed.epoch
                        )
                    assert (await reader.stat(JOB)).versions == ()
                    assert await asyncio.to_thread(publisher.heal) == (1,)
                    await reader.get_into(JOB, number, bucket.name, memoryview(after))
                    assert after == before
        finally:
            process.terminate()
            process.wait(60)


def relay_process(master: Master) -> tuple[subprocess.Popen[str], RelayConfig]:
    process = subprocess.Popen(
        [sys.executable, "-c", RELAY, master.address], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    return process, RelayConfig(kind="mooncake", url=url, mooncake_master=master.address)


RELAY = """
import asyncio, signal, sys
from rose.config import RelayConfig
from rose_daemon.relay.server import serving

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    config = RelayConfig(kind="mooncake", port=0, capacity_bytes=32 << 20, mooncake_master=sys.argv[1])
    async with serving(config) as url:
        print(url, flush=True)
        await stop.wait()

asyncio.run(main())
"""


async def test_a_dead_lender_of_memory_makes_a_new_epoch(master: Master) -> None:
    async with relay_on(master) as config, connect(config, timeout_s=30) as relay:
        lender = mooncake_world.lender(master, 64 << 20)
        try:
            versions = [version(number) for number in range(1, 13)]
            for encoded in versions:  # some lie there, by chance
                await publish(relay, encoded)
            epoch = (await relay.stat(JOB)).epoch
        finally:
            lender.kill()
            lender.wait()
        lost = 0
        for encoded in versions:
            try:
                assert await fetch(relay, encoded, epoch) == content(encoded)
            except EpochChanged:
                lost += 1
        assert lost
        stat = await relay.stat(JOB)
        assert (stat.epoch != epoch, stat.versions) == (True, ())
        for encoded in versions:
            await publish(relay, encoded)
            assert await fetch(relay, encoded) == content(encoded)


async def test_with_two_copies_a_dead_lender_costs_nothing(master: Master) -> None:
    lender = mooncake_world.lender(master, 64 << 20)
    try:
        async with relay_on(master, mooncake_replicas=2) as config, connect(config, timeout_s=30) as relay:
            versions = [version(number) for number in range(1, 9)]
            for encoded in versions:
                await publish(relay, encoded)
            epoch = (await relay.stat(JOB)).epoch
            lender.kill()
            lender.wait()
            for encoded in versions:
                assert await fetch(relay, encoded, epoch) == content(encoded)
            await asyncio.sleep(3)
            assert (await relay.stat(JOB)).epoch == epoch
    finally:
        lender.kill()
        lender.wait()
