"""Who may use a GPU that serving and rollout share: one policy object for each device.

`Gated` is ROSE: it asks the very AdmissionGate and MemoryPolicy that run on a serving host.  The others stand
for the systems ROSE is compared with; each says what it assumes.
"""

from __future__ import annotations

from collections.abc import Callable

from rose.core.admission import LEASE_NS_MAX, AdmissionGate
from rose.core.memory import MemoryPolicy, MemoryReading, MemorySettings, MemoryState
from rose.core.readings import NEVER, GateMode, GatePolicy, SlackReading
from rose.core.slo import SlackTracker, SloBudgets
from rose.units import ms_to_ns
from rose_sim.costs import StepCost
from rose_sim.engine import ALONE, Engine
from rose_sim.kv import BLOCK_TOKENS
from rose_sim.loop import PS_PER_NS, Loop
from rose_sim.paper_gate import PaperGate
from rose_sim.scenario import Scenario
from rose_sim.steps import Request

BESIDE = 3
"""Halves: under MPS both decode at once.  Each alone takes about 3/4 of the memory bandwidth (the
decode tables against the peak), so that together they need 3/2 of it and each step takes 3/2 as long."""
TURNS = 4
"""Halves: without MPS the device gives each its turn, so that a step takes twice as long."""

Interrupt = Callable[[Request, int, str], None]


class Sharing:
    """Base: a serving engine that has its GPU for itself."""

    def __init__(self, loop: Loop, serving: Engine, rollout: Engine | None) -> None:
        self.loop = loop
        self.serving = serving
        self.rollout = rollout
        self.interrupt: Interrupt | None = None
        """Told of rollout requests that had to end early: (request, tokens it got, reason)."""
        self.gate_open_ps = 0
        self.cuts = 0

    def arriving(self, request: Request) -> None:
        """A serving request is about to be submitted."""

    def arrived(self, request: Request) -> None:
        """It was."""

    def first_token(self, request: Request) -> None:
        """A serving request got its first token."""

    def finished(self, request: Request) -> None:
        """A serving request is complete."""

    def step_began(self) -> None:
        """An RL step begins."""

    def gate_open(self) -> bool:
        """Whether rollout may run at the moment."""
        return True

    def opened_ps(self) -> int:
        """For how long rollout was let run, up to now."""
        return self.gate_open_ps

    def loaded(self) -> bool:
        """Whether the serving model is on the device."""
        return True


class Contending(Sharing):
    """Both engines run whenever they have work; the device takes turns between them.

    While both have work, each step takes twice as long.  Nothing is reserved and nothing gives way: this is
    co-location without a policy, and what Prism's sharing comes to for a second model whose load has no
    deadline of its own.  With `eviction`, a serving model that had no request for the first of the two times
    is evicted; loading it again takes the second.
    """

    def __init__(
        self, loop: Loop, serving: Engine, rollout: Engine, eviction: tuple[int, int] | None = None
    ) -> None:
        super().__init__(loop, serving, rollout)
        self._shared = False
        self._eviction = eviction
        self._loaded = True
        self._idle_mark = 0
        serving.changed = rollout.changed = self._changed
        self._watch()

    def arriving(self, request: Request) -> None:
        """Wait for the step in flight of the other engine, and for the model if it was evicted."""
        assert self.rollout is not None
        self._idle_mark += 1
        if self.rollout.in_step and not self.serving.load:
            self.serving.hold(self.rollout.step_end_ps())
        if not self._loaded:
            assert self._eviction is not None
            self._loaded = True
            self.cuts += 1
            self.serving.hold(self.loop.now_ps + self._eviction[1])

    def finished(self, request: Request) -> None:
        """Watch for idleness."""
        self._watch()

    def loaded(self) -> bool:
        """Whether the serving model is on the device."""
        return self._loaded

    def _watch(self) -> None:
        if self._eviction is not None and self.serving.load == 0:
            self._idle_mark += 1
            self.loop.after(self._eviction[0], self._idle, self._idle_mark)

    def _idle(self, _now_ps: int, mark: object) -> None:
        if mark == self._idle_mark:
            self._loaded = False

    def _changed(self, _now_ps: int) -> None:
        assert self.rollout is not None
        both = self.serving.load > 0 and self.rollout.load > 0
        if both != self._shared:
            self._shared = both
            self.serving.share(TURNS if both else ALONE)
            self.rollout.share(TURNS if both else ALONE)


class Gated(Sharing):
    """ROSE: rollout runs while the admission gate lets it, and gives memory back when serving needs it."""

    def __init__(
        self,
        loop: Loop,
        serving: Engine,
        rollout: Engine,
        scenario: Scenario,
        *,
        memory_bytes: int,
        weights_bytes: int,
        kv_bytes: tuple[int, int],
    ) -> None:
        super().__init__(loop, serving, rollout)
        spec = scenario.rollout
        self._rollout = rollout
        self._kv_serving, self._kv_rollout = kv_bytes
        self._total_bytes = memory_bytes
        self._weights_bytes = weights_bytes
        budgets = SloBudgets(ms_to_ns(scenario.serving.ttft_ms), ms_to_ns(scenario.serving.tpot_ms))
        self._tracker = SlackTracker(budgets)
        self.gate = PaperGate(step_tokens_max=spec.token_cap)
        _profile(self.gate, rollout.cost, spec.token_cap)
        self._policy = GatePolicy(
            revision=1,
            mode=int(GateMode[spec.gate_mode.upper()]),
            token_cap=spec.token_cap,
            kv_budget_blocks=0,
            rl_step=0,
            alive_until_ns=0,
            ttft_slo_ns=budgets.ttft_ns,
            tpot_slo_ns=budgets.tpot_ns,
            margin_ns=ms_to_ns(spec.margin_ms),
        )
        block_bytes = self._kv_rollout * BLOCK_TOKENS
        settings = MemorySettings(headroom_share=spec.headroom_share, block_bytes=block_bytes)
        self.memory = MemoryPolicy(settings)
        self.memory.sized(rollout.kv.capacity // BLOCK_TOKENS)
        self._valid_until_ns = NEVER
        self._timer = False
        self._opened_ps: int | None = None
        self._busy = False
        self._told: dict[str, int] = {}
        """Output tokens of decoding serving requests that the tracker knows of."""
        self._by_slack = self._policy.mode == GateMode.SLACK
        serving.changed = self._serving_changed
        self._ask(0)

    def arriving(self, request: Request) -> None:
        """Close the gate; the step in flight ends first."""
        now_ns = self.loop.now_ns
        self._tracker.arrived(str(request.owner), now_ns, request.prompt)
        self._busy = True
        self._ask(1)
        if self._rollout.in_step:
            self.serving.hold(self._rollout.step_end_ps())

    def arrived(self, request: Request) -> None:
        """Its KV may have grown into the headroom."""
        self._observe_memory()

    def first_token(self, request: Request) -> None:
        """The tracker learns of it."""
        name = str(request.owner)
        self._tracker.scheduled(name, request.started_ps // PS_PER_NS)
        self._tracker.produced(name, self.loop.now_ns, 1)
        self._told[name] = 1

    def finished(self, request: Request) -> None:
        """The tracker forgets it."""
        name = str(request.owner)
        self._tracker.produced(name, self.loop.now_ns, request.output - self._told.pop(name))
        self._tracker.finished(name)

    def step_began(self) -> None:
        """Thaw the budget."""
        if self.memory.state is MemoryState.NORMAL and self.memory.budget_blocks == self.memory.total_blocks:
            return
        self.memory.step_began()
        self._observe_memory()
        self._rollout.kv.resize(max(self._rollout.kv.running, self.memory.budget_blocks * BLOCK_TOKENS))

    def gate_open(self) -> bool:
        """Whether the gate is open."""
        return self._rollout.allowed > 0

    def opened_ps(self) -> int:
        """For how long the gate was open, up to now."""
        since = self.loop.now_ps if self._opened_ps is None else self._opened_ps
        return self.gate_open_ps + self.loop.now_ps - since

    # ---- the gate ----------------------------------------------------------------------------------

    def _serving_changed(self, _now_ps: int) -> None:
        busy = self.serving.load > 0
        if busy != self._busy or self._by_slack:
            self._busy = busy
            self._ask(0)

    def _ask(self, coming: int) -> None:
        """Ask the gate; `coming` serving requests are about to be submitted."""
        now_ns = self.loop.now_ns
        # rosed is alive, so the lease is always fresh; it is renewed when the answer runs out.
        policy = self._policy._replace(alive_until_ns=now_ns + LEASE_NS_MAX)
        if self._by_slack:
            self._catch_up(now_ns)
        answer = self.gate.decide(self._slack(now_ns, coming), policy, now_ns)
        self._valid_until_ns = answer.valid_until_ns
        now_ps = self.loop.now_ps
        if answer.tokens and self._opened_ps is None:
            self._opened_ps = now_ps
        elif not answer.tokens and self._opened_ps is not None:
            self.gate_open_ps += now_ps - self._opened_ps
            self._opened_ps = None
        self._rollout.allow(answer.tokens)
        beside = answer.tokens and self.serving.load + coming and self._rollout.load
        contended = BESIDE if beside else ALONE
        self.serving.share(contended)
        self._rollout.share(contended)
        if answer.tokens and answer.valid_until_ns < NEVER and not self._timer:
            self._timer = True
            self.loop.at(answer.valid_until_ns * PS_PER_NS + PS_PER_NS, self._expired)

    def _catch_up(self, now_ns: int) -> None:
        """Tell the tracker of the tokens given since it was last asked: deadlines move with them."""
        serving = self.serving
        decoding = serving.decoding()
        for request in decoding:
            name, done = str(request.owner), serving.tokens_done(request)
            self._tracker.produced(name, now_ns, done - self._told[name])
            self._told[name] = done
        if decoding:
            context = sum(request.prompt + self._told[str(request.owner)] for request in decoding)
            step_ps = serving.cost.decode_ps(len(decoding), context)
            self.gate.decode_step_ns = step_ps * serving.halves // (2 * PS_PER_NS)

    def _expired(self, now_ps: int, _: object) -> None:
        """An answer ran out: ask again, unless a newer one stands."""
        self._timer = False
        if not self._rollout.allowed:
            return
        if self._valid_until_ns * PS_PER_NS < now_ps:
            self._ask(0)
        else:
            self._timer = True
            self.loop.at(self._valid_until_ns * PS_PER_NS + PS_PER_NS, self._expired)

    def _slack(self, now_ns: int, coming: int) -> SlackReading:
        serving, tracker = self.serving, self._tracker
        return SlackReading(
            stamp_ns=now_ns,
            waiting=serving.waiting + coming,
            running=serving.running,
            pending_prefill_tokens=tracker.pending_prefill_tokens,
            kv_used_blocks=serving.kv.used // BLOCK_TOKENS,
            kv_total_blocks=serving.kv.capacity // BLOCK_TOKENS,
            ttft_deadline_ns=tracker.ttft_deadline_ns(),
            tpot_deadline_ns=tracker.tpot_deadline_ns(),
            in_step=int(serving.in_step),
            step_start_ns=0,
            step_end_ns=0,
            steps=serving.steps,
            busy_ns=serving.busy_ps // PS_PER_NS,
            prefill_p99_ns=tracker.prefill_p99_ns(),
            arrivals=0,
            preemptions=0,
            overhead_ns=0,
            # Predictions are left out: the paper's gate knows the cost model itself.
            prefill_predicted_ns=0,
            decode_predicted_ns=0,
            drift_permille=1000,
        )

    # ---- memory ------------------------------------------------------------------------------------

    def _observe_memory(self) -> None:
        serving_bytes = self.serving.kv.used * self._kv_serving
        free = self._total_bytes - self._weights_bytes - serving_bytes
        free -= self._rollout.kv.used * self._kv_rollout
        reading = MemoryReading(serving_bytes, max(0, free), self._total_bytes)
        cut = self.memory.observed(reading, self.loop.now_ns)
        if cut is None:
            return
        self.cuts += 1
        budget = cut.after_blocks * BLOCK_TOKENS
        engine = self._rollout
        while engine.kv.running > budget:
            victim = engine.requests()[-1]
            tokens = engine.abort(victim)
            if self.interrupt is not None and victim.finished_ps < 0:
                self.interrupt(victim, tokens, "rose:kv_budget_cut")
        engine.kv.resize(budget)
        self.memory.applied(self.loop.now_ns)


def _profile(gate: AdmissionGate, cost: StepCost, token_cap: int) -> None:
    """The offline profile that T-hat starts from: chunks beside a half-full batch."""
    tokens = 1
    while tokens <= token_cap:
        duration_ps = cost.prefill_ps(tokens, 8192) + cost.context[8] * 8 * 8192
        for _ in range(4):
            gate.observe_step(tokens, duration_ps // PS_PER_NS)
        tokens *= 2


class Swapping(Sharing):
    """One model on the device at a time (ServerlessLLM with rollout as a second model).

    A serving request that finds rollout there ends it (its requests go elsewhere and are prefilled anew), and
    waits until the serving model is loaded; rollout comes back when serving has been idle for `keep_alive`
    and its model is loaded again.
    """

    def __init__(
        self, loop: Loop, serving: Engine, rollout: Engine, *, load_ps: tuple[int, int], keep_alive_ps: int
    ) -> None:
        super().__init__(loop, serving, rollout)
        self._rollout = rollout
        self._load_serving_ps, self._load_rollout_ps = load_ps
        self._keep_alive_ps = keep_alive_ps
        self.serves = False
        """The serving model is on the device, or on its way there."""
        self.evict: Callable[[], None] | None = None
        self.restore: Callable[[], None] | None = None
        self._idle_mark = 0

    def arriving(self, request: Request) -> None:
        """Take the device from rollout."""
        self._idle_mark += 1
        if not self.serves:
            self.serves = True
            self.cuts += 1
            if self.evict is not None:
                self.evict()
            self.serving.hold(self.loop.now_ps + self._load_serving_ps)

    def finished(self, request: Request) -> None:
        """Give it back after a while."""
        if self.serving.load == 0:
            self._idle_mark += 1
            self.loop.after(self._keep_alive_ps, self._idle, self._idle_mark)

    def _idle(self, _now_ps: int, mark: object) -> None:
        if mark == self._idle_mark and self.serves:
            self.loop.after(self._load_rollout_ps, self._loaded, mark)

    def _loaded(self, _now_ps: int, mark: object) -> None:
        if mark == self._idle_mark and self.serves:
            self.serves = False
            if self.restore is not None:
                self.restore()

    def gate_open(self) -> bool:
        """Whether rollout has the device."""
        return not self.serves

    def loaded(self) -> bool:
        """Whether serving has it."""
        return self.serves
