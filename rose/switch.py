"""The operator's switch of a host's lending: a file in rosed's state directory, which outlives rosed.

rosed writes it when it is ordered to, and reads it when it starts.  `rose lend` writes it itself while no
rosed runs.  A switch that cannot be read counts as off.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from rose.weights import files

NAME = "lending.json"


class Switch(msgspec.Struct, frozen=True):
    """The file."""

    off: bool
    at_s: float
    """Unix time at which it was set."""


def put(state_dir: Path, *, off: bool) -> Path:
    """Set the switch, durably; answers its file.  Raises OSError."""
    path = state_dir / NAME
    files.replace_durably(path, msgspec.json.encode(Switch(off, time.time())))
    files.give_to_owner(path)
    return path


def is_off(state_dir: Path) -> bool:
    """Whether the operator switched lending off.

    Raises OSError or msgspec.DecodeError for one that cannot be read; one that is not there is on.
    """
    try:
        return msgspec.json.decode((state_dir / NAME).read_bytes(), type=Switch).off
    except FileNotFoundError:
        return False
