"""SLO budgets of the serving engine, and the slack its requests have left.

Time to first token: a request must have its first token by arrival + B_TTFT.  Time per output token is
what a client sees, (t_last - t_first) / (n - 1), so token n + 1 must come by t_first + n * B_TPOT; and no
single gap may grow beyond 2 * B_TPOT, however much time was saved before (paper, slack section; the
second bound is ours).

The published deadlines are already reduced by predicted time: they are the latest instants at which the
serving engine must have the device, so that slack is simply `deadline - now` (paper: S_prf, S_dec).  For a
prefill that is the time of the whole queue ahead of it (first come, first served), not its own alone.

Budgets may differ from request to request (`SloTable`): each is held to those of its own class.

The tracker runs inside the serving engine's scheduler: every call is amortised O(log n) or better.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

import msgspec

from rose.core.latency import ServingLatency, WindowQuantile
from rose.core.pace import DecodePace, TrackedRequest
from rose.core.readings import NEVER, ServedRequest

PREFILL_WINDOW = 256
PREFILL_QUANTILE = 0.99
QUEUE_SCAN_MAX = 16
"""Waiting requests whose deadlines are computed one by one; all further ones get one lower bound."""
STEP_TOKENS_MAX = 512
_HEAP_SLACK = 64


class SloBudgets(msgspec.Struct, frozen=True):
    """What serving promises its users."""

    ttft_ns: int
    tpot_ns: int

    def __post_init__(self) -> None:
        if self.ttft_ns <= 0 or self.tpot_ns <= 0:
            raise ValueError(f"budgets must be above 0, not TTFT {self.ttft_ns} ns, TPOT {self.tpot_ns} ns")


class Slack(NamedTuple):
    """What the board says of slack; the fields of the same names of `SlackReading`."""

    ttft_deadline_ns: int
    tpot_deadline_ns: int
    prefill_predicted_ns: int
    decode_predicted_ns: int
    drift_permille: int


class SloTable:
    """The budgets of one serving engine, by model and request class.

    Keys are `class`, or `model/class` for one of the models that an engine serves (its adapters); `model/` is
    what requests of no class get there.  What is not in the table falls back to the class on any model, then
    to the model, then to the default: an unknown class never gets a budget that nobody configured.
    """

    def __init__(self, default: SloBudgets, classes: Mapping[str, SloBudgets] | None = None) -> None:
        self.default = default
        self._classes = dict(classes or {})

    def budgets(self, slo_class: str = "", model: str = "") -> SloBudgets:
        """Those of a request."""
        if not self._classes:
            return self.default
        slo_class = "" if "/" in slo_class else slo_class
        for key in (f"{model}/{slo_class}", slo_class, f"{model}/"):
            if (found := self._classes.get(key)) is not None:
                return found
        return self.default

    def knows(self, slo_class: str) -> bool:
        """Whether any model has such a class."""
        return bool(slo_class) and any(key.rpartition("/")[2] == slo_class for key in self._classes)

    @property
    def tightest_ttft_ns(self) -> int:
        """What a request may ask for that arrives the moment after."""
        return min(budgets.ttft_ns for budgets in (self.default, *self._classes.values()))


class SlackTracker:
    """The earliest deadlines over all requests of one serving engine.

    Instants are CLOCK_MONOTONIC nanoseconds; where `now_ns` runs backwards it is taken as the latest one
    seen.  Unknown request ids are ignored, and `arrived`, `scheduled` and `finished` are idempotent.
    Until `latency` has seen enough steps its predictions are 0, and deadlines are not reduced.
    """

    def __init__(
        self, budgets: SloBudgets, step_tokens_max: int = STEP_TOKENS_MAX, *, overlaps: bool = False
    ) -> None:
        self.latency = ServingLatency(step_tokens_max, overlaps=overlaps)
        self._budgets = budgets
        self._paces = {budgets.tpot_ns: DecodePace(budgets.tpot_ns)}
        self._requests: dict[str, TrackedRequest] = {}
        self._awaiting: dict[str, TrackedRequest] = {}  # no first token yet; in order of arrival
        self._prefilling: dict[str, None] = {}  # those of them whose prefill began
        self._prompts = WindowQuantile(PREFILL_WINDOW, PREFILL_QUANTILE)
        self._prefill = WindowQuantile(PREFILL_WINDOW, PREFILL_QUANTILE)
        self._now_ns = 0
        self._rounds = self._round_ns = 0
        self._known: Slack | None = None
        self._prefill_p99_predicted_ns: int | None = None
        self._pending_prefill_tokens = 0
        self._decoding = 0
        self._ttft_heap: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def pending_prefill_tokens(self) -> int:
        """Prompt tokens that are still to be computed for the requests without a first token."""
        return self._pending_prefill_tokens

    @property
    def awaiting(self) -> int:
        """Requests that have no first token yet."""
        return len(self._awaiting)

    @property
    def prefilling(self) -> Collection[str]:
        """Ids of those of them whose prefill began."""
        return self._prefilling.keys()

    @property
    def decoding(self) -> int:
        """Requests that have a first token, and are not finished."""
        return self._decoding

    def arrived(
        self, request_id: str, arrival_ns: int, prompt_tokens: int, budgets: SloBudgets | None = None
    ) -> None:
        """A request came in at `arrival_ns`; `budgets` are its own, if not those of all."""
        if request_id in self._requests:
            return
        self._known = self._prefill_p99_predicted_ns = None
        ttft_ns, tpot_ns = (budgets or self._budgets).ttft_ns, (budgets or self._budgets).tpot_ns
        pace = self._paces.get(tpot_ns)
        if pace is None:
            pace = self._paces[tpot_ns] = DecodePace(tpot_ns)
        request = TrackedRequest(arrival_ns, max(0, prompt_tokens), ttft_ns, pace)
        self._requests[request_id] = request
        self._awaiting[request_id] = request
        self._prompts.add(request.prompt_left)
        self._pending_prefill_tokens += request.prompt_left
        heappush(self._ttft_heap, (arrival_ns + ttft_ns, request_id))
        if len(self._ttft_heap) > 2 * len(self._requests) + _HEAP_SLACK:
            self._ttft_heap = [entry for entry in self._ttft_heap if self._awaits_first(entry)]
            heapify(self._ttft_heap)

    def scheduled(self, request_id: str, now_ns: int, cached_tokens: int = 0) -> None:
        """The request's prefill began, `cached_tokens` of it already computed; only the first call counts."""
        request = self._requests.get(request_id)
        if request is not None and request.scheduled_ns is None:
            request.scheduled_ns = self._advance(now_ns)
            self._take_off(request, cached_tokens)
            if not request.tokens:
                self._prefilling[request_id] = None

    def prefilled(self, request_id: str, tokens: int) -> None:
        """A chunk of the request's prompt was computed."""
        request = self._awaiting.get(request_id)
        if request is not None:
            self._take_off(request, tokens)

    def _take_off(self, request: TrackedRequest, tokens: int) -> None:
        self._known = None
        tokens = min(request.prompt_left, max(0, tokens))
        request.prompt_left -= tokens
        self._pending_prefill_tokens -= tokens

    def produced(self, request_id: str, now_ns: int, tokens: int) -> None:
        """The request got `tokens` new output tokens."""
        request = self._requests.get(request_id)
        if request is None or tokens <= 0:
            return
        self._known = None
        request.last_ns = self._advance(now_ns)
        first = request.tokens == 0
        request.tokens += tokens
        if first:
            self._first_token(request_id, request)
        else:
            request.pace.produced(request_id)

    def round_produced(self, now_ns: int) -> None:
        """Every decoding request got exactly one token.  As `produced` for each, at a constant cost."""
        self._known = None
        self._rounds += 1
        self._round_ns = self._advance(now_ns)

    def _first_token(self, request_id: str, request: TrackedRequest) -> None:
        request.first_ns = request.last_ns
        request.rounds = self._rounds
        self._leave_queue(request_id, request)
        if request.scheduled_ns is not None:
            self._prefill.add(request.first_ns - request.scheduled_ns)
        request.pace.begin(request_id, request)
        self._decoding += 1

    def finished(self, request_id: str) -> ServedRequest | None:
        """The request ended, in whatever way; what it got (with number 0), or None if it is not known."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self._known = None
        if request.tokens == 0:
            self._leave_queue(request_id, request)
            first_ns, last_ns, rounds = 0, max(self._now_ns, request.arrival_ns), 0
        else:
            request.pace.end(request_id)
            self._decoding -= 1
            rounds = self._rounds - request.rounds
            first_ns, last_ns = request.first_ns, max(request.last_ns, self._round_ns if rounds else 0)
        tokens = request.tokens + rounds
        budgets = request.ttft_ns, request.pace.tpot_ns
        return ServedRequest(0, request.arrival_ns, first_ns, last_ns, tokens, *budgets)

    def _leave_queue(self, request_id: str, request: TrackedRequest) -> None:
        del self._awaiting[request_id]
        self._prefilling.pop(request_id, None)
        self._pending_prefill_tokens -= request.prompt_left

    def observe_step(
        self, prompt_tokens: int, decodes: int, duration_ns: int, *, co_running: int = 0
    ) -> None:
        """Calibrate `latency` by a step."""
        self._known = self._prefill_p99_predicted_ns = None
        self.latency.observe(prompt_tokens, decodes, duration_ns, co_running=co_running)

    def slack(self) -> Slack:
        """All that follows; computed anew only after something changed (do not teach `latency` directly)."""
        if self._known is None:
            self._known = Slack(
                self.ttft_deadline_ns(),
                self.tpot_deadline_ns(),
                self.prefill_p99_predicted_ns(),
                self.decode_ns(),
                self.latency.drift_permille,
            )
        return self._known

    def ttft_deadline_ns(self) -> int:
        """Latest instant to give the device to the waiting prefills so that all keep B_TTFT, or NEVER.

        The minimum, over the requests without a first token, of arrival + B_TTFT less T_prefill of all prompt
        tokens up to and with its own, and less the model's margin.  Behind QUEUE_SCAN_MAX requests, the
        earliest deadline of all and the whole queue's tokens stand in: never later than the exact value.
        """
        due_ns = self._ttft_due_ns()
        if due_ns == NEVER:
            return NEVER
        prefill_ns = self.latency.prefill_ns
        earliest_ns, ahead_tokens = NEVER, 0
        for request in islice(self._awaiting.values(), QUEUE_SCAN_MAX):
            ahead_tokens += request.prompt_left
            earliest_ns = min(earliest_ns, request.arrival_ns + request.ttft_ns - prefill_ns(ahead_tokens))
        if len(self._awaiting) > QUEUE_SCAN_MAX:
            earliest_ns = min(earliest_ns, due_ns - prefill_ns(self._pending_prefill_tokens))
        return earliest_ns - self.latency.prefill_margin_ns()

    def tpot_deadline_ns(self) -> int:
        """Latest instant to give the device to the decoding requests so that all keep B_TPOT, or NEVER.

        The minimum of min(t_first + n * B_TPOT, t_last + 2 * B_TPOT), less T_decode of the batch, and less
        the model's margin.
        """
        due_ns = self._tpot_due_ns()
        if due_ns == NEVER:
            return NEVER
        return due_ns - self.decode_ns() - self.latency.decode_margin_ns()

    def decode_ns(self) -> int:
        """T_decode of the requests that decode now; 0 if there is none, or it is not known."""
        return self.latency.decode_ns(self._decoding)

    def prefill_p99_predicted_ns(self) -> int:
        """T_prefill of the upper quantile of prompt lengths, with the model's margin; 0 if not known."""
        known_ns = self._prefill_p99_predicted_ns
        if known_ns is None:
            known_ns = self.latency.prefill_ns(self._prompts.value())
            if known_ns:
                known_ns += self.latency.prefill_margin_ns()
            self._prefill_p99_predicted_ns = known_ns
        return known_ns

    def _ttft_due_ns(self) -> int:
        """Earliest arrival + B_TTFT over the requests without a first token, or NEVER."""
        heap = self._ttft_heap
        while heap and not self._awaits_first(heap[0]):
            heappop(heap)
        return heap[0][0] if heap else NEVER

    def _tpot_due_ns(self) -> int:
        """Earliest instant by which some decode must have its next token, or NEVER."""
        if len(self._paces) == 1:
            return self._paces[self._budgets.tpot_ns].due_ns(self._rounds, self._round_ns)
        return min(pace.due_ns(self._rounds, self._round_ns) for pace in self._paces.values())

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
        return deadline_ns == request.arrival_ns + request.ttft_ns
