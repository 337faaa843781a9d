"""The scheduler and engines as processes, and what happens when one is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import zmq
from gateway_world import MESSAGES, MODEL, expected
from rose_daemon import mock_model
from rose_daemon.scheduler.driver import settings_of
from rose_daemon.scheduler.store import Store

from rose import wire
from rose.client import Job, Scheduler
from rose.config import SchedulerConfig
from rose.core.cluster import ClusterMachine
from rose.core.events import ReplicaReport
from rose.units import NodeId, ReplicaId, WeightVersion

TOKENS, TEXT = expected(mock_model.chat_prompt(MESSAGES), 80)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait(condition: Callable[[], bool], within_s: float = 60) -> None:
    due_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < due_s, "did not come true in time"
        time.sleep(0.02)


class Host:
    """Processes of one test, and a node that reports the engines among them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.control, self.port = f"tcp://127.0.0.1:{free_port()}", free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.engines: dict[str, tuple[subprocess.Popen[str], str]] = {}
        self.processes: list[subprocess.Popen[str]] = []
        self._stop = threading.Event()
        self._node = threading.Thread(target=self._heartbeat, daemon=True)
        (directory / "rose.toml").write_text(
            f"schema = 1\n[scheduler]\ncontrol = '{self.control}'\ngateway_port = {self.port}\n"
            f"state_dir = '{directory / 'state'}'\n"
        )

    def spawn(self, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        return process

    def engine(self, name: str, token_ms: float = 8) -> None:
        process = self.spawn("-m", "rose_daemon.mock_engine", "--token-ms", str(token_ms))
        assert process.stdout is not None
        port = process.stdout.readline().split()[1]
        self.engines[name] = (process, f"http://127.0.0.1:{port}")

    def scheduler(self) -> subprocess.Popen[str]:
        process = self.spawn(
            "-c", "from rose.cli.main import main; main()",
            "scheduler", "--config", str(self.directory / "rose.toml"),
        )  # fmt: skip
        wait(lambda: process.poll() is not None or self.healthy())
        assert process.poll() is None, process.stderr and process.stderr.read()
        if not self._node.is_alive():
            self._node.start()
        return process

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def status(self) -> dict[str, Any]:
        return Scheduler(self.url).status()

    def ready(self) -> None:
        wait(lambda: sum(each["eligible"] for each in self.status()["replicas"]) == len(self.engines))

    def close(self) -> None:
        self._stop.set()
        if self._node.is_alive():
            self._node.join(60)
        for process in self.processes:
            process.kill()
            process.communicate()

    def _reports(self) -> tuple[ReplicaReport, ...]:
        return tuple(
            ReplicaReport(
                replica=ReplicaId(name),
                kind="dedicated",
                state="ready" if process.poll() is None else "failed",
                url=url,
                model=MODEL,
                weight_version=WeightVersion(0),
                gate_open=True,
                context_tokens_max=2048,
            )
            for name, (process, url) in self.engines.items()
        )

    def _heartbeat(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as link:
            link.setsockopt(zmq.LINGER, 0)
            link.setsockopt(zmq.RECONNECT_IVL, 20)
            link.connect(self.control)
            node, session, sequence = NodeId("node-0"), "session-0", 0
            link.send(wire.pack(wire.Register(wire.PROTOCOL, node, session, self._reports())))
            while not self._stop.is_set():
                sequence += 1
                link.send(wire.pack(wire.Heartbeat(node, session, sequence, self._reports())))
                while link.poll(50):
                    if isinstance(wire.unpack_to_node(link.recv()), wire.Unregistered):
                        link.send(wire.pack(wire.Register(wire.PROTOCOL, node, session, self._reports())))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    try:
        yield made
    finally:
        made.close()


def ask(host: Host, turn_id: str, box: list[Any]) -> threading.Thread:
    """Ask for a turn in a thread, as an agent would, with resends."""

    def run() -> None:
        client = openai.OpenAI(base_url=f"{host.url}/v1", api_key="none", max_retries=8)
        box.append(
            client.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,  # type: ignore[arg-type]
                max_tokens=80,
                extra_body={"ignore_eos": True, "return_token_ids": True},
                extra_headers={"x-rose-turn-id": turn_id},
            )
        )

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def busy(host: Host) -> str:
    """The replica that runs a turn, once it has produced some tokens."""
    found: list[str] = []

    def look() -> bool:
        found[:] = [each["replica"] for each in host.status()["replicas"] if each["turns_in_flight"]]
        return bool(found)

    wait(look)
    time.sleep(0.15)
    return found[0]


def test_a_killed_engine_loses_no_turn(host: Host) -> None:
    host.engine("a")
    host.engine("b")
    host.scheduler()
    Job.create(host.url, "walk", model=MODEL, n_rl=2, n_serving_max=0)
    host.ready()
    box: list[Any] = []
    thread = ask(host, "t1", box)
    host.engines[busy(host)][0].send_signal(signal.SIGKILL)
    thread.join(60)
    (answer,) = box
    assert answer.choices[0].token_ids == TOKENS
    assert answer.choices[0].message.content == TEXT
    assert [attempt["end"] for attempt in answer.rose["attempts"]] == ["connection_lost", "finished"]
    turns = host.status()["turns"]
    assert (turns["finished"], turns["failed"], turns["in_flight"]) == (1, 0, 0)


def test_clients_that_vanish_leave_nothing_running(host: Host) -> None:
    """Orderly closes and resets, under the event loop that production uses."""
    host.engine("a")
    host.scheduler()
    Job.create(host.url, "walk", model=MODEL, n_rl=1, n_serving_max=0)
    host.ready()
    for number in range(6):
        body = {"messages": MESSAGES, "max_tokens": 1500, "ignore_eos": True, "stream": number % 2 == 0}
        data = msgspec.json.encode(body)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", host.port)) as client:
            client.sendall(head.encode() + data)
            wait(lambda: host.status()["turns"]["in_flight"] == 1)
            if number >= 3:  # close with a reset
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait(lambda: host.status()["turns"]["in_flight"] == 0)
    turns = host.status()["turns"]
    assert (turns["arrived"], turns["cancelled"], turns["queued"]) == (6, 6, 0)
    with urllib.request.urlopen(f"{host.engines['a'][1]}/metrics", timeout=60) as response:
        running = [line for line in response.read().decode().splitlines() if "requests_running" in line]
    assert running[0].endswith(" 0")


def test_a_killed_scheduler_keeps_jobs_and_answers(host: Host) -> None:
    host.engine("a")
    first = host.scheduler()
    job = Job.create(host.url, "walk", model=MODEL, n_rl=1, n_serving_max=0)
    job.begin_step(3, 0)
    host.ready()
    box: list[Any] = []
    ask(host, "t1", box).join(60)
    thread = ask(host, "t2", box)
    busy(host)
    first.send_signal(signal.SIGKILL)
    first.wait(60)
    host.scheduler()
    host.ready()
    status = job.status()
    assert (status.rl_step, status.rolling, len(status.replicas)) == (3, True, 1)
    # The turn in flight is asked for again by its client; the finished one is not run again.
    thread.join(60)
    ask(host, "t1", box).join(60)
    first_answer, second, again = box
    assert again.choices == first_answer.choices
    assert second.choices[0].token_ids == TOKENS
    turns = host.status()["turns"]
    assert (turns["arrived"], turns["finished"], turns["replayed"]) == (1, 1, 1)


def test_trajectories_stay_where_their_prefix_is_over_a_restart(host: Host) -> None:
    for name in "abc":
        host.engine(name, token_ms=1)
    first = host.scheduler()
    Job.create(host.url, "walk", model=MODEL, n_rl=3, n_serving_max=0)
    host.ready()

    def walk(turn: int) -> list[str]:
        return [replica_of(host, f"way-{number}", f"turn-{turn}-{number}") for number in range(6)]

    where = walk(0)
    time.sleep(3)  # the journal is written four times a second
    for turn in (1, 2):  # a second restart forgets nothing either
        first.send_signal(signal.SIGKILL)
        first.wait(60)
        first = host.scheduler()
        host.ready()
        assert host.status()["pins"] == 6
        if turn == 2:
            assert walk(turn) == where


def replica_of(host: Host, trajectory: str, turn: str) -> str:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
    request = urllib.request.Request(
        f"{host.url}/v1/chat/completions",
        msgspec.json.encode(body),
        {"x-rose-trajectory": trajectory, "x-rose-turn-id": turn},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.headers["x-rose-replica"])


def test_sigterm_ends_cleanly_and_the_journal_replays(host: Host) -> None:
    host.engine("a", token_ms=1)
    process = host.scheduler()
    Job.create(host.url, "walk", model=MODEL, n_rl=1, n_serving_max=0)
    host.ready()
    box: list[Any] = []
    ask(host, "t1", box).join(60)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "scheduler_stopped" in errors
    assert all(json.loads(line)["event"] for line in errors.splitlines())
    store = Store(host.directory / "state")
    machine = ClusterMachine(settings_of(SchedulerConfig()))
    rows = list(store.journal(store.boots()[-1]))
    assert len(rows) > 5
    for row in rows:
        assert msgspec.msgpack.encode(machine.step(row.event, row.now_ns)) == msgspec.msgpack.encode(
            row.effects
        )
    store.close()


def test_it_tells_the_service_manager_when_it_serves_and_when_it_stops(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(host.directory / "notify"))
        manager.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(host.directory / "notify"))
        process = host.scheduler()
        assert manager.recv(100) == b"READY=1"
        process.send_signal(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
        process.communicate(timeout=60)


def test_a_taken_port_is_one_clear_line(host: Host) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", host.port))
        taken.listen()
        environment = os.environ | {"COLUMNS": "200"}
        result = subprocess.run(
            [
                sys.executable, "-c", "from rose.cli.main import main; main()",
                "scheduler", "--config", str(host.directory / "rose.toml"),
            ],
            capture_output=True, text=True, timeout=20, env=environment, check=False,
        )  # fmt: skip
    assert result.returncode != 0
    assert f"cannot listen on 127.0.0.1:{host.port}" in result.stderr
    assert "Traceback" not in result.stderr
