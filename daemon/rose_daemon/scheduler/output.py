"""What engines answer, kept in one form and shown in any dialect.

Attempts of one turn may speak different dialects: the first is the client's, a continuation is always
`/v1/completions`.  Each streamed chunk becomes `Piece`s; pieces add up to `Choice`s; a finished turn is an
`Answer`, from which both a whole body and a stream can be rendered at any time (also for a replay).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from rose.units import ReplicaId, WeightVersion
from rose_daemon.scheduler.requests import Dialect

ABORTED = "abort"
"""finish_reason of a request that was ended from outside."""


class Alternative(NamedTuple):
    """A token that might have been sampled."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(NamedTuple):
    """Log probability of one sampled token, and of its best alternatives (best first, or as sent)."""

    token: str
    logprob: float | None
    bytes: list[int] | None
    top: tuple[Alternative, ...]


class Piece(msgspec.Struct, gc=False):
    """New output of one choice.

    There are as many as tokens; as they can be part of no cycle, the garbage collector need not know them.
    """

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: list[TokenLogprob] | None = None
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    """Parts of a chat delta that are no content: role, reasoning, tool_calls."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None


class Choice(msgspec.Struct):
    """All output of one choice so far."""

    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = msgspec.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None

    def add(self, *pieces: Piece) -> None:
        """Append pieces."""
        self.text += "".join([piece.text for piece in pieces])
        for piece in pieces:
            self.token_ids += piece.token_ids
            if piece.logprobs is not None:
                self.logprobs = self.logprobs or []
                self.logprobs += piece.logprobs
            if piece.extra:
                self.reasoning += piece.extra.get("reasoning") or ""
                for call in piece.extra.get("tool_calls") or ():
                    _merge_tool_call(self.tool_calls, call)
            if piece.finish_reason is not None:
                self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
            if piece.prompt_token_ids is not None:
                self.prompt_token_ids = piece.prompt_token_ids


class AttemptRecord(msgspec.Struct, frozen=True):
    """One try of a turn on one replica; part of the answer's `rose` member."""

    replica: ReplicaId
    tokens: int
    end: str
    """`finished`, or why it ended early."""


class Answer(msgspec.Struct):
    """A finished turn: everything needed to show it in its dialect, now or in a replay."""

    turn_id: str
    trajectory: str
    dialect: Dialect
    model: str
    created: int
    choices: list[Choice]
    usage: dict[str, Any]
    replica: ReplicaId
    attempts: list[AttemptRecord]
    weight_versions: list[tuple[int, int, WeightVersion | None]]
    """(first, last, version): output tokens `first` to `last` were sampled from that version, None if the
    replica did not tell it."""
    seed: int | None = None
    """As the client asked."""

    @property
    def aborted(self) -> bool:
        """Whether the client ended the turn before its time."""
        return any(choice.finish_reason == ABORTED for choice in self.choices)

    def rose_member(self) -> dict[str, Any]:
        """The body member `rose`."""
        return {
            "turn_id": self.turn_id,
            "trajectory": self.trajectory,
            "attempts": [msgspec.to_builtins(record) for record in self.attempts],
            "weight_versions": self.weight_versions,
        }


# ---- shapes of tokens ------------------------------------------------------------------------------


def in_chat_form(entry: TokenLogprob, alternatives: int) -> TokenLogprob:
    """A completion's entry as chat would have given it.

    Both list the sampled token first and the best ones after it, but a completion one entry more, and
    keyed by text: alternatives that read the same are one there.
    """
    return entry._replace(top=entry.top[:alternatives])


def token_id_of(token: str) -> int | None:
    """The id in `token_id:<id>`, which engines write where asked to, in place of a text."""
    name, _, number = token.partition(":")
    return int(number) if name == "token_id" and number.isdecimal() else None


def version_label(version: int | None) -> str:
    """A weight version as vLLM and SGLang show it: a text."""
    return "unknown" if version is None else str(version)


def utf8(text: str) -> list[int]:
    """Bytes of a text, as logprobs list them."""
    return list(text.encode("utf-8", errors="replace"))


def _merge_tool_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    """Add a streamed part of a tool call: ids and names come once, arguments in parts."""
    index = delta.get("index", len(calls))
    for call in calls:
        if call["index"] == index:
            break
    else:
        call = {"index": index, "id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        calls.append(call)
    call["id"] = delta.get("id") or call["id"]
    function = delta.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


# ---- replays --------------------------------------------------------------------------------------


def replayed_pieces(answer: Answer) -> Iterator[Piece]:
    """A finished answer as a stream shows it: one piece a choice."""
    for index, choice in enumerate(answer.choices):
        extra: dict[str, Any] = {"role": "assistant"} if answer.dialect is Dialect.CHAT else {}
        if choice.reasoning:
            extra["reasoning"] = choice.reasoning
        if choice.tool_calls:
            extra["tool_calls"] = choice.tool_calls
        yield Piece(
            index=index,
            text=choice.text,
            token_ids=tuple(choice.token_ids),
            logprobs=choice.logprobs,
            extra=extra,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            prompt_token_ids=choice.prompt_token_ids,
        )
