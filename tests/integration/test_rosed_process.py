"""The real rosed process with stand-in engines: start, orders, faults, end; nothing may be left running."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rose_daemon.node.engines import free_port
from rose_daemon.node.warden import descendants

from rose import wire
from rose.boards import BoardPaths, BoardReader, BoardWriter
from rose.cli.control import ask
from rose.core.readings import NEVER, GateMode, GatePolicy, SlackReading
from rose.errors import Exit, RoseError
from rose.units import ReplicaId
from rose.weights import tensorfile
from rose.weights.bits import Bits

HERE = Path(__file__).parent
OPPORTUNISTIC, DEDICATED = ReplicaId("opp-0"), ReplicaId("ded-0")
LIMIT_S = 30


class Host:
    """A configured host in temporary directories, and the rosed that runs on it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.run_dir = Path(tempfile.mkdtemp(prefix="rose-test-", dir="/dev/shm"))
        self.paths = BoardPaths(self.run_dir)
        self.socket = self.run_dir / "rosed.sock"
        self.config = base / "rose.toml"
        self.model = base / "model"
        self.model.mkdir()
        shape = {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_size": 64,
            "num_hidden_layers": 2,
        }
        (self.model / "config.json").write_text(json.dumps({**shape, "torch_dtype": "bfloat16"}))
        words = Bits("BF16", (4,), np.zeros(4, "<u2"))
        (self.model / "model.safetensors").write_bytes(tensorfile.encode({"norm.weight": words}, {}))
        self.process: subprocess.Popen[str] | None = None
        self.errors = base / "rosed.log"

    def write(self, extra: str = "", replicas: str | None = None, serving: bool = False) -> None:
        url = "http://127.0.0.1:9" if serving else ""
        own = f'[[replicas]]\nid = "{DEDICATED}"\nkind = "dedicated"\nmodel = "{self.model}"\n'
        lent = f'[[replicas]]\nid = "{OPPORTUNISTIC}"\nkind = "opportunistic"\nmodel = "{self.model}"\n'
        self.config.write_text(
            f'[node]\nstate_dir = "{self.base / "state"}"\nrun_dir = "{self.run_dir}"\n'
            f'control_socket = "{self.socket}"\nengine_stop_grace_s = 4\nrestart_backoff_s = 0.2\n'
            f'{extra}\n[serving]\nurl = "{url}"\n'
            f'[scheduler]\ncontrol = "tcp://127.0.0.1:{free_port("127.0.0.1")}"\n'
            f'[relay]\nurl = "http://127.0.0.1:{free_port("127.0.0.1")}"\n'
            + (replicas if replicas is not None else own + (lent if serving else ""))
        )

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "rose_daemon.rosed", "--config", str(self.config), *arguments]

    @property
    def environ(self) -> dict[str, str]:
        paths = filter(None, (str(HERE), os.environ.get("PYTHONPATH")))
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def start(self, builder: str) -> None:
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                self.command("--engine-builder", f"engine_builders:{builder}"),
                env=self.environ,
                stderr=errors,
                text=True,
            )
        until(lambda: self.status() is not None, self.explain)

    def refuse(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a rosed that is expected to end by itself."""
        return subprocess.run(
            self.command("--engine-builder", "engine_builders:mock", *arguments),
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def status(self) -> dict[str, Any] | None:
        try:
            return ask(self.socket, wire.StatusRequest())
        except RoseError:
            return None

    def replica(self, replica: str) -> dict[str, Any]:
        status = self.status()
        assert status is not None
        return next(entry for entry in status["replicas"] if entry["id"] == replica)

    def explain(self) -> str:
        return self.errors.read_text()[-3000:]

    def children(self) -> list[int]:
        assert self.process
        return descendants(self.process.pid)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        shutil.rmtree(self.run_dir, ignore_errors=True)


def until(condition: Callable[[], object], explain: Callable[[], str], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)


def running(pids: list[int]) -> list[int]:
    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    return [pid for pid in pids if alive(pid)]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.end()


def ready(host: Host, replica: str) -> Callable[[], bool]:
    return lambda: host.replica(replica)["state"] == "ready"


def test_a_dedicated_engine_from_start_to_ordered_end(host: Host) -> None:
    host.write()
    host.start("mock")
    until(ready(host, DEDICATED), host.explain)
    gate = BoardReader(host.paths.gate(DEDICATED), GatePolicy)
    policy = gate.read()
    assert isinstance(policy, GatePolicy)
    assert policy.mode == GateMode.OPEN
    status = host.status()
    assert status
    assert status["devices"][0]["uuid"] == "cpu-0"
    assert status["serving"]["state"] == "none"
    assert not status["healthy"]  # nobody plays the scheduler
    assert any("rose-scheduler" in problem for problem in status["problems"])
    assert host.socket.stat().st_mode & 0o777 == 0o600
    assert (host.base / "state" / "engine.token").stat().st_mode & 0o777 == 0o600

    children = host.children()
    assert len(children) == 2  # warden and engine
    assert host.process
    host.process.send_signal(signal.SIGTERM)
    assert host.process.wait(LIMIT_S) == 0, host.explain()
    assert running(children) == []
    assert list(host.run_dir.iterdir()) == []


def test_the_gate_lease_is_renewed_without_a_new_revision(host: Host) -> None:
    host.write()
    host.start("mock")
    gate = BoardReader(host.paths.gate(DEDICATED), GatePolicy)

    def policy() -> GatePolicy:
        read = gate.read()
        assert isinstance(read, GatePolicy)
        return read

    until(ready(host, DEDICATED), host.explain)
    first = policy()
    until(lambda: policy().alive_until_ns > first.alive_until_ns + 100_000_000, host.explain)
    assert policy().revision == first.revision
    assert policy().alive_until_ns - time.monotonic_ns() <= 1_000_000_000
    assert host.process
    os.kill(host.process.pid, signal.SIGSTOP)  # a rosed that hangs
    try:
        until(lambda: policy().alive_until_ns < time.monotonic_ns(), host.explain)
    finally:
        os.kill(host.process.pid, signal.SIGCONT)


def test_operators_orders(host: Host) -> None:
    host.write(serving=True)
    slack = BoardWriter(host.paths.slack("serving"), SlackReading)
    words = dict.fromkeys(SlackReading._fields, 0) | {"ttft_deadline_ns": NEVER, "tpot_deadline_ns": NEVER}
    slack.publish(SlackReading(**{**words, "stamp_ns": time.monotonic_ns(), "kv_total_blocks": 100}))
    host.start("mock")
    until(ready(host, OPPORTUNISTIC), host.explain)
    until(ready(host, DEDICATED), host.explain)
    until(lambda: host.replica(OPPORTUNISTIC)["kv_blocks"]["total"], host.explain)

    assert ask(host.socket, wire.GateRequest(OPPORTUNISTIC, "closed")) == {"mode": "closed"}
    policy = BoardReader(host.paths.gate(OPPORTUNISTIC), GatePolicy).read()
    assert isinstance(policy, GatePolicy)
    assert policy.mode == GateMode.CLOSED
    assert ask(host.socket, wire.GateRequest(OPPORTUNISTIC, "open", 64)) == {"mode": "open"}
    policy = BoardReader(host.paths.gate(OPPORTUNISTIC), GatePolicy).read()
    assert isinstance(policy, GatePolicy)
    assert (policy.mode, policy.token_cap) == (GateMode.OPEN, 64)
    assert ask(host.socket, wire.GateRequest(OPPORTUNISTIC, "slack")) == {"mode": "slack"}
    assert ask(host.socket, wire.GateRequest(OPPORTUNISTIC, None)) == {"mode": "strict"}

    body = ask(host.socket, wire.ReclaimRequest(OPPORTUNISTIC, "drill"))
    assert body == {"kv_budget_blocks": 512, "state": "pressure"}
    policy = BoardReader(host.paths.gate(OPPORTUNISTIC), GatePolicy).read()
    assert isinstance(policy, GatePolicy)
    assert policy.kv_budget_blocks == 512
    assert host.status()["memory"]["state"] == "pressure"  # type: ignore[index]

    assert ask(host.socket, wire.DrainRequest(DEDICATED)) == {"state": "draining"}
    assert ask(host.socket, wire.DrainRequest(DEDICATED, drain=False)) == {"state": "ready"}

    for request, code in (
        (wire.ReclaimRequest(OPPORTUNISTIC, "again"), Exit.ERROR),
        (wire.ReclaimRequest(DEDICATED, "drill"), Exit.ERROR),
        (wire.ReclaimRequest(ReplicaId("nobody")), Exit.NOT_FOUND),
        (wire.GateRequest(OPPORTUNISTIC, "ajar"), Exit.USAGE),
        (wire.GateRequest(OPPORTUNISTIC, "open", -1), Exit.USAGE),
    ):
        with pytest.raises(RoseError) as refusal:
            ask(host.socket, request)
        assert refusal.value.code == code, request


def test_garbage_on_the_control_socket_is_answered(host: Host) -> None:
    host.write(replicas="")
    host.start("mock")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(host.socket))
        stream = connection.makefile("rwb")
        for line in (b"{\n", b'{"type":"Nothing"}\n', b"\xff\xfe\n", b'{"type":"ReclaimRequest"}\n'):
            stream.write(line)
            stream.flush()
            assert wire.unpack_reply(stream.readline()).code == Exit.USAGE
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(host.socket))
        connection.sendall(b"x" * (wire.MESSAGE_BYTES_MAX + 4096))
        assert connection.recv(1) == b""
    assert host.status() is not None


def test_a_dead_engine_at_start_is_told_with_its_last_words_and_tried_again(host: Host) -> None:
    host.write()
    host.start("dying")
    until(lambda: host.replica(DEDICATED)["attempts"] >= 2, host.explain)
    reason = host.replica(DEDICATED)["reason"]
    assert "exited_code_3" in reason
    assert "no such quantization" in reason
    assert str(host.base / "state" / "logs" / f"{DEDICATED}.log") in reason
    assert "\n" not in reason


def test_a_killed_engine_is_started_again(host: Host) -> None:
    host.write()
    host.start("mock")
    until(ready(host, DEDICATED), host.explain)
    warden = host.replica(DEDICATED)["pid"]
    (engine,) = descendants(warden)
    os.kill(engine, signal.SIGKILL)
    until(lambda: host.replica(DEDICATED)["attempts"] == 2, host.explain)
    until(ready(host, DEDICATED), host.explain)
    assert host.replica(DEDICATED)["pid"] != warden


def test_an_engine_that_never_answers_is_killed(host: Host) -> None:
    host.write(extra="engine_start_timeout_s = 0.5")
    host.start("hanging")
    until(lambda: host.replica(DEDICATED)["attempts"] >= 2, host.explain)
    assert "start_timeout" in host.explain()


def test_a_killed_rosed_leaves_no_engine_behind(host: Host) -> None:
    host.write(extra="engine_start_timeout_s = 60")
    host.start("hanging")
    until(lambda: len(host.children()) == 2, host.explain)
    children = host.children()
    assert host.process
    host.process.kill()
    host.process.wait()
    until(lambda: not running(children), host.explain)

    host.start("mock")  # and its leftovers are no obstacle to the next one
    until(ready(host, DEDICATED), host.explain)


def test_a_second_signal_does_not_wait_for_the_grace(host: Host) -> None:
    host.write(extra="engine_start_timeout_s = 60")
    host.config.write_text(host.config.read_text().replace("stop_grace_s = 4", "stop_grace_s = 600"))
    host.start("hanging")
    until(lambda: len(host.children()) == 2, host.explain)
    log = host.base / "state" / "logs" / f"{DEDICATED}.log"
    until(lambda: "up" in log.read_text().splitlines(), host.explain)
    children = host.children()
    assert host.process
    host.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert host.process.poll() is None
    host.process.send_signal(signal.SIGINT)
    assert host.process.wait(LIMIT_S) == 0, host.explain()
    assert running(children) == []


class TestRefusals:
    """Each is one clear line and a hint, before anything was started."""

    def check(self, host: Host, code: Exit, *words: str) -> None:
        ended = host.refuse()
        assert ended.returncode == code, ended.stderr
        assert "Traceback" not in ended.stderr
        first = ended.stderr.splitlines()[0]
        assert first.startswith("rosed: ")
        for word in words:
            assert word in first, first
        assert len(ended.stderr.splitlines()) <= 2

    def test_malformed_file(self, host: Host) -> None:
        host.config.write_text("[node\n")
        self.check(host, Exit.USAGE, str(host.config), "not valid TOML", "line 1")

    def test_unknown_key(self, host: Host) -> None:
        host.config.write_text("[node]\ntik_ms = 3\n")
        self.check(host, Exit.USAGE, "tik_ms")

    def test_missing_file(self, host: Host) -> None:
        self.check(host, Exit.USAGE, str(host.config), "no such file")

    def test_missing_model(self, host: Host) -> None:
        host.write()
        shutil.rmtree(host.model)
        self.check(host, Exit.USAGE, f"replicas.{DEDICATED}.model", str(host.model), "no such directory")
        host.model.mkdir()
        self.check(host, Exit.USAGE, "config.json")

    @pytest.mark.parametrize(
        ("name", "content", "word"),
        [
            ("config.json", b"{", "config.json cannot be read"),
            ("config.json", b"[]", "not a JSON object"),
            ("model.safetensors", None, "no safetensors files"),
            ("model.safetensors", b"\x08", "model.safetensors"),
        ],
    )
    def test_model_that_no_engine_could_load(
        self, host: Host, name: str, content: bytes | None, word: str
    ) -> None:
        host.write()
        if content is None:
            (host.model / name).unlink()
        else:
            (host.model / name).write_bytes(content)
        self.check(host, Exit.USAGE, f"replicas.{DEDICATED}.model", word)

    def test_state_that_cannot_be_kept(self, host: Host) -> None:
        host.write()
        (host.base / "state").write_text("")
        self.check(host, Exit.ERROR, "node.state_dir", "not a directory")

    def test_port_in_use(self, host: Host) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            host.write()
            host.config.write_text(host.config.read_text() + f"port = {port}\n")
            self.check(host, Exit.NOT_READY, DEDICATED, str(port), "in use")

    def test_metrics_port_in_use(self, host: Host) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            host.write(extra=f"metrics_port = {taken.getsockname()[1]}")
            self.check(host, Exit.NOT_READY, "metrics", "in use")

    def test_core_that_is_not_there(self, host: Host) -> None:
        host.write()
        host.config.write_text(host.config.read_text() + "cpus = [4096]\n")
        self.check(host, Exit.USAGE, DEDICATED, "4096")

    def test_token_that_others_can_read(self, host: Host) -> None:
        host.write()
        (host.base / "state").mkdir()
        token = host.base / "state" / "engine.token"
        token.write_text("secret")
        token.chmod(0o644)
        self.check(host, Exit.USAGE, str(token), "others")

    def test_a_second_rosed_on_the_same_host(self, host: Host) -> None:
        host.write()
        host.start("mock")
        self.check(host, Exit.NOT_READY, DEDICATED, "another rosed")
        host.write(replicas="")
        self.check(host, Exit.NOT_READY, "another rosed")
        assert host.status() is not None

    def test_check_starts_nothing(self, host: Host) -> None:
        host.write()
        ended = host.refuse("--check")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert "1 replica" in ended.stdout
        assert list(host.run_dir.iterdir()) == []
        assert not (host.base / "state").exists()


def test_metrics_are_served(host: Host) -> None:
    port = free_port("127.0.0.1")
    host.write(extra=f"metrics_port = {port}")
    host.start("mock")
    until(ready(host, DEDICATED), host.explain)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = connection.makefile("r").read()
    assert f'rose_replica_state{{replica="{DEDICATED}",state="ready"}} 1.0' in text
