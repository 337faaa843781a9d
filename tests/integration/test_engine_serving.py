"""A serving and an opportunistic rollout engine on one core, started as an operator and rosed would."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_world import TOKEN, EnginePair
from rose_daemon.node.inferred import load_sample
from rose_daemon.telemetry.engine_metrics import EngineMetrics
from rose_daemon.telemetry.serving import scrape

from rose.boards import WatchedBoard
from rose.core.inferred import LoadSample
from rose.core.readings import NEVER, GateMode, GateReason, GateTransition, SlackReading, Unknown
from rose.rings import RingReader

pytestmark = pytest.mark.engine

PROMPT = list(range(40, 72))


@pytest.fixture
def strict(engine_pair: EnginePair) -> Iterator[EnginePair]:
    """The pair, with rollout admitted only while serving is idle."""
    engine_pair.gate.set(mode=GateMode.STRICT)
    yield engine_pair
    engine_pair.gate.set(mode=GateMode.OPEN)


class InThread:
    """A call that goes on beside the test."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._answer: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._answer.append(call()))
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(120)
        assert self._answer, "the call never ended"
        return self._answer[0]


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def test_processes_run_where_they_were_placed(engine_pair: EnginePair) -> None:
    for engine in (engine_pair.serving, engine_pair.rollout):
        about = engine.rose("GET", "engine").json()
        worker_cpus = ",".join(map(str, engine_pair.worker_cpus))
        api_cpus = ",".join(map(str, engine_pair.api_cpus))
        for worker in about["workers"]:
            assert status_of(worker["pid"])["Cpus_allowed_list"] == worker_cpus
            for task in Path(f"/proc/{worker['pid']}/task").iterdir():
                assert os.sched_getaffinity(int(task.name)) == set(engine_pair.worker_cpus)
        for process in (about["api_server"], about["core"]):
            assert status_of(process["pid"])["Cpus_allowed_list"] == api_cpus


def test_a_serving_engine_offers_no_weight_update(engine_pair: EnginePair) -> None:
    about = engine_pair.serving.rose("GET", "engine")
    assert about.status_code == 200
    assert about.json()["role"] == "serving"
    assert engine_pair.serving.rose("GET", "engine", token="wrong").status_code == 401
    assert engine_pair.serving.rose("POST", "weights/update", {}).status_code == 404
    assert engine_pair.serving.rose("POST", "abort", {"all": True}).status_code == 404


def test_an_idle_engine_keeps_saying_so(engine_pair: EnginePair) -> None:
    board = WatchedBoard(engine_pair.boards.slack("serving"), SlackReading)
    wait_for(lambda: engine_pair.slack().running == 0, "serving falls idle")
    time.sleep(1.2)  # longer than a board may be old
    reading = board.read(time.monotonic_ns(), 1_000_000_000)
    assert not isinstance(reading, Unknown)
    assert (reading.waiting, reading.running, reading.in_step) == (0, 0, 0)
    assert (reading.ttft_deadline_ns, reading.tpot_deadline_ns) == (NEVER, NEVER)
    assert reading.pending_prefill_tokens == 0


def test_the_board_follows_a_request(engine_pair: EnginePair) -> None:
    before = engine_pair.slack()
    request = InThread(lambda: engine_pair.serving.complete("serving", PROMPT, 200))
    wait_for(lambda: engine_pair.slack().running == 1, "the request runs")
    wait_for(lambda: engine_pair.slack().tpot_deadline_ns != NEVER, "it has a first token")
    during = engine_pair.slack()
    assert during.ttft_deadline_ns == NEVER
    # The next token is due within two TPOT budgets (60 ms) of the latest.
    assert during.tpot_deadline_ns <= during.step_end_ns + 120_000_000
    assert during.kv_used_blocks > 0
    assert len(request.result()["token_ids"]) == 200
    wait_for(lambda: engine_pair.slack().running == 0, "it ended")
    after = engine_pair.slack()
    assert after.arrivals == before.arrivals + 1
    assert after.steps >= before.steps + 200
    assert after.busy_ns > before.busy_ns
    assert 0 < after.prefill_p99_ns < 60_000_000_000
    assert after.kv_used_blocks == 0


@pytest.mark.parametrize(
    ("headers", "gap_budget_ms"),
    [
        ({"x-rose-slo-class": "premium", "x-rose-token": TOKEN}, 60),
        ({"x-rose-slo-class": "premium", "x-rose-token": "guess"}, 120),
        ({"x-rose-slo-class": "gold", "x-rose-token": TOKEN}, 120),
    ],
)
def test_the_class_of_an_authenticated_caller_reaches_the_board(
    engine_pair: EnginePair, headers: dict[str, str], gap_budget_ms: int
) -> None:
    """From the header over the API server to the scheduler: no gap may exceed two TPOT budgets."""
    body = {"model": "serving", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    request = InThread(
        lambda: engine_pair.serving.http.post("/v1/completions", json=body, headers=headers).status_code
    )
    started = engine_pair.slack().steps
    wait_for(lambda: engine_pair.slack().steps > started + 50, "it decodes")
    gaps = []
    while (reading := engine_pair.slack()).tpot_deadline_ns != NEVER:
        gaps.append(reading.tpot_deadline_ns - reading.step_end_ns)
    assert request.result() == 200
    assert max(gaps) <= gap_budget_ms * 1_000_000
    assert max(gaps) > (gap_budget_ms - 60) * 1_000_000
    assert engine_pair.slack().ttft_budget_ns == 100_000_000


def test_a_client_that_leaves_is_forgotten(engine_pair: EnginePair) -> None:
    body = {"model": "serving", "prompt": PROMPT, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with engine_pair.serving.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
        assert engine_pair.slack().running == 1
    wait_for(lambda: engine_pair.slack().running == 0, "the aborted request leaves the board")
    assert engine_pair.slack().tpot_deadline_ns == NEVER


def test_rollout_stands_still_while_serving_works(strict: EnginePair) -> None:
    reference = strict.rollout.complete("rollout", PROMPT, 600)["token_ids"]
    rollout = InThread(lambda: strict.rollout.complete("rollout", PROMPT, 600))
    started = strict.replica().steps
    wait_for(lambda: strict.replica().steps > started + 20, "rollout runs while serving is idle")
    serving = InThread(lambda: strict.serving.complete("serving", PROMPT, 400))
    wait_for(lambda: strict.slack().running == 1, "serving runs")
    wait_for(lambda: strict.replica().gate_open == 0, "the gate closes")
    first = strict.replica()
    assert first.gate_reason in {GateReason.SERVING_RUNNING, GateReason.SERVING_WAITING}
    time.sleep(0.3)
    still_busy = strict.slack().running == 1
    second = strict.replica()
    assert still_busy, "the serving request was too short for this test"
    assert second.steps == first.steps
    assert second.tokens == first.tokens
    assert len(serving.result()["token_ids"]) == 400
    assert rollout.result()["token_ids"] == reference
    assert strict.replica().gate_transitions >= 2


def test_rollout_goes_on_beside_decodes_as_far_as_budgets_allow(strict: EnginePair) -> None:
    """And a gate that opens and closes from step to step changes no token."""
    reference = strict.rollout.complete("rollout", PROMPT, 900)["token_ids"]
    for tokens in range(8, 136, 8):  # let both engines see steps of several sizes alone
        prompt = [(7 * tokens + position) % 250 for position in range(tokens)]  # no prefix of another one
        strict.serving.complete("serving", prompt, 4)
        strict.rollout.complete("rollout", prompt, 4)
    strict.gate.set(mode=GateMode.SLACK)
    serving = InThread(lambda: strict.serving.complete("serving", PROMPT, 400))
    wait_for(lambda: strict.slack().tpot_deadline_ns != NEVER, "serving decodes")
    assert strict.slack().decode_predicted_ns > 0
    rollout = InThread(lambda: strict.rollout.complete("rollout", PROMPT, 900))
    before = strict.replica()
    wait_for(lambda: strict.replica().gate_reason == GateReason.OPEN_SLACK, "the gate opens", 10)
    wait_for(lambda: strict.replica().steps > before.steps + 20, "rollout runs beside it", 10)
    assert strict.slack().running == 1, "the serving request was too short for this test"
    assert len(serving.result()["token_ids"]) == 400
    assert rollout.result()["token_ids"] == reference
    ring = RingReader(strict.boards.transitions("r0"), GateTransition)
    transitions = ring.fetch()
    assert ring.torn == 0
    opened = [each for each in transitions if each.reason == GateReason.OPEN_SLACK]
    assert opened
    assert all(each.at_ns < each.tpot_deadline_ns and each.waiting == 0 for each in opened)


def test_the_gate_closes_when_rosed_stops_renewing(engine_pair: EnginePair) -> None:
    engine_pair.gate.pause()
    try:
        wait_for(lambda: engine_pair.replica().gate_open == 0, "the lease runs out", 10)
        assert engine_pair.replica().gate_reason == GateReason.ROSED_GONE
    finally:
        engine_pair.gate.set(mode=GateMode.OPEN)
    wait_for(lambda: engine_pair.replica().gate_open == 1, "the gate opens again", 10)


def test_the_gate_closes_when_serving_falls_silent(strict: EnginePair) -> None:
    """A stopped process is the same to its neighbours as one that hangs."""
    core = strict.serving.rose("GET", "engine").json()["core"]["pid"]
    wait_for(lambda: strict.replica().gate_open == 1, "the gate opens while serving is idle", 10)
    os.kill(core, 19)  # SIGSTOP
    try:
        wait_for(lambda: strict.replica().gate_open == 0, "the gate closes", 10)
        assert strict.replica().gate_reason == GateReason.BOARD_UNKNOWN
    finally:
        os.kill(core, 18)  # SIGCONT
    wait_for(lambda: strict.replica().gate_open == 1, "the gate opens again", 10)


def test_a_kv_cut_reaches_the_client_over_http(engine_pair: EnginePair) -> None:
    request = InThread(lambda: engine_pair.rollout.complete("rollout", PROMPT, 1800))
    wait_for(lambda: engine_pair.replica().kv_used_blocks >= 6, "the request holds blocks")
    engine_pair.gate.set(kv_budget_blocks=3)
    try:
        choice = request.result()
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "rose:kv_budget_cut")
        assert len(choice["token_ids"]) > 100
        wait_for(lambda: engine_pair.replica().kv_budget_blocks == 3, "the cut is reported", 5)
        refused = engine_pair.rollout.complete("rollout", list(range(200)), 8)
        assert (refused["finish_reason"], refused["stop_reason"]) == ("abort", "rose:over_budget")
    finally:
        engine_pair.gate.set(kv_budget_blocks=0)
    assert engine_pair.rollout.complete("rollout", list(range(200)), 8)["finish_reason"] == "length"


def test_a_request_that_no_budget_could_hold_is_an_error(engine_pair: EnginePair) -> None:
    body = {"model": "rollout", "prompt": [7] * 2100, "max_tokens": 64}
    assert engine_pair.rollout.http.post("/v1/completions", json=body).status_code == 400


async def test_the_metrics_of_this_release_are_all_understood(engine_pair: EnginePair) -> None:
    engine_pair.serving.complete("serving", PROMPT, 4)
    url = engine_pair.serving.url
    async with aiohttp.ClientSession() as session:
        metrics = await scrape(session, url, 10)
        assert isinstance(metrics, EngineMetrics)
        assert [signal for signal in metrics if isinstance(signal, Unknown)] == []
        assert isinstance(load_sample(metrics), LoadSample)
        again = await scrape(session, url, 10)
    assert isinstance(again, EngineMetrics)
    assert (again.running, again.waiting, again.tokens) == (0, 0, metrics.tokens), "it is idle"
