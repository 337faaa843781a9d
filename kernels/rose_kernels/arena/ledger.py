"""The page ledger of a device: how many pages each process holds, and never more together than there are.

A ledger is one page of a file that all engines on a device map; how it works is in kernels/csrc/ledger.h.
There is no lock: a process may be killed or stopped at any instant, and the others go on, with counts that
are right.  What a dead process held comes back by `Ledger.reclaim`, once it has provably exited.

It counts, and moves no memory: acquire here, then map; unmap, let the device finish, then release here.

Importing this module raises ImportError where the C library was not built: share memory in fixed parts then.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from rose_kernels.arena.base import PAGE_BYTES, ArenaError
from rose_kernels.processes import Owner, scope
from rose_kernels.shared import shared_library

_found = shared_library()
if _found is None:
    raise ImportError(
        "the page ledger needs the C library that is built when ROSE is installed, and it is not there: "
        "install a C compiler and then ROSE again, or share memory in fixed parts"
    )
_C: Any = _found

LEDGER_BYTES = 4096
OWNERS_MAX = 62
PAGES_MAX = (1 << 22) - 1
"""Most pages of a ledger: 8 TiB in pages of 2 MiB."""
REVISION_MAX = (1 << 34) - 1
_PID_BITS, _TICKS_BITS = 22, 40  # pids end at 2^22 on Linux; the ticks last for three centuries
_GONE, _FULL, _MISUSE = -1, -2, -3


class Role(IntEnum):
    """What an owner does with its pages."""

    SERVING = 1
    ROLLOUT = 2


class LimitAnswer(StrEnum):
    """What became of a limit; the values are stable."""

    APPLIED = "applied"
    """In force, and the owner holds no more than that."""
    DEFERRED = "deferred"
    """In force, but the owner holds more and has to release first.  The same call again says when it has."""
    STALE = "stale"
    """A later revision is in force; nothing changed."""
    CONFLICT = "conflict"
    """This revision is in force with another number of pages; nothing changed."""


_ANSWERS = (LimitAnswer.APPLIED, LimitAnswer.DEFERRED, LimitAnswer.STALE, LimitAnswer.CONFLICT)


class LedgerError(ArenaError):
    """The file is no ledger of this machine and boot, or the call makes no sense; nothing has changed."""


class OwnerGone(LedgerError):
    """That process has no account in the ledger, or has none any more."""


class OwnerPages(NamedTuple):
    """One owner's line in the ledger."""

    owner: Owner
    role: Role
    held_pages: int
    limit_pages: int
    limit_revision: int
    """0 as long as nobody has set one since the owner joined."""


class LedgerView(NamedTuple):
    """The whole ledger."""

    capacity_pages: int
    used_pages: int
    owners: tuple[OwnerPages, ...]
    consistent: bool
    """Whether all of it is of one instant.  If not (the ledger was busy), each number is right by itself."""


class _OwnerWords(ctypes.Structure):
    _fields_ = (
        ("identity", ctypes.c_uint64), ("held", ctypes.c_int64), ("limit", ctypes.c_int64),
        ("revision", ctypes.c_int64),
    )  # fmt: skip


class _ViewWords(ctypes.Structure):
    _fields_ = (
        ("used", ctypes.c_int64), ("consistent", ctypes.c_int32), ("reserved", ctypes.c_int32),
        ("owners", _OwnerWords * OWNERS_MAX),
    )  # fmt: skip


def _identity(owner: Owner, role: Role) -> int:
    if not 0 < owner.pid < 1 << _PID_BITS or not 0 < owner.start_ticks < 1 << _TICKS_BITS:
        raise LedgerError(f"{owner} does not name a process")
    return role << (_PID_BITS + _TICKS_BITS) | owner.pid << _TICKS_BITS | owner.start_ticks


def _named(identity: int) -> tuple[Owner, Role]:
    ticks = identity & ((1 << _TICKS_BITS) - 1)
    pid = identity >> _TICKS_BITS & ((1 << _PID_BITS) - 1)
    return Owner(pid, ticks), Role(identity >> (_PID_BITS + _TICKS_BITS))


class Ledger:
    """A ledger file, open in this process.  Any thread may call.

    Raises FileNotFoundError (or another OSError) when the file cannot be opened, LedgerError when it is not a
    ledger of this boot and pid namespace.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if status.st_size != LEDGER_BYTES:
                raise LedgerError(f"{path} is not a page ledger: it has {status.st_size} bytes")
            page = mmap.mmap(descriptor, LEDGER_BYTES)
        finally:
            os.close(descriptor)
        self._file = (status.st_dev, status.st_ino)
        self._words = ctypes.c_char.from_buffer(page)  # keeps the page mapped
        self._address = ctypes.addressof(self._words)
        if _C.rose_ledger_check(self._address) != 0:
            raise LedgerError(f"{path} is not a page ledger of this version of ROSE")
        if _C.rose_ledger_scope(self._address) != scope():
            raise LedgerError(f"{path} is from before this boot, or from another pid namespace: remove it")
        self.capacity_pages: int = _C.rose_ledger_capacity(self._address)
        self.page_bytes: int = _C.rose_ledger_page_bytes(self._address)

    @classmethod
    def create(cls, path: Path, capacity_pages: int, page_bytes: int = PAGE_BYTES) -> Ledger:
        """Open the ledger at `path`, making it if it is not there; any number of processes may do so at once.

        Raises LedgerError also when there is one of another capacity or page size.
        """
        if not 0 <= capacity_pages <= PAGES_MAX or page_bytes < 1:
            raise LedgerError(f"a ledger has 0 to {PAGES_MAX} pages of at least a byte")
        fresh = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        image = ctypes.create_string_buffer(LEDGER_BYTES)
        assert _C.rose_ledger_init(ctypes.addressof(image), capacity_pages, page_bytes, scope()) == 0
        try:
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(image.raw)
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(fresh)
        finally:
            fresh.unlink(missing_ok=True)
        ledger = cls(path)
        if (ledger.capacity_pages, ledger.page_bytes) != (capacity_pages, page_bytes):
            raise LedgerError(
                f"{path} is of {ledger.capacity_pages} pages of {ledger.page_bytes} bytes, "
                f"not of {capacity_pages} of {page_bytes}"
            )
        return ledger

    @property
    def used_pages(self) -> int:
        """Pages of all owners together."""
        return int(_C.rose_ledger_used(self._address))

    @property
    def free_pages(self) -> int:
        """Pages of nobody."""
        return self.capacity_pages - self.used_pages

    def _lines(self) -> tuple[_ViewWords, list[tuple[int, _OwnerWords]]]:
        view = _ViewWords()
        _C.rose_ledger_look(self._address, ctypes.addressof(view))
        return view, [(slot, words) for slot, words in enumerate(view.owners) if words.identity]

    def view(self) -> LedgerView:
        """Who holds what."""
        view, lines = self._lines()
        owners = tuple(
            OwnerPages(*_named(words.identity), words.held, words.limit, words.revision) for _, words in lines
        )
        return LedgerView(self.capacity_pages, view.used, owners, bool(view.consistent))

    def join(self, role: Role, limit_pages: int) -> Account:
        """An account for this process, which may hold `limit_pages` until somebody sets another limit.

        A process has one at a time, and its children none: they join for themselves.  Raises LedgerError when
        it has one, or when OWNERS_MAX processes have.
        """
        owner = Owner.myself()
        identity = _identity(owner, role)
        if not 0 <= limit_pages <= PAGES_MAX:
            raise LedgerError(f"a limit is 0 to {PAGES_MAX} pages")
        with _joining:
            if (*self._file, owner.pid) in _joined:
                raise LedgerError(f"this process has joined {self.path} already")
            for slot, words in self._lines()[1]:
                if _named(words.identity)[0] == owner:  # of a program that this one has replaced by exec
                    _C.rose_ledger_leave(self._address, slot, words.identity)
            slot = _C.rose_ledger_join(self._address, identity, limit_pages)
            if slot == _FULL:
                raise LedgerError(f"{self.path} has {OWNERS_MAX} owners already")
            _joined.add((*self._file, owner.pid))
        return Account(self, slot, owner, role)

    def set_limit(self, owner: Owner, revision: int, pages: int) -> LimitAnswer:
        """Let `owner` hold at most `pages` from now on, unless a later revision said something else.

        Revisions start at 1.  Raises OwnerGone, and LedgerError for numbers out of range.
        """
        for slot, words in self._lines()[1]:
            if _named(words.identity)[0] == owner:
                answer = _C.rose_ledger_set_limit(self._address, slot, words.identity, revision, pages)
                if answer == _MISUSE:
                    raise LedgerError(f"limit of {pages} pages at revision {revision} is out of range")
                if answer >= 0:
                    return _ANSWERS[answer]
        raise OwnerGone(f"process {owner.pid} has no account in {self.path}")

    def reclaim(self) -> list[OwnerPages]:
        """Take back what processes held that have provably exited; their lines, as they were."""
        reclaimed = []
        for slot, words in self._lines()[1]:
            owner, role = _named(words.identity)
            if owner.has_exited():
                pages = _C.rose_ledger_leave(self._address, slot, words.identity)
                if pages != _GONE:
                    reclaimed.append(OwnerPages(owner, role, pages, words.limit, words.revision))
        return reclaimed


_joining = threading.Lock()
_joined: set[tuple[int, int, int]] = set()
"""(device, inode, pid) of ledgers with an account of this process; in a child the pid is another's."""


class Account:
    """What one process holds in a ledger: made by `Ledger.join`, used by that process only, by any thread.

    Raises OwnerGone after `leave`, and in a child of the process.
    """

    def __init__(self, ledger: Ledger, slot: int, owner: Owner, role: Role) -> None:
        self.ledger = ledger
        self.owner = owner
        self.role = role
        self._slot = slot
        self._identity = _identity(owner, role)
        self._address = ledger._address
        self._lock = threading.Lock()

    def _require_mine(self) -> None:
        if os.getpid() != self.owner.pid:
            raise OwnerGone(f"the account is of process {self.owner.pid}: join the ledger in this one too")

    def _checked(self, result: int, what: str) -> int:
        if result == _GONE:
            raise OwnerGone(f"process {self.owner.pid} has left {self.ledger.path}")
        if result == _MISUSE:
            raise LedgerError(what)
        return result

    @property
    def line(self) -> OwnerPages:
        """What the ledger says of this account now."""
        for line in self.ledger.view().owners:
            if line.owner == self.owner:
                return line
        raise OwnerGone(f"process {self.owner.pid} has left {self.ledger.path}")

    @property
    def held_pages(self) -> int:
        """Pages acquired and not released."""
        return self.line.held_pages

    def acquire(self, pages: int, at_least: int | None = None) -> int:
        """Take `pages`, or what there is of them if that is `at_least` so many; the number taken, else 0.

        Without `at_least` it is all or nothing.  Never waits, and never exceeds the capacity or the limit: 0
        means that not enough is free, or not enough is allowed.
        """
        self._require_mine()
        least = pages if at_least is None else at_least
        with self._lock:
            taken = _C.rose_ledger_acquire(self._address, self._slot, self._identity, pages, least)
        return self._checked(taken, f"cannot acquire {pages} pages, at least {least}")

    def release(self, pages: int) -> None:
        """Give `pages` back, after they were unmapped and the device has finished.

        Raises LedgerError for more than are held.
        """
        self._require_mine()
        with self._lock:
            done = _C.rose_ledger_release(self._address, self._slot, self._identity, pages)
        self._checked(done, f"cannot release {pages} pages: not so many are held")

    def leave(self) -> int:
        """Give everything back and close the account; the number of pages.  Unmap before."""
        self._require_mine()
        with self._lock, _joining:
            pages = _C.rose_ledger_leave(self._address, self._slot, self._identity)
            self._checked(pages, "")
            _joined.discard((*self.ledger._file, self.owner.pid))
        return int(pages)
