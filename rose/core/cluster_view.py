"""What the scheduler's machine shows of itself: plain structs for `rose status` and the job API."""

from __future__ import annotations

import msgspec

from rose.core.turns import TurnCounts
from rose.units import JobId, NodeId, ReplicaId, WeightVersion


class NodeView(msgspec.Struct, frozen=True):
    """One node."""

    node: NodeId
    state: str
    session: str | None
    silent_ms: float


class ReplicaView(msgspec.Struct, frozen=True):
    """One replica of a node that is not dead."""

    replica: ReplicaId
    node: NodeId
    kind: str
    state: str
    """As the node reports it; see `node_state` and `drained` for what else keeps turns away."""
    node_state: str
    url: str
    weight_version: WeightVersion
    updating: bool
    drained: bool
    gate_open: bool
    gate_held: bool
    job: JobId | None
    """The job that holds its lease."""
    lease: int | None
    eligible: bool
    """Takes a turn of that job now."""
    turns_in_flight: int
    turns_finished: int
    tokens: int
    """Tokens of all attempts that ended here."""


class JobView(msgspec.Struct, frozen=True):
    """One job, as GET /rose/v1/jobs/{job} answers it."""

    job: JobId
    model: str
    required_version: WeightVersion
    latest_version: WeightVersion
    rl_step: int | None
    rolling: bool
    """Between the begin and the end of a step."""
    staleness_max: int
    n_rl: int
    n_serving_max: int
    trajectories_per_replica_max: int
    turns_queued: int
    turns_in_flight: int
    replicas: tuple[ReplicaView, ...]


class ClusterView(msgspec.Struct, frozen=True):
    """Everything."""

    turns: TurnCounts
    pins: int
    nodes: tuple[NodeView, ...]
    replicas: tuple[ReplicaView, ...]
    jobs: tuple[JobView, ...]
