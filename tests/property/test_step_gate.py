"""The gate inside an engine, over real boards: an answer that is used again is what a new one would be."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rose.boards import BoardPaths, BoardWriter
from rose.core.readings import NEVER, GateMode, GatePolicy, SlackReading, Unknown
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.step_gate import StepGate
from rose.units import NS_PER_S, ms_to_ns

MS = ms_to_ns(1)
STALE_NS = 1000 * MS
ZEROS = SlackReading(*[0] * len(SlackReading._fields))
IDLE = ZEROS._replace(ttft_deadline_ns=NEVER, tpot_deadline_ns=NEVER, prefill_predicted_ns=40 * MS)

moves = st.one_of(
    st.tuples(st.just("wait"), st.sampled_from([1, 5, 40, 300, 900, 2000])),
    st.tuples(st.just("say again"), st.integers(-3000, 1500)),
    st.tuples(st.just("decodes"), st.tuples(st.integers(0, 3), st.integers(-50, 200))),
    st.tuples(st.just("prefill"), st.integers(0, 2)),
    st.tuples(st.just("lease"), st.sampled_from([-5, 0, 20, 1000, 59_000, 61_000])),
    st.tuples(st.just("mode"), st.sampled_from(list(GateMode))),
    st.tuples(st.just("older policy"), st.just(0)),
    st.tuples(st.just("learn"), st.tuples(st.sampled_from([1, 16, 512]), st.integers(1, 300))),
    st.tuples(st.just("in flight"), st.integers(1, 512)),
    st.tuples(st.just("cut"), st.sampled_from(["slack", "policy"])),
)


class World:
    """One gate, the boards it reads, and a clock of its own."""

    def __init__(self, run_dir: Path, names: tuple[str, ...]) -> None:
        self.paths = BoardPaths(run_dir)
        self.now_ns = 100 * NS_PER_S
        self.slack = [BoardWriter(self.paths.slack(name), SlackReading) for name in names]
        self.policy_board = BoardWriter(self.paths.gate("r0"), GatePolicy)
        self.reading = [IDLE._replace(stamp_ns=self.now_ns)] * len(names)
        self.policy = GatePolicy(
            5, GateMode.SLACK, 512, 0, 0, self.now_ns + NS_PER_S, 250 * MS, 60 * MS, 5 * MS
        )
        self.publish()
        self.renew()
        given = {"role": "rollout", "name": "r0", "run_dir": str(run_dir), "token_file": ""}
        self.gate = StepGate(PluginSettings(**given, serving_name=",".join(names)), step_tokens_max=512)
        self.in_flight: list[Any] = []

    def publish(self) -> None:
        for board, reading in zip(self.slack, self.reading, strict=True):
            board.publish(reading)

    def renew(self) -> None:
        self.policy_board.publish(self.policy)

    def do(self, move: str, how: Any) -> None:
        self.in_flight = []
        match move:
            case "wait":
                self.now_ns += how * MS
            case "say again":
                self.reading[0] = self.reading[0]._replace(stamp_ns=self.now_ns + how * MS)
                self.publish()
            case "decodes":
                running, left_ms = how
                deadline_ns = self.now_ns + left_ms * MS if running else NEVER
                self.reading[-1] = IDLE._replace(
                    stamp_ns=self.now_ns,
                    running=running,
                    tpot_deadline_ns=deadline_ns,
                    decode_predicted_ns=9 * MS,
                )
                self.publish()
            case "prefill":
                self.reading[0] = self.reading[0]._replace(stamp_ns=self.now_ns, waiting=how)
                self.publish()
            case "lease":
                self.policy = self.policy._replace(alive_until_ns=self.now_ns + how * MS)
                self.renew()
            case "mode":
                self.policy = self.policy._replace(revision=self.policy.revision + 1, mode=how)
                self.renew()
            case "older policy":
                self.policy_board.publish(self.policy._replace(revision=1, mode=GateMode.OPEN))
            case "learn":
                tokens, took_ms = how
                for _ in range(9):
                    self.gate._admission.observe_step(tokens, took_ms * MS)
            case "in flight":
                self.in_flight = [self.gate.step_began(how, self.now_ns)]
            case "cut":
                path = self.paths.slack("a") if how == "slack" else self.paths.gate("r0")
                path.write_bytes(b"")
            case _:
                raise AssertionError(move)


@settings(deadline=None, max_examples=150)
@example([("lease", -5), ("lease", 20)], ("a",))  # a lease that ran out, and is renewed
@given(st.lists(moves, min_size=1, max_size=25), st.sampled_from([("a",), ("a", "b")]))
def test_an_answer_used_again_is_what_a_new_one_would_be(
    steps: list[tuple[str, Any]], names: tuple[str, ...]
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as run_dir:
        world = World(Path(run_dir), names)
        gate = world.gate
        for move, how in steps:
            world.do(move, how)
            answer = gate.decide(world.now_ns, world.in_flight)
            gate._went_by = None  # so that nothing is used again
            anew = gate.decide(world.now_ns, world.in_flight)
            assert (answer.tokens, answer.reason) == (anew.tokens, anew.reason)
            assert answer.valid_until_ns <= anew.valid_until_ns or not answer.open
            twice = gate.decide(world.now_ns, world.in_flight)
            assert twice == anew


@settings(deadline=None, max_examples=100)
@given(st.lists(moves, min_size=1, max_size=25), st.sampled_from([("a",), ("a", "b")]))
def test_the_gate_is_closed_whatever_is_unknown(steps: list[tuple[str, Any]], names: tuple[str, ...]) -> None:
    """Missing, cut, stale, of the future: only OPEN ignores boards, and nothing ignores the lease."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as run_dir:
        world = World(Path(run_dir), names)
        gate = world.gate
        for move, how in steps:
            world.do(move, how)
            admission = gate.decide(world.now_ns, world.in_flight)
            readings = [board.read(world.now_ns, STALE_NS) for board in gate._slack_boards]
            policy = gate._policy_board.read(world.now_ns, None)
            if isinstance(policy, Unknown):
                assert not admission.open
                continue
            held = gate.policy
            assert isinstance(held, GatePolicy)
            if held.alive_until_ns <= world.now_ns or held.alive_until_ns > world.now_ns + 60 * NS_PER_S:
                assert not admission.open
            if held.mode != GateMode.OPEN and any(isinstance(each, Unknown) for each in readings):
                assert not admission.open
            if held.mode == GateMode.CLOSED:
                assert not admission.open
