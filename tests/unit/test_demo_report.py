"""The demo's report and exit code, the placement it verifies, and the audit of weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rose_daemon.demo import report as reports
from rose_daemon.demo.audit import Evidence, VersionAudit, audit, fixed_prompts
from rose_daemon.demo.episodes import Group, Trajectory
from rose_daemon.demo.ledger import CUT, FINISHED, Answer, Attempt, TurnLedger
from rose_daemon.demo.placement import Observed, Place, check, observe, parse_cpus, promises
from rose_daemon.demo.run import samples
from rose_daemon.demo.training import Trained
from rose_daemon.harness.load import Budgets, RequestRecord
from rose_daemon.harness.stack import Cores

from rose.config import ReplicaConfig
from rose.core.readings import ReplicaReading
from rose.errors import Exit
from rose.units import NS_PER_MS, ReplicaId

HOST = Place(frozenset({1}), "SCHED_OTHER")

# ---- report -------------------------------------------------------------------------------------


def answer(turn_id: str, attempts: tuple[Attempt, ...]) -> Answer:
    return Answer(
        turn_id=turn_id,
        completion_id=f"c-{turn_id}",
        text="L",
        prompt_ids=(1, 2),
        output_ids=(3,),
        finish_reason="length",
        attempts=attempts,
        weight_versions=((0, 0, 0),),
    )


def ledger_of_a_good_run() -> TurnLedger:
    ledger = TurnLedger()
    attempts = {
        "t0": (Attempt("opp", 10, FINISHED),),
        "t1": (Attempt("opp", 2, CUT), Attempt("ded", 8, FINISHED)),
    }
    for turn_id, made in attempts.items():
        ledger.ask(turn_id)
        ledger.answer(turn_id, answer(turn_id, made), [0])
    return ledger


def request(ttft_ms: float = 50, **fields: Any) -> RequestRecord:
    record = RequestRecord(0, planned_ns=0, prompt_tokens=4, output_tokens=2, **fields)
    record.token_ns = [round(ttft_ms * NS_PER_MS), round((ttft_ms + 10) * NS_PER_MS)]
    return record


def group() -> Group:
    trajectories = tuple(
        Trajectory(id=f"e{n}", group="g", turns=(answer(f"t{n}", ()),), reward=float(n), reached=n == 1)
        for n in range(2)
    )
    return Group(id="g", trajectories=trajectories, advantages=(-1.0, 1.0), resampled=0)


def step(rl_step: int, **changes: Any) -> reports.StepRecord:
    trained = Trained(
        version=rl_step,
        loss=0.1,
        gradient_norm=1.0,
        tokens=10,
        changed=changes.get("changed", 5),
        elements=100,
        delta_bytes=30,
        density={"mlp": 0.1},
        dense_bytes=200,
        train_ms=1000,
        publish_ms=10,
        digests={},
    )
    seen = VersionAudit(
        version=rl_step,
        digests_differ=changes.get("digests_differ", ()),
        prompts_differ=changes.get("prompts_differ", 0),
        prompts_moved=changes.get("prompts_moved", 1),
    )
    return reports.StepRecord(
        rl_step=rl_step,
        required_version=rl_step - 1,
        groups=(group(),),
        rollout_s=2.0,
        trained=trained,
        update_s=0.2,
        audit=seen,
    )


def reading(**fields: int) -> ReplicaReading:
    return ReplicaReading(*[0] * len(ReplicaReading._fields))._replace(**fields)


def good(**changes: Any) -> reports.Findings:
    fields: dict[str, Any] = {
        "started_at": datetime(2026, 1, 2, tzinfo=UTC),
        "budgets": Budgets(),
        "replicas": {"opp": "opportunistic", "ded": "dedicated"},
        "trace": {},
        "ledger": ledger_of_a_good_run(),
        "requests": [request() for _ in range(1000)],
        "steps": [step(1), step(2)],
        "first_audit": VersionAudit(version=0, digests_differ=(), prompts_differ=0, prompts_moved=0),
        "pauses_ms": [3.0, 5.0],
        "gate": (reading(), reading(open_ns=30, closed_ns=10, gate_transitions=4, overhead_p50_ns=5000)),
        "placement": check([Observed(7, "rosed", Counter({HOST: 2}))], {"rosed": HOST}),
        "trajectories_finished": 2,
    }
    return reports.Findings(**fields | changes)


def test_report_of_a_good_run() -> None:
    report = reports.build(good())
    assert (report["ok"], report["exit_code"], report["reasons"]) == (True, 0, [])
    assert report["started_at"] == "2026-01-02T00:00:00+00:00"
    assert report["serving"]["requests"] == 1000
    assert report["serving"]["within_budget_share"] == 1.0
    assert report["serving"]["ttft_ms"] == {"p50": 50.0, "p99": 50.0}
    assert report["serving"]["tpot_ms"] == {"p50": 10.0, "p99": 10.0}
    assert report["rollout"]["tokens_per_s"] == {"dedicated": 2.0, "opportunistic": 3.0}
    turns = report["turns"]
    expected = {"finished": 2, "aborted": 1, "rerouted": 1, "lost": 0, "duplicated": 0}
    assert {name: turns[name] for name in expected} == expected
    assert report["trajectories"] == {"finished": 2, "lost": 0}
    weights = report["weights"]
    assert (weights["versions_published"], weights["versions_applied"], weights["bitexact"]) == (2, 2, True)
    assert (weights["delta_bytes"], weights["dense_bytes"]) == (60, 400)
    assert weights["pause_ms"] == {"p50": 4.0, "max": 5.0}
    assert report["gate"]["open_share"] == 0.75


def lost() -> TurnLedger:
    ledger = ledger_of_a_good_run()
    ledger.ask("t9")
    return ledger


def duplicated() -> TurnLedger:
    ledger = ledger_of_a_good_run()
    ledger.ask("t9")
    ledger.answer("t9", answer("t0", (Attempt("opp", 1, FINISHED),)), [0])
    return ledger


def stale() -> TurnLedger:
    ledger = ledger_of_a_good_run()
    ledger.ask("t9")
    ledger.answer("t9", answer("t9", (Attempt("opp", 1, FINISHED),)), [7])
    return ledger


def never_moved() -> TurnLedger:
    ledger = TurnLedger()
    for turn_id, replica in (("t0", "opp"), ("t1", "ded")):
        ledger.ask(turn_id)
        ledger.answer(turn_id, answer(turn_id, (Attempt(replica, 1, FINISHED),)), [0])
    return ledger


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"ledger": lost()}, Exit.ERROR, "1 turns lost"),
        ({"ledger": duplicated()}, Exit.ERROR, "1 turns duplicated"),
        ({"ledger": stale()}, Exit.ERROR, "t9: sampled from weight versions [0]"),
        ({"ledger": never_moved()}, Exit.ERROR, "no turn was rerouted"),
        ({"replicas": {"opp": "opportunistic", "x": "dedicated"}}, Exit.ERROR, "replica x finished no turn"),
        ({"trajectories_lost": 1}, Exit.ERROR, "1 trajectories lost"),
        ({"steps": [step(1, digests_differ=("opp: w",))]}, Exit.ERROR, "not those the trainer made"),
        ({"steps": [step(1, prompts_differ=1)]}, Exit.ERROR, "not those the trainer made"),
        ({"steps": [step(1, prompts_moved=0)]}, Exit.ERROR, "no version answers a fixed prompt otherwise"),
        ({"steps": [step(1, changed=0)]}, Exit.ERROR, "a version changed no weight"),
        ({"first_audit": None}, Exit.ERROR, "not those the trainer made"),
        ({"placement": check([], {"rosed": HOST})}, Exit.ERROR, "did not run where it was promised to"),
        ({"placement": []}, Exit.ERROR, "did not run where it was promised to"),
        ({"requests": []}, Exit.ERROR, "no serving request was sent"),
        (
            {"requests": [request() for _ in range(994)] + [request(251)] * 6},
            Exit.SLO_BREACH,
            "0.6% of serving",
        ),
        ({"requests": [request() for _ in range(994)] + [request(error="x")] * 6}, Exit.SLO_BREACH, "0.6%"),
        ({"requests": [request() for _ in range(995)] + [request(251)] * 5}, Exit.OK, ""),
        ({"requests": [request(251)], "ledger": lost()}, Exit.ERROR, "1 turns lost"),
    ],
)
def test_exit_codes(changes: dict[str, Any], code: Exit, reason: str) -> None:
    report = reports.build(good(**changes))
    assert report["exit_code"] == code
    assert report["ok"] == (code is Exit.OK)
    assert reason in " ".join(report["reasons"])


def test_table_shows_what_is_wrong() -> None:
    console = Console(width=120, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    findings = good(
        ledger=lost(), placement=check([Observed(7, "rosed", Counter({HOST: 2}))], {"rosed": HOST})
    )
    reports.show(reports.build(findings), console)
    text = console.export_text()
    assert "2 finished, 1 lost, 0 duplicated" in text
    assert "SCHED_OTHER on core 1" in text
    assert "not ok: 1 turns lost" in text


def test_only_groups_that_teach_are_trained_on() -> None:
    flat = Group(id="f", trajectories=group().trajectories, advantages=(0.0, 0.0), resampled=3)
    assert [sample.advantage for sample in samples([group(), flat])] == [-1.0, 1.0]


# ---- placement ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "cpus"), [("0", {0}), ("0-3,8\n", {0, 1, 2, 3, 8}), ("\t1,3-4", {1, 3, 4})])
def test_cpu_lists(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


def fake_process(proc: Path, pid: int, title: str, name: str, threads: dict[int, tuple[str, int]]) -> None:
    for tid, (cpus, policy) in threads.items():
        task = proc / str(pid) / "task" / str(tid)
        task.mkdir(parents=True)
        (task / "status").write_text(f"Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\n")
        fields = ["S", *["0"] * 37, str(policy), "0", "0"]
        (task / "stat").write_text(f"{tid} (a (b) c) {' '.join(fields)}\n")
    (proc / str(pid) / "cmdline").write_text(title.replace(" ", "\0"))
    (proc / str(pid) / "environ").write_text(f"A=1\0ROSE_ENGINE_NAME={name}\0")


def test_roles_and_places_are_read_from_proc(tmp_path: Path) -> None:
    fake_process(tmp_path, 10, "python -m vllm.entrypoints.openai.api_server", "serving", {10: ("1", 0)})
    fake_process(tmp_path, 11, "VLLM::EngineCore", "serving", {11: ("1", 0)})
    fake_process(tmp_path, 12, "VLLM::Worker", "serving", {12: ("0", 0), 13: ("0-1", 5)})
    fake_process(tmp_path, 14, "python /x/warden.py log", "opp", {14: ("0-1", 0)})
    fake_process(tmp_path, 15, "rose relay", "", {15: ("1", 0)})
    observed = observe([10, 11, 12, 14, 15, 99], {15: "relay"}, tmp_path)
    assert [(one.pid, one.role) for one in observed] == [
        (10, "serving API server"), (11, "serving core"), (12, "serving worker"), (15, "relay"),
    ]  # fmt: skip
    rows = {row.role: row for row in check(observed, promises(Cores(0, 1), ()))}
    assert rows["relay"].ok
    assert rows["serving core"].ok
    assert not rows["serving worker"].ok
    assert rows["serving worker"].found == ("SCHED_IDLE on core 0,1", "SCHED_OTHER on core 0")
    assert not rows["trainer"].ok, "a promise about a process that is not there is broken"


def test_promises_per_kind_of_replica() -> None:
    replicas = [
        ReplicaConfig(id=ReplicaId(kind), kind=kind, model="m") for kind in ("opportunistic", "dedicated")
    ]
    promised = promises(Cores(0, 1), replicas)
    assert promised["opportunistic worker"] == Place(frozenset({0}), "SCHED_OTHER")
    assert promised["dedicated worker"] == promised["trainer"] == Place(frozenset({1}), "SCHED_IDLE")
    assert promised["dedicated core"] == HOST


def test_a_real_process_is_read() -> None:
    core = min(os.sched_getaffinity(0))
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        os.sched_setaffinity(child.pid, {core})
        os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
        (observed,) = observe([child.pid], {child.pid: "trainer"})
        assert set(observed.places) == {Place(frozenset({core}), "SCHED_IDLE")}
    finally:
        child.kill()
        child.communicate()


# ---- audit --------------------------------------------------------------------------------------


def evidence(replica: str, version: int = 1, digest: str = "d1", tokens: int = 5) -> Evidence:
    return Evidence(replica=replica, version=version, digests={"w": digest}, answers=((1, 2), (3, tokens)))


FIRST = ((1, 2), (3, 4))


def test_audit_of_equal_engines() -> None:
    seen = audit(1, [evidence("a"), evidence("b")], {"w": "d1"}, FIRST)
    assert seen == VersionAudit(version=1, digests_differ=(), prompts_differ=0, prompts_moved=1)
    assert seen.ok


@pytest.mark.parametrize(
    ("other", "differ"),
    [
        (evidence("b", digest="d2"), ("b: w",)),
        (evidence("b", version=0), ("b: runs version 0",)),
        (Evidence(replica="b", version=1, digests={}, answers=evidence("b").answers), ("b: w",)),
    ],
)
def test_audit_names_what_differs(other: Evidence, differ: tuple[str, ...]) -> None:
    seen = audit(1, [evidence("a"), other], {"w": "d1"}, FIRST)
    assert seen.digests_differ == differ
    assert not seen.ok


def test_audit_sees_engines_that_disagree_and_engines_that_never_moved() -> None:
    assert audit(1, [evidence("a"), evidence("b", tokens=9)], {"w": "d1"}, FIRST).prompts_differ == 1
    assert audit(1, [evidence("a", tokens=4)], {"w": "d1"}, FIRST).prompts_moved == 0


def test_fixed_prompts_are_fixed() -> None:
    assert fixed_prompts(1) == fixed_prompts(1) != fixed_prompts(2)
