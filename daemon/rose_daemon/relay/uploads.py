"""Buckets on their way into the embedded relay, in parts that may come over several connections."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

import xxhash

from rose.errors import CorruptDelta
from rose.weights.relay.http import BadRequest, UploadEnded
from rose_daemon.relay.pools import MemoryBlock
from rose_daemon.relay.vault import Reservation, Vault


class Upload:
    """One bucket.  Its memory stays reserved while any part is being written to it."""

    def __init__(self, reservation: Reservation[MemoryBlock]) -> None:
        self.reservation = reservation
        self.writers: dict[object, Callable[[], None]] = {}
        """Who is writing a part, and how to break that off."""
        self._data = reservation.block.data
        self._hasher = xxhash.xxh3_128()
        self._hashed = 0

    def part(self, start: int, size: int) -> memoryview:
        """The memory for a part.  Raises BadRequest."""
        if start < 0 or size < 1 or start + size > len(self._data):
            raise BadRequest(f"{self.reservation.bucket} has no {size} bytes from {start}")
        return self._data[start : start + size]

    def arrived(self, start: int, stop: int) -> None:
        """Bytes have come: hash them while they are in the cache, if they follow what was hashed."""
        if start == self._hashed:
            self._hasher.update(self._data[start:stop])
            self._hashed = stop

    def digest(self) -> str:
        """Of the whole bucket.  Takes milliseconds where parts came out of order."""
        self._hasher.update(self._data[self._hashed :])
        self._hashed = len(self._data)
        return str(self._hasher.hexdigest())


class Uploads:
    """Buckets on their way, by the ticket that their writer was given."""

    def __init__(self, vault: Vault[MemoryBlock]) -> None:
        self._vault = vault
        self._open: dict[str, Upload] = {}

    def open(self, reservation: Reservation[MemoryBlock]) -> str:
        """Take in a bucket; answers its ticket.  Ends with `finish` or `give_up`."""
        ticket = secrets.token_hex(8)
        self._open[ticket] = Upload(reservation)
        return ticket

    def find(self, ticket: str) -> Upload:
        """The bucket of a ticket.  Raises UploadEnded."""
        if (upload := self._open.get(ticket)) is None:
            raise UploadEnded("this upload has ended")
        return upload

    async def finish(self, ticket: str) -> None:
        """Keep a bucket of which all parts are here.

        Raises UploadEnded, VersionGone if it was aborted meanwhile, CorruptDelta if it is not what was
        promised, VersionConflict, BadRequest.
        """
        upload = self.find(ticket)
        if upload.writers:
            self.give_up(ticket)
            raise BadRequest("a part is still on its way")
        del self._open[ticket]
        reservation = upload.reservation
        if await asyncio.to_thread(upload.digest) != reservation.digest:
            self._vault.cancel(reservation, time.monotonic())
            raise CorruptDelta(f"{reservation.bucket}: other bytes arrived than its digest says")
        self._vault.store(reservation, time.monotonic())

    def give_up(self, ticket: str) -> None:
        """Give a bucket's room back, as soon as nobody writes to it any more."""
        if (upload := self._open.pop(ticket, None)) is None:
            return
        if not upload.writers:
            self._vault.cancel(upload.reservation, time.monotonic())
        for break_off in list(upload.writers.values()):
            break_off()

    def left(self, upload: Upload, writer: object) -> None:
        """A part has come whole, or its connection broke."""
        del upload.writers[writer]
        if not upload.writers and upload not in self._open.values():
            self._vault.cancel(upload.reservation, time.monotonic())
