"""The host's end of the update that `rose bench link` measures: rosed with light engines."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rose import wire
from rose.cli.control import ask
from rose.config import Config, ReplicaConfig
from rose.engines.vllm.launch import EngineCommand, rollout_command
from rose.errors import RoseError
from rose_daemon.bench.transfer import JOB

_POLL_S = 0.05
_READY_S = 120.0
_UPDATE_S = 120.0
_LOG_TAIL = 2000


def light_engine(replica: ReplicaConfig, config: Config) -> EngineCommand:
    """For `rosed --engine-builder`: real weights in a torch module, and no model."""
    argv = (sys.executable, "-m", "rose_daemon.light_engine")
    where = ("--model", replica.model, "--port", str(replica.port))
    return EngineCommand((*argv, *where), rollout_command(replica, config).env)


class Host:
    """A rosed that runs."""

    def __init__(self, base: Path, process: subprocess.Popen[bytes]) -> None:
        self._base = base
        self._process = process

    def await_version(self, version: int) -> dict[str, Any]:
        """Its status once all engines run the version, and its copy of the checkpoint is there too.

        Raises RoseError with the end of its log.
        """
        status: dict[str, Any] = self._await(lambda: self._all_at(version), _UPDATE_S, f"version {version}")
        # The next version is decoded on the copy; a trainer's step takes longer than the copy lags behind.
        self._await(lambda: self._copy_at() == version, _UPDATE_S, f"its copy at version {version}")
        return status

    def await_ready(self) -> None:
        """Wait until all engines answer and the copy is made.  Raises RoseError."""
        self._await(lambda: self._all_at(0), _READY_S, "its engines")
        self._await(lambda: self._copy_at() == 0, _READY_S, "its copy of the checkpoint")

    def _all_at(self, version: int) -> dict[str, Any] | None:
        try:
            status = ask(socket_of(self._base), wire.StatusRequest())
        except RoseError:
            return None  # it does not listen yet
        there = all(
            each["state"] == "ready" and each["weight_version"] == version for each in status["replicas"]
        )
        return status if there else None

    def _copy_at(self) -> int | None:
        try:
            record = (self._base / "state" / "weights" / JOB / "copy" / "record.json").read_bytes()
        except FileNotFoundError:
            return None
        found = json.loads(record)
        return None if found["undoing"] else int(found["version"])

    def _await(self, look: Callable[[], Any], limit_s: float, what: str) -> Any:
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s and self._process.poll() is None:
            if (found := look()) not in (None, False):
                return found
            time.sleep(_POLL_S)
        log = _log_of(self._base).read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]
        raise RoseError(f"rosed did not get to {what} within {limit_s:.0f} s:\n{log}")


@contextlib.contextmanager
def host(
    base: Path, relay: str, model: Path, *, replicas: int, threads: int, prefix: Sequence[str]
) -> Iterator[Host]:
    """Run rosed with so many light engines; `relay` is its [relay] section."""
    config = base / "rosed.toml"
    sections = "".join(
        f'[[replicas]]\nid = "replica-{number}"\nkind = "dedicated"\nmodel = "{model}"\n'
        for number in range(replicas)
    )
    config.write_text(
        f'schema = 1\n[job]\nid = "{JOB}"\n[node]\n'
        f'state_dir = "{base / "state"}"\nrun_dir = "{base / "run"}"\n'
        f'control_socket = "{socket_of(base)}"\nweights_threads = {threads}\nengine_stop_grace_s = 5\n'
        f"{relay}{sections}",
        encoding="utf-8",
    )
    builder = f"{__name__}:{light_engine.__name__}"
    command = [*prefix, sys.executable, "-m", "rose_daemon.rosed", "--config", str(config)]
    with _log_of(base).open("wb") as log:
        process = subprocess.Popen([*command, "--engine-builder", builder], stderr=log)
        try:
            yield Host(base, process)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def socket_of(base: Path) -> Path:
    """The control socket."""
    return base / "rosed.sock"


def _log_of(base: Path) -> Path:
    return base / "rosed.log"
