"""What a check found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec


class Status(StrEnum):
    """How bad it is."""

    OK = "ok"
    ABSENT = "absent"
    """Not there, and not needed with this configuration."""
    WARNING = "warning"
    """ROSE runs, but slower, or without something."""
    ERROR = "error"
    """ROSE does not run as configured."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the report."""

    name: str
    status: Status
    detail: str
    advice: str = ""


class Roots(NamedTuple):
    """Where the kernel shows itself."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")

    def text(self, root: str, path: str) -> str | None:
        """A file below `proc`, `sys` or `dev`, stripped; None if it cannot be read."""
        base: Path = getattr(self, root)
        try:
            return (base / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None


HOST = Roots()
Findings = Iterator[Finding]


def ok(name: str, detail: str) -> Finding:
    """Nothing to do."""
    return Finding(name, Status.OK, detail)


def missing(name: str, detail: str, advice: str, *, needed: bool) -> Finding:
    """Something is not there."""
    return Finding(name, Status.ERROR if needed else Status.ABSENT, detail, advice if needed else "")


def warning(name: str, detail: str, advice: str) -> Finding:
    """It works, but not as well as it could."""
    return Finding(name, Status.WARNING, detail, advice)


def error(name: str, detail: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(name, Status.ERROR, detail, advice)
