"""The calls of Mooncake Store that ROSE uses, with what its return codes mean.

Tried against mooncake-transfer-engine-non-cuda 0.3.13.post1.  What it takes to be safe there:

- Objects that are not hard-pinned are evicted silently although their put returned 0.
- A put to an existing key returns 0 and keeps the old bytes, so keys are never used twice.
- A put may return 0 although the object does not exist (after a writer died in the middle of one), so the
  size is asked for after each.
- Asking anything about an object gives it a lease, for as long as `mooncake_master --default_kv_lease_ttl`
  says.  An object under a lease is not removed; a read that takes longer than its lease fails.
- The segment of a dead process is forgotten after the master's `--client_ttl`; until then reads from it fail.
- A master that restarts has forgotten every object.
- There is no authentication, and every process listens on all interfaces: private networks only.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from rose.config import RelayConfig
from rose.errors import ConfigError, NotReady, RoseError
from rose.weights.relay import RelayFull

if TYPE_CHECKING:
    from types import ModuleType

_NO_SPACE = -200
_NOT_FOUND = -704
_HAS_LEASE = -706
_LEASE_EXPIRED = -707
_MEANING = {
    _LEASE_EXPIRED: "the read outlived its lease: raise --default_kv_lease_ttl of mooncake_master",
    -800: "the process that lent this memory does not answer",
    -900: "mooncake_master does not answer",
}
_STAGING_BYTES = 16 << 20
"""What each process sets aside for Mooncake's own buffers; our reads and writes go past them."""


_SLAB_BYTES = 16 << 20
"""Memory is lent in multiples of this, which is the least that Mooncake takes."""


class ObjectLost(RoseError):
    """The store no longer has an object that was put, or has another one."""


class StoreTrouble(NotReady):
    """The store failed in a way that it may recover from."""


class MooncakeStore:
    """A connection to a Mooncake Store.  Calls block, release the GIL, and may come from any thread.

    Only `close` holds the GIL, for a second or two.
    """

    def __init__(self, store: Any, put_config: Any) -> None:
        self._store = store
        self._put_config = put_config

    @classmethod
    def connect(cls, config: RelayConfig, *, lend_bytes: int = 0) -> MooncakeStore:
        """Connect to the configured master, lending it at least `lend_bytes` of this process' memory.

        Raises ConfigError where Mooncake is not installed, StoreTrouble if the master does not answer.
        """
        store = _load().MooncakeDistributedStore()
        code = store.setup(
            config.mooncake_host,
            "P2PHANDSHAKE",
            -(-lend_bytes // _SLAB_BYTES) * _SLAB_BYTES,
            _STAGING_BYTES,
            "tcp",
            "",
            config.mooncake_master,
        )
        if code:
            raise StoreTrouble(
                f"no mooncake_master answers at {config.mooncake_master} ({_meaning(code)})",
                "start it, or mend [relay] mooncake_master",
            )
        return cls(store, replication(config))

    def put(self, key: str, data: memoryview) -> None:
        """Store an object under a key that was never used.  Raises RelayFull, ObjectLost, StoreTrouble."""
        words = np.frombuffer(data, np.uint8)
        code = self._store.put_from(key, words.ctypes.data, words.nbytes, self._put_config)
        if code == _NO_SPACE:
            raise RelayFull(f"the Mooncake store has no room for {len(data)} bytes")
        if code:
            raise StoreTrouble(f"{key}: {_meaning(code)}")
        if (held := self.size(key)) != len(data):
            raise ObjectLost(f"{key}: put said done, and the store has {held} bytes of {len(data)}")

    def size(self, key: str) -> int | None:
        """Bytes of an object, None if there is none.  Raises StoreTrouble."""
        size: int = self._store.get_size(key)
        if size == _NOT_FOUND:
            return None
        if size < 0:
            raise StoreTrouble(f"{key}: {_meaning(size)}")
        return size

    def missing(self, keys: list[str]) -> list[str]:
        """Those of the keys that the store has no object of.  Raises StoreTrouble."""
        codes = self._store.batch_is_exist(keys) if keys else []
        for code in codes:
            if code < 0:
                raise StoreTrouble(_meaning(code))
        return [key for key, code in zip(keys, codes, strict=True) if not code]

    def read_into(self, key: str, destination: memoryview, offset: int) -> None:
        """Fill `destination` from an object's bytes from `offset` on.  Raises ObjectLost, StoreTrouble.

        The bytes pass through memory of our own: a call that its caller has given up writes nowhere else.
        """
        words = np.empty(len(destination), np.uint8)
        address = words.ctypes.data
        if code := self._store.register_buffer(address, words.nbytes):
            raise StoreTrouble(f"{key}: a buffer of {words.nbytes} bytes cannot be registered: {code}")
        try:
            [[[got]]] = self._store.get_into_ranges(
                [address], [[key]], [[[0]]], [[[offset]]], [[[words.nbytes]]]
            )
        finally:
            self._store.unregister_buffer(address)
        if got == _NOT_FOUND:
            raise ObjectLost(f"{key}: the store has no such object")
        if got != words.nbytes:
            raise StoreTrouble(f"{key}: {_meaning(got) if got < 0 else f'{got} bytes came'}")
        destination[:] = words.data

    def remove(self, key: str, *, force: bool = False) -> bool:
        """Remove an object; False while somebody has a lease on it, but for `force`.  Raises StoreTrouble."""
        code = self._store.remove(key, force)
        if code == _HAS_LEASE:
            return False
        if code not in (0, _NOT_FOUND):
            raise StoreTrouble(f"{key}: {_meaning(code)}")
        return True

    def remove_all(self, prefix: str) -> int:
        """Remove every object whose key starts with `prefix`, under a lease or not; answers how many."""
        pattern = "^" + prefix.replace(".", r"\.")
        count: int = self._store.remove_by_regex(pattern, True)
        if count < 0:
            raise StoreTrouble(f"{prefix}*: {_meaning(count)}")
        return count

    def close(self) -> None:
        """Disconnect; the memory that was lent goes with its objects."""
        self._store.close()


def replication(config: RelayConfig) -> Any:
    """How each object is kept: so many copies, and pinned."""
    wanted = _load().ReplicateConfig()
    wanted.replica_num = config.mooncake_replicas
    wanted.with_hard_pin = True
    return wanted


def _load() -> ModuleType:
    # Its libraries log to stderr at every step; whoever wants that sets these.
    os.environ.setdefault("GLOG_minloglevel", "2")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        # 17 MB of libraries, for this kind of relay only.
        from mooncake import store  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f'relay.kind = "mooncake" needs Mooncake: {error}',
            'pip install "rose-coserve[mooncake]", and the Debian package libibverbs1',
        ) from None
    module: ModuleType = store
    return module


def _meaning(code: int) -> str:
    return _MEANING.get(code, f"Mooncake error {code}")
