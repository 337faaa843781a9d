"""One attempt of a turn on one replica: a plain OpenAI call that always streams.

Streaming is what lets a turn survive: whatever ends the attempt, the tokens received so far are kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec

from rose.errors import NotReady
from rose_daemon.scheduler import sglang_engine
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
from rose_daemon.scheduler.requests import Dialect, neutral

CONNECT_TIMEOUT_S = 5.0
SIDE_CALL_TIMEOUT_S = 30.0
"""For /detokenize and /v1/models, which an engine answers without its scheduler."""
_REFUSAL_BYTES_MAX = 1 << 20
_REFUSALS = frozenset({400, 401, 403, 404, 405, 413, 415, 422})
"""Statuses that say something about the request itself; another replica would answer the same."""


VLLM, SGLANG = "vllm", "sglang"
"""Whose API a replica speaks."""


OnPieces = Callable[[list[Piece]], Awaitable[None] | None]
"""Takes in pieces; what it returns is waited for before the next are read."""


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


AttemptEnd = Finished | Interrupted | Rejected


class Upstream:
    """HTTP client side of the gateway, shared by all attempts."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),
        )

    async def close(self) -> None:
        """Close all connections; engines see the requests in flight as aborted by their client."""
        await self._session.close()

    async def attempt(self, call: Call, on_pieces: OnPieces) -> AttemptEnd:
        """Run one attempt to its end, handing each chunk's pieces to `on_pieces` as they come.

        Cancelling it closes the connection, by which vLLM aborts the request.  `on_pieces` may raise
        NotReady when it cannot go on (its own call to the engine failed); so does this then.
        """
        path, body = call.dialect.path, call.body
        translates = call.engine == SGLANG and call.dialect is Dialect.COMPLETION
        if translates:
            if name := sglang_engine.untranslatable(body, neutral):
                text = f"`{name}` has no counterpart in SGLang, where this turn would run"
                return Rejected(Failure(400, "unsupported", text, name))
            path, body = sglang_engine.PATH, sglang_engine.generate_body(body)
        try:
            async with self._session.post(
                call.url + path, data=msgspec.json.encode(body), headers=_headers(call.request_id)
            ) as response:
                if response.status != 200:
                    return await _refusal(response)
                reader = sglang_engine.Reader(call.body) if translates else OpenAiReader(call.dialect)
                return await _read_stream(response, call.choices, reader, on_pieces)
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            return Interrupted(_connection_reason(error))

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

    async def _fetch(self, method: str, url: str, body: dict[str, Any] | None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=SIDE_CALL_TIMEOUT_S)
        try:
            async with self._session.request(method, url, json=body, timeout=timeout) as response:
                data = await response.read()
                if response.status != 200:
                    raise NotReady(f"{url} answered {response.status}")
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            raise NotReady(f"{url}: {error}") from None
        return data

    async def _side_call(self, method: str, url: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = await self._fetch(method, url, body)
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise NotReady(f"{url}: {error}") from None


def _headers(request_id: str) -> dict[str, str]:
    return {"Content-Type": "application/json", "X-Request-Id": request_id}


def _connection_reason(error: Exception) -> str:
    return "connect_failed" if isinstance(error, aiohttp.ClientConnectorError) else "connection_lost"


async def _refusal(response: aiohttp.ClientResponse) -> AttemptEnd:
    if response.status not in _REFUSALS:
        return Interrupted(f"engine_status_{response.status}")
    data = await _up_to(response.content, _REFUSAL_BYTES_MAX)
    try:
        body = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        body = {}
    passed_on = body if isinstance(body.get("error"), dict) else None
    text = data[:200].decode("utf-8", errors="replace")
    return Rejected(Failure(response.status, "engine_refused", f"the engine refused: {text}", body=passed_on))


async def _up_to(content: aiohttp.StreamReader, bytes_max: int) -> bytes:
    """All of a body, or its beginning: a single read answers whatever has arrived so far."""
    data = bytearray()
    while len(data) < bytes_max and (block := await content.read(bytes_max - len(data))):
        data += block
    return bytes(data)


async def _read_stream(
    response: aiohttp.ClientResponse, choices: int, reader: Reader, on_pieces: OnPieces
) -> AttemptEnd:
    progress = _Progress(choices, reader)
    splitter = EventSplitter()
    try:
        async for block in response.content.iter_any():
            pieces = progress.read(splitter.feed(block))
            # All that came in one block is handed on at once: under load that is more than one token.
            if pieces and (waiting := on_pieces(pieces)) is not None:
                await waiting
            if progress.end is not None:
                return progress.end
    except (TimeoutError, aiohttp.ClientError, ConnectionError):
        # A stream cut after its last token is a finished one.
        return progress.finished() or Interrupted("connection_lost")
    except Garbage:
        return Interrupted("engine_garbage")
    return progress.finished() or Interrupted("stream_ended_early")


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
            if any(self._note(piece) for piece in pieces):
                break
        return found

    def _note(self, piece: Piece) -> bool:
        """Keep account of a piece; whether it ends the stream.  Raises Garbage."""
        if not 0 <= piece.index < self._choices:
            raise Garbage("a choice that was not asked for")
        if piece.finish_reason is None:
            return False
        if piece.finish_reason != ABORTED:
            self._open.discard(piece.index)
            return False
        self.end = Interrupted(str(piece.stop_reason or "aborted_by_engine"), failed=False)
        piece.finish_reason = piece.stop_reason = None
        return True


def _stream_error(error: dict[str, Any]) -> AttemptEnd:
    """An error event in a stream that began with status 200."""
    code = error.get("code")
    if isinstance(code, int) and code in _REFUSALS:
        failure = Failure(code, "engine_refused", str(error.get("message", "")), body={"error": error})
        return Rejected(failure)
    return Interrupted(f"engine_status_{code if isinstance(code, int) else 500}")
