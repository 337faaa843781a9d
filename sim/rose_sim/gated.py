"""ROSE on one device: the very AdmissionGate, SlackTracker and MemoryPolicy that run on a serving host."""

from __future__ import annotations

from rose.core.admission import LEASE_NS_MAX, AdmissionGate
from rose.core.memory import Cut, MemoryPolicy, MemoryReading, MemorySettings, MemoryState
from rose.core.readings import NEVER, GateMode, GatePolicy, GateReason, SlackReading
from rose.core.slo import SlackTracker, SloBudgets
from rose.units import ms_to_ns
from rose_sim.engine import ALONE, Engine
from rose_sim.kv import BLOCK_TOKENS
from rose_sim.loop import PS_PER_MS, PS_PER_NS, Loop
from rose_sim.profiles import profile_gate, profile_serving
from rose_sim.scenario import Scenario
from rose_sim.sharing import Sharing
from rose_sim.steps import Request

BESIDE = 3
"""Halves: under MPS both decode at once.  Each alone takes about 3/4 of the memory bandwidth (the
decode tables against the peak), so that together they need 3/2 of it and each step takes 3/2 as long."""


class Admitting(Sharing):
    """Rollout runs while the admission gate lets it; a rollout step in flight ends before serving begins."""

    def __init__(
        self,
        loop: Loop,
        serving: Engine,
        rollout: Engine,
        *,
        gate: AdmissionGate,
        tracker: SlackTracker,
        policy: GatePolicy,
    ) -> None:
        super().__init__(loop, serving, rollout)
        self.gate = gate
        self._rollout = rollout
        self._tracker = tracker
        self._policy = policy
        self._valid_until_ns = NEVER
        self._timer = False
        self._awaits_step = False
        self._opened_ps: int | None = None
        self._busy = False
        self._changes = 0
        """Of the serving engine's batch, when the gate was last asked for one."""
        self._told: dict[str, int] = {}
        """Output tokens of decoding serving requests that the tracker knows of."""
        self._by_slack = policy.mode == GateMode.SLACK
        serving.changed = self._serving_changed
        self._ask(0)

    def arriving(self, request: Request) -> None:
        """Close the gate; the step in flight ends first."""
        now_ns = self.loop.now_ns
        self._tracker.arrived(str(request.owner), now_ns, request.prompt - request.kept)
        self._busy = True
        if self._by_slack or self._rollout.allowed:  # else closed, and one more request opens nothing
            self._ask(1)
        self.make_way()

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

    def gate_open(self) -> bool:
        """Whether the gate is open."""
        return self._rollout.allowed > 0

    def opened_ps(self) -> int:
        """For how long the gate was open, up to now."""
        since = self.loop.now_ps if self._opened_ps is None else self._opened_ps
        return self.gate_open_ps + self.loop.now_ps - since

    def contend(self, beside: bool) -> None:
        """From now on both engines work at once, or no longer do."""
        halves = BESIDE if beside else ALONE
        self.serving.share(halves)
        self._rollout.share(halves)

    def make_way(self) -> None:
        """Serving waits for the rollout step in flight, if the gate is closed for it."""
        if self._rollout.in_step and not self._rollout.allowed:
            self.serving.hold(self._rollout.step_end_ps())

    def opens(self) -> None:
        """The gate opens at this instant."""

    # ---- inside ------------------------------------------------------------------------------------

    def _serving_changed(self, _now_ps: int) -> None:
        serving = self.serving
        busy = serving.load > 0
        if busy != self._busy or (self._by_slack and serving.changes != self._changes):
            self._busy, self._changes = busy, serving.changes
            self._ask(0)

    def _ask(self, coming: int) -> None:
        """Ask the gate; `coming` serving requests are about to be submitted."""
        now_ns = self.loop.now_ns
        if self._by_slack:
            self._catch_up(now_ns)
        answer = self.gate.decide(self._slack(now_ns, coming), self._leased(now_ns), now_ns)
        self._valid_until_ns = answer.valid_until_ns
        now_ps = self.loop.now_ps
        if answer.tokens and self._opened_ps is None:
            self._opened_ps = now_ps
            self.opens()
        elif not answer.tokens and self._opened_ps is not None:
            self.gate_open_ps += now_ps - self._opened_ps
            self._opened_ps = None
        self._rollout.allow(answer.tokens)
        self.contend(bool(answer.tokens and self.serving.load + coming and self._rollout.load))
        if answer.tokens and answer.valid_until_ns < NEVER and not self._timer:
            self._timer = True
            self.loop.at(answer.valid_until_ns * PS_PER_NS + PS_PER_NS, self._expired)
        if answer.reason is GateReason.SLACK_TOO_SMALL and not self._awaits_step:
            # Each token moves deadlines on, so that there may be slack again after the step in flight.
            self._awaits_step = True
            end_ps = max(self.serving.step_end_ps(), now_ps + PS_PER_MS // 10)
            self.loop.at(end_ps + PS_PER_NS, self._step_over)

    def _catch_up(self, now_ns: int) -> None:
        """Tell the tracker of the tokens given since it was last asked: deadlines move with them."""
        for request in self.serving.decoding():
            name, done = str(request.owner), self.serving.tokens_done(request)
            self._tracker.produced(name, now_ns, done - self._told[name])
            self._told[name] = done

    def _step_over(self, _now_ps: int, _: object) -> None:
        """Ask again, if the gate is still closed beside a batch that goes on."""
        self._awaits_step = False
        if not self._rollout.allowed and self.serving.load:
            self._ask(0)

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

    def _leased(self, now_ns: int) -> GatePolicy:
        """The policy with a fresh lease, as rosed is alive; it is renewed when the answer runs out.

        (`_replace` takes three times as long, and there is one for each change of serving.)
        """
        given = self._policy
        return GatePolicy(
            revision=given.revision,
            mode=given.mode,
            token_cap=given.token_cap,
            kv_budget_blocks=given.kv_budget_blocks,
            rl_step=given.rl_step,
            alive_until_ns=now_ns + LEASE_NS_MAX,
            ttft_slo_ns=given.ttft_slo_ns,
            tpot_slo_ns=given.tpot_slo_ns,
            margin_ns=given.margin_ns,
        )

    def _slack(self, now_ns: int, coming: int) -> SlackReading:
        """What the board would show; deadlines only where the mode goes by them, as they cost most."""
        serving, tracker = self.serving, self._tracker
        ttft_ns = tpot_ns = NEVER
        decode_ns = 0
        if self._by_slack:
            ttft_ns, tpot_ns, _, decode_ns, _ = tracker.slack()
        # Words that the gate does not go by are 0.
        return SlackReading(
            stamp_ns=now_ns,
            waiting=serving.waiting + coming,
            running=serving.running,
            pending_prefill_tokens=tracker.pending_prefill_tokens,
            kv_used_blocks=0,
            kv_total_blocks=0,
            ttft_deadline_ns=ttft_ns,
            tpot_deadline_ns=tpot_ns,
            in_step=int(serving.in_step),
            step_start_ns=0,
            step_end_ns=0,
            steps=0,
            busy_ns=0,
            prefill_p99_ns=0,
            arrivals=0,
            preemptions=0,
            overhead_ns=0,
            prefill_predicted_ns=tracker.prefill_p99_predicted_ns(),
            decode_predicted_ns=decode_ns,
            drift_permille=0,
            kv_resident_bytes=0,
        )


class Gated(Admitting):
    """ROSE: as the gate lets it, and memory goes back when serving needs it."""

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
        spec = scenario.rollout
        self._kv_serving, self._kv_rollout = kv_bytes
        self._total_bytes = memory_bytes
        self._weights_bytes = weights_bytes
        block_bytes = self._kv_rollout * BLOCK_TOKENS
        settings = MemorySettings(headroom_share=spec.headroom_share, block_bytes=block_bytes)
        self.memory = MemoryPolicy(settings)
        self.memory.sized(rollout.kv.capacity // BLOCK_TOKENS)
        budgets = SloBudgets(ms_to_ns(scenario.serving.ttft_ms), ms_to_ns(scenario.serving.tpot_ms))
        tracker = SlackTracker(budgets, serving.step_tokens_max, overlaps=True)
        gate = AdmissionGate(step_tokens_max=spec.token_cap, overlaps=True)
        profile_gate(gate, rollout.cost, spec.token_cap, BESIDE)
        profile_serving(tracker, serving.cost, serving.step_tokens_max, BESIDE)
        policy = gate_policy(spec.gate_mode, spec.token_cap, budgets, spec.margin_ms)
        super().__init__(loop, serving, rollout, gate=gate, tracker=tracker, policy=policy)

    def arrived(self, request: Request) -> None:
        """Its KV may have grown into the headroom."""
        self._observe_memory()

    def step_began(self) -> None:
        """Thaw the budget."""
        if self.memory.state is MemoryState.NORMAL and self.memory.budget_blocks == self.memory.total_blocks:
            return
        self.memory.step_began()
        self._observe_memory()
        self._rollout.kv.resize(max(self._rollout.kv.running, self.memory.budget_blocks * BLOCK_TOKENS))

    def _observe_memory(self) -> None:
        serving_bytes = self.serving.kv.used * self._kv_serving
        free = self._total_bytes - self._weights_bytes - serving_bytes
        free -= self._rollout.kv.used * self._kv_rollout
        reading = MemoryReading(serving_bytes, max(0, free), self._total_bytes)
        cut = self.memory.observed(reading, self.loop.now_ns)
        if cut is not None:
            self._carry_out(cut)

    def reclaim(self, reason: str) -> bool:
        """Somebody takes memory back; whether there was any to give in this RL step."""
        cut = self.memory.reclaim(reason)
        if cut is not None:
            self._carry_out(cut)
        return cut is not None

    def _carry_out(self, cut: Cut) -> None:
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


def gate_policy(mode: str, token_cap: int, budgets: SloBudgets, margin_ms: float) -> GatePolicy:
    """The policy that a rosed would write for a gate in that mode; its lease is set when it is used."""
    return GatePolicy(
        revision=1,
        mode=int(GateMode[mode.upper()]),
        token_cap=token_cap,
        kv_budget_blocks=0,
        rl_step=0,
        alive_until_ns=0,
        ttft_slo_ns=budgets.ttft_ns,
        tpot_slo_ns=budgets.tpot_ns,
        margin_ns=ms_to_ns(margin_ms),
    )
