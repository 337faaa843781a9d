"""The answer to `rose status`; its stable keys are those of the report conventions."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from rose import __version__
from rose.config import Config
from rose.core.events import MemoryObserved
from rose.core.nodeview import GateView, MemoryView, NodeView, ReplicaView, UnknownSignal
from rose.core.readings import Unknown
from rose.units import NS_PER_MS, NS_PER_S, ReplicaId
from rose_daemon.node.updates import Staging, Update, UpdateHistory
from rose_daemon.telemetry import faults
from rose_daemon.telemetry.engine_metrics import Averages, EngineMetrics

SCHEMA = 1
_USABLE = ("ready", "updating", "inactive", "draining")


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver knows and the machine does not."""

    started_at: datetime
    uptime_s: float
    device_name: str
    sharing: str
    """`mps` or `time-slice`."""
    utilisation: float | Unknown
    """Busy share of the device."""
    memory_bytes: int | Unknown
    """Capacity of the device."""
    scheduler_address: str
    metrics: EngineMetrics
    """Of the serving engine; its board, where that can be read, is fresher."""
    averages: Averages
    turns_in_flight: Mapping[ReplicaId, int] | None
    """As the scheduler last said; None while it does not know us."""
    leases: Mapping[ReplicaId, str]
    """Job that each leased replica is promised to."""
    relay_error: str
    journal_lost: int
    gate_transitions_lost: int


def status_body(
    config: Config, view: NodeView, around: Surroundings, history: UpdateHistory
) -> dict[str, Any]:
    """JSON of `rose status --json`.  A value that is not known is null, and `unknown` says why."""
    problems = _problems(view, around)
    return {
        "schema": SCHEMA,
        "command": "status",
        "started_at": around.started_at.isoformat(timespec="seconds"),
        "machine": {
            "host": platform.node(),
            "cpus": os.cpu_count(),
            "platform": platform.platform(terse=True),
            "rose": __version__,
        },
        "node": view.node,
        "host": {
            "name": platform.node(),
            "pid": os.getpid(),
            "uptime_s": round(around.uptime_s, 1),
            "now": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        "devices": [_device(config, view, around)],
        "serving": _serving(config, view, around),
        "gate": _gate(view.gate),
        "memory": _memory(view),
        "replicas": [_replica(replica, view, around, history) for replica in view.replicas],
        "scheduler": {
            "address": around.scheduler_address,
            "state": "registered" if view.scheduler_session else "not_registered",
        },
        "relay": {"url": config.relay.address, "error": around.relay_error},
        "job": {
            "id": view.job,
            "rl_step": view.rl_step,
            "required_version": view.required_version,
            "newest_version": view.newest_version,
            "staged_versions": list(view.staged_versions),
            "pulling_version": view.pulling_version,
            "pinned_version": view.pinned_version,
        },
        "last_update": _update(history.latest(), view.now_ns),
        "updates": [_update(update, view.now_ns) for update in history],
        "last_staging": _last_staging(history, view.now_ns),
        "stagings": [_staging(staging, view.now_ns) for staging in history.stagings],
        "journal": {
            "lost": around.journal_lost,
            "gate_transitions_lost": around.gate_transitions_lost,
        },
        "healthy": not problems,
        "problems": problems,
    }


def supervisor_line(view: NodeView, memory: MemoryObserved, lends: bool) -> str:
    """One line for the service manager (`systemctl status rosed`)."""
    if lends and isinstance(memory.free_bytes, Unknown):
        hint = faults.advice(memory.free_bytes.reason)
        return hint or f"rollout is held back: device memory is unknown ({memory.free_bytes})"
    ready = sum(replica.state in _USABLE for replica in view.replicas)
    return f"{ready} of {len(view.replicas)} replicas in use"


def _problems(view: NodeView, around: Surroundings) -> list[str]:
    """Why the host is not ready, one line each; empty when it is healthy."""
    found = [
        f"replica {replica.id} is {replica.state}" + (f": {replica.reason}" if replica.reason else "")
        for replica in view.replicas
        if replica.state not in _USABLE
    ]
    if view.device_trouble:
        found.append(f"device {around.device_name} is in trouble: {view.device_trouble}")
    if view.serving.state.value in ("unknown", "unhealthy"):
        found.append(
            f"serving engine {view.serving.name} is {view.serving.state.value}: {view.serving.reason}"
        )
    if view.scheduler_session is None:
        found.append(f"rose-scheduler does not answer on {around.scheduler_address}")
    return found


def _device(config: Config, view: NodeView, around: Surroundings) -> dict[str, Any]:
    measured = {"memory_bytes": around.memory_bytes, "utilisation": around.utilisation}
    unknown = [_signal(signal) for signal in view.unknown]
    unknown += [
        {"signal": name, "reason": value.reason, "age_s": _age(value), "blocks": ""}
        for name, value in measured.items()
        if isinstance(value, Unknown)
    ]
    return {
        "uuid": config.device.id,
        "name": around.device_name,
        "kind": config.device.kind,
        "trouble": view.device_trouble,
        "sharing": around.sharing,
        **{name: None if isinstance(value, Unknown) else value for name, value in measured.items()},
        "unknown": unknown,
    }


def _serving(config: Config, view: NodeView, around: Surroundings) -> dict[str, Any]:
    serving = view.serving
    kv_used_share = serving.kv_used_share
    if kv_used_share is None and not isinstance(around.metrics.kv_used_share, Unknown):
        kv_used_share = around.metrics.kv_used_share
    return {
        "name": serving.name,
        "mode": config.serving.mode,
        "url": config.serving.url,
        "state": serving.state.value,
        "reason": serving.reason,
        "waiting": serving.waiting,
        "running": serving.running,
        "ttft_slack_ms": serving.ttft_slack_ms,
        "tpot_slack_ms": serving.tpot_slack_ms,
        "drift": serving.drift,
        "kv_used_share": kv_used_share,
        "metrics": _metrics(around),
    }


def _metrics(around: Surroundings) -> dict[str, Any]:
    """What the serving engine's own metrics say; averages of the latest period."""
    metrics, averages = around.metrics, around.averages
    values: dict[str, float | Unknown] = {
        "running": metrics.running,
        "waiting": metrics.waiting,
        "kv_used_share": metrics.kv_used_share,
        "ttft_s": averages.ttft_s,
        "inter_token_s": averages.inter_token_s,
    }
    unknown = [
        {"signal": name, "reason": value.reason, "age_s": _age(value), "blocks": ""}
        for name, value in values.items()
        if isinstance(value, Unknown)
    ]
    known = {name: None if isinstance(value, Unknown) else value for name, value in values.items()}
    return {**known, "unknown": unknown}


def _gate(gate: GateView | None) -> dict[str, Any]:
    if gate is None:
        return {"open": None, "reason": "no_opportunistic_replica", "mode": None}
    return msgspec.to_builtins(gate)  # type: ignore[no-any-return]


def _memory(view: NodeView) -> dict[str, Any]:
    if view.memory is None:
        reason = "no_opportunistic_replica"
        empty: dict[str, Any] = dict.fromkeys(MemoryView.__struct_fields__)
        unknown = [
            {"signal": name, "reason": reason, "age_s": None, "blocks": ""}
            for name in ("budget_bytes", "serving_bytes", "headroom_bytes")
        ]
        return {**empty, "state": "none", "unknown": unknown}
    fields: dict[str, Any] = msgspec.to_builtins(view.memory)
    fields["unknown"] = [
        {"signal": name, "reason": _why(view, name), "age_s": None, "blocks": "lending"}
        for name, value in fields.items()
        if value is None
    ]
    return fields


def _why(view: NodeView, field: str) -> str:
    """Why a value of the memory section is not known."""
    if field == "budget_blocks":
        return "engine_not_sized"
    if field == "budget_bytes":
        return "block_bytes_unknown" if view.memory and view.memory.budget_blocks else "engine_not_sized"
    reasons = [
        signal.reason for signal in view.unknown if "memory" in signal.signal or field in signal.signal
    ]
    return reasons[0] if reasons else "not_observed"


def _replica(
    replica: ReplicaView, view: NodeView, around: Surroundings, history: UpdateHistory
) -> dict[str, Any]:
    turns = around.turns_in_flight
    return {
        "id": replica.id,
        "kind": replica.kind,
        "state": replica.state,
        "reason": replica.reason,
        "url": replica.url,
        "pid": replica.pid,
        "attempts": replica.attempts,
        "weight_version": replica.weight_version,
        "turns_in_flight": None if turns is None else turns.get(replica.id, 0),
        "leased_to": around.leases.get(replica.id),
        "active": replica.active,
        "activation_ms": replica.activation_ms,
        "kv_resident_bytes": replica.kv_resident_bytes,
        "gate": _gate(replica.gate),
        "memory_state": replica.memory.state if replica.memory else None,
        "cuts": replica.memory.cuts if replica.memory else 0,
        "kv_blocks": {
            "used": replica.kv_used_blocks,
            "budget": replica.memory.budget_blocks if replica.memory else replica.kv_total_blocks,
            "total": replica.kv_total_blocks,
        },
        "running": replica.running,
        "waiting": replica.waiting,
        "tokens": replica.tokens,
        "aborted_requests": replica.aborted_requests,
        "last_update": _update(history.latest(replica.id), view.now_ns),
    }


def _update(update: Update | None, now_ns: int) -> dict[str, Any] | None:
    if update is None:
        return None
    fields: dict[str, Any] = msgspec.to_builtins(update)
    total_ms, at_ns = fields.pop("total_ms"), fields.pop("at_ns")
    return {**fields, "ms": round(total_ms, 3), **_when(at_ns, now_ns)}


def _staging(staging: Staging, now_ns: int) -> dict[str, Any]:
    """What a version took to get here, and what it changes."""
    fields: dict[str, Any] = msgspec.to_builtins(staging)
    at_ns = fields.pop("at_ns")
    del fields["kinds"]
    changed = staging.change.changed
    return {
        **fields,
        "changed": changed,
        "density": staging.change.density,
        "bytes_per_changed": staging.delta_bytes / changed if changed else None,
        **_when(at_ns, now_ns),
    }


def _last_staging(history: UpdateHistory, now_ns: int) -> dict[str, Any] | None:
    """The same of the newest one, with its densities by kind of tensor."""
    if not history.stagings:
        return None
    staging = history.stagings[-1]
    return {
        **_staging(staging, now_ns),
        "density_by_kind": {kind.kind: kind.density for kind in staging.kinds},
    }


def _when(at_ns: int, now_ns: int) -> dict[str, float]:
    """How long ago, and when by the host's monotonic clock: to set it beside what others on the host saw."""
    return {
        "age_s": round((now_ns - at_ns) / NS_PER_S, 3),
        "at_monotonic_s": round(at_ns / NS_PER_S, 4),
    }


def _signal(signal: UnknownSignal) -> dict[str, Any]:
    age_s = None if signal.age_ms is None else signal.age_ms * NS_PER_MS / NS_PER_S
    return {"signal": signal.signal, "reason": signal.reason, "age_s": age_s, "blocks": signal.blocks}


def _age(unknown: Unknown) -> float | None:
    return None if unknown.age_ns is None else unknown.age_ns / NS_PER_S
