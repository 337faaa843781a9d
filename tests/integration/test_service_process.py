"""The daemons as a service manager sees them: ready, alive, reloaded; and what a full disk does to them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from rose_daemon.node.engines import free_port
from rose_daemon.service.tokens import Scope, make_token
from test_rosed_process import DEDICATED, OPPORTUNISTIC, Host, ready, until

from rose import wire
from rose.boards import BoardReader
from rose.client import Scheduler
from rose.core.readings import GateMode, GatePolicy
from rose.errors import ConfigError, Exit, NotReady
from rose.weights.relay.http import ROOT

LIMIT_S = 60


class Manager:
    """What systemd is to a daemon."""

    def __init__(self, directory: Path) -> None:
        self.address = directory / "notify"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.address))
        self.socket.settimeout(LIMIT_S)

    @property
    def environ(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": str(self.address), "WATCHDOG_USEC": "200000"}

    def wait_for(self, word: str) -> list[str]:
        """What came until then, `word` the last of it."""
        seen: list[str] = []
        while not seen or not seen[-1].startswith(word):
            seen.append(self.socket.recv(4096).decode())
        return seen


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    made = Manager(tmp_path)
    for name, value in made.environ.items():
        monkeypatch.setenv(name, value)
    yield made
    made.socket.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.end()


def policy(host: Host, replica: str) -> GatePolicy:
    found = BoardReader(host.paths.gate(replica), GatePolicy).read()  # type: ignore[arg-type]
    assert isinstance(found, GatePolicy)
    return found


# ---- rosed ----


def test_rosed_is_ready_when_it_works_and_beats_from_its_loop(host: Host, manager: Manager) -> None:
    host.write()
    with host.errors.open("w") as errors:
        host.process = subprocess.Popen(
            host.command("--engine-builder", "engine_builders:mock"),
            env=host.environ,
            stderr=errors,
            text=True,
        )
    manager.wait_for("READY=1")
    assert host.status() is not None, host.explain()
    assert policy(host, DEDICATED).alive_until_ns > 0
    beats = manager.wait_for("WATCHDOG=1") + manager.wait_for("WATCHDOG=1")
    assert beats
    host.process.send_signal(signal.SIGSTOP)
    with contextlib.suppress(TimeoutError):
        manager.socket.settimeout(1)  # what was on its way
        while True:
            manager.socket.recv(4096)
    manager.socket.settimeout(LIMIT_S)
    host.process.send_signal(signal.SIGCONT)
    manager.wait_for("WATCHDOG=1")
    host.process.terminate()
    manager.wait_for("STOPPING=1")
    assert host.process.wait(LIMIT_S) == 0


def test_rosed_takes_the_socket_that_systemd_holds(host: Host) -> None:
    host.write()
    held = socket.socket(socket.AF_UNIX)
    held.bind(str(host.socket))
    held.listen()
    early = socket.socket(socket.AF_UNIX)
    early.settimeout(LIMIT_S)
    early.connect(str(host.socket))  # before anybody is there to answer
    early.sendall(wire.pack_line(wire.StatusRequest()))
    # What execs keeps its pid, and has the socket as its descriptor 3.
    start = 'export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@" 3<&"$HELD"'
    with host.errors.open("w") as errors:
        host.process = subprocess.Popen(
            ["bash", "-c", start, "bash", *host.command("--engine-builder", "engine_builders:mock")],
            env=host.environ | {"HELD": str(held.fileno())},
            pass_fds=(held.fileno(),),
            stderr=errors,
        )
    with early, early.makefile("rb") as stream:
        assert wire.unpack_reply(stream.readline()).body is not None, host.explain()
    until(ready(host, DEDICATED), host.explain)
    environs = []
    for pid in host.children():
        with contextlib.suppress(OSError):  # it ended meanwhile
            environs.append(Path(f"/proc/{pid}/environ").read_bytes())
    assert environs
    assert not [each for each in environs if b"LISTEN_" in each], "what is ours to listen on is no engine's"
    host.process.terminate()
    assert host.process.wait(LIMIT_S) == 0, host.explain()
    assert host.socket.is_socket(), "systemd goes on listening there"
    held.close()


def test_rosed_refuses_a_socket_that_is_not_its_own(host: Host, tmp_path: Path) -> None:
    host.write()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other"))
        other.listen()
        start = 'export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@" 3<&"$HELD"'
        ended = subprocess.run(
            ["bash", "-c", start, "bash", *host.command("--engine-builder", "engine_builders:mock")],
            env=host.environ | {"HELD": str(other.fileno())},
            pass_fds=(other.fileno(),),
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    assert ended.returncode == Exit.USAGE
    assert "rosed.socket must be node.control_socket" in ended.stderr


def test_sighup_changes_the_gates_policy_and_refuses_what_is_wrong(host: Host, manager: Manager) -> None:
    host.write(serving=True)
    host.start("mock")
    manager.wait_for("READY=1")
    text = host.config.read_text()
    assert host.process is not None
    host.config.write_text(
        text.replace("[node]\n", "[node]\ntick_ms = 51\n") + '[admission]\nmode = "closed"\ntoken_cap = 7\n'
    )
    host.process.send_signal(signal.SIGHUP)
    assert "MONOTONIC_USEC=" in manager.wait_for("RELOADING=1")[-1]
    manager.wait_for("READY=1")
    until(lambda: policy(host, OPPORTUNISTIC).token_cap == 7, host.explain)
    assert policy(host, OPPORTUNISTIC).mode == GateMode.CLOSED
    until(lambda: "code=reloaded" in host.explain(), host.explain)
    assert "needs_restart=node.tick_ms" in host.explain()

    host.config.write_text(text + '[admission]\nmode = "sometimes"\n')
    host.process.send_signal(signal.SIGHUP)
    manager.wait_for("READY=1")
    until(lambda: "code=reload_refused" in host.explain(), host.explain)
    assert policy(host, OPPORTUNISTIC).token_cap == 7
    assert host.status() is not None


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a small disk here")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(disk: Path) -> Path:
    path = disk / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x")
    return path


def test_rosed_goes_on_over_a_full_disk_and_writes_again_when_there_is_room(host: Host, disk: Path) -> None:
    host.write()
    host.config.write_text(host.config.read_text().replace(f'"{host.base / "state"}"', f'"{disk / "state"}"'))
    host.start("mock")
    until(ready(host, DEDICATED), host.explain)
    filler = fill(disk)
    until(lambda: "code=journal_lost" in host.explain(), host.explain)
    before = policy(host, DEDICATED).alive_until_ns
    until(lambda: policy(host, DEDICATED).alive_until_ns > before, host.explain)
    assert ready(host, DEDICATED)()
    # The fault is said, and does not fill the next disk: one line for each file and minute after a burst.
    assert host.errors.read_text().count("code=journal_lost") <= 100
    filler.unlink()
    journal = disk / "state" / "journal.jsonl"
    size = journal.stat().st_size
    until(lambda: journal.stat().st_size > size, host.explain)
    assert host.process is not None
    host.process.terminate()
    assert host.process.wait(LIMIT_S) == 0, host.explain()


def test_rosed_does_not_start_on_a_disk_that_takes_nothing(host: Host, disk: Path) -> None:
    host.write()
    host.config.write_text(host.config.read_text().replace(f'"{host.base / "state"}"', f'"{disk / "state"}"'))
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    refused = host.refuse()
    assert refused.returncode == Exit.ERROR, "the service manager tries again: the disk may be mended"
    assert "is not writable" in refused.stderr
    assert "Traceback" not in refused.stderr


# ---- scheduler and relay ----


def ask(url: str, token: str, method: str = "GET", body: bytes | None = None) -> int:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data=body, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@contextlib.contextmanager
def daemon(name: str, directory: Path, config: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    path, errors = directory / "rose.toml", directory / f"{name}.log"
    path.write_text(config)
    with errors.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "rose.cli.main", name, "--config", str(path)],
            stderr=file,
            text=True,
            env=os.environ,
        )
    try:
        yield process, errors
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def test_the_scheduler_is_ready_when_it_answers_and_takes_new_tokens_on_sighup(
    tmp_path: Path, manager: Manager
) -> None:
    tokens, port = tmp_path / "tokens", free_port("127.0.0.1")
    tokens.mkdir()
    held = {scope: make_token(tokens, "first", scope).read_text().strip() for scope in Scope}
    config = (
        f'[scheduler]\ngateway_port = {port}\ncontrol = "tcp://127.0.0.1:{free_port("127.0.0.1")}"\n'
        f'state_dir = "{tmp_path / "state"}"\ntokens_dir = "{tokens}"\n'
    )
    with daemon("scheduler", tmp_path, config) as (process, errors):
        manager.wait_for("READY=1")
        url = f"http://127.0.0.1:{port}"
        job = json.dumps({"job": "a", "model": "m"}).encode()
        drain = f"{url}/rose/v1/replicas/r/drain"
        look = {scope: ask(f"{url}/rose/v1/status", token) for scope, token in held.items()}
        use = {scope: ask(f"{url}/rose/v1/jobs", token, "POST", job) for scope, token in held.items()}
        operate = {scope: ask(drain, token, "POST", b"{}") for scope, token in held.items()}
        assert list(look.values()) == [200, 200, 200]
        assert list(use.values()) == [403, 201, 200]
        assert list(operate.values()) == [403, 403, 200]
        export = {scope: ask(f"{url}/rose/v1/jobs/a/answers", token) for scope, token in held.items()}
        assert list(export.values()) == [403, 200, 200]
        assert ask(f"{url}/rose/v1/status", "wrong") == 401
        manager.wait_for("WATCHDOG=1")

        second = make_token(tokens, "second", Scope.READ).read_text().strip()
        (tokens / "first.read").unlink()
        assert ask(f"{url}/rose/v1/status", second) == 401
        process.send_signal(signal.SIGHUP)
        manager.wait_for("RELOADING=1")
        manager.wait_for("READY=1")
        assert ask(f"{url}/rose/v1/status", second) == 200
        assert ask(f"{url}/rose/v1/status", held[Scope.READ]) == 401
        assert ask(f"{url}/rose/v1/status", held[Scope.ADMIN]) == 200

        (tokens / "second.read").chmod(0o644)  # now others can read it: the ring stays as it is
        process.send_signal(signal.SIGHUP)
        manager.wait_for("READY=1")
        assert ask(f"{url}/rose/v1/status", second) == 200
    lines = [json.loads(line) for line in errors.read_text().splitlines()]
    assert {"reloaded", "reload_refused", "scheduler_ready"} <= {line["code"] for line in lines}
    assert second not in errors.read_text()


def test_the_relay_is_ready_when_it_answers_and_takes_new_tokens_on_sighup(
    tmp_path: Path, manager: Manager
) -> None:
    tokens, port = tmp_path / "tokens", free_port("127.0.0.1")
    tokens.mkdir()
    reader = make_token(tokens, "host", Scope.READ).read_text().strip()
    trainer = make_token(tokens, "trainer", Scope.SUBMIT).read_text().strip()
    with daemon("relay", tmp_path, f'[relay]\nport = {port}\ntokens_dir = "{tokens}"\n') as (process, _):
        manager.wait_for("READY=1")
        url = f"http://127.0.0.1:{port}"
        assert ask(f"{url}/health", "") == 200
        stat = f"{url}{ROOT}/job-1"
        assert [ask(stat, token) for token in (reader, trainer, "wrong")] == [200, 200, 401]
        gone = f"{stat}/versions/1"
        assert [ask(gone, token, "DELETE") for token in (reader, trainer)] == [401, 200]
        manager.wait_for("WATCHDOG=1")
        (tokens / "host.read").unlink()
        process.send_signal(signal.SIGHUP)
        manager.wait_for("RELOADING=1")
        manager.wait_for("READY=1")
        assert ask(stat, reader) == 401


def certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate for localhost that signs itself, and its key."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_the_gateway_speaks_tls_and_clients_know_it(tmp_path: Path, manager: Manager) -> None:
    if not shutil.which("openssl"):
        pytest.skip("needs openssl to make a certificate")
    cert, key = certificate(tmp_path)
    port = free_port("127.0.0.1")
    config = (
        f'[scheduler]\ngateway_port = {port}\ncontrol = "tcp://127.0.0.1:{free_port("127.0.0.1")}"\n'
        f'state_dir = "{tmp_path / "state"}"\ntls_cert = "{cert}"\ntls_key = "{key}"\ntls_ca = "{cert}"\n'
    )
    with daemon("scheduler", tmp_path, config) as (process, _):
        manager.wait_for("READY=1")
        url = f"https://127.0.0.1:{port}"
        assert Scheduler(url, tls_ca=cert).status()["nodes"] == []
        with pytest.raises(ConfigError, match="tls_ca"):
            Scheduler(url).status()  # the system's authorities do not know it
        with pytest.raises(NotReady):
            Scheduler(f"http://127.0.0.1:{port}").status()
        shown = subprocess.run(
            [sys.executable, "-m", "rose.cli.main", "jobs", "--json", "-c", str(tmp_path / "rose.toml")],
            capture_output=True, text=True, check=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert json.loads(shown.stdout) is not None
        before = ssl.get_server_certificate(("127.0.0.1", port))
        certificate(tmp_path)
        process.send_signal(signal.SIGHUP)
        manager.wait_for("RELOADING=1")
        manager.wait_for("READY=1")
        assert ssl.get_server_certificate(("127.0.0.1", port)) not in ("", before)
