"""The directory a run works in: made afresh, and what is large in it removed afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rose.errors import ConfigError

_LARGE = ("models", "state", "checkpoints")


class ModelPaths(NamedTuple):
    """Checkpoint directories."""

    serving: Path
    rollout: Path


@contextlib.contextmanager
def working_in(directory: Path, *, keep: bool) -> Iterator[None]:
    """Have the directory for this process alone; without `keep`, what is large goes when the run succeeds.

    Raises ConfigError when another run has it, or when it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(directory, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(
            f"{directory}: another run uses it", "wait for it, or name another with --out"
        ) from None
    try:
        clean(directory)
        yield
        if not keep:
            clean(directory)
    finally:
        os.close(descriptor)


def make_model_files(directory: Path) -> ModelPaths:
    """Make the two models.  Raises ConfigError when they cannot be written."""
    # torch takes seconds to import: not before the user's input was checked.
    from rose_daemon.demo.models import make_models  # noqa: PLC0415

    try:
        shutil.rmtree(directory / "logs", ignore_errors=True)
        made = make_models(directory / "models")
    except OSError as error:
        raise _unusable(directory, error) from None
    return ModelPaths(made.serving.resolve(), made.rollout.resolve())


def _unusable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{directory} cannot be written: {error.strerror}", "name another with --out")


def clean(directory: Path) -> None:
    """Remove what is large and can be made again; logs, configuration and report stay."""
    for name in _LARGE:
        shutil.rmtree(directory / name, ignore_errors=True)
