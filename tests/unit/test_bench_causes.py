"""Causes of late requests in the benchmark, injected delays, and the step logs they go by."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rose_daemon.bench import causes, inject
from rose_daemon.bench.inject import Injector
from rose_daemon.bench.runs import Drill, Injection, Mode, Run
from rose_daemon.harness.load import Budgets, RequestRecord
from rose_daemon.harness.steps import StepCollector

from rose.core.attribution import Span
from rose.core.readings import StepRecord
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.step_log import StepLog
from rose.rings import RECORDS, RingWriter
from rose.units import NS_PER_MS

BUDGETS = Budgets(250, 60)


def record(index: int, sent_ms: int, *token_ms: int, error: str = "") -> RequestRecord:
    made = RequestRecord(index, planned_ns=0, prompt_tokens=1, output_tokens=len(token_ms), error=error)
    made.sent_ns = sent_ms * NS_PER_MS
    made.token_ns = [ms * NS_PER_MS for ms in token_ms]
    return made


def run(
    records: list[RequestRecord], rollout_ms: list[tuple[int, int]], gaps: list[Span] | None = None
) -> Run:
    return Run(
        mode=Mode.ROSE_STRICT,
        round=0,
        elapsed_s=10.0,
        records=records,
        rollout_tokens=0,
        serving_busy_share=0,
        rollout_busy_share=0,
        gate_transitions=0,
        started_ns=0,
        ended_ns=10_000 * NS_PER_MS,
        rollout_steps=[
            StepRecord(number, start * NS_PER_MS, end * NS_PER_MS, 1)
            for number, (start, end) in enumerate(rollout_ms)
        ],
        gaps=gaps or [],
    )


LATE = [
    record(0, 0, 200),
    record(1, 0, 300),  # rollout had 60 of its 300 ms
    record(2, 1000, 1400),  # and 50 of these 400, but it was late by 150
    record(3, 2000, 2100, 2300),  # one token took 200 ms, 190 of them rollout's
    record(4, 3000, error="HTTP 500"),
    record(5, 4000, 4300),  # within the gap
]
SHARED = run(LATE, [(100, 160), (1100, 1150), (2110, 2300)], [Span(4000 * NS_PER_MS, 4300 * NS_PER_MS)])


def test_each_late_request_has_a_cause() -> None:
    found = [(one.record.index, one.budget, one.cause) for one in causes.violations(SHARED, BUDGETS)]
    assert found == [
        (1, "ttft", "rollout"),
        (2, "ttft", "serving"),
        (3, "tpot", "rollout"),
        (4, "failed", "failed"),
        (5, "ttft", "unknown"),
    ]
    summary = causes.summary([SHARED, SHARED], BUDGETS)
    assert summary["late_by_cause"] == {"rollout": 4, "serving": 2, "unknown": 2, "failed": 2}
    assert summary["late_by_rollout_share"] == round(4 / 12, 6)
    assert summary["late_by_rollout_ci"][0] < 4 / 12 < summary["late_by_rollout_ci"][1]
    assert causes.summary([], BUDGETS)["late_by_rollout_share"] is None


def test_blamed_requests_are_looked_up_among_those_late_without_rollout() -> None:
    alone = run([record(1, 0, 300), record(2, 1000, 1400), record(3, 2000, 2100, 2150)], [])
    summary = causes.summary([SHARED], BUDGETS, [alone])
    assert (summary["late_by_cause"]["rollout"], summary["late_by_rollout_and_alone"]) == (2, 1)
    assert causes.summary([SHARED], BUDGETS)["late_by_rollout_and_alone"] is None


def test_a_budget_broken_by_a_nanosecond_has_a_cause_too() -> None:
    late = record(0, 0, 250)
    late.token_ns[0] += 1
    slow = record(1, 0, 100, 160, 220)
    slow.token_ns[-1] += 1
    on_time = record(2, 0, 250, 310)
    found = causes.violations(run([late, slow, on_time], []), BUDGETS)
    assert [(one.record.index, one.budget, one.cause) for one in found] == [
        (0, "ttft", "serving"),
        (1, "tpot", "serving"),
    ]


def test_drills_judge_what_met_one_kind_of_injection() -> None:
    def injected(by_rollout: bool, start_ms: int, end_ms: int) -> Injection:
        return Injection(by_rollout, start_ms * NS_PER_MS, end_ms * NS_PER_MS)

    injections = [
        injected(True, 90, 170),
        injected(True, 1300, 1390),
        injected(False, 1600, 1700),
        injected(False, 2150, 2200),
    ]
    found = causes.of_drills([Drill(SHARED, injections)], BUDGETS)
    assert found is not None
    assert found["injected"] == {"by_rollout": 2, "by_serving": 2}
    # 1 rightly blamed, 2 missed, 3 blamed although serving held itself up; 4 and 5 met nothing.
    assert (found["judged"], found["rightly"], found["wrongly"], found["missed"]) == (3, 1, 1, 1)
    assert (found["precision"], found["recall"]) == (0.5, 0.5)
    both = causes.of_drills([Drill(SHARED, [*injections, injected(False, 0, 10)])], BUDGETS)
    assert both is not None
    assert both["judged"] == 2, "who met both kinds tells nothing"
    assert causes.of_drills([], BUDGETS) is None


# ---- injection ----------------------------------------------------------------------------------


@pytest.fixture
def workers() -> Iterator[list[subprocess.Popen[bytes]]]:
    made = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    yield made
    for process in made:
        process.kill()
        process.wait()


def state(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_workers_are_held_and_let_go(
    workers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inject, "PAUSE_S", (0.01, 0.02))
    monkeypatch.setattr(inject, "HOLD_S", (0.05, 0.06))
    serving, rollout = workers
    injector = Injector(1, [serving.pid], [rollout.pid], lambda: True, lambda: True)
    task = asyncio.create_task(injector.run())
    seen: set[tuple[bool, bool]] = set()
    while len(injector.injections) < 12:
        await asyncio.sleep(0.005)
        seen.add((state(serving) == "T", state(rollout) == "T"))
    task.cancel()
    await asyncio.wait({task})
    assert {(False, False), (True, True), (True, False)} <= seen
    assert "T" not in {state(serving), state(rollout)}
    spans = [(one.start_ns, one.end_ns) for one in injector.injections]
    assert spans == sorted(spans)
    assert all(end - start >= 50 * NS_PER_MS for start, end in spans)


async def test_a_hold_counts_as_rollouts_only_with_a_step_in_flight(
    workers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inject, "PAUSE_S", (0.0, 0.001))
    monkeypatch.setattr(inject, "HOLD_S", (0.01, 0.02))
    in_flight = itertools.cycle([True, False])  # always just over
    injector = Injector(1, [workers[0].pid], [workers[1].pid], lambda: True, lambda: next(in_flight))
    task = asyncio.create_task(injector.run())
    while len(injector.injections) < 8:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.wait({task})
    assert not any(one.by_rollout for one in injector.injections)


# ---- step logs ----------------------------------------------------------------------------------


def test_steps_are_logged_where_asked_for(tmp_path: Path) -> None:
    off = PluginSettings(role="rollout", name="r0", run_dir=str(tmp_path), token_file="t")
    StepLog(off, "r0").ended(1, 2, 3)
    path = off.boards.steps("r0")
    assert not path.exists()
    collector = StepCollector(path)
    collector.collect()
    on = PluginSettings.from_environ(
        PluginSettings(
            role="rollout", name="r0", run_dir=str(tmp_path), token_file="t", step_log=True
        ).to_environ()
    )
    assert on is not None
    log = StepLog(on, "r0")
    for at in range(0, 50, 10):
        log.ended(at, at + 8, 4)
    collector.collect()
    assert [step.number for step in collector.steps] == [1, 2, 3, 4, 5]
    assert [step.start_ns for step in collector.within(8, 30)] == [10, 20]
    collector.forget()
    assert (collector.steps, collector.gaps) == ([], [])


def test_dropped_steps_leave_a_gap(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "steps-r0.ring", StepRecord)
    collector = StepCollector(tmp_path / "steps-r0.ring")
    ring.write(StepRecord(1, 0, 10, 1))
    collector.collect()
    assert collector.gaps == []
    for number in range(2, RECORDS + 5):
        ring.write(StepRecord(number, 10 * number, 10 * number + 9, 1))
    collector.collect()
    (gap,) = collector.gaps
    assert gap.start_ns == 10
    assert gap.end_ns > collector.steps[-1].end_ns
    collector.collect()
    assert len(collector.gaps) == 1
