"""Moving one version through a relay, timed; and the processes that this takes."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from rose.errors import RoseError
from rose.units import JobId, WeightVersion
from rose.weights.bits import Bits, empty_buffer
from rose.weights.container import EncodedVersion
from rose.weights.digests import digest
from rose.weights.encoding import encode_version
from rose.weights.manifest import Bucket, Manifest
from rose.weights.relay import Relay
from rose.weights.relay.ranges import PARALLEL, Range, fetch_ranges, run_some

JOB = JobId("bench")
_PARAMETER_BYTES = 1 << 20
RELAY_PORT = 7702
"""Of a relay in a network namespace of its own."""


def anchor(nbytes: int, seed: int) -> EncodedVersion:
    """Version 1 as an anchor of random bytes, which no codec makes smaller."""
    rng = np.random.default_rng(seed)
    state = {}
    for number, start in enumerate(range(0, nbytes, _PARAMETER_BYTES)):
        size = min(_PARAMETER_BYTES, nbytes - start)
        state[f"w{number:05}"] = Bits("U8", (size,), rng.integers(0, 256, size, dtype=np.uint8))
    return encode_version(JOB, WeightVersion(1), None, None, state)


async def push(relay: Relay, version: EncodedVersion, *, parallel: int = PARALLEL) -> float:
    """Seconds from the first byte to the commit."""
    manifest = version.manifest

    async def put(bucket: Bucket) -> None:
        data = version.buckets[bucket.name]
        await relay.put_bucket(JOB, manifest.version, bucket.name, data, bucket.digest)

    began = time.perf_counter()
    await run_some(parallel, (put(bucket) for bucket in manifest.buckets))
    missing = await relay.commit(JOB, manifest.version, manifest)
    took_s = time.perf_counter() - began
    if missing:
        raise RoseError(f"the relay lost buckets: {', '.join(missing)}")
    return took_s


class Puller:
    """Pulls a version into memory that it keeps, so that no fresh pages are part of the time."""

    def __init__(self, relay: Relay, manifest: Manifest) -> None:
        self._relay = relay
        self._version = manifest.version
        self._buckets = manifest.buckets
        self.memory = {bucket.name: empty_buffer(bucket.size) for bucket in self._buckets}
        """The buckets, once they were pulled."""
        for view in self.memory.values():
            np.frombuffer(view, np.uint8)[:] = 0

    async def pull(self, *, parallel: int = PARALLEL) -> float:
        """Seconds from the request for the manifest to the last byte.  Raises RoseError for wrong bytes."""
        began = time.perf_counter()
        committed = await self._relay.manifest(JOB, self._version)
        ranges = [Range(bucket.name, self.memory[bucket.name]) for bucket in self._buckets]
        await fetch_ranges(self._relay, JOB, self._version, ranges, epoch=committed.epoch, parallel=parallel)
        took_s = time.perf_counter() - began
        for bucket in self._buckets:
            if await asyncio.to_thread(digest, self.memory[bucket.name]) != bucket.digest:
                raise RoseError(f"{bucket.name}: other bytes arrived than were sent")
        return took_s


def secured(
    scratch: Path, address: str, *, capacity_bytes: int, streams: int, congestion: str, near: bool = False
) -> str:
    """A [relay] section with TLS and a token, as off loopback always; their files go to `scratch`.

    `near` is for who shares the relay's host: it talks to the relay over loopback.
    """
    cert, key, token = scratch / "cert.pem", scratch / "key.pem", scratch / "token"
    if not cert.exists():
        make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=r"
        names = f"subjectAltName=IP:{address},IP:127.0.0.1"
        where = ["-addext", names, "-keyout", str(key), "-out", str(cert)]
        subprocess.run([*make.split(), *where], check=True, capture_output=True)
        token.touch(0o600)
        token.write_text("bench", encoding="ascii")
    host = "127.0.0.1" if near else address
    # Both ends share this machine, and with it the relay's memory: that is not to be measured here.
    return f"""[relay]
url = "https://{host}:{RELAY_PORT}"
capacity_bytes = {capacity_bytes}
shared_memory = false
tls_cert = "{cert}"
tls_key = "{key}"
tls_ca = "{cert}"
token_file = "{token}"
streams = {streams}
congestion = "{congestion}"
"""


@contextlib.contextmanager
def relay_process(
    config: Path, *, host: str = "127.0.0.1", port: int = 0, prefix: Sequence[str] = ()
) -> Iterator[str]:
    """`rose relay` as a process of its own; yields its URL.  Raises RoseError with what it complained of."""
    command = [*prefix, sys.executable, "-m", "rose.cli.main", "relay", "--config", str(config)]
    process = subprocess.Popen(
        [*command, "--host", host, "--port", str(port)], stderr=subprocess.PIPE, text=True
    )
    try:
        if process.stderr is None:
            raise AssertionError("its standard error is a pipe")
        line = process.stderr.readline()
        if not line.startswith("relay listening on "):
            raise RoseError(f"the relay did not start: {line.strip()}")
        yield line.split()[-1]
    finally:
        process.terminate()
        process.communicate()


@contextlib.contextmanager
def sender_process(*, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> Iterator[int]:
    """A plain TCP sender as a process of its own; yields its port."""
    command = [*prefix, sys.executable, "-m", "rose_daemon.bench.plain_tcp", host]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout is None:
            raise AssertionError("its standard output is a pipe")
        yield int(process.stdout.readline())
    finally:
        process.communicate()
