"""Reading buckets of an embedded relay on this host straight from its memory.

Works for processes of the relay's user that see it in /proc; everybody else is served over HTTP.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
from pathlib import Path

import numpy as np

from rose.weights.relay.http import SharedPlacement

HEADER_BYTES = 4096
"""Before each bucket in the arena; begins with the bucket's tag."""
TAG_BYTES = 16
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, len, pid


def host_id() -> str:
    """What two processes have in common that run under one kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def lock_range(file: int, kind: int, offset: int, length: int) -> bool:
    """Set or drop (F_UNLCK) a lock on part of a file; False if somebody else's is in the way.

    The lock belongs to the open file: it ends when the last descriptor of it is closed.
    """
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, offset, length, 0))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


class SharedReader:
    """One relay's arena, opened for reading.  Calls block, and release the GIL while they copy."""

    def __init__(self, file: int, mapping: mmap.mmap) -> None:
        self._file = file
        self._bytes = np.frombuffer(mapping, np.uint8)

    @classmethod
    def open(cls, placement: SharedPlacement) -> SharedReader | None:
        """Open the arena that a placement names; None if this process cannot."""
        try:
            # O_NONBLOCK: whatever lies there by now, opening it does not wait.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
            file = os.open(f"/proc/{placement.pid}/fd/{placement.fd}", flags)
        except OSError:
            return None
        try:
            found = os.fstat(file)
            if stat.S_ISREG(found.st_mode) and found.st_size >= placement.offset + HEADER_BYTES:
                return cls(file, mmap.mmap(file, 0, prot=mmap.PROT_READ))
        except OSError:
            pass
        os.close(file)
        return None

    def read_into(self, placement: SharedPlacement, destination: memoryview, offset: int) -> bool:
        """Fill `destination` from a bucket's bytes from `offset`; False if the bucket is no longer there."""
        start, span = placement.offset, HEADER_BYTES + placement.size
        if start < 0 or start + span > len(self._bytes):
            return False
        # A descriptor of our own for each read: locks of one open file do not count one another.
        file = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not lock_range(file, fcntl.F_RDLCK, start, span):
                return False
            if self._bytes[start : start + TAG_BYTES].tobytes().hex() != placement.tag:
                return False
            first = start + HEADER_BYTES + offset
            source = self._bytes[first : first + len(destination)]
            np.copyto(np.frombuffer(destination, np.uint8), source)
            return True
        finally:
            os.close(file)

    def close(self) -> None:
        """Let go of it; it is unmapped with the last copy that is at work."""
        os.close(self._file)
