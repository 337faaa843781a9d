"""Mock engines and the scheduler as processes of their own: what a client meets that is a process itself."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rose.client import Job

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
START_S = 60


class GatewayHost:
    """Engines of one or several models, registered with a scheduler by their URLs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = ""
        self.engines: list[str] = []
        self._processes: list[subprocess.Popen[str]] = []

    def engine(self, model: str, *, script: Sequence[dict[str, Any]] = (), token_ms: float = 1.0) -> None:
        """Start a mock engine, before the scheduler."""
        command = ["-m", "rose_daemon.mock_engine", "--served-model-name", model, "--max-model-len", "65536"]
        command += ["--token-ms", str(token_ms)]
        if script:
            path = self.directory / f"{model}.json"
            path.write_text(json.dumps(script))
            command += ["--script", str(path)]
        process = self._start(*command)
        assert process.stdout is not None
        word, _, port = process.stdout.readline().partition(" ")
        assert word == "ready", process.wait(5)
        self.engines.append(f"http://127.0.0.1:{int(port)}")

    def scheduler(self) -> None:
        """Start the scheduler over the engines; it chooses its port."""
        state_dir = str(self.directory / "state")
        settings = {
            "control": "tcp://127.0.0.1:0",
            "gateway_port": 0,
            "state_dir": state_dir,
            "workers": self.engines,
        }
        code = (
            "import asyncio, sys, msgspec\n"
            "from rose.config import SchedulerConfig\n"
            "from rose_daemon.scheduler.process import running\n"
            "async def main():\n"
            "    async with running(msgspec.json.decode(sys.argv[1], type=SchedulerConfig)) as scheduler:\n"
            "        print(scheduler.gateway_url, flush=True)\n"
            "        await scheduler.failed()\n"
            "asyncio.run(main())\n"
        )
        process = self._start("-c", code, json.dumps(settings))
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("http://"):
                self.url = line.strip()
                break
        assert self.url, f"the scheduler ended with {process.wait(5)}"

    def job(self, name: str, model: str, replicas: int = 1) -> Job:
        """A job on the engines of a model."""
        job = Job.create(self.url, name, model=model, n_rl=replicas, unknown_version_ok=True)
        job.wait_for_replicas(replicas, timeout_s=START_S)
        return job

    def run(
        self, *command: str, timeout_s: float = 90, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """A client in a process of its own; `command` begins with an example's name, or with a program."""
        name, *arguments = command
        program = [sys.executable, str(EXAMPLES / name)] if name.endswith(".py") else [name]
        return subprocess.run(
            [*program, *arguments], cwd=self.directory, env=os.environ | environment, timeout=timeout_s,
            check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def status(self) -> dict[str, Any]:
        """The scheduler's."""
        with urllib.request.urlopen(f"{self.url}/rose/v1/status", timeout=10) as response:
            found: dict[str, Any] = json.load(response)
        return found

    def start(self, *command: str) -> subprocess.Popen[str]:
        """An example that serves, until the host is taken down."""
        return self._start(str(EXAMPLES / command[0]), *command[1:])

    def close(self) -> None:
        """End everything that was started."""
        for process in self._processes:
            process.terminate()
        due_s = time.monotonic() + 10
        for process in self._processes:
            try:
                process.wait(max(0.1, due_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _start(self, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=self.directory, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._processes.append(process)
        return process


@contextlib.contextmanager
def gateway_host(directory: Path) -> Iterator[GatewayHost]:
    """A host, taken down at the end."""
    host = GatewayHost(directory)
    try:
        yield host
    finally:
        host.close()
