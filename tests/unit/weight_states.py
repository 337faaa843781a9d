"""States, versions and an in-memory relay for the tests of the weight path."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import xxhash
from rose_daemon.relay.pools import HeapPool
from rose_daemon.relay.vault import Vault

from rose.errors import CorruptDelta
from rose.units import JobId, WeightVersion
from rose.weights import manifest as manifests
from rose.weights.bits import Bits, State, word_dtype
from rose.weights.container import EncodedVersion
from rose.weights.encoding import encode_version
from rose.weights.manifest import Manifest
from rose.weights.relay import Committed, EpochChanged, JobStat, RelayUnavailable

JOB = JobId("job-1")


def tensor(dtype: str, shape: tuple[int, ...], seed: int) -> Bits:
    """Any bit pattern of the dtype, NaN and infinities included."""
    words = word_dtype(dtype)
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, int(np.prod(shape, dtype=np.int64)) * words.itemsize, dtype=np.uint8)
    return Bits(dtype, shape, raw.view(words))


def model(seed: int = 0) -> dict[str, Bits]:
    """A small model with every shape that is odd in some way."""
    return {
        "embed.weight": tensor("BF16", (40, 16), seed),
        "empty": tensor("F32", (0, 4), seed),
        "layers.0.mlp.weight": tensor("BF16", (64, 32), seed + 1),
        "layers.0.norm.weight": tensor("F32", (32,), seed + 2),
        "layers.0.quantised": tensor("F8_E4M3", (33,), seed + 3),
        "scale": tensor("F64", (), seed + 4),
    }


def stepped(state: State, seed: int, share: float = 0.02) -> dict[str, Bits]:
    """The state after a step that moves some elements of every parameter but the embedding."""
    rng = np.random.default_rng(seed)
    moved = {name: bits.copy() for name, bits in state.items()}
    for name, bits in moved.items():
        if name != "embed.weight" and bits.words.size:
            count = max(1, round(share * bits.words.size))
            bits.words[rng.choice(bits.words.size, count, replace=False)] ^= 1
    return moved


def delta(
    version: int = 1, seed: int = 0, job: JobId = JOB
) -> tuple[dict[str, Bits], dict[str, Bits], EncodedVersion]:
    """Base, target, and the delta between them."""
    base = model(seed)
    target = stepped(base, seed + version)
    encoded = encode_version(job, WeightVersion(version), WeightVersion(version - 1), base, target)
    return base, target, encoded


def same(left: State, right: State) -> bool:
    """Whether two states agree in every bit."""
    return left.keys() == right.keys() and all(
        left[name].same_form(right[name]) and np.array_equal(left[name].words, right[name].words)
        for name in left
    )


@dataclass
class MemoryRelay:
    """A Relay without a network: calls a Vault, and fails where a test says so."""

    capacity_bytes: int = 1 << 26
    before: Callable[[str], None] = lambda call: None
    """Called with the name of each call; what it raises, the caller sees, and nothing has happened."""
    after: Callable[[str], None] = lambda call: None
    """The same once it has happened: an answer that gets lost."""
    calls: list[str] = field(default_factory=list)
    restarts: int = 0

    def __post_init__(self) -> None:
        self.vault = Vault(self.capacity_bytes, 600, "epoch-0", HeapPool().allocate)

    def restart(self) -> None:
        self.restarts += 1
        self.vault = Vault(self.capacity_bytes, 600, f"epoch-{self.restarts}", HeapPool().allocate)

    def _begin(self, call: str) -> None:
        self.calls.append(call)
        self.before(call)
        for block in self.vault.doomed():
            self.vault.freed(block)

    async def put_bucket(
        self, job: JobId, version: WeightVersion, bucket: str, data: bytes | memoryview, digest: str
    ) -> None:
        self._begin("put_bucket")
        now_s = time.monotonic()
        if reservation := self.vault.reserve((job, version), bucket, len(data), digest, now_s):
            reservation.block.data[:] = data
            if xxhash.xxh3_128_hexdigest(data) != digest:
                self.vault.cancel(reservation, now_s)
                raise CorruptDelta("other bytes arrived")
            self.vault.store(reservation, now_s)
        self.after("put_bucket")

    async def commit(
        self, job: JobId, version: WeightVersion, manifest: Manifest, *, encode_ms: float | None = None
    ) -> tuple[str, ...]:
        self._begin("commit")
        missing = self.vault.commit((job, version), manifest, time.monotonic(), encode_ms=encode_ms)
        self.after("commit")
        return missing

    async def abort(self, job: JobId, version: WeightVersion) -> None:
        self._begin("abort")
        self.vault.abort((job, version))

    async def stat(self, job: JobId) -> JobStat:
        self._begin("stat")
        return self.vault.stat(job)

    async def latest(self, job: JobId, after: WeightVersion, wait_s: float = 0) -> WeightVersion | None:
        self._begin("latest")
        return self.vault.newest(job, after)

    async def manifest(self, job: JobId, version: WeightVersion) -> Committed:
        self._begin("manifest")
        return Committed(manifests.decode(self.vault.manifest((job, version))), self.vault.epoch)

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
        self._begin("get_into")
        if epoch not in (None, self.vault.epoch):
            raise EpochChanged("restarted")
        with self.vault.reading((job, version), bucket) as block:
            destination[:] = block.data[offset : offset + len(destination)]
        self.after("get_into")

    async def delete(self, job: JobId, version: WeightVersion) -> bool:
        self._begin("delete")
        return self.vault.delete((job, version))

    async def aclose(self) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def publish(self, encoded: EncodedVersion) -> None:
        """Put a version there as a trainer would."""
        key = (encoded.manifest.job, encoded.manifest.version)
        for bucket in encoded.manifest.buckets:
            reservation = self.vault.reserve(key, bucket.name, bucket.size, bucket.digest, 0)
            assert reservation is not None
            reservation.block.data[:] = encoded.buckets[bucket.name]
            self.vault.store(reservation, 0)
        assert self.vault.commit(key, encoded.manifest, 0) == ()


def fail_once(call: str, error: Exception | None = None) -> Callable[[str], None]:
    """A hook that raises the first time `call` is made."""
    left = [error or RelayUnavailable("cable pulled")]

    def hook(made: str) -> None:
        if made == call and left:
            raise left.pop()

    return hook
