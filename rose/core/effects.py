"""What machines decide: data for a driver to carry out, in order.

A machine never does anything itself.  Effects of one `step` are to be done in list order; a driver
reports every outcome back as an event.  All are idempotent or carry an id or a revision.
"""

from __future__ import annotations

import msgspec

from rose.core.readings import GatePolicy
from rose.units import JobId, NodeId, ReplicaId, TrajectoryId, TurnId, WeightVersion


class Effect(msgspec.Struct, frozen=True, tag=True):
    """Base of all effects."""


class Say(Effect, frozen=True):
    """One log line for the operator, with a stable reason code and what it concerns."""

    level: str
    code: str
    text: str
    subject: str = ""


# ---- node machine (rosed) -----------------------------------------------------------------------


class StartEngine(Effect, frozen=True):
    """Spawn the replica's engine process (attempt number for the log); answer EngineStarted."""

    replica: ReplicaId
    attempt: int


class StopEngine(Effect, frozen=True):
    """End the replica's engine process: terminate, then kill after `grace_ns`; answer EngineExited."""

    replica: ReplicaId
    grace_ns: int
    reason: str


class PublishGate(Effect, frozen=True):
    """Write the policy on the replica's gate board and ring its bell.

    The driver renews `alive_until_ns` between decisions as long as its own loop is healthy.
    """

    replica: ReplicaId
    policy: GatePolicy


class PullVersion(Effect, frozen=True):
    """Pull a version's files from the relay into the host store.

    `base_version` is what the engines hold by then: only a delta on it, or an anchor, is of use to them.
    `squashed`: fetch the one delta on it that the trainer offers beside the version.  Answer VersionStaged
    with the base that the manifest names, or VersionStageFailed.
    """

    job: JobId
    version: WeightVersion
    base_version: WeightVersion
    squashed: bool = False


class ApplyVersion(Effect, frozen=True):
    """Have an engine go from `base_version` to `version`; answer WeightsApplied or WeightsRefused.

    `version` is below `base_version` only where the operator had versions taken back.
    `abort_in_flight`: requests in flight are aborted and resume elsewhere (staleness 0), else kept.
    `together`: the replicas, this one among them, that all go there or all stay; empty: it goes alone.
    """

    replica: ReplicaId
    version: WeightVersion
    base_version: WeightVersion
    path: str
    abort_in_flight: bool
    together: tuple[ReplicaId, ...] = ()


class ReportNow(Effect, frozen=True):
    """Send the scheduler a heartbeat at once, as something it routes by has changed."""


class TakeBackMeasured(Effect, frozen=True):
    """A drill is over: so long it took to have the memory of some blocks back."""

    replica: ReplicaId
    blocks: int
    duration_ns: int


NodeEffect = (
    Say | StartEngine | StopEngine | PublishGate | PullVersion | ApplyVersion | ReportNow | TakeBackMeasured
)  # fmt: skip


# ---- cluster machine (rose-scheduler) -----------------------------------------------------------


class DispatchTurn(Effect, frozen=True):
    """Send the turn to a replica, with the tokens of earlier attempts; `why` names the routing rule."""

    turn: TurnId
    replica: ReplicaId
    attempt: int
    why: str
    version: WeightVersion | None = None
    """The replica's weights, where the job bounds the age of trajectories."""


class StopTurn(Effect, frozen=True):
    """Abort the turn's attempt on a replica (it stalled, must move, or its client is gone).

    The attempt counts as ended: tokens that came before this are kept, those after it are dropped, and
    nothing more is reported of it.
    """

    turn: TurnId
    replica: ReplicaId
    reason: str
    attempt: int = 0


class FailTurn(Effect, frozen=True):
    """Answer the turn with an error: it can never be served (unknown job, too long, stale)."""

    turn: TurnId
    status: int
    code: str
    text: str


class GrantLease(Effect, frozen=True):
    """Promise a replica to a job."""

    node: NodeId
    replica: ReplicaId
    job: JobId
    lease: int


class RevokeLease(Effect, frozen=True):
    """Take the promise back."""

    node: NodeId
    replica: ReplicaId
    job: JobId
    lease: int
    reason: str


class TellStep(Effect, frozen=True):
    """Tell a node that a job's RL step began."""

    node: NodeId
    job: JobId
    rl_step: int
    required_version: WeightVersion


class ForgetTrajectory(Effect, frozen=True):
    """The trajectory's pin is gone (its replica left)."""

    trajectory: TrajectoryId


ClusterEffect = (
    Say | DispatchTurn | StopTurn | FailTurn | GrantLease | RevokeLease | TellStep | ForgetTrajectory
)
