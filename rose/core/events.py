"""What can happen: the inputs of the node machine and the cluster machine.

Machines are sans-IO: `machine.step(event, now_ns) -> list[effect]`.  Events are frozen structs, tagged
with their name, so that a journal of (now, event, effects) replays bit for bit.
"""

from __future__ import annotations

import msgspec

from rose.core.readings import ReplicaReading, SlackReading, Unknown
from rose.core.report import ReplicaReport as ReplicaReport  # noqa: PLC0414 - others import it from here
from rose.units import JobId, NodeId, ReplicaId, TrajectoryId, TurnId, WeightVersion


class Event(msgspec.Struct, frozen=True, tag=True):
    """Base of all events."""


class Tick(Event, frozen=True):
    """Time passed; machines check their deadlines."""


# ---- node machine (rosed) -----------------------------------------------------------------------


class ServingObserved(Event, frozen=True):
    """The serving engine's board, and the health of its HTTP port as last probed."""

    slack: SlackReading | Unknown
    healthy: bool | Unknown


class ReplicaObserved(Event, frozen=True):
    """A rollout engine's board was read."""

    replica: ReplicaId
    reading: ReplicaReading | Unknown


class MemoryObserved(Event, frozen=True):
    """Device memory in use by the serving engine and free on the device."""

    serving_bytes: int | Unknown
    free_bytes: int | Unknown
    total_bytes: int | Unknown
    attributed: bool = True
    """False where the serving engine's processes were not found: then all use is charged to it."""


class DeviceObserved(Event, frozen=True):
    """The health of the shared device."""

    trouble: str
    """A stable code (`gpu_lost`, `gpu_access_lost`, `mps_recovering`, ...); empty: none is known of."""
    drains: bool = False
    """It is gone for good: replicas on it are drained."""
    advice: str = ""
    """What an operator can do."""


class EngineStarted(Event, frozen=True):
    """The process exists; it does not answer yet."""

    replica: ReplicaId
    pid: int


class EngineReady(Event, frozen=True):
    """The engine answers its health probe, and says which weights it runs."""

    replica: ReplicaId
    weight_version: WeightVersion
    adopted: bool = False


class EngineExited(Event, frozen=True):
    """The process ended, or never became ready (`code` None)."""

    replica: ReplicaId
    code: int | None
    reason: str


class VersionAvailable(Event, frozen=True):
    """The relay has a committed version for our job; its base (an anchor has none) and size, if known."""

    job: JobId
    version: WeightVersion
    base_version: WeightVersion | None = None
    anchor: bool = False
    nbytes: int = 0
    squashed: bool = False
    """Said of the delta on `base_version` that the trainer offers beside the version itself."""
    more: bool = False
    """More is told right after this: the way to take is chosen once all is known."""


class VersionStaged(Event, frozen=True):
    """All files of a version lie verified on this host; `path` is its directory."""

    job: JobId
    version: WeightVersion
    base_version: WeightVersion | None
    """None: an anchor, which follows any older version."""
    path: str


class VersionStageFailed(Event, frozen=True):
    """A version could not be pulled or did not verify; nothing changed."""

    job: JobId
    version: WeightVersion
    reason: str


class VersionsPruned(Event, frozen=True):
    """This host deleted what it had staged of these versions; they may be fetched again."""

    job: JobId
    versions: tuple[WeightVersion, ...]


class UndoReady(Event, frozen=True):
    """The host's copy can lead an engine from `base_version` back to `version`; `path` is the directory."""

    job: JobId
    version: WeightVersion
    base_version: WeightVersion
    path: str


class WeightsApplied(Event, frozen=True):
    """An engine runs `version`; its live digests equal the manifest's."""

    replica: ReplicaId
    version: WeightVersion


class WeightsRefused(Event, frozen=True):
    """An engine kept `version_held`; it refused or failed to apply `version`."""

    replica: ReplicaId
    version: WeightVersion
    version_held: WeightVersion | None
    reason: str
    held_back: bool = False
    """It kept its version because another replica of its lock-step could not follow."""
    mixed: bool = False
    """A write failed and could not be taken back: it holds no version, and generates nothing."""


class SchedulerConnected(Event, frozen=True):
    """The scheduler accepted our registration."""

    session: str


class SchedulerLost(Event, frozen=True):
    """The scheduler has been silent too long.  Replicas stay as they are."""


class StepBegan(Event, frozen=True):
    """A job began RL step `rl_step`; its turns need `required_version`.  Thaws frozen budgets."""

    job: JobId
    rl_step: int
    required_version: WeightVersion


class ReclaimRequested(Event, frozen=True):
    """Take memory back from a replica now, as if serving had come under pressure (drill or operator)."""

    replica: ReplicaId
    reason: str


class GateOverridden(Event, frozen=True):
    """The operator set a replica's gate mode (a GateMode), or took the override back (None)."""

    replica: ReplicaId
    mode: int | None
    token_cap: int = 0
    """Most tokens of a step while the override stands; 0: as configured."""


class DrainRequested(Event, frozen=True):
    """Take a replica out of use (or back into use): no new turns, and say so to the scheduler."""

    replica: ReplicaId
    drain: bool


class ActivityRequested(Event, frozen=True):
    """The operator switches a lent replica off (inactive and out of use) or on again."""

    replica: ReplicaId
    active: bool


class LeaseChanged(Event, frozen=True):
    """The scheduler granted a lease on a replica, or took it back."""

    replica: ReplicaId
    leased: bool


class PolicyChanged(Event, frozen=True):
    """The operator changed `[admission]` while rosed runs: the gates' policy from now on."""

    mode: int
    """A GateMode."""
    token_cap: int
    margin_ns: int


class LendingDecided(Event, frozen=True):
    """The lender (`rose.core.lender`) decided whether this host lends."""

    closed: int | None
    """Why it does not: a GateReason; None: it does."""
    text: str
    reserve_bytes: int = 0
    """Memory to keep free for serving, where that is more than the headroom."""


class DrillRequested(Event, frozen=True):
    """Take some blocks from a replica for a moment: how long does it take to have their memory back?"""

    replica: ReplicaId
    blocks: int


class PinRequested(Event, frozen=True):
    """The operator holds this host's engines at `version`, or lets them follow new ones again (None).

    Engines beyond it go back.
    """

    job: JobId
    version: WeightVersion | None


class ShutdownRequested(Event, frozen=True):
    """Stop every engine this node started; leave the serving engine alone."""


ReplicaOrder = ReclaimRequested | GateOverridden | DrainRequested | ActivityRequested | LeaseChanged
NodeEvent = (
    Tick | ServingObserved | ReplicaObserved | MemoryObserved | DeviceObserved | EngineStarted | EngineReady
    | EngineExited | VersionAvailable | VersionStaged | VersionStageFailed | VersionsPruned | UndoReady
    | WeightsApplied | WeightsRefused | SchedulerConnected | SchedulerLost | StepBegan | ReclaimRequested
    | GateOverridden | DrainRequested | PinRequested | ShutdownRequested
    | ActivityRequested | LeaseChanged | PolicyChanged | LendingDecided | DrillRequested
)  # fmt: skip


# ---- cluster machine (rose-scheduler) -----------------------------------------------------------


class NodeRegistered(Event, frozen=True):
    """A node came, or came back with a new `session`."""

    node: NodeId
    session: str
    replicas: tuple[ReplicaReport, ...]


class NodeHeartbeat(Event, frozen=True):
    """A node's periodic report; `sequence` grows within a session, older ones are dropped."""

    node: NodeId
    session: str
    sequence: int
    replicas: tuple[ReplicaReport, ...]


class NodeLeft(Event, frozen=True):
    """A node said goodbye."""

    node: NodeId
    session: str


class JobSubmitted(Event, frozen=True):
    """An RL job asks for replicas."""

    job: JobId
    model: str
    n_rl: int
    n_serving_max: int
    staleness_max: int = 0
    trajectories_per_replica_max: int = 16
    unknown_version_ok: bool = False
    """Its turns may run on weights of a version that is not known."""
    trajectory_staleness_max: int | None = None
    """Trajectories whose oldest tokens come from weights that lie further behind are aborted; None: never."""


class JobEnded(Event, frozen=True):
    """The job is over; its leases end."""

    job: JobId


class JobStepBegan(Event, frozen=True):
    """The job began an RL step on `required_version`; idempotent per (job, rl_step)."""

    job: JobId
    rl_step: int
    required_version: WeightVersion


class JobStepEnded(Event, frozen=True):
    """Rollouts of the step are complete."""

    job: JobId
    rl_step: int


class JobPaused(Event, frozen=True):
    """The client holds the job's turns back, or lets them go on.

    With `stop` those in flight end their attempts at once and wait with the others, their tokens kept.
    """

    job: JobId
    paused: bool
    stop: bool = False


class VersionPublished(Event, frozen=True):
    """The trainer committed a version to the relay."""

    job: JobId
    version: WeightVersion


class TurnArrived(Event, frozen=True):
    """An agent asked for one LLM call."""

    turn: TurnId
    job: JobId
    trajectory: TrajectoryId
    prompt_tokens: int
    """As far as known at arrival (characters/4 for text); only used to weigh load."""
    tokens_max: int
    group: str = ""
    """Turns of one group share their prompt; they run on one replica where that costs nothing."""
    task: str = ""
    """Kind of work, whose token mix decides which hardware suits it."""
    version_min: WeightVersion | None = None
    version_exact: WeightVersion | None = None
    """Runs on this version only."""
    hint: bool = False
    """The client named no trajectory; `trajectory` is a guess at it, worth a prefix but no imbalance."""


class TrajectoryPinned(Event, frozen=True):
    """The replica holds the trajectory's prefix, as the scheduler knows from before its restart."""

    job: JobId
    trajectory: TrajectoryId
    replica: ReplicaId
    born_version: WeightVersion | None = None
    """The weights of its oldest tokens, where the job bounds their age."""


class TrajectoryEnded(Event, frozen=True):
    """The client is done with a trajectory: nothing more is kept for it."""

    job: JobId
    trajectory: TrajectoryId


class TurnProgressed(Event, frozen=True):
    """The attempt on `replica` produced tokens (liveness is token progress, not wall time)."""

    turn: TurnId
    replica: ReplicaId
    tokens: int
    """Tokens of this attempt so far, so that a repeat changes nothing."""
    attempt: int = 0
    """The attempt of `DispatchTurn` that is meant; another than the present one is ignored.  0: not told."""


class TurnFinished(Event, frozen=True):
    """The answer is complete."""

    turn: TurnId
    replica: ReplicaId
    tokens: int
    """Tokens of this attempt."""
    attempt: int = 0


class TurnInterrupted(Event, frozen=True):
    """The attempt on `replica` ended early: budget cut, weight update, engine gone, connection lost."""

    turn: TurnId
    replica: ReplicaId
    reason: str
    tokens: int
    """Tokens of this attempt that the gateway kept."""
    attempt: int = 0
    failed: bool = False
    """It is a fault of the engine, which did not let go of the turn on purpose."""


class TurnRefused(Event, frozen=True):
    """The engine refused the request itself (a 4xx, passed on to the client): trying again is no use."""

    turn: TurnId
    replica: ReplicaId
    reason: str
    attempt: int = 0


class TurnCancelled(Event, frozen=True):
    """The client went away."""

    turn: TurnId


class ReplicaDrainRequested(Event, frozen=True):
    """The operator drains (or undrains) a replica."""

    replica: ReplicaId
    drain: bool
    restored: bool = False
    """As it was before the scheduler's restart: the replica may not be there yet."""


class ReplicaDistrusted(Event, frozen=True):
    """Its attempts only failed before the scheduler's restart: one turn at a time tries it again."""

    replica: ReplicaId


# The frequent ones first: they are told apart in this order.
ClusterTurnEvent = (
    TurnArrived | TurnFinished | TurnProgressed | TurnInterrupted | TurnRefused | TurnCancelled
    | TrajectoryPinned | TrajectoryEnded
)  # fmt: skip
ClusterNodeEvent = NodeHeartbeat | NodeRegistered | NodeLeft | ReplicaDrainRequested | ReplicaDistrusted
ClusterJobEvent = JobSubmitted | JobEnded | JobPaused | JobStepBegan | JobStepEnded | VersionPublished
ClusterEvent = Tick | ClusterTurnEvent | ClusterNodeEvent | ClusterJobEvent
