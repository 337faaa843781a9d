"""When decoding requests must have their next token (paper: S_dec; the bound on single gaps is ours)."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace

from rose.core.readings import NEVER

_HEAP_SLACK = 64


class TrackedRequest:
    """What is known of one serving request."""

    __slots__ = (
        "arrival_ns", "first_ns", "last_ns", "pace", "prompt_left", "rounds", "scheduled_ns", "tokens",
        "ttft_ns",
    )  # fmt: skip

    def __init__(self, arrival_ns: int, prompt_tokens: int, ttft_ns: int, pace: DecodePace) -> None:
        self.arrival_ns = arrival_ns
        self.prompt_left = prompt_tokens
        self.ttft_ns = ttft_ns
        self.pace = pace
        self.scheduled_ns: int | None = None
        self.first_ns = 0
        self.last_ns = 0
        self.tokens = 0  # besides those of rounds
        self.rounds = 0  # those before its first token


class DecodePace:
    """The decoding requests of one TPOT budget.

    A round is a step that gave one token to every decoding request there is.  It is counted by the caller,
    once for all budgets, and costs nothing here.
    """

    def __init__(self, tpot_ns: int) -> None:
        self.tpot_ns = tpot_ns
        # Deadlines t_first + n * B, less what the rounds so far added to all of them.  They only grow, so an
        # entry may lag behind: it is a lower bound, brought up to date when it reaches the top.  Ordering by
        # t_last needs no heap: the last to produce goes last.
        self._heap: list[tuple[int, str]] = []
        self._by_last: OrderedDict[str, TrackedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_last)

    def begin(self, request_id: str, request: TrackedRequest) -> None:
        """The request has its first tokens."""
        self._by_last[request_id] = request
        heappush(self._heap, (self._due(request), request_id))
        if len(self._heap) > 2 * len(self._by_last) + _HEAP_SLACK:
            self._heap = [(self._due(decoding), each) for each, decoding in self._by_last.items()]
            heapify(self._heap)

    def produced(self, request_id: str) -> None:
        """The request got further tokens, later than all others of this budget."""
        self._by_last.move_to_end(request_id)

    def end(self, request_id: str) -> None:
        """The request decodes no more, if it ever did."""
        self._by_last.pop(request_id, None)

    def due_ns(self, rounds: int, round_ns: int) -> int:
        """Earliest instant by which some request must have its next token, or NEVER.

        `rounds` is how many there were, `round_ns` when the latest was.
        """
        if not self._by_last:
            self._heap.clear()
            return NEVER
        longest_silent = next(iter(self._by_last.values()))
        # All who decoded at the latest round got their last token then, or later.
        gap_deadline_ns = max(longest_silent.last_ns, round_ns) + 2 * self.tpot_ns
        rounds_ns = rounds * self.tpot_ns
        heap = self._heap  # holds an entry for every decoding request
        while heap[0][0] + rounds_ns < gap_deadline_ns:
            lower_bound, request_id = heap[0]
            request = self._by_last.get(request_id)
            if request is None:
                heappop(heap)
                continue
            due = self._due(request)
            if due == lower_bound:
                return due + rounds_ns
            heapreplace(heap, (due, request_id))
        return gap_deadline_ns

    def _due(self, request: TrackedRequest) -> int:
        """t_first + n * B_TPOT, less B_TPOT for each round there was."""
        return request.first_ns + (request.tokens - request.rounds) * self.tpot_ns
