"""Processes on a page ledger that go on one access to shared memory at a time, in the order that a test says.

The world knows what each process was told.  What was being changed when a process was killed may have
happened or not, and the ledger has to be right either way.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from native_builds import stepping_ledger
from rose_kernels import shared
from rose_kernels.arena.ledger import LEDGER_BYTES, _ViewWords

PROCESSES_MAX = 5
HELPERS_MAX = 4
_POOL_AT, _SLOTS_AT, _SLOT_WORDS = 8, 16, 8


class Op(IntEnum):
    """As in tests/native/ledger_steps.c."""

    JOIN = 0
    ACQUIRE = 1
    RELEASE = 2
    LEAVE = 3
    SET_LIMIT = 4


class Line(NamedTuple):
    """An owner as the words of the file say, read without the code under test."""

    held: int
    limit: int
    revision: int


@dataclass(eq=False)
class Process:
    """What is known of a process."""

    identity: int
    place: int
    slot: int = -1
    held: int = 0
    """Pages it has been given and has not begun to give back."""
    change: int = 0
    """Pages that a call under way may have added, or may not have given back yet."""
    pending: tuple[Op, int, int] | None = None
    dead: bool = False
    leaving: bool = False


@dataclass(eq=False)
class Helper:
    """A call by rosed, for the owner of another account."""

    place: int
    op: Op
    target: Process
    pages: int = 0
    revision: int = 0


def load_stepping(folder: Path) -> Any:
    """The stepping build of the ledger, compiled into `folder`."""
    library = shared.load(stepping_ledger(folder))
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    library.test_begin.argtypes = (i32, i32, pointer, i32, ctypes.c_uint64, i64, i64)
    library.test_begin.restype = None
    library.test_result.restype = i64
    library.test_kill_at.argtypes = (ctypes.c_long,)
    return library


def lines_of(words: Any) -> tuple[int, dict[int, Line]]:
    """Pages in use, and each owner's line, from the raw words of a ledger (layout: kernels/csrc/ledger.c)."""
    pool = words[_POOL_AT]
    used, named, number = pool & 0x3FFFFF, pool >> 22 & 63, pool >> 28 & 0xFFFFFF
    lines = {}
    for slot, identity in enumerate(words[_SLOTS_AT::_SLOT_WORDS]):
        if not identity:
            continue
        at = _SLOTS_AT + slot * _SLOT_WORDS
        account, intent, limit = words[at + 1 : at + 4]
        held, tenant = account & 0x3FFFFF, account >> 46 & 0xFF
        if slot == named and account >> 22 & 0xFFFFFF != number:  # done, but not yet entered in the account
            assert intent >> 22 & 0xFFFFFF == number
            held = intent & 0x3FFFFF
        ours = limit >> 22 & 0xFF == tenant
        lines[identity] = Line(held, limit & 0x3FFFFF if ours else 0, limit >> 30 if ours else 0)
    return used, lines


class World:
    """A ledger and what uses it.  Every method but `check` and `finish` begins or furthers one call."""

    def __init__(self, library: Any, capacity: int) -> None:
        self.library = library
        self.capacity = capacity
        self._image = (ctypes.c_uint64 * (LEDGER_BYTES // 8))()
        self.ledger = ctypes.addressof(self._image)
        assert library.rose_ledger_init(self.ledger, capacity, 1, 0) == 0
        self._identities, self._revisions = count(1), count(1)
        self._places = list(range(PROCESSES_MAX + HELPERS_MAX))
        self.processes: list[Process] = []
        self.helpers: list[Helper] = []

    # ---- who can do what ---------------------------------------------------------------------------

    def living(self) -> list[Process]:
        """Processes that run."""
        return [process for process in self.processes if not process.dead]

    def idle(self) -> list[Process]:
        """Those with an account, and no call under way."""
        return [process for process in self.living() if process.pending is None]

    def dead(self) -> list[Process]:
        """Killed, and still with an account."""
        return [process for process in self.processes if process.dead]

    def busy(self) -> list[Process | Helper]:
        """Callers that can go on."""
        return [*(process for process in self.living() if process.pending is not None), *self.helpers]

    def can_join(self) -> bool:
        return len(self.living()) < PROCESSES_MAX

    def can_help(self) -> bool:
        return len(self.helpers) < HELPERS_MAX

    # ---- calls --------------------------------------------------------------------------------------

    def _begin(self, place: int, op: Op, process: Process, first: int = 0, second: int = 0) -> None:
        self.library.test_begin(place, op, self.ledger, process.slot, process.identity, first, second)

    def join(self, limit: int) -> None:
        process = Process(next(self._identities), self._places.pop(), pending=(Op.JOIN, limit, 0))
        self.processes.append(process)
        self._begin(process.place, Op.JOIN, process, limit)

    def acquire(self, process: Process, pages: int, least: int) -> None:
        process.pending, process.change = (Op.ACQUIRE, pages, least), pages
        self._begin(process.place, Op.ACQUIRE, process, pages, least)

    def release(self, process: Process, pages: int) -> None:
        process.pending, process.change = (Op.RELEASE, pages, 0), pages
        process.held -= pages
        self._begin(process.place, Op.RELEASE, process, pages)

    def leave(self, process: Process) -> None:
        process.pending, process.change = (Op.LEAVE, process.held, 0), process.held
        process.held, process.leaving = 0, True
        self._begin(process.place, Op.LEAVE, process)

    def kill(self, process: Process) -> None:
        process.dead = True
        self._places.append(process.place)
        if process.slot < 0:  # while it joined: has it a slot?
            process.slot = self._slot_of(process)
        self._forget_if_gone(process)

    def reclaim(self, target: Process) -> None:
        target.held, target.change, target.leaving = 0, target.held + target.change, True
        self.helpers.append(Helper(self._places.pop(), Op.LEAVE, target))
        self._begin(self.helpers[-1].place, Op.LEAVE, target)

    def set_limit(self, target: Process, pages: int) -> None:
        helper = Helper(self._places.pop(), Op.SET_LIMIT, target, pages, next(self._revisions))
        self.helpers.append(helper)
        self._begin(helper.place, Op.SET_LIMIT, target, helper.revision, pages)

    def kill_helper(self, helper: Helper) -> None:
        self.helpers.remove(helper)
        self._places.append(helper.place)
        self._forget_if_gone(helper.target)

    def step(self, caller: Process | Helper) -> bool:
        """One access to shared memory; whether that was the last of the call."""
        if not self.library.test_step(caller.place):
            return False
        result = self.library.test_result(caller.place)
        if isinstance(caller, Helper):
            self._helped(caller, result)
        else:
            self._answered(caller, result)
        return True

    # ---- answers --------------------------------------------------------------------------------------

    def _answered(self, process: Process, result: int) -> None:
        assert process.pending is not None
        (op, first, least), process.pending, process.change = process.pending, None, 0
        assert result >= 0, (op, result)
        if op is Op.JOIN:
            process.slot = result
        elif op is Op.ACQUIRE:
            assert result == 0 or least <= result <= first
            process.held += result
        elif op is Op.LEAVE:
            assert result == first
            self.processes.remove(process)
            self._places.append(process.place)

    def _helped(self, helper: Helper, result: int) -> None:
        self.helpers.remove(helper)
        self._places.append(helper.place)
        target = helper.target
        if helper.op is Op.LEAVE:
            assert self._slot_of(target) < 0
            self._forget_if_gone(target)
        elif result in (0, 1) and not target.leaving and target.identity in self.lines():
            line = self.lines()[target.identity]
            assert line.revision >= helper.revision
            assert result == 1 or line.revision > helper.revision or line.held <= helper.pages

    def _slot_of(self, process: Process) -> int:
        words = self._image[_SLOTS_AT::_SLOT_WORDS]
        return words.index(process.identity) if process.identity in words else -1

    def _forget_if_gone(self, process: Process) -> None:
        if process.dead and process in self.processes and self._slot_of(process) < 0:
            self.processes.remove(process)

    # ---- what has to hold ------------------------------------------------------------------------------

    def lines(self) -> dict[int, Line]:
        return lines_of(self._image)[1]

    def looked(self) -> dict[int, Line]:
        """The same as the ledger tells it; helps operations that were cut short to their end."""
        view = _ViewWords()
        self.library.rose_ledger_look(self.ledger, ctypes.addressof(view))
        assert view.used == sum(line.held for line in view.owners)
        return {
            line.identity: Line(line.held, line.limit, line.revision) for line in view.owners if line.identity
        }

    def check(self) -> None:
        """Between any two accesses."""
        used, lines = lines_of(self._image)
        assert 0 <= used <= self.capacity
        assert used == sum(line.held for line in lines.values())
        for process in self.processes:
            line = lines.get(process.identity)
            if line is None:  # not joined yet, or left
                assert process.slot < 0 or process.leaving
            else:
                assert process.held <= line.held <= process.held + process.change

    def finish(self) -> None:
        """Let all calls end, and everybody leave: nothing is in use then."""
        while busy := self.busy():
            self.step(busy[0])
            self.check()
        looked = self.looked()
        assert looked == self.lines()
        for process in self.idle():
            self.leave(process)
        for process in self.dead():
            self.reclaim(process)
            while busy := self.busy():
                self.step(busy[0])
        while busy := self.busy():
            self.step(busy[0])
        used, lines = lines_of(self._image)
        assert not lines
        assert used == 0
