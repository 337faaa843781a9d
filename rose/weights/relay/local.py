"""Client of the embedded relay (`rose relay`): buckets travel over HTTP.

A download goes on where its connection broke.
"""

from __future__ import annotations

from typing import Self

import aiohttp

from rose.config import RelayConfig
from rose.errors import CorruptDelta
from rose.secret import read_secret
from rose.units import JobId, WeightVersion
from rose.weights.relay.control import ControlClient, Retry, chunks, version_path
from rose.weights.relay.http import DIGEST_HEADER, EPOCH_HEADER


class RelayClient(ControlClient):
    """Client of the embedded relay; implements `rose.weights.relay.Relay`."""

    @classmethod
    def from_config(cls, config: RelayConfig, *, timeout_s: float = 60) -> Self:
        """A client of the configured relay.  Raises ConfigError if the token cannot be read."""
        token = read_secret(config.token_file, "relay.token_file") if config.token_file else ""
        return cls(config.url, token=token, timeout_s=timeout_s, tls_ca=config.tls_ca)

    async def put_bucket(
        self, job: JobId, version: WeightVersion, bucket: str, data: bytes | memoryview, digest: str
    ) -> None:
        """See `Relay.put_bucket`."""
        view = memoryview(data).cast("B")
        path = version_path(job, version, bucket)

        async def attempt() -> None:
            headers = {DIGEST_HEADER: digest, "Content-Length": str(len(view))}
            async with self.request("PUT", path, headers=headers, data=chunks(view)):
                return

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
        download = _Download(view, offset, epoch)

        async def attempt() -> None:
            headers = {"Range": download.range_header}
            async with self.request("GET", path, headers=headers, epoch=download.epoch) as response:
                await download.receive(response)

        if len(view):
            await self.until_done(attempt, self.timeout_s)


class _Download:
    """Progress of one `get_into`, kept over broken connections."""

    def __init__(self, destination: memoryview, offset: int, epoch: str | None) -> None:
        self._destination = destination
        self._offset = offset
        self.epoch = epoch
        self._received = 0

    @property
    def range_header(self) -> str:
        return f"bytes={self._offset + self._received}-{self._offset + len(self._destination) - 1}"

    async def receive(self, response: aiohttp.ClientResponse) -> None:
        self.epoch = response.headers.get(EPOCH_HEADER, "")
        rest = len(self._destination) - self._received
        if response.status != 206 or response.content_length != rest:
            raise CorruptDelta(f"the relay answered {response.content_length} bytes where {rest} were asked")
        # As they came from the socket; `iter_any` would join, that is copy, what has piled up.
        async for chunk, _ in response.content.iter_chunks():
            end = self._received + len(chunk)
            self._destination[self._received : end] = chunk
            self._received = end
        if self._received != len(self._destination):
            raise Retry("the download broke off")
