"""What clients of every kind of relay do over HTTP: all but moving the bytes of buckets.

Every call has one deadline that covers its retries.  A connection that breaks is made again.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from rose.errors import ConfigError, CorruptDelta, NotReady, RoseError
from rose.units import MIB, JobId, WeightVersion
from rose.weights import manifest as manifests
from rose.weights.manifest import BUCKET_PATTERN, MANIFEST_BYTES_MAX, Manifest, valid_job
from rose.weights.relay import Committed, EpochChanged, JobStat, RelayUnavailable
from rose.weights.relay.http import (
    ENCODE_MS_HEADER,
    EPOCH_HEADER,
    HOST_HEADER,
    MISSING,
    ROOT,
    STATUS_BY_ERROR,
    WAIT_MAX_S,
    BadRequest,
    Latest,
    Refusal,
)

_CHUNK_BYTES = MIB
SILENCE_MAX_S = 15.0
"""The longest `silence_s`."""
_SILENCE_MIN_S = 1.0
_ATTEMPTS_MIN = 3
"""One silent connection must not use up the time of a call."""
_BACKOFF_MIN_S = 0.05
_BACKOFF_MAX_S = 1.0
_T = TypeVar("_T")


class Retry(Exception):
    """This attempt failed in a way that the next one need not."""


class ControlClient:
    """Talks to a relay at `url`: `rose.weights.relay.Relay` without `put_bucket` and `get_into`.

    Use it within one event loop, and close it.  `timeout_s` bounds each call, retries included; a long-poll
    may take its `wait_s` on top.
    """

    def __init__(self, url: str, *, token: str = "", timeout_s: float = 60, tls_ca: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url} is not the URL of a relay", "as in http://127.0.0.1:7702")
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.silence_s = min(SILENCE_MAX_S, max(_SILENCE_MIN_S, timeout_s / _ATTEMPTS_MIN))
        """A connection on which nothing moves for this long is given up and made again."""
        self.host = parts.hostname
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.tls = _trust(tls_ca) if parts.scheme == "https" else True
        self.seen_host = ""
        """The machine of a relay whose memory can be read directly, once it has answered."""
        self._session: aiohttp.ClientSession | None = None

    async def commit(
        self, job: JobId, version: WeightVersion, manifest: Manifest, *, encode_ms: float | None = None
    ) -> tuple[str, ...]:
        """See `Relay.commit`."""
        body = manifests.encode(manifest)
        headers = {} if encode_ms is None else {ENCODE_MS_HEADER: f"{encode_ms:.3f}"}

        async def attempt() -> tuple[str, ...]:
            try:
                path = f"{version_path(job, version)}/manifest"
                async with self.request("PUT", path, headers=headers, data=chunks(memoryview(body))):
                    return ()
            except _MissingBuckets as missing:
                return missing.names

        return await self.until_done(attempt, self.timeout_s)

    async def abort(self, job: JobId, version: WeightVersion) -> None:
        """See `Relay.abort`."""
        await self.read("DELETE", f"{version_path(job, version)}/staged")

    async def stat(self, job: JobId) -> JobStat:
        """See `Relay.stat`."""
        _, body = await self.read("GET", version_path(job))
        return decode(body, JobStat)

    async def latest(self, job: JobId, after: WeightVersion, wait_s: float = 0) -> WeightVersion | None:
        """See `Relay.latest`."""
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + wait_s
        while True:
            wait_now_s = max(0.0, min(WAIT_MAX_S, deadline_s - clock()))
            path = f"{version_path(job)}/latest?after={after}&wait_s={wait_now_s:.3f}"
            _, body = await self.read("GET", path, wait_s=wait_now_s)
            found = decode(body, Latest).version
            if found is not None or clock() >= deadline_s:
                return found

    async def manifest(self, job: JobId, version: WeightVersion) -> Committed:
        """See `Relay.manifest`."""
        epoch, body = await self.read("GET", f"{version_path(job, version)}/manifest")
        manifest = await asyncio.to_thread(manifests.decode, body)
        if (manifest.job, manifest.version) != (job, version):
            raise CorruptDelta(f"the relay answered version {manifest.version} of {manifest.job}")
        return Committed(manifest, epoch)

    async def delete(self, job: JobId, version: WeightVersion) -> bool:
        """See `Relay.delete`."""
        _, body = await self.read("DELETE", version_path(job, version))
        return decode(body, bool)

    async def aclose(self) -> None:
        """Close connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ---- for the calls that move bytes ----

    async def read(
        self, method: str, path: str, *, wait_s: float = 0, epoch: str | None = None
    ) -> tuple[str, bytes]:
        """Epoch and body of a small answer, retried until the deadline."""

        async def attempt() -> tuple[str, bytes]:
            return await self.read_once(method, path, epoch=epoch, wait_s=wait_s)

        return await self.until_done(attempt, self.timeout_s + wait_s)

    async def read_once(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        epoch: str | None = None,
        wait_s: float = 0,
    ) -> tuple[str, bytes]:
        """Epoch and body of a small answer.  One attempt: see `request`."""
        data = chunks(memoryview(body)) if body else None
        async with self.request(method, path, data=data, epoch=epoch, wait_s=wait_s) as response:
            return response.headers.get(EPOCH_HEADER, ""), await _read_bounded(response)

    async def until_done(self, attempt: Callable[[], Awaitable[_T]], timeout_s: float) -> _T:
        """Repeat `attempt` until it gets through or the time is up.  Raises RelayUnavailable."""
        backoff_s, why = _BACKOFF_MIN_S, "no answer"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return await attempt()
                    except Retry as error:
                        why = str(error)
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
        except TimeoutError:
            raise RelayUnavailable(
                f"the relay at {self.url} did not answer within {timeout_s:.0f} s: {why}",
                "check that `rose relay` runs and that relay.url names it",
            ) from None

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        data: AsyncIterator[memoryview] | None = None,
        wait_s: float = 0,
        epoch: str | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One attempt.  Refusals raise what they stand for, broken connections `Retry`.

        An answer from another epoch than `epoch` raises EpochChanged, whatever it says.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self.headers, read_bufsize=_CHUNK_BYTES)
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self.silence_s, sock_read=self.silence_s + wait_s
        )
        try:
            async with self._session.request(
                method,
                self.url + path,
                headers=headers,
                data=data,
                timeout=timeout,
                ssl=self.tls,
                allow_redirects=False,
            ) as response:
                if epoch not in (None, response.headers.get(EPOCH_HEADER)):
                    raise EpochChanged("the relay was restarted meanwhile")
                self.seen_host = response.headers.get(HOST_HEADER, "")
                if response.status >= 300:
                    raise refusal_of(response.status, await _read_bounded(response))
                yield response
        except aiohttp.ClientSSLError as error:
            raise ConfigError(
                f"{self.url}: TLS failed: {error}", "check relay.url and relay.tls_ca"
            ) from None
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise Retry(str(error) or type(error).__name__) from error


class _MissingBuckets(Exception):
    """The relay cannot commit yet."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(names)
        self.names = names


def _trust(tls_ca: str) -> ssl.SSLContext:
    """The TLS context that knows these certificates, or the system's.  Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=tls_ca or None)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"relay.tls_ca: {tls_ca} cannot be used: {error}") from None


def version_path(job: JobId, version: WeightVersion | None = None, bucket: str | None = None) -> str:
    """Where a job, a version or a bucket is found.  Raises BadRequest for what is no name."""
    if not valid_job(job):
        raise BadRequest(f"{job!r} is not a job id", "letters, digits, dot, dash and underscore")
    if bucket is not None and not re.match(BUCKET_PATTERN, bucket):
        raise BadRequest(f"{bucket!r} is not a bucket's name")
    path = f"{ROOT}/{job}" if version is None else f"{ROOT}/{job}/versions/{version}"
    return path if bucket is None else f"{path}/buckets/{bucket}"


async def chunks(view: memoryview) -> AsyncIterator[memoryview]:
    """A body, in pieces."""
    for start in range(0, len(view), _CHUNK_BYTES):
        yield view[start : start + _CHUNK_BYTES]


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MANIFEST_BYTES_MAX:
            raise CorruptDelta("the relay's answer is too long")
    return bytes(body)


def decode(body: bytes, kind: type[_T]) -> _T:
    """What a small answer says.  Raises NotReady if no relay talks so."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotReady(f"what answered is no relay: {error}", "check relay.url") from None


def refusal_of(status: int, body: bytes) -> Exception:
    """What an error answer stands for."""
    if status in (502, 503, 504):
        return Retry(f"status {status}")
    return refused(decode(body, Refusal))


def refused(refusal: Refusal) -> Exception:
    """What a refusal stands for."""
    if refusal.error == MISSING:
        return _MissingBuckets(refusal.missing)
    _, kind = STATUS_BY_ERROR.get(refusal.error, (500, RoseError))
    return kind(refusal.detail)
