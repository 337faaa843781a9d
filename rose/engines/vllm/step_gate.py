"""The rollout engine's side of the gate: reads the boards, asks the admission policy, waits while closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from operator import is_not
from pathlib import Path
from typing import NamedTuple

from rose.boards import Bell, Owner, WatchedBoard
from rose.core.admission import LEASE_NS_MAX, Admission, AdmissionGate, strictest
from rose.core.latency import StepLatency
from rose.core.readings import GateMode, GatePolicy, GateTransition, LimitStatus, SlackReading, Unknown
from rose.engines.vllm.settings import PluginSettings
from rose.profile import Profile
from rose.rings import RingWriter
from rose.units import NS_PER_MS, ms_to_ns

WAIT_NS_MAX = 50 * NS_PER_MS
"""Longest wait in one step while closed: bounds how late an abort is noticed that nobody rang for."""
_NO_BELL_POLL_NS = 5 * NS_PER_MS
_LEARN_SAME_EVERY = 4
"""Of steps of the same size in a row, one in so many teaches: they are alike, and each costs microseconds."""


_LEASE = GatePolicy._fields.index("alive_until_ns")
_BUSY = -1
_NO_BOARD = SlackReading(*[0] * len(SlackReading._fields))


class StepInFlight(NamedTuple):
    """A step that was given to the worker."""

    tokens: int
    started_ns: int
    serving_steps: int
    """Steps the serving engine had begun by then; _BUSY if it was in one."""


class StepGate:
    """Decides per step, and keeps count of how long the gate was open.

    A replica over several devices obeys the boards of all their serving engines (or ranks).
    """

    def __init__(self, settings: PluginSettings, *, step_tokens_max: int) -> None:
        boards = settings.boards
        self._policy_board = WatchedBoard(boards.gate(settings.name), GatePolicy)
        self._slack_boards = [
            WatchedBoard(boards.slack(name), SlackReading) for name in settings.serving_names
        ]
        boards.run_dir.mkdir(parents=True, exist_ok=True)
        self._journal = RingWriter(boards.transitions(settings.name), GateTransition)
        self._journalled = 0
        self._stale_ns = ms_to_ns(settings.slack_stale_ms or settings.board_stale_ms)
        self._admission = AdmissionGate(step_tokens_max=step_tokens_max, overlaps=settings.overlaps)
        self._serving_steps = _BUSY
        self._unlearnt: list[tuple[StepInFlight, int]] = []
        self._taught_tokens = self._ended = 0
        self._readings: list[SlackReading | Unknown] = []
        self._combined: SlackReading | Unknown | None = None
        self._seen_policy: GatePolicy | Unknown | None = None
        self._went_by: tuple[SlackReading | Unknown | None, GatePolicy | Unknown, int] | None = None
        self._owner: Owner | None = None
        self.policy: GatePolicy | Unknown = Unknown("board_missing")
        """The latest policy that was accepted."""
        self.limit_status = LimitStatus.APPLIED
        """Answer to the latest revision seen (DEFERRED is for who carries it out to say)."""
        self.last: Admission | None = None
        self.transitions = 0
        self.open_ns = 0
        self.closed_ns = 0
        self._decided_ns = time.monotonic_ns()
        self._lock = threading.Lock()

    def decide(self, now_ns: int, in_flight: Collection[StepInFlight] = ()) -> Admission:
        """The answer for a step that would be given out now, behind those in flight.  Any thread may ask."""
        with self._lock:
            self._read_policy(now_ns)
            slack = self._read_slack(now_ns)
            if self.last is not None and not in_flight and self._stands(self.last, slack, now_ns):
                self._count(self.last, now_ns)
                return self.last
            ahead_ns = self._ahead_ns(in_flight, now_ns)
            admission = self._admission.decide(slack, self.policy, now_ns, in_flight_ns=ahead_ns)
            if self.last is None or (admission.open, admission.reason) != (self.last.open, self.last.reason):
                self._note(admission, slack, now_ns, ahead_ns)
            self._went_by = None if in_flight else (slack, self.policy, self._admission.lessons)
            self._count(admission, now_ns)
            return admission

    def _ahead_ns(self, in_flight: Collection[StepInFlight], now_ns: int) -> int:
        """How long the steps in flight still need, one after the other, whenever each was given out."""
        ended_ns = 0
        for step in in_flight:  # none of them has ended yet, whatever was predicted
            ended_ns = max(now_ns, max(ended_ns, step.started_ns) + self._latency.predict_ns(step.tokens))
        return max(0, ended_ns - now_ns)

    def _stands(self, last: Admission, slack: SlackReading | Unknown | None, now_ns: int) -> bool:
        """Whether the last answer was to open, and nothing changed that it went by."""
        if not last.open or self._went_by is None or now_ns >= last.valid_until_ns:
            return False  # a closed gate has time, and its reason may change
        by_slack, by_policy, lessons = self._went_by
        if self._admission.lessons != lessons:
            return False
        if self.policy is not by_policy and not _renewed(by_policy, self.policy, now_ns):
            return False
        if slack is by_slack:
            return True
        if not isinstance(slack, SlackReading) or not isinstance(by_slack, SlackReading):
            return False
        return slack[1:] == by_slack[1:]  # said again, at another time

    def _note(
        self, admission: Admission, slack: SlackReading | Unknown | None, now_ns: int, ahead_ns: int
    ) -> None:
        """Journal what changed, with all that it was decided by."""
        policy = None if isinstance(self.policy, Unknown) else self.policy
        board = slack if isinstance(slack, SlackReading) else _NO_BOARD
        latency = self._latency
        self._journalled += 1
        transition = GateTransition(
            at_ns=now_ns,
            number=self._journalled,
            tokens=admission.tokens,
            valid_until_ns=admission.valid_until_ns,
            reason=admission.reason,
            in_flight_ns=ahead_ns,
            mode=policy.mode if policy else -1,
            policy_revision=policy.revision if policy else -1,
            token_cap=policy.token_cap if policy else -1,
            alive_until_ns=policy.alive_until_ns if policy else -1,
            policy_margin_ns=policy.margin_ns if policy else -1,
            board_known=-1 if slack is None else int(board is slack),
            stamp_ns=board.stamp_ns,
            waiting=board.waiting,
            running=board.running,
            in_step=board.in_step,
            pending_prefill_tokens=board.pending_prefill_tokens,
            ttft_deadline_ns=board.ttft_deadline_ns,
            tpot_deadline_ns=board.tpot_deadline_ns,
            prefill_p99_ns=board.prefill_p99_ns,
            prefill_predicted_ns=board.prefill_predicted_ns,
            decode_predicted_ns=board.decode_predicted_ns,
            step_ns=latency.predict_ns(1),
            step_512_ns=latency.predict_ns(512),
            margin_ns=latency.margin_ns(),
        )
        self._journal.write(transition)

    @property
    def journal_dropped(self) -> int:
        """Transitions that found no room in the ring."""
        return self._journal.dropped

    def _read_slack(self, now_ns: int) -> SlackReading | Unknown | None:
        if not self._slack_boards:
            return None
        if len(self._slack_boards) == 1:
            slack = self._slack_boards[0].read(now_ns, self._stale_ns)
        else:
            slack = self._read_all(now_ns)
        self._serving_steps = _BUSY if isinstance(slack, Unknown) or slack.in_step else slack.steps
        return slack

    def _read_all(self, now_ns: int) -> SlackReading | Unknown:
        readings = [board.read(now_ns, self._stale_ns) for board in self._slack_boards]
        if self._combined is None or any(map(is_not, readings, self._readings)):
            self._readings, self._combined = readings, strictest(readings)
        return self._combined

    def settle(self, now_ns: int) -> None:
        """What need not be done between two steps: see who lives, learn, and decide ahead.

        The latency model is taught the steps that ended before the latest decision.  That outdates the
        answer; it is renewed here, unless steps overlap, where each decision has others ahead of it.
        """
        with self._lock:
            learnt, ahead = bool(self._unlearnt), self._went_by is not None
            self._policy_board.refresh(now_ns)
            for board in self._slack_boards:
                board.refresh(now_ns)
            for step, duration_ns in self._unlearnt:
                alone = not self._slack_boards or _BUSY != step.serving_steps == self._serving_steps
                self._admission.observe_step(step.tokens, duration_ns, co_running=int(not alone))
            self._unlearnt.clear()
        if learnt and ahead:
            self.decide(now_ns)

    def _read_policy(self, now_ns: int) -> None:
        """Accept the board's policy unless it contradicts one accepted from the same rosed.

        What is refused is not obeyed in part: the accepted policy stands, and its lease runs out.
        """
        seen = self._policy_board.read(now_ns, None)
        if seen is self._seen_policy:
            return
        self._seen_policy = seen
        held = self.policy
        if isinstance(seen, Unknown) or isinstance(held, Unknown):
            # A dedicated replica keeps its last policy inside the admission gate.
            self._accept(seen)
        elif seen.revision == held.revision:
            if _same_but_lease(seen, held):  # the owner counts for the revision, not for each renewal
                self.policy, self.limit_status = seen, LimitStatus.APPLIED
            else:
                self.limit_status = LimitStatus.CONFLICT
        elif seen.revision > held.revision or self._policy_board.owner != self._owner:
            self._accept(seen)
        else:
            self.limit_status = LimitStatus.STALE

    def _accept(self, policy: GatePolicy | Unknown) -> None:
        self.policy = policy
        self.limit_status = LimitStatus.APPLIED
        self._owner = self._policy_board.owner

    def _count(self, admission: Admission, now_ns: int) -> None:
        if self.last is not None:
            elapsed_ns = max(0, now_ns - self._decided_ns)
            if self.last.open:
                self.open_ns += elapsed_ns
            else:
                self.closed_ns += elapsed_ns
            if self.last.open != admission.open:
                self.transitions += 1
        self._decided_ns = now_ns
        self.last = admission

    def wait_until_open(
        self, admission: Admission, in_flight: Collection[StepInFlight] = ()
    ) -> tuple[Admission, int]:
        """Sleep while closed, until the bell rings or WAIT_NS_MAX is over.

        Returns the answer then, and the nanoseconds slept.  A bell with the gate still closed means that
        somebody has other work for this engine, so the wait ends too.
        """
        started_ns = now_ns = time.monotonic_ns()
        end_ns = started_ns + WAIT_NS_MAX
        while not admission.open and now_ns < end_ns:
            bell = self._policy_board.bell
            seen, rings = (bell.count, bell.rings) if bell is not None else (0, 0)
            with _asking_for_nudges(bell, self.policy):
                admission = self.decide(now_ns, in_flight)  # after the count: a ring in between is not lost
                if admission.open:
                    break
                until_ns = min(end_ns, max(admission.valid_until_ns, now_ns + NS_PER_MS))
                if bell is None:
                    time.sleep(min(until_ns - now_ns, _NO_BELL_POLL_NS) / 1e9)
                else:
                    bell.wait(seen, until_ns - now_ns)
            now_ns = time.monotonic_ns()
            admission = self.decide(now_ns, in_flight)
            if bell is not None and bell.rings != rings:
                break
        return admission, now_ns - started_ns

    def start_from(self, profile: Profile) -> None:
        """Let the latency model begin with what was measured beforehand."""
        for step in (*profile.prefill, *profile.decode):
            self._admission.observe_step(step.load, step.duration_ns)

    def step_began(self, tokens: int, now_ns: int) -> StepInFlight:
        """A step of that many tokens was given to the worker; hand it back when it ends."""
        return StepInFlight(tokens, now_ns, self._serving_steps)

    def step_ended(self, step: StepInFlight, duration_ns: int) -> None:
        """It took that long; `settle` after the next decision, whose reading tells what ran beside it."""
        self._ended += 1
        if step.tokens != self._taught_tokens or self._ended % _LEARN_SAME_EVERY == 0:
            self._taught_tokens = step.tokens
            self._unlearnt.append((step, duration_ns))

    @property
    def _latency(self) -> StepLatency:
        """The model that decides beside serving, once it does."""
        beside = self._admission.latency_beside
        return beside if beside.calibrated else self._admission.latency

    @property
    def drift_permille(self) -> int:
        """Measured over predicted time of recent steps, times 1000."""
        return self._latency.drift_permille

    @property
    def margin_ns(self) -> int:
        """The latency model's own margin."""
        return self._latency.margin_ns()


@contextmanager
def _asking_for_nudges(bell: Bell | None, policy: GatePolicy | Unknown) -> Iterator[None]:
    """Only slack that grows from step to step is worth a wake-up at each of them."""
    if bell is None or isinstance(policy, Unknown) or policy.mode != GateMode.SLACK:
        yield
        return
    bell.awaited = True
    try:
        yield
    finally:
        bell.awaited = False


def _renewed(before: GatePolicy | Unknown, now: GatePolicy | Unknown, now_ns: int) -> bool:
    """Whether rosed did nothing but renew the lease: a gate that was open stays so, as long as it would."""
    if isinstance(before, Unknown) or isinstance(now, Unknown) or not _same_but_lease(before, now):
        return False
    return before.alive_until_ns <= now.alive_until_ns <= now_ns + LEASE_NS_MAX


def _same_but_lease(one: GatePolicy, other: GatePolicy) -> bool:
    return one[:_LEASE] == other[:_LEASE] and one[_LEASE + 1 :] == other[_LEASE + 1 :]


class GateBells:
    """The bells of all rollout engines on this host, for a serving engine that falls idle."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._boards: dict[str, WatchedBoard[GatePolicy]] = {}
        self._bells: tuple[Bell, ...] = ()
        self._lock = threading.Lock()

    def refresh(self, now_ns: int) -> tuple[Bell, ...]:
        """Look which there are.  Costs some ten microseconds, so not for every step."""
        with self._lock:
            names = {path.name for path in self._run_dir.glob("gate-*.board")}
            for name in self._boards.keys() - names:
                del self._boards[name]
            for name in sorted(names - self._boards.keys()):
                self._boards[name] = WatchedBoard(self._run_dir / name, GatePolicy)
            for board in self._boards.values():
                board.read(now_ns, None)
            self._bells = tuple(board.bell for board in self._boards.values() if board.bell is not None)
            return self._bells

    def ring(self, now_ns: int) -> None:
        """Ring all that exist."""
        for bell in self.refresh(now_ns):
            bell.ring()

    def nudge(self) -> None:
        """Nudge those known since the last refresh; next to nothing while nobody waits."""
        for bell in self._bells:
            bell.nudge()
