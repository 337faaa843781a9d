"""A real Mooncake Store for tests: `mooncake_master` on loopback."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import pytest
from rose_daemon.relay.server import serving

from rose.config import RelayConfig
from rose.units import JobId, WeightVersion
from rose.weights.bits import Bits
from rose.weights.container import EncodedVersion
from rose.weights.encoding import encode_version
from rose.weights.relay import Relay
from rose.weights.relay.mooncake_store import MooncakeStore, replication

_START_MAX_S = 20


def why_not() -> str:
    """Why Mooncake cannot run here; empty if it can."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        return "mooncake-transfer-engine-non-cuda is not installed"
    tried = subprocess.run([_master(), "--version"], capture_output=True, text=True, check=False)
    if "libibverbs" in tried.stderr:
        return "libibverbs1 is not installed (tools/debian.sh, as root)"
    return ""


def _master() -> str:
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    return str(Path(folder) / "mooncake_master")


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Master:
    """A `mooncake_master` on ports of its own; usable as a context manager."""

    def __init__(self, *, lease: str = "500ms", client_ttl_s: int = 3) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._arguments = [
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.address.rpartition(':')[2]}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={free_port()}",
            f"--default_kv_lease_ttl={lease}",
            f"--client_ttl={client_ttl_s}",
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, with nothing in it, and wait until it listens."""
        os.chmod(_master(), 0o755)  # noqa: PTH101 - wheels lose the bit with some installers
        self._process = subprocess.Popen(
            [_master(), *self._arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        host, _, port = self.address.rpartition(":")
        for _ in range(_START_MAX_S * 20):
            try:
                socket.create_connection((host, int(port)), 1).close()
            except ConnectionRefusedError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError("mooncake_master does not listen")

    def kill(self) -> None:
        """End it as a crash would; what it knew is lost."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextmanager
def one_connection(master: Master, lend_bytes: int) -> Iterator[None]:
    """Let all relays and clients of this process share a connection: closing one takes Mooncake seconds."""
    shared = MooncakeStore.connect(RelayConfig(mooncake_master=master.address), lend_bytes=lend_bytes)

    really, really_close = MooncakeStore.connect, MooncakeStore.close

    def connect(config: RelayConfig, **options: int) -> MooncakeStore:
        if config.mooncake_master != master.address:
            return really(config, **options)
        return MooncakeStore(shared._store, replication(config))

    def close(self: MooncakeStore) -> None:
        if self._store is not shared._store:
            really_close(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MooncakeStore, "connect", connect)
        patch.setattr(MooncakeStore, "close", close)
        yield
    shared.close()


_namespaces = itertools.count()


def namespace() -> str:
    """A part of the store that no other test uses."""
    return f"test-{os.getpid()}-{next(_namespaces)}"


LENDER = """
import sys, time
from rose.config import RelayConfig
from rose.config import RelayConfig
from rose.weights.relay.mooncake_store import MooncakeStore, replication
store = MooncakeStore.connect(RelayConfig(mooncake_master=sys.argv[1]), lend_bytes=int(sys.argv[2]))
print("lending", flush=True)
time.sleep(600)
"""


def lender(master: Master, lend_bytes: int) -> subprocess.Popen[bytes]:
    """Another process that lends memory to the store, until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", LENDER, master.address, str(lend_bytes)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"lending\n"
    return process


JOB = JobId("job-1")


@asynccontextmanager
async def relay_on(master: Master, **settings: object) -> AsyncIterator[RelayConfig]:
    """A relay on the store; yields what its clients need."""
    config = RelayConfig(
        kind="mooncake",
        port=0,
        capacity_bytes=64 << 20,
        mooncake_master=master.address,
        mooncake_namespace=namespace(),
        mooncake_lease_s=1,
    )
    config = msgspec.structs.replace(config, **settings)
    async with serving(config) as url:
        yield msgspec.structs.replace(config, url=url)


def version(number: int, size: int = 1 << 20) -> EncodedVersion:
    """An anchor of one bucket of random bytes."""
    words = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
    return encode_version(JOB, WeightVersion(number), None, None, {"w": Bits("U8", (size,), words)})


async def publish(relay: Relay, encoded: EncodedVersion) -> None:
    number = encoded.manifest.version
    for bucket in encoded.manifest.buckets:
        await relay.put_bucket(JOB, number, bucket.name, encoded.buckets[bucket.name], bucket.digest)
    assert await relay.commit(JOB, number, encoded.manifest) == ()


async def fetch(relay: Relay, encoded: EncodedVersion, epoch: str | None = None) -> bytes:
    (bucket,) = encoded.manifest.buckets
    destination = bytearray(bucket.size)
    number = encoded.manifest.version
    await relay.get_into(JOB, number, bucket.name, memoryview(destination), epoch=epoch)
    return bytes(destination)


def content(encoded: EncodedVersion) -> bytes:
    (bucket,) = encoded.manifest.buckets
    return bytes(encoded.buckets[bucket.name])
