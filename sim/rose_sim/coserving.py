"""A run of `rose bench coserve`, simulated: two engines on one core, and the real gate between them.

What the benchmark's load generator sent is the input; latencies and rollout throughput are what comes out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import msgspec
import numpy as np

from rose.core.admission import AdmissionGate
from rose.core.slo import SlackTracker, SloBudgets
from rose.units import ms_to_ns
from rose_sim.calibration import DECODES_MAX, SLOW_SHARE, Calibration, ModeFit, Stretch, predicted_ms, to_ps
from rose_sim.engine import Engine
from rose_sim.gated import Admitting, gate_policy
from rose_sim.loop import PS_PER_MS, PS_PER_S, Loop, stream
from rose_sim.measured import ALONE, ROLLOUT_ALONE, Measured, MeasuredRun, Options
from rose_sim.sharing import Sharing
from rose_sim.steps import Request, Run

GATES = {
    "naive": "open", "static": "open", "priority": "open", "rose-strict": "strict", "rose-slack": "slack",
}  # fmt: skip
"""Modes with both engines, and what their gates are told."""
MODES = (ALONE, ROLLOUT_ALONE, *GATES)
"""Modes that can be predicted."""
STEP_TOKENS_MAX = 512
SERVING_KV_TOKENS, ROLLOUT_KV_TOKENS = 8160, 32_736
SERVING_REQUESTS_MAX = 32
"""Shapes of the benchmark's engines (`rose_daemon.harness.stack`, `rose_daemon.bench.coserve`)."""
MARGIN_MS = 5.0
"""`admission.margin_ms` of the benchmark's configuration."""
BISECTIONS = 9
RAMP_PS = 2 * PS_PER_S
"""Rollout load alone, before the first serving request."""


class Prediction(msgspec.Struct, frozen=True):
    """What a run is expected to show."""

    ttft_ms: list[float]
    tpot_ms: list[float]
    rollout_tokens_per_s: float


class TimedEngine(Engine):
    """An engine whose steps take what somebody else says, one by one."""

    timer: Callable[[int], int]
    """Duration in picoseconds of a step of so many tokens that begins now."""

    def delay(self, by_ps: int) -> None:
        """The step in flight ends that much later: the core does something else meanwhile."""
        run = self._run
        if run is not None and not self._settling:
            run.first += by_ps
            run.end_ps += by_ps
            self._schedule(run)

    def _next_run(self, start_ps: int) -> Run:
        run = super()._next_run(start_ps)
        run.steps, run.more = 1, 0
        run.first = self.timer(run.chunk + min(len(self._decoding), self.allowed))
        run.end_ps = start_ps + run.first
        return run


class Timing:
    """Steps of both engines on one core: the fitted curve by tokens, times a draw of how steps differ.

    Steps of serving come first, but for the time by which they were seen to take longer than alone: that is
    rollout's.  A rollout step that meets one is longer by the rest of it.
    """

    def __init__(self, found: Calibration, mode: str, rng: np.random.Generator) -> None:
        self._found = found
        self._fit = found.modes[mode]
        self._rng = rng
        self._prefilled = [False, False]
        """Whether the latest step of serving, of rollout, was a prefill."""
        self._slow = False
        """Serving's latest step was among the longest of its kind."""
        self._own_ps = self._taken_ps = 0
        """Of serving's latest step: what it would have taken alone, and what it takes."""
        self.serving: TimedEngine | None = None
        self.rollout: TimedEngine | None = None

    def serving_ps(self, tokens: int) -> int:
        """Duration of a serving step that begins now."""
        assert self.rollout is not None
        shared = self.rollout.in_step or bool(self.rollout.allowed and self.rollout.load)
        stretch = self._fit.serving_shared if shared else self._fit.serving_alone
        alone_ps = to_ps(predicted_ms(self._found.serving, tokens))
        self._taken_ps = round(alone_ps * self._serving_stretch(self._kind(stretch, tokens, 0)))
        self._own_ps = round(min(alone_ps, self._taken_ps) * self._fit.held)
        self.rollout.delay(self._own_ps)
        return self._taken_ps + self._found.serving.overhead

    def rollout_ps(self, tokens: int) -> int:
        """Duration of a rollout step that begins now."""
        assert self.serving is not None
        alone_ps = to_ps(predicted_ms(self._found.rollout, tokens))
        taken_ps = alone_ps * drawn(self._rng, self._kind(self._fit.rollout, tokens, 1), 1)[0]
        taken_ps = round(taken_ps) + self._found.rollout.overhead
        if not self.serving.in_step:
            return taken_ps
        left_ps = self.serving.step_end_ps() - self.serving.loop.now_ps
        return taken_ps + min(self._own_ps, self._own_ps * left_ps // max(1, self._taken_ps))

    def _serving_stretch(self, quantiles: tuple[float, ...]) -> float:
        """Slow steps come in spells; over all, each quantile is drawn as often as any other."""
        again = self._fit.persistence
        slow = again if self._slow else SLOW_SHARE * (1 - again) / (1 - SLOW_SHARE)
        self._slow = self._rng.random() < slow
        share = self._rng.random()
        share = 1 - SLOW_SHARE * share if self._slow else (1 - SLOW_SHARE) * share
        return quantiles[min(len(quantiles) - 1, int(share * len(quantiles)))]

    def _kind(self, stretch: Stretch, tokens: int, engine: int) -> tuple[float, ...]:
        """How steps of this kind differ."""
        quantiles = stretch.prefill
        if tokens <= DECODES_MAX:
            quantiles = (stretch.after if self._prefilled[engine] else ()) or stretch.decode
        self._prefilled[engine] = tokens > DECODES_MAX
        return quantiles


class Core(Admitting):
    """Both engines on one core, which the operating system shares; a gate that opens wakes its engine."""

    def __init__(
        self, loop: Loop, serving: Engine, rollout: Engine, *, options: Options, mode: str, found: Calibration
    ) -> None:
        self._wake_ps = to_ps(found.modes[mode].wake_ms)
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
        """What sharing costs is in the times of the steps."""

    def make_way(self) -> None:
        """A core switches to serving in the middle of a rollout step."""

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
        ways_in, ways_out = (drawn(rng, each, len(answered)) for each in (fit.api_in_ms, fit.api_out_ms))
        self._out_ms = ways_out
        self._sent_ps: list[int] = []
        for number, (record, way_ms) in enumerate(zip(answered, ways_in, strict=True)):
            sent_ps = RAMP_PS + max(0, record.sent_ns - run.started_ns) * 1000
            self._sent_ps.append(sent_ps)
            request = Request(record.prompt_tokens, record.output_tokens, owner=number)
            loop.at(sent_ps + to_ps(way_ms), self._arrive, request)

    def _arrive(self, _now_ps: int, request: Request) -> None:
        assert self.device is not None
        self.device.arriving(request)
        if not self.device.serving.submit(request):
            raise AssertionError(f"a request of {request.prompt} + {request.output} tokens fits nowhere")
        self.device.arrived(request)

    def first_token(self, request: Request, now_ps: int) -> None:
        """For the engine."""
        number: int = request.owner
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
    timing = Timing(found, run.mode, rng)
    serving = timing.serving = TimedEngine(
        loop,
        "serving",
        found.serving,
        kv_tokens=SERVING_KV_TOKENS,
        requests_max=SERVING_REQUESTS_MAX,
        step_tokens_max=STEP_TOKENS_MAX,
        on_first=serving_clients.first_token,
        on_finish=serving_clients.finished,
    )
    rollout = timing.rollout = TimedEngine(
        loop,
        "rollout",
        found.rollout,
        kv_tokens=ROLLOUT_KV_TOKENS,
        requests_max=max(16, options.concurrency),
        step_tokens_max=options.token_cap,
        on_finish=rollout_clients.finished,
    )
    serving.timer, rollout.timer = timing.serving_ps, timing.rollout_ps
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


def with_throughput(found: Calibration, measured: Measured) -> Calibration:
    """The calibration with what the step logs cannot tell, from rollout's throughput.

    The clients' turnaround is fitted to that of `rollout-alone`; the share of a step for which serving holds
    the core to that of each mode with both engines.
    """

    def turning(ms: float) -> Calibration:
        return msgspec.structs.replace(found, turnaround_ms=round(ms, 3))

    found = turning(_bisect(turning, measured, ROLLOUT_ALONE, 2000.0))
    for mode in (mode for mode in measured.modes if mode in GATES):

        def holding(share: float, mode: str = mode, base: Calibration = found) -> Calibration:
            fit = msgspec.structs.replace(base.modes[mode], held=round(share, 4))
            return msgspec.structs.replace(base, modes=base.modes | {mode: fit})

        found = holding(_bisect(holding, measured, mode, 1.0))
    return found


def _bisect(changed: Callable[[float], Calibration], measured: Measured, mode: str, most: float) -> float:
    """The value, from 0 to `most`, that gives a mode its measured throughput; more of it gives less."""
    runs = measured.of(mode)
    wanted = sum(run.rollout_tokens for run in runs) / sum(run.elapsed_s for run in runs)
    low, high = 0.0, most
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        tried = changed(middle)
        tokens = sum(
            predict(tried, run, measured.options, 0).rollout_tokens_per_s * run.elapsed_s for run in runs
        )
        got = tokens / sum(run.elapsed_s for run in runs)
        low, high = (middle, high) if got > wanted else (low, middle)
    return (low + high) / 2


def drawn(rng: np.random.Generator, quantiles: tuple[float, ...], count: int) -> list[float]:
    """Values of the distribution that evenly spaced quantiles describe."""
    return [quantiles[index] for index in rng.integers(len(quantiles), size=count).tolist()]
