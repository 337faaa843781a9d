"""What `rose install` puts where, and the record of what it found there.

The record lies apart from the state of the daemons, in a directory that only root writes: who can write it
decides what `rose uninstall` restores, as root.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from rose.cli.manual import Shell, manual, pages, script
from rose.cli.template import render
from rose.errors import ConfigError

SCHEMA = 1
RECORD = PurePosixPath("/var/lib/rose-install/record.json")
CONFIG = PurePosixPath("/etc/rose/rose.toml")
UNITS = {"rosed": "rosed.service", "scheduler": "rose-scheduler.service", "relay": "rose-relay.service"}
"""Daemon -> its unit."""
SOCKET = "rosed.socket"
"""Unit of rosed's control socket, for who wants systemd to hold it."""
UNIT_DIRECTORY = PurePosixPath("/etc/systemd/system")
SYSUSERS = PurePosixPath("/etc/sysusers.d/rose.conf")
TMPFILES = PurePosixPath("/etc/tmpfiles.d/rose.conf")
MANUAL = PurePosixPath("/usr/local/share/man/man1/rose.1")
COMPLETION = PurePosixPath("/etc/bash_completion.d/rose")


class Target(NamedTuple):
    """A file to be there."""

    path: PurePosixPath
    content: bytes
    mode: int = 0o644
    keep: bool = False
    """What is there already is the operator's: it stays."""


class FoundFile(msgspec.Struct, frozen=True):
    """A file as it was."""

    content: str
    """Base64."""
    mode: int
    uid: int
    gid: int

    @property
    def data(self) -> bytes:
        """Its bytes."""
        return base64.b64decode(self.content)


class FileRecord(msgspec.Struct, frozen=True):
    """A file that install wrote."""

    path: str
    written: str
    """sha256 of what install wrote."""
    found: FoundFile | None
    """What was there before; None: nothing."""


class UnitRecord(msgspec.Struct, frozen=True):
    """A unit as it was."""

    unit: str
    enabled: str
    """The answer of `systemctl is-enabled`; empty: not asked."""
    active: bool


class MpsRecord(msgspec.Struct, frozen=True):
    """The control daemon that ROSE keeps for the GPU, as it was."""

    ran: bool


class Record(msgspec.Struct, frozen=True):
    """What install found and changed."""

    schema: int = SCHEMA
    release: str = ""
    files: tuple[FileRecord, ...] = ()
    directories: tuple[str, ...] = ()
    """Those it made, in that order."""
    units: tuple[UnitRecord, ...] = ()
    mps: MpsRecord | None = None

    def file(self, path: PurePosixPath) -> FileRecord | None:
        """What is recorded of a file."""
        return next((each for each in self.files if each.path == str(path)), None)


def targets(
    daemons: tuple[str, ...],
    binaries: Path,
    config: PurePosixPath = CONFIG,
    control_socket: Path | None = None,
) -> list[Target]:
    """Every file of these daemons.

    `binaries` is where `rose` and `rosed` are, `control_socket` what systemd is to listen on for rosed.
    """
    source = files(__package__) / "files"

    def text(name: str) -> bytes:
        raw = (source / name).read_text(encoding="utf-8")
        words = {"@BIN@": binaries, "@CONFIG@": config, "@SOCKET@": control_socket}
        for word, value in words.items():
            raw = raw.replace(word, str(value))
        return raw.encode()

    found = pages()
    names = [*([SOCKET] if control_socket else []), *(UNITS[daemon] for daemon in daemons)]
    units = [Target(UNIT_DIRECTORY / name, text(name)) for name in names]
    return [
        Target(SYSUSERS, text("sysusers.conf")),
        Target(TMPFILES, text("tmpfiles.conf")),
        Target(config, render().encode(), keep=True),
        Target(PurePosixPath("/etc/rose/rose.env"), text("rose.env"), mode=0o640, keep=True),
        Target(MANUAL, manual(found).encode()),
        Target(COMPLETION, script(Shell.bash, found).encode()),
        *units,
    ]


def digest(data: bytes) -> str:
    """The sha256 by which a file that was changed since is told."""
    return hashlib.sha256(data).hexdigest()


def read_record(path: Path) -> Record:
    """The record of an earlier install; an empty one if there is none.  Raises ConfigError."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return Record()
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", "without it nothing can be restored") from None
    if record.schema != SCHEMA:
        raise ConfigError(f"{path}: schema {record.schema} is not supported", f"this release reads {SCHEMA}")
    return record
