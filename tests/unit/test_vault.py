"""The relay's memory: what is charged is given back, whatever the order of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rose_daemon.relay.pools import HeapPool, MemoryBlock
from rose_daemon.relay.vault import Reservation, Vault
from weight_states import JOB, delta

from rose.errors import VersionConflict
from rose.units import WeightVersion
from rose.weights.digests import digest
from rose.weights.relay import RelayFull, VersionGone

ENCODED = delta()[2]
(BUCKET,) = ENCODED.manifest.buckets
KEY = (JOB, WeightVersion(1))
STEPS = ["reserve", "store", "cancel", "abort", "expire", "commit", "delete"]


def vault_of(capacity_bytes: int, stage_ttl_s: float = 60) -> Vault[MemoryBlock]:
    return Vault(capacity_bytes, stage_ttl_s, "e", HeapPool().allocate)


def used(vault: Vault[MemoryBlock]) -> int:
    """Bytes in use, once all memory that can be taken back was."""
    for block in vault.doomed():
        vault.freed(block)
    return vault.used_bytes


def reserve(vault: Vault[MemoryBlock], data: bytes, now_s: float = 0) -> Reservation[MemoryBlock]:
    reservation = vault.reserve(KEY, BUCKET.name, len(data), digest(data), now_s)
    assert reservation is not None
    reservation.block.data[:] = data
    return reservation


def test_a_bucket_on_its_way_is_charged_and_given_back() -> None:
    vault = vault_of(1 << 20)
    reservation = reserve(vault, b"x" * 5000)
    assert vault.used_bytes >= 5000
    vault.cancel(reservation, 1)
    assert used(vault) == 0
    assert vault.stat(JOB).staged == ()


def test_an_abort_while_a_bucket_is_on_its_way_wins() -> None:
    vault = vault_of(1 << 20)
    vault.store(reserve(vault, b"y"), 0)
    reservation = vault.reserve(KEY, "bucket-00001.safetensors", 1, digest(b"z"), 0)
    assert reservation is not None
    vault.abort(KEY)
    with pytest.raises(VersionGone):
        vault.store(reservation, 0)
    assert used(vault) == 0


def test_a_version_being_written_does_not_expire() -> None:
    vault = vault_of(1 << 20)
    reservation = reserve(vault, b"x")
    vault.expire(1000)
    vault.store(reservation, 1000)
    assert vault.stat(JOB).staged == (1,)
    vault.expire(1061)
    assert (vault.stat(JOB).staged, used(vault)) == ((), 0)


def test_room_of_expired_versions_is_used_before_the_relay_is_full() -> None:
    vault = vault_of(16 << 10)
    vault.store(reserve(vault, b"x" * 8000), 0)
    other = (JOB, WeightVersion(2))
    with pytest.raises(RelayFull):
        vault.reserve(other, BUCKET.name, 8000, "0" * 32, 30)
    vault.expire(61)
    assert used(vault) == 0
    assert vault.reserve(other, BUCKET.name, 8000, "0" * 32, 61) is not None


def test_a_late_writer_of_a_committed_bucket() -> None:
    vault = vault_of(1 << 20)
    data = ENCODED.buckets[BUCKET.name]
    first, same, other = reserve(vault, data), reserve(vault, data), reserve(vault, b"other")
    vault.store(first, 0)
    assert vault.commit(KEY, ENCODED.manifest, 0) == ()
    used_bytes = vault.used_bytes
    vault.store(same, 0)
    with pytest.raises(VersionConflict):
        vault.store(other, 0)
    assert used(vault) < used_bytes
    with vault.reading(KEY, BUCKET.name) as held:
        assert held.data == data


def test_a_deleted_version_stays_charged_until_its_readers_are_done() -> None:
    vault = vault_of(1 << 20)
    vault.store(reserve(vault, ENCODED.buckets[BUCKET.name]), 0)
    vault.commit(KEY, ENCODED.manifest, 0)
    with vault.reading(KEY, BUCKET.name) as first, vault.reading(KEY, BUCKET.name) as second:
        assert vault.delete(KEY)
        assert used(vault) > 0
        assert first is second
        assert first.data == ENCODED.buckets[BUCKET.name]
    assert used(vault) == 0


def test_without_room_for_the_manifest_nothing_is_committed() -> None:
    data = ENCODED.buckets[BUCKET.name]
    vault = vault_of(len(data) + 2 * 4096)
    vault.store(reserve(vault, data), 0)
    with pytest.raises(RelayFull):
        vault.commit(KEY, ENCODED.manifest, 0)
    assert vault.newest(JOB, WeightVersion(0)) is None
    vault.abort(KEY)
    assert used(vault) == 0


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "store", "cancel", "abort", "expire", "commit", "delete"]),
            st.integers(0, 3),
        ),
        max_size=40,
    )
)
def test_room_is_never_lost_nor_given_out_twice(steps: list[tuple[str, int]]) -> None:
    vault = vault_of(64 << 10, 10)
    data = [ENCODED.buckets[BUCKET.name], b"other", b"x" * 9000, b"y" * 20000]
    open_ones: list[Reservation[MemoryBlock]] = []
    now_s = 0.0
    for step, choice in steps:
        now_s += 3
        try:
            match step:
                case "reserve":
                    open_ones.append(reserve(vault, data[choice], now_s))
                case "store" if open_ones:
                    vault.store(open_ones.pop(choice % len(open_ones)), now_s)
                case "cancel" if open_ones:
                    vault.cancel(open_ones.pop(choice % len(open_ones)), now_s)
                case "abort":
                    vault.abort(KEY)
                case "expire":
                    vault.expire(now_s)
                case "commit":
                    vault.commit(KEY, ENCODED.manifest, 0)
                case "delete":
                    vault.delete(KEY)
        except (RelayFull, VersionConflict, VersionGone, AssertionError):
            pass
        assert 0 <= used(vault) <= vault.capacity_bytes
    for reservation in open_ones:
        vault.cancel(reservation, now_s)
    vault.abort(KEY)
    vault.delete(KEY)
    assert used(vault) == 0
    assert vault.stat(JOB).staged == ()
