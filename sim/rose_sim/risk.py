"""How many requests are late, and between which shares that lies.

Late requests come in clusters, of a burst or a busy minute: intervals that take each request for itself are
too narrow.  Here blocks of time are drawn again and again, with replacement and all their requests (a block
bootstrap; Künsch, Annals of Statistics 17, 1989), and the exact binomial interval is the least.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from rose_sim.loop import PS_PER_S, stream

BLOCK_S = 60
DRAWS = 2000
_QUANTILES = (2.5, 97.5)


class Risk(NamedTuple):
    """A share of requests, with its 95% interval."""

    share: float
    low: float
    high: float


class Lateness:
    """Answered requests by the minute of their arrival, and those over budget among them."""

    def __init__(self, ttft_ms: float, tpot_ms: float) -> None:
        self._ttft_ms, self._tpot_ms = ttft_ms, tpot_ms
        self._blocks: dict[int, list[int]] = {}

    def answered(self, came_ps: int, ttft_ms: float, tpot_ms: float) -> None:
        """A request that came then is complete; `tpot_ms` is 0 for an answer of one token."""
        block = self._blocks.setdefault(came_ps // (BLOCK_S * PS_PER_S), [0, 0])
        block[0] += 1
        block[1] += ttft_ms > self._ttft_ms or tpot_ms > self._tpot_ms

    def counts(self, blocks: int) -> NDArray[np.int64]:
        """(blocks, 2): requests, and late ones, of each of the first blocks."""
        found = np.zeros((blocks, 2), dtype=np.int64)
        for block, (requests, late) in self._blocks.items():
            found[block] += requests, late
        return found

    @property
    def blocks(self) -> int:
        """Up to and with the last one that has a request."""
        return max(self._blocks, default=-1) + 1


def late_share(lateness: Lateness, seed: int) -> Risk:
    """The share of late requests."""
    counts = lateness.counts(lateness.blocks)
    requests, late = (int(total) for total in counts.sum(axis=0))
    if not requests:
        return Risk(0.0, 0.0, 1.0)
    drawn = _drawn(counts, seed)
    low, high = np.percentile(_shares(drawn), _QUANTILES)
    exact = clopper_pearson(late, requests)
    return Risk(late / requests, min(float(low), exact[0]), max(float(high), exact[1]))


def added_share(beside: Lateness, alone: Lateness, seed: int) -> Risk:
    """By how much the share of late requests grew over serving alone, block by block of the same arrivals."""
    blocks = max(beside.blocks, alone.blocks)
    both = np.concatenate([beside.counts(blocks), alone.counts(blocks)], axis=1)
    requests, late, requests_alone, late_alone = (int(total) for total in both.sum(axis=0))
    if not requests or not requests_alone:
        return Risk(0.0, 0.0, 1.0)
    drawn = _drawn(both, seed)
    low, high = np.percentile(_shares(drawn[:, :2]) - _shares(drawn[:, 2:]), _QUANTILES)
    # However few blocks differ, so many late ones more could have come by chance.
    more = max(0, late - late_alone)
    exact = clopper_pearson(more, requests)[1]
    return Risk(late / requests - late_alone / requests_alone, float(low), max(float(high), exact))


def clopper_pearson(late: int, total: int) -> tuple[float, float]:
    """Exact 95% interval of a share, of requests that are late independently of each other."""
    if total == 0:
        return 0.0, 1.0
    low = 0.0 if late == 0 else float(beta.ppf(0.025, late, total - late + 1))
    high = 1.0 if late == total else float(beta.ppf(0.975, late + 1, total - late))
    return low, high


def _drawn(counts: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """(DRAWS, columns): sums over as many blocks as there are, drawn with replacement."""
    blocks = len(counts)
    times = stream(seed, "blocks").multinomial(blocks, np.full(blocks, 1 / blocks), size=DRAWS)
    drawn: NDArray[np.int64] = times @ counts
    return drawn


def _shares(sums: NDArray[np.int64]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = sums[:, 1] / np.maximum(1, sums[:, 0])
    return shares
