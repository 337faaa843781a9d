"""The directory a run works in: made afresh, and what is large in it removed afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rose.errors import ConfigError

_LARGE = ("models", "state", "checkpoints")


@contextlib.contextmanager
def working_in(directory: Path, *, keep: bool) -> Iterator[None]:
    """Have the directory for this process alone; without `keep`, what is large goes when the run succeeds.

    Raises ConfigError when another run has it, or when it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unusable(directory, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(
            f"{directory}: another run uses it", "wait for it, or name another with --out"
        ) from None
    try:
        clean(directory)
        shutil.rmtree(directory / "logs", ignore_errors=True)
        yield
        if not keep:
            clean(directory)
    finally:
        os.close(descriptor)


def unusable(directory: Path, error: OSError) -> ConfigError:
    """What to tell a user whose directory cannot be written."""
    return ConfigError(f"{directory} cannot be written: {error.strerror}", "name another with --out")


def clean(directory: Path) -> None:
    """Remove what is large and can be made again; logs, configuration and report stay."""
    for name in _LARGE:
        shutil.rmtree(directory / name, ignore_errors=True)
