"""The KV memory that engines of this host share, as rosed sees it: the page ledger."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rose.core.events import MemoryObserved
from rose.core.readings import Unknown
from rose.units import NS_PER_S

if TYPE_CHECKING:
    from rose_kernels.arena.ledger import Ledger

_RECLAIM_NS = NS_PER_S
"""How often the accounts of processes that ended are looked for."""


class SharedMemory:
    """Reads the ledger, and takes back what dead engines held in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ledger: Ledger | None = None
        self._reclaimed_ns: int | None = None

    def observe(self, now_ns: int) -> MemoryObserved:
        """What serving holds, what is free, and what there is; unknown while there is no ledger."""
        ledger = self._open()
        if isinstance(ledger, Unknown):
            return MemoryObserved(ledger, ledger, ledger)
        from rose_kernels.arena.ledger import Role  # noqa: PLC0415 (see _open)

        if self._reclaimed_ns is None or now_ns - self._reclaimed_ns >= _RECLAIM_NS:
            self._reclaimed_ns = now_ns
            ledger.reclaim()
        view = ledger.view()
        serving = sum(each.held_pages for each in view.owners if each.role is Role.SERVING)
        free = view.capacity_pages - view.used_pages
        page = ledger.page_bytes
        return MemoryObserved(serving * page, free * page, view.capacity_pages * page)

    def _open(self) -> Ledger | Unknown:
        """The ledger, which the first engine that shares makes."""
        if self._ledger is not None and self._path.exists():
            return self._ledger
        try:
            from rose_kernels.arena.ledger import Ledger, LedgerError  # noqa: PLC0415 (needs the C library)
        except ImportError:
            return Unknown("ledger_not_built")
        try:
            self._ledger = Ledger(self._path)
        except FileNotFoundError:
            return Unknown("ledger_missing")
        except (OSError, LedgerError):
            return Unknown("ledger_unreadable")
        return self._ledger
