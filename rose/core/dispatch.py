"""The life of a turn: queued, in flight, and over.

A turn is queued or in flight until it is finished, failed or cancelled; then it is forgotten.  An attempt
that ends early for any reason puts its turn back into the queue, so no turn is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rose.core.cluster_settings import ClusterSettings
from rose.core.effects import ClusterEffect, DispatchTurn, FailTurn, ForgetTrajectory, Say, StopTurn
from rose.core.events import (
    JobPaused,
    ReplicaDistrusted,
    TrajectoryEnded,
    TrajectoryPinned,
    TurnArrived,
    TurnFinished,
    TurnInterrupted,
    TurnProgressed,
    TurnRefused,
)
from rose.core.pins import Pins
from rose.core.readings import NEVER
from rose.core.routing import Pick, Router, Want
from rose.core.staleness import Births
from rose.core.suspension import SUSPENDED, Suspensions, Tally
from rose.core.tokenmix import TokenMix
from rose.core.turns import JobTurns, Turn, TurnCounts
from rose.core.versions import ANY_VERSION, JobVersions, VersionWish
from rose.units import JobId, ReplicaId, TrajectoryId, TurnId, WeightVersion

TRAJECTORY_STALE = "trajectory_stale"
AttemptEvent = TurnProgressed | TurnFinished | TurnInterrupted | TurnRefused


class Dispatcher:
    """Accepts turns, sends them where the routers say, and sees them to their ends.

    Effects go to `effects`.  Queues move in `drain` only, so that a batch of changes is seen as one.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        effects: list[ClusterEffect],
        open_clock: Callable[[ReplicaId, int], int],
    ) -> None:
        self._settings = settings
        self._effects = effects
        self._open_clock = open_clock
        """(replica, now_ns) -> nanoseconds that its gate has been open: see `Replica.open_ns`."""
        self._jobs: dict[JobId, JobTurns] = {}
        self._turns: dict[TurnId, Turn] = {}
        self._touched: dict[JobId, None] = {}
        """Jobs whose queue may move."""
        self._sweep_ns = NEVER
        """When to look for stalled attempts next."""
        self._suspensions = Suspensions(settings)
        self.pins = Pins(settings.pins_max, settings.pin_ttl_ns)
        self._groups = Pins(settings.pins_max, settings.pin_ttl_ns)
        """Where each group ran last; the groups stand in for trajectories."""
        self._mix = TokenMix(settings.prefill_heavy_ratio)
        self.counts = TurnCounts()
        self.tallies: dict[ReplicaId, Tally] = {}

    def next_deadline_ns(self) -> int:
        """The latest instant for the next `tick`, or NEVER."""
        pins_ns = self.pins.next_deadline_ns()
        wakes = (job.queue.wake_ns for job in self._jobs.values())
        paused_ns = self._suspensions.next_deadline_ns()
        return min(NEVER if pins_ns is None else pins_ns, self._sweep_ns, paused_ns, *wakes)

    # ---- jobs and replicas -------------------------------------------------------------------------

    def add_job(self, job: JobId, router: Router, versions: JobVersions) -> JobTurns:
        """Take turns of a new job."""
        self._jobs[job] = JobTurns(job, router, versions, Births(versions, self._settings.pins_max))
        return self._jobs[job]

    def end_job(self, job: JobTurns) -> None:
        """Fail all its turns."""
        for turn in list(job.live.values()):
            self._stop(turn, "job_ended")
            self._close(job, turn)
            self._fail(turn.id, 410, "job_ended", f"job {job.job!r} ended")
        self._forget(self.pins.drop_job(job.job))
        self._groups.drop_job(job.job)
        self._mix.drop_job(job.job)
        del self._jobs[job.job]

    def replica_came(self, replica: ReplicaId) -> None:
        """Begin to count for it, unless that has begun."""
        self.tallies.setdefault(replica, Tally())

    def replica_left(self, replica: ReplicaId) -> None:
        """Its prefixes are gone; its turns have been moved."""
        self._forget(self.pins.drop_replica(replica))
        self._groups.drop_replica(replica)
        del self.tallies[replica]
        self._suspensions.forget(replica)

    def replica_leased(self, job: JobTurns, replica: ReplicaId) -> None:
        """The job may use it from now on."""
        if self._suspensions.tried_again(replica, self.tallies[replica]):
            job.router.throttle(replica, 1)
        self.touch(job)

    def distrust(self, event: ReplicaDistrusted) -> None:
        """The replica was left out before the scheduler was restarted."""
        self._suspensions.distrust(event.replica)

    def pause(self, job: JobTurns, event: JobPaused) -> None:
        """Hold the job's turns back, or let them go on."""
        job.paused = event.paused
        if event.paused and event.stop:
            for replica in job.router.busy():
                self.move_all(job, replica, "paused")
        self.touch(job)

    def move_unsuited(self, job: JobTurns, replica: ReplicaId) -> None:
        """Move attempts whose turn asked for another version than the replica runs by now."""
        version = job.router.version_on(replica)
        for turn in job.router.turns_on(replica):
            if not self._turns[turn].versions.admits(version):
                self._move(self._turns[turn], "version_unfit")

    def move_all(self, job: JobTurns, replica: ReplicaId, reason: str) -> None:
        """End all attempts on a replica; their turns go on elsewhere."""
        for turn in job.router.turns_on(replica):
            self._move(self._turns[turn], reason)

    def abort_stale(self, job: JobTurns) -> None:
        """The job's versions changed: trajectories that are over-stale by it end, and are counted."""
        if job.versions.birth_floor is None:
            return
        before = job.stale
        for turn in list(job.live.values()):
            if not turn.hint and (text := job.births.over_stale(turn.trajectory)):
                job.stale += job.births.counts(turn.trajectory)
                self._stop(turn, TRAJECTORY_STALE)
                self._close(job, turn)
                self._fail(turn.id, 409, TRAJECTORY_STALE, text)
        if aborted := job.stale - before:
            text = f"aborted {aborted} that began before version {job.versions.birth_floor}"
            self._effects.append(Say("info", TRAJECTORY_STALE, text, job.job))

    def touch(self, job: JobTurns) -> None:
        """Something changed that may let the job's queue move."""
        self._touched[job.job] = None

    def drain(self, now_ns: int) -> None:
        """Dispatch what waits, as far as there is room."""
        while self._touched:
            name = next(iter(self._touched))
            del self._touched[name]
            if (job := self._jobs.get(name)) is not None:
                self._drain(job, now_ns)

    # ---- events ------------------------------------------------------------------------------------

    def pinned(self, event: TrajectoryPinned, now_ns: int) -> None:
        """The trajectory ran on a replica before the scheduler was restarted."""
        if (job := self._jobs.get(event.job)) is not None:
            self._forget(self.pins.put(event.job, event.trajectory, event.replica, now_ns))
            job.births.begun(event.trajectory, event.born_version)

    def forget_trajectory(self, event: TrajectoryEnded) -> None:
        """The client is done with it."""
        self._forget(self.pins.drop(event.job, event.trajectory))
        if (job := self._jobs.get(event.job)) is not None:
            job.births.drop(event.trajectory)

    def arrived(self, event: TurnArrived, now_ns: int) -> None:
        """A turn came."""
        if event.turn in self._turns:
            return
        self.counts.arrived += 1
        job = self._jobs.get(event.job)
        if job is None:
            self._fail(event.turn, 404, "job_unknown", f"no job {event.job!r} is running")
            return
        if not event.hint and (text := job.births.over_stale(event.trajectory)):
            job.stale += job.births.counts(event.trajectory)
            self._fail(event.turn, 409, TRAJECTORY_STALE, text)
            return
        wish = ANY_VERSION
        if event.version_min is not None or event.version_exact is not None:
            wish = VersionWish(event.version_min, event.version_exact)
        if wish is not ANY_VERSION and not job.router.could_run(wish):
            text = f"no replica runs {job.versions.unmet(wish)}"
            self._fail(event.turn, 409, "version_unavailable", text)
            return
        # A guess at the trajectory does not say that the turn continues one.
        resumes = not event.hint and self.pins.get(event.job, event.trajectory) is not None
        weight = event.prompt_tokens + event.tokens_max
        turn = Turn(event.turn, event.job, event.trajectory, weight, wish, event.hint, resumes)
        turn.group, turn.task, turn.prompt_tokens = event.group, event.task, event.prompt_tokens
        self._turns[turn.id] = job.live[turn.id] = turn
        self._enqueue(job, turn)
        self._drain(job, now_ns)
        del self._touched[job.job]
        if turn.replica is None and self.counts.queued > self._settings.queue_max:
            self._close(job, turn)
            self._fail(turn.id, 429, "queue_full", f"{self._settings.queue_max} turns wait already")

    def progressed(self, event: TurnProgressed, now_ns: int) -> None:
        """Tokens came: the attempt lives."""
        turn = self._current(event)
        if turn is not None and event.tokens > turn.tokens:
            turn.tokens = event.tokens
            turn.progress_ns = now_ns
            turn.progress_open_ns = self._open_clock(event.replica, now_ns)
            self.tallies[event.replica].progress_open_ns = turn.progress_open_ns
            self._works(event.replica, turn.job)

    def finished(self, event: TurnFinished) -> None:
        """The answer is complete."""
        turn = self._current(event)
        if turn is not None:
            turn.tokens = event.tokens
            self._measure(turn)
            self.tallies[event.replica].turns_finished += 1
            self._works(event.replica, turn.job)
            self._close(self._jobs[turn.job], turn)
            self.counts.finished += 1

    def interrupted(self, event: TurnInterrupted, now_ns: int) -> None:
        """The engine ended the attempt: the turn goes on, elsewhere if it can."""
        turn = self._current(event)
        if turn is not None:
            turn.tokens = event.tokens
            if not event.tokens and turn.attempt == 1:
                self._jobs[turn.job].births.undo(turn.trajectory, turn.id)
            if event.failed and not event.tokens:
                self._failed_on(event.replica, turn.job, now_ns)
            self._shun(turn, now_ns)
            self._requeue(turn)

    def refused(self, event: TurnRefused) -> None:
        """No engine would run the request; the client has the engine's answer."""
        turn = self._current(event)
        if turn is not None:
            self._close(self._jobs[turn.job], turn)
            self.counts.failed += 1

    def cancelled(self, turn_id: TurnId) -> None:
        """The client went away."""
        turn = self._turns.get(turn_id)
        if turn is not None:
            self._stop(turn, "client_gone")
            self._close(self._jobs[turn.job], turn)
            self.counts.cancelled += 1

    def tick(self, now_ns: int) -> None:
        """Time passed."""
        self._forget(self.pins.expire(now_ns))
        self._groups.expire(now_ns)
        if now_ns >= self._sweep_ns:
            self._sweep(now_ns)
        for job in self._jobs.values():
            if now_ns >= job.queue.wake_ns:
                job.queue.wake()
                self.touch(job)
        for over in self._suspensions.pop_over(now_ns):
            if (suspending := self._jobs.get(over.job)) is not None:
                suspending.router.throttle(over.replica, over.most)
                self.touch(suspending)

    # ---- inside ------------------------------------------------------------------------------------

    def _current(self, event: AttemptEvent) -> Turn | None:
        """The turn, if the event is about its present attempt."""
        turn = self._turns.get(event.turn)
        if turn is None or turn.replica != event.replica:
            return None
        return turn if event.attempt in (turn.attempt, 0) else None

    def _measure(self, turn: Turn) -> None:
        """A turn finished: note what its task is like, and how long its trajectory is now."""
        if turn.attempt == 1:  # one that moved did not do it all in this attempt
            fresh = max(0, turn.prompt_tokens - self.pins.tokens(turn.job, turn.trajectory))
            self._mix.observe(turn.job, turn.task, fresh, turn.tokens)
        self.pins.grew(turn.job, turn.trajectory, turn.prompt_tokens + turn.tokens)

    def _sweep(self, now_ns: int) -> None:
        """Move attempts that make no progress.  Rare, so that progress itself costs next to nothing."""
        for turn in list(self._turns.values()):
            if turn.replica is None:
                continue
            patience_ns = self._settings.turn_stall_ns
            silent_ns = now_ns - turn.progress_ns
            open_now_ns = self._open_clock(turn.replica, now_ns)
            open_ns = open_now_ns - turn.progress_open_ns
            if open_ns >= patience_ns or silent_ns >= self._settings.turn_held_ns:
                hung = open_now_ns - self.tallies[turn.replica].progress_open_ns >= patience_ns
                if open_ns >= patience_ns and (hung or not turn.tokens):
                    self._failed_on(turn.replica, turn.job, now_ns, hung=hung)
                self._shun(turn, now_ns)
                self._move(turn, "turn_stalled")
        self._sweep_ns = now_ns + self._settings.turn_stall_ns // 8 if self.counts.in_flight else NEVER

    def _works(self, replica: ReplicaId, name: JobId) -> None:
        """Tokens came from the replica."""
        if self._suspensions.works(replica, self.tallies[replica]):
            self._jobs[name].router.throttle(replica, None)
            self.touch(self._jobs[name])

    def _failed_on(self, replica: ReplicaId, name: JobId, now_ns: int, *, hung: bool = False) -> None:
        """An attempt failed on a replica without a token: leave it out if that is all it does."""
        how = self._suspensions.failed(replica, name, self.tallies[replica], now_ns, hung=hung)
        if how is None:
            return
        if how:
            self._effects.append(Say("warning", SUSPENDED, f"{how}: no turns for a while", replica))
        self._jobs[name].router.throttle(replica, 0)

    def _shun(self, turn: Turn, now_ns: int) -> None:
        """The attempt went wrong where it ran: note if it was fruitless, and keep away for a while."""
        turn.fruitless = 0 if turn.tokens else turn.fruitless + 1
        doublings = min(max(0, turn.fruitless - 1), 16)
        backoff_ns = min(self._settings.backoff_max_ns, self._settings.backoff_ns << doublings)
        turn.avoid, turn.avoid_until_ns = turn.replica, now_ns + backoff_ns

    def _move(self, turn: Turn, reason: str) -> None:
        """End the present attempt ourselves; the turn goes on elsewhere."""
        self._stop(turn, reason)
        self._requeue(turn)

    def _stop(self, turn: Turn, reason: str) -> None:
        if turn.replica is not None:
            self._effects.append(StopTurn(turn.id, turn.replica, reason, turn.attempt))

    def _requeue(self, turn: Turn) -> None:
        """The present attempt is over, but the turn is not."""
        job = self._jobs[turn.job]
        self.counts.interrupted += 1
        if turn.fruitless >= self._settings.attempts_max:
            self._close(job, turn)
            text = f"{turn.fruitless} attempts in a row ended without a token"
            self._fail(turn.id, 503, "attempts_exhausted", text)
            return
        self._release(job, turn)
        turn.resumes = True
        self._enqueue(job, turn)

    def _enqueue(self, job: JobTurns, turn: Turn) -> None:
        job.queue.push(turn)
        self.counts.queued += 1
        self.touch(job)

    def _release(self, job: JobTurns, turn: Turn) -> None:
        """End the turn's attempt, or its wait."""
        if turn.replica is None:
            job.queue.discard(turn)
            self.counts.queued -= 1
            return
        job.router.end(turn.replica, turn.id)
        self.tallies[turn.replica].tokens += turn.tokens
        job.tokens_ended += turn.tokens
        turn.replica, turn.tokens = None, 0
        self.counts.in_flight -= 1
        self.touch(job)

    def _close(self, job: JobTurns, turn: Turn) -> None:
        """The turn is over."""
        self._release(job, turn)
        del self._turns[turn.id], job.live[turn.id]

    def _fail(self, turn: TurnId, status: int, code: str, text: str) -> None:
        self.counts.failed += 1
        self._effects.append(FailTurn(turn, status, code, text))

    def _drain(self, job: JobTurns, now_ns: int) -> None:
        if not job.queue:
            return
        if job.router.pop_opened():
            job.queue.wake()
        while not job.paused and job.router.has_room() and (turn := job.queue.head()) is not None:
            strictly = now_ns < turn.avoid_until_ns
            pick = job.router.pick(self._want(job, turn, strictly))
            if pick is not None:
                self._dispatch(job, turn, pick, now_ns)
            elif job.router.will_run(turn.versions):
                job.queue.set_aside(turn, turn.avoid_until_ns if strictly else NEVER)
            else:
                self._close(job, turn)
                self._fail(turn.id, 409, "version_unavailable", f"the job is past version {turn.versions}")

    def _want(self, job: JobTurns, turn: Turn, avoid_strictly: bool) -> Want:
        """What the router needs to know of a waiting turn."""
        group_pin = self._groups.get(turn.job, TrajectoryId(turn.group)) if turn.group else None
        return Want(
            turn.weight,
            self.pins.get(turn.job, turn.trajectory),
            turn.avoid,
            avoid_strictly,
            turn.versions,
            group_pin,
            self._mix.suits(turn.job, turn.task),
            job.rolling and len(job.live) <= job.router.open_dedicated,
            turn.hint,
        )

    def _dispatch(self, job: JobTurns, turn: Turn, pick: Pick, now_ns: int) -> None:
        self._release(job, turn)
        job.router.begin(pick.replica, turn.id, turn.weight)
        turn.replica, turn.tokens = pick.replica, 0
        turn.attempt += 1
        turn.progress_ns, turn.progress_open_ns = now_ns, self._open_clock(pick.replica, now_ns)
        if job.router.count_on(pick.replica) == 1:
            self.tallies[pick.replica].progress_open_ns = turn.progress_open_ns
        self.counts.in_flight += 1
        self.counts.rerouted += turn.attempt > 1
        self._sweep_ns = min(self._sweep_ns, now_ns + self._settings.turn_stall_ns)
        why = pick.why if turn.attempt == 1 else f"rerouted:{pick.why}"
        version = self._born(job, turn)
        self._effects.append(DispatchTurn(turn.id, pick.replica, turn.attempt, why, version))
        self._forget(self.pins.put(turn.job, turn.trajectory, pick.replica, now_ns))
        if turn.group:
            self._groups.put(turn.job, TrajectoryId(turn.group), pick.replica, now_ns)

    def _born(self, job: JobTurns, turn: Turn) -> WeightVersion | None:
        """The weights that the turn begins to run on, where the age of trajectories counts."""
        if job.versions.birth_floor is None or turn.hint or turn.replica is None:
            return None
        version = job.router.version_on(turn.replica)
        job.births.begun(turn.trajectory, version, turn.id)
        return version

    def _forget(self, trajectories: Iterable[TrajectoryId]) -> None:
        for trajectory in trajectories:
            self._effects.append(ForgetTrajectory(trajectory))
