"""What the demo found: the JSON report, the verdict, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from rose.core.readings import ReplicaReading
from rose.errors import Exit
from rose_daemon.demo.audit import VersionAudit
from rose_daemon.demo.episodes import Group
from rose_daemon.demo.ledger import TurnLedger
from rose_daemon.demo.placement import PlacementRow
from rose_daemon.demo.training import Trained
from rose_daemon.harness.load import Budgets, RequestRecord
from rose_daemon.harness.stats import percentile, rounded
from rose_daemon.harness.summary import breaches, head, serving_figures, violations


class CutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An emergency cut that the demo ordered."""

    rl_step: int
    before_blocks: int
    after_blocks: int
    used_blocks: int
    """In use when the cut was ordered."""
    aborted: int
    """Turns that the engine aborted for it."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One RL step."""

    rl_step: int
    required_version: int
    groups: tuple[Group, ...]
    rollout_s: float
    trained: Trained
    update_s: float
    """From published to run by every replica."""
    audit: VersionAudit


class Findings(msgspec.Struct, kw_only=True):
    """Everything the demo saw; filled as it goes."""

    started_at: datetime
    budgets: Budgets
    replicas: dict[str, str]
    """Replica id -> kind."""
    trace: dict[str, Any]
    ledger: TurnLedger
    requests: list[RequestRecord] = []
    steps: list[StepRecord] = []
    first_audit: VersionAudit | None = None
    cuts: list[CutRecord] = []
    pauses_ms: list[float] = []
    gate: tuple[ReplicaReading, ReplicaReading] | None = None
    """The opportunistic replica's board before and after."""
    placement: list[PlacementRow] = []
    trajectories_finished: int = 0
    trajectories_lost: int = 0
    gateway_turns: dict[str, Any] = {}
    wall_s: float = 0.0


def build(found: Findings) -> dict[str, Any]:
    """The report; `ok`, `exit_code` and `reasons` included."""
    report = head("demo", found.started_at) | {
        "wall_s": round(found.wall_s, 1),
        "budgets": {"ttft_ms": found.budgets.ttft_ms, "tpot_ms": found.budgets.tpot_ms},
        "trace": found.trace,
        "serving": serving_figures(found.requests, found.budgets)
        | {"violations": violations(found.requests, found.budgets)},
        "rollout": _rollout(found),
        "turns": _turns(found),
        "trajectories": {"finished": found.trajectories_finished, "lost": found.trajectories_lost},
        "weights": _weights(found),
        "gate": _gate(found),
        "memory": {"cuts": msgspec.to_builtins(found.cuts)},
        "placement": {
            "ok": bool(found.placement) and all(row.ok for row in found.placement),
            "rows": msgspec.to_builtins(found.placement),
        },
        "faults": found.ledger.faults,
    }
    code, reasons = verdict(report)
    return report | {"ok": code is Exit.OK, "exit_code": int(code), "reasons": reasons}


def verdict(report: dict[str, Any]) -> tuple[Exit, list[str]]:
    """Exit code 1 when a turn was lost or ran twice or weights differ, 5 for a broken budget, else 0."""
    turns, weights, rollout = report["turns"], report["weights"], report["rollout"]
    wrong = [f"{turns[name]} turns {name}" for name in ("lost", "duplicated") if turns[name]]
    if report["trajectories"]["lost"]:
        wrong.append(f"{report['trajectories']['lost']} trajectories lost")
    if not weights["bitexact"]:
        wrong.append("weights that engines run are not those the trainer made")
    if weights["versions_applied"] != weights["versions_published"]:
        wrong.append(
            f"{weights['versions_published']} versions published, {weights['versions_applied']} applied"
        )
    if not any(version["prompts_moved_since_0"] for version in weights["versions"]):
        wrong.append("no version answers a fixed prompt otherwise than version 0")
    if not all(version["changed"] for version in weights["versions"]):
        wrong.append("a version changed no weight")
    wrong += [f"replica {name} finished no turn" for name, turns in rollout["turns"].items() if not turns]
    if not turns["rerouted"]:
        wrong.append("no turn was rerouted")
    if not report["placement"]["ok"]:
        wrong.append("a process did not run where it was promised to")
    wrong += [] if wrong else report["faults"][:3]
    if wrong:
        return Exit.ERROR, wrong
    share = report["serving"]["within_budget_share"]
    if share is None:
        return Exit.ERROR, ["no serving request was sent"]
    if breaches(share):
        return Exit.SLO_BREACH, [f"{1 - share:.1%} of serving requests broke their budget"]
    return Exit.OK, []


def _rollout(found: Findings) -> dict[str, Any]:
    tokens, turns = found.ledger.tokens_by_replica(), found.ledger.turns_by_replica()
    wall_s = sum(step.rollout_s for step in found.steps)
    per_kind = dict.fromkeys(("dedicated", "opportunistic"), 0)
    for replica, kind in found.replicas.items():
        per_kind[kind] += tokens[replica]
    return {
        "tokens_per_s": {
            kind: rounded(count / wall_s, 2) if wall_s else None for kind, count in per_kind.items()
        },
        "tokens": {replica: tokens[replica] for replica in found.replicas},
        "turns": {replica: turns[replica] for replica in found.replicas},
        "rollout_s": round(wall_s, 2),
        "steps": [_step(step) for step in found.steps],
    }


def _step(step: StepRecord) -> dict[str, Any]:
    rewards = [one.reward for group in step.groups for one in group.trajectories]
    return {
        "rl_step": step.rl_step,
        "required_version": step.required_version,
        "groups": len(step.groups),
        "groups_resampled": sum(group.resampled for group in step.groups),
        "groups_without_variance": sum(not any(group.advantages) for group in step.groups),
        "trajectories": len(rewards),
        "goals_reached": sum(one.reached for group in step.groups for one in group.trajectories),
        "reward_mean": rounded(sum(rewards) / len(rewards)) if rewards else None,
        "rollout_s": round(step.rollout_s, 2),
        "train_s": round(step.trained.train_ms / 1e3, 2),
        "publish_s": round(step.trained.publish_ms / 1e3, 3),
        "update_s": round(step.update_s, 2),
        "loss": rounded(step.trained.loss, 6),
    }


def _turns(found: Findings) -> dict[str, Any]:
    ledger = found.ledger
    return {
        "asked": ledger.asked,
        "finished": len(ledger.answers),
        "aborted": ledger.aborted,
        "rerouted": len(ledger.rerouted),
        "rerouted_by_cut": len(ledger.cut),
        "lost": ledger.lost,
        "duplicated": ledger.duplicated,
        "replayed": ledger.replayed,
        "as_the_gateway_counts": found.gateway_turns,
    }


def _weights(found: Findings) -> dict[str, Any]:
    audits = [step.audit for step in found.steps]
    first = found.first_audit
    return {
        "versions_published": len(found.steps),
        "versions_applied": sum(not audit.digests_differ for audit in audits),
        "bitexact": first is not None and first.ok and all(audit.ok for audit in audits),
        "delta_bytes": sum(step.trained.delta_bytes for step in found.steps),
        "dense_bytes": sum(step.trained.dense_bytes for step in found.steps),
        "bytes_per_changed": _per_changed([step.trained for step in found.steps]),
        "pause_ms": {
            "p50": rounded(percentile(found.pauses_ms, 50)),
            "max": rounded(max(found.pauses_ms, default=None)),
        },
        "versions": [
            {
                "version": step.trained.version,
                "changed": step.trained.changed,
                "elements": step.trained.elements,
                "delta_bytes": step.trained.delta_bytes,
                "bytes_per_changed": _per_changed([step.trained]),
                "density_by_kind": {kind: round(each, 5) for kind, each in step.trained.density.items()},
                "digests_differ": list(step.audit.digests_differ),
                "prompts_differ": step.audit.prompts_differ,
                "prompts_moved_since_0": step.audit.prompts_moved,
            }
            for step in found.steps
        ],
    }


def _per_changed(versions: Sequence[Trained]) -> float | None:
    changed = sum(version.changed for version in versions)
    return round(sum(version.delta_bytes for version in versions) / changed, 3) if changed else None


def _gate(found: Findings) -> dict[str, Any]:
    if found.gate is None:
        return {"open_share": None}
    before, after = found.gate
    open_ns, closed_ns = after.open_ns - before.open_ns, after.closed_ns - before.closed_ns
    return {
        "open_share": rounded(open_ns / (open_ns + closed_ns), 4) if open_ns + closed_ns else None,
        "transitions": after.gate_transitions - before.gate_transitions,
        "overhead_us": {
            "p50": rounded(after.overhead_p50_ns / 1e3, 2),
            "p99": rounded(after.overhead_p99_ns / 1e3, 2),
        },
        "overhead_cpu_us": {
            "p50": rounded(after.overhead_cpu_p50_ns / 1e3, 2),
            "p99": rounded(after.overhead_cpu_p99_ns / 1e3, 2),
        },
    }


# ---- for people ---------------------------------------------------------------------------------


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report as a table."""
    table = Table(title="ROSE demo", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    for name, text in _lines(report):
        table.add_row(name, text)
    console.print(table)
    console.print(_placement_table(report["placement"]["rows"]))
    if report["ok"]:
        console.print("ok: nothing lost, nothing run twice, weights bit-exact, budgets kept", style="green")
    for reason in report["reasons"]:
        console.print(f"not ok: {reason}", style="red", markup=False)


def _lines(report: dict[str, Any]) -> Sequence[tuple[str, str]]:
    serving, rollout, turns = report["serving"], report["rollout"], report["turns"]
    weights, gate, budgets = report["weights"], report["gate"], report["budgets"]
    ttft, tpot, rates = serving["ttft_ms"], serving["tpot_ms"], rollout["tokens_per_s"]
    rewards = ", ".join(_number(step["reward_mean"], "{:.2f}") for step in rollout["steps"])
    dense = weights["dense_bytes"] / weights["delta_bytes"] if weights["delta_bytes"] else 0
    per_changed = _number(weights["bytes_per_changed"], "{:.2f}")
    share = _number(serving["within_budget_share"], "{:.2%}")
    attempts = f"{turns['aborted']} attempts aborted, {turns['rerouted']} turns rerouted"
    versions = f"{weights['versions_published']} versions published, {weights['versions_applied']} applied"
    pause = [_number(weights["pause_ms"][name], "{:.1f}") for name in ("p50", "max")]
    return [
        ("serving", f"{serving['requests']} requests, {share} in budget"),
        ("  TTFT", f"{_latency(ttft)} of {budgets['ttft_ms']:g} ms"),
        ("  TPOT", f"{_latency(tpot)} of {budgets['tpot_ms']:g} ms"),
        ("rollout", ", ".join(f"{_number(rate, '{:.0f}')} tokens/s {kind}" for kind, rate in rates.items())),
        ("  steps", f"{len(rollout['steps'])}, mean reward {rewards}"),
        ("turns", f"{turns['finished']} finished, {turns['lost']} lost, {turns['duplicated']} duplicated"),
        ("  moves", attempts),
        ("trajectories", "{finished} finished, {lost} lost".format_map(report["trajectories"])),
        ("weights", f"{versions}, {'bit-exact' if weights['bitexact'] else 'NOT bit-exact'}"),
        ("  deltas", f"{weights['delta_bytes']:,} bytes, 1/{dense:.0f} of dense, {per_changed} B/changed"),
        ("  pause", f"p50 {pause[0]} ms, max {pause[1]} ms"),
        ("gate", f"open {_number(gate['open_share'], '{:.0%}')} of the time"),
    ]


def _placement_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("process", "pid", "runs under", ""):
        table.add_column(heading)
    for row in rows:
        found = "; ".join(row["found"]) or "not found"
        mark = "" if row["ok"] else f"promised {row['promised']}"
        table.add_row(
            row["role"], " ".join(map(str, row["pids"])), found, mark, style="" if row["ok"] else "red"
        )
    return table


def _latency(values: dict[str, float | None]) -> str:
    return f"p50 {_number(values['p50'], '{:.1f}')} ms, p99 {_number(values['p99'], '{:.1f}')} ms"


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)
