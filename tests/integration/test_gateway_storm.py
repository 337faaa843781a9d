"""kill -9 of an engine, of rosed, and of the scheduler with its gateway, each with 200 turns in flight.

All of them are the real processes, but for the engines, which are mocks.  Clients do what agents do: they
name their turns and ask again.  Every trajectory must have exactly its tokens, and no turn runs to its end
twice.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from gateway_world import expected
from rose_daemon import mock_model
from rose_daemon.node.engines import free_port
from rose_daemon.node.warden import descendants
from rose_daemon.scheduler.store import Store
from waiting import until

from rose import wire
from rose.cli.control import ask
from rose.client import Job
from rose.core.events import TurnFinished
from rose.weights import tensorfile
from rose.weights.bits import Bits

HERE = Path(__file__).parent
TURNS, TOKENS = 2, 12
TRAJECTORIES = 200
LIMIT_S = 120.0


class Fleet:
    """A scheduler and a host with three engines."""

    def __init__(self, base: Path, run_dir: Path) -> None:
        self.base, self.run_dir = base, run_dir
        self.port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        model = base / "model"
        model.mkdir()
        shape = {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_size": 64,
            "num_hidden_layers": 2,
        }
        (model / "config.json").write_text(json.dumps({**shape, "torch_dtype": "bfloat16"}))
        words = Bits("BF16", (4,), np.zeros(4, "<u2"))
        (model / "model.safetensors").write_bytes(tensorfile.encode({"norm.weight": words}, {}))
        replicas = "".join(
            f'[[replicas]]\nid = "ded-{number}"\nkind = "dedicated"\nmodel = "{model}"\n'
            for number in range(3)
        )
        (base / "rose.toml").write_text(
            f'[node]\nstate_dir = "{base}/node"\nrun_dir = "{run_dir}"\n'
            f'control_socket = "{run_dir}/rosed.sock"\n'
            f'engine_stop_grace_s = 4\nrestart_backoff_s = 0.2\n[serving]\nurl = ""\n'
            f'[scheduler]\ncontrol = "ipc://{run_dir}/control"\ngateway_port = {self.port}\n'
            f'state_dir = "{base}/scheduler"\n[relay]\nurl = "http://127.0.0.1:{free_port("127.0.0.1")}"\n{replicas}'
        )

    def start(self, name: str) -> None:
        command = {
            "rosed": ["rose_daemon.rosed", "--engine-builder", "engine_builders:steady"],
            "scheduler": ["rose.cli.main", "scheduler", "--log-level", "warning"],
        }[name]
        paths = filter(None, (str(HERE), os.environ.get("PYTHONPATH")))
        with (self.base / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *command, "--config", str(self.base / "rose.toml")],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdout=log,
                stderr=log,
            )

    def kill(self, victim: str) -> None:
        """SIGKILL; rosed starts its engines again by itself, the others need somebody who does."""
        if victim == "engine":
            status = ask(self.run_dir / "rosed.sock", wire.StatusRequest())
            (engine,) = descendants(status["replicas"][0]["pid"])
            os.kill(engine, signal.SIGKILL)
            return
        process = self.processes[victim]
        process.kill()
        process.wait()
        self.start(victim)

    def log(self) -> str:
        return "\n".join((self.base / f"{name}.log").read_text()[-2000:] for name in self.processes)

    def end(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Clients:
    """Agents of all trajectories."""

    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession) -> None:
        self._fleet = fleet
        self._http = http

    async def status(self) -> dict[str, Any]:
        """Of the scheduler; empty while it does not answer."""
        try:
            async with self._http.get(f"{self._fleet.url}/rose/v1/status") as response:
                found: dict[str, Any] = await response.json()
                return found
        except aiohttp.ClientError:
            return {}

    async def ready(self) -> bool:
        return sum(replica["eligible"] for replica in (await self.status()).get("replicas", ())) == 3

    async def to_engines(self, path: str, body: dict[str, Any] | None = None) -> list[str]:
        """Ask all engines the same."""
        answers = []
        for replica in (await self.status())["replicas"]:
            method = "GET" if body is None else "POST"
            async with self._http.request(method, replica["url"] + path, json=body) as response:
                answers.append(await response.text())
        return answers

    async def tokens(self) -> int:
        """That all engines made since they started."""
        lines = "\n".join(await self.to_engines("/metrics")).splitlines()
        return sum(int(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))

    async def trajectory(self, name: str, *, stream: bool) -> None:
        """Turns that each go on from the one before, asked for until they are answered."""
        prompt = mock_model.encode(f"{name}: which way to the goal?")
        for number in range(TURNS):
            answer = await self._turn(f"{name}-{number}", name, prompt, stream=stream)
            assert answer == expected(prompt, TOKENS)[0], f"{name}-{number}"
            prompt = [*prompt, *answer, *mock_model.encode(f"\nturn {number + 1}\n")]

    async def _turn(self, turn: str, trajectory: str, prompt: list[int], *, stream: bool) -> list[int]:
        body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
        headers = {"x-rose-turn-id": turn, "x-rose-trajectory": trajectory}
        while True:
            try:
                async with self._http.post(
                    f"{self._fleet.url}/v1/completions", json=body | {"stream": stream}, headers=headers
                ) as response:
                    data = await response.read()
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
                continue
            if response.status in (429, 503):
                await asyncio.sleep(0.2)
                continue
            assert response.status == 200, data
            return _streamed(data) if stream else msgspec.json.decode(data)["choices"][0]["token_ids"]


def _streamed(data: bytes) -> list[int]:
    *lines, done = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    assert done == b"[DONE]"
    chunks = [msgspec.json.decode(line) for line in lines]
    assert not any("error" in chunk for chunk in chunks), chunks
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="rose-test-", dir="/dev/shm") as run_dir:
        made = Fleet(tmp_path, Path(run_dir))
        try:
            made.start("scheduler")
            made.start("rosed")
            yield made
        finally:
            made.end()


async def test_kill_9_loses_no_trajectory_and_runs_no_turn_twice(fleet: Fleet) -> None:
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        clients = Clients(fleet, http)
        await until(lambda: _answers(clients), LIMIT_S)
        job = await asyncio.to_thread(
            Job.create, fleet.url, "storm", model="rollout", n_rl=3, trajectories_per_replica_max=TRAJECTORIES
        )
        for victim in ("engine", "rosed", "scheduler"):
            await until(clients.ready, LIMIT_S)
            await _round(fleet, clients, victim)
        turns = (await clients.status())["turns"]
        assert (turns["failed"], turns["cancelled"], turns["queued"], turns["in_flight"]) == (0, 0, 0, 0)
        exported = Counter(turn["turn_id"] for turn in await asyncio.to_thread(lambda: list(job.turns())))
    assert exported == Counter(
        f"{victim}-{number}-{turn}"
        for victim in ("engine", "rosed", "scheduler")
        for number in range(TRAJECTORIES)
        for turn in range(TURNS)
    )
    fleet.end()
    assert _ran_to_the_end_twice(fleet) == []


async def _answers(clients: Clients) -> bool:
    return bool(await clients.status())


async def _round(fleet: Fleet, clients: Clients, victim: str) -> None:
    """Kill with all trajectories in flight and some tokens made; then all must end well."""
    await clients.to_engines("/mock/v1/stall", {"on": True})
    before = await clients.tokens()
    agents = asyncio.gather(
        *(clients.trajectory(f"{victim}-{number}", stream=number % 2 == 0) for number in range(TRAJECTORIES))
    )
    try:

        async def all_in_flight() -> bool:
            return (await clients.status())["turns"]["in_flight"] == TRAJECTORIES

        async def half_way() -> bool:
            return await clients.tokens() >= before + TRAJECTORIES * TOKENS // 3

        await until(all_in_flight, LIMIT_S)
        await clients.to_engines("/mock/v1/stall", {"on": False})
        await until(half_way, LIMIT_S)
        await asyncio.to_thread(fleet.kill, victim)
        async with asyncio.timeout(LIMIT_S):
            await agents
    except (AssertionError, TimeoutError) as error:
        raise AssertionError(f"{victim}: {error!r}; {await clients.status()}; {fleet.log()}") from error
    finally:
        agents.cancel()


def _ran_to_the_end_twice(fleet: Fleet) -> list[str]:
    """Turns that more than one run finished, whichever scheduler it was."""
    store = Store(fleet.base / "scheduler")
    try:
        finished = Counter(
            row.event.turn.split("/")[1]
            for boot in store.boots()
            for row in store.journal(boot)
            if isinstance(row.event, TurnFinished)
        )
    finally:
        store.close()
    return [turn for turn, count in finished.items() if count > 1]
