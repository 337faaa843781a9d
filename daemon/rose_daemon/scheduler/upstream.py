"""One attempt of a turn on one replica: a plain OpenAI call that always streams.

Streaming is what lets a turn survive: whatever ends the attempt, the tokens received so far are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import httptools
import msgspec

from rose.errors import NotReady
from rose_daemon.scheduler import sglang_engine
from rose_daemon.scheduler.engine_http import EnginePool
from rose_daemon.scheduler.engine_streams import (
    DONE,
    EngineError,
    EventSplitter,
    Garbage,
    OpenAiReader,
    Reader,
)
from rose_daemon.scheduler.errors import Failure
from rose_daemon.scheduler.output import ABORTED, Piece
from rose_daemon.scheduler.pacing import Pacer
from rose_daemon.scheduler.requests import Dialect, neutral

CONNECT_TIMEOUT_S = 5.0
_KEEP_ALIVE_S = 4.0
"""For side calls: longer than from probe to probe; engines close idle connections after five seconds."""
SIDE_CALL_TIMEOUT_S = 30.0
"""For /detokenize and /v1/models, which an engine answers without its scheduler."""
_REFUSAL_BYTES_MAX = 1 << 20
_REFUSALS = frozenset({400, 401, 403, 404, 405, 413, 415, 422})
"""Statuses that say something about the request itself; another replica would answer the same."""


VLLM, SGLANG = "vllm", "sglang"
"""Whose API a replica speaks."""


OnPieces = Callable[[list[Piece]], None]


class Finished(msgspec.Struct, frozen=True):
    """Every choice has its finish reason."""

    usage: dict[str, Any] | None


class Interrupted(msgspec.Struct, frozen=True):
    """The attempt ended early; the turn can go on elsewhere."""

    reason: str
    failed: bool = True
    """Not so if the engine let go of the request on purpose."""


class Rejected(msgspec.Struct, frozen=True):
    """The engine refuses the request as such."""

    failure: Failure


class Call(msgspec.Struct, frozen=True):
    """What to ask of which replica."""

    url: str
    dialect: Dialect
    body: dict[str, Any]
    request_id: str
    """Names the attempt in the engine's log."""
    choices: int
    engine: str = VLLM
    """Whose API the replica speaks."""
    trace: Mapping[str, str] = {}
    """Headers of the trace that the attempt is part of."""


AttemptEnd = Finished | Interrupted | Rejected


class Upstream:
    """HTTP client side of the gateway, shared by all attempts.

    Turns go through `engine_http`, everything else through a general client.
    """

    def __init__(self, pacer: Pacer) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),
        )
        self._engines = EnginePool(CONNECT_TIMEOUT_S, pacer)

    async def close(self) -> None:
        """Close all connections; engines see the requests in flight as aborted by their client."""
        self._engines.close()
        await self._session.close()

    async def attempt(self, call: Call, on_pieces: OnPieces) -> AttemptEnd:
        """Run one attempt to its end, handing each chunk's pieces to `on_pieces` as they come.

        Cancelling it closes the connection, by which vLLM aborts the request.
        """
        path, body = call.dialect.path, call.body
        translates = call.engine == SGLANG and call.dialect is Dialect.COMPLETION
        if translates:
            if name := sglang_engine.untranslatable(body, neutral):
                text = f"`{name}` has no counterpart in SGLang, where this turn would run"
                return Rejected(Failure(400, "unsupported", text, name))
            path, body = sglang_engine.PATH, sglang_engine.generate_body(body)
        elif call.engine == SGLANG:
            body = sglang_engine.chat_body(body)
        reader = sglang_engine.Reader(call.body) if translates else OpenAiReader(call.dialect)
        answer = _Answer(call.choices, reader, on_pieces)
        headers = {"Content-Type": "application/json", "X-Request-Id": call.request_id, **call.trace}
        try:
            await self._engines.post(call.url, path, headers, msgspec.json.encode(body), answer)
        except TimeoutError:
            return Interrupted("connect_failed")
        except (OSError, httptools.HttpParserError) as error:
            return answer.broken(error)
        return answer.end or Interrupted("stream_ended_early")

    async def detokenize(self, url: str, model: str, tokens: list[int]) -> str:
        """Text of `tokens`, special ones included.  Raises NotReady."""
        answer = await self._side_call("POST", f"{url}/detokenize", {"model": model, "tokens": tokens})
        text = answer.get("prompt")
        if not isinstance(text, str):
            raise NotReady(f"{url}/detokenize answered without a prompt")
        return text

    async def context_tokens_max(self, url: str) -> int:
        """Context length of the replica's model.  Raises NotReady."""
        answer = await self._side_call("GET", f"{url}/v1/models", None)
        lengths = [card.get("max_model_len") for card in answer.get("data", ())]
        if not lengths or not isinstance(lengths[0], int):
            raise NotReady(f"{url}/v1/models names no max_model_len")
        return lengths[0]

    async def get(self, url: str) -> None:
        """GET that has to answer 200.  Raises NotReady."""
        await self._fetch("GET", url, None)

    async def post(self, url: str) -> None:
        """POST without a body that has to answer 200.  Raises NotReady."""
        await self._fetch("POST", url, None)

    async def get_json(self, url: str) -> dict[str, Any]:
        """GET that has to answer 200 with a JSON object.  Raises NotReady."""
        return await self._side_call("GET", url, None)

    async def forward(self, url: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """POST; status and body of an answer, or of a refusal that all replicas would give.

        Raises NotReady.
        """
        status, data = await self._request("POST", url, body)
        if status != 200 and status not in _REFUSALS:
            raise NotReady(f"{url} answered {status}")
        return status, data

    async def _fetch(self, method: str, url: str, body: dict[str, Any] | None) -> bytes:
        status, data = await self._request(method, url, body)
        if status != 200:
            raise NotReady(f"{url} answered {status}")
        return data

    async def _request(self, method: str, url: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=SIDE_CALL_TIMEOUT_S)
        try:
            async with self._session.request(method, url, json=body, timeout=timeout) as response:
                return response.status, await response.read()
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            raise NotReady(f"{url}: {error}") from None

    async def _side_call(self, method: str, url: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = await self._fetch(method, url, body)
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise NotReady(f"{url}: {error}") from None


class _Answer:
    """An engine's answer to a turn, as it comes: pieces of its stream, or a refusal."""

    def __init__(self, choices: int, reader: Reader, on_pieces: OnPieces) -> None:
        self._status = 0
        self._refusal = bytearray()
        self._splitter = EventSplitter()
        self._progress = _Progress(choices, reader)
        self._on_pieces = on_pieces
        self._garbage = False

    @property
    def end(self) -> AttemptEnd | None:
        """How the attempt ended, None if the answer is not complete."""
        if self._status not in (0, 200):
            return _refused(self._status, bytes(self._refusal))
        if self._garbage:
            return Interrupted("engine_garbage")
        return self._progress.end or self._progress.finished()

    def broken(self, error: Exception) -> AttemptEnd:
        """The connection ended, or was none of HTTP.  A stream cut after its last token is a finished one."""
        if isinstance(error, httptools.HttpParserError):
            return Interrupted("engine_garbage")
        connected = self._status or isinstance(error, ConnectionResetError)
        return self.end or Interrupted("connection_lost" if connected else "connect_failed")

    def head(self, status: int) -> None:
        """As `Receiver`."""
        self._status = status

    def block(self, data: bytes) -> bool:
        """As `Receiver`."""
        if self._status != 200:
            self._refusal += data[: _REFUSAL_BYTES_MAX - len(self._refusal)]
            return False
        try:
            pieces = self._progress.read(self._splitter.feed(data))
        except Garbage:
            self._garbage = True
            return True
        if pieces:
            # All that came in one block is handed on at once: under load that is more than one token.
            self._on_pieces(pieces)
        return self._progress.end is not None


def _refused(status: int, data: bytes) -> AttemptEnd:
    if status not in _REFUSALS:
        return Interrupted(f"engine_status_{status}")
    try:
        body = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        body = {}
    passed_on = body if isinstance(body.get("error"), dict) else None
    text = data[:200].decode("utf-8", errors="replace")
    return Rejected(Failure(status, "engine_refused", f"the engine refused: {text}", body=passed_on))


class _Progress:
    """What has come of a stream, and how it ended (`end`), once it has."""

    def __init__(self, choices: int, reader: Reader) -> None:
        self._choices = choices
        self._open = set(range(choices))
        self._reader = reader
        self.end: AttemptEnd | None = None

    def finished(self) -> Finished | None:
        """The end of a complete answer; None if one of its choices is not."""
        return None if self._open else Finished(self._reader.usage())

    def read(self, events: list[bytes]) -> list[Piece]:
        """The pieces in events, up to the end of the stream.  Raises Garbage."""
        found: list[Piece] = []
        for data in events:
            if data == DONE:
                self.end = self.finished() or Interrupted("stream_ended_early")
                break
            try:
                pieces = self._reader.read(data)
            except EngineError as error:
                self.end = _stream_error(error.error)
                break
            found += pieces
            for piece in pieces:
                if piece.finish_reason is not None or piece.index:  # else it is a token like most
                    self._note(piece)
            if self.end is not None:
                break
        return found

    def _note(self, piece: Piece) -> None:
        """Keep account of a piece, which may end the stream.  Raises Garbage."""
        if not 0 <= piece.index < self._choices:
            raise Garbage("a choice that was not asked for")
        if piece.finish_reason is None:
            return
        if piece.finish_reason == ABORTED:
            self.end = Interrupted(str(piece.stop_reason or "aborted_by_engine"), failed=False)
            piece.finish_reason = piece.stop_reason = None
        else:
            self._open.discard(piece.index)


def _stream_error(error: dict[str, Any]) -> AttemptEnd:
    """An error event in a stream that began with status 200."""
    code = error.get("code")
    if isinstance(code, int) and code in _REFUSALS:
        failure = Failure(code, "engine_refused", str(error.get("message", "")), body={"error": error})
        return Rejected(failure)
    return Interrupted(f"engine_status_{code if isinstance(code, int) else 500}")
