"""`rose sim whatif`: how much rollout capacity a serving fleet can lend, from its own trace.

The fleet is simulated alone, and with rollout engines that always have work under one setting after another;
the difference is what lending costs its users, and the tokens are what lending brings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rose.errors import ConfigError
from rose.traces import Trace
from rose_sim.loop import PS_PER_S, ps, stream
from rose_sim.reports import SCHEMA, costs
from rose_sim.results import Outcome, collect
from rose_sim.risk import BLOCK_S, Lateness, Risk, added_share, clopper_pearson, late_share
from rose_sim.scenario import Rl, Rollout, Scenario, Serving, Trajectories
from rose_sim.traces import read_trace
from rose_sim.world import World

HOUR_S = 3600
HEADROOM_STEP = 0.05
CAPS = (64, 128, 256, 512, 1024, 2048)
RISK = 0.001
NEAR = 0.995
"""Throughputs within so much of the best one are equal; the risk decides."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked."""

    trace: Path
    gpus: int
    gpu: str
    tp: int
    serving_model: str
    rollout_model: str
    ttft_ms: float
    tpot_ms: float
    rate_rps: float | None
    hours: float
    seed: int
    serving_profile: str = ""
    rollout_profile: str = ""
    caps: tuple[int, ...] = CAPS
    """Token caps to try."""
    risk: float = RISK
    """By how much the share of late requests may grow, as the upper end of its interval."""


def parse_caps(text: str) -> tuple[int, ...]:
    """Token caps, comma-separated.  Raises ConfigError."""
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] < 1:
        raise ConfigError(
            f"--caps: {text!r} are no token caps", "give whole numbers above 0, such as 128,512"
        )
    return found


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One way to lend, and what came of it."""

    token_cap: int
    n_serving: int
    """Serving GPUs that may be borrowed at a time."""
    rollout_tokens_per_s: float
    late: Risk
    added: Risk
    """Over serving alone, of the same arrivals."""
    kv_cuts: int
    meets: bool
    """The upper end of `added` lies within the bound, or within what so few requests can show."""


def answer(question: Question, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Simulate, and say what can be lent; `say` is told what is simulated.

    Raises ConfigError for a trace or a fleet that cannot be used.
    """
    started = time.perf_counter()
    if question.gpus % question.tp:
        raise ConfigError(f"{question.gpus} GPUs are no multiple of the {question.tp} of an engine")
    search = Search(question, say)
    chosen = search.run()
    best = chosen or min(search.tried, key=lambda each: each.added.high)
    outcome, without = search.outcomes[best], search.without
    return {
        "schema": SCHEMA,
        "command": "sim whatif",
        "question": {**msgspec.structs.asdict(question), "trace": str(question.trace)},
        "hours": search.hours[best],
        "rollout_tokens_per_s": best.rollout_tokens_per_s,
        "lendable_gpu_hours": sum(row["lendable_gpu_hours"] for row in search.hours[best]),
        "slo": {
            "requests": outcome.requests,
            "late_share": best.late._asdict(),
            "added_share": best.added._asdict(),
            "broken_share": best.late.share,
            "broken_share_ci": [best.late.low, best.late.high],
            "broken_share_alone": search.late_alone.share,
            "ttft_p99_ms": outcome.ttft_ms.p99,
            "tpot_p99_ms": outcome.tpot_ms.p99,
            "ttft_p99_ms_alone": without.ttft_ms.p99,
            "tpot_p99_ms_alone": without.tpot_ms.p99,
        },
        "searched": {
            "token_cap": list(question.caps),
            "headroom_share": "1.5 times the most KV memory that serving alone held",
            "n_serving": "all GPUs, then halves while no cap keeps the bound",
            "added_share_max": question.risk,
            "shown_by_so_few": search.resolution,
            "block_s": BLOCK_S,
        },
        "candidates": [msgspec.to_builtins(candidate) for candidate in search.tried],
        "recommended": {
            "headroom_share": search.headroom,
            "token_cap": best.token_cap,
            "n_serving": min(best.n_serving, search.usable[best]) if chosen else 0,
        },
        "notes": [*_notes(question, search, chosen is not None)],
        **costs(started),
    }


class Search:
    """Serving alone, then candidates: all caps with all GPUs, and fewer GPUs while none keeps the bound."""

    def __init__(self, question: Question, say: Callable[[str], None]) -> None:
        self._question = question
        self._say = say
        self.trace = _trace(question)
        self._scenario = _scenario(question, len(self.trace.at_ns) / (question.hours * HOUR_S))
        self.tried: list[Candidate] = []
        self.outcomes: dict[Candidate, Outcome] = {}
        self.hours: dict[Candidate, list[dict[str, float | int]]] = {}
        self.usable: dict[Candidate, int] = {}
        """Serving GPUs whose gate was open for more than a fifth of the time."""
        say("serving alone")
        alone = World(self._scenario, "serverlessllm", trace=self.trace)
        self._alone = self._watch(alone)
        self.without = alone.run()
        self.late_alone = late_share(self._alone, question.seed)
        peak = _watch_kv(alone)
        self.headroom = round(
            float(min(0.5, max(0.1, HEADROOM_STEP * np.ceil(1.5 * peak / HEADROOM_STEP)))), 2
        )
        self.resolution = clopper_pearson(0, self.without.requests)[1]
        """The least share that so many requests can show anything to stay below."""

    def run(self) -> Candidate | None:
        """The best that keeps the bound, None if none does."""
        gpus = self._question.gpus
        while gpus >= self._question.tp:
            caps = self._question.caps if gpus == self._question.gpus else self._mildest()
            found = [self._try(cap, gpus) for cap in caps]
            if fit := [each for each in found if each.meets]:
                most = max(each.rollout_tokens_per_s for each in fit)
                near = [each for each in fit if each.rollout_tokens_per_s >= NEAR * most]
                return min(near, key=_harm)
            gpus = gpus // 2 // self._question.tp * self._question.tp
        return None

    def _mildest(self) -> tuple[int, ...]:
        """The cap that was late least."""
        return (min(self.tried, key=_harm).token_cap,)

    def _try(self, cap: int, gpus: int) -> Candidate:
        self._say(f"token cap {cap}, {gpus} GPUs lent")
        rollout = msgspec.structs.replace(
            self._scenario.rollout, token_cap=cap, borrowed_gpus_max=gpus, headroom_share=self.headroom
        )
        scenario = msgspec.structs.replace(self._scenario, rollout=rollout)
        world = World(scenario, "rose", trace=self.trace)
        beside = self._watch(world)
        hours = _by_hour(world, self._question)
        outcome = collect(world)
        added = added_share(beside, self._alone, self._question.seed)
        candidate = Candidate(
            token_cap=cap,
            n_serving=gpus,
            rollout_tokens_per_s=outcome.borrowed_tokens / outcome.simulated_s,
            late=late_share(beside, self._question.seed),
            added=added,
            kv_cuts=outcome.kv_cuts,
            meets=added.high <= max(self._question.risk, self.resolution),
        )
        self.tried.append(candidate)
        self.outcomes[candidate], self.hours[candidate] = outcome, hours
        open_ps = [device.opened_ps() for device in world.devices]
        usable = sum(each > 0.2 * world.loop.now_ps for each in open_ps)
        self.usable[candidate] = usable * self._question.tp
        return candidate

    def _watch(self, world: World) -> Lateness:
        assert world.load is not None, "a fleet without engines"
        lateness = Lateness(self._question.ttft_ms, self._question.tpot_ms)
        world.load.answered = lateness.answered
        return lateness


def _harm(candidate: Candidate) -> tuple[float, int]:
    """What a candidate does to users; of equals the smaller cap."""
    return candidate.added.high, candidate.token_cap


def _notes(question: Question, search: Search, found: bool) -> Iterator[str]:
    yield from search.trace.notes
    if search.trace.span_ns < question.hours * HOUR_S * 1e9 * 0.95:
        yield f"the trace is {search.trace.span_ns / 1e9 / HOUR_S:.2f} h long"
    if search.resolution > question.risk:
        yield (
            f"{search.without.requests} requests show nothing below {search.resolution:.2%}: "
            f"simulate more of them for a bound of {question.risk:.2%}"
        )
    if not found:
        yield "no candidate keeps the bound; shown is the one that adds least"
    yield "the admission gate is the strict one: rollout runs while serving is idle"


def _trace(question: Question) -> Trace:
    trace = read_trace(question.trace)
    keep = trace.at_ns <= question.hours * HOUR_S * 1e9
    if question.rate_rps is not None:
        rate = len(trace.at_ns) / max(1e-9, trace.span_ns / 1e9)
        if question.rate_rps > rate:
            raise ConfigError(f"the trace has {rate:.2f} requests/s; it can be thinned, not made denser")
        keep &= stream(question.seed, "thin").uniform(0, 1, len(keep)) < question.rate_rps / rate
    if not keep.any():
        raise ConfigError(f"{question.trace}: no request is left", "ask for more hours, or a higher rate")
    return Trace(
        trace.source, trace.at_ns[keep], trace.prompt_tokens[keep], trace.output_tokens[keep], trace.notes
    )


def _scenario(question: Question, rate_rps: float) -> Scenario:
    """Rollout that never runs out of work: more trajectories than slots, in one endless step."""
    slots = 16 * (question.gpus + question.tp)
    return Scenario(
        name="whatif",
        seed=question.seed,
        gpu=question.gpu,
        duration_s=question.hours * HOUR_S,
        serving=Serving(
            model=question.serving_model,
            gpus=question.gpus,
            tp=question.tp,
            ttft_ms=question.ttft_ms,
            tpot_ms=question.tpot_ms,
            profile=question.serving_profile,
            rate_rps=rate_rps,
            trace=str(question.trace),
        ),
        rollout=Rollout(
            model=question.rollout_model,
            tp=question.tp,
            profile=question.rollout_profile,
            dedicated_gpus=question.tp,
            borrowed_gpus_max=question.gpus,
        ),
        rl=Rl(groups=max(1, slots // 8), group_size=16, steps=1_000_000, train_s=0.0),
        trajectories=Trajectories(
            turns_median=10,
            turns_sigma=0.5,
            turns_max=50,
            prompt_tokens=1000,
            response_median=300,
            response_sigma=0.7,
            observation_median=200,
            env_s_median=1.0,
        ),
    )


def _by_hour(world: World, question: Question) -> list[dict[str, float | int]]:
    """Run hour by hour; what changed in each."""
    job = world.job
    assert job is not None
    world.loop.at(0, job.begin)
    rows: list[dict[str, float | int]] = []
    end_ps, hour = ps(question.hours * HOUR_S), 0
    opened = busy = requests = 0
    while world.loop.now_ps < end_ps:
        began = world.loop.now_ps
        world.loop.run(min(end_ps, (hour + 1) * HOUR_S * PS_PER_S))
        span = world.loop.now_ps - began
        opened_now = sum(device.opened_ps() for device in world.devices)
        busy_now = sum(device.serving.work().busy_ps for device in world.devices)
        arrived = world.load.arrived if world.load else 0
        share = (opened_now - opened) / (span * len(world.devices))
        rows.append(
            {
                "hour": hour,
                "rate_rps": (arrived - requests) / (span / PS_PER_S),
                "serving_busy_share": (busy_now - busy) / (span * len(world.devices)),
                "gate_open_share": share,
                "lendable_gpu_hours": share * question.gpus * span / PS_PER_S / HOUR_S,
            }
        )
        opened, busy, requests, hour = opened_now, busy_now, arrived, hour + 1
    return rows


def _watch_kv(world: World) -> float:
    """Most KV memory that serving held at once on an engine, as a share of the device."""
    per_token = world.serving_model.kv_bytes_per_token
    memory = world.gpu.memory_bytes * world.scenario.serving.tp
    return max(device.serving.kv.peak for device in world.devices) * per_token / memory
