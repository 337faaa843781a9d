"""Publishing while the trainer computes: `submit` copies the weights and returns, a thread does the rest."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from rose.closing import Closing
from rose.units import NS_PER_MS, WeightVersion
from rose.weights.bits import Bits, as_state
from rose.weights.publisher import Publisher
from rose.weights.reports import PublishReport


class BackgroundPublisher(Closing):
    """One call per optimiser step; owns the publisher it is given and closes it.  For one thread.

    Costs a second copy of the model in host memory, written anew at each step.  One version is under way at a
    time: a trainer that is faster than the link waits in `submit` (`waited_ms`), it never piles versions up.
    A version that fails is reported once, by the next call, and the next version follows the last good one.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rose-publish")
        self._copy: dict[str, Bits] = {}
        self._under_way: Future[PublishReport] | None = None
        self.waited_ms = 0.0
        """How long the latest `submit` waited for the version before."""
        self.copied_ms = 0.0
        """How long it took to copy the weights; the trainer stands still for the sum of the two."""

    def submit(self, version: WeightVersion, state: Mapping[str, object]) -> Future[PublishReport]:
        """Publish `state` as `version`; its tensors may change as soon as this returns.

        Raises UnsupportedTensor, or what the version before failed with, if nobody has asked for its outcome:
        then `version` was not taken, and may be submitted again.
        """
        began_ns = time.monotonic_ns()
        self.flush()
        waited_ns = time.monotonic_ns()
        self._keep_copy(state)
        self.copied_ms = (time.monotonic_ns() - waited_ns) / NS_PER_MS
        self.waited_ms = (waited_ns - began_ns) / NS_PER_MS
        self._under_way = self._executor.submit(self._publisher.publish, version, self._copy)
        return self._under_way

    def flush(self) -> PublishReport | None:
        """Wait for the version under way, if any; its report.  Raises what it failed with, once."""
        under_way, self._under_way = self._under_way, None
        return None if under_way is None else under_way.result()

    @property
    def version(self) -> WeightVersion:
        """The newest version known to be committed."""
        return self._publisher.version

    def close(self) -> None:
        """Wait for the version under way, and close.  Raises what it failed with."""
        try:
            self.flush()
        finally:
            self._executor.shutdown()
            self._publisher.close()

    def _keep_copy(self, state: Mapping[str, object]) -> None:
        """Copy into the memory of the copy before, where the forms agree."""
        copy: dict[str, Bits] = {}
        for name, bits in as_state(state).items():
            former = self._copy.get(name)
            if former is not None and former.same_form(bits):
                former.words[:] = bits.words
                copy[name] = former
            else:
                copy[name] = bits.copy()
        self._copy = copy
