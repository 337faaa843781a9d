"""Client of the embedded relay (`rose relay`).

Buckets come from the relay's own memory where it runs on this host and lets us, else over the network: in
pieces that several connections share, each of which goes on where its connection broke.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from typing import Self
from urllib.parse import urlsplit

from rose.config import RelayConfig
from rose.config_rules import is_loopback
from rose.errors import CorruptDelta
from rose.secret import read_secret
from rose.units import MIB, JobId, WeightVersion
from rose.weights.relay.bulk import Uplink, Uplinks
from rose.weights.relay.control import ControlClient, Retry, decode, version_path
from rose.weights.relay.http import Put, SharedPlacement, UploadEnded
from rose.weights.relay.lanes import Downlane, Epochs, Lanes, Offered, Uplane, Wanted
from rose.weights.relay.ranges import run_all
from rose.weights.relay.shared import SharedReader, host_id
from rose.weights.relay.sockets import AS_THE_SYSTEM_DOES, Sending

_PIECE_BYTES = MIB
"""What is asked for at a time where several connections share the work."""
_ONLY_PIECE_BYTES = 64 * MIB
"""The same where there is one."""
_COPY_THREADS = 2
_COPY_BYTES_MIN = 8 * MIB


class RelayClient(ControlClient):
    """Client of the embedded relay; implements `rose.weights.relay.Relay`.

    `streams` is how many connections its downloads share; on loopback one is fastest.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        timeout_s: float = 60,
        tls_ca: str = "",
        streams: int = 1,
        sending: Sending = AS_THE_SYSTEM_DOES,
        shared_memory: bool = True,
    ) -> None:
        super().__init__(url, token=token, timeout_s=timeout_s, tls_ca=tls_ca)
        tls = self.tls if isinstance(self.tls, ssl.SSLContext) else None
        self._down: Lanes[Wanted] = Lanes(
            lambda: Downlane(self.url, self.headers, tls, sending, self.silence_s), streams
        )
        self._up: Lanes[Offered] = Lanes(
            lambda: Uplane(self.url, self.headers, tls, sending, self.silence_s), streams
        )
        self._piece_bytes = _PIECE_BYTES if streams > 1 else _ONLY_PIECE_BYTES
        self._uplinks = Uplinks(lambda: Uplink(self.url, self.headers, tls, sending, self.silence_s))
        self._try_shared = shared_memory
        self._reader: tuple[str, SharedReader] | None = None

    @classmethod
    def from_config(cls, config: RelayConfig, *, timeout_s: float = 60) -> Self:
        """A client of the configured relay.  Raises ConfigError if the token cannot be read."""
        return cls(
            config.address,
            token=read_secret(config.token_file, "relay.token_file") if config.token_file else "",
            timeout_s=timeout_s,
            tls_ca=config.tls_ca,
            streams=1 if is_loopback(urlsplit(config.address).hostname or "") else config.streams,
            sending=Sending.from_config(config),
            shared_memory=config.shared_memory,
        )

    async def put_bucket(
        self, job: JobId, version: WeightVersion, bucket: str, data: bytes | memoryview, digest: str
    ) -> None:
        """See `Relay.put_bucket`."""
        view = memoryview(data).cast("B")
        version_path(job)  # refuses what is no job id
        put = Put(job, version, bucket, len(view), digest)

        async def attempt() -> None:
            async with self._uplinks.borrowed() as uplink:
                if ticket := await self._uplinks.run(lambda: uplink.open(put)):
                    try:
                        await self._upload(uplink, ticket, view)
                        await self._uplinks.run(lambda: uplink.finish(ticket))
                    except UploadEnded as error:  # a relay that was restarted does not know the ticket
                        raise Retry(error.what) from None

        await self.until_done(attempt, self.timeout_s)

    async def get_into(
        self,
        job: JobId,
        version: WeightVersion,
        bucket: str,
        destination: memoryview,
        *,
        offset: int = 0,
        epoch: str | None = None,
    ) -> None:
        """See `Relay.get_into`."""
        path = version_path(job, version, bucket)
        view = destination.cast("B")
        if not len(view) or await self._read_shared(path, view, offset, epoch):
            return
        epochs = Epochs(epoch)
        await run_all(
            self._download(path, view[first:stop], offset + first, epochs)
            for first, stop in self._pieces(view)
        )

    async def aclose(self) -> None:
        """Close connections."""
        await super().aclose()
        self._down.close()
        self._up.close()
        self._uplinks.close()
        if self._reader is not None:
            self._reader[1].close()
            self._reader = None

    # ---- inside ----

    def _pieces(self, view: memoryview) -> list[tuple[int, int]]:
        return _cuts(len(view), -(-len(view) // self._piece_bytes))

    async def _upload(self, uplink: Uplink, ticket: str, view: memoryview) -> None:
        """Send all bytes of a bucket that `uplink` has opened."""
        pieces = self._pieces(view)
        if len(pieces) == 1:  # not worth another connection
            await self._uplinks.run(lambda: uplink.send_all(ticket, view))
            return

        async def send(first: int, stop: int) -> None:
            async def attempt() -> None:
                await self._up.move(Offered(ticket, view[first:stop], first))

            await self.until_done(attempt, self.timeout_s)

        await run_all(send(first, stop) for first, stop in pieces)

    async def _download(self, path: str, view: memoryview, start: int, epochs: Epochs) -> None:
        received = 0

        async def attempt() -> None:
            nonlocal received
            rest = view[received:]
            received += await self._down.move(Wanted(path, rest, start + received, epochs))
            if received < len(view):
                raise Retry("the download broke off")

        await self.until_done(attempt, self.timeout_s)

    async def _read_shared(self, path: str, view: memoryview, offset: int, epoch: str | None) -> bool:
        """Read from the relay's memory; False where that cannot be done."""
        if not self._try_shared or not self.seen_host or self.seen_host != host_id():
            return False
        found, body = await self.read("GET", f"{path}/placement", epoch=epoch)
        placement = decode(body, SharedPlacement)
        if offset + len(view) > placement.size:
            raise CorruptDelta(f"the bucket has {placement.size} bytes, not those asked for")
        if self._reader is None or self._reader[0] != found:
            self._reader = None  # of an earlier epoch: the last copy that is still at work closes it
            reader = await asyncio.to_thread(SharedReader.open, placement)
            if reader is None:
                self._try_shared = False  # another user's, or in another container
                return False
            self._reader = (found, reader)
        return await _copy(self._reader[1], placement, view, offset)


async def _copy(reader: SharedReader, placement: SharedPlacement, view: memoryview, offset: int) -> bool:
    """Copy in a few threads; one does not use all of a machine's memory bandwidth."""
    done = await asyncio.gather(
        *(
            asyncio.to_thread(reader.read_into, placement, view[first:stop], offset + first)
            for first, stop in _cuts(len(view), max(1, min(_COPY_THREADS, len(view) // _COPY_BYTES_MIN)))
        )
    )
    return all(done)


def _cuts(length: int, parts: int) -> list[tuple[int, int]]:
    """So many parts of about the same length."""
    ends = [length * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(ends))
