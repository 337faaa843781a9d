"""One attempt of a turn on one replica: a plain OpenAI call that always streams.

Streaming is what lets a turn survive: whatever ends the attempt, the tokens received so far are kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import msgspec

from rose.errors import NotReady
from rose_daemon.scheduler.errors import Failure
from rose_daemon.scheduler.output import ABORTED, Piece, read_chunk
from rose_daemon.scheduler.requests import Dialect

CONNECT_TIMEOUT_S = 5.0
SIDE_CALL_TIMEOUT_S = 30.0
"""For /detokenize and /v1/models, which an engine answers without its scheduler."""
EVENT_BYTES_MAX = 32 << 20
_REFUSALS = frozenset({400, 401, 403, 404, 405, 413, 415, 422})
"""Statuses that say something about the request itself; another replica would answer the same."""


class Garbage(Exception):
    """An engine's stream is not what vLLM sends."""


OnPieces = Callable[[list[Piece]], Awaitable[None]]


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
        try:
            async with self._session.post(
                call.url + call.dialect.path,
                data=msgspec.json.encode(call.body),
                headers=_headers(call.request_id),
            ) as response:
                if response.status != 200:
                    return await _refusal(response)
                return await _read_stream(response, call, on_pieces)
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

    async def _side_call(self, method: str, url: str, body: dict[str, Any] | None) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=SIDE_CALL_TIMEOUT_S)
        try:
            async with self._session.request(method, url, json=body, timeout=timeout) as response:
                data = await response.read()
                if response.status != 200:
                    raise NotReady(f"{url} answered {response.status}")
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            raise NotReady(f"{url}: {error}") from None
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
    data = await response.content.read(1 << 20)
    try:
        body = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        body = {}
    passed_on = body if isinstance(body.get("error"), dict) else None
    text = data[:200].decode("utf-8", errors="replace")
    return Rejected(Failure(response.status, "engine_refused", f"the engine refused: {text}", body=passed_on))


async def _read_stream(response: aiohttp.ClientResponse, call: Call, on_pieces: OnPieces) -> AttemptEnd:
    open_choices = set(range(call.choices))
    usage: dict[str, Any] | None = None
    try:
        async for data in _events(response.content):
            if data == b"[DONE]":
                break
            chunk = _parse(call, data)
            if chunk.error is not None:
                return _stream_error(chunk.error)
            aborted = next((piece for piece in chunk.pieces if piece.finish_reason == ABORTED), None)
            if aborted is not None:
                reason = str(aborted.stop_reason or "aborted_by_engine")
                aborted.finish_reason = aborted.stop_reason = None
                await on_pieces(chunk.pieces)
                return Interrupted(reason, failed=False)
            open_choices -= {piece.index for piece in chunk.pieces if piece.finish_reason is not None}
            usage = chunk.usage or usage
            await on_pieces(chunk.pieces)
    except (TimeoutError, aiohttp.ClientError, ConnectionError):
        # A stream cut after its last token is a finished one.
        return Finished(usage) if not open_choices else Interrupted("connection_lost")
    except Garbage:
        return Interrupted("engine_garbage")
    return Finished(usage) if not open_choices else Interrupted("stream_ended_early")


class _Chunk(msgspec.Struct, frozen=True):
    pieces: list[Piece]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None


def _parse(call: Call, data: bytes) -> _Chunk:
    try:
        document = msgspec.json.decode(data, type=dict[str, Any])
        if isinstance(error := document.get("error"), dict):
            return _Chunk([], None, error)
        pieces = read_chunk(call.dialect, document)
        if any(not 0 <= piece.index < call.choices for piece in pieces):
            raise Garbage("a choice that was not asked for")
        return _Chunk(pieces, document.get("usage"), None)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise Garbage(str(error)) from None


def _stream_error(error: dict[str, Any]) -> AttemptEnd:
    """An error event in a stream that began with status 200."""
    code = error.get("code")
    if isinstance(code, int) and code in _REFUSALS:
        failure = Failure(code, "engine_refused", str(error.get("message", "")), body={"error": error})
        return Rejected(failure)
    return Interrupted(f"engine_status_{code if isinstance(code, int) else 500}")


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Data of each server-sent event.  Raises Garbage for one beyond EVENT_BYTES_MAX."""
    buffer = bytearray()
    async for block in content.iter_any():
        buffer += block
        if len(buffer) > EVENT_BYTES_MAX:
            raise Garbage("server-sent event too long")
        *lines, rest = buffer.split(b"\n")
        buffer = bytearray(rest)
        for line in lines:
            if line.startswith(b"data:"):
                yield bytes(line[5:].strip())
