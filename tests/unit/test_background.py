"""Publishing in the background, and going on after a publisher that is gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from test_publisher import BASE, FIRST, SECOND, V1, V2, V3, held_by
from weight_states import JOB, MemoryRelay, fail_once, same, stepped

from rose.errors import VersionConflict, WrongBase
from rose.units import WeightVersion
from rose.weights import BackgroundPublisher, Publisher
from rose.weights.relay import RelayUnavailable
from rose.weights.relay.blocking import BlockingRelay


@pytest.fixture
def relay() -> MemoryRelay:
    return MemoryRelay()


@pytest.fixture
def background(relay: MemoryRelay) -> Iterator[BackgroundPublisher]:
    made = BackgroundPublisher(Publisher(BlockingRelay(relay), JOB, BASE))
    yield made
    made.close()


def test_training_goes_on_while_a_version_is_published(
    relay: MemoryRelay, background: BackgroundPublisher
) -> None:
    """The link is stuck; the optimiser writes into the very tensors that were submitted."""
    stuck, reached = threading.Event(), threading.Event()

    def hold(call: str) -> None:
        if call == "put_bucket":
            reached.set()
            assert stuck.wait(10)

    relay.before = hold
    live = {name: bits.copy() for name, bits in FIRST.items()}
    future = background.submit(V1, live)
    assert reached.wait(10)
    for name, bits in SECOND.items():
        live[name].words[:] = bits.words
    assert not future.done()
    stuck.set()
    assert future.result().version == 1
    background.submit(V2, live)
    report = background.flush()
    assert report is not None
    assert report.base_version == 1
    assert same(held_by(relay, BASE, 1, 2), SECOND)


def test_versions_do_not_pile_up(relay: MemoryRelay, background: BackgroundPublisher) -> None:
    """A second submit waits for the first version; at no time are two under way."""
    first = background.submit(V1, FIRST)
    background.submit(V2, SECOND)
    assert first.done()
    background.flush()
    assert background.version == 2
    assert background.flush() is None


def test_a_failure_is_told_once_and_the_next_version_follows_the_last_good_one(
    relay: MemoryRelay, background: BackgroundPublisher
) -> None:
    relay.before = fail_once("commit")
    background.submit(V1, FIRST)
    with pytest.raises(RelayUnavailable):
        background.submit(V2, SECOND)
    assert background.version == 0
    background.submit(V2, SECOND)
    report = background.flush()
    assert report is not None
    assert report.base_version == 0
    assert same(held_by(relay, BASE, 2), SECOND)


def test_a_failure_that_was_looked_at_through_close(relay: MemoryRelay) -> None:
    background = BackgroundPublisher(Publisher(BlockingRelay(relay), JOB, BASE))
    relay.before = fail_once("commit")
    background.submit(V1, FIRST)
    with pytest.raises(RelayUnavailable):
        background.close()


# ---- resume -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("anchor_every", [None, 2])
def test_a_new_publisher_goes_on_where_the_former_one_stopped(
    relay: MemoryRelay, anchor_every: int | None
) -> None:
    with Publisher(BlockingRelay(relay), JOB, BASE, anchor_every=anchor_every) as former:
        former.publish(V1, FIRST)
        former.publish(V2, SECOND)
    with Publisher.resume(BlockingRelay(relay), JOB, BASE) as publisher:
        assert publisher.version == 2
        third = stepped(SECOND, 3)
        report = publisher.publish(V3, third)
        assert report.base_version == 2
        relay.restart()
        assert set(publisher.heal()) >= {2, 3}
    versions = (2, 3) if anchor_every else (1, 2, 3)
    assert same(held_by(relay, BASE, *versions), third)


@pytest.mark.parametrize("call", ["put_bucket", "commit"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_publisher_that_died_half_way_leaves_nothing_in_the_way(
    relay: MemoryRelay, call: str, side: str
) -> None:
    """The new trainer took another step: its version 1 has other bytes, unless version 1 is committed."""

    class Died(Exception):
        pass

    setattr(relay, side, fail_once(call, Died()))
    former = Publisher(BlockingRelay(relay), JOB, BASE)
    with pytest.raises(Died):
        former.publish(V1, FIRST)
    former.close()
    other = stepped(BASE, 77)
    with Publisher.resume(BlockingRelay(relay), JOB, BASE) as publisher:
        committed = publisher.version
        assert committed == relay.vault.newest(JOB, WeightVersion(0)) or committed == 0
        publisher.publish(WeightVersion(committed + 1), other)
    assert same(held_by(relay, BASE, *range(1, committed + 2)), other)


def test_an_unpublished_job_begins_at_its_checkpoint(relay: MemoryRelay) -> None:
    with Publisher.resume(BlockingRelay(relay), JOB, BASE) as publisher:
        assert publisher.version == 0
        publisher.publish(V1, FIRST)
        with pytest.raises(VersionConflict):
            publisher.publish(WeightVersion(0), FIRST)


def test_another_checkpoint_is_refused(relay: MemoryRelay) -> None:
    with Publisher(BlockingRelay(relay), JOB, BASE) as former:
        former.publish(V1, FIRST)
        former.publish(V2, SECOND)
    client = BlockingRelay(relay)
    with pytest.raises(WrongBase):
        Publisher.resume(client, JOB, SECOND)
    relay.vault.delete((JOB, V1))
    with pytest.raises(WrongBase, match="1 is gone"):
        Publisher.resume(client, JOB, BASE)
    client.close()
