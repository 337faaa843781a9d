"""Squashed deltas beside the versions: offered where they are fewer bytes, and the same bytes in the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from weight_states import JOB, MemoryRelay, same

from rose.units import WeightVersion
from rose.weights import Publisher, receiver, tensorfile
from rose.weights.bits import Bits, State
from rose.weights.decoding import decode_staged
from rose.weights.hostcopy import HostCopy
from rose.weights.manifest import main_job, squashed_job
from rose.weights.relay import RelayFull
from rose.weights.relay.blocking import BlockingRelay

SQUASHED = squashed_job(JOB)


def flipping(versions: int, same_elements: bool) -> list[State]:
    """States that change the same elements again and again, or others each time."""
    rng = np.random.default_rng(1)
    words = rng.integers(0x3C00, 0x3F80, 1 << 16).astype("<u2")
    states: list[State] = [{"w": Bits("BF16", (1 << 16,), words)}]
    for version in range(versions):
        words = words.copy()
        first = 0 if same_elements else 3000 * version
        words[first : first + 3000] ^= np.uint16(1 << (version % 5))
        states.append({"w": Bits("BF16", (1 << 16,), words)})
    return states


def publish(relay: MemoryRelay, states: list[State], every: int = 4, keep: int = 4) -> Publisher:
    publisher = Publisher(BlockingRelay(relay), JOB, states[0], squash_every=every, keep=keep)
    for version, state in enumerate(states[1:], 1):
        publisher.publish(WeightVersion(version), state)
    return publisher


def shortcuts(relay: MemoryRelay) -> list[tuple[int, int | None]]:
    stat = asyncio.run(relay.stat(SQUASHED))
    return [(each.version, each.base_version) for each in stat.committed]


def test_names_of_jobs() -> None:
    assert main_job(SQUASHED) == JOB == main_job(JOB)


def test_elements_that_change_again_and_again_travel_once(tmp_path: Path) -> None:
    relay, states = MemoryRelay(), flipping(9, same_elements=True)
    publish(relay, states).close()
    assert shortcuts(relay) == [(4, 0), (8, 4)]
    sizes = {each.version: each.bytes for each in asyncio.run(relay.stat(JOB)).committed}
    squashed = {each.version: each.bytes for each in asyncio.run(relay.stat(SQUASHED)).committed}
    assert squashed[WeightVersion(4)] < sum(sizes[WeightVersion(each)] for each in range(1, 5))

    source = tmp_path / "model"
    source.mkdir()
    (source / "model.safetensors").write_bytes(tensorfile.encode(states[0], {}))
    copy = HostCopy.create(tmp_path / "copy", JOB, source)
    for version in (4, 8):
        where = tmp_path / f"v{version}"
        path = asyncio.run(receiver.pull(relay, SQUASHED, WeightVersion(version), where)).path
        copy.advance(decode_staged(path, copy.state))
        assert copy.version == version
        assert same(copy.state, states[version])
    assert copy.rewind() == 4
    assert same(copy.state, states[4])
    copy.close()


def test_none_is_offered_that_saves_nothing() -> None:
    relay = MemoryRelay()
    publish(relay, flipping(8, same_elements=False)).close()
    sizes = {each.version: each.bytes for each in asyncio.run(relay.stat(JOB)).committed}
    for each in asyncio.run(relay.stat(SQUASHED)).committed:
        assert each.bytes < sum(sizes[WeightVersion(v)] for v in range(each.version - 3, each.version + 1))


def test_a_relay_without_room_for_it_keeps_the_version() -> None:
    relay, states = MemoryRelay(), flipping(4, same_elements=True)
    publisher = publish(relay, states[:4])
    puts = 0

    def full_for_the_second(call: str) -> None:
        nonlocal puts
        puts += call == "put_bucket"
        if call == "put_bucket" and puts == 2:  # the first is of the version itself
            raise RelayFull("no room")

    relay.before = full_for_the_second
    report = publisher.publish(WeightVersion(4), states[4])
    assert (report.version, publisher.version) == (4, 4)
    assert shortcuts(relay) == []
    publisher.close()


def test_a_publisher_that_resumes_goes_on_from_where_it_is() -> None:
    relay, states = MemoryRelay(), flipping(8, same_elements=True)
    publish(relay, states[:6]).close()
    resumed = Publisher.resume(BlockingRelay(relay), JOB, states[0], squash_every=4)
    for version in (6, 7, 8):
        resumed.publish(WeightVersion(version), states[version])
    assert shortcuts(relay) == [(4, 0), (8, 5)]
    resumed.close()


def test_a_large_version_has_the_room_that_offers_took() -> None:
    """It is the publisher that has to delete them: a relay evicts nothing that is committed."""
    relay, states = MemoryRelay(), flipping(20, same_elements=True)
    publisher = publish(relay, states, keep=100)
    before = shortcuts(relay)
    stat = asyncio.run(relay.stat(SQUASHED))
    large = np.random.default_rng(2).integers(0, 1 << 16, 1 << 16).astype("<u2")
    relay.vault.capacity_bytes = stat.used_bytes + large.nbytes
    publisher.publish(WeightVersion(21), {"w": Bits("BF16", large.shape, large)})
    left = shortcuts(relay)
    assert left == before[len(before) - len(left) :], "the oldest go first"
    assert len(left) < len(before)
    assert asyncio.run(relay.stat(JOB)).versions == tuple(range(1, 22))
    publisher.close()


def test_one_version_is_no_chain() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        publish(MemoryRelay(), flipping(1, same_elements=True), every=1)
