"""Plain TCP beside which transfers are judged: one process sends from memory, another receives into memory.

`python -m rose_daemon.bench.plain_tcp HOST` prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import socket
import sys
import threading
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 1 << 20
_LENGTH_BYTES = 8


class PlainTcp:
    """A connection to a sender."""

    def __init__(self, host: str, port: int) -> None:
        self._sock = socket.create_connection((host, port), 30)

    def fill(self, view: memoryview) -> None:
        """Have as many bytes sent as `view` is long, and receive them there."""
        self._sock.sendall(len(view).to_bytes(_LENGTH_BYTES, "little"))
        received = 0
        while received < len(view):
            got = self._sock.recv_into(view[received : received + _CHUNK_BYTES])
            if not got:
                raise ConnectionResetError("the sender is gone")
            received += got

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()


def serve(listening: socket.socket) -> None:
    """Send each connection as many bytes as it asks for, as often as it does."""
    while True:
        sock, _ = listening.accept()
        threading.Thread(target=_send, args=(sock,), daemon=True).start()


def _send(sock: socket.socket) -> None:
    data = memoryview(bytearray(64 << 20))
    with sock:
        while len(asked := sock.recv(_LENGTH_BYTES, socket.MSG_WAITALL)) == _LENGTH_BYTES:
            left = int.from_bytes(asked, "little")
            while left:
                chunk = data[: min(left, len(data))]
                sock.sendall(chunk)
                left -= len(chunk)


def main() -> None:
    """Serve until the standard input ends, that is until whoever started this is gone."""
    with socket.create_server((sys.argv[1], 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    main()
