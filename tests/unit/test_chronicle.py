"""What `rose explain` can tell of a turn."""

from __future__ import annotations

import itertools
from typing import Any

from rose_daemon.scheduler.chronicle import Chronicle

from rose.core.cluster import ClusterMachine, ClusterSettings
from rose.core.events import (
    ClusterEvent,
    JobSubmitted,
    NodeRegistered,
    ReplicaReport,
    TurnArrived,
    TurnCancelled,
    TurnFinished,
    TurnInterrupted,
    TurnRefused,
)
from rose.units import JobId, NodeId, ReplicaId, TrajectoryId, TurnId, WeightVersion

BACK = "the replica that interrupted it last; its back-off is over and no other takes the turn"
JOB, REPLICA = JobId("j"), ReplicaId("r")
REPORT = ReplicaReport(REPLICA, "dedicated", "ready", "http://h", "m", WeightVersion(0))


class World:
    """The real machine, with a chronicle beside it."""

    def __init__(self, turns_max: int = 100) -> None:
        ticks = itertools.count(1)
        self.machine = ClusterMachine(ClusterSettings(backoff_ns=0))
        self.chronicle = Chronicle(lambda: float(next(ticks)), turns_max)

    def do(self, event: ClusterEvent, now_ns: int = 0) -> None:
        self.chronicle.note(event, self.machine.step(event, now_ns))

    def node(self) -> None:
        self.do(NodeRegistered(NodeId("n"), "s", (REPORT,)))

    def turn(self, name: str, **more: Any) -> None:
        self.do(TurnArrived(TurnId(f"j/{name}/0"), JOB, TrajectoryId("t"), 10, 20, **more))

    def codes(self, name: str) -> list[list[str]]:
        return [[line["code"] for line in run["lines"]] for run in self.chronicle.find(name)]


def test_the_life_of_a_turn() -> None:
    world = World()
    world.do(JobSubmitted(JOB, "m", 1, 0))
    world.turn("a")
    world.node()
    world.do(TurnInterrupted(TurnId("j/a/0"), REPLICA, "rose:kv_budget_cut", 7))
    world.do(TurnFinished(TurnId("j/a/0"), REPLICA, 13))
    (run,) = world.chronicle.find("a")
    assert (run["turn"], run["job"], run["trajectory"]) == ("a", "j", "t")
    assert [(line["code"], line["text"]) for line in run["lines"]] == [
        ("arrived", "10 prompt tokens, at most 20 more"),
        ("queued", "no replica takes a turn of its job now"),
        ("sent", "to r, attempt 1: the least loaded dedicated replica"),
        ("interrupted", "on r: rose:kv_budget_cut; 7 tokens of this attempt are kept"),
        ("sent", f"to r, attempt 2: {BACK}"),
        ("finished", "on r with 13 tokens in this attempt"),
    ]
    times = [line["at_s"] for line in run["lines"]]
    assert times == sorted(times)


def test_other_ends() -> None:
    world = World()
    world.turn("nobody")
    world.do(JobSubmitted(JOB, "m", 1, 0))
    world.node()
    for name in ("refused", "cancelled"):
        world.turn(name)
    world.do(TurnRefused(TurnId("j/refused/0"), REPLICA, "400"))
    world.do(TurnCancelled(TurnId("j/cancelled/0")))
    assert world.codes("nobody") == [["arrived", "failed"]]
    assert world.codes("refused") == [["arrived", "sent", "refused"]]
    assert world.codes("cancelled") == [["arrived", "sent", "cancelled", "stopped"]]


def test_every_rule_of_routing_is_put_into_words() -> None:
    from rose_daemon.scheduler import chronicle  # noqa: PLC0415

    from rose.core import routing  # noqa: PLC0415

    rules = {value for name, value in vars(routing).items() if name.isupper() and isinstance(value, str)}
    assert {"affinity", "returned"} < rules == set(chronicle._REASONS)


def test_runs_of_one_id_are_told_apart_and_old_turns_are_forgotten() -> None:
    world = World(turns_max=3)
    for run in range(2):
        world.do(TurnArrived(TurnId(f"j/a/x/{run}"), JOB, TrajectoryId("t"), 1, 1))
    assert len(world.chronicle.find("a/x")) == 2
    for name in "bcd":
        world.turn(name)
    assert world.chronicle.find("a/x") == []
    assert world.chronicle.find("never") == []
