"""Real engines for tests: started as in production, with a stand-in for rosed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from rose.boards import BoardPaths, BoardReader, BoardWriter
from rose.core.readings import GateMode, GatePolicy, ReplicaReading, SlackReading, Unknown
from rose.engines.vllm.launch import EngineCommand

ENGINE_START_S = 240
ENGINE_STOP_S = 15
TOKEN = "sesame-of-the-tests"


def unused_port() -> int:
    """A TCP port on 127.0.0.1 that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Engine:
    """A vLLM server started through rose.engines.vllm.launch."""

    def __init__(self, command: EngineCommand, port: int, log: Path, token: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.token = token
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command.argv,
                env=command.env,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def wait_ready(self) -> None:
        """Until it answers; fails with the end of its log."""
        deadline = time.monotonic() + ENGINE_START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if self.http.get("/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.25)
        tail = self.log.read_text(errors="replace")[-4000:]
        pytest.fail(f"engine did not become ready (exit code {self.process.poll()}):\n{tail}")

    def stop(self) -> None:
        """End it and everything it started."""
        self.http.close()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(ENGINE_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def rose(self, method: str, path: str, body: Any = None, *, token: str | None = None) -> httpx.Response:
        """Call one of our own endpoints."""
        headers = {"authorization": f"Bearer {self.token if token is None else token}"}
        return self.http.request(method, f"/rose/v1/{path}", json=body, headers=headers)

    def complete(self, model: str, prompt: list[int] | str, tokens: int, **more: Any) -> dict[str, Any]:
        """One greedy completion of exactly `tokens` tokens; its only choice."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self.http.post("/v1/completions", json=body | {"return_token_ids": True} | more)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice


class Gatekeeper:
    """Stands in for rosed: writes one replica's gate board, and renews the lease until closed."""

    LEASE_NS = 2_000_000_000

    def __init__(self, boards: BoardPaths, replica: str, mode: GateMode = GateMode.OPEN) -> None:
        self._writer = BoardWriter(boards.gate(replica), GatePolicy)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._paused = False
        self.policy = GatePolicy(0, mode, 0, 0, 0, 0, 250_000_000, 60_000_000, 5_000_000)
        self.set()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def set(self, **changes: int) -> None:
        """Publish a new revision of the policy with these fields changed (and renew it from now on)."""
        with self._lock:
            self._paused = False
            self.policy = self.policy._replace(revision=self.policy.revision + 1, **changes)
            self._publish()

    def _publish(self) -> None:
        self._writer.publish(self.policy._replace(alive_until_ns=time.monotonic_ns() + self.LEASE_NS))
        self._writer.bell.ring()

    def _renew(self) -> None:
        while not self._stopped.wait(0.25):
            with self._lock:
                if not self._paused:
                    self._publish()

    def pause(self) -> None:
        """Renew no more, as if rosed hung, until the next `set`."""
        with self._lock:
            self._paused = True

    def close(self) -> None:
        """Stop renewing."""
        self._stopped.set()
        self._thread.join()


class EnginePair(NamedTuple):
    """A serving engine and an opportunistic rollout engine that share a core, as on a serving host."""

    serving: Engine
    rollout: Engine
    gate: Gatekeeper
    boards: BoardPaths
    models: Any
    worker_cpus: tuple[int, ...]
    api_cpus: tuple[int, ...]

    def slack(self) -> SlackReading:
        """The serving engine's board now."""
        record = BoardReader(self.boards.slack("serving"), SlackReading).read()
        assert not isinstance(record, Unknown), record
        return record

    def replica(self) -> ReplicaReading:
        """The rollout engine's board now."""
        record = BoardReader(self.boards.replica("r0"), ReplicaReading).read()
        assert not isinstance(record, Unknown), record
        return record
