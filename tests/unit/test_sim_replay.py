"""Other policies on a recorded journal."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from rose_sim.replay import parse, replay
from rose_sim.replay_command import app
from typer.testing import CliRunner

from rose.core.effects import NodeEffect, PublishGate
from rose.core.events import MemoryObserved, NodeEvent, ReplicaObserved, ServingObserved, StepBegan
from rose.core.readings import NEVER, GateMode, GatePolicy, GateReason, ReplicaReading, SlackReading, Unknown
from rose.errors import ConfigError
from rose.journals import Entry
from rose.units import JobId, ReplicaId, WeightVersion

MS, REPLICA = 1_000_000, ReplicaId("r")
POLICY = GatePolicy(1, int(GateMode.STRICT), 512, 0, 0, 0, 250 * MS, 60 * MS, 5 * MS)
IDLE = SlackReading(**dict.fromkeys(SlackReading._fields, 0))._replace(
    ttft_deadline_ns=NEVER, tpot_deadline_ns=NEVER, prefill_predicted_ns=30 * MS
)
READING = ReplicaReading(**dict.fromkeys(ReplicaReading._fields, 0))._replace(
    kv_total_blocks=100, gate_open=1
)
GB = 10**9


def busy(now_ns: int, slack_ms: int) -> SlackReading:
    return IDLE._replace(
        stamp_ns=now_ns, running=1, decode_predicted_ns=6 * MS, tpot_deadline_ns=now_ns + slack_ms * MS
    )


class Recording:
    """Writes a journal as rosed does."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "journal.jsonl"
        self.now_ns = 10**12
        self.lines: list[bytes] = []

    def add(self, event: NodeEvent, *effects: NodeEffect, after_ms: int = 0) -> None:
        self.now_ns += after_ms * MS
        self.lines.append(msgspec.json.encode(Entry(self.now_ns, event, effects)) + b"\n")
        self.path.write_bytes(b"".join(self.lines))

    def serving(self, slack: SlackReading | Unknown, *effects: NodeEffect, after_ms: int = 100) -> None:
        self.now_ns += after_ms * MS
        known = slack if isinstance(slack, Unknown) else slack._replace(stamp_ns=self.now_ns)
        self.add(ServingObserved(known, True), *effects)

    def steps_took(self, one_ms: int, many_ms: int) -> None:
        line = {"replica": REPLICA, "reason": "open_idle",
                "transition": {"step_ns": one_ms * MS, "step_512_ns": many_ms * MS}}  # fmt: skip
        self.path.with_name("gates.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    """Half a second idle, half a second of decodes with 100 ms of slack each time."""
    made = Recording(tmp_path)
    made.serving(IDLE, PublishGate(REPLICA, POLICY))
    for _ in range(4):
        made.serving(IDLE)
    for _ in range(6):
        made.now_ns += 100 * MS
        made.serving(busy(made.now_ns, 100), after_ms=0)
    return made


def shares(path: Path, *policies: str) -> dict[str, float]:
    found = replay(path, [parse(text) for text in policies])["replicas"][str(REPLICA)]["policies"]
    return {row["policy"]: row["open_share"] for row in found}


def test_slack_would_have_been_open_beside_decodes(recording: Recording) -> None:
    recording.steps_took(5, 40)
    found = shares(recording.path, "recorded", "strict", "slack", "open", "closed")
    assert found["recorded"] == found["strict"] == pytest.approx(0.5)
    assert found["strict"] < found["slack"] < 1
    assert found["open"] == 1
    assert found["closed"] == 0
    assert shares(recording.path, "slack,margin_ms=200")["slack,margin_ms=200"] < found["slack"]


def test_without_step_times_slack_decides_as_strict(recording: Recording) -> None:
    found = shares(recording.path, "strict", "slack")
    assert found["strict"] == found["slack"]


def test_what_is_unknown_is_closed_and_a_gap_is_not_counted(recording: Recording) -> None:
    for _ in range(10):
        recording.serving(Unknown("board_stale"))
    recording.serving(IDLE, after_ms=3_600_000)
    assert shares(recording.path, "strict")["strict"] == pytest.approx(0.5 / 3.0, abs=0.01)


def test_time_without_an_engine_is_not_counted(recording: Recording) -> None:
    before = shares(recording.path, "strict")
    recording.add(ReplicaObserved(REPLICA, Unknown("board_missing")))
    for _ in range(20):
        recording.serving(IDLE)
    after = shares(recording.path, "strict")
    assert after["strict"] == pytest.approx(before["strict"], abs=0.05)


def test_a_gate_that_was_closed_for_another_reason_stays_closed(recording: Recording) -> None:
    shut = POLICY._replace(mode=int(GateMode.CLOSED), closed_reason=int(GateReason.MEMORY_UNKNOWN))
    recording.serving(IDLE, PublishGate(REPLICA, shut))
    recording.serving(IDLE, after_ms=1000)
    recording.serving(IDLE, after_ms=1000)
    assert shares(recording.path, "strict")["strict"] < 0.3


def test_more_headroom_would_have_cut_and_a_step_thaws(recording: Recording) -> None:
    recording.add(ReplicaObserved(REPLICA, READING))
    recording.add(MemoryObserved(30 * GB, 25 * GB, 100 * GB))
    recording.add(MemoryObserved(31 * GB, 24 * GB, 100 * GB))
    recording.add(StepBegan(JobId("j"), 2, WeightVersion(2)))
    recording.add(MemoryObserved(31 * GB, 24 * GB, 100 * GB))
    rows = replay(recording.path, [parse(text) for text in ("strict", "strict,headroom_share=0.3")])
    cuts = [row["cuts"] for row in rows["replicas"][str(REPLICA)]["policies"]]
    assert cuts == [0, 2]
    assert rows["replicas"][str(REPLICA)]["policies"][1]["kv_blocks_min"] == 25


def test_a_journal_is_read_around_what_a_disk_lost_and_another_file_is_refused(recording: Recording) -> None:
    whole = replay(recording.path, [parse("strict")])
    assert whole["lines_damaged"] == 0
    lost = b"\n".join([b"", recording.lines[1][:20], b"{}", b"\xff", b""])
    recording.path.write_bytes(recording.lines[0] + lost + b"".join(recording.lines[1:]) + b'{"now_ns": 1')
    recording.path.with_name("gates.jsonl").write_bytes(b"\n{}\n")
    found = replay(recording.path, [parse("strict")])
    assert found | {"lines_damaged": 0} == whole
    assert found["lines_damaged"] == 5
    recording.path.write_bytes(b'\n{"some": "thing"}\n')
    with pytest.raises(ConfigError, match=r"journal\.jsonl:1: not an entry"):
        replay(recording.path, [parse("strict")])
    recording.path.write_bytes(b"")
    with pytest.raises(ConfigError, match="no entry"):
        replay(recording.path, [parse("strict")])
    with pytest.raises(ConfigError, match="cannot be read"):
        replay(recording.path.parent / "nothing", [parse("strict")])


@pytest.mark.parametrize("text", ["fast", "slack,margin_ms", "slack,margin_ms=x", "slack,depth=1",
                                  "strict,headroom_share=2", "strict,token_cap=-1"])  # fmt: skip
def test_a_policy_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text)


def test_the_command_shows_policies_side_by_side(recording: Recording, tmp_path: Path) -> None:
    recording.steps_took(5, 40)
    out = tmp_path / "r.json"
    arguments = [str(recording.path), "--policy", "strict", "--policy", "slack", "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "slack" in result.output
    rows = json.loads(out.read_text())["replicas"][str(REPLICA)]["policies"]
    assert [row["policy"] for row in rows] == ["strict", "slack"]
