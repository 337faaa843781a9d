"""The rollout engine's side of the gate: reads the boards, asks the admission policy, waits while closed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from rose.boards import Owner, WatchedBoard
from rose.core.admission import Admission, AdmissionGate
from rose.core.readings import GatePolicy, LimitStatus, SlackReading, Unknown
from rose.engines.vllm.settings import PluginSettings
from rose.units import NS_PER_MS, ms_to_ns

WAIT_NS_MAX = 50 * NS_PER_MS
"""Longest wait in one step while closed: bounds how late an abort is noticed that nobody rang for."""
_NO_BELL_POLL_NS = 5 * NS_PER_MS


class StepGate:
    """Decides per step, and keeps count of how long the gate was open."""

    def __init__(self, settings: PluginSettings, *, step_tokens_max: int) -> None:
        boards = settings.boards
        self._policy_board = WatchedBoard(boards.gate(settings.name), GatePolicy)
        self._slack_board = (
            WatchedBoard(boards.slack(settings.serving_name), SlackReading) if settings.serving_name else None
        )
        self._stale_ns = ms_to_ns(settings.board_stale_ms)
        self._admission = AdmissionGate(step_tokens_max=step_tokens_max)
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

    def decide(self, now_ns: int) -> Admission:
        """The answer for a step that would start now.  Any thread may ask."""
        with self._lock:
            self._read_policy(now_ns)
            slack = None
            if self._slack_board is not None:
                slack = self._slack_board.read(now_ns, self._stale_ns)
            admission = self._admission.decide(slack, self.policy, now_ns)
            self._count(admission, now_ns)
            return admission

    def _read_policy(self, now_ns: int) -> None:
        """Accept the board's policy unless it contradicts one accepted from the same rosed.

        What is refused is not obeyed in part: the accepted policy stands, and its lease runs out.
        """
        seen = self._policy_board.read(now_ns, None)
        held = self.policy
        if isinstance(seen, Unknown) or isinstance(held, Unknown):
            # A dedicated replica keeps its last policy inside the admission gate.
            self._accept(seen)
        elif seen.revision == held.revision:
            if _same_but_lease(seen, held):
                self._accept(seen)
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

    def wait_until_open(self, admission: Admission) -> tuple[Admission, int]:
        """Sleep while closed, until the bell rings or WAIT_NS_MAX is over.

        Returns the answer then, and the nanoseconds slept.  A bell with the gate still closed means that
        somebody has other work for this engine, so the wait ends too.
        """
        started_ns = now_ns = time.monotonic_ns()
        end_ns = started_ns + WAIT_NS_MAX
        while not admission.open and now_ns < end_ns:
            bell = self._policy_board.bell
            seen = bell.count if bell is not None else 0
            admission = self.decide(now_ns)  # after the count: a ring in between is not lost
            if admission.open:
                break
            until_ns = min(end_ns, max(admission.valid_until_ns, now_ns + NS_PER_MS))
            if bell is None:
                time.sleep(min(until_ns - now_ns, _NO_BELL_POLL_NS) / 1e9)
            else:
                bell.wait(seen, until_ns - now_ns)
            now_ns = time.monotonic_ns()
            admission = self.decide(now_ns)
            if bell is not None and bell.count != seen:
                break
        return admission, now_ns - started_ns

    def observe_step(self, tokens: int, duration_ns: int) -> None:
        """Teach the latency model."""
        self._admission.observe_step(tokens, duration_ns)


def _same_but_lease(one: GatePolicy, other: GatePolicy) -> bool:
    return one._replace(alive_until_ns=0) == other._replace(alive_until_ns=0)


class GateBells:
    """The bells of all rollout engines on this host, for a serving engine that falls idle."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._boards: dict[str, WatchedBoard[GatePolicy]] = {}

    def ring(self, now_ns: int) -> None:
        """Ring all that exist.  Costs some ten microseconds, so not for every step."""
        names = {path.name for path in self._run_dir.glob("gate-*.board")}
        for name in self._boards.keys() - names:
            del self._boards[name]
        for name in sorted(names):
            board = self._boards.setdefault(name, WatchedBoard(self._run_dir / name, GatePolicy))
            board.read(now_ns, None)
            if board.bell is not None:
                board.bell.ring()
