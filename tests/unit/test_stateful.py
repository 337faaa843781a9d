"""Stateful deltas: fewer bytes for hosts that remember; for all others, and in doubt, the version itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from functools import cache
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest
from rose_daemon.bench.delta_data import adam_chain
from rose_daemon.node.engines import Engines
from rose_daemon.node.keeper import CopyKeeper
from rose_daemon.node.weights import WeightAgent
from rose_kernels import delta
from weight_states import JOB, MemoryRelay, fail_once, same, stepped

from rose.config import Config, JobConfig, NodeConfig, ReplicaConfig
from rose.core.effects import PullVersion
from rose.core.events import NodeEvent, VersionStaged, VersionStageFailed
from rose.errors import CorruptDelta, WrongBase
from rose.units import JobId, ReplicaId, WeightVersion
from rose.weights import Publisher, container, tensorfile
from rose.weights.bits import Bits, State
from rose.weights.coding import Coding
from rose.weights.container import EncodedVersion, read_manifest, read_patches
from rose.weights.encoding import encode_coded
from rose.weights.history import SPAN_MAX, ChangeHistory, Notes
from rose.weights.manifest import main_job, squashed_job, stateful_job
from rose.weights.patches import Patch, apply_to_state
from rose.weights.relay import RelayFull
from rose.weights.relay.blocking import BlockingRelay
from rose.weights.stateful import require_same_weights
from rose.weights.store import WeightStore

STATEFUL = stateful_job(JOB)
CODING = Coding(slice_bytes_max=1 << 18)
"""Several slices of the matrix."""
VERSIONS = 12


@cache
def chain() -> Sequence[State]:
    """States of a trainer: a matrix that Adam moves, and a parameter that has no sparse form."""
    states = []
    for number, words in enumerate(adam_chain(1 << 18, 5.6e-6, 3)):
        scale = np.full(8, number, "<u4")
        states.append({"proj": Bits("BF16", (512, 512), words), "scale": Bits("F32", (8,), scale)})
    return states[-VERSIONS - 1 :]


def publisher_of(relay: MemoryRelay, **options: object) -> Publisher:
    return Publisher(
        BlockingRelay(relay), JOB, chain()[0], stateful=True, coding=CODING, **options,  # type: ignore[arg-type]
    )  # fmt: skip


def sizes(relay: MemoryRelay, job: JobId) -> dict[int, int]:
    return {each.version: each.bytes for each in relay.vault.stat(job).committed}


class Host:
    """rosed's weight agent over a checkpoint, without engines; it can be restarted."""

    def __init__(self, root: Path, relay: MemoryRelay, *, stateful: bool = True) -> None:
        model = root / "model"
        model.mkdir(parents=True)
        (model / "model.safetensors").write_bytes(tensorfile.encode(chain()[0], {}))
        self.relay = relay
        self.root = root
        self.config = Config(
            node=NodeConfig(state_dir=str(root), weights_stateful=stateful),
            job=JobConfig(id=JOB),
            replicas=(ReplicaConfig(id=ReplicaId("r"), kind="dedicated", model=str(model)),),
        )
        self.events: list[NodeEvent] = []
        self._keeping: asyncio.Task[None] | None = None
        self.start()

    def start(self) -> None:
        self.keeper = CopyKeeper(self.config, self.relay, self.events.append)
        self.agent = WeightAgent(
            self.config, self.relay, cast("Engines", None), self.events.append, time.monotonic_ns, self.keeper
        )
        self._keeping = asyncio.create_task(self.keeper.run())

    async def stop(self) -> None:
        assert self._keeping is not None
        self._keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeping

    async def pull(self, version: int, *, squashed: bool = False) -> JobId:
        """Stage a version; answers under which name it came, and checks what it leads to."""
        await self.agent.pull(PullVersion(JOB, WeightVersion(version), WeightVersion(0), squashed=squashed))
        events = [each for each in self.events if isinstance(each, VersionStaged | VersionStageFailed)]
        assert isinstance(events[-1], VersionStaged), events[-1]
        manifest = read_manifest(WeightStore(self.root).path(JOB, WeightVersion(version)))
        base = chain()[events[-1].base_version or 0]
        assert same(apply_to_state(base, read_patches(Path(events[-1].path))), chain()[version])
        return manifest.job


@pytest.fixture
async def relay() -> MemoryRelay:
    return MemoryRelay(1 << 30)


@pytest.fixture
async def host(tmp_path: Path, relay: MemoryRelay) -> AsyncIterator[Host]:
    made = Host(tmp_path / "host", relay)
    yield made
    await made.stop()


async def publish(publisher: Publisher, *versions: int) -> None:
    for version in versions:
        await asyncio.to_thread(publisher.publish, WeightVersion(version), chain()[version])


# ---- what is remembered ---------------------------------------------------------------------------


def noted(history: ChangeHistory, version: int, states: Sequence[State]) -> None:
    """Let the delta that leads from one state to the next pass."""
    manifest = encode_coded(
        JOB, WeightVersion(version), WeightVersion(version - 1), states[version - 1], states[version]
    ).manifest
    notes = Notes()
    for name, bits in states[version].items():
        at = np.flatnonzero(states[version - 1][name].words != bits.words)
        notes.add(Patch(name, bits.dtype, bits.shape, at, bits.words[at]), states[version - 1][name])
    history.arrived(manifest, notes)


def expected(states: Sequence[State], version: int, span: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The codec's own history, begun `span` versions ago, without what is held at the highest age."""
    ages = delta.new_history(states[0]["proj"].words.size)
    for each in range(version - span + 1, version + 1):
        old, new = states[each - 1]["proj"].words, states[each]["proj"].words
        at = np.flatnonzero(old != new)
        delta.advance(ages, delta.FORMATS["BF16"], at, old[at], new[at])
    return ages


def test_the_last_versions_count_and_nothing_before() -> None:
    history, states = ChangeHistory(), chain()
    for version in range(1, VERSIONS + 1):
        noted(history, version, states)
        assert (history.version, history.span) == (version, min(version, SPAN_MAX))
        for span in {1, min(3, version), history.span}:
            known = history.before("proj", states[0]["proj"].words.size, span)
            assert np.array_equal(known, expected(states, version, span))
    assert not history.before("scale", 8, SPAN_MAX).any(), "what has no sparse form has no history"
    assert not history.before("proj", 9, SPAN_MAX).any(), "another model's"


def test_who_comes_late_knows_as_much_some_versions_later() -> None:
    always, late = ChangeHistory(), ChangeHistory()
    for version in range(1, VERSIONS + 1):
        noted(always, version, chain())
        if version > VERSIONS - SPAN_MAX:
            noted(late, version, chain())
    elements = chain()[0]["proj"].words.size
    assert np.array_equal(always.before("proj", elements, SPAN_MAX), late.before("proj", elements, late.span))
    assert late.span == SPAN_MAX


def test_a_gap_an_anchor_and_a_squashed_delta_begin_anew() -> None:
    history = ChangeHistory()
    noted(history, 1, chain())
    noted(history, 3, chain())
    assert (history.version, history.span) == (3, 1), "version 2 was not seen"
    noted(history, 4, chain())
    anchor = encode_coded(JOB, WeightVersion(5), None, None, chain()[5]).manifest
    history.arrived(anchor, Notes())
    assert (history.version, history.span) == (5, 0)
    noted(history, 6, chain())
    squashed = encode_coded(
        squashed_job(JOB), WeightVersion(8), WeightVersion(6), chain()[6], chain()[8]
    ).manifest
    history.arrived(squashed, Notes())
    assert (history.version, history.span) == (8, 0)


# ---- one stateful delta ---------------------------------------------------------------------------


def test_it_takes_the_history_of_its_base_and_no_other() -> None:
    history, states = ChangeHistory(), chain()
    for version in range(1, 5):
        noted(history, version, states)
    encoded = encode_coded(
        STATEFUL, WeightVersion(5), WeightVersion(4), states[4], states[5], how=CODING, history=history
    )
    assert encoded.manifest.history == 4
    patches = container.decode_patches(encoded.manifest, encoded.buckets, states[4], history=history)
    assert same(apply_to_state(states[4], patches), states[5])
    short = ChangeHistory()
    noted(short, 4, states)
    noted(late := ChangeHistory(), 5, states)
    for unfit in (None, ChangeHistory(), short, late):
        with pytest.raises(WrongBase, match="takes the changes of 4 versions"):
            container.decode_patches(encoded.manifest, encoded.buckets, states[4], history=unfit)
    other = ChangeHistory()  # of another run: what it says is wrong, and the digests tell
    for version in range(1, 5):
        noted(other, version, [states[0], *(stepped(states[0], each, 0.2) for each in range(1, 5))])
    with pytest.raises(CorruptDelta):
        container.decode_patches(encoded.manifest, encoded.buckets, states[4], history=other)


def test_it_saves_some_percent() -> None:
    """On a tensor so large that tables weigh little."""
    states = [
        {"proj": Bits("BF16", (1 << 20,), words)} for words in adam_chain(1 << 20, 5.6e-6, 3)
    ]  # fmt: skip
    history, newest = ChangeHistory(), len(states) - 1
    for version in range(newest - SPAN_MAX, newest):
        noted(history, version, states)
    form = (WeightVersion(newest), WeightVersion(newest - 1), states[-2], states[-1])
    stateful = encode_coded(STATEFUL, *form, history=history).manifest
    assert stateful.history == SPAN_MAX
    assert stateful.delta_bytes < 0.96 * encode_coded(JOB, *form).manifest.delta_bytes


def test_names_of_jobs() -> None:
    assert main_job(STATEFUL) == JOB
    assert squashed_job(JOB) != STATEFUL


def test_an_offer_has_to_promise_what_the_version_does() -> None:
    states = chain()
    version = encode_coded(JOB, WeightVersion(1), WeightVersion(0), states[0], states[1]).manifest
    require_same_weights(msgspec.structs.replace(version, job=STATEFUL), version)
    for other in (
        encode_coded(STATEFUL, WeightVersion(1), WeightVersion(0), states[0], states[2]).manifest,
        encode_coded(STATEFUL, WeightVersion(1), None, None, states[1]).manifest,
    ):
        with pytest.raises(CorruptDelta, match="other weights"):
            require_same_weights(other, version)


# ---- trainer, relay and host ----------------------------------------------------------------------


async def test_hosts_that_remember_pull_fewer_bytes(relay: MemoryRelay, host: Host, tmp_path: Path) -> None:
    publisher, plain = publisher_of(relay), Host(tmp_path / "plain", relay, stateful=False)
    for version in range(1, VERSIONS + 1):
        await publish(publisher, version)
        offered = version > 1
        assert await host.pull(version) == (STATEFUL if offered else JOB)
        assert await plain.pull(version) == JOB
        assert (version in sizes(relay, STATEFUL)) == offered
        if offered:
            assert sizes(relay, STATEFUL)[version] < sizes(relay, JOB)[version]
    assert sorted(sizes(relay, STATEFUL)) == [VERSIONS - 1, VERSIONS], "older offers are of no use"
    await plain.stop()
    publisher.close()


async def test_a_host_that_was_restarted_takes_versions_until_it_remembers(
    relay: MemoryRelay, host: Host
) -> None:
    publisher = publisher_of(relay)
    for version in (1, 2, 3):
        await publish(publisher, version)
        await host.pull(version)
    await host.stop()
    host.start()
    came = []
    for version in range(4, VERSIONS + 1):
        await publish(publisher, version)
        came.append(await host.pull(version))
    assert came == [JOB] * SPAN_MAX + [STATEFUL] * (len(came) - SPAN_MAX)
    publisher.close()


async def test_a_trainer_that_resumes_offers_what_hosts_can_decode(relay: MemoryRelay, host: Host) -> None:
    """It remembers fewer versions than they do."""
    first = publisher_of(relay)
    for version in range(1, 5):
        await publish(first, version)
        await host.pull(version)
    first.close()
    second = await asyncio.to_thread(
        Publisher.resume, BlockingRelay(relay), JOB, chain()[0], stateful=True, coding=CODING
    )
    await publish(second, 5)
    assert await host.pull(5) == JOB
    await publish(second, 6)
    assert await host.pull(6) == STATEFUL
    second.close()


async def test_a_late_host_and_one_that_skipped_versions_take_versions(
    relay: MemoryRelay, host: Host
) -> None:
    publisher = publisher_of(relay, squash_every=4)
    await publish(publisher, *range(1, 6))
    for version in range(1, 5):
        await host.pull(version)
    assert await host.pull(5) == STATEFUL
    late = Host(host.root / "late", relay)
    assert await late.pull(4, squashed=True) == squashed_job(JOB)
    assert await late.pull(5) == JOB, "what version 4 changed is not known"
    await late.stop()
    publisher.close()


async def test_an_anchor_begins_anew(relay: MemoryRelay, host: Host) -> None:
    publisher = publisher_of(relay, anchor_every=4)
    came = []
    for version in range(1, 8):
        await publish(publisher, version)
        came.append(await host.pull(version))
    assert came == [JOB, STATEFUL, STATEFUL, JOB, JOB, STATEFUL, STATEFUL]
    publisher.close()


async def two_versions(publisher: Publisher, host: Host) -> None:
    """After which the next can be offered in stateful form."""
    for version in (1, 2):
        await publish(publisher, version)
        await host.pull(version)


async def test_an_offer_of_weights_that_were_never_committed_is_not_taken(
    relay: MemoryRelay, host: Host
) -> None:
    """The trainer fails between offer and version, goes back, and makes another version of that number."""
    publisher = publisher_of(relay)
    await two_versions(publisher, host)
    wrong = encode_coded(
        STATEFUL, WeightVersion(3), WeightVersion(2), chain()[2], chain()[4], history=host.keeper.history
    )
    relay.publish(wrong)
    relay.publish(encode_coded(JOB, WeightVersion(3), WeightVersion(2), chain()[2], chain()[3]))
    assert await host.pull(3) == JOB
    publisher.close()


async def test_a_trainer_replaces_an_offer_of_an_attempt_that_failed(relay: MemoryRelay, host: Host) -> None:
    publisher = publisher_of(relay)
    await two_versions(publisher, host)
    relay.publish(encode_coded(STATEFUL, WeightVersion(3), WeightVersion(2), chain()[2], chain()[4]))
    await publish(publisher, 3)
    assert await host.pull(3) == STATEFUL
    publisher.close()


@pytest.mark.parametrize("damage", ["bytes", "history"])
async def test_an_offer_that_does_not_decode_is_left(relay: MemoryRelay, host: Host, damage: str) -> None:
    publisher = publisher_of(relay)
    for version in (1, 2, 3):
        await publish(publisher, version)
        if version < 3:
            await host.pull(version)
    if damage == "history":  # such as that of another run of the job
        assert host.keeper.history is not None
        host.keeper.history._ages["proj"][:] ^= 1
    else:
        key = (STATEFUL, WeightVersion(3))
        with relay.vault.reading(key, "bucket-00000.safetensors") as block:
            block.data[-1] ^= 1
    assert await host.pull(3) == JOB
    await publish(publisher, 4)
    assert await host.pull(4) == (JOB if damage == "history" else STATEFUL)
    publisher.close()


async def test_a_relay_that_lost_the_offers_in_a_restart_still_has_versions(
    relay: MemoryRelay, host: Host
) -> None:
    publisher = publisher_of(relay)
    await two_versions(publisher, host)
    relay.restart()
    await asyncio.to_thread(publisher.heal)
    assert not sizes(relay, STATEFUL)
    await publish(publisher, 3)
    assert await host.pull(3) == STATEFUL
    publisher.close()


async def test_a_copy_made_of_offers_that_are_gone_is_still_trusted(relay: MemoryRelay, host: Host) -> None:
    """The relay and rosed were restarted: the relay has the versions again, and no offer."""
    publisher = publisher_of(relay)
    for version in (1, 2, 3):
        await publish(publisher, version)
        await host.pull(version)
    async with asyncio.timeout(20):
        while host.keeper.version != 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await host.stop()
    relay.restart()
    await asyncio.to_thread(publisher.heal)
    assert not sizes(relay, STATEFUL)
    host.start()
    async with host.keeper.source(host.config.replicas[0]) as source:
        assert source is not None
        assert source.version == 3
    publisher.close()


async def test_a_version_that_is_staged_is_not_fetched_again_for_its_offer(
    relay: MemoryRelay, host: Host
) -> None:
    publisher = publisher_of(relay)
    await publish(publisher, 1)
    await host.pull(1)
    held, host.keeper.history = host.keeper.history, None
    await publish(publisher, 2)
    assert await host.pull(2) == JOB
    host.keeper.history = held
    relay.calls.clear()
    assert await host.pull(2) == JOB
    assert "get_into" not in relay.calls
    publisher.close()


async def test_without_room_there_is_no_offer_and_offers_make_room_for_versions(relay: MemoryRelay) -> None:
    publisher = publisher_of(relay)
    await publish(publisher, 1)
    relay.before = fail_once("put_bucket", RelayFull("no room"))
    report = await asyncio.to_thread(publisher.publish, WeightVersion(2), chain()[2])
    assert (report.stateful_bytes, publisher.version) == (0, 2)
    assert not sizes(relay, STATEFUL)
    await publish(publisher, 3, 4)
    assert sorted(sizes(relay, STATEFUL)) == [3, 4]
    full = iter([False, True, False, True])  # puts: the offer's, then those of the version
    relay.before = lambda call: _refuse() if call == "put_bucket" and next(full, False) else None
    await publish(publisher, 5)
    assert sorted(sizes(relay, JOB)) == [1, 2, 3, 4, 5], "versions are kept"
    assert sorted(sizes(relay, STATEFUL)) == [5]
    publisher.close()


def _refuse() -> None:
    raise RelayFull("no room")


async def test_the_report_says_what_the_offer_took(relay: MemoryRelay) -> None:
    publisher = publisher_of(relay)
    first, second = [
        await asyncio.to_thread(publisher.publish, WeightVersion(each), chain()[each]) for each in (1, 2)
    ]
    assert first.stateful_bytes == 0
    committed = await relay.manifest(STATEFUL, WeightVersion(2))
    assert second.stateful_bytes == committed.manifest.delta_bytes < second.delta_bytes
    assert second.stateful_ms > 0
    publisher.close()


def test_an_encoded_version_without_changes_needs_no_history() -> None:
    history = ChangeHistory()
    noted(history, 1, chain())
    encoded: EncodedVersion = encode_coded(
        STATEFUL, WeightVersion(2), WeightVersion(1), chain()[1], chain()[1], history=history
    )
    assert encoded.manifest.history == 0
