"""A run of `rose bench coserve`, simulated: two engines on one core, and the real gate between them.

What the benchmark's load generator sent is the input; latencies and rollout throughput are what comes out.
Mode `priority` leaves sharing to the operating system's idle class, of which there is no model.
"""

from __future__ import annotations

from array import array

import msgspec
import numpy as np

from rose.core.admission import AdmissionGate
from rose.core.slo import SlackTracker, SloBudgets
from rose.units import ms_to_ns
from rose_sim.calibration import Calibration, ModeFit, to_ps
from rose_sim.engine import Engine
from rose_sim.gated import Admitting, gate_policy
from rose_sim.loop import PS_PER_MS, PS_PER_S, Loop, stream
from rose_sim.measured import ALONE, ROLLOUT_ALONE, MeasuredRun, Options
from rose_sim.sharing import Sharing
from rose_sim.steps import Request

GATES = {"naive": "open", "static": "open", "rose-strict": "strict", "rose-slack": "slack"}
"""Modes with both engines, and what their gates are told."""
MODES = (ALONE, ROLLOUT_ALONE, *GATES)
"""Modes that can be predicted."""
STEP_TOKENS_MAX = 512
SERVING_KV_TOKENS, ROLLOUT_KV_TOKENS = 8160, 32_736
SERVING_REQUESTS_MAX = 32
"""Shapes of the benchmark's engines (`rose_daemon.harness.stack`, `rose_daemon.bench.coserve`)."""
MARGIN_MS = 5.0
"""`admission.margin_ms` of the benchmark's configuration."""
RAMP_PS = 2 * PS_PER_S
"""Rollout load alone, before the first serving request."""


class Prediction(msgspec.Struct, frozen=True):
    """What a run is expected to show."""

    ttft_ms: list[float]
    tpot_ms: list[float]
    rollout_tokens_per_s: float


class Core(Admitting):
    """Both engines on one core: steps take longer while both work, and a gate that opens wakes its engine."""

    def __init__(
        self, loop: Loop, serving: Engine, rollout: Engine, *, options: Options, mode: str, found: Calibration
    ) -> None:
        fit = found.modes[mode]
        self._alone = (serving.cost, rollout.cost)
        self._shared = (
            serving.cost.scaled(prefill=fit.serving.prefill, decode=fit.serving.decode),
            rollout.cost.scaled(prefill=fit.rollout.prefill, decode=fit.rollout.decode),
        )
        self._wake_ps = to_ps(fit.wake_ms)
        budgets = SloBudgets(ms_to_ns(options.budgets[0]), ms_to_ns(options.budgets[1]))
        tracker = SlackTracker(budgets, STEP_TOKENS_MAX)
        for prompt, decodes, ns in found.serving_steps:
            tracker.observe_step(prompt, decodes, ns)
        gate = AdmissionGate(step_tokens_max=STEP_TOKENS_MAX)
        for tokens, ns in found.rollout_steps:
            gate.observe_step(tokens, ns)
        cap = options.static_tokens if mode == "static" else options.token_cap
        policy = gate_policy(GATES[mode], cap, budgets, MARGIN_MS)
        super().__init__(loop, serving, rollout, gate=gate, tracker=tracker, policy=policy)

    def contend(self, beside: bool) -> None:
        """Steps cost what was measured beside the other engine, or alone."""
        costs = self._shared if beside else self._alone
        self.serving.reprice(costs[0])
        self._rollout.reprice(costs[1])

    def opens(self) -> None:
        """The rollout engine finds out, and plans a step."""
        self._rollout.hold(self.loop.now_ps + self._wake_ps)


class _ServingClients:
    """Sends what the benchmark sent, at the times at which it did."""

    def __init__(self, loop: Loop, run: MeasuredRun, fit: ModeFit, rng: np.random.Generator) -> None:
        self.loop = loop
        self.device: Sharing | None = None
        self.ttft_ms = array("d")
        self.tpot_ms = array("d")
        answered = run.answered
        ways_in, ways_out = (_drawn(rng, each, len(answered)) for each in (fit.api_in_ms, fit.api_out_ms))
        self._out_ms = ways_out
        self._sent_ps: list[int] = []
        for number, (record, way_ms) in enumerate(zip(answered, ways_in, strict=True)):
            sent_ps = RAMP_PS + max(0, record.sent_ns - run.started_ns) * 1000
            self._sent_ps.append(sent_ps)
            request = Request(record.prompt_tokens, record.output_tokens, owner=number)
            loop.at(sent_ps + to_ps(way_ms), self._arrive, request)

    def _arrive(self, _now_ps: int, request: object) -> None:
        assert isinstance(request, Request)
        assert self.device is not None
        self.device.arriving(request)
        if not self.device.serving.submit(request):
            raise AssertionError(f"a request of {request.prompt} + {request.output} tokens fits nowhere")
        self.device.arrived(request)

    def first_token(self, request: Request, now_ps: int) -> None:
        """For the engine."""
        number = request.owner
        assert isinstance(number, int)
        assert self.device is not None
        self.ttft_ms.append((now_ps - self._sent_ps[number]) / PS_PER_MS + self._out_ms[number])
        self.device.first_token(request)

    def finished(self, request: Request, now_ps: int) -> None:
        """For the engine."""
        assert self.device is not None
        if request.output > 1:
            self.tpot_ms.append((now_ps - request.first_ps) / (request.output - 1) / PS_PER_MS)
        self.device.finished(request)


class _RolloutClients:
    """A closed loop: each client asks again when it is answered."""

    def __init__(self, loop: Loop, options: Options, turnaround_ms: float) -> None:
        self._loop = loop
        self._options = options
        self._turnaround_ps = to_ps(turnaround_ms)
        self.engine: Engine | None = None

    def start(self) -> None:
        """All clients ask at once."""
        for _ in range(self._options.concurrency):
            self._ask(0, None)

    def _ask(self, _now_ps: int, _: object) -> None:
        assert self.engine is not None
        self.engine.submit(Request(self._options.rollout_prompt_tokens, self._options.rollout_output_tokens))

    def finished(self, _request: Request, _now_ps: int) -> None:
        """For the engine."""
        self._loop.after(self._turnaround_ps, self._ask)


def predict(found: Calibration, run: MeasuredRun, options: Options, seed: int) -> Prediction:
    """Simulate a run from what was sent in it; nothing that it measured is looked at."""
    loop = Loop()
    fit = found.modes[run.mode]
    rng = stream(seed, "coserving", run.mode, run.round)
    serving_clients = _ServingClients(loop, run, fit, rng)
    rollout_clients = _RolloutClients(loop, options, found.turnaround_ms)
    serving = Engine(
        loop,
        "serving",
        found.serving,
        kv_tokens=SERVING_KV_TOKENS,
        requests_max=SERVING_REQUESTS_MAX,
        step_tokens_max=STEP_TOKENS_MAX,
        on_first=serving_clients.first_token,
        on_finish=serving_clients.finished,
    )
    rollout = Engine(
        loop,
        "rollout",
        found.rollout,
        kv_tokens=ROLLOUT_KV_TOKENS,
        requests_max=max(16, options.concurrency),
        step_tokens_max=options.token_cap,
        on_finish=rollout_clients.finished,
    )
    rollout_clients.engine = rollout
    if run.mode in GATES:
        serving_clients.device = Core(loop, serving, rollout, options=options, mode=run.mode, found=found)
    else:
        serving_clients.device = Sharing(loop, serving, None)
    if run.mode != ALONE:
        rollout_clients.start()
    loop.run(RAMP_PS)
    before = rollout.work().decode_tokens
    loop.run(RAMP_PS + round(run.elapsed_s * PS_PER_S))
    tokens = rollout.work().decode_tokens - before
    return Prediction(
        serving_clients.ttft_ms.tolist(), serving_clients.tpot_ms.tolist(), tokens / run.elapsed_s
    )


def with_turnaround(found: Calibration, runs: list[MeasuredRun], options: Options) -> Calibration:
    """The calibration with the clients' turnaround that gives `rollout-alone` its measured throughput."""
    wanted = sum(run.rollout_tokens for run in runs) / sum(run.elapsed_s for run in runs)
    low, high = 0.0, 2000.0
    for _ in range(16):
        middle = (low + high) / 2
        tried = msgspec.structs.replace(found, turnaround_ms=middle)
        got = float(np.mean([predict(tried, run, options, 0).rollout_tokens_per_s for run in runs]))
        low, high = (middle, high) if got > wanted else (low, middle)
    return msgspec.structs.replace(found, turnaround_ms=round(low, 3))


def _drawn(rng: np.random.Generator, quantiles: tuple[float, ...], count: int) -> list[float]:
    """Values of the distribution that the quantiles describe."""
    drawn = np.interp(rng.uniform(0, 1, count), np.linspace(0, 1, len(quantiles)), quantiles)
    return [float(each) for each in drawn]
