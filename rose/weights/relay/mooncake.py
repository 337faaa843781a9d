"""Client of a relay whose buckets lie in a Mooncake Store.

Manifests, listing and polls go to `rose relay` as with the embedded one (Mooncake has no list or watch call),
and it knows the place of every bucket.  The bytes go between this process and the store.  A writer claims a
key, puts the object, and confirms; the relay looks for itself that it is there.  Nobody else removes objects.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

import msgspec

from rose.config import RelayConfig
from rose.errors import CorruptDelta
from rose.secret import read_secret
from rose.units import JobId, WeightVersion
from rose.weights.digests import digest as digest_of
from rose.weights.relay import RelayFull, VersionGone
from rose.weights.relay.control import ControlClient, Retry, decode, version_path
from rose.weights.relay.http import Claim, Claimed, Placement
from rose.weights.relay.mooncake_store import MooncakeStore, ObjectLost, StoreTrouble


class MooncakeRelay(ControlClient):
    """Client of a relay of kind mooncake; implements `rose.weights.relay.Relay`.

    Connects to the store at the first call that moves bytes.
    """

    def __init__(
        self, url: str, config: RelayConfig, *, token: str = "", timeout_s: float = 60, tls_ca: str = ""
    ) -> None:
        super().__init__(url, token=token, timeout_s=timeout_s, tls_ca=tls_ca)
        self._config = config
        self._store: MooncakeStore | None = None
        self._connecting = asyncio.Lock()

    @classmethod
    def from_config(cls, config: RelayConfig, *, timeout_s: float = 60) -> Self:
        """A client of the configured relay.  Raises ConfigError if the token cannot be read."""
        token = read_secret(config.token_file, "relay.token_file") if config.token_file else ""
        return cls(config.address, config, token=token, timeout_s=timeout_s, tls_ca=config.tls_ca)

    async def put_bucket(
        self, job: JobId, version: WeightVersion, bucket: str, data: bytes | memoryview, digest: str
    ) -> None:
        """See `Relay.put_bucket`.  The digest is checked before the bytes leave, and by every receiver."""
        view = memoryview(data).cast("B")
        path = f"{version_path(job, version, bucket)}/placement"
        if await asyncio.to_thread(digest_of, view) != digest:
            raise CorruptDelta(f"{bucket}: its bytes are not those of its digest")
        claim = msgspec.json.encode(Claim(len(view), digest))

        async def attempt() -> None:
            _, answer = await self.read_once("POST", path, body=claim)
            placement = decode(answer, Claimed).placement
            if placement is not None:
                await self._place(path, placement, view)

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
        view = destination.cast("B")
        path = f"{version_path(job, version, bucket)}/placement"
        pinned, doubt = epoch, ""

        async def attempt() -> None:
            nonlocal pinned, doubt
            pinned, answer = await self.read_once("GET", path + doubt, epoch=pinned)
            placement = decode(answer, Placement)
            if offset + len(view) > placement.size:
                raise CorruptDelta(f"{bucket} has {placement.size} bytes, not those asked for")
            store = await self._connected()
            try:
                await asyncio.to_thread(store.read_into, placement.key, view, offset)
            except (ObjectLost, StoreTrouble) as error:
                doubt = "?check=1"  # has the relay look whether the object is still there
                raise Retry(str(error)) from None

        if len(view):
            await self.until_done(attempt, self.timeout_s)

    async def aclose(self) -> None:
        """Close connections."""
        await super().aclose()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)
            self._store = None

    # ---- inside ----

    async def _place(self, path: str, placement: Placement, view: memoryview) -> None:
        """Put the bytes of a claimed key, and confirm."""
        confirmation = msgspec.json.encode(placement)
        try:
            store = await self._connected()
            await asyncio.to_thread(store.put, placement.key, view)
        except (ObjectLost, StoreTrouble, RelayFull) as error:
            with contextlib.suppress(Retry, VersionGone):
                await self.read_once("DELETE", path, body=confirmation)
            if isinstance(error, RelayFull):
                raise
            raise Retry(str(error)) from None
        try:
            await self.read_once("PUT", path, body=confirmation)
        except VersionGone as error:  # the relay or the store was restarted, or lost it: from the start
            raise Retry(str(error)) from None

    async def _connected(self) -> MooncakeStore:
        async with self._connecting:
            if self._store is None:
                try:
                    self._store = await asyncio.to_thread(MooncakeStore.connect, self._config)
                except StoreTrouble as error:
                    raise Retry(str(error)) from None
            return self._store
