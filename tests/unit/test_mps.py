"""MPS: formats that it does not ignore in silence, a daemon that captures nobody else, and an ordered end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_mps_control
import pytest
from rose_daemon.mps import command, release
from rose_daemon.mps.control import MpsControl, open_control
from rose_daemon.mps.plan import MpsPlan, differences, pinned_limit
from rose_daemon.mps.watch import RECOVERING, SUSPECT, MpsFaults
from rose_daemon.node import warden
from rose_daemon.node.mps import NodeMps
from typer.testing import CliRunner

from rose import config as configuration
from rose.boards import Owner, process_start_ticks
from rose.config import Config, DeviceConfig, MpsConfig, NodeConfig, ReplicaConfig, ServingConfig
from rose.core.events import EngineExited, EngineReady
from rose.core.readings import Unknown
from rose.engines.vllm.launch import EngineCommand, rollout_command
from rose.errors import ConfigError, NotReady
from rose.units import GIB, MIB, NodeId, ReplicaId, WeightVersion

UUID = "GPU-5d2ab4c1-0000-0000-0000-000000000001"
FAKE = fake_mps_control.__file__
DEFAULT = "/tmp/nvidia-mps"


@pytest.fixture
def control(tmp_path: Path) -> MpsControl:
    plan = MpsPlan(UUID, tmp_path / UUID, 30, 10 * GIB)
    made = MpsControl(FAKE, plan)
    made.start()
    return made


def state(control: MpsControl, servers: dict[int, list[int]] | None) -> None:
    path = control.plan.directory / "servers"
    path.unlink(missing_ok=True)
    if servers is not None:
        path.write_text(json.dumps(servers))


def commands(control: MpsControl) -> list[tuple[int, str]]:
    lines = (control.plan.directory / "commands").read_text().splitlines()
    return [(int(line.partition(" ")[0]), line.partition(" ")[2]) for line in lines]


# ---- formats and environments --------------------------------------------------------------------------


def test_the_memory_limit_is_in_the_only_form_that_is_not_ignored() -> None:
    assert pinned_limit(10 * GIB, "0", (UUID,)) == "0=10240M"
    assert pinned_limit(10 * GIB, UUID, (UUID,)) == "0=10240M"
    assert pinned_limit(10 * GIB, UUID, ("GPU-other", UUID)) == "1=10240M"
    assert pinned_limit(10 * GIB + 5, "1", ("GPU-other", UUID)) == "1=10240M"
    for device in ("1", "GPU-other", "", "-1", "0=1"):
        with pytest.raises(ConfigError, match="none of the daemon's devices"):
            pinned_limit(10 * GIB, device, (UUID,))
    with pytest.raises(ConfigError, match="less than a MiB"):
        pinned_limit(MIB - 1, "0", (UUID,))


def test_serving_gets_the_way_to_the_daemon_and_no_limit() -> None:
    plan = MpsPlan.of(MpsConfig(enabled=True, memory_bytes=10 * GIB, thread_percentage=25), UUID)
    assert plan.serving_environ() == {
        "CUDA_MPS_PIPE_DIRECTORY": f"/run/rose/mps/{UUID}/pipe",
        "CUDA_VISIBLE_DEVICES": UUID,
    }
    assert plan.rollout_environ() == plan.serving_environ() | {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=10240M",
    }
    unlimited = MpsPlan.of(MpsConfig(enabled=True), UUID).rollout_environ()
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in unlimited


@pytest.mark.parametrize("directory", [DEFAULT, f"{DEFAULT}/rose", "run/mps", ""])
def test_the_default_path_is_never_used(directory: str) -> None:
    with pytest.raises(ConfigError, match=r"mps\.run_dir"):
        configuration.build({"mps": {"run_dir": directory}}, "rose.toml")
    for environ in (
        MpsPlan.of(MpsConfig(), UUID).daemon_environ(),
        MpsPlan.of(MpsConfig(), UUID).rollout_environ(),
    ):
        assert DEFAULT not in " ".join(environ.values())
        assert UUID in environ["CUDA_MPS_PIPE_DIRECTORY"], "one daemon for each GPU"


@pytest.mark.parametrize(
    ("mps", "key"),
    [
        ({"enabled": True}, "mps.enabled"),  # on a CPU
        ({"thread_percentage": 0}, "mps.thread_percentage"),
        ({"thread_percentage": 101}, "mps.thread_percentage"),
        ({"memory_bytes": 1000}, "mps.memory_bytes"),
        ({"memory_bytes": -1}, "mps.memory_bytes"),
    ],
)
def test_settings_that_make_no_sense_are_refused(mps: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        configuration.build({"mps": mps}, "rose.toml")


def config(tmp_path: Path) -> Config:
    common = {"model": str(tmp_path), "port": 1}
    return Config(
        node=NodeConfig(id=NodeId("n"), state_dir=str(tmp_path), run_dir=str(tmp_path)),
        device=DeviceConfig(kind="cuda", gpu=UUID),
        serving=ServingConfig(url="http://127.0.0.1:1"),
        mps=MpsConfig(enabled=True, run_dir=str(tmp_path), control=FAKE, memory_bytes=10 * GIB),
        replicas=(
            ReplicaConfig(id=ReplicaId("opp"), kind="opportunistic", **common),
            ReplicaConfig(id=ReplicaId("ded"), kind="dedicated", **common),
        ),
    )


def test_only_the_engine_beside_serving_gets_a_share(tmp_path: Path) -> None:
    made = config(tmp_path)
    before = dict(os.environ)

    def build(section: ReplicaConfig, whole: Config) -> EngineCommand:
        return rollout_command(section, whole, environ={})

    built = NodeMps(open_control(made)).builder(build)
    lent, dedicated = (built(section, made).env for section in made.replicas)
    assert lent["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=10240M"
    assert lent["CUDA_MPS_PIPE_DIRECTORY"] == f"{tmp_path}/{UUID}/pipe"
    assert not any(name.startswith("CUDA") for name in dedicated)
    assert dict(os.environ) == before, "nor do rosed and what it starts otherwise"


# ---- the daemon ---------------------------------------------------------------------------------------


def test_the_daemon_is_started_once_on_its_own_path_for_its_own_gpu(control: MpsControl) -> None:
    environ = json.loads((control.plan.directory / "environ").read_text())
    assert environ["CUDA_VISIBLE_DEVICES"] == UUID
    assert environ["CUDA_MPS_PIPE_DIRECTORY"] == str(control.plan.pipe_directory)
    assert environ["CUDA_MPS_LOG_DIRECTORY"] == str(control.plan.directory / "log")
    assert control.plan.pipe_directory.stat().st_mode & 0o777 == 0o700
    (control.plan.directory / "environ").unlink()
    control.start()
    assert not (control.plan.directory / "environ").exists(), "it runs already"
    assert control.clients() == {}


def test_the_daemon_is_not_stopped_under_its_clients(control: MpsControl) -> None:
    state(control, {100: [7, 8]})
    with pytest.raises(NotReady, match="7, 8 are on it"):
        control.stop()
    state(control, {100: []})
    control.stop()
    assert control.clients() is None
    control.stop()


@pytest.mark.parametrize("binary", ["/nonexistent/mps", "/bin/false"])
def test_a_daemon_that_cannot_be_started_is_one_clear_line(tmp_path: Path, binary: str) -> None:
    with pytest.raises(NotReady, match="MPS"):
        MpsControl(binary, MpsPlan(UUID, tmp_path / "d", 30, 0)).start()


def test_the_operator_is_told_what_to_put_into_the_serving_launch(tmp_path: Path) -> None:
    path = tmp_path / "rose.toml"
    device = f'[device]\nkind = "cuda"\ngpu = "{UUID}"\n'
    path.write_text(f'{device}[mps]\nenabled = true\nrun_dir = "{tmp_path}"\ncontrol = "{FAKE}"\n')
    runner = CliRunner()
    shown = runner.invoke(command.app, ["env", "--config", str(path)])
    assert shown.stdout.splitlines() == [
        f"export CUDA_MPS_PIPE_DIRECTORY={tmp_path}/{UUID}/pipe",
        f"export CUDA_VISIBLE_DEVICES={UUID}",
        "export ROSE_ENGINE_OVERLAPS=1",
    ]
    assert "MPS runs" in runner.invoke(command.app, ["start", "--config", str(path)]).stdout
    assert "MPS is stopped" in runner.invoke(command.app, ["stop", "--config", str(path)]).stdout
    path.write_text('[device]\nkind = "cuda"\n')
    assert isinstance(runner.invoke(command.app, ["env", "--config", str(path)]).exception, ConfigError)


# ---- who is on it ---------------------------------------------------------------------------------------


@pytest.fixture
def client() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "print(flush=True); import time; time.sleep(600)"],
        stdout=subprocess.PIPE,
        env={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"},
    )
    assert process.stdout
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def test_it_is_mps_only_if_serving_is_on_our_daemon(
    control: MpsControl, client: subprocess.Popen[bytes]
) -> None:
    sharing, serving = NodeMps(control), Owner(client.pid, process_start_ticks(client.pid))
    assert sharing.mode == "time-slice"
    for servers, owner, mode in (
        ({100: [client.pid]}, serving, "mps"),
        ({100: [4111]}, serving, "time-slice"),  # a pid of another namespace is nobody's proof
        ({100: [client.pid]}, Unknown("serving_not_seen"), "time-slice"),
        ({100: [client.pid]}, None, "time-slice"),
        ({}, serving, "time-slice"),
        (None, serving, "time-slice"),
    ):
        state(control, servers)
        sharing.look(owner)
        assert sharing.mode == mode


def test_limits_are_read_back_from_the_client(control: MpsControl, client: subprocess.Popen[bytes]) -> None:
    sharing = NodeMps(control)
    state(control, {100: [client.pid]})
    sharing.look(None)
    faults = sharing.ignored_limits(os.getpid())
    assert f"process {client.pid}: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is 100, not 30" in faults
    assert f"process {client.pid}: CUDA_MPS_PINNED_DEVICE_MEM_LIMIT is not set, not 0=10240M" in faults
    assert differences({"A": "1"}, {"A": "1", "B": "2"}) == []
    state(control, {100: [1]})
    sharing.look(None)
    assert sharing.ignored_limits(os.getpid()) == [], "nobody of ours"


# ---- the end of a client ----------------------------------------------------------------------------------


def test_clients_among_the_victims_are_terminated_and_nobody_else(control: MpsControl) -> None:
    state(control, {100: [7, 8], 200: [9]})
    release.release(FAKE, str(control.plan.pipe_directory), {8, 9, 1234})
    assert control.clients() == {7: 100}
    terminated = [text for _, text in commands(control) if text.startswith("terminate")]
    assert terminated == ["terminate_client 100 8", "terminate_client 200 9"]


@pytest.mark.parametrize("trouble", ["no daemon", "stubborn", "garbage"])
def test_what_may_still_be_a_client_may_not_be_killed(
    control: MpsControl, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "_GONE_S", 0.2)
    state(control, {100: [7]})
    if trouble == "no daemon":
        state(control, None)
    elif trouble == "stubborn":
        (control.plan.directory / "stubborn").touch()
    binary = "/bin/cat" if trouble == "garbage" else FAKE
    with pytest.raises(release.ControlFailed):
        release.release(binary, str(control.plan.pipe_directory), {7})


DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: print("TERM", time.monotonic_ns(), flush=True))
print("pid", os.getpid(), flush=True)
while True:
    time.sleep(1)
"""


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def engine(control: MpsControl, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """An engine that does not heed SIGTERM, under a warden that knows of MPS."""
    log = tmp_path / "engine.log"
    argv = [sys.executable, "-I", "-S", warden.__file__, str(log), "1000000", "0.3", "--"]
    process = subprocess.Popen(
        [*argv, sys.executable, "-I", "-S", "-c", DEAF],
        stdin=subprocess.PIPE,
        env={**os.environ, warden.BEFORE_KILL: json.dumps(control.before_kill())},
    )
    until(lambda: log.exists() and "pid" in log.read_text())
    yield process, log
    for pid in warden.descendants(process.pid):
        os.kill(pid, 9)
    process.kill()
    process.wait()


def pid_in(log: Path) -> int:
    return int(log.read_text().split()[1])


@pytest.mark.parametrize("how", ["rosed is gone", "killed"])
def test_an_engine_is_asked_then_taken_off_and_only_then_killed(
    control: MpsControl, engine: tuple[subprocess.Popen[bytes], Path], how: str
) -> None:
    process, log = engine
    pid = pid_in(log)
    state(control, {100: [pid]})
    assert process.stdin
    if how == "killed":
        process.terminate()
        until(lambda: "TERM" in log.read_text())
        process.send_signal(warden.KILL)
    else:
        process.stdin.close()
    process.wait(20)
    ended_ns = time.monotonic_ns()
    asked_ns = int(log.read_text().split("TERM")[1].split()[0])
    (terminated_ns,) = [at for at, text in commands(control) if text == f"terminate_client 100 {pid}"]
    assert asked_ns < terminated_ns < ended_ns
    assert process_start_ticks(pid) == 0


def test_without_an_answer_nothing_is_killed_and_the_log_says_so(
    control: MpsControl, engine: tuple[subprocess.Popen[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, log = engine
    state(control, None)
    process.terminate()
    process.send_signal(warden.KILL)
    until(lambda: "nothing is killed: MPS: get_server_list: Cannot find" in log.read_text())
    assert process.poll() is None
    assert process_start_ticks(pid_in(log)) != 0
    state(control, {})  # the daemon answers again: nobody is on it
    process.wait(20)
    assert process_start_ticks(pid_in(log)) == 0


# ---- faults ------------------------------------------------------------------------------------------------

CUDA_807 = (
    "exited_code_1: RuntimeError: CUDA error: MPS server is not ready to accept new MPS client requests"
)
SERVING, OTHER = Owner(1, 1), Owner(1, 2)


def test_a_server_that_is_not_ready_is_named_after_some_starts() -> None:
    faults, seen = MpsFaults(), []
    for _ in range(5):
        faults.exited(CUDA_807, SERVING)
        seen.append(faults.health(SERVING).trouble)
    assert seen == ["", "", *[RECOVERING] * 3]
    assert not faults.health(SERVING).drains
    faults.ready()
    assert faults.health(SERVING).trouble == ""


@pytest.mark.parametrize(
    "reason",
    [
        "exited_code_1: torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "exited_code_1: RuntimeError: CUDA driver error 700",
        "exited_code_1: RuntimeError: CUDA error: unspecified launch failure",
        "exited_code_1: RuntimeError: CUDA error: device-side assert triggered",
        "exited_code_1: RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS",
    ],
)
def test_a_cuda_fault_makes_serving_suspect_until_it_was_restarted(reason: str) -> None:
    faults = MpsFaults()
    faults.exited(reason, SERVING)
    assert faults.health(SERVING).trouble == SUSPECT
    faults.ready()
    assert faults.health(None).trouble == SUSPECT, "not known is not restarted"
    assert faults.health(SERVING).trouble == SUSPECT
    assert "restart it" in faults.health(SERVING).advice
    assert faults.health(OTHER).trouble == ""
    assert faults.health(SERVING).trouble == ""


def test_a_fault_while_serving_was_not_seen_is_held_against_the_next_that_is() -> None:
    faults = MpsFaults()
    faults.exited("CUDA error: an illegal memory access was encountered", None)
    assert [faults.health(each).trouble for each in (None, SERVING, OTHER)] == [SUSPECT, SUSPECT, ""]


@pytest.mark.parametrize("reason", ["exited_code_1: ValueError: no such model", "shutdown", "out of memory"])
def test_other_ends_say_nothing_of_mps(reason: str) -> None:
    faults = MpsFaults()
    for _ in range(9):
        faults.exited(reason, SERVING)
    assert faults.health(SERVING).trouble == ""


def test_only_engines_on_the_shared_gpu_tell_of_it(control: MpsControl) -> None:
    sharing, lent = NodeMps(control), (ReplicaId("opp"),)
    for _ in range(3):
        sharing.heard(EngineExited(ReplicaId("ded"), 1, CUDA_807), lent, SERVING)
    assert sharing.health(SERVING).trouble == ""
    for _ in range(3):
        sharing.heard(EngineExited(ReplicaId("opp"), 1, CUDA_807), lent, Unknown("serving_not_seen"))
    assert sharing.health(SERVING).trouble == RECOVERING
    sharing.heard(EngineReady(ReplicaId("opp"), WeightVersion(0)), lent, SERVING)
    assert sharing.health(SERVING).trouble == ""
