"""Talking to rosed over its control socket: one request line, one reply line."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Any

import msgspec

from rose import wire
from rose.errors import Exit, NotReady, RoseError, TimedOut

TIMEOUT_S = 10.0
_NOBODY = {errno.ENOENT, errno.ECONNREFUSED}


class NobodyListens(NotReady):
    """No rosed has that control socket: none is running."""


def ask(path: Path, request: wire.ControlRequest, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Send one request to the rosed that listens on `path`; the body of its reply.

    Raises NotReady when nothing answers there (NobodyListens if no rosed runs), TimedOut, or a RoseError with
    rosed's own words and code.
    """
    try:
        line = _exchange(path, wire.pack_line(request), timeout_s)
    except TimeoutError:
        raise TimedOut(f"rosed on {path} did not answer within {timeout_s:g} s", "see its log") from None
    except PermissionError:
        raise NotReady(f"{path}: permission denied", "run as the user that rosed runs as") from None
    except OSError as error:
        why = error.strerror or str(error)
        kind = NobodyListens if error.errno in _NOBODY else NotReady
        raise kind(
            f"rosed does not answer on {path}: {why}", "is it running?  `rosed --config FILE`"
        ) from None
    try:
        reply = wire.unpack_reply(line)
    except msgspec.DecodeError as error:
        raise NotReady(f"{path}: the answer is not one of rosed's: {error}") from None
    if reply.error:
        refusal = RoseError(reply.error, reply.hint)
        refusal.code = _exit(reply.code)
        raise refusal
    if reply.body is None:
        raise NotReady(f"{path}: the answer is not one of rosed's: it is empty")
    return reply.body


def _exchange(path: Path, line: bytes, timeout_s: float) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        connection.sendall(line)
        with connection.makefile("rb") as stream:
            return stream.readline(wire.MESSAGE_BYTES_MAX + 1)


def _exit(code: int) -> Exit:
    try:
        return Exit(code)
    except ValueError:
        return Exit.ERROR
