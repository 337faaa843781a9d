"""The publisher: what it says is published is, and a failed or repeated publish does no harm."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from weight_states import JOB, MemoryRelay, fail_once, model, same, stepped, tensor

from rose.errors import CorruptDelta, VersionConflict, WrongBase
from rose.units import WeightVersion
from rose.weights import Publisher, container, encoding, patches
from rose.weights.bits import Bits, State, UnsupportedTensor
from rose.weights.container import EncodedVersion
from rose.weights.digests import digest_state
from rose.weights.relay import RelayFull, RelayUnavailable
from rose.weights.relay.blocking import BlockingRelay

V1, V2, V3 = WeightVersion(1), WeightVersion(2), WeightVersion(3)
BASE = model()
FIRST = stepped(BASE, 1)
SECOND = stepped(FIRST, 2)


@pytest.fixture
def relay() -> MemoryRelay:
    return MemoryRelay()


@pytest.fixture
def publisher(relay: MemoryRelay) -> Iterator[Publisher]:
    with Publisher(BlockingRelay(relay), JOB, BASE) as opened:
        yield opened


def held_by(relay: MemoryRelay, base: State, *versions: int) -> State:
    """What a receiver gets that applies these versions in order, checking each."""
    state = base
    for version in versions:
        key = (JOB, WeightVersion(version))
        manifest = container.manifests.decode(relay.vault.manifest(key))
        buckets = {}
        for bucket in manifest.buckets:
            with relay.vault.reading(key, bucket.name) as block:
                buckets[bucket.name] = bytes(block.data)
        patches.check_base(manifest, digest_state(state))
        state = patches.apply_to_state(state, container.decode_patches(manifest, buckets, state))
        patches.check_target(manifest, digest_state(state))
    return state


def test_receivers_get_the_trainers_bits(relay: MemoryRelay, publisher: Publisher) -> None:
    first, second = publisher.publish(V1, FIRST), publisher.publish(V2, SECOND)
    assert same(held_by(relay, BASE, 1, 2), SECOND)
    assert (first.base_version, second.base_version) == (0, 1)
    assert publisher.version == 2
    assert publisher.digests == digest_state(SECOND)


def test_the_report_counts_what_changed(publisher: Publisher) -> None:
    report = publisher.publish(V1, FIRST)
    changed = sum(int(np.count_nonzero(BASE[name].words != FIRST[name].words)) for name in BASE)
    assert report.changed == changed > 0
    assert report.dense_bytes == sum(bits.nbytes for bits in BASE.values())
    assert 0 < report.delta_bytes < report.dense_bytes
    assert report.density == changed / report.elements
    assert not report.repeated


def test_the_trainer_may_go_on_changing_its_tensors(relay: MemoryRelay, publisher: Publisher) -> None:
    """Neither the base nor a published state may share memory with what the optimiser writes to."""
    live = {name: bits.copy() for name, bits in BASE.items()}
    for version, seed in ((V1, 1), (V2, 2)):
        for name, bits in stepped(live, seed).items():
            live[name].words[:] = bits.words
        publisher.publish(version, live)
    assert same(held_by(relay, BASE, 1, 2), live)


def test_torch_tensors_are_published_as_they_are(relay: MemoryRelay) -> None:
    torch = pytest.importorskip("torch")
    weights = {"w": torch.arange(64, dtype=torch.float32).bfloat16()}
    with Publisher(BlockingRelay(relay), JOB, weights) as publisher:
        weights["w"][3] = -1.0
        assert publisher.publish(V1, weights).changed == 1
        weights["w"][3] = 3.0
        assert publisher.publish(V2, weights).changed == 1


def test_a_step_that_changes_nothing_is_a_version_too(relay: MemoryRelay, publisher: Publisher) -> None:
    report = publisher.publish(V1, BASE)
    assert (report.changed, report.buckets, report.delta_bytes) == (0, 0, 0)
    assert relay.vault.newest(JOB, WeightVersion(0)) == 1


# ---- repeats and conflicts ----


def test_publishing_the_same_again_is_fine(relay: MemoryRelay, publisher: Publisher) -> None:
    publisher.publish(V1, FIRST)
    again = publisher.publish(V1, FIRST)
    assert again.repeated
    assert same(held_by(relay, BASE, 1), FIRST)


def test_other_weights_under_a_published_version_are_refused(
    relay: MemoryRelay, publisher: Publisher
) -> None:
    publisher.publish(V1, FIRST)
    with pytest.raises(VersionConflict, match="other weights"):
        publisher.publish(V1, stepped(BASE, 9))
    assert same(held_by(relay, BASE, 1), FIRST)


@pytest.mark.parametrize("version", [-1, 0])
def test_versions_only_grow(publisher: Publisher, version: int) -> None:
    with pytest.raises(VersionConflict):
        publisher.publish(WeightVersion(version), BASE)


def test_a_version_committed_by_somebody_else_is_refused(relay: MemoryRelay, publisher: Publisher) -> None:
    relay.publish(encoding.encode_coded(JOB, V1, WeightVersion(0), BASE, stepped(BASE, 7)))
    with pytest.raises(VersionConflict):
        publisher.publish(V1, FIRST)
    assert publisher.version == 0


def test_leftovers_of_an_attempt_with_other_bytes_are_replaced(
    relay: MemoryRelay, publisher: Publisher
) -> None:
    relay.before = fail_once("commit")
    with pytest.raises(RelayUnavailable):
        publisher.publish(V1, stepped(BASE, 7))
    relay.before = _fail_second_commit()
    with pytest.raises(RelayUnavailable):
        publisher.publish(V1, stepped(BASE, 8))
    publisher.publish(V1, FIRST)
    assert same(held_by(relay, BASE, 1), FIRST)


def _fail_second_commit() -> Callable[[str], None]:
    """The first commit asks what is missing; the second one fails, with the buckets staged."""
    commits = [0]

    def hook(call: str) -> None:
        commits[0] += call == "commit"
        if call == "commit" and commits[0] == 2:
            raise RelayUnavailable("cable pulled")

    return hook


def test_another_model_is_refused(publisher: Publisher) -> None:
    with pytest.raises(WrongBase):
        publisher.publish(V1, {**FIRST, "scale": tensor("F32", (), 0)})
    with pytest.raises(UnsupportedTensor):
        publisher.publish(V1, {**FIRST, "scale": "3.0"})
    publisher.publish(V1, FIRST)


# ---- faults ----


@pytest.mark.parametrize(
    ("moment", "call"),
    [
        ("before", "stat"),
        ("before", "put_bucket"),
        ("after", "put_bucket"),
        ("before", "commit"),
        ("after", "commit"),
    ],
)
def test_a_failed_publish_can_be_repeated(
    relay: MemoryRelay, publisher: Publisher, moment: str, call: str
) -> None:
    """The base advances only with a committed version, so the retry is the same delta."""
    setattr(relay, moment, fail_once(call))
    with pytest.raises(RelayUnavailable):
        publisher.publish(V1, FIRST)
    publisher.publish(V1, FIRST)
    publisher.publish(V2, SECOND)
    assert same(held_by(relay, BASE, 1, 2), SECOND)


def test_a_lost_commit_answer_is_found_out_before_the_next_version(
    relay: MemoryRelay, publisher: Publisher
) -> None:
    """A trainer that goes on after the error must not build version 2 on a base nobody runs any more."""
    commits = [0]

    def lose_second_answer(call: str) -> None:
        commits[0] += call == "commit"
        if call == "commit" and commits[0] == 2:
            raise RelayUnavailable("answer lost")

    relay.after = lose_second_answer
    with pytest.raises(RelayUnavailable):
        publisher.publish(V1, FIRST)
    report = publisher.publish(V2, SECOND)
    assert report.base_version == 1
    assert same(held_by(relay, BASE, 1, 2), SECOND)


def test_an_uncommitted_failure_is_no_base(relay: MemoryRelay, publisher: Publisher) -> None:
    relay.before = fail_once("put_bucket")
    with pytest.raises(RelayUnavailable):
        publisher.publish(V1, FIRST)
    assert publisher.version == 0
    assert publisher.publish(V2, SECOND).base_version == 0
    assert same(held_by(relay, BASE, 2), SECOND)


def test_an_encoder_that_loses_a_bit_is_caught_before_anything_is_pushed(
    relay: MemoryRelay, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lossy(job, version, base_version, base, target, **digests):  # type: ignore[no-untyped-def]
        damaged = {name: bits.copy() for name, bits in target.items()}
        damaged["layers.0.norm.weight"].words[5] ^= 1 << 20
        return _encode(job, version, base_version, base, damaged, **digests)

    _encode = encoding.encode_coded
    monkeypatch.setattr(encoding, "encode_coded", lossy)
    with pytest.raises(CorruptDelta, match="trainer's weights"):
        publisher.publish(V1, FIRST)
    assert "put_bucket" not in relay.calls
    assert publisher.version == 0


def test_a_restarted_relay_gets_the_kept_versions_again(relay: MemoryRelay, publisher: Publisher) -> None:
    publisher.publish(V1, FIRST)
    publisher.publish(V2, SECOND)
    relay.restart()
    assert relay.vault.newest(JOB, WeightVersion(0)) is None
    assert publisher.heal() == (1, 2)
    assert publisher.heal() == ()
    assert same(held_by(relay, BASE, 1, 2), SECOND)


def test_the_next_publish_heals_a_restarted_relay_too(relay: MemoryRelay, publisher: Publisher) -> None:
    publisher.publish(V1, FIRST)
    relay.restart()
    publisher.publish(V2, SECOND)
    assert same(held_by(relay, BASE, 1, 2), SECOND)


def test_a_relay_restarted_in_the_middle_of_a_push_is_pushed_again(
    relay: MemoryRelay, publisher: Publisher
) -> None:
    restarts = [relay.restart]

    def restart_once(call: str) -> None:
        if call == "put_bucket" and restarts:
            restarts.pop()()

    relay.after = restart_once
    publisher.publish(V1, FIRST)
    assert same(held_by(relay, BASE, 1), FIRST)


def test_only_the_last_versions_are_kept_in_memory(relay: MemoryRelay) -> None:
    state: dict[str, Bits] = BASE
    with Publisher(BlockingRelay(relay), JOB, BASE, keep=2) as publisher:
        for version in range(1, 6):
            state = stepped(state, version)
            publisher.publish(WeightVersion(version), state)
        relay.restart()
        assert publisher.heal() == (4, 5)


# ---- room ----


def encoded_size(encoded: EncodedVersion) -> int:
    relay = MemoryRelay()
    relay.publish(encoded)
    return relay.vault.used_bytes


def test_a_full_relay_loses_the_oldest_versions_but_never_the_kept_ones() -> None:
    one = encoded_size(encoding.encode_coded(JOB, V1, WeightVersion(0), BASE, FIRST))
    relay = MemoryRelay(capacity_bytes=one * 4)
    state: dict[str, Bits] = BASE
    with Publisher(BlockingRelay(relay), JOB, BASE, keep=2) as publisher:
        for version in range(1, 8):
            state = stepped(state, version)
            publisher.publish(WeightVersion(version), state)
        versions = relay.vault.stat(JOB).versions
    assert versions[-2:] == (6, 7)
    assert 1 not in versions


def test_a_relay_too_small_says_so(publisher: Publisher, relay: MemoryRelay) -> None:
    relay.vault.capacity_bytes = 8192
    with pytest.raises(RelayFull):
        publisher.publish(V1, FIRST)
    assert publisher.version == 0
    relay.vault.capacity_bytes = 1 << 26
    publisher.publish(V1, FIRST)


# ---- anchors and resumption ----


def test_anchors_come_as_often_as_asked(relay: MemoryRelay) -> None:
    with Publisher(BlockingRelay(relay), JOB, BASE, anchor_every=2) as publisher:
        bases = []
        state: dict[str, Bits] = BASE
        for version in range(1, 5):
            state = stepped(state, version)
            bases.append(publisher.publish(WeightVersion(version), state).base_version)
        assert bases == [0, None, 2, None]
        assert same(held_by(relay, model(99), 4), state)


def test_after_a_gap_the_next_version_is_one_that_newcomers_can_begin_with(relay: MemoryRelay) -> None:
    """A restarted relay gets the last versions only, which are of no use to an engine that starts anew."""
    state: dict[str, Bits] = BASE
    bases = []
    with Publisher(BlockingRelay(relay), JOB, BASE, keep=2) as publisher:
        for version in range(1, 7):
            if version == 4:
                relay.restart()
            state = stepped(state, version)
            bases.append(publisher.publish(WeightVersion(version), state).base_version)
    assert bases == [0, 1, 2, None, 4, 5]
    assert same(held_by(relay, BASE, 4, 5, 6), state)


LARGE = {"w": tensor("BF16", (512, 1024), 1)}
"""An anchor of it takes 1 MiB: random bits cannot be coded."""


@pytest.mark.parametrize(("room_bytes", "bridged"), [(300_000, False), (1_100_000, True)])
def test_a_gap_is_bridged_where_the_whole_model_fits_by_its_measured_size(
    relay: MemoryRelay, room_bytes: int, *, bridged: bool
) -> None:
    """Also where it fills the relay to the brim, and what is older has to go for it."""
    state: dict[str, Bits] = LARGE
    bases = []
    with Publisher(BlockingRelay(relay), JOB, LARGE, keep=1) as publisher:
        for version in range(1, 6):
            if version == 3:
                relay.restart()
                relay.vault.used_bytes = relay.vault.capacity_bytes - room_bytes  # by other jobs
            state = stepped(state, version, 0.001)
            bases.append(publisher.publish(WeightVersion(version), state).base_version)
    assert bases == [0, 1, None if bridged else 2, 3, 4]


def test_a_relay_that_fills_up_gets_an_anchor_so_that_newcomers_can_begin() -> None:
    """At most one version after an old one had to go."""
    first = encoding.encode_coded(JOB, V1, None, None, LARGE)
    relay = MemoryRelay(capacity_bytes=first.manifest.delta_bytes + 150_000)
    state: dict[str, Bits] = LARGE
    gaps, anchors = [], 0
    with Publisher(BlockingRelay(relay), JOB, LARGE, keep=2) as publisher:
        for version in range(1, 150):
            state = stepped(state, version, 0.01)
            anchors += publisher.publish(WeightVersion(version), state).base_version is None
            bases = {each.version: each.base_version for each in relay.vault.stat(JOB).committed}
            at: int | None = version
            while at:
                at = bases.get(WeightVersion(at), -1)
                if at == -1:
                    gaps.append(version)
                    break
    assert anchors > 2
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(gaps)), gaps


def test_a_resumed_trainer_goes_on_from_its_version(relay: MemoryRelay, publisher: Publisher) -> None:
    publisher.publish(V1, FIRST)
    with Publisher(BlockingRelay(relay), JOB, FIRST, base_version=V1) as resumed:
        assert resumed.publish(V2, SECOND).base_version == 1
        with pytest.raises(VersionConflict):
            resumed.publish(V1, FIRST)
    assert same(held_by(relay, BASE, 1, 2), SECOND)


@pytest.mark.parametrize("settings", [{"keep": 0}, {"anchor_every": 0}])
def test_settings_that_make_no_sense_are_refused(relay: MemoryRelay, settings: dict[str, int]) -> None:
    blocking = BlockingRelay(relay)
    with pytest.raises(ValueError, match="at least 1"):
        Publisher(blocking, JOB, BASE, **settings)  # type: ignore[arg-type]
    blocking.close()


def test_a_new_run_under_an_old_job_id_is_refused() -> None:
    """Hosts take versions that are newer than what they hold: they would never look at it."""
    relay = MemoryRelay()
    with Publisher(BlockingRelay(relay), JOB, model()) as first:
        for version in (1, 2, 3):
            first.publish(WeightVersion(version), stepped(model(), version))
    with Publisher(BlockingRelay(relay), JOB, model()) as second:
        with pytest.raises(VersionConflict, match="the relay has version 3"):
            second.publish(WeightVersion(2), stepped(model(), 9))
        assert [each.version for each in asyncio.run(relay.stat(JOB)).committed] == [1, 2, 3]
