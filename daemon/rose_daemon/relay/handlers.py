"""The relay's HTTP handlers; see `rose.weights.relay.http` for the dialect.

`RelayHandlers` is all but the bytes of buckets, which `EmbeddedHandlers` keeps in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

import xxhash
from aiohttp import web

from rose.config_rules import is_loopback
from rose.errors import CorruptDelta, RoseError
from rose.units import MIB
from rose.weights import manifest as manifests
from rose.weights.manifest import MANIFEST_BYTES_MAX
from rose.weights.relay import RelayDenied, VersionGone
from rose.weights.relay.http import (
    BULK_PATH,
    DIGEST_HEADER,
    ENCODE_MS_HEADER,
    EPOCH_HEADER,
    HOST_HEADER,
    MISSING,
    MISSING_STATUS,
    ROOT,
    BadRequest,
    Latest,
    Refusal,
)
from rose.weights.relay.shared import host_id
from rose.weights.relay.sockets import AS_THE_SYSTEM_DOES, Sending
from rose_daemon.relay import bulk, metrics, requests
from rose_daemon.relay.arena import ArenaPool
from rose_daemon.relay.bulk import Bulk
from rose_daemon.relay.pools import MemoryBlock, Pool
from rose_daemon.relay.requests import TRANSFER_MAX_S, answer
from rose_daemon.relay.uploads import Uploads
from rose_daemon.relay.vault import Block, Vault
from rose_daemon.service.supervision import Heartbeat
from rose_daemon.service.tokens import Keyring, Scope

_EXPIRE_PERIOD_S = 5.0
CHUNK_BYTES = MIB
_WRITE_BYTES = 8 * MIB
"""Handed to a connection at a time: we are woken once for each."""
_WRITE_TLS_BYTES = MIB // 4
"""The same where it is encrypted at once, while other connections wait."""
VERSION_ROOT = f"{ROOT}/{{job}}/versions/{{version}}"

B = TypeVar("B", bound=Block)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RelayHandlers(Generic[B]):
    """Manifests, listing, polls, tokens: what every kind of relay does, over one Vault."""

    def __init__(self, vault: Vault[B], pool: Pool[B], tokens: Keyring) -> None:
        self.vault = vault
        self.pool = pool
        self._tokens = tokens
        self.headers: dict[str, str] = {}
        """Sent with every answer."""
        self._news = asyncio.Condition()
        self._closing = False

    def app(self) -> web.Application:
        """The application to serve."""
        app = web.Application(middlewares=[self._answer], client_max_size=MANIFEST_BYTES_MAX)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get(f"{ROOT}/{{job}}", self._stat),
                web.get(f"{ROOT}/{{job}}/latest", self._latest),
                web.put(f"{VERSION_ROOT}/manifest", self._commit),
                web.get(f"{VERSION_ROOT}/manifest", self._manifest),
                web.delete(f"{VERSION_ROOT}/staged", self._abort),
                web.delete(VERSION_ROOT, self._delete),
                *self.bucket_routes(),
            ]
        )
        app.cleanup_ctx.append(self._tidying)
        app.on_shutdown.append(self._end_polls)
        return app

    def bucket_routes(self) -> list[web.RouteDef]:
        """Routes by which buckets are written and read."""
        raise NotImplementedError

    async def tidy(self) -> None:
        """Drop what expired, and take back the memory of what is no longer wanted."""
        self.vault.expire(time.monotonic())
        for block in self.vault.doomed():
            if await self.pool.release(block):
                self.vault.freed(block)

    # ---- handlers ----

    async def _health(self, _request: web.Request) -> web.Response:
        return answer({"ok": True})

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=metrics.exposition(self.vault), headers={"Content-Type": metrics.CONTENT_TYPE}
        )

    async def _stat(self, request: web.Request) -> web.Response:
        await self.tidy()
        return answer(self.vault.stat(requests.job(request)))

    async def _latest(self, request: web.Request) -> web.Response:
        job, wait_s = requests.job(request), requests.wait_s(request)
        after = requests.integer(request.query.get("after", "-1"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self._news:
                await self._news.wait_for(lambda: self._closing or self.vault.newest(job, after) is not None)
        return answer(Latest(self.vault.newest(job, after)))

    async def _commit(self, request: web.Request) -> web.Response:
        key = requests.key(request)
        try:
            async with asyncio.timeout(TRANSFER_MAX_S):
                body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise BadRequest(f"a manifest has at most {MANIFEST_BYTES_MAX} bytes") from None
        manifest = await asyncio.to_thread(manifests.decode, body)
        if (manifest.job, manifest.version) != key:
            raise BadRequest(f"the manifest is of version {manifest.version} of {manifest.job}")
        await self.tidy()
        encode_ms = requests.milliseconds(request, ENCODE_MS_HEADER)
        if missing := self.vault.commit(key, manifest, time.monotonic(), encode_ms=encode_ms):
            refusal = Refusal(MISSING, f"{len(missing)} buckets are missing", missing)
            return answer(refusal, status=MISSING_STATUS)
        async with self._news:
            self._news.notify_all()
        return web.Response(status=201)

    async def _manifest(self, request: web.Request) -> web.Response:
        encoded = self.vault.manifest(requests.key(request))
        response = web.Response(body=encoded, content_type="application/json")
        if not is_loopback(request.remote or ""):
            response.enable_compression()  # a long one costs round trips before a connection is up to speed
        return response

    async def _abort(self, request: web.Request) -> web.Response:
        self.vault.abort(requests.key(request))
        await self.tidy()
        return answer(True)

    async def _delete(self, request: web.Request) -> web.Response:
        found = self.vault.delete(requests.key(request))
        await self.tidy()
        return answer(found)

    # ---- around them ----

    @web.middleware
    async def _answer(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Check the token, name the epoch, and turn errors into refusals."""
        try:
            self._authorise(request)
            response = await handler(request)
        except RoseError as error:
            response = requests.refuse(error)
        except web.HTTPException as error:
            response = answer(Refusal("bad_request", error.reason), status=error.status)
        if not response.prepared:
            response.headers[EPOCH_HEADER] = self.vault.epoch
            response.headers.update(self.headers)
        return response

    def _authorise(self, request: web.Request) -> None:
        if not self._tokens or request.path == "/health":
            return
        held = self._tokens.scope_of(request.headers.get("Authorization", ""))
        if held is None:
            raise RelayDenied("the relay does not accept this token")
        if held < (needed := _scope(request)):
            raise RelayDenied(f"the token allows {held.name.lower()}, this takes {needed.name.lower()}")

    async def _tidying(self, _app: web.Application) -> AsyncIterator[None]:
        async def tidy() -> None:
            heartbeat = Heartbeat()
            while True:
                await self.tidy()
                heartbeat.beat()
                await asyncio.sleep(_EXPIRE_PERIOD_S)

        task = asyncio.create_task(tidy())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _end_polls(self, _app: web.Application) -> None:
        self._closing = True
        async with self._news:
            self._news.notify_all()


class EmbeddedHandlers(RelayHandlers[MemoryBlock]):
    """Buckets in this process: written and read over the network, or read from its arena, if there is one."""

    def __init__(
        self,
        vault: Vault[MemoryBlock],
        pool: Pool[MemoryBlock],
        tokens: Keyring,
        sending: Sending = AS_THE_SYSTEM_DOES,
    ) -> None:
        super().__init__(vault, pool, tokens)
        self._arena = pool if isinstance(pool, ArenaPool) else None
        self._sending = sending
        self._bulk = Bulk(vault, Uploads(vault), self.tidy, set())
        if self._arena is not None:
            self.headers[HOST_HEADER] = host_id()

    def app(self) -> web.Application:
        """The application to serve."""
        app = super().app()
        app.on_shutdown.append(self._end_receivers)
        return app

    def bucket_routes(self) -> list[web.RouteDef]:
        """See `RelayHandlers.bucket_routes`."""
        bucket = f"{VERSION_ROOT}/buckets/{{bucket}}"
        return [
            web.put(bucket, self._put_bucket),
            web.get(bucket, self._get_bucket, allow_head=False),
            web.get(f"{bucket}/placement", self._place, allow_head=False),
            web.route("*", f"{bucket}/placement", self._refuse_placement),
            web.get(BULK_PATH, self._receive_many, allow_head=False),
        ]

    async def _put_bucket(self, request: web.Request) -> web.Response:
        size, digest = requests.content(request.content_length, request.headers.get(DIGEST_HEADER, ""))
        key, bucket = requests.key(request), requests.bucket(request)
        await self.tidy()
        reservation = self.vault.reserve(key, bucket, size, digest, time.monotonic())
        if reservation is None:
            return web.Response(status=200)
        try:
            received = await _receive(request, reservation.block.data)
        except BaseException:
            self.vault.cancel(reservation, time.monotonic())
            raise
        if received != digest:
            self.vault.cancel(reservation, time.monotonic())
            raise CorruptDelta(f"{reservation.bucket}: other bytes arrived than {DIGEST_HEADER} says")
        self.vault.store(reservation, time.monotonic())
        return web.Response(status=201)

    async def _receive_many(self, request: web.Request) -> web.StreamResponse:
        await bulk.receive(request, self._bulk)
        return web.Response()  # to nobody: the connection has ended

    async def _end_receivers(self, _app: web.Application) -> None:
        for receiver in list(self._bulk.receivers):
            receiver.end()

    async def _place(self, request: web.Request) -> web.Response:
        if self._arena is None:
            raise VersionGone("this relay's memory is not shared")
        block = self.vault.block(requests.key(request), requests.bucket(request))
        return answer(self._arena.placement(block))

    async def _refuse_placement(self, _request: web.Request) -> web.Response:
        raise BadRequest('this relay keeps its buckets itself: set relay.kind = "embedded"')

    async def _get_bucket(self, request: web.Request) -> web.StreamResponse:
        with self.vault.reading(requests.key(request), requests.bucket(request)) as block:
            data = block.data
            start, stop = requests.byte_range(request, len(data))
            headers = {
                EPOCH_HEADER: self.vault.epoch,
                "Content-Length": str(stop - start),
                "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}",
                "Content-Type": "application/octet-stream",
            }
            response = web.StreamResponse(status=206, headers=headers)
            await response.prepare(request)
            transport = request.transport
            if transport is not None:
                # What is handed to the transport must have left it before the block may be used anew.  Not 0:
                # uvloop's TLS would then pause for ever.
                transport.set_write_buffer_limits(high=1)
                self._sending.apply_to(transport.get_extra_info("socket").fileno())
            try:
                async with asyncio.timeout(TRANSFER_MAX_S):
                    step = _WRITE_TLS_BYTES if request.secure else _WRITE_BYTES
                    for position in range(start, stop, step):
                        await response.write(data[position : min(stop, position + step)])
                    await response.write_eof()
                    await request.writer.drain()
            except TimeoutError:
                if transport is not None:
                    transport.abort()
            except ConnectionError:
                pass  # the reader is gone; it comes back for the rest if it still wants it
            return response


def _scope(request: web.Request) -> Scope:
    """Pulling is reading; a connection by which buckets are pushed begins as a GET too."""
    return Scope.READ if request.method in ("GET", "HEAD") and request.path != BULK_PATH else Scope.SUBMIT


async def _receive(request: web.Request, destination: memoryview) -> str:
    """Fill `destination` from the body; answers its digest.  Raises CorruptDelta if lengths differ."""
    hasher, position = xxhash.xxh3_128(), 0
    try:
        async with asyncio.timeout(TRANSFER_MAX_S):
            # As they came from the socket; `iter_any` would join, that is copy, what has piled up.
            async for chunk, _ in request.content.iter_chunks():
                end = position + len(chunk)
                if end > len(destination):  # a compressed body, which aiohttp unpacks
                    raise CorruptDelta(f"more than {len(destination)} bytes arrived")
                destination[position:end] = chunk
                hasher.update(chunk)
                position = end
    except TimeoutError:
        raise BadRequest(f"the bucket took longer than {TRANSFER_MAX_S:.0f} s") from None
    if position != len(destination):
        raise CorruptDelta(f"{position} bytes arrived of {len(destination)}")
    digest: str = hasher.hexdigest()
    return digest
