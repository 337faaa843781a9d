"""The simulated engine: exact against stepping, and honest about work and memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rose_sim.costs import StepCost, step_cost
from rose_sim.engine import Engine
from rose_sim.hardware import GPUS, MODELS
from rose_sim.loop import PS_PER_MS, Loop, stream
from rose_sim.steps import Request

COST = step_cost(MODELS["Qwen3-8B"], GPUS["H800"], 1)


class Bench:
    """An engine under a script of orders, and what came of each request."""

    def __init__(self, *, single_steps: bool, kv_tokens: int = 60_000, chunk: int = 512) -> None:
        self.loop = Loop()
        self.ends: list[tuple[int, int, int]] = []
        self.engine = Engine(
            self.loop,
            "e",
            COST,
            kv_tokens=kv_tokens,
            requests_max=8,
            step_tokens_max=chunk,
            on_finish=lambda request, now: self.ends.append((request.owner, request.first_ps, now)),
            keep_prefixes=True,
            single_steps=single_steps,
        )
        self.submitted: dict[int, Request] = {}
        self.aborted: list[tuple[int, int]] = []

    def submit(self, number: int, prompt: int, output: int, key: int) -> None:
        request = self.submitted[number] = Request(prompt, output, key=key, owner=number)
        assert self.engine.submit(request)

    def abort(self, number: int) -> None:
        request = self.submitted.get(number)
        if request is not None and request.engine is not None:
            self.aborted.append((number, self.engine.abort(request)))

    def check(self) -> None:
        kv = self.engine.kv
        assert 0 <= kv.running <= kv.capacity
        assert kv.kept >= 0
        assert kv.used <= kv.capacity


def play(seed: int, *, single_steps: bool) -> Bench:
    """A random script of arrivals, closed gates, shared devices and aborts."""
    rng = stream(seed, "script")
    bench = Bench(single_steps=single_steps)
    for number in range(40):
        at = int(rng.integers(0, 20_000)) * PS_PER_MS
        prompt, output, key = int(rng.integers(1, 4000)), int(rng.integers(1, 400)), int(rng.integers(0, 10))
        bench.loop.at(at, lambda _now, args: bench.submit(*args), (number, prompt, output, key))
    for _ in range(30):
        at = int(rng.integers(0, 25_000)) * PS_PER_MS
        order = int(rng.integers(0, 4))
        if order == 0:
            cap = int(rng.choice([0, 4, 64, 512]))
            bench.loop.at(at, lambda _now, cap: bench.engine.allow(cap), cap)
        elif order == 1:
            bench.loop.at(at, lambda _now, slow: bench.engine.share(slow), int(rng.integers(2, 5)))
        elif order == 2:
            bench.loop.at(at, lambda now, delay: bench.engine.hold(now + delay), 7 * PS_PER_MS)
        else:
            bench.loop.at(at, lambda _now, number: bench.abort(number), int(rng.integers(0, 40)))
    bench.loop.at(26_000 * PS_PER_MS, lambda _now, _: bench.engine.allow(512))
    for second in range(60):
        bench.loop.at(second * 1000 * PS_PER_MS, lambda _now, _: bench.check())
    bench.loop.run()
    return bench


@pytest.mark.parametrize("seed", range(12))
def test_runs_of_steps_equal_single_steps_to_the_picosecond(seed: int) -> None:
    fast, slow = play(seed, single_steps=False), play(seed, single_steps=True)
    assert fast.ends == slow.ends
    assert fast.aborted == slow.aborted
    for name in ("steps", "busy_ps", "prefill_tokens", "decode_tokens", "cached_tokens", "context_steps"):
        assert getattr(fast.engine, name) == getattr(slow.engine, name), name
    assert fast.engine.steps > 1000
    assert fast.loop.events < slow.loop.events / 4


@pytest.mark.parametrize("seed", range(12, 20))
def test_every_request_ends_once_and_work_is_conserved(seed: int) -> None:
    bench = play(seed, single_steps=False)
    ended = [owner for owner, _, _ in bench.ends]
    aborted = [owner for owner, _ in bench.aborted]
    assert sorted(ended + aborted) == list(range(40))
    engine = bench.engine
    assert engine.load == engine.kv.running == 0
    wanted = sum(bench.submitted[owner].output for owner in ended)
    assert engine.decode_tokens == wanted + sum(tokens for _, tokens in bench.aborted)
    prompts = sum(bench.submitted[owner].prompt for owner in ended)
    assert engine.prefill_tokens + engine.cached_tokens >= prompts


def test_a_lone_request_takes_what_the_cost_model_says() -> None:
    bench = Bench(single_steps=False, chunk=4096)
    bench.submit(0, 1000, 3, 0)
    bench.loop.run()
    first = COST.prefill_ps(1000)
    assert bench.ends == [(0, first, first + COST.decode_ps(1, 1001) + COST.decode_ps(1, 1002))]


def test_short_prompts_share_a_step_and_long_ones_are_cut_in_chunks() -> None:
    bench = Bench(single_steps=False)
    for number in range(4):
        bench.submit(number, 100, 1, number)
    bench.loop.run()
    assert bench.engine.steps == 2  # the first was under way when the others came
    bench.submit(4, 2000, 1, 4)
    bench.loop.run()
    assert bench.engine.steps == 2 + 4


def test_a_kept_prefix_is_not_prefilled_again_and_a_cleared_one_is() -> None:
    bench = Bench(single_steps=False)
    bench.submit(0, 1000, 10, 7)
    bench.loop.run()
    bench.submit(1, 1200, 10, 7)
    bench.loop.run()
    assert bench.engine.cached_tokens == 1010
    bench.engine.kv.clear()
    bench.submit(2, 1400, 10, 7)
    bench.loop.run()
    assert bench.engine.cached_tokens == 1010


def test_what_never_fits_is_refused_and_what_does_not_fit_now_waits() -> None:
    bench = Bench(single_steps=False, kv_tokens=3200)
    assert not bench.engine.submit(Request(3000, 300))
    bench.submit(0, 2000, 100, 0)
    bench.submit(1, 1000, 100, 1)
    bench.submit(2, 500, 100, 2)
    assert (bench.engine.running, bench.engine.waiting) == (1, 2)
    bench.loop.run()
    assert sorted(owner for owner, _, _ in bench.ends) == [0, 1, 2]


def test_a_closed_gate_stops_after_the_step_in_flight() -> None:
    bench = Bench(single_steps=False)
    bench.submit(0, 100, 200, 0)
    bench.loop.run(until_ps=100 * PS_PER_MS)
    end = bench.engine.step_end_ps()
    assert 0 < end - bench.loop.now_ps <= COST.decode_ps(1, 300)
    bench.engine.allow(0)
    bench.loop.run(until_ps=end)
    assert not bench.engine.in_step
    bench.loop.run()
    assert not bench.ends
    bench.engine.allow(512)
    bench.loop.run()
    assert len(bench.ends) == 1


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 8192),
    past=st.integers(0, 30_000),
    batch=st.integers(1, 600),
    context=st.integers(1, 32_000),
)
def test_costs_grow_with_work(tokens: int, past: int, batch: int, context: int) -> None:
    assert COST.prefill_ps(tokens + 1, past) >= COST.prefill_ps(tokens, past) > 0
    assert COST.prefill_ps(tokens, past + 1) >= COST.prefill_ps(tokens, past)
    assert COST.decode_ps(batch, batch * (context + 1)) > COST.decode_ps(batch, batch * context) > 0


def test_a_scaled_cost_takes_longer_and_keeps_the_host_overhead() -> None:
    slower = COST.scaled(prefill=1.2, decode=1.2)
    assert isinstance(slower, StepCost)
    assert slower.overhead == COST.overhead
    wanted = 1.2 * (COST.prefill_ps(1000) - COST.overhead)
    assert slower.prefill_ps(1000) - COST.overhead == pytest.approx(wanted, rel=1e-4)


def test_streams_are_their_own() -> None:
    draws = {int(stream(*names).integers(0, 1 << 60)) for names in ((1, "a"), (1, "b"), (2, "a"))}
    assert len(draws) == 3
    assert np.array_equal(stream(1, "a", 2).integers(0, 99, 5), stream(1, "a", 2).integers(0, 99, 5))
