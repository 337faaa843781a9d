"""What the node machine is told once (`NodeSettings`) and what it shows to operators (`NodeView`)."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from rose.core.lifecycle import LifecycleSettings
from rose.core.memory import MemorySettings
from rose.core.readings import GateMode
from rose.units import JobId, NodeId, ReplicaId, WeightVersion


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout engine of this host."""

    replica: ReplicaId
    kind: Literal["opportunistic", "dedicated"]
    url: str
    model: str
    """Name under which it serves the rollout model."""
    block_tokens: int
    context_tokens_max: int
    block_bytes: int = 0
    """Bytes of one KV block; 0 if not known."""
    device: str = ""
    """Identity of the serving device lent; empty if dedicated."""
    follows_leases: bool = False
    """Inactive while no job holds a lease on it."""
    hardware: str = ""
    """What the device is rich in, `compute` or `bandwidth`; empty: not told."""


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that the node machine needs to know; fixed for its life."""

    node: NodeId
    job: JobId
    replicas: tuple[ReplicaSettings, ...]
    ttft_slo_ns: int
    tpot_slo_ns: int
    serving: str = ""
    """Name of the serving engine; empty: none here."""
    gate_mode: GateMode = GateMode.STRICT
    """Mode of opportunistic replicas; dedicated ones are always open."""
    token_cap: int = 512
    margin_ns: int = 5_000_000
    gate_lease_ns: int = 1_000_000_000
    memory_stale_ns: int = 10_000_000_000
    """A reading of the device's memory older than this is unknown."""
    memory: MemorySettings = MemorySettings()
    """`block_bytes` in here is replaced by that of each replica."""
    lifecycle: LifecycleSettings = LifecycleSettings()
    kv_share_max: float = 1.0
    """Most of its KV blocks that a lent replica may use."""
    abort_in_flight: bool = True
    """Requests in flight at a weight update are aborted and resume elsewhere (staleness 0)."""
    weight_attempts_max: int = 3
    """Refusals of an update in a row before the replica counts as failed."""

    def __post_init__(self) -> None:
        ids = [settings.replica for settings in self.replicas]
        if len(set(ids)) != len(ids):
            raise ValueError(f"replica ids are not unique: {', '.join(ids)}")
        if not 0 < self.kv_share_max <= 1:
            raise ValueError(f"kv_share_max must lie in (0, 1], not {self.kv_share_max}")
        if self.weight_attempts_max < 1 or self.gate_lease_ns <= 0:
            raise ValueError("weight_attempts_max and gate_lease_ns must be above 0")


class ServingState(StrEnum):
    """The serving engine, as far as can be told."""

    NONE = "none"
    """This host has no serving engine."""
    UNKNOWN = "unknown"
    UNHEALTHY = "unhealthy"
    """Its HTTP port does not answer, or answers with an error."""
    IDLE = "idle"
    BUSY = "busy"


class ServingView(msgspec.Struct, frozen=True, kw_only=True):
    """The serving engine."""

    name: str
    state: ServingState
    reason: str = ""
    """Why the state is unknown."""
    waiting: int | None = None
    running: int | None = None
    ttft_slack_ms: float | None = None
    """Time left before serving must begin with the waiting prefills; None if none waits, or not known."""
    tpot_slack_ms: float | None = None
    """Time left before it must begin the next decode step."""
    drift: float | None = None
    """Measured over predicted time of its recent steps."""
    kv_used_share: float | None = None


class GateView(msgspec.Struct, frozen=True):
    """A gate, as its engine last reported it."""

    open: bool
    reason: str
    """A GateReason in lower case, or `unknown: <why>`."""
    mode: str
    """The mode rosed asked for."""
    drift: float | None = None
    """Measured over predicted time of recent rollout steps; far from 1 after the engine's speed changed."""
    margin_ms: float | None = None
    """Margin that the errors of those predictions call for."""


class MemoryView(msgspec.Struct, frozen=True, kw_only=True):
    """The KV budget of an opportunistic replica, and the device's memory."""

    state: str
    budget_blocks: int | None
    """None until the engine told its size."""
    budget_bytes: int | None
    """None also where the size of a block is not known."""
    cuts: int
    serving_bytes: int | None
    free_bytes: int | None
    total_bytes: int | None
    headroom_bytes: int | None


class WeightUpdate(msgspec.Struct, frozen=True):
    """A committed weight update of one replica."""

    version: WeightVersion
    base_version: WeightVersion
    duration_ms: float
    at_ns: int
    """CLOCK_MONOTONIC."""


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica."""

    id: ReplicaId
    kind: str
    state: str
    reason: str
    """Why it is not usable, or last was not; empty if nothing is wrong."""
    url: str
    pid: int
    attempts: int
    weight_version: WeightVersion
    gate: GateView
    memory: MemoryView | None
    """None for a dedicated replica: its budget is never cut."""
    running: int | None
    waiting: int | None
    kv_used_blocks: int | None
    kv_total_blocks: int | None
    tokens: int | None
    aborted_requests: int | None
    last_update: WeightUpdate | None
    active: bool = True
    """False while its KV memory is given back, and until its engine said that it is active again."""
    activation_ms: float | None = None
    """How long the latest activation took."""
    kv_resident_bytes: int | None = None
    """Physical memory of its KV cache, as measured; None if not known."""


class UnknownSignal(msgspec.Struct, frozen=True):
    """A signal that cannot be read, and what that stops."""

    signal: str
    reason: str
    age_ms: float | None
    blocks: str


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """All that `rose status` shows of a node."""

    node: NodeId
    job: JobId
    now_ns: int
    healthy: bool
    """Every replica runs (or is drained), and serving, if there is one, can be seen and answers."""
    scheduler_session: str | None
    """None while the scheduler does not know us."""
    rl_step: int
    required_version: WeightVersion
    newest_version: WeightVersion
    staged_versions: tuple[WeightVersion, ...]
    pulling_version: WeightVersion | None
    pinned_version: WeightVersion | None
    """Engines go no further, by the operator's order."""
    serving: ServingView
    gate: GateView | None
    """That of the first opportunistic replica; None if there is none."""
    memory: MemoryView | None
    """That of the first opportunistic replica."""
    replicas: tuple[ReplicaView, ...]
    unknown: tuple[UnknownSignal, ...]
    device_trouble: str = ""
    """What is wrong with the shared device: a stable code."""
