"""Nodes come, fall silent, come back, and claim what they may."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rose.core.events import NodeHeartbeat, NodeLeft, NodeRegistered, ReplicaDrainRequested, ReplicaReport
from rose.core.membership import Change, Membership, NodeState
from rose.core.readings import NEVER
from rose.units import NS_PER_S, NodeId, ReplicaId, WeightVersion

S = NS_PER_S


def report(name: str = "r0", **changes: Any) -> ReplicaReport:
    base = ReplicaReport(ReplicaId(name), "dedicated", "ready", f"http://h/{name}", "m", WeightVersion(0))
    return msgspec.structs.replace(base, **changes)


def registered(node: str, session: str, *replicas: ReplicaReport) -> NodeRegistered:
    return NodeRegistered(NodeId(node), session, replicas)


def beat(node: str, session: str, sequence: int, *replicas: ReplicaReport) -> NodeHeartbeat:
    return NodeHeartbeat(NodeId(node), session, sequence, replicas)


def codes(change: Change) -> list[str]:
    return [say.code for say in change.says]


def state(members: Membership, node: str = "n") -> NodeState:
    return members.nodes[NodeId(node)].state


@pytest.fixture
def members() -> Membership:
    made = Membership(2 * S, 3 * S, 6 * S, 60 * S, 10 * S)
    made.register(registered("n", "s1", report()), 0)
    return made


def version(members: Membership) -> int:
    return members.replicas[ReplicaId("r0")].report.weight_version


def test_a_silent_node_is_stalled_then_suspect_then_dead(members: Membership) -> None:
    seen = []
    for now_s in range(9):
        change = members.expire(now_s * S)
        seen.append((state(members).value, len(change.gone)))
    assert seen == [
        ("alive", 0), ("alive", 0), ("stalled", 0), ("suspect", 0), ("suspect", 0), ("suspect", 0),
        ("dead", 1), ("dead", 0), ("dead", 0),
    ]  # fmt: skip


def test_a_stalled_nodes_replica_takes_no_turns_until_it_is_heard(members: Membership) -> None:
    replica = members.replicas[ReplicaId("r0")]
    assert [known.id for known in members.expire(2 * S).seen] == ["r0"]
    assert replica.unfit_since_ns == 2 * S
    members.heartbeat(beat("n", "s1", 1, report()), 3 * S)
    assert replica.takes_turns
    assert replica.unfit_since_ns is None


def test_a_dead_node_that_speaks_again_is_back_with_its_replicas(members: Membership) -> None:
    members.heartbeat(beat("n", "s1", 1, report()), 0)
    members.expire(6 * S)
    assert not members.replicas
    change = members.heartbeat(beat("n", "s1", 2, report()), 7 * S)
    assert state(members) is NodeState.ALIVE
    assert codes(change) == ["node_alive"]
    assert list(members.replicas) == ["r0"]


def test_the_deadline_is_never_after_the_next_change_of_state(members: Membership) -> None:
    for moment_s, expected in ((0, 2), (2, 3), (3, 6), (6, 60)):
        members.expire(moment_s * S)
        assert members.next_deadline_ns() <= expected * S
    change = members.expire(60 * S)
    assert not change.gone
    assert not members.nodes
    assert members.next_deadline_ns() == NEVER


@pytest.mark.parametrize("sequence", [3, 2, 0, -5])
def test_doubled_and_reordered_heartbeats_are_dropped(members: Membership, sequence: int) -> None:
    members.heartbeat(beat("n", "s1", 3, report(weight_version=3)), S)
    change = members.heartbeat(beat("n", "s1", sequence, report(weight_version=1)), 2 * S)
    assert not change.seen
    assert version(members) == 3
    assert members.nodes[NodeId("n")].heard_ns == S


def test_a_late_copy_of_the_registration_does_not_turn_back_time(members: Membership) -> None:
    members.heartbeat(beat("n", "s1", 0, report(weight_version=3)), S)
    members.register(registered("n", "s1", report()), 2 * S)
    assert version(members) == 3


def test_a_new_session_replaces_the_old_one_for_good(members: Membership) -> None:
    change = members.register(registered("n", "s2", report(weight_version=5)), S)
    assert [(replica.id, reason) for replica, reason in change.gone] == [("r0", "node_restarted")]
    assert members.knows(NodeId("n"), "s2")
    assert not members.knows(NodeId("n"), "s1")
    for late in (
        members.heartbeat(beat("n", "s1", 99, report(weight_version=1)), S),
        members.register(registered("n", "s1", report(weight_version=1)), S),
        members.leave(NodeLeft(NodeId("n"), "s1")),
    ):
        assert late == Change()
    assert version(members) == 5


def test_node_and_session_names_that_are_prefixes_of_each_other_are_apart(members: Membership) -> None:
    members.register(registered("n1", "s1", report("r1")), 0)
    members.register(registered("n", "s12", report("r0")), 0)
    members.register(registered("n12", "s1", report("r12")), 0)
    assert not members.knows(NodeId("n"), "s1")
    members.leave(NodeLeft(NodeId("n1"), "s1"))
    assert list(members.replicas) == ["r0", "r12"]


def test_a_node_that_left_stays_gone_until_a_new_session(members: Membership) -> None:
    change = members.leave(NodeLeft(NodeId("n"), "s1"))
    assert [reason for _, reason in change.gone] == ["node_left"]
    members.heartbeat(beat("n", "s1", 9, report()), S)
    assert not members.replicas
    members.register(registered("n", "s2", report()), S)
    assert list(members.replicas) == ["r0"]
    assert state(members) is NodeState.ALIVE


def test_a_heartbeat_of_an_unknown_node_is_dropped(members: Membership) -> None:
    assert members.heartbeat(beat("other", "s1", 1, report("r9")), 0) == Change()


def test_a_replica_that_is_no_longer_named_is_gone(members: Membership) -> None:
    change = members.heartbeat(beat("n", "s1", 1), S)
    assert [(replica.id, reason) for replica, reason in change.gone] == [("r0", "replica_gone")]


def test_a_replica_that_turns_into_another_one_leaves_first(members: Membership) -> None:
    change = members.heartbeat(beat("n", "s1", 1, report(url="http://h/elsewhere")), S)
    assert [reason for _, reason in change.gone] == ["replica_changed"]
    assert [replica.id for replica in change.seen] == ["r0"]


def test_two_nodes_that_claim_one_replica_are_told_once(members: Membership) -> None:
    first = members.register(registered("thief", "s", report(url="http://evil/")), S)
    assert codes(first) == ["node_registered", "replica_conflict"]
    again = members.heartbeat(beat("thief", "s", 1, report(url="http://evil/")), S)
    assert codes(again) == []
    assert members.replicas[ReplicaId("r0")].node == "n"
    # Once the owner is dead, the claim is good.
    members.expire(2 * S)
    members.heartbeat(beat("thief", "s", 2, report(url="http://new/")), 5 * S)
    members.expire(6 * S)
    members.heartbeat(beat("thief", "s", 3, report(url="http://new/")), 7 * S)
    assert members.replicas[ReplicaId("r0")].node == "thief"


def test_an_operators_drain_outlives_the_nodes_session(members: Membership) -> None:
    members.drain(ReplicaDrainRequested(ReplicaId("r0"), True), 0)
    members.register(registered("n", "s2", report()), S)
    assert not members.replicas[ReplicaId("r0")].takes_turns
    members.drain(ReplicaDrainRequested(ReplicaId("r0"), False), S)
    assert members.replicas[ReplicaId("r0")].takes_turns


def test_draining_a_replica_that_is_not_there_is_reported(members: Membership) -> None:
    assert codes(members.drain(ReplicaDrainRequested(ReplicaId("r"), True), 0)) == ["replica_unknown"]
    assert codes(members.drain(ReplicaDrainRequested(ReplicaId("r"), False), 0)) == ["replica_unknown"]


@pytest.mark.parametrize(
    ("kind", "gate_open", "expected"),
    [
        ("dedicated", None, True),
        ("dedicated", False, False),
        ("opportunistic", None, False),  # unknown is not open
        ("opportunistic", True, True),
        ("opportunistic", False, False),
    ],
)
def test_gate(members: Membership, kind: str, gate_open: bool | None, expected: bool) -> None:
    members.register(registered("n2", "s", report("r2", kind=kind, gate_open=gate_open)), 0)
    assert members.replicas[ReplicaId("r2")].gate_open is expected


@pytest.mark.parametrize(
    ("said", "fit", "takes_turns"),
    [
        ({"state": "ready"}, True, True),
        ({"state": "ready", "updating": True}, True, False),
        ({"state": "updating"}, True, False),
        ({"state": "draining"}, False, False),
        ({"state": "failed"}, False, False),
        ({"state": "a state of a later release"}, False, False),
    ],
)
def test_states(members: Membership, said: dict[str, Any], fit: bool, takes_turns: bool) -> None:
    members.heartbeat(beat("n", "s1", 1, report(**said)), 0)
    replica = members.replicas[ReplicaId("r0")]
    assert (replica.fit, replica.takes_turns) == (fit, takes_turns)


def test_a_gate_is_held_only_when_not_seen_open_for_long(members: Membership) -> None:
    closed, opened = report(gate_open=False), report(gate_open=True)
    replica = members.replicas[ReplicaId("r0")]
    held = []
    for now_s, said in ((1, closed), (9, closed), (10, closed), (11, closed), (12, opened), (13, closed)):
        members.heartbeat(beat("n", "s1", now_s, said), now_s * S)
        held.append(replica.gate_held)
    assert held == [False, False, False, True, False, False]


def test_the_open_clock_stands_while_the_gate_is_closed(members: Membership) -> None:
    replica = members.replicas[ReplicaId("r0")]
    members.heartbeat(beat("n", "s1", 1, report(gate_open=False)), 1 * S)
    assert replica.open_ns(4 * S) == 1 * S
    members.heartbeat(beat("n", "s1", 2, report(gate_open=True)), 4 * S)
    assert replica.open_ns(6 * S) == 3 * S


def test_an_inactive_replica_can_be_leased_and_gets_no_turns_yet(members: Membership) -> None:
    members.register(registered("n9", "s9", report("sleeper", state="inactive", kind="opportunistic")), 1)
    sleeper = members.replicas[ReplicaId("sleeper")]
    assert sleeper.fit
    assert not sleeper.takes_turns


def test_a_drain_from_before_a_restart_waits_for_its_replica() -> None:
    members = Membership(2 * S, 3 * S, 6 * S, 3600 * S, 10 * S)
    assert not members.drain(ReplicaDrainRequested(ReplicaId("r0"), True, restored=True), 0).says
    members.register(registered("n", "s", report()), 0)
    assert not members.replicas[ReplicaId("r0")].takes_turns
