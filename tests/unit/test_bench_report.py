"""The co-serving benchmark's modes, report and exit code."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec import structs
from rich.console import Console
from rose_daemon.bench import plot, table
from rose_daemon.bench import report as reports
from rose_daemon.bench.command import app
from rose_daemon.bench.probe import generated_tokens, open_spans
from rose_daemon.bench.runs import (
    CoserveOptions,
    Drill,
    GateCosts,
    Injection,
    Measured,
    Mode,
    Run,
    Trial,
    parse_modes,
    read_measured,
    write_measured,
)
from rose_daemon.harness.load import RequestRecord, Target, open_client
from rose_daemon.harness.replay import ReplayPlan, plan_replay
from rose_daemon.harness.stack import Cores
from typer.testing import CliRunner

from rose.core.attribution import Span
from rose.core.readings import GateTransition, ReplicaReading, SlackReading, StepRecord
from rose.errors import ConfigError, EngineFailed, Exit, RoseError
from rose.units import NS_PER_MS, NS_PER_S


def record(index: int, ttft_ms: float, gap_ms: float = 10) -> RequestRecord:
    made = RequestRecord(index, planned_ns=0, prompt_tokens=4, output_tokens=3)
    made.token_ns = [round((ttft_ms + gap_ms * n) * NS_PER_MS) for n in range(3)]
    return made


def run(mode: Mode, index: int, ttfts_ms: list[float], tokens: int = 0) -> Run:
    return Run(
        mode=mode,
        round=index,
        elapsed_s=10.0,
        records=[record(number, ms) for number, ms in enumerate(ttfts_ms)],
        rollout_tokens=tokens,
        rollout_errors=0,
        serving_busy_share=0.5,
        rollout_busy_share=0.4,
        gate_transitions=7,
        started_ns=0,
        ended_ns=10 * NS_PER_S,
    )


def measured(strict_ms: float = 60) -> Measured:
    modes = (Mode.ALONE, Mode.NAIVE, Mode.ROSE_STRICT, Mode.ROLLOUT_ALONE)
    options = CoserveOptions(directory=Path(), modes=modes, rounds=2, trace=ReplayPlan(path=None))
    trace = {
        "trace": "t",
        "offset": 0.0,
        "duration_s": 60.0,
        "size_divisor": 8.0,
        "output_divisor": 8.0,
        "rate_scale": 0.5,
        "requests_per_s": 5.0,
    }
    runs = [
        one
        for index in range(2)
        for one in (
            run(Mode.ALONE, index, [20.0] * 100),
            run(Mode.NAIVE, index, [20.0] * 50 + [900.0] * 50, 10_000),
            run(Mode.ROSE_STRICT, index, [40.0] * 99 + [strict_ms], 7_000),
            run(Mode.ROLLOUT_ALONE, index, [], 14_000),
        )
    ]
    gate = ReplicaReading(*[0] * len(ReplicaReading._fields))._replace(
        overhead_p50_ns=4000, overhead_p99_ns=9000, overhead_cpu_p50_ns=3000, overhead_cpu_p99_ns=8000
    )
    slack = SlackReading(*[0] * len(SlackReading._fields))._replace(
        overhead_ns=8000, prefill_predicted_ns=30 * NS_PER_MS, drift_permille=1100
    )
    return Measured(
        started_at=datetime(2026, 1, 2, tzinfo=UTC),
        options=options,
        cores=Cores(0, 1),
        calibration=[Trial(5.5, 0.55)],
        skipped={Mode.PRIORITY: "not allowed"},
        traces=[trace, trace],
        runs=runs,
        gates={Mode.ROSE_STRICT: GateCosts(slack, gate)},
    )


def test_report_has_its_stable_keys() -> None:
    report = reports.build(measured())
    naive, strict = report["modes"]["naive"], report["modes"]["rose-strict"]
    assert report["budgets"] == {"ttft_ms": 250, "tpot_ms": 60}
    assert naive["requests"] == 200
    assert naive["within_budget_share"] == 0.5
    assert naive["within_budget_ci"][0] < 0.5 < naive["within_budget_ci"][1]
    assert naive["ttft_ms"]["p99"] == 900
    assert naive["ttft_ms"]["p99_ci"] == [900, 900]
    assert naive["itl_ms"] == {"p99": 10, "p99_ci": [10, 10], "max": 10}
    assert strict["rollout_tokens_per_s"] == 700
    assert [one["round"] for one in strict["rounds"]] == [0, 1]
    assert report["modes"]["alone"]["rollout_tokens_per_s"] is None
    assert report["modes"]["rollout-alone"]["ttft_ms"]["p99"] is None
    assert report["serving_alone_busy_share"] == 0.5
    assert report["kv_budget_was_cut"] is False
    assert report["gate"]["overhead_us"] == {"p50": 4.0, "p99": 9.0}
    assert report["gate"]["overhead_cpu_us"] == {"p50": 3.0, "p99": 8.0}
    serving = report["gate"]["modes"]["rose-strict"]["serving"]
    assert (serving["overhead_us"], serving["prefill_predicted_ms"], serving["drift"]) == (8.0, 30.0, 1.1)
    keys = ("trace", "offset", "size_divisor", "rate_scale", "concurrency", "cpu_affinity")
    assert all(key in report["setup"] for key in keys)
    assert report["setup"]["calibration"] == [{"rate_rps": 5.5, "busy_share": 0.55}]
    assert report["setup"]["skipped"] == {"priority": "not allowed"}
    assert len(report["violations"]) == reports.VIOLATIONS_PER_MODE
    assert (report["violations"][0]["budget"], report["violations"][0]["cause"]) == ("ttft", "serving")


def test_the_reference_is_what_serving_alone_leaves_of_rollout_alone() -> None:
    report = reports.build(measured())
    assert report["rollout_alone_tokens_per_s"] == 1400
    assert report["reference_tokens_per_s"] == 700
    modes = report["modes"]
    assert modes["rose-strict"]["share_of_reference"] == 1.0
    assert modes["naive"]["rounds"][0]["share_of_reference"] == pytest.approx(1.4286)
    assert modes["alone"]["share_of_reference"] is modes["rollout-alone"]["share_of_reference"] is None


def test_modes_are_compared_request_by_request() -> None:
    report = reports.build(measured())
    against = report["modes"]["rose-strict"]["against"]
    ttft = against["alone"]["ttft_ms"]
    assert ttft["p99_ratio"] == pytest.approx(2, abs=0.05)
    assert ttft["paired_median_difference"] == 20
    assert ttft["paired_median_difference_ci"] == [20, 20]
    assert against["naive"]["ttft_ms"]["p99_ratio"] < 0.1
    assert report["modes"]["alone"]["against"]["alone"] is None
    assert report["modes"]["rollout-alone"]["against"] == {"alone": None, "naive": None}
    goals = {goal["name"]: goal["reached"] for goal in report["goals"]}
    assert goals == {
        "rose-strict: p99 TTFT over alone": False,
        "rose-strict: share of the reference": True,
        "rose-strict: share late because of rollout": True,
    }


def test_only_gated_modes_promise_budgets() -> None:
    assert reports.build(measured())["exit_code"] == Exit.OK
    broken = reports.build(measured(strict_ms=251))
    assert (broken["exit_code"], broken["ok"]) == (Exit.SLO_BREACH, False)


def test_what_serving_alone_breaks_too_is_not_held_against_a_mode() -> None:
    found = measured(251)
    for one in found.runs:
        if one.mode is Mode.ALONE:
            one.records = [record(number, 300.0) for number in range(100)]
    report = reports.build(found)
    assert report["serving_alone_broke_budgets"]
    assert report["exit_code"] == Exit.OK, "late by itself"
    for one in found.runs:
        if one.mode is Mode.ROSE_STRICT:
            one.rollout_steps = [StepRecord(1, 0, 200 * NS_PER_MS, 9)]
    blamed = reports.build(found)
    assert blamed["modes"]["rose-strict"]["late_by_cause"]["rollout"] == 2
    strict = [one["cause"] for one in blamed["violations"] if one["mode"] == "rose-strict"]
    assert strict[:2] == ["rollout", "rollout"]
    assert blamed["exit_code"] == Exit.SLO_BREACH


def test_the_table_fits_in_80_columns_with_all_its_headings() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    report = reports.build(measured(251))
    wide = report["modes"]["rose-strict"]
    wide["within_budget_share"], wide["rollout_tokens_per_s"], wide["requests"] = 1.0, 12345.6, 10_000
    wide["ttft_ms"]["p99"] = wide["itl_ms"]["max"] = 12345.6
    report["kv_budget_was_cut"] = True
    table.show(report, console)
    text = console.export_text()
    assert "ran short of memory" in text
    assert "…" not in text
    words = {word for heading in table.HEADINGS for word in heading.split()}
    assert words <= set(text.split())
    assert "10000 100.00% 12346" in text
    assert "priority was left out: not allowed" in text
    assert "not ok" in text


def with_steps() -> Measured:
    found = measured()
    for one in found.runs:
        one.serving_steps = [
            StepRecord(n, n * 20 * NS_PER_MS, (n * 20 + 9) * NS_PER_MS, 3) for n in range(90)
        ]
        one.rollout_steps = [
            StepRecord(n, (n * 20 + 9) * NS_PER_MS, (n * 20 + 19) * NS_PER_MS, 64) for n in range(90)
        ]
    found.gate_open = {Mode.ROSE_STRICT: [Span(9 * NS_PER_MS, 19 * NS_PER_MS)]}
    found.drills = [Drill(found.runs[2], [Injection(True, 0, 9)])]
    return found


def test_a_former_measurement_gives_the_same_report_and_a_picture(tmp_path: Path) -> None:
    found = with_steps()
    kept = tmp_path / "measured.json"
    write_measured(kept, found)
    assert read_measured(kept) == found
    console = CliRunner()
    out, copy = tmp_path / "out", tmp_path / "copy.json"
    done = console.invoke(app, ["coserve", "--from", str(kept), "--out", str(out), "--json", str(copy)])
    assert done.exit_code == Exit.OK, done.output
    assert json.loads(copy.read_text()) == json.loads((out / "report.json").read_text())
    assert json.loads(copy.read_text())["modes"] == json.loads(json.dumps(reports.build(found)["modes"]))
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_is_no_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "available", lambda: False)
    write_measured(tmp_path / "measured.json", measured(251))
    arguments = ["coserve", "--from", str(tmp_path / "measured.json"), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == Exit.SLO_BREACH
    assert "no picture" in done.output
    assert not (tmp_path / "report.png").exists()


def test_a_picture_needs_no_mode_in_particular(tmp_path: Path) -> None:
    found = measured()
    found.runs = [one for one in found.runs if one.mode is Mode.ROLLOUT_ALONE]
    found.options = structs.replace(found.options, modes=(Mode.ROLLOUT_ALONE,))
    plot.draw(found, reports.build(found), tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000
    with pytest.raises(ConfigError, match="cannot be written"):
        plot.draw(found, reports.build(found), tmp_path / "none" / "p.png")


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_what_is_no_measurement_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "measured.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"measured\.json"):
        read_measured(path)


def test_a_gate_is_open_from_one_transition_to_the_next() -> None:
    nothing = GateTransition(*[0] * len(GateTransition._fields))
    transitions = [
        nothing._replace(at_ns=at, tokens=tokens)
        for at, tokens in ((5, 8), (20, 0), (30, 8), (40, 64), (70, 0), (90, 1))
    ]
    assert open_spans(transitions, 10, 100) == [Span(10, 20), Span(30, 40), Span(40, 70), Span(90, 100)]
    assert open_spans(transitions, 21, 29) == []
    assert open_spans([], 0, 9) == []


@pytest.mark.parametrize(
    ("text", "modes"),
    [
        ("alone", ["alone"]),
        ("alone,naive", ["alone", "naive", "rollout-alone"]),
        (" rose-strict , rose-strict", ["rose-strict", "rollout-alone"]),
        ("rollout-alone,naive", ["rollout-alone", "naive"]),
        ("all", [*Mode]),
    ],
)
def test_modes(text: str, modes: list[str]) -> None:
    assert [str(mode) for mode in parse_modes(text)] == modes


@pytest.mark.parametrize("text", ["", "alone,", "rose-lax", "Naive"])
def test_unknown_modes_are_refused(text: str) -> None:
    with pytest.raises(RoseError, match="is not a mode") as caught:
        parse_modes(text)
    assert "rose-strict" in caught.value.hint


def test_replay_repeats_and_says_what_it_is() -> None:
    plan = ReplayPlan(path=None, duration_s=100, rate_rps=3, size_divisor=10)
    one, two, other = plan_replay(plan, 1), plan_replay(plan, 1), plan_replay(plan, 2)
    assert one == two != other
    assert len(one.requests) == pytest.approx(300, rel=0.2)
    description: dict[str, Any] = one.description
    assert description["rate_scale"] == pytest.approx(0.3, rel=0.2)
    assert description["trace"].startswith("generated")
    assert max(request.output_tokens for request in one.requests) <= plan.output_tokens_max


def test_a_thin_trace_is_replayed_faster(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    rows = [f"2023-11-16 18:{minute:02d}:{second:02d},80,80" for minute in range(10) for second in range(60)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    plan = ReplayPlan(path=trace, offset_s=10, duration_s=20, rate_rps=3)
    replay = plan_replay(plan, 1)
    assert len(replay.requests) == 60
    assert replay.end_s == 70
    assert replay.description["rate_scale"] == replay.description["speed"] == 3
    assert replay.requests[-1].at_ns < 20 * NS_PER_S
    whole = plan_replay(ReplayPlan(path=trace, offset_s=10, duration_s=590, rate_rps=3), 1)
    assert len(whole.requests) == 590, "no more than there are"


def test_replay_of_a_stretch_that_is_not_there(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\n")
    with pytest.raises(ConfigError, match="no request left"):
        plan_replay(ReplayPlan(path=trace, offset_s=10), 1)


async def test_generated_tokens_come_from_the_engines_metrics() -> None:
    counted = (
        "# TYPE vllm:generation_tokens_total counter",
        'vllm:generation_tokens_total{engine="0"} 12.0',
        "# TYPE vllm:generation_tokens_created gauge",
        'vllm:generation_tokens_created{engine="0"} 1.7e9',
        "",
    )
    answers = iter(["\n".join(counted), "# TYPE other gauge\nother 1\n"])

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=next(answers))

    application = web.Application()
    application.router.add_get("/metrics", metrics)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    target = Target(f"http://127.0.0.1:{runner.addresses[0][1]}", "m")
    async with open_client() as client:
        assert await generated_tokens(client, target) == 12
        with pytest.raises(EngineFailed, match="has no vllm:generation_tokens_total"):
            await generated_tokens(client, target)
        await runner.cleanup()
        with pytest.raises(EngineFailed, match="/metrics: "):
            await generated_tokens(client, target)
