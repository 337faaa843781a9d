"""The serving engine's board, and what rollout engines make of it: without vLLM, on real boards."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.boards import BoardPaths, BoardReader, BoardWriter
from rose.core.readings import (
    NEVER,
    GateMode,
    GatePolicy,
    GateReason,
    ReplicaReading,
    ServedRequest,
    SlackReading,
    StepRecord,
    Unknown,
)
from rose.engines.vllm.neighbours import Neighbours
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.slack_board import RankShape, SlackBoard
from rose.engines.vllm.step_gate import WAIT_NS_MAX, GateBells, StepGate
from rose.engines.vllm.step_log import StepLog
from rose.rings import RingReader
from rose.units import NS_PER_S, ms_to_ns

MS = ms_to_ns(1)


def settings(run_dir: Path, **more: Any) -> PluginSettings:
    fields: dict[str, Any] = {
        "role": "serving",
        "name": "serving",
        "run_dir": str(run_dir),
        "token_file": "t",
    }
    return PluginSettings(**(fields | more))


def read(paths: BoardPaths, name: str = "serving") -> SlackReading:
    reading = BoardReader(paths.slack(name), SlackReading).read()
    assert not isinstance(reading, Unknown)
    return reading


class Serving:
    """A serving engine played by the test: its board, and steps of the length wanted."""

    def __init__(self, run_dir: Path, **more: Any) -> None:
        self.board = SlackBoard(settings(run_dir), 100, 512, **more)
        self.running = 0
        self.publish()

    def publish(self) -> None:
        self.board.publish(0, self.running, 90)

    def calibrate(self) -> None:
        """10 ms and 0.1 ms a token or sequence."""
        for load in (1, 2, 8, 32, 64, 128, 256, 512):
            self.board.tracker.observe_step(load, 0, 10 * MS + load * MS // 10)
            self.board.tracker.observe_step(0, load, 10 * MS + load * MS // 10)

    def arrives(self, request_id: str) -> None:
        self.board.tracker.arrived(request_id, time.monotonic_ns(), 20)
        self.running += 1
        self.publish()

    def step(self, **produced: int) -> None:
        now_ns = time.monotonic_ns()
        for request_id in produced:
            self.board.tracker.scheduled(request_id, now_ns)
        self.board.step_began(now_ns, self.board.neighbours_ns(now_ns), 0, len(produced))
        self.publish()
        now_ns = time.monotonic_ns()
        self.board.step_ended(now_ns, self.board.neighbours_ns(now_ns))
        for request_id, tokens in produced.items():
            self.board.tracker.produced(request_id, now_ns, tokens)
        self.publish()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def paths(run_dir: Path) -> BoardPaths:
    return BoardPaths(run_dir)


@pytest.fixture
def rosed(paths: BoardPaths) -> BoardWriter[GatePolicy]:
    writer = BoardWriter(paths.gate("r0"), GatePolicy)
    until_ns = time.monotonic_ns() + 30 * NS_PER_S
    writer.publish(GatePolicy(1, GateMode.SLACK, 512, 0, 0, until_ns, 250 * MS, 60 * MS, 5 * MS))
    return writer


@pytest.fixture
def gate(run_dir: Path, rosed: BoardWriter[GatePolicy]) -> Iterator[StepGate]:
    """That of a rollout engine which takes 5 ms and 0.1 ms a token."""
    gate = StepGate(settings(run_dir, role="rollout", name="r0", serving_name="serving"), step_tokens_max=512)
    teach(gate)
    return gate


def teach(gate: StepGate) -> None:
    for tokens in (1, 2, 8, 32, 64, 128, 256, 512):
        gate._admission.observe_step(tokens, 5 * MS + tokens * MS // 10)


# ---- the board ----------------------------------------------------------------------------------


def test_a_request_s_way_over_the_board(run_dir: Path, paths: BoardPaths) -> None:
    serving = Serving(run_dir)
    serving.calibrate()
    serving.arrives("a")
    waiting = read(paths)
    assert waiting.pending_prefill_tokens == 20
    assert waiting.ttft_deadline_ns < time.monotonic_ns() + (250 - 11) * MS
    assert (waiting.tpot_deadline_ns, waiting.decode_predicted_ns) == (NEVER, 0)
    assert waiting.prefill_predicted_ns >= 11 * MS
    serving.step(a=1)
    decoding = read(paths)
    assert (decoding.ttft_deadline_ns, decoding.pending_prefill_tokens) == (NEVER, 0)
    assert 0 < decoding.tpot_deadline_ns - decoding.step_end_ns < (60 - 10) * MS
    assert decoding.decode_predicted_ns >= 10 * MS
    assert decoding.steps == 1
    assert decoding.in_step == 0


def test_ranks_have_boards_of_their_own(run_dir: Path, paths: BoardPaths) -> None:
    def config(index: int, transfer: Any = None) -> Any:
        return SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=index), kv_transfer_config=transfer
        )

    def role(producer: bool, consumer: bool) -> Any:
        return SimpleNamespace(is_kv_producer=producer, is_kv_consumer=consumer)

    assert RankShape.of(config(0)) == RankShape()
    assert RankShape.of(config(2, role(True, True))) == RankShape(2)
    assert RankShape.of(config(0, role(True, False))) == RankShape(decodes=False)
    assert RankShape.of(config(0, role(False, True))) == RankShape(prefills=False)
    Serving(run_dir, shape=RankShape(2))
    assert read(paths, "serving-dp2").running == 0


def test_a_prefill_rank_tells_of_ttft_only_and_a_decode_rank_of_tpot_only(
    run_dir: Path, paths: BoardPaths
) -> None:
    prefill = Serving(run_dir, shape=RankShape(decodes=False))
    prefill.arrives("a")
    prefill.arrives("b")
    prefill.step(a=1)
    assert read(paths).ttft_deadline_ns != NEVER
    assert read(paths).tpot_deadline_ns == NEVER
    decode = Serving(run_dir, shape=RankShape(rank=1, prefills=False))
    decode.arrives("a")
    decode.arrives("b")
    decode.step(a=1)
    reading = read(paths, "serving-dp1")
    assert (reading.ttft_deadline_ns, reading.pending_prefill_tokens) == (NEVER, 0)
    assert reading.tpot_deadline_ns != NEVER


def test_steps_beside_rollout_are_told_from_those_alone(run_dir: Path, paths: BoardPaths) -> None:
    replica = BoardWriter(paths.replica("r0"), ReplicaReading)
    replica.publish(ReplicaReading(*[0] * len(ReplicaReading._fields)))
    serving = Serving(run_dir)
    serving.board._neighbours.refresh(time.monotonic_ns())
    seen: list[int] = []
    serving.board.tracker.observe_step = lambda *_, co_running: seen.append(co_running)  # type: ignore[method-assign]
    for rollout_runs in (False, True):
        if rollout_runs:
            replica.activity.begin(time.monotonic_ns())
        now_ns = time.monotonic_ns()
        serving.board.step_began(now_ns, serving.board.neighbours_ns(now_ns), 30, 0)
        time.sleep(0.002)
        now_ns = time.monotonic_ns()
        serving.board.step_ended(now_ns, serving.board.neighbours_ns(now_ns))
    assert seen == [0, 1]


# ---- neighbours ---------------------------------------------------------------------------------


def test_activity_adds_up(run_dir: Path, paths: BoardPaths) -> None:
    writer = BoardWriter(paths.replica("r0"), ReplicaReading)
    reader = BoardReader(paths.replica("r0"), ReplicaReading).activity
    assert reader.busy_ns(1000) == 0
    writer.activity.begin(1000)
    assert reader.busy_ns(1500) == 500
    writer.activity.begin(1600)  # a second step in flight
    writer.activity.end(2000, more=True)
    assert reader.busy_ns(2100) == 1100
    writer.activity.end(2200, more=False)
    assert reader.busy_ns(9000) == 1200
    writer.activity.begin(9100)
    assert BoardWriter(paths.replica("r0"), ReplicaReading).activity.busy_ns(9900) == 1200


def test_only_live_neighbours_count(run_dir: Path, paths: BoardPaths) -> None:
    neighbours = Neighbours(run_dir)
    neighbours.refresh(time.monotonic_ns())
    assert neighbours.busy_ns(5) == 0
    writer = BoardWriter(paths.replica("r0"), ReplicaReading)
    writer.publish(ReplicaReading(*[0] * len(ReplicaReading._fields)))
    writer.activity.begin(1)
    (run_dir / "replica-r1.board").write_bytes(b"short")
    neighbours.refresh(time.monotonic_ns())
    assert neighbours.busy_ns(5) == 4
    paths.replica("r0").unlink()
    neighbours.refresh(time.monotonic_ns())
    assert neighbours.busy_ns(5) == 0


# ---- the gate in slack mode ---------------------------------------------------------------------


def test_rollout_runs_beside_decodes_and_stops_for_a_prefill(run_dir: Path, gate: StepGate) -> None:
    serving = Serving(run_dir)
    serving.calibrate()
    assert gate.decide(time.monotonic_ns()).reason == GateReason.OPEN_IDLE
    serving.arrives("a")
    assert not gate.decide(time.monotonic_ns()).open
    serving.step(a=1)
    assert gate.decide(time.monotonic_ns()).reason == GateReason.OPEN_SLACK
    serving.arrives("b")
    assert not gate.decide(time.monotonic_ns()).open


def test_tokens_wake_a_gate_that_waits_for_slack(run_dir: Path, gate: StepGate) -> None:
    serving = Serving(run_dir)
    serving.calibrate()
    serving.arrives("a")
    serving.step(a=1)
    time.sleep(0.05)  # 60 ms budget, of which decoding takes 10 ms
    serving.board._bells.refresh(time.monotonic_ns())
    closed = gate.decide(time.monotonic_ns())
    assert closed.reason == GateReason.SLACK_TOO_SMALL
    timer = threading.Timer(0.01, lambda: serving.step(a=1))
    timer.start()
    admission, slept_ns = gate.wait_until_open(closed)
    timer.join()
    assert admission.reason == GateReason.OPEN_SLACK
    assert slept_ns < WAIT_NS_MAX


def test_nudges_cost_nothing_while_nobody_waits_for_slack(
    run_dir: Path, rosed: BoardWriter[GatePolicy], gate: StepGate
) -> None:
    bells = GateBells(run_dir)
    bells.refresh(time.monotonic_ns())
    before = rosed.bell.count
    bells.nudge()
    assert rosed.bell.count == before
    rosed.bell.awaited = True
    bells.nudge()
    assert rosed.bell.count != before
    assert rosed.bell.rings == before & 0xFFFF


def test_a_nudge_with_the_gate_still_closed_does_not_end_the_wait(
    run_dir: Path, rosed: BoardWriter[GatePolicy], gate: StepGate
) -> None:
    serving = Serving(run_dir)
    serving.arrives("a")
    bells = GateBells(run_dir)
    bells.refresh(time.monotonic_ns())
    stop = threading.Event()

    def nudge() -> None:
        while not stop.wait(0.002):
            bells.nudge()

    thread = threading.Thread(target=nudge)
    thread.start()
    try:
        admission, slept_ns = gate.wait_until_open(gate.decide(time.monotonic_ns()))
    finally:
        stop.set()
        thread.join()
    assert not admission.open
    assert slept_ns >= WAIT_NS_MAX // 2
    assert not rosed.bell.awaited


def test_steps_in_flight_are_paid_for(run_dir: Path, gate: StepGate) -> None:
    serving = Serving(run_dir)
    serving.calibrate()
    serving.arrives("a")
    serving.step(a=1)
    now_ns = time.monotonic_ns()
    step = gate.step_began(200, now_ns)  # 25 ms
    alone = gate.decide(now_ns)
    behind = gate.decide(now_ns, [step])
    assert 0 < behind.tokens < alone.tokens - 150


def test_a_step_in_flight_behind_another_needs_its_whole_time_after_it(gate: StepGate) -> None:
    """It was given out long ago, and has not had the device yet."""
    step_ns = gate._admission.latency.predict_ns(200)
    first = gate.step_began(200, NS_PER_S)
    second = gate.step_began(200, NS_PER_S + 1000)
    left_ns = ms_to_ns(2)
    assert gate._ahead_ns([], NS_PER_S) == 0
    assert gate._ahead_ns([first], NS_PER_S + step_ns - left_ns) == left_ns
    assert gate._ahead_ns([first, second], NS_PER_S + step_ns - left_ns) == left_ns + step_ns
    late_ns = 3 * NS_PER_S
    assert gate._ahead_ns([first], late_ns) == 0
    assert gate._ahead_ns([first, second], late_ns) == step_ns


def test_a_replica_over_two_devices_obeys_both_boards(run_dir: Path, rosed: Any) -> None:
    both = settings(run_dir, role="rollout", name="r0", serving_name="serving,serving-dp1")
    gate = StepGate(both, step_tokens_max=512)
    teach(gate)
    first = Serving(run_dir)
    assert gate.decide(time.monotonic_ns()).reason == GateReason.BOARD_UNKNOWN
    second = Serving(run_dir, shape=RankShape(rank=1))
    time.sleep(0.06)  # a board that was not there is looked for again
    assert gate.decide(time.monotonic_ns()).reason == GateReason.OPEN_IDLE
    second.arrives("a")
    assert not gate.decide(time.monotonic_ns()).open
    for serving in (first, second):
        serving.calibrate()
    second.step(a=1)
    assert gate.decide(time.monotonic_ns()).reason == GateReason.OPEN_SLACK


def test_only_steps_beside_an_idle_serving_engine_teach_what_a_step_takes_alone(
    run_dir: Path, gate: StepGate
) -> None:
    serving = Serving(run_dir)
    seen: list[int] = []
    gate._admission.observe_step = lambda *_, co_running: seen.append(co_running)  # type: ignore[method-assign]
    for serving_steps in (False, True):
        gate.decide(time.monotonic_ns())
        step = gate.step_began(32 + serving_steps, time.monotonic_ns())  # two alike in a row teach once
        if serving_steps:
            serving.step()
        gate.step_ended(step, 8 * MS)
        gate.decide(time.monotonic_ns())
        gate.settle(time.monotonic_ns())
    assert seen == [0, 1]


# ---- what rosed's SLO guard is told ---------------------------------------------------------------


def test_each_request_that_ends_is_logged_with_what_it_got(run_dir: Path) -> None:
    serving = Serving(run_dir)
    ring = RingReader(BoardPaths(run_dir).served("serving"), ServedRequest)
    for name in ("a", "b", "waiting"):
        serving.arrives(name)
    serving.step(a=1, b=1)
    tracker = serving.board.tracker
    now_ns = time.monotonic_ns()
    tracker.round_produced(now_ns)
    tracker.round_produced(now_ns + MS)
    serving.board.finished("a")
    tracker.produced("b", now_ns + 3 * MS, 2)
    for name in ("b", "waiting", "stranger"):
        serving.board.finished(name)
    a, b, waiting = ring.fetch()
    assert [each.number for each in (a, b, waiting)] == [1, 2, 3]
    assert (a.tokens, a.last_ns) == (3, now_ns + MS)
    assert (b.tokens, b.last_ns) == (5, now_ns + 3 * MS)
    assert a.arrival_ns < a.first_ns <= now_ns
    assert (waiting.first_ns, waiting.tokens) == (0, 0)
    assert waiting.last_ns >= now_ns
    assert (a.ttft_budget_ns, a.tpot_budget_ns) == (ms_to_ns(250), ms_to_ns(60))


def test_steps_are_logged_for_each_reader_that_wants_them(run_dir: Path) -> None:
    paths = BoardPaths(run_dir)
    both = StepLog(settings(run_dir, step_log=True, lent_log=True), "r")
    both.ended(1, 2, 3)
    for path in (paths.steps("r"), paths.lent_steps("r")):
        assert RingReader(path, StepRecord).fetch() == [StepRecord(1, 1, 2, 3)]
    StepLog(settings(run_dir), "quiet").ended(1, 2, 3)
    assert not paths.steps("quiet").exists()
    assert not paths.lent_steps("quiet").exists()
