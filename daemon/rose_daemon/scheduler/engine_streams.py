"""What engines stream, read with as little work a token as may be: events, and vLLM's chunks.

Chunks are decoded straight into typed structs, which checks their shape on the way; fields nobody here uses
are skipped.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from rose_daemon.scheduler.output import Alternative, Piece, TokenLogprob, utf8
from rose_daemon.scheduler.requests import Dialect

EVENT_BYTES_MAX = 32 << 20
DONE = b"[DONE]"


class Garbage(Exception):
    """An engine's stream is not what it should be."""


class EngineError(Exception):
    """An error event in a stream that began with status 200; `error` is what it says."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(str(error.get("message", "")))
        self.error = error


class Reader(Protocol):
    """Understands the events of one engine's stream."""

    def read(self, data: bytes) -> list[Piece]:
        """The pieces in an event.  Raises EngineError for an error, Garbage for one of another shape."""
        ...

    def usage(self) -> dict[str, Any] | None:
        """The engine's count of tokens, once it told."""
        ...


class EventSplitter:
    """Cuts a stream of bytes into the data of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, block: bytes) -> list[bytes]:
        """Data of the events that `block` completes.  Raises Garbage for one beyond EVENT_BYTES_MAX."""
        if self._rest:
            block = self._rest + block
        elif block.startswith(b"data: ") and block.find(b"\n") == len(block) - 2 and block.endswith(b"\n\n"):
            return [block[6:-2]]  # one whole event, as nearly always
        *lines, self._rest = block.split(b"\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise Garbage("server-sent event too long")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


# ---- vLLM's chunks ----------------------------------------------------------------------------------


class _Table(msgspec.Struct):
    """Logprobs of a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _CompletionChoice(msgspec.Struct, gc=False):
    index: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: _Table | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None


class _Other(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Entry(msgspec.Struct):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list[_Other] | None = None


class _Entries(msgspec.Struct):
    """Logprobs of a chat."""

    content: list[_Entry] | None = None


class _ChatChoice(msgspec.Struct, gc=False):
    index: int
    delta: dict[str, Any]
    token_ids: tuple[int, ...] | None = None
    logprobs: _Entries | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _CompletionChunk(msgspec.Struct, gc=False):
    choices: list[_CompletionChoice] | msgspec.UnsetType = msgspec.UNSET
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class _ChatChunk(msgspec.Struct, gc=False):
    choices: list[_ChatChoice] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


_decode_completion = msgspec.json.Decoder(_CompletionChunk).decode
_decode_chat = msgspec.json.Decoder(_ChatChunk).decode


class OpenAiReader:
    """vLLM's streams, and SGLang's of chats."""

    def __init__(self, dialect: Dialect) -> None:
        self._chat = dialect is Dialect.CHAT
        self._usage: dict[str, Any] | None = None

    def read(self, data: bytes) -> list[Piece]:
        """As `Reader`; no piece in a usage chunk."""
        try:
            chunk = _decode_chat(data) if self._chat else _decode_completion(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Garbage(str(error)) from None
        if chunk.error is not None:
            raise EngineError(chunk.error)
        if chunk.choices is msgspec.UNSET:
            raise Garbage("a chunk without choices")
        if chunk.usage is not None:
            self._usage = chunk.usage
        if isinstance(chunk, _ChatChunk):
            return [_chat_piece(choice, chunk.prompt_token_ids) for choice in chunk.choices]
        return [_completion_piece(choice) for choice in chunk.choices]

    def usage(self) -> dict[str, Any] | None:
        """As `Reader`."""
        return self._usage


def _chat_piece(choice: _ChatChoice, prompt_token_ids: list[int] | None) -> Piece:
    delta = choice.delta
    text = delta.get("content") or ""
    if not isinstance(text, str):
        raise Garbage("a delta whose content is no text")
    entries = None if choice.logprobs is None else choice.logprobs.content
    return Piece(
        index=choice.index,
        text=text,
        token_ids=choice.token_ids or (),
        logprobs=None if entries is None else [_chat_logprob(entry) for entry in entries],
        extra={key: value for key, value in delta.items() if key != "content" and value},
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        prompt_token_ids=prompt_token_ids,
    )


def _chat_logprob(entry: _Entry) -> TokenLogprob:
    top = tuple(Alternative(other.token, other.logprob, other.bytes) for other in entry.top_logprobs or ())
    return TokenLogprob(entry.token, entry.logprob, entry.bytes, top)


def _completion_piece(choice: _CompletionChoice) -> Piece:
    return Piece(
        index=choice.index,
        text=choice.text or "",
        token_ids=choice.token_ids or (),
        logprobs=None if choice.logprobs is None else _completion_logprobs(choice.logprobs),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        prompt_token_ids=choice.prompt_token_ids,
    )


def _completion_logprobs(table: _Table) -> list[TokenLogprob]:
    tops = table.top_logprobs or [None] * len(table.tokens)
    if not len(table.tokens) == len(table.token_logprobs) == len(tops):
        raise Garbage("logprobs of another number of tokens")
    return [
        TokenLogprob(
            token,
            logprob,
            utf8(token),
            tuple(Alternative(text, value, utf8(text)) for text, value in (top or {}).items()),
        )
        for token, logprob, top in zip(table.tokens, table.token_logprobs, tops, strict=True)
    ]
