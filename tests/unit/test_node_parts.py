"""Small parts of rosed: gate boards, the journal, notifications."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rose_daemon import sdnotify
from rose_daemon.node import engines
from rose_daemon.node.engine_http import Digests, EngineInfo, EngineRefused, EngineUnreachable
from rose_daemon.node.gates import Gates
from rose_daemon.node.journal import Journal
from rose_daemon.node.keeper import Source
from rose_daemon.node.status import supervisor_line

from rose import journals
from rose.boards import BoardPaths, BoardReader
from rose.config import Config, ReplicaConfig
from rose.core.effects import Say
from rose.core.events import (
    EngineExited,
    EngineReady,
    MemoryObserved,
    NodeEvent,
    ReplicaObserved,
    ServingObserved,
    Tick,
)
from rose.core.node import NodeMachine
from rose.core.nodeview import NodeSettings, ReplicaSettings
from rose.core.readings import GatePolicy, ReplicaReading, SlackReading, Unknown
from rose.units import JobId, NodeId, ReplicaId, WeightVersion

REPLICA = ReplicaId("r")
POLICY = GatePolicy(1, 1, 512, 0, 0, 0, 1, 1, 1)


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(BoardPaths(tmp_path), lease_ns=1000)


def read(tmp_path: Path) -> GatePolicy | Unknown:
    return BoardReader(BoardPaths(tmp_path).gate(REPLICA), GatePolicy).read()


def test_a_policy_is_published_with_a_lease_and_a_ring(gates: Gates, tmp_path: Path) -> None:
    gates.publish(REPLICA, POLICY, 5000)
    assert read(tmp_path) == POLICY._replace(alive_until_ns=6000)
    bell = BoardReader(BoardPaths(tmp_path).gate(REPLICA), GatePolicy).bell
    rings = bell.count
    gates.renew(7000)
    assert read(tmp_path) == POLICY._replace(alive_until_ns=8000)
    assert bell.count == rings  # a renewal changes nothing that anybody waits for
    gates.publish(REPLICA, POLICY._replace(revision=2), 7000)
    assert bell.count == rings + 1


def test_closing_takes_the_boards_away_for_good(gates: Gates, tmp_path: Path) -> None:
    gates.publish(REPLICA, POLICY, 5000)
    kept = BoardReader(BoardPaths(tmp_path).gate(REPLICA), GatePolicy)
    gates.close()
    assert list(tmp_path.iterdir()) == []
    last = kept.read()
    assert isinstance(last, GatePolicy)
    assert last.alive_until_ns == 0  # for an engine that has the page mapped
    gates.publish(REPLICA, POLICY, 5000)
    gates.renew(6000)
    assert list(tmp_path.iterdir()) == []


def machine() -> NodeMachine:
    replica = ReplicaSettings(
        replica=REPLICA, kind="opportunistic", url="u", model="m", block_tokens=32, context_tokens_max=64
    )
    return NodeMachine(
        NodeSettings(
            node=NodeId("n"), job=JobId("j"), replicas=(replica,), ttft_slo_ns=1, tpot_slo_ns=1, serving="s"
        )
    )


def test_a_journal_replays_to_the_same_effects(tmp_path: Path) -> None:
    original = machine()
    events: list[NodeEvent] = [
        Tick(),
        ServingObserved(SlackReading(*range(len(SlackReading._fields))), healthy=True),
        ServingObserved(Unknown("board_stale", 7), healthy=Unknown("health_timeout")),
        ReplicaObserved(REPLICA, ReplicaReading(*range(len(ReplicaReading._fields)))),
        MemoryObserved(10, Unknown("x"), 30),
        EngineExited(REPLICA, None, "it died"),
        Tick(),
    ]
    written = Journal(tmp_path / "journal.jsonl", 1 << 20)
    for number, event in enumerate(events):
        now_ns = number * 10_000_000_000
        written.write(now_ns, event, original.step(event, now_ns))
    written.close()
    entries, _ = journals.read(tmp_path / "journal.jsonl")
    assert [entry.event for entry in entries] == events
    copy = machine()
    for entry in entries:
        assert tuple(copy.step(entry.event, entry.now_ns)) == entry.effects
    assert any(entry.effects for entry in entries)


def test_the_journal_is_bounded_and_survives_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written = Journal(path, 2000)
    for number in range(100):
        written.write(number, Tick(), [Say("info", "code", "text")])
    written.close()
    former = path.with_name(path.name + journals.ROTATED)
    assert path.stat().st_size <= 2000
    assert former.stat().st_size <= 2000
    numbers = [entry.now_ns for each in (former, path) for entry in journals.read(each)[0]]
    assert numbers == list(range(numbers[0], 100))
    with path.open("ab") as file:
        file.write(b'{"now_ns":100,"eve')
    entries, damaged = journals.read(path)
    assert (entries[-1].now_ns, len(damaged)) == (99, 1)


def test_a_journal_that_cannot_be_written_is_counted(tmp_path: Path) -> None:
    written = Journal(tmp_path / "down" / "journal.jsonl", 100)
    (tmp_path / "down" / "journal.jsonl").unlink()
    (tmp_path / "down").rmdir()
    for _ in range(5):  # past the bound, so that it has to open a new file
        written.write(0, Tick(), [Say("info", "code", "text")])
    assert written.lost > 0


def test_notifications_go_to_the_service_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    assert not sdnotify.notify("READY=1")
    assert sdnotify.watchdog_period_s() is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "30000000")
        assert sdnotify.notify("READY=1")
        assert manager.recv(64) == b"READY=1"
        assert sdnotify.watchdog_period_s() == 15
    assert not sdnotify.notify("WATCHDOG=1")  # it went away: no reason to fail


# ---- engines ------------------------------------------------------------------------------------


async def first_answer(*answers: EngineInfo | Exception) -> int:
    """What an engine that answers so in turn is taken for."""
    left = list(answers)

    async def healthy() -> bool:
        return True

    async def info() -> EngineInfo:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def unused(*_: Any) -> Any:
        raise AssertionError

    engine = cast("engines.Engine", SimpleNamespace(client=SimpleNamespace(healthy=healthy, info=info)))
    hosted = engines.Engines(Config(), unused, unused, unused, unused, cast("engines.CopyKeeper", unused))
    return await hosted._first_answer(ReplicaId("r"), engine)


async def test_an_engine_that_is_not_there_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_READY_POLL_S", 0)
    not_yet = (EngineUnreachable("no"), EngineRefused(503, "board_unknown", "board_torn", None))
    assert await first_answer(*not_yet, EngineInfo("rollout", "r", 7)) == 7


async def test_an_engine_whose_board_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_READY_POLL_S", 0)
    with pytest.raises(EngineRefused, match="board_missing"):
        await first_answer(*[EngineRefused(503, "board_unknown", "board_missing", None)] * 100)


@pytest.mark.parametrize(
    "answer", [EngineRefused(401, "unauthorized", "", None), EngineInfo("rollout", "other", 7)]
)
async def test_another_engine_on_the_port_is_not_ours(answer: EngineInfo | Exception) -> None:
    with pytest.raises(EngineRefused):
        await first_answer(answer)


def test_the_service_manager_is_told_what_is_waited_for() -> None:
    view, waiting, stale = (
        machine().view(),
        Unknown("driver_not_loaded"),
        Unknown("telemetry_stale", 12 * 10**9),
    )
    no_driver, hanging = MemoryObserved(waiting, waiting, waiting), MemoryObserved(stale, stale, stale)
    assert supervisor_line(view, no_driver, lends=True) == "waiting for the driver"
    assert "telemetry_stale age=12.0s" in supervisor_line(view, hanging, lends=True)
    assert supervisor_line(view, MemoryObserved(1, 1, 2), lends=True) == "0 of 1 replicas in use"
    assert supervisor_line(view, no_driver, lends=False) == "0 of 1 replicas in use"


@pytest.mark.parametrize(
    ("held", "stopped"),
    [
        ({"w": "a", "v": "b"}, False),
        ({"w": "a"}, True),
        ({"w": "a", "v": "c"}, True),
        ({"w": "a", "head": "b"}, False),  # v by another name: tied
        (EngineRefused(404, "not_found", "", None), False),  # it does not tell
        ({"x": "a", "y": "b"}, False),
    ],
)
async def test_an_engine_on_other_bytes_than_its_checkpoint_is_stopped_before_its_first_turn(
    tmp_path: Path, held: dict[str, str] | Exception, *, stopped: bool
) -> None:
    section = ReplicaConfig(id=ReplicaId("r"), kind="dedicated", model=str(tmp_path))
    events: list[NodeEvent] = []
    stops: list[str] = []

    async def answer(*_: Any) -> EngineInfo:
        return EngineInfo("rollout", "r", 0)

    async def healthy() -> bool:
        return True

    async def digests(_: float) -> Digests:
        if isinstance(held, Exception):
            raise held
        return Digests(0, held)

    async def checkpoint(_: ReplicaConfig) -> Source:
        return Source(tmp_path, WeightVersion(0), {"w": "a", "v": "b"})

    client = SimpleNamespace(healthy=healthy, info=answer, digests=digests)
    keeper = SimpleNamespace(checkpoint=checkpoint)
    config = Config(replicas=(section,))
    unused = cast("Any", None)
    hosted = engines.Engines(config, unused, unused, events.append, unused, cast("Any", keeper))
    hosted.stop = lambda replica, grace_s, reason: stops.append(reason)  # type: ignore[method-assign]
    await hosted._await_ready(ReplicaId("r"), cast("Any", SimpleNamespace(client=client)), None)
    assert bool(stops) == stopped
    assert events == ([] if stopped else [EngineReady(ReplicaId("r"), WeightVersion(0))])
    assert all(reason.startswith("checkpoint_mismatch: ") for reason in stops)
