"""Shared-memory boards: how engines and rosed see each other without a message.

A board is one page in a file under /dev/shm.  It has a single writer and any number of readers.
The writer alternates between two slots; each slot carries a checksum over its sequence number and
words, so that a torn read, a truncated file or a foreign layout is `Unknown`, never a wrong number.
A bell (futex word) on the page lets one process wake another out of a bounded wait, and two activity words
say whether the owner has work on the device at this instant, cheaper than a whole record.

Whoever may write a board can also cut its file short, and touching a page past the end of a file kills a
process.  So each access asks for the file's length first: a cut board is `Unknown` for readers, its owner
makes it whole again, and a bell on it rings for nobody.

Layout, little-endian: magic u64 | layout u32 | words u32 | owner pid i64 | owner start ticks i64 |
sequence u64 | ... | slot 0 at 64 | slot 1 at 1024 | bell u32 at 3072.  Slot: sequence u64, words
i64 x n, crc32 u64.  After the bell: awaited u32 | busy since i64 | busy i64 (nanoseconds).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from rose_kernels.processes import Owner, process_start_ticks
from rose_kernels.shared import shared_library

from rose.core.readings import GatePolicy, ReplicaReading, SlackReading, Unknown
from rose.errors import RoseError
from rose.slots import HEADER, MAGIC, SEQUENCE_AT, WORDS_MAX, slots_of
from rose.units import NS_PER_S

PAGE_BYTES = 4096
_BELL_AT = 3072
_AWAITED_AT = 3076
_ACTIVITY_AT = 3080
_LOW_HALF = 0xFFFF
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_NO_PAGE_POLL_S = 0.005
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}

RecordT = TypeVar("RecordT", bound=tuple[int, ...])


class _Life:
    """Watches one process through a pidfd: cheaper than proc(5), and never fooled by a reused pid."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self._over = False
        self._poll: select.poll | None = None
        self._descriptor = -1
        try:
            self._descriptor = os.pidfd_open(owner.pid)
        except ProcessLookupError:
            self._over = True
        except (OSError, ValueError, OverflowError):
            return  # no pidfd here (old kernel, seccomp) or a senseless pid: proc(5) has to tell
        else:
            self._poll = select.poll()
            self._poll.register(self._descriptor, select.POLLIN)
            self._over = not owner.alive()  # the descriptor may be of a later process

    def goes_on(self) -> bool:
        """Whether the process still runs."""
        if self._over:
            return False
        if self._poll is None:
            return self.owner.alive()
        self._over = bool(self._poll.poll(0))
        return not self._over

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


_lseek = ctypes.PyDLL(None).lseek
"""Keeps the GIL, unlike os.lseek: asked several times a step.  Argument types would double its cost."""
_lseek.restype = ctypes.c_int64


class SharedFile:
    """The open file behind a mapping of `nbytes`."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self._nbytes = nbytes

    def whole(self) -> bool:
        """Whether all of the mapping may be touched."""
        return bool(_lseek(self.descriptor, 0, os.SEEK_END) >= self._nbytes)

    def __del__(self) -> None:
        os.close(self.descriptor)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Bell:
    """A futex word: `wait` sleeps until somebody rings or the time is over.  Waiting frees the GIL.

    A ring means that there is something to do.  A nudge only means "look again", and is free of system calls
    unless the waiting side has asked for it by `awaited`.  Rings are counted in the low half of the word,
    nudges in the high half.
    """

    def __init__(self, page: mmap.mmap, file: SharedFile) -> None:
        self._file = file
        self._word = ctypes.c_uint32.from_buffer(page, _BELL_AT)
        self._awaited = ctypes.c_uint32.from_buffer(page, _AWAITED_AT)
        self._address = ctypes.byref(self._word)
        self._at = ctypes.addressof(self._word)
        self._atomic = shared_library()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._call = _FUTEX_CALL.get(platform.machine())
        if self._call is None:
            raise RoseError(f"no futex number known for {platform.machine()}", "run on x86_64 or aarch64")

    @property
    def count(self) -> int:
        """Changes with every ring and every nudge."""
        return int(self._word.value) if self._file.whole() else 0

    @property
    def rings(self) -> int:
        """Number of rings so far, modulo 2^16."""
        return self.count & _LOW_HALF

    @property
    def awaited(self) -> bool:
        """Whether the waiting side wants nudges now."""
        return self._file.whole() and bool(self._awaited.value)

    @awaited.setter
    def awaited(self, wanted: bool) -> None:
        if not self._file.whole():
            return
        if self._atomic is not None:
            self._atomic.rose_bell_await(self._at, wanted)
        else:
            self._awaited.value = int(wanted)

    def ring(self) -> None:
        """Wake every process that waits on this bell."""
        if not self._file.whole():
            return
        if self._atomic is not None:
            self._atomic.rose_bell_ring(self._at)
            return
        word = self._word.value
        self._word.value = (word & ~_LOW_HALF) | ((word + 1) & _LOW_HALF)
        self._wake()

    def nudge(self) -> None:
        """Wake them if they asked for it: what they wait for may have come nearer."""
        if not self._file.whole():
            return
        if self._atomic is not None:
            self._atomic.rose_bell_nudge(self._at)
        elif self._awaited.value:
            self._word.value = (self._word.value + _LOW_HALF + 1) & 0xFFFF_FFFF
            self._wake()

    def _wake(self) -> None:
        self._libc.syscall(self._call, self._address, _FUTEX_WAKE, 0x7FFF_FFFF, None, None, 0)

    def wait(self, seen: int, timeout_ns: int) -> None:
        """Sleep while the count still is `seen`, at most `timeout_ns`."""
        if timeout_ns <= 0:
            return
        if not self._file.whole():
            time.sleep(min(timeout_ns / NS_PER_S, _NO_PAGE_POLL_S))
            return
        limit = _Timespec(timeout_ns // NS_PER_S, timeout_ns % NS_PER_S)
        expected = ctypes.c_uint32(seen)
        self._libc.syscall(self._call, self._address, _FUTEX_WAIT, expected, ctypes.byref(limit), None, 0)


class Activity:
    """Whether the board's owner has work on the device, and how long it had so far.

    Two plain words without a checksum: a reader may be off by the step that begins or ends at that instant.
    Good for telling what ran beside a step; no gate may hang on it.
    """

    def __init__(self, page: mmap.mmap, file: SharedFile) -> None:
        self._file = file
        self._since = ctypes.c_int64.from_buffer(page, _ACTIVITY_AT)
        self._busy = ctypes.c_int64.from_buffer(page, _ACTIVITY_AT + 8)

    def begin(self, now_ns: int) -> None:
        """Work was given to the device."""
        if self._file.whole() and not self._since.value:
            self._since.value = now_ns

    def end(self, now_ns: int, *, more: bool) -> None:
        """A piece of it is done; `more` is in flight."""
        if not self._file.whole():
            return
        since_ns = self._since.value
        self._since.value = now_ns if more else 0
        if since_ns:
            self._busy.value += max(0, now_ns - since_ns)

    @property
    def working(self) -> bool:
        """Whether the owner has work on the device now."""
        return bool(self._since.value)

    def clear(self) -> None:
        """A new owner has nothing in flight."""
        self._since.value = 0

    def busy_ns(self, now_ns: int) -> int:
        """Time with work on the device up to now; only differences mean anything."""
        if not self._file.whole():
            return 0
        since_ns = self._since.value
        return int(self._busy.value) + (max(0, now_ns - since_ns) if since_ns else 0)


class _Mapping(Generic[RecordT]):
    """One mapped board page; subclasses add the reading or the writing side."""

    def __init__(self, path: Path, kind: type[RecordT], *, create: bool) -> None:
        self.path = path
        self._kind = kind
        self._words = len(kind._fields)  # type: ignore[attr-defined]
        self._layout = zlib.crc32(",".join((kind.__name__, *kind._fields)).encode())  # type: ignore[attr-defined]
        if self._words > WORDS_MAX:
            raise RoseError(f"{kind.__name__} does not fit in a board slot")
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        self._file = SharedFile(os.open(path, flags, 0o600), PAGE_BYTES)
        if create and not self._file.whole():
            os.ftruncate(self._file.descriptor, PAGE_BYTES)
        self._page = mmap.mmap(self._file.descriptor, PAGE_BYTES)
        self._slots = slots_of(self._page, self._layout, self._words)
        self.bell = Bell(self._page, self._file)
        self.activity = Activity(self._page, self._file)


class BoardWriter(_Mapping[RecordT]):
    """The one writer of a board.

    Raises OSError when the file cannot be made.
    """

    def __init__(self, path: Path, kind: type[RecordT]) -> None:
        super().__init__(path, kind, create=True)
        self.activity.clear()
        self._sequence = int.from_bytes(self._page[SEQUENCE_AT : SEQUENCE_AT + 8], "little")
        self._write_header()

    def _write_header(self) -> None:
        pid = os.getpid()
        HEADER.pack_into(
            self._page, 0, MAGIC, self._layout, self._words, pid, process_start_ticks(pid), self._sequence
        )

    def publish(self, record: RecordT) -> None:
        """Make `record` what every reader sees."""
        if not self._file.whole():
            os.ftruncate(self._file.descriptor, PAGE_BYTES)
            self._write_header()
        self._slots.publish(record)
        self._sequence += 1


class BoardReader(_Mapping[RecordT]):
    """One reader of a board.

    Raises FileNotFoundError (or another OSError, or ValueError for a file shorter than a page) when the
    board is not there; use `open_board` for a reader that waits for its board.
    """

    def __init__(self, path: Path, kind: type[RecordT]) -> None:
        super().__init__(path, kind, create=False)
        self._make: Callable[[tuple[int, ...]], RecordT] = kind._make  # type: ignore[attr-defined]
        self._header = b""
        self._record: RecordT | None = None

    @property
    def owner(self) -> Owner:
        """The process that writes this board now; one that never was while the page is not there."""
        if not self._file.whole():
            return Owner(0, 0)
        _, _, _, pid, start, _ = HEADER.unpack_from(self._page, 0)
        return Owner(pid, start)

    def read(self) -> RecordT | Unknown:
        """The latest record, or why there is none.

        That is `board_empty`, `board_torn`, `board_truncated` or `board_foreign`.
        """
        if not self._file.whole():
            return Unknown("board_truncated")
        header = self._page[: HEADER.size]  # with the number of the latest record: none is given twice
        if header == self._header and self._record is not None:
            return self._record
        words = self._slots.read()
        if isinstance(words, str):
            return Unknown(words)
        self._header, self._record = header, self._make(words)
        return self._record


class WatchedBoard(Generic[RecordT]):
    """A reader that copes with a board that is not there yet, went away, or was replaced.

    `read(now_ns, limit_ns)` never raises: it answers `Unknown` with `board_missing`, `board_forbidden`,
    `board_truncated`, `owner_gone`, or `board_stale` (record older than `limit_ns`, where word 0 is a stamp;
    None skips the check).  File and owner are checked at most every `owner_check_ns`, as that costs
    system calls.
    """

    def __init__(self, path: Path, kind: type[RecordT], *, owner_check_ns: int = 50_000_000) -> None:
        self.path = path
        self._kind = kind
        self._owner_check_ns = owner_check_ns
        self._owner_checked_ns = 0
        self._reader: BoardReader[RecordT] | None = None
        self._inode = 0
        self._life: _Life | None = None
        self._fault = "board_missing"

    @property
    def bell(self) -> Bell | None:
        """The bell on the board's page, once the board is there."""
        return self._reader.bell if self._reader else None

    @property
    def activity(self) -> Activity | None:
        """The activity words on the board's page, once the board is there."""
        return self._reader.activity if self._reader else None

    @property
    def owner(self) -> Owner | None:
        """The process that writes the board, once the board is there."""
        return self._reader.owner if self._reader else None

    def refresh(self, now_ns: int) -> None:
        """Check file and owner some time before the next `read` would have to."""
        self._check_owner(now_ns, self._owner_check_ns // 2)

    def _check_owner(self, now_ns: int, period_ns: int) -> None:
        if self._reader is not None and now_ns - self._owner_checked_ns < period_ns:
            return
        self._owner_checked_ns = now_ns
        try:
            status = self.path.stat()
            if status.st_size < PAGE_BYTES:
                self._reader, self._fault = None, "board_truncated"
                return
            if self._reader is None or status.st_ino != self._inode:
                self._reader, self._inode = BoardReader(self.path, self._kind), status.st_ino
        except PermissionError:  # its writer runs as another user
            self._reader, self._fault = None, "board_forbidden"
            return
        except (OSError, ValueError):
            self._reader, self._fault = None, "board_missing"
            return
        owner = self._reader.owner
        if self._life is None or self._life.owner != owner:
            self._life = _Life(owner)
        self._fault = "" if self._life.goes_on() else "owner_gone"

    def read(self, now_ns: int, limit_ns: int | None) -> RecordT | Unknown:
        """The latest record if it is younger than `limit_ns` and its owner lives, else why not."""
        self._check_owner(now_ns, self._owner_check_ns)
        if self._reader is None or self._fault:
            return Unknown(self._fault)
        record = self._reader.read()
        if isinstance(record, Unknown) or limit_ns is None:
            return record
        age_ns = now_ns - record[0]
        if age_ns > limit_ns or age_ns < -NS_PER_S:
            return Unknown("board_stale" if age_ns > 0 else "clock_jumped", age_ns)
        return record


class BoardPaths(NamedTuple):
    """Where the boards of a host live; `run_dir` is under /dev/shm on every host."""

    run_dir: Path

    def slack(self, serving: str) -> Path:
        """SlackReading of the serving engine named `serving`."""
        return self.run_dir / f"slack-{serving}.board"

    def gate(self, replica: str) -> Path:
        """GatePolicy for one rollout engine."""
        return self.run_dir / f"gate-{replica}.board"

    def replica(self, replica: str) -> Path:
        """ReplicaReading of one rollout engine."""
        return self.run_dir / f"replica-{replica}.board"

    @property
    def ledger(self) -> Path:
        """Pages of the KV memory that the engines of this host's device share."""
        return self.run_dir / "kv-pages.ledger"

    def kv_order(self, engine: str) -> Path:
        """KvOrderReading of the scheduler of one engine, for its worker."""
        return self.run_dir / f"kv-order-{engine}.board"

    def kv_parked(self, engine: str) -> Path:
        """The blocks that the latest order parks."""
        return self.run_dir / f"kv-order-{engine}.blocks"

    def kv_holding(self, engine: str, rank: int = 0) -> Path:
        """KvHolding of a worker of one engine, by its rank in tensor parallelism."""
        return self.run_dir / f"kv-holding-{engine}{f'-tp{rank}' if rank else ''}.board"

    def transitions(self, replica: str) -> Path:
        """Ring of GateTransition of one rollout engine."""
        return self.run_dir / f"gate-{replica}.ring"

    def steps(self, engine: str) -> Path:
        """Ring of StepRecord of one engine, serving or rollout, where its step log is on."""
        return self.run_dir / f"steps-{engine}.ring"

    def served(self, serving: str) -> Path:
        """Ring of ServedRequest of a serving engine, for rosed."""
        return self.run_dir / f"served-{serving}.ring"

    def lent_steps(self, replica: str) -> Path:
        """Ring of StepRecord of a rollout engine on lent time, for rosed; `steps` has other readers."""
        return self.run_dir / f"lent-{replica}.ring"


__all__ = [
    "Activity", "Bell", "BoardPaths", "BoardReader", "BoardWriter", "GatePolicy", "Owner", "ReplicaReading",
    "SlackReading", "WatchedBoard", "process_start_ticks",
]  # fmt: skip
