"""Carries out what the cluster machine decides about turns, and tells it what became of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

import structlog

from rose.core.effects import DispatchTurn, FailTurn, StopTurn
from rose.core.events import (
    ClusterEvent,
    ReplicaReport,
    TurnArrived,
    TurnCancelled,
    TurnFinished,
    TurnInterrupted,
    TurnProgressed,
    TurnRefused,
)
from rose.errors import NotReady
from rose.units import JobId, ReplicaId, TrajectoryId, WeightVersion
from rose_daemon.scheduler.errors import Failure
from rose_daemon.scheduler.output import ABORTED, Answer, Piece, in_chat_form
from rose_daemon.scheduler.requests import Dialect
from rose_daemon.scheduler.seam import SpecialTokens, text_after, text_so_far
from rose_daemon.scheduler.telemetry import Telemetry
from rose_daemon.scheduler.turns import Attempt, Cancelled, Outcome, Turn, TurnBook
from rose_daemon.scheduler.upstream import (
    SGLANG,
    VLLM,
    AttemptEnd,
    Call,
    Finished,
    Interrupted,
    Rejected,
    Upstream,
)

KEEP_ALIVE_S = 15.0
"""A stream without output for this long gets a comment, so that proxies do not take it for dead."""
_PROGRESS_S_MAX = 1.0
"""Token progress of a turn is reported to the machine this often, or more often where patience is short."""

_SHUTTING_DOWN = Failure(503, "shutting_down", "the scheduler is shutting down; send the turn again")

log = structlog.get_logger()


class Dispatcher:
    """Runs the attempts of all live turns.

    `feed` hands an event to the machine; `replica` looks a replica up in what nodes last reported;
    `keep` stores a finished answer for a resend; `cache_salt` is what sets a job's prefixes apart from
    those before it flushed its caches; `turn_stall_s` is how long a turn may go without a token.
    """

    def __init__(
        self,
        *,
        feed: Callable[[ClusterEvent], None],
        replica: Callable[[ReplicaId], ReplicaReport | None],
        keep: Callable[[Turn, Answer], None],
        cache_salt: Callable[[JobId], str],
        upstream: Upstream,
        telemetry: Telemetry,
        turn_stall_s: float,
    ) -> None:
        self.book = TurnBook()
        self.feed = feed
        self._replica = replica
        self._keep = keep
        self._cache_salt = cache_salt
        self._upstream = upstream
        self._telemetry = telemetry
        self._progress_s = min(_PROGRESS_S_MAX, turn_stall_s / 8)
        self._specials: dict[str, SpecialTokens] = {}
        self._closing = False

    # ---- from clients ------------------------------------------------------------------------------

    def arrive(self, turn: Turn, affinity: str, *, guessed: bool, group: str, task: str) -> None:
        """A client brought a turn; its outcome will be on it.

        Turns of one `affinity` share a prefix; it is the trajectory's name, or a guess.
        """
        self.book.open(turn)
        if self._closing:
            self._settle(turn, _SHUTTING_DOWN)
            return
        request = turn.request
        minimum, exact = request.versions
        self.feed(
            TurnArrived(
                turn=turn.key,
                job=turn.job,
                trajectory=TrajectoryId(affinity),
                prompt_tokens=request.prompt_tokens,
                tokens_max=request.tokens_max or 0,
                group=group,
                task=task,
                version_min=None if minimum is None else WeightVersion(minimum),
                version_exact=None if exact is None else WeightVersion(exact),
                hint=guessed,
            )
        )

    def leave(self, turn: Turn) -> None:
        """A reader left; with the last one the turn is cancelled, and the engine stops working for it."""
        turn.readers -= 1
        if turn.readers == 0 and turn.outcome is None:
            self._drop_attempt(turn, "cancelled")
            self._settle(turn, Cancelled())
            self.feed(TurnCancelled(turn.key))

    def abort(self, turn: Turn) -> None:
        """End a turn at its client's word: it is answered with the tokens it has."""
        self._drop_attempt(turn, "aborted_by_client")
        open_choices = [index for index, choice in enumerate(turn.choices) if choice.finish_reason is None]
        turn.add([Piece(index=index, finish_reason=ABORTED) for index in open_choices], time.monotonic())
        self._settle(turn, turn.answer(int(time.time())))
        self.feed(TurnCancelled(turn.key))

    async def keep_streams_alive(self) -> None:
        """Have streams that have been silent for `KEEP_ALIVE_S` say that they live, until cancelled."""
        while True:
            await asyncio.sleep(KEEP_ALIVE_S / 4)
            now_s = time.monotonic()
            for turn in self.book.live.values():
                if turn.request.stream and now_s - turn.changed_s >= KEEP_ALIVE_S:
                    turn.nudge(now_s)

    async def close(self) -> None:
        """Stop all attempts and fail the turns that still live (the scheduler is going down)."""
        self._closing = True
        for turn in list(self.book.live.values()):
            self._fail(turn, _SHUTTING_DOWN)
        await self._upstream.close()

    # ---- from the machine --------------------------------------------------------------------------

    def dispatch(self, effect: DispatchTurn) -> None:
        """Start an attempt.  A turn that has just ended is let be."""
        turn = self.book.live.get(effect.turn)
        if turn is None:
            return
        assert turn.attempt is None, f"{turn.key} already runs on {turn.attempt.replica}"
        report = self._replica(effect.replica)
        if report is None:
            self.feed(TurnInterrupted(turn.key, effect.replica, "replica_gone", 0, effect.attempt))
            return
        if turn.attempts and turn.attempts[-1].replica != effect.replica:
            self.book.counts.rerouted += 1
        attempt = Attempt(effect.replica, effect.attempt, report.weight_version, turn.token_count)
        turn.attempt = attempt
        turn.trace.attempt_began(attempt.replica, attempt.number, attempt.version, attempt.first_token)
        attempt.task = asyncio.create_task(self._run(turn, attempt, report))
        attempt.task.add_done_callback(partial(self._reap, turn, attempt))

    def stop(self, effect: StopTurn) -> None:
        """End the turn's attempt on that replica now; the machine goes on without a report of it."""
        turn = self.book.live.get(effect.turn)
        attempt = turn.attempt if turn is not None else None
        if turn is not None and attempt is not None and attempt.number == effect.attempt:
            self._drop_attempt(turn, effect.reason)
            self._after_cut(turn, attempt, effect.reason)

    def fail(self, effect: FailTurn) -> None:
        """The machine gave the turn up."""
        turn = self.book.live.get(effect.turn)
        if turn is not None:
            self._drop_attempt(turn, effect.code)
            self._settle(turn, Failure(effect.status, effect.code, effect.text))

    # ---- one attempt -------------------------------------------------------------------------------

    async def _run(self, turn: Turn, attempt: Attempt, report: ReplicaReport) -> None:
        try:
            end = await self._call(turn, attempt, report)
        except NotReady:
            end = Interrupted("engine_unreachable")
        if turn.attempt is attempt:
            self._ended(turn, attempt, end)

    async def _call(self, turn: Turn, attempt: Attempt, report: ReplicaReport) -> AttemptEnd:
        request = turn.request
        name = f"{turn.turn_id}-{attempt.number}"
        if report.engine == SGLANG and request.asks is Dialect.CHAT and request.return_token_ids:
            text = "SGLang, where this turn would run, shows no token ids of a chat"
            return Rejected(Failure(400, "unsupported", text, "return_token_ids"))
        if not attempt.first_token:
            body = request.first_body(report.model, self._cache_salt(turn.job))
            if request.tokens_max is None and request.asks is Dialect.COMPLETION:
                # vLLM's dialect leaves the rest of the context to a request that names no limit; a
                # completion does not.
                body["max_tokens"] = max(1, await self._context(report) - request.prompt_tokens)
            call = Call(
                report.url, request.asks, body, name, request.choices, report.engine, turn.trace.context
            )
            return await self._upstream.attempt(call, partial(self._take, turn, attempt))
        choice = turn.choices[0]
        assert choice.prompt_token_ids is not None, f"{turn.key} resumes without its prompt"
        left = await self._tokens_left(turn, report)
        if left <= 0:
            turn.add([Piece(finish_reason="length")], time.monotonic())
            return Finished(None)
        salt = self._cache_salt(turn.job)
        body = request.resumed_body(report.model, choice.prompt_token_ids, choice.token_ids, left, salt)
        call = Call(report.url, Dialect.COMPLETION, body, name, 1, report.engine, turn.trace.context)
        try:
            end = await self._upstream.attempt(call, partial(self._take_resumed, turn, attempt, report))
            if attempt.joining is not None:
                await attempt.joining
        finally:
            if attempt.joining is not None:
                attempt.joining.cancel()
        return end

    async def _tokens_left(self, turn: Turn, report: ReplicaReport) -> int:
        """How many tokens the turn may still have, by the client's limit and by the model's context."""
        choice = turn.choices[0]
        room = await self._context(report) - len(choice.prompt_token_ids or ()) - len(choice.token_ids)
        limit = turn.request.tokens_max
        return room if limit is None else min(room, limit - len(choice.token_ids))

    async def _context(self, report: ReplicaReport) -> int:
        """Context length of the replica.  Raises NotReady."""
        return report.context_tokens_max or await self._upstream.context_tokens_max(report.url)

    def _take(self, turn: Turn, attempt: Attempt, pieces: list[Piece]) -> None:
        if turn.attempt is not attempt:
            return  # stopped while its last chunk was on the way
        now_s = time.monotonic()
        tokens = turn.add(pieces, now_s)
        if not tokens:
            return
        if (report := self._replica(attempt.replica)) is not None:
            turn.note_version(report.weight_version)
        if not turn.began:
            turn.began = True
            turn.trace.happened("first_token")
            self._telemetry.first_token(now_s - turn.arrived_s)
        attempt.tokens += tokens
        self._telemetry.tokens(attempt.replica, tokens)
        if now_s - attempt.progress_reported_s >= self._progress_s:
            attempt.progress_reported_s = now_s
            self.feed(TurnProgressed(turn.key, attempt.replica, attempt.tokens, attempt.number))

    def _take_resumed(self, turn: Turn, attempt: Attempt, report: ReplicaReport, pieces: list[Piece]) -> None:
        """Take in a continuation: in the client's dialect, its text joined to what came before."""
        request = turn.request
        for piece in pieces:
            piece.prompt_token_ids = None
            if request.dialect is Dialect.CHAT and piece.logprobs is not None:
                piece.logprobs = [in_chat_form(entry, request.logprobs or 0) for entry in piece.logprobs]
        if attempt.joining is not None:
            attempt.held += pieces
        elif attempt.seam_open and report.engine == VLLM and any(piece.text for piece in pieces):
            attempt.held = pieces
            attempt.joining = asyncio.create_task(self._join(turn, attempt, report))
        else:
            self._take(turn, attempt, pieces)

    async def _join(self, turn: Turn, attempt: Attempt, report: ReplicaReport) -> None:
        """Have the first text after the seam follow on from what came before; what comes meanwhile waits.

        Raises NotReady.
        """
        first = next(index for index, piece in enumerate(attempt.held) if piece.text)
        # Tokens without text before it belong to that text.
        self._take(turn, attempt, attempt.held[:first])
        attempt.held = attempt.held[first:]
        attempt.held[0].text = await self._joined_text(turn, report, attempt.held[0])
        attempt.seam_open, attempt.joining = False, None
        self._take(turn, attempt, attempt.held)

    async def _joined_text(self, turn: Turn, report: ReplicaReport, piece: Piece) -> str:
        choice = turn.choices[0]
        tokens = [*choice.token_ids, *piece.token_ids]
        if piece.finish_reason == "stop" and not turn.request.body.get("include_stop_str_in_output"):
            tokens.pop()  # the token that ended the turn is no text
        if turn.request.body.get("skip_special_tokens", True):
            specials = self._specials.setdefault(report.model, SpecialTokens(self._upstream, report.model))
            await specials.learn(report.url, turn.silent)
            tokens = specials.without(tokens)
        whole = await text_so_far(
            self._upstream, report.url, report.model, choice.prompt_token_ids or [], tokens
        )
        return text_after(choice.text, whole)

    # ---- endings -----------------------------------------------------------------------------------

    def _ended(self, turn: Turn, attempt: Attempt, end: AttemptEnd) -> None:
        match end:
            case Finished(usage=usage):
                turn.usage = usage
                if not turn.token_count and usage is not None:
                    attempt.tokens = int(usage.get("completion_tokens", attempt.tokens))
                turn.close_attempt("finished")
                self._finish(turn, attempt)
            case Rejected(failure=failure):
                turn.close_attempt(failure.code)
                self._settle(turn, failure)
                self.feed(TurnRefused(turn.key, attempt.replica, failure.code, attempt.number))
            case Interrupted(reason=reason, failed=failed):
                turn.close_attempt(reason)
                if self._after_cut(turn, attempt, reason):
                    kept = min(attempt.tokens, turn.token_count)
                    self.feed(
                        TurnInterrupted(turn.key, attempt.replica, reason, kept, attempt.number, failed)
                    )

    def _after_cut(self, turn: Turn, attempt: Attempt, reason: str) -> bool:
        """An attempt ended early: keep its tokens or begin again; False if the turn is over by that."""
        self.book.counts.interrupted += 1
        self._telemetry.interrupted(attempt.replica, reason)
        log.info(
            "turn_interrupted", turn=turn.key, replica=attempt.replica, reason=reason, tokens=attempt.tokens
        )
        restart = turn.restart_reason if turn.has_output else ""
        if restart and turn.shown:
            text = f"the stream was cut ({reason}) and cannot be continued because of `{restart}`"
            self._fail(turn, Failure(502, "stream_cut", text, restart))
            return False
        if restart:
            turn.forget_output()
            turn.trace.happened("restarted", reason=restart)
            self.book.counts.restarted += 1
        return True

    def _finish(self, turn: Turn, attempt: Attempt) -> None:
        answer = turn.answer(int(time.time()))
        # Kept before anybody is told: a resend from here on finds the answer.
        self._keep(turn, answer)
        self._settle(turn, answer)
        self.feed(TurnFinished(turn.key, attempt.replica, attempt.tokens, attempt.number))

    def _fail(self, turn: Turn, failure: Failure) -> None:
        self._drop_attempt(turn, failure.code)
        self._settle(turn, failure)
        self.feed(TurnCancelled(turn.key))

    def _settle(self, turn: Turn, outcome: Outcome) -> None:
        self.book.settle(turn, outcome)
        cancelled = isinstance(outcome, Answer) and outcome.aborted
        name = "cancelled" if cancelled else type(outcome).__name__.lower()
        self._telemetry.settled(name, time.monotonic() - turn.arrived_s)

    def _drop_attempt(self, turn: Turn, end: str) -> None:
        attempt = turn.attempt
        if attempt is None:
            return
        turn.close_attempt(end)
        if attempt.task is not None:
            attempt.task.cancel()

    def _reap(self, turn: Turn, attempt: Attempt, task: asyncio.Task[None]) -> None:
        """An attempt's task ended; one that ended by a fault of ours must not leave its turn hanging."""
        attempt.task = None  # which knows the attempt: now both are freed without the garbage collector
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("attempt_crashed", turn=turn.key, replica=attempt.replica, exc_info=error)
        if turn.outcome is None:
            self._fail(turn, Failure(500, "internal_error", "the gateway failed on this turn; see its log"))
