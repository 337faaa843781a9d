"""The APIs that clients may speak: each parses to a `Request` and renders from an `Answer`."""

from __future__ import annotations

from typing import Any, Protocol

from rose_daemon.scheduler.dialects import openai, sglang, vllm
from rose_daemon.scheduler.output import Answer, Piece
from rose_daemon.scheduler.requests import Dialect, Request


class ChunkWriter(Protocol):
    """Renders one client's stream as server-sent events."""

    def events(self, piece: Piece, version: int | None) -> bytes:
        """Events that show one piece; `version` is the one its tokens were sampled from."""
        ...

    def last(self, answer: Answer) -> bytes:
        """Events that end the stream."""
        ...


def parse(dialect: Dialect, data: bytes) -> Request:
    """Check a request body.  Raises Refused (400)."""
    match dialect:
        case Dialect.CHAT | Dialect.COMPLETION:
            return openai.parse(dialect, data)
        case Dialect.GENERATE:
            return vllm.parse(data)
        case Dialect.SGLANG:
            return sglang.parse(data)


def chunk_writer(request: Request, turn_id: str, model: str, created: int) -> ChunkWriter:
    """What renders a stream of that request.  `created` is in seconds since the epoch."""
    match request.dialect:
        case Dialect.CHAT | Dialect.COMPLETION:
            return openai.ChunkWriter(request, turn_id, model, created)
        case Dialect.GENERATE:
            return vllm.ChunkWriter(request, turn_id)
        case Dialect.SGLANG:
            return sglang.ChunkWriter(request, turn_id)


def whole_body(answer: Answer, request: Request) -> Any:
    """The JSON body of a plain answer."""
    match request.dialect:
        case Dialect.CHAT | Dialect.COMPLETION:
            return openai.whole_body(answer, request)
        case Dialect.GENERATE:
            return vllm.whole_body(answer, request)
        case Dialect.SGLANG:
            return sglang.whole_body(answer, request)
