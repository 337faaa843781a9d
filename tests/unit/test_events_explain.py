"""`rose events` and `rose explain gate|late`: read from the journals and from rosed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rose_daemon.node.journal import Journal
from test_cli import STATUS, FakeRosed

from rose import audit, wire
from rose.cli import main as cli
from rose.cli.explain import MEANINGS
from rose.core.effects import NodeEffect, PublishGate, ReportNow, Say, StartEngine, TakeBackMeasured
from rose.core.events import NodeEvent, ReclaimRequested, Tick
from rose.core.readings import GatePolicy, GateReason, GateTransition
from rose.errors import Exit
from rose.journals import DECISIONS, GATES, Entry, GateEntry
from rose.units import NS_PER_S, ReplicaId

R = ReplicaId("opp-0")


class State:
    """A state directory, and `rose` run on it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self._monkeypatch = directory, monkeypatch
        self.config = directory / "rose.toml"
        self.config.write_text(
            f'[node]\nstate_dir = "{directory}"\ncontrol_socket = "{directory / "rosed.sock"}"\n'
        )
        self.decisions = Journal(directory / DECISIONS, 1 << 20)
        self.gates = Journal(directory / GATES, 1 << 20)

    def decided(self, age_s: float, event: NodeEvent, *effects: NodeEffect) -> None:
        self.decisions.append(Entry(time.monotonic_ns() - round(age_s * NS_PER_S), event, effects))
        self.decisions.flush()

    def gate(self, age_s: float, tokens: int, reason: GateReason) -> None:
        words = dict.fromkeys(GateTransition._fields, 0)
        at_ns = time.monotonic_ns() - round(age_s * NS_PER_S)
        words |= {"at_ns": at_ns, "tokens": tokens, "reason": reason, "running": 2}
        self.gates.append(GateEntry.of(R, GateTransition(**words)))
        self.gates.flush()

    def rose(self, *arguments: str) -> int:
        self._monkeypatch.setattr(sys, "argv", ["rose", *arguments, "--config", str(self.config)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    return State(tmp_path, monkeypatch)


def fill(state: State) -> None:
    state.decided(0.9, Tick())
    state.decided(0.8, Tick(), StartEngine(R, 2), ReportNow())
    policy = GatePolicy(7, 1, 512, 0, 3, 0, 1, 1, 1)
    cut = Say("warning", "kv_budget_cut", "KV budget cut from 9 to 4 blocks: drill", R)
    state.decided(0.7, ReclaimRequested(R, "drill"), cut, PublishGate(R, policy))
    state.decided(0.6, Tick(), Say("error", "engine_exited", "engine exited with code 1", "ded-0"))
    state.decided(0.5, Tick(), TakeBackMeasured(R, 3, 55_000_000))


def shown(capsys: Any) -> list[str]:
    return [str(line) for line in capsys.readouterr().out.splitlines()]


def test_decisions_are_told_and_observations_are_not(state: State, capsys: Any) -> None:
    fill(state)
    assert state.rose("events") == 0
    lines = shown(capsys)
    assert len(lines) == 5
    assert "start_engine" in lines[0]
    assert "attempt 2" in lines[0]
    assert "opp-0: KV budget cut from 9 to 4 blocks: drill  (ReclaimRequested)" in lines[1]
    assert "revision 7, mode 1, token_cap 512" in lines[2]
    assert "3 blocks in 55 ms" in lines[4]


@pytest.mark.parametrize(
    ("arguments", "codes"),
    [
        (["--level", "warning"], ["kv_budget_cut", "engine_exited"]),
        (["--level", "error"], ["engine_exited"]),
        (["--code", "publish_gate", "--code", "start_engine"], ["start_engine", "publish_gate"]),
        (["--subject", "ded-0"], ["engine_exited"]),
        (["--limit", "2"], ["engine_exited", "take_back_measured"]),
        (["--code", "nothing"], []),
    ],
)
def test_filters(state: State, capsys: Any, arguments: list[str], codes: list[str]) -> None:
    fill(state)
    assert state.rose("events", "--json", *arguments) == 0
    assert [row["code"] for row in json.loads(capsys.readouterr().out)] == codes


def test_only_what_is_recent_enough_and_of_this_boot(state: State, capsys: Any) -> None:
    say = Say("info", "x", "y")
    state.decided(-1e6, Tick(), say)  # an instant that this boot has not seen
    state.decided(0, Tick(), say)
    assert state.rose("events", "--json", "--since", "1m") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert abs(row["at_s"] - time.time()) < 30
    assert state.rose("events", "--since", "soon") == Exit.USAGE


def test_what_cannot_be_read_is_passed_over(state: State, capsys: Any) -> None:
    fill(state)
    with (state.directory / DECISIONS).open("ab") as file:
        file.write(b'nonsense\n{"now_ns":1,"event":{},"effects":[{"type":"Say"')
    assert state.rose("events", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 5


def test_without_a_journal(tmp_path: Path, state: State, capsys: Any) -> None:
    (tmp_path / DECISIONS).unlink()
    assert state.rose("events") == Exit.NOT_FOUND
    assert "has rosed run here?" in capsys.readouterr().err


def test_gates(state: State, capsys: Any) -> None:
    state.gate(0.9, 512, GateReason.OPEN_IDLE)
    state.gate(0.8, 0, GateReason.SERVING_WAITING)
    assert state.rose("events", "--gates") == 0
    assert "opp-0  open for 512 tokens (open_idle); serving: 0 waiting, 2 running" in shown(capsys)[0]
    assert state.rose("events", "--gates", "--json", "--code", "serving_waiting") == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


# ---- explain ------------------------------------------------------------------------------------


def test_every_reason_has_a_meaning() -> None:
    assert set(MEANINGS) == set(GateReason)


def explaining(state: State, gate: dict[str, Any], **changes: Any) -> None:
    rosed = FakeRosed(state.directory / "rosed.sock")
    (replica,) = STATUS["replicas"]
    body = STATUS | {"replicas": [replica | {"gate": gate}]} | changes
    rosed.reply = wire.pack_line(wire.Reply(body=body))


def test_why_a_gate_is_closed(state: State, capsys: Any) -> None:
    state.gate(0.9, 512, GateReason.OPEN_IDLE)
    state.gate(0.6, 0, GateReason.SERVING_RUNNING)
    lending = {"closed": "error_budget_spent", "text": "error budget spent: 9 of 10"}
    explaining(state, {"open": False, "reason": "error_budget_spent", "mode": "closed"}, lending=lending)
    assert state.rose("explain", "gate") == 0
    text = capsys.readouterr().out
    assert "opp-0: closed (error_budget_spent): rollout made more serving requests late than it may" in text
    assert "lending stopped (error_budget_spent): error budget spent: 9 of 10" in text
    assert "-> `rose audit` shows them" in text
    assert "serving busy, TTFT slack 120 ms" in text
    assert "last five minutes: serving_running" in text
    assert state.rose("explain", "gate", "opp-0", "--json") == 0
    (body,) = json.loads(capsys.readouterr().out)
    assert (body["replica"], body["open"]) == ("opp-0", False)
    assert sum(body["shares"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("unknown: board_missing", "its engine does not say (board_missing), so it counts as closed"),
        ("reason_of_tomorrow", "a reason of another release"),
        ("board_unknown", "unknown is not idle"),
    ],
)
def test_reasons_that_are_not_plain(state: State, capsys: Any, reason: str, says: str) -> None:
    explaining(state, {"open": False, "reason": reason, "mode": "strict"})
    assert state.rose("explain", "gate") == 0
    assert says in capsys.readouterr().out


def test_what_is_not_known(state: State, capsys: Any) -> None:
    explaining(state, {"open": False, "reason": "board_unknown", "mode": "strict"})
    assert state.rose("explain", "gate", "nobody") == Exit.NOT_FOUND
    assert "it has: opp-0" in capsys.readouterr().err
    assert state.rose("explain", "late", "12") == Exit.NOT_FOUND
    assert state.rose("explain", "late", "twelve") == Exit.USAGE
    assert state.rose("explain", "turn-1", "more") == Exit.USAGE
    assert state.rose("explain", "late") == Exit.NOT_FOUND, "nothing measured is not nothing late"
    assert "there is no audit" in capsys.readouterr().err
    (state.directory / "audit.jsonl").touch()
    assert state.rose("explain", "late") == 0
    assert "no serving request was late" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cause", "says"),
    [("rollout", "Rollout's fault"), ("serving", "Serving's own"), ("unknown", "Not known")],
)
def test_why_a_request_was_late(state: State, capsys: Any, cause: str, says: str) -> None:
    line = audit.Late(
        at_s=time.time(), number=12, cause=cause, budget="tpot", overshoot_ms=40, rollout_ms=55, wait_ms=900,
        tokens=20,
    )  # fmt: skip
    (state.directory / audit.NAME).write_bytes(msgspec.json.encode(line) + b"\n")
    assert state.rose("explain", "late", "12") == 0
    text = capsys.readouterr().out
    assert f"request 12 late by {cause}: tpot over by 40 ms, 55 ms of rollout in its wait" in text
    assert says in text
    assert state.rose("explain", "late", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["means"].startswith(says)
