"""Both schedulers on vLLM's own bookkeeping, without a device: every step under the test's control."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_world import Gatekeeper
from rich.console import Console

from rose.boards import BoardPaths, BoardReader
from rose.core.readings import NEVER, GateMode, SlackReading, Unknown
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.slack_board import RankShape
from rose.engines.vllm.slo_class import HEADER
from rose.units import NS_PER_S, ms_to_ns

pytestmark = pytest.mark.engine

MS = ms_to_ns(1)
CLASSES = "premium=100/30,batch=2000/200"


@pytest.fixture(scope="module")
def configs(demo_models: Any) -> dict[str, Any]:
    """VllmConfigs of an engine with one step in flight, and of one that schedules ahead."""
    from rose.engines.vllm.step_loop import engine_config  # noqa: PLC0415 (imports vLLM)

    return {
        "sync": engine_config(demo_models.serving, sequences_max=8, kv_blocks=65),
        "async": engine_config(demo_models.serving, sequences_max=8, kv_blocks=65, asynchronous=True),
    }


def settings(run_dir: Path, **more: Any) -> PluginSettings:
    given = {"role": "serving", "name": "s", "run_dir": str(run_dir), "token_file": "/t"}
    return PluginSettings(**(given | more))


class Serving:
    """A serving scheduler and its board."""

    def __init__(self, configs: dict[str, Any], run_dir: Path, kind: str = "sync", **more: Any) -> None:
        from rose.engines.vllm import serving_scheduler  # noqa: PLC0415 (imports vLLM)
        from rose.engines.vllm.step_loop import StepLoop  # noqa: PLC0415

        classes = {"sync": "ServingScheduler", "async": "ServingAsyncScheduler"}
        scheduler_cls = getattr(serving_scheduler, classes[kind])
        in_flight_max = {"sync": 1, "async": 2}[kind]
        self.loop = StepLoop(
            scheduler_cls, configs[kind], settings(run_dir, **more), in_flight_max=in_flight_max
        )
        self.paths = BoardPaths(run_dir)

    def read(self) -> SlackReading:
        record = BoardReader(self.paths.slack("s"), SlackReading).read()
        assert not isinstance(record, Unknown)
        return record

    def until_idle(self) -> None:
        for _ in range(200):
            if not (self.loop.scheduler.has_requests() or self.loop.in_flight):
                return
            if self.loop.scheduler.has_requests():
                self.loop.step()
            else:
                self.loop.end_oldest()
        raise AssertionError("requests never end")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_board_follows_requests_to_their_end(configs: dict[str, Any], run_dir: Path, kind: str) -> None:
    serving = Serving(configs, run_dir, kind)
    assert (serving.read().waiting, serving.read().running) == (0, 0)
    for number in range(3):
        serving.loop.add(f"r{number}", list(range(20 + number)), 12)
    arrived = serving.read()
    assert (arrived.waiting, arrived.running, arrived.pending_prefill_tokens) == (3, 0, 63)
    assert arrived.ttft_deadline_ns != NEVER
    in_steps = []
    serving.loop.device = lambda: in_steps.append(serving.read())
    for _ in range(4):
        serving.loop.step()
    during = in_steps[-1]
    assert (during.waiting, during.running, during.in_step) == (0, 3, 1)
    assert (during.ttft_deadline_ns, during.pending_prefill_tokens) == (NEVER, 0)
    assert during.tpot_deadline_ns < time.monotonic_ns() + 120 * MS
    serving.until_idle()
    assert serving.loop.tokens == {"r0": 12, "r1": 12, "r2": 12}
    after = serving.read()
    assert (after.waiting, after.running, after.in_step) == (0, 0, 0)
    assert (after.ttft_deadline_ns, after.tpot_deadline_ns) == (NEVER, NEVER)
    assert after.steps == 12
    assert after.kv_used_blocks == 0
    assert 0 < after.overhead_ns < NEVER
    assert 0 < after.deferred_ns < NEVER


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_is_not_published_yet_only_makes_the_gate_more_careful(
    configs: dict[str, Any], run_dir: Path, kind: str
) -> None:
    """Between the end of a step and the begin of the next the board may lag, but never towards open."""
    serving = Serving(configs, run_dir, kind)
    scheduler = serving.loop.scheduler
    for number in range(3):
        serving.loop.add(f"r{number}", list(range(20 + number)), 3 + 4 * number)
    while scheduler.has_requests():
        serving.loop.step()
        lagging = serving.read()
        assert lagging.running >= len(scheduler.running)
        scheduler._rose_settle()
        exact = serving.read()
        if lagging.ttft_deadline_ns == NEVER:  # otherwise it is closed, whatever decodes bear
            assert lagging.tpot_deadline_ns <= exact.tpot_deadline_ns
        assert lagging.ttft_deadline_ns <= exact.ttft_deadline_ns
        assert lagging.pending_prefill_tokens >= exact.pending_prefill_tokens
        if not exact.running:
            assert lagging[1:] == exact[1:]  # idle is told at once


def test_an_abort_is_seen_at_once(configs: dict[str, Any], run_dir: Path) -> None:
    from vllm.v1.request import RequestStatus  # noqa: PLC0415

    serving = Serving(configs, run_dir)
    serving.loop.add("a", list(range(20)), 50)
    serving.loop.step()
    serving.loop.step()
    assert serving.read().running == 1
    serving.loop.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    after = serving.read()
    assert (after.running, after.tpot_deadline_ns, after.kv_used_blocks) == (0, NEVER, 0)


def test_each_request_is_held_to_the_budgets_of_its_class(configs: dict[str, Any], run_dir: Path) -> None:
    serving = Serving(configs, run_dir, slo_classes=CLASSES)
    assert serving.read().ttft_budget_ns == 100 * MS
    began_ns = time.monotonic_ns()
    serving.loop.add("batch", list(range(20)), 50, {HEADER: "batch"})
    assert serving.read().ttft_deadline_ns > began_ns + 1000 * MS
    serving.loop.add("default", list(range(21)), 50)
    assert began_ns + 100 * MS < serving.read().ttft_deadline_ns < time.monotonic_ns() + 250 * MS
    serving.loop.add("premium", list(range(22)), 3, {HEADER: "premium"})
    assert serving.read().ttft_deadline_ns < time.monotonic_ns() + 100 * MS
    for tpot_ms, tokens in ((30, 3), (60, 6)):
        while serving.loop.tokens.get("default", 0) < tokens:
            serving.loop.step()
            serving.loop.scheduler._rose_settle()
            if serving.loop.tokens["default"] < tokens:
                reading = serving.read()
                assert reading.tpot_deadline_ns <= reading.step_end_ns + 2 * tpot_ms * MS
    reading = serving.read()
    assert reading.tpot_deadline_ns > reading.step_end_ns + 60 * MS  # the demanding one is gone


@pytest.mark.parametrize(
    ("role", "prefills", "decodes"),
    [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
)
def test_the_role_of_a_disaggregated_engine_is_read_from_vllms_own_configuration(
    configs: dict[str, Any], role: Any, prefills: bool, decodes: bool
) -> None:
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role=role)
    parallel = configs["sync"].parallel_config
    engine = SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)
    assert RankShape.of(engine) == RankShape(0, prefills, decodes)
    assert RankShape.of(configs["sync"]) == RankShape()


@pytest.mark.parametrize("shift_s", [3600, -3600])
def test_a_wall_clock_that_is_set_moves_no_deadline(
    configs: dict[str, Any], run_dir: Path, shift_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM stamps arrivals by the wall clock, in another process; it may be an hour off by the next call."""
    serving = Serving(configs, run_dir)
    wall_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + shift_s * NS_PER_S)
    serving.loop.add("a", list(range(20)), 4)
    deadline_ns = serving.read().ttft_deadline_ns
    assert 200 * MS < deadline_ns - time.monotonic_ns() <= 250 * MS
    serving.until_idle()
    assert serving.read().prefill_p99_ns < NS_PER_S


class Rollout:
    """A rollout scheduler whose gate the test sets."""

    def __init__(self, configs: dict[str, Any], run_dir: Path, kind: str) -> None:
        from rose.engines.vllm import rollout_scheduler  # noqa: PLC0415 (imports vLLM)
        from rose.engines.vllm.step_loop import StepLoop  # noqa: PLC0415

        self.gate = Gatekeeper(BoardPaths(run_dir), "r0")
        given = PluginSettings(role="rollout", name="r0", run_dir=str(run_dir), token_file="")
        classes = {"sync": "RolloutScheduler", "async": "RolloutAsyncScheduler"}
        in_flight_max = {"sync": 1, "async": 2}[kind]
        scheduler_cls = getattr(rollout_scheduler, classes[kind])
        self.loop = StepLoop(scheduler_cls, configs[kind], given, in_flight_max=in_flight_max)


@pytest.fixture(params=["sync", "async"])
def rollout(request: pytest.FixtureRequest, configs: dict[str, Any], run_dir: Path) -> Iterator[Rollout]:
    """One of each kind, with its gate open."""
    rollout = Rollout(configs, run_dir, request.param)
    yield rollout
    rollout.gate.close()


def test_everybody_gets_on_under_a_small_cap(rollout: Rollout) -> None:
    """vLLM serves its list from the head: without a rotation the last ones would starve."""
    for number in range(8):
        rollout.loop.add(f"r{number}", [number, 1, 2, 3], 400)
    while min(rollout.loop.tokens.get(f"r{number}", 0) for number in range(8)) < 2:
        rollout.loop.step()
    rollout.gate.set(token_cap=3)
    rollout.loop.step()
    before = dict(rollout.loop.tokens)
    for _ in range(160):
        rollout.loop.step()
    gained = [rollout.loop.tokens[name] - before[name] for name in before]
    assert sum(gained) >= 3 * 150
    assert max(gained) - min(gained) <= 12


def test_a_flapping_gate_loses_and_doubles_nothing(rollout: Rollout) -> None:
    """Closed and opened at every possible moment, with none, one or two steps in flight."""
    for number in range(6):
        rollout.loop.add(f"r{number}", list(range(30 + number)), 20)
    step = 0
    while rollout.loop.scheduler.has_requests() or rollout.loop.in_flight:
        step += 1
        assert step < 2000
        rollout.gate.set(mode=GateMode.OPEN if step % 3 else GateMode.CLOSED, token_cap=(0, 5, 64)[step % 3])
        if rollout.loop.scheduler.has_requests():
            rollout.loop.step()
        else:
            rollout.loop.end_oldest()
    assert rollout.loop.tokens == {f"r{number}": 20 for number in range(6)}


def test_the_benchmark_of_the_gate_measures_both_plugins(tmp_path: Path) -> None:
    from rose_daemon.bench import gate as bench_gate  # noqa: PLC0415 (imports vLLM)

    said: list[str] = []
    options = bench_gate.GateOptions(running=4, steps=12, device_ms=0.1)
    report = bench_gate.measure(options, said.append)
    assert len(said) == 2
    for world in ("serving", "rollout"):
        for setting in ("hot_loop", "scheduling", "asleep_between"):
            found = report[world][setting]
            for part in ("vllm", "on_step", "deferred"):
                assert found[part]["wall_p50_us"] <= found[part]["wall_p99_us"]
                assert found[part]["cpu_p50_us"] > 0
    console = Console(record=True, width=100)
    bench_gate.show(report, console)
    assert "beside the device" in console.export_text()
