"""SLO budgets of the serving engine, and the slack its requests have left.

Time to first token: a request must have its first token by arrival + B_TTFT.  Time per output token is
what a client sees, (t_last - t_first) / (n - 1), so token n + 1 must come by t_first + n * B_TPOT; and no
single gap may grow beyond 2 * B_TPOT, however much time was saved before (paper, slack section; the
second bound is ours).

The tracker runs inside the serving engine's scheduler: every call is amortised O(log n) or better.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace

import msgspec

from rose.core.latency import WindowQuantile
from rose.core.readings import NEVER

PREFILL_WINDOW = 256
PREFILL_QUANTILE = 0.99
_HEAP_SLACK = 64


class SloBudgets(msgspec.Struct, frozen=True):
    """What serving promises its users."""

    ttft_ns: int
    tpot_ns: int

    def __post_init__(self) -> None:
        if self.ttft_ns <= 0 or self.tpot_ns <= 0:
            raise ValueError(f"budgets must be above 0, not TTFT {self.ttft_ns} ns, TPOT {self.tpot_ns} ns")


class _Request:
    """What is known of one serving request."""

    __slots__ = ("arrival_ns", "first_ns", "last_ns", "prompt_tokens", "scheduled_ns", "tokens")

    def __init__(self, arrival_ns: int, prompt_tokens: int) -> None:
        self.arrival_ns = arrival_ns
        self.prompt_tokens = prompt_tokens
        self.scheduled_ns: int | None = None
        self.first_ns = 0
        self.last_ns = 0
        self.tokens = 0


class SlackTracker:
    """The earliest deadlines over all requests of one serving engine.

    Instants are CLOCK_MONOTONIC nanoseconds; where `now_ns` runs backwards it is taken as the latest one
    seen.  Unknown request ids are ignored, and `arrived`, `scheduled` and `finished` are idempotent.
    """

    def __init__(self, budgets: SloBudgets) -> None:
        self._budgets = budgets
        self._requests: dict[str, _Request] = {}
        self._prefill = WindowQuantile(PREFILL_WINDOW, PREFILL_QUANTILE)
        self._now_ns = 0
        self._pending_prefill_tokens = 0
        self._ttft_heap: list[tuple[int, str]] = []
        # Deadlines t_first + n * B only grow, so an entry may lag behind: it is a lower bound, brought up
        # to date when it reaches the top.  Ordering by t_last needs no heap: the last to produce goes last.
        self._pace_heap: list[tuple[int, str]] = []
        self._by_last: OrderedDict[str, _Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def pending_prefill_tokens(self) -> int:
        """Prompt tokens of the requests that have no first token yet."""
        return self._pending_prefill_tokens

    def arrived(self, request_id: str, arrival_ns: int, prompt_tokens: int) -> None:
        """A request came in at `arrival_ns`."""
        if request_id in self._requests:
            return
        request = self._requests[request_id] = _Request(arrival_ns, max(0, prompt_tokens))
        self._pending_prefill_tokens += request.prompt_tokens
        heappush(self._ttft_heap, (arrival_ns + self._budgets.ttft_ns, request_id))
        if len(self._ttft_heap) > 2 * len(self._requests) + _HEAP_SLACK:
            self._ttft_heap = [entry for entry in self._ttft_heap if self._awaits_first(entry)]
            heapify(self._ttft_heap)

    def scheduled(self, request_id: str, now_ns: int) -> None:
        """The request's prefill began; only the first call counts."""
        request = self._requests.get(request_id)
        if request is not None and request.scheduled_ns is None:
            request.scheduled_ns = self._advance(now_ns)

    def produced(self, request_id: str, now_ns: int, tokens: int) -> None:
        """The request got `tokens` new output tokens."""
        request = self._requests.get(request_id)
        if request is None or tokens <= 0:
            return
        request.last_ns = self._advance(now_ns)
        first = request.tokens == 0
        request.tokens += tokens
        if first:
            self._first_token(request_id, request)
        else:
            self._by_last.move_to_end(request_id)

    def _first_token(self, request_id: str, request: _Request) -> None:
        request.first_ns = request.last_ns
        self._pending_prefill_tokens -= request.prompt_tokens
        if request.scheduled_ns is not None:
            self._prefill.add(request.first_ns - request.scheduled_ns)
        self._by_last[request_id] = request
        heappush(self._pace_heap, (self._pace_deadline_ns(request), request_id))
        if len(self._pace_heap) > 2 * len(self._by_last) + _HEAP_SLACK:
            self._pace_heap = [
                (self._pace_deadline_ns(decoding), each) for each, decoding in self._by_last.items()
            ]
            heapify(self._pace_heap)

    def finished(self, request_id: str) -> None:
        """The request ended, in whatever way."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.tokens == 0:
            self._pending_prefill_tokens -= request.prompt_tokens
        self._by_last.pop(request_id, None)

    def ttft_deadline_ns(self) -> int:
        """Earliest arrival + B_TTFT over the requests without a first token, or NEVER."""
        heap = self._ttft_heap
        while heap and not self._awaits_first(heap[0]):
            heappop(heap)
        return heap[0][0] if heap else NEVER

    def tpot_deadline_ns(self) -> int:
        """Earliest min(t_first + n * B_TPOT, t_last + 2 * B_TPOT) over the decoding requests, or NEVER."""
        if not self._by_last:
            self._pace_heap.clear()
            return NEVER
        longest_silent = next(iter(self._by_last.values()))
        gap_deadline_ns = longest_silent.last_ns + 2 * self._budgets.tpot_ns
        heap = self._pace_heap  # holds an entry for every decoding request
        while heap[0][0] < gap_deadline_ns:
            lower_bound_ns, request_id = heap[0]
            request = self._by_last.get(request_id)
            if request is None:
                heappop(heap)
                continue
            deadline_ns = self._pace_deadline_ns(request)
            if deadline_ns == lower_bound_ns:
                return deadline_ns
            heapreplace(heap, (deadline_ns, request_id))
        return gap_deadline_ns

    def prefill_p99_ns(self) -> int:
        """Upper quantile of the time from first scheduling to first token; 0 until one was seen."""
        return self._prefill.value()

    def _advance(self, now_ns: int) -> int:
        self._now_ns = max(self._now_ns, now_ns)
        return self._now_ns

    def _awaits_first(self, entry: tuple[int, str]) -> bool:
        """Whether a heap entry still stands (an id may have been used again since)."""
        deadline_ns, request_id = entry
        request = self._requests.get(request_id)
        if request is None or request.tokens:
            return False
        return deadline_ns == request.arrival_ns + self._budgets.ttft_ns

    def _pace_deadline_ns(self, request: _Request) -> int:
        return request.first_ns + request.tokens * self._budgets.tpot_ns
