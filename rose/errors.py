"""Errors a user can act on, and the exit codes of the command line."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `rose` and `rosed`; stable."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_READY = 3
    NOT_FOUND = 4
    SLO_BREACH = 5
    VERSION_CONFLICT = 6
    TIMEOUT = 7


class RoseError(Exception):
    """Something went wrong that a person can act on.

    `what` says what is wrong in one line, `hint` what to do about it.  The command line prints
    both and exits with `code`; nothing prints a traceback for a `RoseError`.
    """

    code: Exit = Exit.ERROR

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what} ({self.hint})" if self.hint else self.what


class ConfigError(RoseError):
    """A setting, a `rose.toml` or an environment variable is not usable."""

    code = Exit.USAGE


class NotReady(RoseError):
    """The thing asked is there but cannot answer yet, or no longer."""

    code = Exit.NOT_READY


class NotFound(RoseError):
    """The named node, replica, job, turn or version does not exist."""

    code = Exit.NOT_FOUND


class EngineFailed(RoseError):
    """An engine process died, or never became ready."""


class TimedOut(RoseError):
    """A phase outlived its deadline."""

    code = Exit.TIMEOUT


class VersionConflict(RoseError):
    """The version exists with other content, or cannot follow the version held."""

    code = Exit.VERSION_CONFLICT


class CorruptDelta(RoseError):
    """A weight file is truncated, malformed, or does not carry the bytes its digests promise."""


class WrongBase(VersionConflict):
    """A delta was built on another version than the receiver holds; nothing was written."""
