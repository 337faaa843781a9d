"""A small fleet of real processes with mock engines, and agents that never give a turn up."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
from rose_daemon import mock_model
from rose_daemon.node.warden import descendants

from rose.client import Job, Scheduler
from rose.errors import RoseError
from rose.weights import tensorfile
from rose.weights.bits import Bits

BUILDERS = Path(__file__).parents[1] / "integration"
MODEL = "rollout"
TOKENS = 40
_REQUEST_S = 60.0
_PAUSE_S = 0.2


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait(condition: Callable[[], bool], what: str, within_s: float = 120) -> None:
    """Until it holds.  Raises AssertionError when it does not in time."""
    due_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < due_s, f"{what}: did not come true in {within_s:.0f} s"
        time.sleep(0.05)


def expected(prompt: list[int]) -> list[int]:
    """The tokens of an undisturbed run."""
    tokens: list[int] = []
    while len(tokens) < TOKENS:
        tokens.append(mock_model.sample([*prompt, *tokens], 0).token)
    return tokens


class Daemon:
    """A process that a service manager would start again whenever it ends."""

    def __init__(self, name: str, argv: list[str], log: Path, environ: dict[str, str]) -> None:
        self.name, self._argv, self._environ = name, argv, environ
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs now; 0 if none does."""
        return 0 if self.process is None else self.process.pid

    def ensure(self) -> None:
        """Start it unless it runs."""
        if self.process is None or self.process.poll() is not None:
            with self._log.open("ab") as log:
                self.process = subprocess.Popen(self._argv, stdout=log, stderr=log, env=self._environ)

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        """Ask it to end, and see that it does."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        if self.process is not None:
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"{self.name} does not end when asked to") from None


class World:
    """Use as a context manager."""

    def __init__(self, hosts: int = 2) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="rose-chaos-"))
        self.boards = [Path(tempfile.mkdtemp(prefix="rose-chaos-", dir="/dev/shm")) for _ in range(hosts)]
        self.gateway, self._control, self._relay = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.gateway}"
        paths = filter(None, (str(BUILDERS), os.environ.get("PYTHONPATH")))
        self._environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._model()
        cli = [sys.executable, "-m", "rose.cli.main"]
        configs = [self._config(number) for number in range(hosts)]
        self.relay = self._daemon("relay", [*cli, "relay", "--config", str(configs[0])])
        self.scheduler = self._daemon("scheduler", [*cli, "scheduler", "--config", str(configs[0])])
        self.hosts = [
            self._daemon(
                f"rosed-{number}",
                [sys.executable, "-m", "rose_daemon.rosed", "--config", str(config), "--engine-builder",
                 "engine_builders:mock"],
            )
            for number, config in enumerate(configs)
        ]  # fmt: skip
        self.daemons = [self.relay, self.scheduler, *self.hosts]

    def __enter__(self) -> Self:
        try:
            self.keep_up()
            wait(self._answers, "the scheduler answers")
            Job.create(self.url, "walk", model=MODEL, n_rl=len(self.hosts), n_serving_max=0)
            wait(self.ready, "all replicas take turns")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything; raises AssertionError for what does not end, or is left running."""
        left: list[int] = []
        try:
            engines = self.engines()
            for daemon in reversed(self.daemons):
                daemon.end()
            wait(lambda: not any(_alive(pid) for pid in engines), "engines end with their rosed", 60)
        finally:
            left = [pid for daemon in self.daemons for pid in ([daemon.pid] if _alive(daemon.pid) else [])]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            for directory in (self.base, *self.boards):
                shutil.rmtree(directory, ignore_errors=True)
        assert not left

    def keep_up(self) -> None:
        """What a service manager does."""
        for daemon in self.daemons:
            daemon.ensure()

    def engines(self) -> list[int]:
        """Processes below the rosed's: wardens and engines."""
        return [pid for host in self.hosts if _alive(host.pid) for pid in descendants(host.pid)]

    def ready(self) -> bool:
        """Whether every replica takes turns."""
        replicas = self.status().get("replicas", [])
        return len(replicas) == len(self.hosts) and all(each["eligible"] for each in replicas)

    def status(self) -> dict[str, Any]:
        """What the scheduler says; empty while it says nothing."""
        try:
            return Scheduler(self.url).status()
        except RoseError:
            return {}

    def _answers(self) -> bool:
        return bool(self.status())

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.base.glob("*.log"))
        )

    def _daemon(self, name: str, argv: list[str]) -> Daemon:
        return Daemon(name, argv, self.base / f"{name}.log", self._environ)

    def _model(self) -> None:
        model = self.base / "model"
        model.mkdir()
        shape = {
            "num_attention_heads": 4,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "torch_dtype": "bfloat16",
        }
        (model / "config.json").write_text(json.dumps(shape))
        words = Bits("BF16", (4,), np.zeros(4, "<u2"))
        (model / "model.safetensors").write_bytes(tensorfile.encode({"norm.weight": words}, {}))

    def _config(self, number: int) -> Path:
        path = self.base / f"host-{number}.toml"
        path.write_text(
            f'[node]\nid = "host-{number}"\nstate_dir = "{self.base / f"state-{number}"}"\n'
            f'run_dir = "{self.boards[number]}"\ncontrol_socket = "{self.boards[number] / "rosed.sock"}"\n'
            f"engine_stop_grace_s = 4\nrestart_backoff_s = 0.2\nrestart_backoff_max_s = 1\n"
            f"metrics_port = {free_port()}\n"
            f'[[replicas]]\nid = "replica-{number}"\nkind = "dedicated"\nmodel = "{self.base / "model"}"\n'
            f'[scheduler]\ncontrol = "tcp://127.0.0.1:{self._control}"\ngateway_port = {self.gateway}\n'
            f'state_dir = "{self.base / "scheduler"}"\nturn_stall_timeout_s = 10\n'
            f'[relay]\nport = {self._relay}\n[job]\nid = "walk"\n'
        )
        return path


class Agents:
    """Threads that ask turn after turn, each until it is answered, and check every answer."""

    def __init__(self, world: World, count: int) -> None:
        self._world = world
        self._stop = threading.Event()
        self.done = 0
        self.resent = 0
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, within_s: float = 180) -> None:
        """Ask no more turns; raises AssertionError if one is lost, or an answer is not as it has to be."""
        self._stop.set()
        due_s = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, due_s - time.monotonic()))
        assert not [thread for thread in self._threads if thread.is_alive()], "turns are lost"
        assert not self.wrong, self.wrong[:3]

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        turn = 0
        while not self._stop.is_set():
            prompt = [rng.randrange(10, 200) for _ in range(rng.randrange(4, 24))]
            turn += 1
            name = f"agent-{number}-turn-{turn}"
            answer = self._ask(name, f"agent-{number}", prompt)
            with self._lock:
                self.done += 1
                if answer != expected(prompt):
                    self.wrong.append(f"{name}: {answer}")

    def _ask(self, name: str, trajectory: str, prompt: list[int]) -> list[int]:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {
            "Content-Type": "application/json",
            "x-rose-turn-id": name,
            "x-rose-trajectory": trajectory,
            "x-rose-job": "walk",
        }
        while True:
            request = urllib.request.Request(
                f"{self._world.url}/v1/completions", json.dumps(body).encode(), headers, method="POST"
            )
            try:
                with urllib.request.urlopen(request, timeout=_REQUEST_S) as response:
                    ids: list[int] = json.load(response)["choices"][0]["token_ids"]
                    return ids
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code not in (404, 408, 429):  # 404: the job is being restored
                    return [error.code]
            except (OSError, ValueError):
                pass  # the scheduler is away
            with self._lock:
                self.resent += 1
            time.sleep(_PAUSE_S)


def _alive(pid: int) -> bool:
    try:
        return pid != 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
