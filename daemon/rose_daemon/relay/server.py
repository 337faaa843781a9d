"""HTTP server of the embedded relay; see `rose.weights.relay.http` for its dialect."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import math
import re
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import xxhash
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rose.config import RelayConfig
from rose.errors import ConfigError, CorruptDelta, RoseError
from rose.units import MIB, JobId, WeightVersion
from rose.weights import manifest as manifests
from rose.weights.digests import DIGEST_PATTERN
from rose.weights.manifest import BUCKET_BYTES_MAX, BUCKET_PATTERN, MANIFEST_BYTES_MAX, VERSION_MAX, valid_job
from rose.weights.relay import RelayDenied
from rose.weights.relay.http import (
    DIGEST_HEADER,
    EPOCH_HEADER,
    MISSING,
    MISSING_STATUS,
    ROOT,
    STATUS_BY_ERROR,
    WAIT_MAX_S,
    BadRequest,
    Latest,
    Refusal,
)
from rose.weights.relay.local import read_token
from rose_daemon.relay.vault import Key, Vault

_TRANSFER_MAX_S = 300.0
"""A bucket that takes longer in either direction is given up, so that no peer holds memory for ever."""
_EXPIRE_PERIOD_S = 5.0
_CHUNK_BYTES = MIB
_SHUTDOWN_MAX_S = 2.0

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RelayServer:
    """The relay's HTTP handlers over one Vault."""

    def __init__(self, vault: Vault, token: str = "") -> None:
        self._vault = vault
        self._token = token
        self._news = asyncio.Condition()
        self._closing = False

    def app(self) -> web.Application:
        """The application to serve."""
        app = web.Application(middlewares=[self._answer], client_max_size=MANIFEST_BYTES_MAX)
        version = f"{ROOT}/{{job}}/versions/{{version}}"
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get(f"{ROOT}/{{job}}", self._stat),
                web.get(f"{ROOT}/{{job}}/latest", self._latest),
                web.put(f"{version}/buckets/{{bucket}}", self._put_bucket),
                web.get(f"{version}/buckets/{{bucket}}", self._get_bucket, allow_head=False),
                web.put(f"{version}/manifest", self._commit),
                web.get(f"{version}/manifest", self._manifest),
                web.delete(f"{version}/staged", self._abort),
                web.delete(version, self._delete),
            ]
        )
        app.cleanup_ctx.append(self._expiring)
        app.on_shutdown.append(self._end_polls)
        return app

    # ---- handlers ----

    async def _health(self, _request: web.Request) -> web.Response:
        return _json({"ok": True})

    async def _stat(self, request: web.Request) -> web.Response:
        self._vault.expire(time.monotonic())
        return _json(self._vault.stat(_job(request)))

    async def _latest(self, request: web.Request) -> web.Response:
        job, after, wait_s = _job(request), _integer(request.query.get("after", "-1")), _wait_s(request)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self._news:
                await self._news.wait_for(lambda: self._closing or self._vault.newest(job, after) is not None)
        return _json(Latest(self._vault.newest(job, after)))

    async def _put_bucket(self, request: web.Request) -> web.Response:
        size, digest = request.content_length, request.headers.get(DIGEST_HEADER, "")
        if size is None or not 0 < size <= BUCKET_BYTES_MAX:
            raise BadRequest(f"a bucket has a Content-Length of 1 to {BUCKET_BYTES_MAX}")
        if not re.match(DIGEST_PATTERN, digest):
            raise BadRequest(f"{DIGEST_HEADER} must be an xxh3-128 in hex")
        reservation = self._vault.reserve(_key(request), _bucket(request), size, digest, time.monotonic())
        if reservation is None:
            return web.Response(status=200)
        try:
            received = await _receive(request, reservation.data)
        except BaseException:
            self._vault.cancel(reservation, time.monotonic())
            raise
        if received != digest:
            self._vault.cancel(reservation, time.monotonic())
            raise CorruptDelta(f"{reservation.bucket}: other bytes arrived than {DIGEST_HEADER} says")
        self._vault.store(reservation, time.monotonic())
        return web.Response(status=201)

    async def _get_bucket(self, request: web.Request) -> web.StreamResponse:
        with self._vault.reading(_key(request), _bucket(request)) as data:
            start, stop = _range(request, len(data))
            headers = {
                EPOCH_HEADER: self._vault.epoch,
                "Content-Length": str(stop - start),
                "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}",
                "Content-Type": "application/octet-stream",
            }
            response = web.StreamResponse(status=206, headers=headers)
            await response.prepare(request)
            try:
                async with asyncio.timeout(_TRANSFER_MAX_S):
                    for position in range(start, stop, _CHUNK_BYTES):
                        await response.write(data[position : min(stop, position + _CHUNK_BYTES)])
                    await response.write_eof()
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
            return response

    async def _commit(self, request: web.Request) -> web.Response:
        key = _key(request)
        try:
            async with asyncio.timeout(_TRANSFER_MAX_S):
                body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise BadRequest(f"a manifest has at most {MANIFEST_BYTES_MAX} bytes") from None
        manifest = await asyncio.to_thread(manifests.decode, body)
        if (manifest.job, manifest.version) != key:
            raise BadRequest(f"the manifest is of version {manifest.version} of {manifest.job}")
        if missing := self._vault.commit(key, manifest):
            refusal = Refusal(MISSING, f"{len(missing)} buckets are missing", missing)
            return _json(refusal, status=MISSING_STATUS)
        async with self._news:
            self._news.notify_all()
        return web.Response(status=201)

    async def _manifest(self, request: web.Request) -> web.Response:
        return web.Response(body=self._vault.manifest(_key(request)), content_type="application/json")

    async def _abort(self, request: web.Request) -> web.Response:
        self._vault.abort(_key(request))
        return _json(True)

    async def _delete(self, request: web.Request) -> web.Response:
        return _json(self._vault.delete(_key(request)))

    # ---- around them ----

    @web.middleware
    async def _answer(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Check the token, name the epoch, and turn errors into refusals."""
        try:
            self._authorise(request)
            response = await handler(request)
        except RoseError as error:
            response = _refuse(error)
        except web.HTTPException as error:
            response = _json(Refusal("bad_request", error.reason), status=error.status)
        if not response.prepared:
            response.headers[EPOCH_HEADER] = self._vault.epoch
        return response

    def _authorise(self, request: web.Request) -> None:
        if not self._token or request.path == "/health":
            return
        sent = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(sent, f"Bearer {self._token}".encode()):
            raise RelayDenied("the relay does not accept this token")

    async def _expiring(self, _app: web.Application) -> AsyncIterator[None]:
        async def expire() -> None:
            while True:
                await asyncio.sleep(_EXPIRE_PERIOD_S)
                self._vault.expire(time.monotonic())

        task = asyncio.create_task(expire())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _end_polls(self, _app: web.Application) -> None:
        self._closing = True
        async with self._news:
            self._news.notify_all()


@contextlib.asynccontextmanager
async def serving(config: RelayConfig) -> AsyncIterator[str]:
    """Serve a relay; yields its URL (port 0 lets the system choose).

    Raises ConfigError for an address that would be exposed, RoseError if the port cannot be had.
    """
    tls = check_exposure(config)
    token = read_token(config.token_file) if config.token_file else ""
    vault = Vault(config.capacity_bytes, config.stage_ttl_s, secrets.token_hex(8))
    runner = web.AppRunner(
        RelayServer(vault, token).app(),
        access_log=None,
        shutdown_timeout=_SHUTDOWN_MAX_S,
        read_bufsize=_CHUNK_BYTES,
        logger=_logger(),
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, config.host, config.port, ssl_context=tls).start()
        except OSError as error:
            raise RoseError(
                f"the relay cannot listen on {config.host}:{config.port}: {error.strerror}",
                "end the process that has the port, or choose another with --port",
            ) from None
        port = runner.addresses[0][1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        yield f"{'https' if tls else 'http'}://{host}:{port}"
    finally:
        await runner.cleanup()


def check_exposure(config: RelayConfig) -> ssl.SSLContext | None:
    """The TLS context, if configured.

    Raises ConfigError if the address is not loopback and TLS or the token is missing.
    """
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigError("relay.tls_cert and relay.tls_key go together")
    if not _is_loopback(config.host) and not (config.tls_cert and config.token_file):
        raise ConfigError(
            f"relay.host: {config.host} is not loopback: weights would be open to the network",
            "set relay.tls_cert, relay.tls_key and relay.token_file, or listen on 127.0.0.1",
        )
    if not config.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"relay.tls_cert: cannot be used: {error}") from None
    return context


def _logger() -> logging.Logger:
    """For faults of the server; what is no HTTP was answered with 400 and fills no log."""

    def is_ours(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))

    logger = logging.getLogger("rose.relay")
    if not logger.filters:
        logger.addFilter(is_ours)
    return logger


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _receive(request: web.Request, destination: memoryview) -> str:
    """Fill `destination` from the body; answers its digest.  Raises CorruptDelta if lengths differ."""
    hasher, position = xxhash.xxh3_128(), 0
    try:
        async with asyncio.timeout(_TRANSFER_MAX_S):
            # As they came from the socket; `iter_any` would join, that is copy, what has piled up.
            async for chunk, _ in request.content.iter_chunks():
                end = position + len(chunk)
                if end > len(destination):  # a compressed body, which aiohttp unpacks
                    raise CorruptDelta(f"more than {len(destination)} bytes arrived")
                destination[position:end] = chunk
                hasher.update(chunk)
                position = end
    except TimeoutError:
        raise BadRequest(f"the bucket took longer than {_TRANSFER_MAX_S:.0f} s") from None
    if position != len(destination):
        raise CorruptDelta(f"{position} bytes arrived of {len(destination)}")
    digest: str = hasher.hexdigest()
    return digest


def _job(request: web.Request) -> JobId:
    job = request.match_info["job"]
    if not valid_job(job):
        raise BadRequest("not a job id")
    return JobId(job)


def _key(request: web.Request) -> Key:
    version = _integer(request.match_info["version"])
    if not 0 <= version <= VERSION_MAX:
        raise BadRequest("not a version")
    return _job(request), version


def _bucket(request: web.Request) -> str:
    bucket = request.match_info["bucket"]
    if not re.match(BUCKET_PATTERN, bucket):
        raise BadRequest("not a bucket's name")
    return bucket


def _integer(text: str) -> WeightVersion:
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise BadRequest("not a version")
    return WeightVersion(int(text))


def _wait_s(request: web.Request) -> float:
    try:
        wait_s = float(request.query.get("wait_s", "0"))
    except ValueError:
        wait_s = math.nan
    if not 0 <= wait_s <= WAIT_MAX_S:
        raise BadRequest(f"wait_s lies between 0 and {WAIT_MAX_S:.0f}")
    return wait_s


def _range(request: web.Request, size: int) -> tuple[int, int]:
    """The bytes asked for, [start, stop).  Raises CorruptDelta if the bucket has no such bytes."""
    try:
        asked = request.http_range
    except ValueError:
        raise BadRequest("Range cannot be read") from None
    start, stop, _ = asked.indices(size)
    if start >= stop or (asked.stop or 0) > size:
        raise CorruptDelta(f"the bucket has {size} bytes, not those of the Range")
    return start, stop


def _refuse(error: RoseError) -> web.Response:
    for code, (status, kind) in STATUS_BY_ERROR.items():
        if isinstance(error, kind):
            return _json(Refusal(code, str(error)), status=status)
    return _json(Refusal("failed", str(error)), status=500)


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
