"""The checkpoints that the demo and the benchmarks run on, made when they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rose_daemon.harness.directory import unusable

if TYPE_CHECKING:
    from rose_daemon.demo.models import DemoModels


def make_model_files(directory: Path) -> DemoModels:
    """Make the two models below `directory`.  Raises ConfigError when they cannot be written."""
    # torch takes seconds to import: not before the user's input was checked.
    from rose_daemon.demo.models import make_models  # noqa: PLC0415

    try:
        return make_models(directory / "models")
    except OSError as error:
        raise unusable(directory, error) from None
