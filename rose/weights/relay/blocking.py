"""A relay for code that has no event loop, such as a trainer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from rose.closing import Closing
from rose.units import JobId, WeightVersion
from rose.weights.manifest import Manifest
from rose.weights.relay import Committed, JobStat, Relay

_T = TypeVar("_T")


class BlockingRelay(Closing):
    """The calls of a `Relay`, each blocking until done; an event loop of its own runs in a thread.

    Owns the relay it is given and closes it.  Calls may come from any thread.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rose-relay", daemon=True)
        self._thread.start()

    def put_bucket(
        self, job: JobId, version: WeightVersion, bucket: str, data: bytes | memoryview, digest: str
    ) -> None:
        """See `Relay.put_bucket`."""
        self._run(self._relay.put_bucket(job, version, bucket, data, digest))

    def commit(
        self, job: JobId, version: WeightVersion, manifest: Manifest, *, encode_ms: float | None = None
    ) -> tuple[str, ...]:
        """See `Relay.commit`."""
        return self._run(self._relay.commit(job, version, manifest, encode_ms=encode_ms))

    def abort(self, job: JobId, version: WeightVersion) -> None:
        """See `Relay.abort`."""
        self._run(self._relay.abort(job, version))

    def stat(self, job: JobId) -> JobStat:
        """See `Relay.stat`."""
        return self._run(self._relay.stat(job))

    def latest(self, job: JobId, after: WeightVersion, wait_s: float = 0) -> WeightVersion | None:
        """See `Relay.latest`."""
        return self._run(self._relay.latest(job, after, wait_s))

    def manifest(self, job: JobId, version: WeightVersion) -> Committed:
        """See `Relay.manifest`."""
        return self._run(self._relay.manifest(job, version))

    def get_into(
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
        self._run(self._relay.get_into(job, version, bucket, destination, offset=offset, epoch=epoch))

    def delete(self, job: JobId, version: WeightVersion) -> bool:
        """See `Relay.delete`."""
        return self._run(self._relay.delete(job, version))

    def close(self) -> None:
        """Close connections and end the thread."""
        if self._loop.is_closed():
            return
        self._run(self._relay.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, call: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # a Ctrl-C in the caller must not leave the call running
