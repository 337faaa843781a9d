"""The control socket: `rose status`, `rose reclaim` and the like, one JSON line each way."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from rose import wire
from rose.errors import ConfigError, Exit, NotReady, RoseError
from rose_daemon import sdnotify

_IDLE_TIMEOUT_S = 30.0
_CONNECTIONS_MAX = 32


class ControlServer:
    """Answers requests on a unix socket that only its owner may use, its own or the service manager's."""

    def __init__(self, path: Path, answer: Callable[[wire.ControlRequest], Awaitable[wire.Reply]]) -> None:
        self._path = path
        self._answer = answer
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._owns_path = True
        """The service manager made the socket otherwise, and keeps it."""

    async def start(self) -> None:
        """Listen.  Raises ConfigError for a path that is unusable, NotReady where another rosed answers."""
        inherited = sdnotify.inherited_socket(self._path)
        self._owns_path = inherited is None
        if self._owns_path:
            self._take_path()
        listener = inherited or socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if self._owns_path:
                listener.bind(str(self._path))
                self._path.chmod(0o600)  # before listen: nobody can have connected yet
            listener.setblocking(False)
            self._server = await asyncio.start_unix_server(
                self._on_connection, sock=listener, limit=wire.MESSAGE_BYTES_MAX
            )
        except OSError as error:
            listener.close()
            raise ConfigError(f"control socket {self._path}: {error}", "set node.control_socket") from None

    async def close(self) -> None:
        """Stop listening, end open connections, take the socket file away."""
        if self._server is None:
            return
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._owns_path:
            self._path.unlink(missing_ok=True)

    def _take_path(self) -> None:
        """Remove the socket file of a dead rosed; refuse that of a living one."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"control socket {self._path}: {error}", "set node.control_socket") from None
        if not self._path.is_socket():
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self._path))
            except OSError:
                self._path.unlink(missing_ok=True)
                return
        raise NotReady(
            f"another rosed answers on {self._path}", "stop it, or give this one its own node.state_dir"
        )

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) <= _CONNECTIONS_MAX:
                await self._serve(reader, writer)
        except (TimeoutError, ConnectionError, ValueError):
            pass  # idle, gone, or a line over the limit: the connection just ends
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            async with asyncio.timeout(_IDLE_TIMEOUT_S):
                line = await reader.readline()
            if not line:
                return
            writer.write(wire.pack_line(await self._reply(line)))
            await writer.drain()

    async def _reply(self, line: bytes) -> wire.Reply:
        try:
            request = wire.unpack_request(line)
        except msgspec.DecodeError as error:
            return wire.Reply(f"not a control request: {error}", code=Exit.USAGE)
        try:
            return await self._answer(request)
        except RoseError as error:
            return wire.Reply(error.what, error.hint, int(error.code))
