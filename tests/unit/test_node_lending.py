"""The lending desk's own parts: what it reads of the engines, and the operator's switch."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rose_daemon.node.lending import LendingDesk, StepTail, without_lent

from rose import audit, config, switch
from rose.boards import BoardPaths
from rose.core.attribution import Span
from rose.core.events import LendingDecided, NodeEvent
from rose.core.readings import GateReason, ServedRequest, StepRecord
from rose.errors import RoseError
from rose.rings import RECORDS, RingWriter
from rose.units import NS_PER_MS, NS_PER_S

S = NS_PER_S


def record(number: int, end_ns: int) -> StepRecord:
    return StepRecord(number, end_ns - NS_PER_MS, end_ns, 1)


def test_what_is_missing_of_the_steps_is_known(tmp_path: Path) -> None:
    tail = StepTail(tmp_path / "ring")
    assert tail.fetch(1 * S, 0, False) == ([], None), "no engine, no steps"
    assert tail.fetch(2 * S, 11, False) == ([], None), "it loads"
    assert tail.fetch(3 * S, 11, True) == ([], Span(0, 3 * S)), "it runs, and logs nothing"
    ring = RingWriter(tmp_path / "ring", StepRecord)
    ring.write(record(1, 4 * S))
    assert tail.fetch(5 * S, 11, True) == ([record(1, 4 * S)], None)
    for number in range(RECORDS + 1):
        ring.write(record(number, 6 * S))
    steps, gap = tail.fetch(7 * S, 11, True)
    assert (len(steps), gap) == (RECORDS, Span(4 * S, 7 * S))
    assert tail.fetch(8 * S, 12, False) == ([], Span(6 * S, 8 * S)), (
        "a step may have died with the first engine"
    )
    assert tail.fetch(100 * S, 0, False) == ([], Span(6 * S, 100 * S))
    assert tail.fetch(200 * S, 0, False) == ([], None)


class World:
    """A desk whose machine only listens."""

    def __init__(self, directory: Path, **lending: Any) -> None:
        self.state, self.run = directory / "state", directory / "run"
        self.state.mkdir(exist_ok=True)
        self.run.mkdir(exist_ok=True)
        self.config = self.configured(directory, **lending)
        self.heard: list[NodeEvent] = []
        machine: Any = SimpleNamespace(replicas={})
        engines: Any = SimpleNamespace(get=lambda _: None)
        self.desk = LendingDesk(self.config, self.heard.append, machine, engines)

    @staticmethod
    def configured(directory: Path, **lending: Any) -> config.Config:
        document: dict[str, Any] = {
            "node": {"state_dir": str(directory / "state"), "run_dir": str(directory / "run")},
            "serving": {"url": "http://127.0.0.1:9"},
            "lending": {"switchback_share": 0, "drill_period_s": 0} | lending,
        }
        return config.build(document, "test")

    @property
    def decided(self) -> list[int | None]:
        return [event.closed for event in self.heard if isinstance(event, LendingDecided)]


def test_the_switch_is_kept_and_what_cannot_be_read_is_off(tmp_path: Path) -> None:
    first = World(tmp_path)
    first.desk.begin()
    first.desk.switch(off=True, reset=False)
    assert first.decided == [None, GateReason.LENDING_OFF]
    second = World(tmp_path)
    second.desk.begin()
    second.desk.switch(off=False, reset=False)
    assert second.decided == [GateReason.LENDING_OFF, None]
    for damage in (b"", b"{", b"[]", b'{"off":"no","at_s":1}'):
        (second.state / switch.NAME).write_bytes(damage)
        third = World(tmp_path)
        third.desk.begin()
        assert third.decided == [GateReason.LENDING_OFF], damage


def test_off_works_where_it_cannot_be_kept_and_on_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    world.desk.begin()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RoseError, match=r"lending is off, but .*No space left"):
        world.desk.switch(off=True, reset=False)
    with pytest.raises(RoseError, match="stays as it was"):
        world.desk.switch(off=False, reset=False)
    assert world.decided == [None, GateReason.LENDING_OFF]
    assert not (world.state / switch.NAME).exists()


def test_a_killed_rosed_loses_no_harm(tmp_path: Path) -> None:
    """Late requests are written one by one, the sums once a minute."""
    first = World(tmp_path)
    first.desk.begin()
    began_ns = first.desk.lender._jury._began_ns
    ring = RingWriter(BoardPaths(first.run).served("serving"), ServedRequest)
    first.desk.lender.gap(Span(began_ns, began_ns + 60 * S))
    for number in range(5):
        ring.write(ServedRequest(number, began_ns, began_ns + S, began_ns + S, 1, NS_PER_MS, NS_PER_MS))
    first.desk.look(began_ns + 10 * S)
    assert first.decided == [None, GateReason.ERROR_BUDGET_SPENT]
    second = World(tmp_path)
    second.desk.begin()
    assert second.desk.lender.budget.counts.unknown == 5
    assert second.decided == [GateReason.ERROR_BUDGET_SPENT]
    second.desk.switch(off=False, reset=True)
    second.desk.close()
    third = World(tmp_path)
    third.desk.begin()
    assert third.decided == [None], "what the operator forgave stays forgiven"
    assert any(isinstance(line, audit.Reset) for line in audit.read(third.state, 0))


def test_the_switchs_file_says_since_when(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.desk.switch(off=True, reset=False)
    kept = msgspec.json.decode((world.state / switch.NAME).read_bytes(), type=switch.Switch)
    assert kept.off
    assert kept.at_s > 0


def test_a_switch_that_was_set_while_no_rosed_ran_counts(tmp_path: Path) -> None:
    first = World(tmp_path)
    first.desk.begin()
    first.desk.close()
    switch.put(first.state, off=True)
    second = World(tmp_path)
    second.desk.begin()
    assert second.decided == [GateReason.LENDING_OFF]


def test_a_host_without_a_lent_engine_lent_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, switchback_share=0.5, switchback_window_s=1)
    world.desk.begin()
    for second in range(30):
        world.desk.look(time.monotonic_ns() + second * S)
    world.desk.close()
    lines = audit.read(world.state, 0)
    assert not [line for line in lines if isinstance(line, audit.Compared)]
    found = audit.summary(lines)
    assert (found.minutes_lent, found.windows) == (0, [])
    assert found.minutes > 0


def test_settings_that_are_read_again_count(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.desk.begin()
    hours = "00:00-00:01" if 6 <= time.localtime().tm_hour < 18 else "12:00-12:01"
    outside = World.configured(tmp_path, hours=[hours], harm_share_max=0.01)
    world.desk.reconfigure(outside)
    assert world.decided == [None, GateReason.OUTSIDE_HOURS]
    assert world.desk.lender.view().harm_share_max == 0.01
    world.desk.reconfigure(World.configured(tmp_path, mode="observe"))
    assert world.decided[-1] == GateReason.LENDING_OFF
    world.desk.reconfigure(World.configured(tmp_path))
    assert world.decided[-1] == GateReason.LENDING_OFF, "what would be lent to was never started"


def test_who_observes_has_no_lent_replicas() -> None:
    replicas = [
        {"id": "opp", "kind": "opportunistic", "model": "m"},
        {"id": "ded", "kind": "dedicated", "model": "m"},
    ]
    document: dict[str, Any] = {"serving": {"url": "http://127.0.0.1:9"}, "replicas": replicas}
    lends = config.build(document, "test")
    assert without_lent(lends) is lends
    observes = config.build(document | {"lending": {"mode": "observe"}}, "test")
    assert [section.id for section in without_lent(observes).replicas] == ["ded"]


def test_what_is_not_judged_yet_at_the_end_is_judged_then(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.desk.begin()
    now_ns = time.monotonic_ns()
    ring = RingWriter(BoardPaths(world.run).served("serving"), ServedRequest)
    ring.write(ServedRequest(1, now_ns, now_ns + 5, now_ns + 5, 1, 1, 1))
    world.desk.close()
    (minute,) = [line for line in audit.read(world.state, 0) if isinstance(line, audit.Minute)]
    assert (minute.requests, minute.late_by_serving) == (1, 1)
