"""A relay whose buckets lie in a Mooncake Store: this process keeps manifests, and where each bucket lies.

It lends the store memory, gives out keys that are never used twice, and is the only one to remove objects.
When objects are gone that it did not remove (the master was restarted, or a process that lent memory died),
it begins a new epoch with nothing in it, like an embedded relay that was restarted; trainers publish again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from aiohttp import web

from rose.config import RelayConfig
from rose.weights.relay import RelayFull, VersionGone
from rose.weights.relay.http import BULK_PATH, BadRequest, Claim, Claimed, Placement
from rose.weights.relay.mooncake_store import MooncakeStore, ObjectLost, StoreTrouble
from rose_daemon.relay import requests
from rose_daemon.relay.handlers import VERSION_ROOT, RelayHandlers
from rose_daemon.relay.requests import TRANSFER_MAX_S, answer
from rose_daemon.relay.vault import Key, Reservation, Vault
from rose_daemon.service.tokens import Keyring

_WATCH_PERIOD_S = 1.0
_CHECK_MAX = 4096
"""Keys asked for at once."""
_log = logging.getLogger("rose.relay")


@dataclass(eq=False)
class StoredObject:
    """The place of one bucket in the store."""

    key: str
    size: int
    asked_for_s: float = field(default=float("-inf"))
    """When a reader last asked where it lies, in monotonic time."""


class MooncakePool:
    """Names objects, and removes them when no reader can have them under a lease."""

    def __init__(self, store: MooncakeStore, config: RelayConfig, epoch: str) -> None:
        self.store = store
        self.epoch = epoch
        self.namespace = config.mooncake_namespace
        self._lease_s = config.mooncake_lease_s
        self._attempts = itertools.count()

    def allocate(self, key: Key, bucket: str, size: int) -> StoredObject:
        """A key that was never used: job, epoch, version, attempt, bucket."""
        job, version = key
        name = f"{self.namespace}/{job}/{self.epoch}/{version}/{next(self._attempts)}/{bucket}"
        return StoredObject(name, size)

    async def release(self, block: StoredObject) -> bool:
        """See `Pool.release`.

        Our own checks lease objects too, so the lease of one that no reader asked for of late is disregarded.
        """
        read_of_late = time.monotonic() - block.asked_for_s < self._lease_s
        try:
            return await asyncio.to_thread(self.store.remove, block.key, force=not read_of_late)
        except StoreTrouble:
            return False

    async def lost(self, blocks: list[StoredObject]) -> bool:
        """Whether any of these, or the mark of this epoch, is gone.  Raises StoreTrouble."""
        keys = [self._mark_of(self.epoch), *(block.key for block in blocks)]
        for start in range(0, len(keys), _CHECK_MAX):
            if await asyncio.to_thread(self.store.missing, keys[start : start + _CHECK_MAX]):
                return True
        return False

    async def begin(self, epoch: str) -> None:
        """Remove what former epochs left, mark the new one.  Raises RelayFull, StoreTrouble, ObjectLost."""
        await asyncio.to_thread(self.store.remove_all, f"{self.namespace}/")
        await asyncio.to_thread(self.store.put, self._mark_of(epoch), memoryview(epoch.encode()))
        self.epoch = epoch

    async def end(self) -> None:
        """Remove everything: without this relay nobody finds it, and nobody else would remove it."""
        with contextlib.suppress(StoreTrouble):
            await asyncio.to_thread(self.store.remove_all, f"{self.namespace}/")

    def _mark_of(self, epoch: str) -> str:
        return f"{self.namespace}/{epoch}"


class MooncakeHandlers(RelayHandlers[StoredObject]):
    """Places of buckets instead of buckets."""

    pool: MooncakePool

    def __init__(self, vault: Vault[StoredObject], pool: MooncakePool, tokens: Keyring) -> None:
        super().__init__(vault, pool, tokens)
        self._claims: dict[str, tuple[Reservation[StoredObject], float]] = {}
        self._renewing = asyncio.Lock()

    async def begin(self) -> None:
        """Make the store ready for this epoch."""
        await self.pool.begin(self.vault.epoch)

    def app(self) -> web.Application:
        """The application to serve."""
        app = super().app()
        app.cleanup_ctx.append(self._watching)
        return app

    def bucket_routes(self) -> list[web.RouteDef]:
        """See `RelayHandlers.bucket_routes`."""
        bucket = f"{VERSION_ROOT}/buckets/{{bucket}}"
        return [
            web.post(f"{bucket}/placement", self._claim),
            web.put(f"{bucket}/placement", self._confirm),
            web.delete(f"{bucket}/placement", self._give_up),
            web.get(f"{bucket}/placement", self._find, allow_head=False),
            web.get(BULK_PATH, self._refuse_bytes, allow_head=False),
            web.put(bucket, self._refuse_bytes),
            web.get(bucket, self._refuse_bytes, allow_head=False),
        ]

    async def tidy(self) -> None:
        """And give up claims that were never confirmed: their writers are gone."""
        now_s = time.monotonic()
        for key, (reservation, claimed_s) in list(self._claims.items()):
            if now_s - claimed_s > TRANSFER_MAX_S:
                del self._claims[key]
                self.vault.cancel(reservation, now_s)
        await super().tidy()

    # ---- handlers ----

    async def _claim(self, request: web.Request) -> web.Response:
        claim = await requests.body(request, Claim)
        size, digest = requests.content(claim.size, claim.digest)
        key, bucket = requests.key(request), requests.bucket(request)
        await self.tidy()
        reservation = self.vault.reserve(key, bucket, size, digest, time.monotonic())
        if reservation is None:
            return answer(Claimed(None))
        block = reservation.block
        self._claims[block.key] = (reservation, time.monotonic())
        return answer(Claimed(Placement(block.key, block.size)), status=201)

    async def _confirm(self, request: web.Request) -> web.Response:
        reservation = await self._claimed(request)
        block = reservation.block
        try:
            size = await asyncio.to_thread(self.pool.store.size, block.key)
        except StoreTrouble:
            size = None
        if size != block.size:
            self.vault.cancel(reservation, time.monotonic())
            raise VersionGone(f"{block.key}: the store has {size or 0} bytes of {block.size}")
        self.vault.store(reservation, time.monotonic())
        return web.Response(status=201)

    async def _give_up(self, request: web.Request) -> web.Response:
        self.vault.cancel(await self._claimed(request), time.monotonic())
        await self.tidy()
        return answer(True)

    async def _find(self, request: web.Request) -> web.Response:
        key, bucket = requests.key(request), requests.bucket(request)
        block = self.vault.block(key, bucket)
        if "check" in request.query:
            with contextlib.suppress(StoreTrouble):
                if await self.pool.lost([block]):
                    await self._begin_anew()
            block = self.vault.block(key, bucket)
        block.asked_for_s = time.monotonic()
        return answer(Placement(block.key, block.size))

    async def _refuse_bytes(self, _request: web.Request) -> web.Response:
        raise BadRequest('this relay keeps its buckets in a Mooncake store: set relay.kind = "mooncake"')

    async def _claimed(self, request: web.Request) -> Reservation[StoredObject]:
        """The claim that the body names, which ends here.  Raises VersionGone."""
        placement = await requests.body(request, Placement)
        found = self._claims.get(placement.key)
        if found is None or (found[0].key, found[0].bucket) != (
            requests.key(request),
            requests.bucket(request),
        ):
            raise VersionGone(f"{placement.key} was not claimed, or is settled")
        del self._claims[placement.key]
        return found[0]

    # ---- watching the store ----

    async def _watching(self, _app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_PERIOD_S)
            with contextlib.suppress(StoreTrouble):  # the master is away: what is lost will be seen after
                if await self.pool.lost(self.vault.committed_blocks()):
                    await self._begin_anew()

    async def _begin_anew(self) -> None:
        """Forget the versions, whose bytes are lost.  If the store is not ready, the next look does it."""
        async with self._renewing:
            try:
                if not await self.pool.lost(self.vault.committed_blocks()):
                    return  # done by another, meanwhile
                epoch = secrets.token_hex(8)
                await self.pool.begin(epoch)
            except (StoreTrouble, ObjectLost, RelayFull) as error:
                _log.warning("the Mooncake store lost objects, and is not ready: %s", error)
                return
            for reservation, _ in self._claims.values():
                self.vault.cancel(reservation, time.monotonic())
            self._claims.clear()
            self.vault.reset(epoch)
            _log.warning("the Mooncake store lost objects: epoch %s begins, without versions", epoch)
