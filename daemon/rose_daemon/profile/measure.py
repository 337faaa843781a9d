"""Drives one engine through prefills and decodes of known sizes, and reads their durations off its board.

The engine is a dedicated rollout engine with its gate open, in a run directory of its own: nothing else of
this host is touched, but whatever else uses the device meanwhile is measured as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec

from rose.boards import BoardPaths, BoardWriter, WatchedBoard
from rose.config import Config, DeviceConfig, NodeConfig, ReplicaConfig
from rose.core.readings import GateMode, GatePolicy, ReplicaReading, Unknown
from rose.engines.vllm.launch import rollout_command
from rose.errors import EngineFailed, NotReady
from rose.profile import Fingerprint, Profile, Step
from rose.units import NS_PER_MS, NS_PER_S, ReplicaId
from rose_daemon.harness.load import Target, completion_body, open_client
from rose_daemon.harness.processes import Child, spawn, until
from rose_daemon.harness.stack import START_TIMEOUT_S, STOP_GRACE_S, free_ports

PROMPT_TOKENS = (8, 16, 32, 64, 128, 256, 448)
BATCHES = (1, 2, 4, 8, 16)
REPEATS = 4
DECODE_TOKENS = 48
_NAME = ReplicaId("profile")
_POLL_S = 0.02
_SETTLE_S = 0.05
"""An engine writes its board after it has answered."""
_ANY_BUDGET_NS = 250 * NS_PER_MS

Progress = Callable[[str, float], None]
"""Called with what is being done, and the share that is done."""


class ProfileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    model: Path
    device: DeviceConfig
    context_tokens_max: int = 1024
    engine_args: tuple[str, ...] = ()
    log: Path


async def measure(options: ProfileOptions, progress: Progress) -> Profile:
    """Measure.  Raises RoseError; always ends the engine it started."""
    cores = len(options.device.cpus)
    fingerprint = Fingerprint.here(options.device.kind, cores, options.model)  # before minutes are spent
    progress("starting the engine", 0.0)
    async with _engine(options) as probe:
        prefill = await _prefills(probe, progress)
        decode = await _decodes(probe, progress)
    progress("done", 1.0)
    return Profile(fingerprint=fingerprint, prefill=tuple(prefill), decode=tuple(decode))


class _Probe:
    """A running engine, and its board."""

    def __init__(self, client: aiohttp.ClientSession, target: Target, board: WatchedBoard[ReplicaReading]):
        self._client = client
        self._target = target
        self._board = board
        self._chance = random.Random(0)

    def read(self) -> ReplicaReading:
        reading = self._board.read(time.monotonic_ns(), None)
        if isinstance(reading, Unknown):
            raise NotReady(f"{self._board.path}: {reading}")
        return reading

    async def complete(self, prompt_tokens: int, tokens: int) -> None:
        # Random, lest the prefix cache answers.
        prompt = [self._chance.randrange(self._target.token_ids) for _ in range(prompt_tokens)]
        body = completion_body(self._target, prompt, tokens, temperature=0.0)
        try:
            async with self._client.post(f"{self._target.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    text = (await response.text())[:200]
                    raise EngineFailed(f"the engine answered {response.status}: {text}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"the engine does not answer: {error}") from None


def step_between(before: ReplicaReading, after: ReplicaReading) -> Step | None:
    """The mean step between two readings; None unless all of them were of one size."""
    steps = after.steps - before.steps
    tokens, busy_ns = after.tokens - before.tokens, after.busy_ns - before.busy_ns
    if steps <= 0 or busy_ns <= 0 or tokens % steps:
        return None
    return Step(tokens // steps, busy_ns // steps)


async def _prefills(probe: _Probe, progress: Progress) -> list[Step]:
    """One prompt at a time, one token each: a single step of known size."""
    steps: list[Step] = []
    await probe.complete(PROMPT_TOKENS[0], 2)  # the first request pays for what is made lazily
    for index, size in enumerate(PROMPT_TOKENS):
        progress(f"prefill of {size} tokens", index / len(PROMPT_TOKENS) / 2)
        for _ in range(REPEATS):
            await asyncio.sleep(_SETTLE_S)
            before = probe.read()
            await probe.complete(size, 1)
            await asyncio.sleep(_SETTLE_S)
            step = step_between(before, probe.read())
            if step is not None and step.load == size:
                steps.append(step)
    return _enough(steps, "prefill")


async def _decodes(probe: _Probe, progress: Progress) -> list[Step]:
    """Batches that decode together; readings between which every step was of the whole batch."""
    steps: list[Step] = []
    for index, batch in enumerate(BATCHES):
        progress(f"decode of {batch} sequences", 0.5 + index / len(BATCHES) / 2)
        requests = [
            asyncio.ensure_future(probe.complete(PROMPT_TOKENS[0], DECODE_TOKENS)) for _ in range(batch)
        ]
        before = probe.read()
        try:
            while not all(request.done() for request in requests):
                await asyncio.sleep(_POLL_S)
                after = probe.read()
                step = step_between(before, after)
                if step is not None and step.load == batch:
                    steps.append(step)
                before = after
        finally:
            await _finished(requests)
    return _enough(steps, "decode")


async def _finished(requests: Sequence[asyncio.Future[None]]) -> None:
    """Wait for all; raises what the first of them raised."""
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def _enough(steps: list[Step], what: str) -> list[Step]:
    if len({step.load for step in steps}) < 3:
        raise EngineFailed(
            f"too few {what} steps could be told apart", "measure while nothing else uses the host"
        )
    return steps


@contextlib.asynccontextmanager
async def _engine(options: ProfileOptions) -> AsyncIterator[_Probe]:
    """A dedicated engine with an open gate, until the block is left."""
    run_dir = Path(tempfile.mkdtemp(prefix="rose-profile-", dir="/dev/shm"))
    child: Child | None = None
    try:
        (port,) = free_ports(1)
        token = run_dir / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="ascii")
        replica = ReplicaConfig(
            id=_NAME,
            kind="dedicated",
            model=str(options.model.resolve()),
            port=port,
            cpus=options.device.cpus if options.device.kind == "cpu" else (),
            context_tokens_max=options.context_tokens_max,
            sequences_max=max(BATCHES),
            engine_args=options.engine_args,
        )
        config = Config(node=NodeConfig(run_dir=str(run_dir), token_file=str(token)), device=options.device)
        paths = BoardPaths(run_dir)
        BoardWriter(paths.gate(_NAME), GatePolicy).publish(_open_policy())
        command = rollout_command(replica, config)
        child = await spawn("engine", command.argv, options.log, environ=command.env)
        async with open_client() as client:
            target = Target(f"http://127.0.0.1:{port}", replica.served_name)
            await _ready(child, client, target)
            yield _Probe(client, target, WatchedBoard(paths.replica(_NAME), ReplicaReading))
    finally:
        if child is not None:
            await child.stop(STOP_GRACE_S)
        shutil.rmtree(run_dir, ignore_errors=True)


def _open_policy() -> GatePolicy:
    """Open for as long as this process lives: a dedicated replica outlives its lease."""
    until_ns = time.monotonic_ns() + 30 * NS_PER_S
    return GatePolicy(1, GateMode.OPEN, 0, 0, 0, until_ns, _ANY_BUDGET_NS, _ANY_BUDGET_NS, 0)


async def _ready(child: Child, client: aiohttp.ClientSession, target: Target) -> None:
    async def answers() -> bool:
        if not child.running:
            raise child.failure()
        try:
            async with client.get(f"{target.url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    await until("the engine", answers, START_TIMEOUT_S, period_s=0.5)
