"""Moving buckets over a few connections that stay busy: each takes the next piece of what is to be moved.

A lane asks for its next piece before the answer to the present one has come, so that no round trip is spent
in silence; and because pieces are small, all lanes end at about the same time.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from rose.errors import CorruptDelta, RoseError
from rose.units import MIB
from rose.weights.manifest import MANIFEST_BYTES_MAX
from rose.weights.relay import EpochChanged
from rose.weights.relay.bulk import Connection, Uplink, failure
from rose.weights.relay.control import Retry, refusal_of
from rose.weights.relay.http import EPOCH_HEADER, Part

_AHEAD = 2
"""Pieces that a lane has asked for at a time."""
_READ_BYTES = MIB
_LINE_MAX = 4096
_LET_GO_POLL_S = 0.005


class Epochs:
    """The one epoch that all parts of a download come from; if none is given, the first answer settles it."""

    def __init__(self, epoch: str | None) -> None:
        self._settled = {} if epoch is None else {"epoch": epoch}

    def check(self, epoch: str) -> None:
        """Raises EpochChanged.  May be called from several threads."""
        if self._settled.setdefault("epoch", epoch) != epoch:
            raise EpochChanged("the relay was restarted meanwhile")


class _Piece:
    """Bytes of a bucket from `start` on."""

    def __init__(self, view: memoryview, start: int) -> None:
        self.view = view
        self.start = start
        self.done: Future[int] = Future()
        """How many bytes went through: fewer than wanted if the connection broke."""
        self.moved = 0
        self._lane: Connection | None = None
        self._abandoned = False
        self._lock = threading.Lock()

    def begin(self, lane: Connection) -> bool:
        """A lane is about to use the memory; False if it must not."""
        with self._lock:
            self._lane = None if self._abandoned else lane
            return not self._abandoned

    def abandon(self) -> Connection | None:
        """Nobody wants it any more; answers the lane that uses the memory, if one does."""
        with self._lock:
            self._abandoned = True
            return self._lane


class Wanted(_Piece):
    """A piece to download into `view`."""

    def __init__(self, path: str, view: memoryview, start: int, epochs: Epochs) -> None:
        super().__init__(view, start)
        self.path = path
        self.epochs = epochs


class Offered(_Piece):
    """A piece to upload from `view`."""

    def __init__(self, ticket: str, view: memoryview, start: int) -> None:
        super().__init__(view, start)
        self.ticket = ticket


P = TypeVar("P", bound=_Piece)
_ForLane_contra = TypeVar("_ForLane_contra", bound=_Piece, contravariant=True)


class Lane(Protocol[_ForLane_contra]):
    """A connection on which answers come in the order of the requests.  Calls block."""

    @property
    def closed(self) -> bool:
        """Whether it has to be made (again)."""

    def ask(self, piece: _ForLane_contra) -> None:
        """Send the request for a piece."""

    def answer(self, piece: _ForLane_contra) -> None:
        """Receive the answer to a piece, whose turn it is."""

    def close(self) -> None:
        """Close it; the next request makes it anew."""


class Downlane(Connection):
    """A lane of HTTP range requests."""

    _answers: io.BufferedReader | None = None

    def ask(self, piece: Wanted) -> None:
        """See `Lane.ask`."""
        if self.connect():
            self._answers = self.socket.makefile("rb")
        stop = piece.start + len(piece.view)
        self.send_request(piece.path, {"Range": f"bytes={piece.start}-{stop - 1}"})

    def answer(self, piece: Wanted) -> None:
        """See `Lane.answer`.  Raises what a refusal stands for; the next answer may follow."""
        if self._answers is None:
            raise ConnectionAbortedError("closed")
        answers = self._answers
        status = _status(answers.readline(_LINE_MAX))
        headers = http.client.parse_headers(answers)
        epoch, length = headers.get(EPOCH_HEADER, ""), int(headers.get("Content-Length") or 0)
        if status >= 300:
            body = answers.read(min(length, MANIFEST_BYTES_MAX))
            piece.epochs.check(epoch)
            raise refusal_of(status, body)
        try:
            piece.epochs.check(epoch)
            if status != 206 or length != len(piece.view):
                raise CorruptDelta(f"the relay answered {length} bytes where {len(piece.view)} were asked")
        except RoseError:
            self.close()  # there are bytes on the way that nobody wants
            raise
        if not piece.begin(self):
            raise ConnectionAbortedError("given up")
        while piece.moved < length:
            got = answers.readinto1(piece.view[piece.moved : piece.moved + _READ_BYTES])
            if not got:
                raise ConnectionResetError("the download broke off")
            piece.moved += got

    def close(self) -> None:
        """See `Lane.close`."""
        if self._answers is not None:
            self._answers.close()
            self._answers = None
        super().close()


class Uplane(Uplink):
    """A lane of parts."""

    def ask(self, piece: Offered) -> None:
        """See `Lane.ask`."""
        if not piece.begin(self):
            raise ConnectionAbortedError("given up")
        self.send_part(Part(piece.ticket, piece.start, len(piece.view)), piece.view)

    def answer(self, piece: Offered) -> None:
        """See `Lane.answer`."""
        try:
            self.receive()
        except RoseError:
            self.close()  # as the relay does
            raise
        piece.moved = len(piece.view)


class Lanes(Generic[P]):
    """Up to `count` connections, made as they are needed, each in a thread of its own."""

    def __init__(self, make: Callable[[], Lane[P]], count: int) -> None:
        self._make = make
        self._count = count
        self._threads: list[threading.Thread] = []
        self._pieces: queue.SimpleQueue[P | None] = queue.SimpleQueue()

    async def move(self, piece: P) -> int:
        """Move a piece; answers how many of its bytes went through, fewer than all if the connection broke.

        Raises Retry if none did, and what a refusal stands for.  When the caller is cancelled, the memory is
        not touched after that has been raised.
        """
        self._pieces.put(piece)
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name="rose-lane", daemon=True)
            self._threads.append(thread)
            thread.start()
        try:
            return await asyncio.wrap_future(piece.done)
        except asyncio.CancelledError:
            if (lane := piece.abandon()) is not None:
                while not piece.done.done():  # the lane lets go of the memory
                    lane.abort()
                    await asyncio.sleep(_LET_GO_POLL_S)
            raise

    def close(self) -> None:
        """Close all connections, once they have no more to do."""
        for _ in self._threads:
            self._pieces.put(None)

    # ---- in a lane's thread ----

    def _work(self) -> None:
        asked: deque[P] = deque()
        lane = self._make()
        while self._ask_ahead(lane, asked):
            try:
                lane.answer(asked[0])
            except RoseError as error:
                _settle(asked.popleft(), error)
                if lane.closed:
                    _give_up(lane, asked, Retry("the connection was given up"))
            except (OSError, ValueError, http.client.HTTPException, Retry) as error:
                _give_up(lane, asked, error)
            else:
                _settle(asked.popleft())
        lane.close()

    def _ask_ahead(self, lane: Lane[P], asked: deque[P]) -> bool:
        """Ask for the next pieces; waits for one if there is none.  False at the end."""
        while len(asked) < _AHEAD:
            try:
                piece = self._pieces.get(block=not asked)
            except queue.Empty:
                break
            if piece is None:
                self._pieces.put(None)  # for when the rest has been answered
                break
            asked.append(piece)
            try:
                lane.ask(piece)
            except (OSError, ValueError, http.client.HTTPException, RoseError) as error:
                _give_up(lane, asked, error)
        return bool(asked)


def _give_up(lane: Lane[P], asked: deque[P], error: Exception) -> None:
    """Let go of all pieces of a connection that broke."""
    lane.close()
    if not isinstance(error, (RoseError, Retry)):
        error = failure(error)
    while asked:
        _settle(asked.popleft(), error)


def _settle(piece: _Piece, error: Exception | None = None) -> None:
    """Tell who waits for a piece.  What was moved of it counts, whatever happened then."""
    if piece.done.cancelled():
        return
    if error is None or piece.moved:
        piece.done.set_result(piece.moved)
    else:
        piece.done.set_exception(error)


def _status(line: bytes) -> int:
    """The status in the first line of an answer."""
    words = line.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise http.client.HTTPException("what answers does not speak HTTP")
    return int(words[1])
