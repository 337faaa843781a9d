"""Slack without the plugin: open for a moment, after provable quiet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from rose_daemon import mock_engine
from rose_daemon.mock_engine import MockState
from rose_daemon.node.gates import Gates
from rose_daemon.node.inferred import InferredBoard
from rose_daemon.telemetry.serving import scrape
from waiting import until

from rose.boards import BoardPaths
from rose.config import Config, DeviceConfig, NodeConfig, ReplicaConfig, ServingConfig
from rose.core.admission import AdmissionGate
from rose.core.inferred import InferenceSettings, InferredSlack, LoadSample
from rose.core.readings import GateMode, GatePolicy, GateReason, SlackReading, Unknown
from rose.engines.vllm.launch import INFERRED_OPEN_MS, rollout_command
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.step_gate import StepGate
from rose.units import NS_PER_MS, NS_PER_S, NodeId, ReplicaId, ms_to_ns

SETTINGS = InferenceSettings(ttft_slo_ns=250 * NS_PER_MS)
IDLE = LoadSample(running=0, waiting=0, tokens=100, prefill_p99_ns=50 * NS_PER_MS)
BUSY = IDLE._replace(running=1)
STEP_NS = NS_PER_S // 2


def opened(samples: list[LoadSample | Unknown], settings: InferenceSettings = SETTINGS) -> list[bool]:
    """Whether the board admits rollout after each of the readings, half a second apart."""
    slack = InferredSlack(settings)
    answers = [slack.observe(sample, number * STEP_NS) for number, sample in enumerate(samples)]
    return [
        isinstance(each, SlackReading) and not (each.in_step or each.running or each.waiting)
        for each in answers
    ]


def test_only_after_the_whole_quiet_time() -> None:
    assert opened([IDLE] * 6) == [False] * 4 + [True] * 2
    assert opened([BUSY, *[IDLE] * 6]) == [False] * 5 + [True] * 2


@pytest.mark.parametrize(
    "disturbance",
    [
        BUSY,
        IDLE._replace(waiting=1),
        IDLE._replace(tokens=117),  # it came and went between two readings
        IDLE._replace(tokens=3),  # the engine was restarted
        Unknown("metrics_unreachable"),
        Unknown("metrics_missing: vllm:num_requests_running"),
        Unknown("metrics_frozen"),
    ],
)
def test_anything_else_begins_the_quiet_time_anew(disturbance: LoadSample | Unknown) -> None:
    after = IDLE._replace(tokens=disturbance.tokens) if isinstance(disturbance, LoadSample) else IDLE
    seen = opened([*[IDLE] * 6, disturbance, *[after] * 6])
    assert seen[5], "it was quiet"
    assert not any(seen[6:10])
    assert seen[-1]


def test_a_gap_between_readings_says_nothing_of_the_time_in_it() -> None:
    slack = InferredSlack(SETTINGS)
    for second in (0, 1, 2, 3):
        slack.observe(IDLE, second * NS_PER_S)
    late = slack.observe(IDLE, 30 * NS_PER_S)
    assert isinstance(late, SlackReading)
    assert late.in_step


def test_an_engine_without_room_in_its_budget_lends_nothing() -> None:
    slow = IDLE._replace(prefill_p99_ns=240 * NS_PER_MS)
    assert not any(opened([slow] * 10))


@given(
    prefill_ns=st.integers(0, 250 * NS_PER_MS),
    steps=st.integers(1, 2),
    token_ms=st.floats(0.05, 2),
    margin_ms=st.floats(0, 20),
)
def test_two_openings_leave_a_request_its_budget(
    prefill_ns: int, steps: int, token_ms: float, margin_ms: float
) -> None:
    settings = InferenceSettings(ttft_slo_ns=250 * NS_PER_MS, steps_in_flight=steps)
    slack = InferredSlack(settings)
    for second in range(4):
        reading = slack.observe(IDLE._replace(prefill_p99_ns=prefill_ns), second * NS_PER_S)
    assert isinstance(reading, SlackReading)
    gate = AdmissionGate(step_tokens_max=512, tokens_floor=1)
    for tokens in (1, 2, 8, 32, 64, 128, 256, 512):
        gate.observe_step(tokens, ms_to_ns(tokens * token_ms))
    policy = GatePolicy(
        1, GateMode.STRICT, 512, 0, 0, 5 * NS_PER_S, 250 * NS_PER_MS, 60 * NS_PER_MS, ms_to_ns(margin_ms)
    )
    admitted = gate.decide(reading, policy, 3 * NS_PER_S)
    if admitted.tokens > 1:
        step_ns = gate.latency.predict_ns(admitted.tokens)
        assert 2 * (settings.open_ns + steps * step_ns) + prefill_ns <= 250 * NS_PER_MS


# ---- with a serving engine and a gate --------------------------------------------------------------------


def config(tmp_path: Path, url: str = "http://127.0.0.1:1") -> Config:
    (tmp_path / "token").write_text("secret")
    return Config(
        node=NodeConfig(id=NodeId("n"), state_dir=str(tmp_path), run_dir=str(tmp_path / "run")),
        device=DeviceConfig(),
        serving=ServingConfig(
            mode="metrics", url=url, ttft_slo_ms=100, metrics_ms=100, quiet_ms=200, metrics_stale_ms=1000
        ),
        replicas=(
            ReplicaConfig(
                id=ReplicaId("r"), kind="opportunistic", model=str(tmp_path), profile="p.json", port=1
            ),
        ),
    )


def settings_of(made: Config) -> PluginSettings:
    environ = rollout_command(made.replicas[0], made, environ={}).env
    settings = PluginSettings.from_environ(environ)
    assert settings is not None
    return settings


def test_the_engine_is_told_that_such_a_board_holds_for_a_moment(tmp_path: Path) -> None:
    made = config(tmp_path)
    assert settings_of(made).slack_stale_ms == INFERRED_OPEN_MS
    assert settings_of(made).board_stale_ms == made.admission.board_stale_ms


@pytest.fixture
async def engine() -> AsyncIterator[tuple[MockState, str]]:
    state = MockState(model="serving", role="serving", token_ms=20)
    runner = web.AppRunner(mock_engine.build_app(state), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield state, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


class Beside:
    """rosed's part and a rollout engine's gate beside a serving engine that knows nothing of either."""

    def __init__(self, made: Config) -> None:
        self.config = made
        self.paths = BoardPaths(Path(made.node.run_dir))
        self.paths.run_dir.mkdir()
        self.gates = Gates(self.paths, 10 * NS_PER_S)
        slo_ns = ms_to_ns(made.serving.ttft_slo_ms)
        policy = GatePolicy(1, GateMode.STRICT, 512, 0, 0, 0, slo_ns, slo_ns, 0)
        self.gates.publish(ReplicaId("r"), policy, time.monotonic_ns())
        self.board = InferredBoard(made, self.paths.slack(made.serving.name), self.gates.ring)
        self.gate = StepGate(settings_of(made), step_tokens_max=512)
        for tokens in (1, 2, 8, 32, 64, 128, 256, 512):
            self.gate._admission.observe_step(tokens, tokens * 50_000)

    async def period(self, session: aiohttp.ClientSession) -> list[int]:
        """Read the metrics once; tokens that the gate admitted at each moment of the period after."""
        self.board.observe(await scrape(session, self.config.serving.url, 1), time.monotonic_ns())
        admitted = []
        end_s = time.monotonic() + self.config.serving.metrics_ms / 1000
        while time.monotonic() < end_s:
            admitted.append(self.gate.decide(time.monotonic_ns()).tokens)
            await asyncio.sleep(0.001)
        return admitted


async def test_rollout_runs_one_capped_step_a_reading_and_never_beside_a_request(
    tmp_path: Path, engine: tuple[MockState, str]
) -> None:
    state, url = engine
    beside = Beside(config(tmp_path, url))
    async with aiohttp.ClientSession() as session:
        body = {"model": "serving", "prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True}
        await (await session.post(url + "/v1/completions", json=body)).read()
        before = [await beside.period(session) for _ in range(6)]
        assert not any(map(any, before[:2])), "not quiet for long enough"
        openings = [admitted for admitted in before if any(admitted)]
        assert openings
        for admitted in openings:
            assert admitted[-1] == 0, "closed long before the next reading"
            # (100 ms - 50 ms of prefill - 2 x 20 ms) / 2 at 0.05 ms a token, less a margin.
            assert 32 <= max(admitted) <= 100
        request = asyncio.create_task(session.post(url + "/v1/completions", json=body | {"max_tokens": 60}))
        await until(lambda: state.requests)
        during = [await beside.period(session) for _ in range(5)]
        assert not any(map(any, during))
        assert beside.gate.decide(time.monotonic_ns()).reason in {
            GateReason.SERVING_RUNNING,
            GateReason.BOARD_UNKNOWN,
        }
        state.abort(None)
        await (await request).read()


async def test_metrics_that_fail_close_the_gate_and_say_why(
    tmp_path: Path, engine: tuple[MockState, str]
) -> None:
    _, url = engine
    beside = Beside(config(tmp_path, url))
    async with aiohttp.ClientSession() as session:
        while not any(await beside.period(session)):
            pass
        beside.board.observe(Unknown("metrics_unreachable"), time.monotonic_ns())
        assert isinstance(beside.board.read(time.monotonic_ns()), SlackReading)
        late_ns = time.monotonic_ns() + 12 * NS_PER_S
        stale = beside.board.read(late_ns)
        assert isinstance(stale, Unknown)
        assert stale.reason == "metrics_stale"
        beside.board.observe(Unknown("metrics_missing: vllm:num_requests_running"), late_ns)
        assert beside.board.read(late_ns) == Unknown("metrics_missing: vllm:num_requests_running")
        assert not any(await beside.period(session)), "quiet begins anew"
    beside.board.close()
    assert not list(beside.paths.run_dir.glob("slack-*"))


async def test_without_rosed_the_gate_closes_by_itself(tmp_path: Path, engine: tuple[MockState, str]) -> None:
    _, url = engine
    beside = Beside(config(tmp_path, url))
    async with aiohttp.ClientSession() as session:
        while not any(await beside.period(session)):
            pass
    for _ in range(5):  # nobody reads the metrics any more
        await asyncio.sleep(0.01)
        assert beside.gate.decide(time.monotonic_ns()).reason is GateReason.BOARD_UNKNOWN
