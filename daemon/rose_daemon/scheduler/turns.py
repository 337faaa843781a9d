"""Turns in flight, and their bookkeeping: each turn has exactly one outcome.

    arrived -> queued -> running on a replica -> finished
                  ^            |    \\-> failed, cancelled
                  '-interrupted'

The tokens of a turn live here.  Readers (HTTP handlers) follow `pieces` and wait for `outcome`; a turn whose
last reader leaves is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from rose.units import JobId, ReplicaId, TurnId, WeightVersion
from rose_daemon.scheduler.errors import Failure, Refused
from rose_daemon.scheduler.output import Answer, AttemptRecord, Choice, Piece
from rose_daemon.scheduler.requests import Request
from rose_daemon.scheduler.tracing import UNTRACED, TurnTrace


class Cancelled(msgspec.Struct, frozen=True):
    """Outcome of a turn whose client went away."""


Outcome = Answer | Failure | Cancelled


class Attempt:
    """One try of a turn on one replica."""

    def __init__(
        self, replica: ReplicaId, number: int, version: WeightVersion | None, first_token: int
    ) -> None:
        self.replica = replica
        self.number = number
        self.version = version
        """Weights that the replica runs, as last reported; None if that is not known."""
        self.first_token = first_token
        """Output tokens kept from earlier attempts."""
        self.tokens = 0
        self.span_first = first_token
        """First output token of the present version."""
        self.seam_open = first_token > 0
        """No text has come since the seam with the attempt before."""
        self.joining: asyncio.Task[None] | None = None
        """Finds out the first text after the seam."""
        self.held: list[Piece] = []
        """What has come meanwhile."""
        self.task: asyncio.Task[None] | None = None
        self.progress_reported_s = 0.0


class Turn:
    """One client turn, from its arrival to its outcome."""

    def __init__(
        self,
        *,
        key: TurnId,
        turn_id: str,
        named: bool,
        job: JobId,
        trajectory: str,
        model: str,
        request: Request,
        now_s: float,
        trace: TurnTrace = UNTRACED,
    ) -> None:
        self.key = key
        """Names this run of the turn inside the scheduler; a turn that failed may be run again."""
        self.turn_id = turn_id
        self.named = named
        """The client named the turn, so it may ask for it again."""
        self.job = job
        self.trajectory = trajectory
        self.model = model
        self.request = request
        self.trace = trace
        self.arrived_s = now_s
        self.pieces: list[Piece] = []
        """All output that may be shown."""
        self._choices = [Choice() for _ in range(request.choices)]
        self._folded = 0
        """How many of the pieces are in the choices."""
        self._opening: dict[int, Piece] = {}
        self.silent: list[int] = []
        """Tokens that came without text."""
        self.usage: dict[str, Any] | None = None
        self.attempts: list[AttemptRecord] = []
        self.weight_versions: list[tuple[int, int, WeightVersion | None]] = []
        self.attempt: Attempt | None = None
        self.shown = False
        """A client has been shown tokens: they cannot be taken back."""
        self.outcome: Outcome | None = None
        self.readers = 0
        self.began = False
        """Its first token has come."""
        self.idle = False
        """Nothing has come for a while, and the reader has not told its client yet."""
        self.changed_s = now_s
        self._changed: asyncio.Event | None = None
        self.listeners: list[Callable[[], None]] = []
        """Called at once when something changed."""

    @property
    def choices(self) -> list[Choice]:
        """The output of each choice.  Put together when asked for, so that a token costs the same in a turn
        of any length."""
        if self._folded < len(self.pieces):
            fresh: dict[int, list[Piece]] = {}
            for piece in self.pieces[self._folded :]:
                fresh.setdefault(piece.index, []).append(piece)
            for index, pieces in fresh.items():
                self._choices[index].add(*pieces)
            self._folded = len(self.pieces)
        return self._choices

    @property
    def token_count(self) -> int:
        """Output tokens kept, over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def has_output(self) -> bool:
        """Whether any output is kept."""
        return any(choice.token_ids or choice.text for choice in self.choices)

    @property
    def replica(self) -> ReplicaId | None:
        """Where the turn runs, or ran last."""
        if self.attempt is not None:
            return self.attempt.replica
        return self.attempts[-1].replica if self.attempts else None

    @property
    def version(self) -> WeightVersion | None:
        """The weights that the latest tokens were sampled from."""
        if self.attempt is not None:
            return self.attempt.version
        return self.weight_versions[-1][2] if self.weight_versions else None

    @property
    def restart_reason(self) -> str:
        """Why the turn cannot resume from its tokens, or empty."""
        if self.request.restart_reason:
            return self.request.restart_reason
        choice = self.choices[0]
        if choice.prompt_token_ids is None:
            return "prompt_token_ids"
        # An engine that parses its output shows us parts, from which its text cannot be continued.
        return "parsed_output" if choice.tool_calls or choice.reasoning else ""

    def add(self, pieces: Iterable[Piece], now_s: float) -> int:
        """Take in new output and wake the readers; how many tokens it holds."""
        tokens = 0
        for piece in pieces:
            count = len(piece.token_ids)
            if piece.text:
                tokens += count or 1  # of an engine that shows no ids only whether there were any
            elif count:
                tokens += count
                self.silent.extend(piece.token_ids)
            if count and not self._opening:
                self.pieces.append(piece)
            else:
                self._publish(piece)
        self._wake(now_s)
        return tokens

    def _publish(self, piece: Piece) -> None:
        """Show a piece; one that only opens a choice (role, prompt ids) waits for its first output.

        So nothing is shown of a turn that may still begin again.
        """
        if self._opening and (opening := self._opening.pop(piece.index, None)) is not None:
            piece.extra = opening.extra | piece.extra
            piece.prompt_token_ids = piece.prompt_token_ids or opening.prompt_token_ids
        if piece.token_ids or piece.text or piece.finish_reason is not None or piece.extra.keys() - {"role"}:
            self.pieces.append(piece)
        else:
            self._opening[piece.index] = piece

    def close_attempt(self, end: str) -> None:
        """Record how the present attempt ended."""
        attempt = self.attempt
        assert attempt is not None, f"{self.key} has no attempt to close"
        self.attempts.append(AttemptRecord(attempt.replica, attempt.tokens, end))
        self._close_span(attempt)
        self.attempt = None
        self.trace.attempt_ended(end, attempt.tokens)

    def note_version(self, version: WeightVersion | None) -> None:
        """The replica of the present attempt reports `version`: tokens from here on are of that one.

        Exact to one report of its node, which sends one at once when a version changes.
        """
        attempt = self.attempt
        if attempt is not None and version != attempt.version:
            self._close_span(attempt)
            attempt.span_first, attempt.version = attempt.first_token + attempt.tokens, version

    def _close_span(self, attempt: Attempt) -> None:
        last = attempt.first_token + attempt.tokens - 1
        if last >= attempt.span_first:
            self.weight_versions.append((attempt.span_first, last, attempt.version))

    def forget_output(self) -> None:
        """Begin again from the prompt; only for output that no client has seen."""
        assert not self.shown, f"{self.key} was shown to its client"
        self.pieces.clear()
        self._choices = [Choice() for _ in range(self.request.choices)]
        self._folded = 0
        self._opening.clear()
        self.silent.clear()
        self.weight_versions.clear()
        self.usage = None

    def settle(self, outcome: Outcome) -> None:
        """Give the turn its only outcome."""
        assert self.outcome is None, f"{self.key} already has an outcome"
        self.outcome = outcome
        self._wake(self.changed_s)

    def nudge(self, now_s: float) -> None:
        """Have the readers tell their clients that the turn lives."""
        self.idle = True
        self._wake(now_s)

    def answer(self, created: int) -> Answer:
        """The finished turn.  `created` is in seconds since the epoch."""
        return Answer(
            turn_id=self.turn_id,
            trajectory=self.trajectory,
            dialect=self.request.dialect,
            model=self.model,
            created=created,
            choices=self.choices,
            usage=self._usage(),
            replica=self.replica or ReplicaId(""),
            attempts=self.attempts,
            weight_versions=self.weight_versions,
            seed=self.request.body.get("seed"),
        )

    async def settled(self) -> Answer:
        """Wait for the outcome; the answer, if it is one.  Raises Refused for a failed turn."""
        while self.outcome is None:
            await self.changed()
        if isinstance(self.outcome, Failure):
            raise Refused(self.outcome)
        # A turn is cancelled only after its last reader has left.
        assert isinstance(self.outcome, Answer), f"{self.key} ended as {self.outcome!r} under its reader"
        return self.outcome

    async def changed(self) -> None:
        """Wait for more pieces or the outcome."""
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    def _wake(self, now_s: float) -> None:
        self.changed_s = now_s
        if self._changed is not None:
            self._changed.set()
            self._changed = None
        for listener in self.listeners:
            listener()

    def _usage(self) -> dict[str, Any]:
        """The engine's own count for a turn of one attempt, else what was counted here."""
        if self.usage is not None and (len(self.attempts) == 1 or not self.token_count):
            return self.usage
        # Prompts of a batch are counted by the engine only, and a batch never resumes.
        prompt_tokens = len(self.choices[0].prompt_token_ids or ())
        if self.usage is not None and self.request.restart_reason:
            prompt_tokens = int(self.usage.get("prompt_tokens", prompt_tokens))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.token_count,
            "total_tokens": prompt_tokens + self.token_count,
        }


class TurnCounts(msgspec.Struct):
    """Turns since the scheduler started; arrived = finished + failed + cancelled + live ones, always."""

    arrived: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    """Ended by their client: it went away, or aborted them."""
    interrupted: int = 0
    """Attempts that ended early."""
    rerouted: int = 0
    """Attempts on another replica than the one before."""
    restarted: int = 0
    """Turns that began again from their prompt."""
    replayed: int = 0
    """Resends answered from a stored answer (these do not arrive)."""
    joined: int = 0
    """Resends that share a turn still in flight (nor do these)."""


class TurnBook:
    """The live turns, by key and by the id clients gave them."""

    def __init__(self) -> None:
        self.counts = TurnCounts()
        self.live: dict[TurnId, Turn] = {}
        self._by_id: dict[tuple[JobId, str], Turn] = {}

    def open(self, turn: Turn) -> None:
        """A turn arrived."""
        assert (turn.job, turn.turn_id) not in self._by_id, f"{turn.key} is already live"
        self.counts.arrived += 1
        self.live[turn.key] = turn
        self._by_id[turn.job, turn.turn_id] = turn

    def find(self, job: JobId, turn_id: str) -> Turn | None:
        """The live turn with that id."""
        return self._by_id.get((job, turn_id))

    def named(self, names: Collection[str]) -> list[Turn]:
        """Live turns by any id that their client gave or was given, OpenAI's prefix or not."""
        bare = {name.removeprefix("chatcmpl-").removeprefix("cmpl-") for name in names}
        return [
            turn
            for turn in self.live.values()
            if turn.turn_id in bare or any(name in names for name in turn.request.names)
        ]

    def of_job(self, job: JobId) -> list[Turn]:
        """A job's live turns."""
        return [turn for turn in self.live.values() if turn.job == job]

    def settle(self, turn: Turn, outcome: Outcome) -> None:
        """Give a live turn its only outcome, and count it."""
        turn.settle(outcome)
        turn.trace.ended(outcome)
        match outcome:
            case Answer(aborted=True):
                self.counts.cancelled += 1
            case Answer():
                self.counts.finished += 1
            case Failure():
                self.counts.failed += 1
            case Cancelled():
                self.counts.cancelled += 1
        del self.live[turn.key], self._by_id[turn.job, turn.turn_id]
        self.check()

    def check(self) -> None:
        """Assert that no turn is lost or counted twice."""
        counts = self.counts
        settled = counts.finished + counts.failed + counts.cancelled
        assert counts.arrived == settled + len(self.live), (
            f"turns do not add up: {counts}, {len(self.live)} live"
        )

    def in_flight(self) -> int:
        """Turns that run on a replica now."""
        return sum(1 for turn in self.live.values() if turn.attempt is not None)

    def by_replica(self) -> dict[ReplicaId, int]:
        """Turns in flight on each replica that has any."""
        numbers: dict[ReplicaId, int] = {}
        for turn in self.live.values():
            if turn.attempt is not None:
                numbers[turn.attempt.replica] = numbers.get(turn.attempt.replica, 0) + 1
        return numbers

    def snapshot(self) -> Mapping[str, int]:
        """All counts, for status and metrics."""
        running = self.in_flight()
        counts: dict[str, int] = msgspec.to_builtins(self.counts)
        return counts | {"queued": len(self.live) - running, "in_flight": running}
