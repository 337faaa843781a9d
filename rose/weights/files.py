"""Files of the weight path: read without trust, written so that they outlive a crash."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rose.errors import CorruptDelta


def read_file(path: Path, bytes_max: int) -> npt.NDArray[np.uint8]:
    """A regular file of at most `bytes_max` bytes; never follows a link or waits on a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CorruptDelta(f"{path}: cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > bytes_max:
            raise CorruptDelta(f"{path}: not a regular file of at most {bytes_max} bytes")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return np.frombuffer(file.read(status.st_size), dtype=np.uint8)
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes | bytearray | memoryview, *, durable: bool) -> None:
    """Write a file, and wait until it is on stable storage if asked to."""
    if durable:
        write_durably(path, data)
    else:
        path.write_bytes(data)


def write_durably(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Write a file and wait until it is on stable storage."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Put a file in place whole, durably: whoever looks, even after a crash, finds the old or the new."""
    draft = path.with_name(f".{path.name}.partial")
    write_durably(draft, data)
    draft.replace(path)
    sync_directory(path.parent)


def give_to_owner(path: Path) -> None:
    """Have a file that root made belong to its directory's owner, for a daemon with a user of its own."""
    owner = path.parent.stat()
    if os.geteuid() == 0 != owner.st_uid:
        os.chown(path, owner.st_uid, owner.st_gid)


def sync_directory(directory: Path) -> None:
    """Make renames and new names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
