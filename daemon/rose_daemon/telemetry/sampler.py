"""One thread between a source that may hang and a loop that may not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from rose.core.readings import Unknown
from rose.units import NS_PER_S

SampleT = TypeVar("SampleT")


class _Taken(NamedTuple, Generic[SampleT]):
    began_ns: int
    sample: SampleT


class Sampler(Generic[SampleT]):
    """Calls `read` every `period_s` in one thread, so there is never more than one call outstanding.

    A driver call that hangs (in the kernel it cannot even be killed) holds up that thread and nothing else:
    the last sample ages, and past `limit_ns` it is `Unknown`.  Ages count from the beginning of the call.
    """

    def __init__(self, read: Callable[[], SampleT], *, period_s: float, limit_ns: int, name: str) -> None:
        self._read = read
        self._period_s = period_s
        self._limit_ns = limit_ns
        self._name = name
        self._latest: _Taken[SampleT] | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.samples = 0
        """Calls that came back."""

    def start(self) -> None:
        """Begin.  The thread is a daemon: a call that never returns does not keep the process alive."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self, patience_s: float = 1.0) -> bool:
        """End; False if the call in progress did not come back within `patience_s`, and was left behind."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(patience_s)
        return self._thread is None or not self._thread.is_alive()

    def latest(self, now_ns: int) -> SampleT | Unknown:
        """The last sample, unless it is too old or there is none yet."""
        taken = self._latest
        if taken is None:
            return Unknown("not_observed")
        age_ns = now_ns - taken.began_ns
        return taken.sample if age_ns <= self._limit_ns else Unknown("telemetry_stale", age_ns)

    def _run(self) -> None:
        while not self._stopping.is_set():
            began_ns = time.monotonic_ns()
            sample = self._read()
            self._latest = _Taken(began_ns, sample)
            self.samples += 1
            took_s = (time.monotonic_ns() - began_ns) / NS_PER_S
            self._stopping.wait(max(0.0, self._period_s - took_s))
