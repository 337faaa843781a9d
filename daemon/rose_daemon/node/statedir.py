"""The layout of `node.state_dir`: which release wrote it, and how an older one becomes this one's.

`layout.json` says which.  A directory without it is new, or of a release before layouts had a number, which
is layout 1.  Each migration leads from one layout to the next and can be run again after it was cut short.
The scheduler's store keeps its own number, in its database.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import structlog

from rose.errors import ConfigError, RoseError
from rose.weights import files

LAYOUT = 1
NAME = "layout.json"

Migration = Callable[[Path], None]
MIGRATIONS: Mapping[int, Migration] = {}
"""Layout -> what makes the next one of it.  There has been one layout so far."""

log = structlog.get_logger("rosed")


class _Layout(msgspec.Struct, frozen=True):
    layout: int


def claim(directory: Path, layout: int = LAYOUT, migrations: Mapping[int, Migration] = MIGRATIONS) -> int:
    """Bring the directory to `layout`; answers which one it had.  Raises ConfigError, RoseError.

    A directory of a later release is refused: what it holds could be lost.
    """
    found = _found(directory / NAME)
    if found > layout:
        raise ConfigError(
            f"node.state_dir: {directory} has layout {found}, written by a later release",
            f"this one reads {layout}: install that release, or set another node.state_dir",
        )
    try:
        for step in range(found, layout):
            log.info("state is brought to the next layout", code="state_migrated", layout=step + 1)
            migrations[step](directory)
            _write(directory / NAME, step + 1)
        if not (directory / NAME).exists():
            _write(directory / NAME, layout)
    except OSError as error:
        raise RoseError(
            f"node.state_dir: {directory} cannot be brought to layout {layout}: {error.strerror}",
            "it is as it was; check its disk, owner and mode",
        ) from None
    return found


def _found(path: Path) -> int:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Layout).layout
    except FileNotFoundError:
        return 1
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"node.state_dir: {path} cannot be read: {error}", "move it away if it is broken"
        ) from None


def _write(path: Path, layout: int) -> None:
    files.replace_durably(path, msgspec.json.encode(_Layout(layout)) + b"\n")
