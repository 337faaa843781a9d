"""The scheduler of the simulation: `rose.core`'s ClusterMachine, driven by virtual time.

It carries out the machine's effects on simulated engines and reports back what they do, as rose-scheduler
and rosed do together.  The same machine routes the turns of every system that is compared; systems differ in
the replicas they have and in when these may be used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, assert_never

from rose.core import dispatch
from rose.core.cluster import ClusterMachine, ClusterSettings
from rose.core.effects import (
    ClusterEffect,
    DispatchTurn,
    FailTurn,
    ForgetTrajectory,
    GrantLease,
    RevokeLease,
    Say,
    StopTurn,
    TellStep,
)
from rose.core.events import (
    ClusterEvent,
    JobStepBegan,
    JobStepEnded,
    JobSubmitted,
    NodeHeartbeat,
    NodeRegistered,
    ReplicaReport,
    Tick,
    TurnArrived,
    TurnCancelled,
    TurnFinished,
    TurnInterrupted,
    VersionPublished,
)
from rose.errors import RoseError
from rose.units import NS_PER_S, JobId, NodeId, ReplicaId, TrajectoryId, TurnId, WeightVersion
from rose_sim.engine import Engine
from rose_sim.hardware import Gpu
from rose_sim.loop import PS_PER_MS, PS_PER_S, Loop
from rose_sim.steps import Request

JOB = JobId("rl")
HEARTBEAT_S = 5
"""Nodes report this often, and at once when a replica's version or state changes."""
_NEVER_NS = 10**9 * NS_PER_S


class Replica:
    """One rollout engine as the scheduler knows it."""

    def __init__(self, name: str, engine: Engine, *, borrowed: bool) -> None:
        self.id = ReplicaId(name)
        self.node = NodeId(f"node-{name}")
        self.engine = engine
        self.borrowed = borrowed
        self.up = True
        self.silent = False
        """The network lets nothing of its node through."""
        self.gpu: Gpu | None = None
        self.hardware = ""
        """What its GPUs are rich in, in a pool of more than one kind."""
        self.version = 0
        self.reports = 0
        self.gate_open: Callable[[], bool] = lambda: True
        self.serving_kv_share: Callable[[], float] = lambda: 0.0

    def report(self) -> ReplicaReport:
        """What its node says of it."""
        return ReplicaReport(
            self.id,
            "opportunistic" if self.borrowed else "dedicated",
            "ready" if self.up else "starting",
            "sim:",
            "rollout",
            WeightVersion(self.version),
            gate_open=self.gate_open() if self.borrowed else True,
            kv_budget_tokens=self.engine.kv.capacity,
            kv_used_tokens=self.engine.kv.used,
            serving_kv_used_share=self.serving_kv_share() if self.borrowed else None,
            device=str(self.id) if self.borrowed else "",
            hardware=self.hardware,
        )


class Turn:
    """One LLM call of an episode, over all its attempts."""

    __slots__ = ("attempt", "done", "id", "output", "owner", "prompt", "replica", "request")

    def __init__(self, name: str, prompt: int, output: int, owner: Any) -> None:
        self.id = TurnId(name)
        self.prompt = prompt
        self.output = output
        self.owner = owner
        self.done = 0
        """Tokens of earlier attempts, which the gateway keeps."""
        self.attempt = 0
        self.replica: Replica | None = None
        self.request: Request | None = None


class Fleet:
    """Replicas, the machine that routes to them, and the turns on their way."""

    def __init__(
        self,
        loop: Loop,
        *,
        affinity: bool,
        hardware_affinity: bool,
        on_turn: Callable[[Turn, int], None],
        on_stale: Callable[[Turn], None],
    ) -> None:
        self.loop = loop
        self.replicas: dict[ReplicaId, Replica] = {}
        self.turns: dict[TurnId, Turn] = {}
        self.on_room: Callable[[], None] = lambda: None
        """Told when there may be more slots for trajectories."""
        self._cap = 0
        self._oldest = self._required = 0
        self._leased: dict[ReplicaId, None] = {}
        self._affinity = affinity
        self._hardware_affinity = hardware_affinity
        self._on_turn = on_turn
        self._on_stale = on_stale
        """Told of a turn whose trajectory was aborted as over-stale."""
        self._events: deque[ClusterEvent] = deque()
        self._stepping = False
        beat_ns = HEARTBEAT_S * NS_PER_S
        # Simulated engines do not stall and gates report themselves: those two sweeps are switched off.
        self.machine = ClusterMachine(
            ClusterSettings(
                stall_after_ns=2 * beat_ns,
                suspect_after_ns=3 * beat_ns,
                dead_after_ns=6 * beat_ns,
                turn_stall_ns=_NEVER_NS,
                turn_held_ns=_NEVER_NS,
                queue_max=1 << 40,
                gate_patience_ns=4 * beat_ns,
            )
        )

    # ---- setting up --------------------------------------------------------------------------------

    def add(self, replica: Replica) -> None:
        """A replica comes, on a node of its own."""
        self.replicas[replica.id] = replica
        self._step(NodeRegistered(replica.node, "sim", (replica.report(),)))
        offset = (len(self.replicas) * 37 % 100) * HEARTBEAT_S * PS_PER_S // 100
        self.loop.after(offset, self._beat, replica)

    def submit_job(
        self, *, dedicated: int, borrowed: int, cap: int, staleness_max: int, abort_stale: bool = False
    ) -> None:
        """The RL job asks for replicas, and may have `cap` trajectories on each.

        `abort_stale`: the bound holds for trajectories too, and not for turns alone.
        """
        self._cap, self._oldest = cap, staleness_max
        self._step(
            JobSubmitted(
                JOB,
                "rollout",
                dedicated,
                borrowed,
                staleness_max=staleness_max,
                trajectories_per_replica_max=cap,
                trajectory_staleness_max=staleness_max if abort_stale else None,
            )
        )

    def slots(self) -> int:
        """Trajectories that the leased replicas may hold."""
        oldest = self._required - self._oldest
        leased = (self.replicas[name] for name in self._leased)
        return self._cap * sum(each.up and each.version >= oldest for each in leased)

    # ---- the job -----------------------------------------------------------------------------------

    def begin_step(self, step: int, version: int) -> None:
        """An RL step begins on `version`."""
        self._required = version
        self._step(VersionPublished(JOB, WeightVersion(version)))
        self._step(JobStepBegan(JOB, step, WeightVersion(version)))

    def publish(self, version: int) -> None:
        """The trainer has a new version."""
        self._step(VersionPublished(JOB, WeightVersion(version)))

    def end_step(self, step: int) -> None:
        """Rollouts are complete."""
        self._step(JobStepEnded(JOB, step))

    def send(self, turn: Turn, trajectory: str, task: str) -> None:
        """An episode asks for a turn; `task` is the kind of work it is."""
        self.turns[turn.id] = turn
        pinned = TrajectoryId(trajectory if self._affinity else str(turn.id))
        kind = task if self._hardware_affinity else ""
        self._step(TurnArrived(turn.id, JOB, pinned, turn.prompt, turn.output, task=kind))

    def cancel(self, turn: Turn) -> None:
        """Nobody wants the turn any more."""
        self._end_attempt(turn)
        del self.turns[turn.id]
        self._step(TurnCancelled(turn.id))

    # ---- replicas ----------------------------------------------------------------------------------

    def finished(self, request: Request, now_ps: int) -> None:
        """An engine completed an attempt."""
        turn: Turn = request.owner
        if turn.request is not request:
            return  # stopped at the very instant of its end
        assert turn.replica is not None
        replica, turn.replica, turn.request = turn.replica, None, None
        turn.done += request.output
        assert turn.done == turn.output, (turn.id, turn.done, turn.output)
        self._step(TurnFinished(turn.id, replica.id, request.output, turn.attempt))
        del self.turns[turn.id]
        self._on_turn(turn, now_ps)

    def interrupt(self, request: Request, tokens: int, reason: str, *, failed: bool = False) -> None:
        """An engine ended an attempt early, with `tokens` tokens of it kept; `failed`: it does not answer."""
        turn: Turn = request.owner
        assert turn.replica is not None
        replica, turn.replica, turn.request = turn.replica, None, None
        turn.done += tokens
        self._step(TurnInterrupted(turn.id, replica.id, reason, tokens, turn.attempt, failed))
        self.loop.after(300 * PS_PER_MS, self._tick)

    def take_down(self, replica: Replica, reason: str) -> None:
        """A replica stops: its turns go on elsewhere, its KV is lost."""
        replica.up = False
        for request, tokens in replica.engine.abort_all():
            self.interrupt(request, tokens, reason)
        self.tell(replica)

    def bring_up(self, replica: Replica, version: int) -> None:
        """A replica is ready, on `version`."""
        replica.up = True
        self.update(replica, version)

    def update(self, replica: Replica, version: int) -> None:
        """A replica runs other weights: KV of the old ones is of no use."""
        if version != replica.version:
            replica.engine.kv.clear()
        replica.version = version
        self.tell(replica)
        self.on_room()

    def tell(self, replica: Replica) -> None:
        """The replica's node reports, if the network lets it."""
        if replica.silent:
            return
        replica.reports += 1
        self._step(NodeHeartbeat(replica.node, "sim", replica.reports, (replica.report(),)))

    # ---- inside ------------------------------------------------------------------------------------

    def _beat(self, _now_ps: int, replica: Replica) -> None:
        self.tell(replica)
        self.loop.after(HEARTBEAT_S * PS_PER_S, self._beat, replica)

    def _tick(self, _now_ps: int, _: object) -> None:
        self._step(Tick())

    def _step(self, event: ClusterEvent) -> None:
        """Give the machine an event; one that an effect causes waits until the effects are done."""
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        while self._events:
            for effect in self.machine.step(self._events.popleft(), self.loop.now_ns):
                self._carry_out(effect)
        self._stepping = False

    def _carry_out(self, effect: ClusterEffect) -> None:
        match effect:
            case DispatchTurn():
                self._dispatch(effect)
            case StopTurn():
                self._stop(effect)
            case ForgetTrajectory():
                pass  # its prefix leaves the engines' caches by age
            case GrantLease():
                self._leased[effect.replica] = None
            case RevokeLease():
                self._leased.pop(effect.replica, None)
            case TellStep() | Say():
                pass  # nodes of the simulation obey by what they report
            case FailTurn(code=dispatch.TRAJECTORY_STALE):
                self._on_stale(self.turns.pop(effect.turn))
            case FailTurn():
                raise RoseError(f"simulated turn {effect.turn} failed: {effect.text}")
            case _:
                assert_never(effect)

    def _dispatch(self, effect: DispatchTurn) -> None:
        turn = self.turns[effect.turn]
        replica = self.replicas[effect.replica]
        assert replica.version >= self._required - self._oldest, (effect, replica.version)
        trajectory = effect.turn.rpartition("/")[0]
        request = Request(turn.prompt + turn.done, turn.output - turn.done, key=trajectory, owner=turn)
        turn.attempt, turn.replica, turn.request = effect.attempt, replica, request
        if not replica.up:
            self.interrupt(request, 0, "engine_exited", failed=True)  # nobody has heard yet
        elif not replica.engine.submit(request):
            self.interrupt(request, 0, "rose:over_budget")

    def _stop(self, effect: StopTurn) -> None:
        turn = self.turns.get(effect.turn)
        if turn is not None and turn.attempt == effect.attempt:
            self._end_attempt(turn)

    def _end_attempt(self, turn: Turn) -> None:
        """Abort what runs; its tokens are kept, but for a last one that came this very instant."""
        request, turn.request, turn.replica = turn.request, None, None
        if request is not None and request.engine is not None:
            turn.done += min(request.engine.abort(request), request.output - 1)
