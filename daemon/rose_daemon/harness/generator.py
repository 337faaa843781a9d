"""The load generator as a process of its own: nothing else the demo does can delay its clock.

`python -m rose_daemon.harness.generator`: commands and replies are JSON, one message a line.  `Replay` begins
a replay, `Stop` ends its arrivals early; each request's record is sent when it is complete, then `Finished`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import Sequence

import msgspec

from rose.errors import EngineFailed
from rose.traces import TraceRequest
from rose_daemon.harness.load import RequestRecord, Target, TraceLoad, open_client, repeat
from rose_daemon.harness.processes import Child

COMMAND = (sys.executable, "-m", "rose_daemon.harness.generator")
_LINE_BYTES_MAX = 1 << 26


class Replay(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Send these requests to the target, each at its time."""

    target: Target
    seed: int
    requests: list[TraceRequest]
    endless: bool = False
    """Begin again at the end, until told to stop."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Send no more requests; wait for those under way."""


class Record(msgspec.Struct, frozen=True, tag=True):
    """A request that was answered, or failed."""

    record: RequestRecord


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The replay is over."""


_commands = msgspec.json.Decoder(Replay | Stop)
_replies = msgspec.json.Decoder(Record | Finished)


class LoadGenerator:
    """The parent's side.  One replay at a time."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def replay(
        self, replay: Replay, records: list[RequestRecord], stop: asyncio.Event | None = None
    ) -> None:
        """Run a replay to its end, adding to `records` as requests complete; `stop` ends it early.

        Raises EngineFailed when the generator ends or writes garbage.
        """
        assert self._child.process.stdout is not None
        await self._send(replay)
        stopping = asyncio.create_task(self._send_stop(stop)) if stop is not None else None
        try:
            while line := await self._child.process.stdout.readline():
                reply = _replies.decode(line)
                if isinstance(reply, Finished):
                    records.sort(key=lambda record: record.index)
                    return
                records.append(reply.record)
        except (msgspec.DecodeError, ValueError) as error:
            raise EngineFailed(
                f"the load generator wrote garbage: {error}", f"see {self._child.log}"
            ) from None
        finally:
            if stopping is not None:
                stopping.cancel()
        await self._child.process.wait()
        raise self._child.failure()

    async def close(self, grace_s: float) -> None:
        """End the process."""
        await self._child.stop(grace_s)

    async def _send_stop(self, stop: asyncio.Event) -> None:
        await stop.wait()
        await self._send(Stop())

    async def _send(self, command: Replay | Stop) -> None:
        assert self._child.process.stdin is not None
        self._child.process.stdin.write(msgspec.json.encode(command) + b"\n")
        with contextlib.suppress(ConnectionError):  # its end is seen where its replies are read
            await self._child.process.stdin.drain()


class _Service:
    """The process's side."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def serve(self, lines: asyncio.StreamReader) -> None:
        """Carry out commands until the input ends."""
        while line := await lines.readline():
            match _commands.decode(line):
                case Stop():
                    self._stop.set()
                case Replay() as replay:
                    if self._running is not None:
                        await self._running
                    self._stop.clear()
                    self._running = asyncio.create_task(self._replay(replay))
        if self._running is not None:
            self._running.cancel()

    async def _replay(self, replay: Replay) -> None:
        requests: Sequence[TraceRequest] = replay.requests
        async with open_client() as client:
            load = TraceLoad(
                client, replay.target, replay.seed, on_done=lambda record: _write(Record(record))
            )
            await load.run(repeat(requests) if replay.endless else iter(requests), self._stop)
        _write(Finished())


def _write(reply: Record | Finished) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
    sys.stdout.buffer.flush()


async def _main() -> None:
    lines = asyncio.StreamReader(limit=_LINE_BYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer
    )
    # What was imported lives as long as the process: walking it again and again would only stop the clock.
    gc.freeze()
    await _Service().serve(lines)


if __name__ == "__main__":
    asyncio.run(_main())
