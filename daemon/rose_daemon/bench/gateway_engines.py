"""Engines for `rose bench gateway`: they do nothing but send a token's chunk when it is due.

    python -m rose_daemon.bench.gateway_engines --engines 8 --token-ms 10

All of them live in one process on a bare asyncio protocol, so that what they cost is small beside what is
measured.  They show what the gateway needs of vLLM: health, models, a weight version, and streamed
completions with token ids.  Prints `ready <port> ...`.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any, cast

import msgspec
import uvloop

MODEL = "rollout"
_CONTEXT_TOKENS = 32_768
_CHUNK = (
    b'data: {"id":"cmpl-x","object":"text_completion","created":1,"model":"rollout","choices":[{"index":0,'
    b'"text":"x","logprobs":null,"finish_reason":%s,"stop_reason":null,"token_ids":[120]%s}]}\n\n'
)


class Engine:
    """One engine: its pace, and what runs on it."""

    def __init__(self, token_s: float) -> None:
        self.token_s = token_s
        self.running = 0


def framed(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


_TOKEN = framed(_CHUNK % (b"null", b""))
_DONE = framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)


class Connection(asyncio.Protocol):
    """One client connection, one request at a time."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._buffer = b""
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left: what runs for it ends."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._engine.running -= 1

    def data_received(self, data: bytes) -> None:
        """As asyncio."""
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")), 0)
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        method, path, _ = lines[0].split(b" ", 2)
        self._handle(method, path, rest[:length])

    def _handle(self, method: bytes, path: bytes, body: bytes) -> None:
        match method, path:
            case b"POST", b"/v1/completions":
                self._begin(msgspec.json.decode(body))
            case b"GET", b"/health":
                self._answer({})
            case b"GET", b"/v1/models":
                card = {"id": MODEL, "object": "model", "max_model_len": _CONTEXT_TOKENS}
                self._answer({"object": "list", "data": [card]})
            case b"GET", b"/weight_info":
                self._answer({"weight_version": "0"})
            case b"GET", b"/running":
                self._answer({"running": self._engine.running})
            case _:
                self._write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    def _begin(self, body: dict[str, Any]) -> None:
        self._engine.running += 1
        self._left = int(body["max_tokens"])
        prompt = b',"prompt_token_ids":' + msgspec.json.encode(body["prompt"])
        self._first = framed(_CHUNK % (b'"length"' if self._left == 1 else b"null", prompt))
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": self._left,
            "total_tokens": len(body["prompt"]) + self._left,
        }
        last = framed(b"data: " + msgspec.json.encode({"choices": [], "usage": usage}) + b"\n\n")
        self._usage = last if (body.get("stream_options") or {}).get("include_usage") else b""
        self._write(_STREAM_HEAD)
        self._due_s = self._loop.time() + self._engine.token_s
        self._timer = self._loop.call_at(self._due_s, self._token)

    def _token(self) -> None:
        """Send the token that is due; late ones follow at once."""
        self._left -= 1
        chunk = self._first or (_TOKEN if self._left else framed(_CHUNK % (b'"length"', b"")))
        self._first = b""
        if self._left:
            self._write(chunk)
            self._due_s += self._engine.token_s
            self._timer = self._loop.call_at(self._due_s, self._token)
            return
        self._timer = None
        self._engine.running -= 1
        self._write(chunk + self._usage + _DONE)

    def _answer(self, document: dict[str, Any]) -> None:
        body = msgspec.json.encode(document)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._write(head + body)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def serve(engines: int, token_s: float) -> None:
    """Serve until cancelled."""
    loop = asyncio.get_running_loop()
    ports = []
    for _ in range(engines):
        engine = Engine(token_s)
        server = await loop.create_server(lambda engine=engine: Connection(engine, loop), "127.0.0.1", 0)  # type: ignore[misc]
        ports.append(server.sockets[0].getsockname()[1])
    print("ready", *ports, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--token-ms", type=float, default=10.0)
    options = parser.parse_args()
    uvloop.run(serve(options.engines, options.token_ms / 1000))


if __name__ == "__main__":
    main()
