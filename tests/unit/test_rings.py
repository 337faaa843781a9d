"""Rings: bounded, counted, and never a wrong record."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rose_daemon.node.journal import Journal

from rose.boards import BoardPaths, BoardWriter
from rose.core.readings import GateMode, GatePolicy, GateReason, GateTransition
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.step_gate import StepGate
from rose.journals import GateEntry, read_gates
from rose.rings import RECORDS, RingReader, RingWriter
from rose.units import NS_PER_S, ReplicaId


class Pair(NamedTuple):
    """A small record."""

    number: int
    other: int


class Other(NamedTuple):
    """A record of another kind."""

    number: int


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gate-r0.ring"


def test_what_is_written_is_fetched_once(path: Path) -> None:
    writer, reader = RingWriter(path, Pair), RingReader(path, Pair)
    assert reader.fetch() == []
    written = [Pair(n, -n) for n in range(5)]
    assert all(writer.write(record) for record in written)
    assert reader.fetch() == written
    assert reader.fetch() == []


def test_a_full_ring_drops_and_counts(path: Path) -> None:
    writer, reader = RingWriter(path, Pair), RingReader(path, Pair)
    for number in range(RECORDS + 7):
        writer.write(Pair(number, 0))
    assert writer.dropped == 7
    assert [record.number for record in reader.fetch()] == list(range(RECORDS))
    assert reader.dropped == 7
    assert writer.write(Pair(1, 1))
    assert reader.fetch() == [Pair(1, 1)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(st.lists(st.integers(0, RECORDS // 2) | st.none(), max_size=12))
def test_every_record_is_fetched_in_order_or_counted_as_dropped(
    tmp_path: Path, bursts: list[int | None]
) -> None:
    path = tmp_path / f"{time.monotonic_ns()}.ring"
    writer, reader = RingWriter(path, Pair), RingReader(path, Pair)
    accepted: list[int] = []
    fetched: list[int] = []
    number = 0
    for burst in bursts:
        if burst is None:
            fetched += [record.number for record in reader.fetch()]
            continue
        for _ in range(burst):
            number += 1
            if writer.write(Pair(number, 0)):
                accepted.append(number)
    fetched += [record.number for record in reader.fetch()]
    assert fetched == accepted
    assert len(accepted) + writer.dropped == number
    assert reader.torn == 0


def test_a_restarted_writer_goes_on(path: Path) -> None:
    RingWriter(path, Pair).write(Pair(1, 0))
    reader = RingReader(path, Pair)
    RingWriter(path, Pair).write(Pair(2, 0))
    assert [record.number for record in reader.fetch()] == [1, 2]


def test_a_torn_record_is_skipped_and_counted(path: Path) -> None:
    writer, reader = RingWriter(path, Pair), RingReader(path, Pair)
    for number in range(3):
        writer.write(Pair(number, 0))
    writer._page[64 + 24 + 3] ^= 0xFF  # in the second record
    assert [record.number for record in reader.fetch()] == [0, 2]
    assert reader.torn == 1


@pytest.mark.parametrize("length", [0, 20, 30, 64, 5000])
def test_a_ring_that_is_cut_short_kills_nobody_and_is_made_whole(path: Path, length: int) -> None:
    """What lies past the end of a file must not be touched: each of these calls would end the process."""
    writer, reader = RingWriter(path, Pair), RingReader(path, Pair)
    for number in range(RECORDS + 3):
        writer.write(Pair(number, 0))
    assert len(reader.fetch()) == RECORDS
    os.truncate(path, length)
    assert writer.dropped == reader.dropped == 3
    assert reader.fetch() == []
    assert reader.dropped == 0, "there is no ring now"
    for number in range(3):
        assert writer.write(Pair(number, 1))
    assert reader.fetch() == [Pair(number, 1) for number in range(3)]
    assert writer.dropped == reader.dropped == 4, "something was lost"
    assert path.stat().st_size == len(writer._page)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 100_000])
def test_what_is_no_ring_has_no_records_and_is_replaced_by_a_writer(path: Path, content: bytes) -> None:
    reader = RingReader(path, Pair)
    assert reader.fetch() == []
    path.write_bytes(content)
    assert reader.fetch() == []
    writer = RingWriter(path, Pair)
    writer.write(Pair(1, 2))
    assert reader.fetch() == [Pair(1, 2)]


def test_a_ring_of_another_kind_is_made_anew(path: Path) -> None:
    RingWriter(path, Pair).write(Pair(1, 2))
    other = RingReader(path, Other)
    assert other.fetch() == []
    writer = RingWriter(path, Other)
    assert other.fetch() == []
    writer.write(Other(4))
    assert other.fetch() == [Other(4)]
    assert RingReader(path, Pair).fetch() == []


def test_a_senseless_count_is_not_believed(path: Path) -> None:
    writer, reader = RingWriter(path, Pair), RingReader(path, Pair)
    writer.write(Pair(1, 0))
    writer._page[24:32] = (99).to_bytes(8, "little")
    assert reader.fetch() == []
    assert reader.torn == 1
    writer.write(Pair(2, 0))
    assert reader.fetch() == [Pair(2, 0)]


# ---- the gate's transitions ---------------------------------------------------------------------


def test_a_gate_journals_its_changes_and_nothing_else(tmp_path: Path) -> None:
    paths = BoardPaths(tmp_path)
    gate = StepGate(
        PluginSettings(role="rollout", name="r0", run_dir=str(tmp_path), token_file="t"), step_tokens_max=64
    )
    reader = RingReader(paths.transitions("r0"), GateTransition)
    for _ in range(5):
        gate.decide(time.monotonic_ns())
    rosed = BoardWriter(paths.gate("r0"), GatePolicy)
    rosed.publish(GatePolicy(3, GateMode.OPEN, 16, 0, 0, time.monotonic_ns() + NS_PER_S, 9, 9, 7))
    for _ in range(5):
        gate.decide(time.monotonic_ns() + 60_000_000)
    unknown, opened = reader.fetch()
    assert (unknown.number, unknown.reason, unknown.tokens) == (1, GateReason.POLICY_UNKNOWN, 0)
    assert (unknown.mode, unknown.policy_revision, unknown.board_known) == (-1, -1, -1)
    assert (opened.number, opened.reason, opened.tokens) == (2, GateReason.OPEN_FORCED, 16)
    assert (opened.mode, opened.policy_revision, opened.policy_margin_ns) == (GateMode.OPEN, 3, 7)
    assert gate.journal_dropped == 0


def test_transitions_are_lines_of_the_gates_journal(tmp_path: Path) -> None:
    transition = GateTransition(*range(len(GateTransition._fields)))._replace(reason=GateReason.OPEN_SLACK)
    journal = Journal(tmp_path / "gates.jsonl", 1 << 20)
    journal.append(GateEntry.of(ReplicaId("r0"), transition))
    journal.close()
    line = json.loads((tmp_path / "gates.jsonl").read_text())
    assert (line["replica"], line["reason"]) == ("r0", "open_slack")
    assert line["transition"]["number"] == 1
    with (tmp_path / "gates.jsonl").open("ab") as file:
        file.write(b'{"replica":"r0","rea')  # a line that is still being written
    (entry,) = read_gates(tmp_path / "gates.jsonl", ReplicaId("r0"))
    assert entry.as_transition() == transition
    assert read_gates(tmp_path / "gates.jsonl", ReplicaId("r1")) == []
