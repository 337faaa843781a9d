"""One simulated engine: continuous batching with chunked prefill, in aggregated steps.

A `Run` is a stretch of steps whose batch does not change: the i-th of them takes `first + i * more`
picoseconds (contexts grow by a token a step, a prefill by a chunk), so the whole stretch is one event.  A
newcomer, a closed gate or an abort cuts the run after the step in flight.  `single_steps` ends every run
after one step: slower, and equal to the picosecond.

Order of work is vLLM's: decodes go first, then prompts first come, first served, in chunks; several short
prompts share a step.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from rose_sim.costs import StepCost
from rose_sim.kv import KvLedger
from rose_sim.loop import Loop
from rose_sim.steps import Request, Run, Work

ALONE = 2
"""Two halves: a step takes the time that the cost model says."""


class Engine:
    """Takes requests and gives tokens, at the pace of its cost model."""

    def __init__(
        self,
        loop: Loop,
        name: str,
        cost: StepCost,
        *,
        kv_tokens: int,
        requests_max: int,
        step_tokens_max: int,
        on_first: Callable[[Request, int], None] | None = None,
        on_finish: Callable[[Request, int], None],
        keep_prefixes: bool = False,
        single_steps: bool = False,
    ) -> None:
        self.loop = loop
        self.name = name
        self.kv = KvLedger(kv_tokens, keep_prefixes=keep_prefixes)
        self.cost = cost
        self.step_tokens_max = step_tokens_max
        self.allowed = step_tokens_max
        """Most tokens of the next step; 0 while the gate is closed."""
        self.halves = ALONE
        """Steps take half of this many times as long: 2 alone, more while the device is shared."""
        self.changed: Callable[[int], None] | None = None
        """Told when the engine falls idle or gets work."""
        self.requests_max = requests_max
        self.load = 0
        """All requests in it, waiting or admitted."""
        self.changes = 0
        """Counts admissions, first tokens and ends: between two of them a batch only goes on."""
        self._on_first = on_first
        self._on_finish = on_finish
        self._single = single_steps
        self._waiting: deque[Request] = deque()
        self._prefilling: deque[Request] = deque()
        self._decoding: list[tuple[int, int, Request]] = []
        self._step = 0
        self._context = 0
        """Sum of the context lengths of decoding requests."""
        self._run: Run | None = None
        self._generation = 0
        self._numbers = 0
        self._hold_ps = 0
        self._settling = False
        # What it did since it came.
        self.steps = 0
        self.busy_ps = 0
        self.context_steps = 0
        """Sum over steps of the context lengths read."""
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.cached_tokens = 0

    # ---- what it holds -----------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests not admitted yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests admitted: prefilling or decoding."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def in_step(self) -> bool:
        """Whether a step is under way."""
        return self._run is not None

    def requests(self) -> list[Request]:
        """All requests in it, in order of arrival."""
        found = [*self._waiting, *self._prefilling, *(entry[2] for entry in self._decoding)]
        return sorted(found, key=lambda request: request.number)

    def work(self) -> Work:
        """What it did up to now, whole steps only."""
        batch, steps = len(self._decoding), 0
        run, busy, prefill = self._run, self.busy_ps, self.prefill_tokens
        if run is not None and self.loop.now_ps > run.start_ps:
            steps = run.complete(self.loop.now_ps)
            busy += run.total(steps)
            prefill += steps * run.chunk
        pairs = self._context * steps + batch * (steps * (steps - 1) // 2)
        return Work(
            self.steps + steps, busy, self.context_steps + pairs, prefill, self.decode_tokens + batch * steps
        )

    def decoding(self) -> list[Request]:
        """Requests that have their first token."""
        return [entry[2] for entry in self._decoding]

    def tokens_done(self, request: Request) -> int:
        """Output tokens that steps which are over have given."""
        if request.finish_step < 0:
            return 0
        step = self._step
        if self._run is not None:
            step += self._run.complete(self.loop.now_ps)
        return request.output - max(0, request.finish_step - step)

    # ---- orders ------------------------------------------------------------------------------------

    def submit(self, request: Request) -> bool:
        """Take a request; False if it can never fit."""
        if not self.kv.fits_ever(request.prompt + request.output):
            return False
        self._numbers += 1
        request.number = self._numbers
        request.engine = self
        request.sent_ps = self.loop.now_ps
        self._waiting.append(request)
        self.load += 1
        if self._settling:
            return True
        if self._run is None:
            self._plan()
            return True
        if self.allowed:
            self._admit()
        if self._prefilling and not self._run.chunk:
            self._cut()
        return True

    def allow(self, tokens: int) -> None:
        """Obey a gate: most tokens a step may have, 0 to stop after the step in flight."""
        tokens = min(tokens, self.step_tokens_max)
        if tokens == self.allowed:
            return
        self.allowed = tokens
        if self._settling:
            return
        if self._run is None:
            self._plan()
        else:
            self._cut()

    def share(self, halves: int) -> None:
        """From the next step on, steps take `halves` / 2 times as long."""
        if halves != self.halves:
            self.halves = halves
            if self._run is not None and not self._settling:
                self._cut()

    def hold(self, until_ps: int) -> None:
        """Start no step before `until_ps`: the device is busy with something else."""
        if until_ps > self._hold_ps:
            self._hold_ps = until_ps
            if self._run is not None and not self._settling:
                self._cut()

    def step_end_ps(self) -> int:
        """When the step in flight ends; now, if there is none."""
        run, now = self._run, self.loop.now_ps
        if run is None or now < run.start_ps:
            return now
        return min(run.end_ps, run.start_ps + run.total(run.complete(now) + 1))

    def abort(self, request: Request) -> int:
        """Drop a request at once; answers the output tokens it got.  What it had prefilled is lost."""
        assert request.engine is self, request.engine
        done = self.tokens_done(request)
        self._stop_run()
        if request.engine is self:  # else its last step ended this very instant
            self._remove(request, keep=0)
        if not self._settling:
            self._plan()
        return done

    def abort_all(self) -> list[tuple[Request, int]]:
        """Drop everything, prefixes too; answers the requests with the tokens they got."""
        self._stop_run()
        found = [(request, self.tokens_done(request)) for request in self.requests()]
        for request, _ in found:
            self._remove(request, keep=0)
        self.kv.clear()
        self._tell()
        return found

    def poke(self) -> None:
        """Room may have come: try to go on."""
        if self._run is None and not self._settling:
            self._plan()

    # ---- inside ------------------------------------------------------------------------------------

    def _cut(self) -> None:
        """End the run after the step in flight."""
        run, now = self._run, self.loop.now_ps
        assert run is not None
        steps = 1 if now < run.start_ps else run.complete(now) + 1
        if steps < run.steps:
            run.steps = steps
            run.end_ps = run.start_ps + run.total(steps)
            self._schedule(run)

    def _stop_run(self) -> None:
        """End the run now; the step in flight is lost."""
        run = self._run
        if run is None:
            return
        self._generation += 1
        self._run = None
        done = run.complete(self.loop.now_ps) if self.loop.now_ps > run.start_ps else 0
        self.busy_ps += max(0, self.loop.now_ps - run.start_ps)
        settling, self._settling = self._settling, True
        self._apply(run, done)
        self._settling = settling

    def _schedule(self, run: Run) -> None:
        self._generation += 1
        self.loop.at(run.end_ps, self._ended, self._generation)

    def _ended(self, now_ps: int, generation: object) -> None:
        run = self._run
        if generation != self._generation or run is None:
            return
        self._run = None
        self.busy_ps += run.end_ps - run.start_ps
        self._settling = True
        self._apply(run, run.steps)
        self._settling = False
        if self._run is None:
            self._plan()

    def _apply(self, run: Run, steps: int) -> None:
        """Book `steps` steps of a run: tokens, first tokens, ends."""
        if not steps:
            return
        batch = len(self._decoding)
        self.steps += steps
        self._step += steps
        if batch:
            self.context_steps += self._context * steps + batch * (steps * (steps - 1) // 2)
            self._context += batch * steps
            self.decode_tokens += batch * steps
        if run.chunk:
            self._prefilled(run, steps)
        decoding = self._decoding
        while decoding and decoding[0][0] <= self._step:
            request = heapq.heappop(decoding)[2]
            self._context -= request.prompt + request.output
            self._finish(request)

    def _prefilled(self, run: Run, steps: int) -> None:
        if not run.packed:
            head = self._prefilling[0]
            head.prefilled += steps * run.chunk
            self.prefill_tokens += steps * run.chunk
            return
        for request, tokens in run.packed:
            request.prefilled += tokens
            self.prefill_tokens += tokens
        now = self.loop.now_ps
        while self._prefilling and self._prefilling[0].prefilled == self._prefilling[0].prompt:
            request = self._prefilling.popleft()
            self.changes += 1
            request.first_ps = now
            request.finish_step = self._step + request.output - 1
            self.decode_tokens += 1
            self._context += request.prompt + 1
            heapq.heappush(self._decoding, (request.finish_step, request.number, request))
            if self._on_first is not None:
                self._on_first(request, now)

    def _finish(self, request: Request) -> None:
        request.finished_ps = self.loop.now_ps
        request.engine = None
        self.load -= 1
        self.changes += 1
        self.kv.release(request.key, request.reserved, request.prompt + request.output)
        self._on_finish(request, request.finished_ps)

    def _remove(self, request: Request, keep: int) -> None:
        """Take a request out, wherever it stands.  No run may be under way."""
        request.engine = None
        self.load -= 1
        self.changes += 1
        if request.started_ps < 0:
            self._waiting.remove(request)
            return
        if request.finish_step < 0:
            self._prefilling.remove(request)
        else:
            self._context -= request.prompt + request.output - (request.finish_step - self._step)
            self._decoding[:] = [entry for entry in self._decoding if entry[2] is not request]
            heapq.heapify(self._decoding)
        self.kv.release(request.key, request.reserved, keep)

    def _admit(self) -> None:
        now = self.loop.now_ps
        waiting = self._waiting
        while waiting and len(self._prefilling) + len(self._decoding) < self.requests_max:
            request = waiting[0]
            hit = self.kv.admit(request.key, request.prompt + request.output)
            if hit is None:
                return
            waiting.popleft()
            self.changes += 1
            request.reserved = request.prompt + request.output
            request.cached = min(max(hit, request.kept), request.prompt - 1)
            request.prefilled = request.cached
            request.started_ps = now
            self.cached_tokens += request.cached
            self._prefilling.append(request)

    def _plan(self) -> None:
        """Begin the next run, if there is work and leave to do it."""
        if self.allowed and self._waiting:
            self._admit()
        if not self.allowed or not (self._prefilling or self._decoding):
            self._tell()
            return
        now_ps, hold_ps = self.loop.now_ps, self._hold_ps
        self._run = run = self._next_run(max(hold_ps, now_ps))
        if self._single and run.steps > 1:
            run.steps = 1
            run.end_ps = run.start_ps + run.first
        self._schedule(run)
        if self.changed is not None:
            self.changed(now_ps)

    def _next_run(self, start_ps: int) -> Run:
        batch, cost, halves = len(self._decoding), self.cost, self.halves
        index = min(batch, len(cost.batch) - 1)
        if not self._prefilling:
            # A cap below the batch serves part of it in each step, in turn.
            if batch > self.allowed:
                halves *= -(-batch // self.allowed)
            first = cost.batch[index] + cost.context[index] * self._context + cost.overhead
            until_end = self._decoding[0][0] - self._step
            more = cost.context[index] * batch
            return Run(start_ps, first * halves // 2, more * halves // 2, until_end, 0)
        decode = cost.batch[index] - cost.batch[1] + cost.context[index] * self._context if batch else 0
        room = max(1, self.allowed - batch)
        head = self._prefilling[0]
        left = head.prompt - head.prefilled
        if left > room:
            steps = (left - 1) // room
            if batch:
                steps = min(steps, self._decoding[0][0] - self._step)
            first = cost.prefill_ps(room, head.prefilled) + decode
            more = cost.attention * room * room + cost.context[index] * batch
            return Run(start_ps, first * halves // 2, more * halves // 2, steps, room)
        return self._packed_step(start_ps, room, decode)

    def _packed_step(self, start_ps: int, room: int, decode: int) -> Run:
        """One step in which the head of the line ends its prefill, and others use what is left."""
        packed, total, pairs = [], 0, 0
        for request in self._prefilling:
            tokens = min(room - total, request.prompt - request.prefilled)
            if tokens <= 0:
                break
            packed.append((request, tokens))
            total += tokens
            pairs += 2 * tokens * request.prefilled + tokens * tokens
        cost = self.cost
        body = max(cost.base + total * cost.token, cost.floor) + cost.overhead
        duration = body + cost.attention * pairs // 2 + decode
        run = Run(start_ps, duration * self.halves // 2, 0, 1, total)
        run.packed = packed
        return run

    def _tell(self) -> None:
        if self.changed is not None:
            self.changed(self.loop.now_ps)
