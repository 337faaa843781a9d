"""What engines are started with, and how the gate inside them reads the boards."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rose.boards import BoardPaths, BoardWriter
from rose.config import Config, DeviceConfig, NodeConfig, ReplicaConfig, ServingConfig
from rose.core.readings import GateMode, GatePolicy, GateReason, LimitStatus, SlackReading, Unknown
from rose.engines.vllm.launch import EngineCommand, EngineShape, rollout_command, serving_command
from rose.engines.vllm.settings import PluginSettings
from rose.engines.vllm.step_gate import WAIT_NS_MAX, GateBells, StepGate
from rose.errors import ConfigError
from rose.units import ReplicaId

S = 1_000_000_000
DEFAULT_SERVING = ServingConfig()


def settings(run_dir: Path = Path("/run"), **more: Any) -> PluginSettings:
    given = {"role": "rollout", "name": "r0", "run_dir": str(run_dir), "token_file": "/t"} | more
    return PluginSettings(**given)


def option(command: EngineCommand, name: str) -> str:
    return command.argv[command.argv.index(name) + 1]


# ---- settings -----------------------------------------------------------------------------------


def test_settings_survive_the_environment() -> None:
    sent = settings(worker_cpus="0,3", worker_idle_priority=True, ttft_slo_ms=123.5, api_cpus="1")
    assert PluginSettings.from_environ(sent.to_environ() | {"OTHER": "x", "ROSE_NODE__ID": "n"}) == sent
    assert sent.worker_cores == {0, 3}
    assert sent.api_cores == {1}
    assert settings().worker_cores == frozenset()


def test_without_settings_there_is_no_plugin() -> None:
    assert PluginSettings.from_environ({"PATH": "/bin", "ROSE_CONFIG": "x"}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"ROSE_ENGINE_ROLE": "spectator"},
        {"ROSE_ENGINE_TTFT_SLO_MS": "soon"},
        {"ROSE_ENGINE_COLOUR": "red"},
        {"ROSE_ENGINE_WORKER_IDLE_PRIORITY": "perhaps"},
    ],
)
def test_senseless_settings_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="ROSE_ENGINE"):
        PluginSettings.from_environ(settings().to_environ() | change)


def test_senseless_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="WORKER_CPUS"):
        assert settings(worker_cpus="0,one").worker_cores


def test_a_scheduler_of_another_role_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings().to_environ().items():
        monkeypatch.setenv(name, value)
    assert PluginSettings.require("rollout") == settings()
    with pytest.raises(ConfigError, match="serving"):
        PluginSettings.require("serving")


# ---- command lines ------------------------------------------------------------------------------


def rollout(
    kind: str = "opportunistic",
    device: str = "cpu",
    serving: ServingConfig = DEFAULT_SERVING,
    **more: Any,
) -> EngineCommand:
    replica = ReplicaConfig(id=ReplicaId("r0"), kind=kind, model="/m", port=8000, **more)
    config = Config(
        node=NodeConfig(run_dir="/dev/shm/x", state_dir="/s"),
        device=DeviceConfig(kind=device),
        serving=serving,
        replicas=(replica,),
    )
    environ = {
        "PATH": "/bin",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "40",
        "ROSE_ENGINE_NAME": "x",
    }
    return rollout_command(replica, config, environ=environ)


def test_an_engine_never_has_dev_mode_nor_the_callers_overrides() -> None:
    env = rollout().env
    assert env["PATH"] == "/bin"
    assert "VLLM_SERVER_DEV_MODE" not in env
    assert "VLLM_CPU_KVCACHE_SPACE" not in env
    assert (env["HF_HUB_OFFLINE"], env["VLLM_NO_USAGE_STATS"], env["VLLM_PLUGINS"]) == ("1", "1", "rose")


def test_an_opportunistic_engine_obeys_serving_and_a_dedicated_one_does_not() -> None:
    opportunistic = PluginSettings.from_environ(rollout(cpus=(0,), idle_priority=True).env)
    dedicated = PluginSettings.from_environ(rollout("dedicated").env)
    assert opportunistic is not None
    assert dedicated is not None
    assert (opportunistic.name, opportunistic.serving_name) == ("r0", "serving")
    assert (opportunistic.worker_cpus, opportunistic.worker_idle_priority) == ("0", True)
    assert opportunistic.token_file == "/s/engine.token"
    assert dedicated.serving_name == ""


def test_a_replica_over_several_devices_obeys_all_their_boards() -> None:
    serving = ServingConfig(url="http://127.0.0.1:8000", boards=("serving", "serving-dp1"))
    shared = PluginSettings.from_environ(rollout(serving=serving, profile="/p.json").env)
    assert shared is not None
    assert shared.serving_names == ("serving", "serving-dp1")
    assert shared.profile_file == "/p.json"
    assert settings(serving_name=",").serving_names == ("", "")


def test_sizes_reach_the_command_line() -> None:
    command = rollout(kv_blocks=77, context_tokens_max=512, sequences_max=3, engine_args=("--seed", "9"))
    assert option(command, "--num-gpu-blocks-override") == "77"
    assert option(command, "--max-model-len") == "512"
    assert option(command, "--max-num-seqs") == "3"
    assert command.argv[-2:] == ("--seed", "9")  # what the operator adds comes last, and so wins
    assert "--num-gpu-blocks-override" not in rollout().argv


def test_a_gpu_engine_keeps_asynchronous_scheduling() -> None:
    assert option(rollout(), "--scheduler-cls").endswith("rollout_scheduler.RolloutScheduler")
    command = rollout(device="cuda")
    assert option(command, "--scheduler-cls").endswith("rollout_scheduler.RolloutAsyncScheduler")
    assert option(command, "--worker-cls").endswith("gpu_worker.RoseGPUWorker")
    assert "--enforce-eager" not in command.argv
    assert "OMP_NUM_THREADS" not in command.env


def test_a_serving_engine_has_no_weight_backend() -> None:
    command = serving_command(
        model="/m",
        port=1,
        run_dir="/r",
        token_file="/t",
        cpus=(0, 1),
        shape=EngineShape(kv_blocks=9),
        environ={},
    )
    assert "--weight-transfer-config" not in command.argv
    assert option(command, "--scheduler-cls").endswith("serving_scheduler.ServingScheduler")
    assert command.env["OMP_NUM_THREADS"] == "2"


def test_building_a_command_loads_neither_vllm_nor_torch() -> None:
    code = "import sys, rose.engines.vllm.launch; print({'vllm', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---- the gate's view of the boards --------------------------------------------------------------


class Host:
    """Boards of one host, with a rosed and a serving engine played by the test."""

    def __init__(self, run_dir: Path) -> None:
        self.boards = BoardPaths(run_dir)
        self.rosed = BoardWriter(self.boards.gate("r0"), GatePolicy)
        self.serving = BoardWriter(self.boards.slack("serving"), SlackReading)
        self.policy = GatePolicy(1, GateMode.STRICT, 0, 0, 0, 0, S, S, 0)

    def says(self, **changes: int) -> None:
        lease = {"alive_until_ns": time.monotonic_ns() + 10 * S} | changes
        self.policy = self.policy._replace(**lease)
        self.rosed.publish(self.policy)
        self.rosed.bell.ring()

    def serves(self, running: int) -> None:
        words = [time.monotonic_ns(), 0, running] + [0] * (len(SlackReading._fields) - 3)
        self.serving.publish(SlackReading(*words))


@pytest.fixture
def host(run_dir: Path) -> Host:
    return Host(run_dir)


def gate_of(host: Host, **more: Any) -> StepGate:
    return StepGate(settings(host.boards.run_dir, serving_name="serving", **more), step_tokens_max=512)


def decide(gate: StepGate) -> tuple[bool, GateReason]:
    admission = gate.decide(time.monotonic_ns())
    return admission.open, admission.reason


def test_the_gate_follows_serving(host: Host) -> None:
    gate = gate_of(host)
    host.says()
    host.serves(running=0)
    assert decide(gate) == (True, GateReason.OPEN_IDLE)
    host.serves(running=1)
    assert decide(gate) == (False, GateReason.SERVING_RUNNING)
    host.serves(running=0)
    assert decide(gate) == (True, GateReason.OPEN_IDLE)
    assert gate.transitions == 2
    assert gate.open_ns > 0
    assert gate.closed_ns > 0


def test_nothing_known_is_closed(run_dir: Path) -> None:
    gate = StepGate(settings(run_dir, serving_name="serving"), step_tokens_max=512)
    assert decide(gate) == (False, GateReason.POLICY_UNKNOWN)


def test_a_silent_serving_engine_is_closed(host: Host) -> None:
    gate = gate_of(host, board_stale_ms=50)
    host.says()
    assert decide(gate) == (False, GateReason.BOARD_UNKNOWN)  # never published
    host.serves(running=0)
    assert decide(gate)[0]
    time.sleep(0.1)
    assert decide(gate) == (False, GateReason.BOARD_UNKNOWN)


def test_a_policy_that_contradicts_itself_is_refused_whole(host: Host) -> None:
    gate = gate_of(host)
    host.says(revision=5, mode=GateMode.OPEN, kv_budget_blocks=40)
    assert decide(gate)[0]
    host.says(kv_budget_blocks=80)  # same revision
    assert decide(gate)[0]
    assert gate.limit_status == LimitStatus.CONFLICT
    host.says(revision=4, kv_budget_blocks=60)
    decide(gate)
    assert gate.limit_status == LimitStatus.STALE
    assert not isinstance(gate.policy, Unknown)
    assert (gate.policy.revision, gate.policy.kv_budget_blocks) == (5, 40)
    host.says(revision=6, kv_budget_blocks=60)
    decide(gate)
    assert (gate.limit_status, gate.policy.kv_budget_blocks) == (LimitStatus.APPLIED, 60)


def test_renewing_a_lease_is_no_conflict(host: Host) -> None:
    gate = gate_of(host)
    host.says(mode=GateMode.OPEN)
    decide(gate)
    host.says()
    assert decide(gate)[0]
    assert gate.limit_status == LimitStatus.APPLIED


def test_a_restarted_rosed_may_count_from_one_again(host: Host) -> None:
    gate = gate_of(host)
    host.says(revision=50, mode=GateMode.OPEN)
    decide(gate)
    code = """
import sys, time
from pathlib import Path
from rose.boards import BoardWriter
from rose.core.readings import GatePolicy
writer = BoardWriter(Path(sys.argv[1]), GatePolicy)
writer.publish(GatePolicy(1, 3, 0, 33, 0, time.monotonic_ns() + 10**10, 1, 1, 0))
print("up", flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", code, str(host.boards.gate("r0"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        decide(gate)
        assert not isinstance(gate.policy, Unknown)
        assert (gate.policy.revision, gate.policy.kv_budget_blocks) == (1, 33)
        assert gate.limit_status == LimitStatus.APPLIED
        process.kill()


def test_a_closed_gate_wakes_when_it_opens(host: Host) -> None:
    gate = gate_of(host)
    host.says()
    host.serves(running=1)
    closed = gate.decide(time.monotonic_ns())

    def fall_idle() -> None:
        host.serves(running=0)
        GateBells(host.boards.run_dir).ring(time.monotonic_ns())

    timer = threading.Timer(0.01, fall_idle)
    timer.start()
    admission, slept_ns = gate.wait_until_open(closed)
    timer.join()
    assert admission.open
    assert slept_ns > 0


def test_a_closed_gate_does_not_wait_for_ever(host: Host) -> None:
    gate = gate_of(host)
    host.says(mode=GateMode.CLOSED)
    closed = gate.decide(time.monotonic_ns())
    admission, slept_ns = gate.wait_until_open(closed)
    assert not admission.open
    assert slept_ns >= WAIT_NS_MAX // 2


def test_a_closed_gate_waits_without_a_board_too(run_dir: Path) -> None:
    gate = StepGate(settings(run_dir), step_tokens_max=512)
    closed = gate.decide(time.monotonic_ns())
    admission, slept_ns = gate.wait_until_open(closed)
    assert not admission.open
    assert slept_ns >= WAIT_NS_MAX // 2


def test_a_ring_with_the_gate_still_closed_ends_the_wait(host: Host) -> None:
    gate = gate_of(host)
    host.says(mode=GateMode.CLOSED)
    rings = 0
    stop = threading.Event()

    def ring() -> None:
        nonlocal rings
        while not stop.wait(0.002):
            host.rosed.bell.ring()
            rings += 1

    thread = threading.Thread(target=ring)
    thread.start()
    for _ in range(20):
        gate.wait_until_open(gate.decide(time.monotonic_ns()))
    stop.set()
    thread.join()
    assert rings < 20 * WAIT_NS_MAX / 2e6  # far fewer than if every wait had lasted to its end


def test_bells_of_engines_that_left_are_forgotten(host: Host) -> None:
    bells = GateBells(host.boards.run_dir)
    other = BoardWriter(host.boards.gate("r1"), GatePolicy)
    seen = host.rosed.bell.count, other.bell.count
    bells.ring(time.monotonic_ns())
    assert (host.rosed.bell.count, other.bell.count) == (seen[0] + 1, seen[1] + 1)
    host.boards.gate("r1").unlink()
    bells.ring(time.monotonic_ns())
    assert host.rosed.bell.count == seen[0] + 2
    assert other.bell.count == seen[1] + 1
