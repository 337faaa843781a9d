"""What the scheduler's machine shows of itself: plain structs for `rose status` and the job API."""

from __future__ import annotations

import msgspec

from rose.core.events import JobSubmitted
from rose.core.membership import Replica
from rose.core.placement import Lease
from rose.core.suspension import Tally
from rose.core.turns import JobTurns, TurnCounts
from rose.core.versions import JobVersions
from rose.units import JobId, NodeId, ReplicaId, TrajectoryId, WeightVersion


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
    weight_version: WeightVersion | None
    """None: not known."""
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

    @classmethod
    def of(
        cls,
        replica: Replica,
        node_state: str,
        lease: Lease | None,
        eligible: bool,
        in_flight: int,
        tally: Tally,
    ) -> ReplicaView:
        """What membership, placement, routing and dispatch know of it."""
        report = replica.report
        return cls(
            replica=replica.id,
            node=replica.node,
            kind=report.kind,
            state=report.state,
            node_state=node_state,
            url=report.url,
            weight_version=report.weight_version,
            updating=report.updating,
            drained=replica.drained,
            gate_open=replica.gate_open,
            gate_held=replica.gate_held,
            job=None if lease is None else lease.job,
            lease=None if lease is None else lease.lease,
            eligible=eligible,
            turns_in_flight=in_flight,
            turns_finished=tally.turns_finished,
            tokens=tally.tokens,
        )


class JobView(msgspec.Struct, frozen=True):
    """One job, as GET /rose/v1/jobs/{job} answers it."""

    job: JobId
    model: str
    required_version: WeightVersion
    latest_version: WeightVersion
    rl_step: int | None
    rolling: bool
    """Between the begin and the end of a step."""
    paused: bool
    """A client holds its turns back."""
    staleness_max: int
    trajectory_staleness_max: int | None
    trajectories_stale: int
    """Aborted or refused as over-stale since the scheduler started."""
    n_rl: int
    n_serving_max: int
    trajectories_per_replica_max: int
    turns_queued: int
    turns_in_flight: int
    replicas: tuple[ReplicaView, ...]

    @classmethod
    def of(
        cls,
        spec: JobSubmitted,
        versions: JobVersions,
        turns: JobTurns,
        turns_queued: int,
        turns_in_flight: int,
        replicas: tuple[ReplicaView, ...],
    ) -> JobView:
        """The job's terms, versions, turns and replicas."""
        return cls(
            job=spec.job,
            model=spec.model,
            required_version=versions.required,
            latest_version=versions.latest,
            rl_step=versions.rl_step,
            rolling=turns.rolling,
            paused=turns.paused,
            staleness_max=spec.staleness_max,
            trajectory_staleness_max=spec.trajectory_staleness_max,
            trajectories_stale=turns.stale,
            n_rl=spec.n_rl,
            n_serving_max=spec.n_serving_max,
            trajectories_per_replica_max=spec.trajectories_per_replica_max,
            turns_queued=turns_queued,
            turns_in_flight=turns_in_flight,
            replicas=replicas,
        )


class TrajectoryView(msgspec.Struct, frozen=True):
    """A trajectory that has run lately."""

    trajectory: TrajectoryId
    job: JobId
    replica: ReplicaId
    """The replica that holds its prefix."""
    prefix_tokens: int
    """After its last finished turn; 0 if none finished there."""
    idle_ms: float
    """Since its last turn was sent."""


class ClusterView(msgspec.Struct, frozen=True):
    """Everything."""

    turns: TurnCounts
    pins: int
    nodes: tuple[NodeView, ...]
    replicas: tuple[ReplicaView, ...]
    jobs: tuple[JobView, ...]
