"""SIGKILL at seeded moments: whoever dies, what is left is exactly one version, and the next update works.

Each victim is a forked process that runs the real code (a publisher against a real relay; a host that pulls,
applies to live parameters and moves its copy) and is killed after a random part of the time that it takes.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from victims import timed, victim

from rose.config import RelayConfig
from rose.units import JobId, WeightVersion
from rose.weights import Publisher, receiver, tensorfile
from rose.weights.bits import Bits
from rose.weights.checkpoint import open_checkpoint
from rose.weights.decoding import decode_staged
from rose.weights.digests import digest_state
from rose.weights.hostcopy import HostCopy
from rose.weights.relay.blocking import BlockingRelay
from rose.weights.relay.local import RelayClient
from rose.weights.store import WeightStore

JOB = JobId("job-0")
POINTS = int(os.environ.get("ROSE_CRASH_POINTS", "25"))
"""Kills of each kind of process."""
State = dict[str, Bits]


def first_state() -> State:
    rng = np.random.default_rng(0)
    shapes = {"embed_tokens.weight": (256, 64), "layers.0.up_proj.weight": (128, 64), "norm.weight": (64,)}
    return {
        name: Bits("BF16", shape, rng.integers(0x3C00, 0x3F80, int(np.prod(shape))).astype("<u2"))
        for name, shape in shapes.items()
    }


def stepped(state: State, seed: int) -> State:
    rng = np.random.default_rng(seed)
    moved = {name: bits.copy() for name, bits in state.items()}
    for bits in moved.values():
        bits.words[rng.random(bits.words.size) < 0.02] ^= 1
    return moved


class Trainer:
    """The states of a job, made as they are needed."""

    def __init__(self) -> None:
        self.states = [first_state()]

    def state(self, version: int) -> State:
        while len(self.states) <= version:
            self.states.append(stepped(self.states[-1], len(self.states)))
        return self.states[version]

    def digests(self, version: int) -> dict[str, str]:
        return digest_state(self.state(version))


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[RelayConfig]:
    """The command itself, so that it is what is killed and cannot differ from what users run."""
    config = tmp_path / "rose.toml"
    config.write_text("schema = 1\n")
    command = [sys.executable, "-m", "rose.cli.main", "relay", "--config", str(config), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("relay listening on "), line
        yield RelayConfig(url=line.split()[-1])
        process.kill()


def publisher(relay: RelayConfig, trainer: Trainer, anchor_every: int | None = None) -> Publisher:
    client = BlockingRelay(RelayClient.from_config(relay, timeout_s=20))
    return Publisher.resume(client, JOB, trainer.state(0), keep=3, anchor_every=anchor_every)


def test_a_publisher_that_is_killed_anywhere(relay: RelayConfig) -> None:
    trainer, chance = Trainer(), random.Random(1)

    def publish() -> None:
        with publisher(relay, trainer) as mine:
            version = WeightVersion(mine.version + 1)
            mine.publish(version, trainer.state(version))

    lasts_s = max(timed(publish) for _ in range(3))
    newest, finished, half_way = 3, 0, 0
    for point in range(POINTS):
        trainer.state(newest + 1)
        finished += victim(publish, chance.uniform(0, 1.1 * lasts_s))
        with publisher(relay, trainer) as witness:  # rebuilds it all, with digests
            assert witness.version in {newest, newest + 1}, point
            assert witness.digests == trainer.digests(witness.version), point
            half_way += witness.version == newest
            newest = witness.version
        if point % 20 == 19:  # else the chain to walk grows for ever
            with publisher(relay, trainer, anchor_every=1) as mine:
                newest += 1
                mine.publish(WeightVersion(newest), trainer.state(newest))
    assert finished < POINTS
    assert 0 < half_way < POINTS
    publish()


def test_a_host_that_is_killed_anywhere(relay: RelayConfig, tmp_path: Path) -> None:
    """Pull, stage, apply to live parameters, move the copy; start again from the copy."""
    torch = pytest.importorskip("torch")
    from rose_daemon.light_engine import module_of  # noqa: PLC0415 (imports torch)

    from rose.engines.live import LiveWeights  # noqa: PLC0415

    trainer, chance, newest = Trainer(), random.Random(2), 40
    with publisher(relay, trainer) as mine:
        for version in range(1, newest + 1):
            mine.publish(WeightVersion(version), trainer.state(version))
    source, home, store = tmp_path / "model", tmp_path / "copy", WeightStore(tmp_path)
    source.mkdir()
    (source / "model.safetensors").write_bytes(tensorfile.encode(trainer.state(0), {}))
    HostCopy.create(home, JOB, source).close()

    def update() -> None:
        torch.set_num_threads(1)
        copy = HostCopy.open(home, JOB)
        live = LiveWeights(module_of(open_checkpoint(copy.checkpoint).state), version=copy.version)
        assert live.digests()["digests"] == trainer.digests(copy.version)
        version = WeightVersion(copy.version + 1)

        async def pull() -> Path:
            async with RelayClient.from_config(relay) as client:
                destination = store.destination(JOB, version)
                return (await receiver.pull(client, JOB, version, destination)).path

        path = decode_staged(asyncio.run(pull()), copy.state)
        live.apply(live.stage(path, version, copy.version))
        copy.advance(path)
        assert live.digests() == {"version": version, "digests": copy.digests}

    def rewind() -> None:
        HostCopy.open(home, JOB).rewind()

    way_back = False

    def check(*allowed: int) -> int:
        nonlocal way_back
        copy = HostCopy.open(home, JOB)
        way_back = copy.can_rewind
        assert copy.version in allowed
        copy.verify()
        assert copy.digests == trainer.digests(copy.version)
        copy.close()
        return copy.version

    lasts_s = {work: max(timed(work) for _ in range(2)) for work in (update, rewind)}
    held, ends = check(0), {"before": 0, "after": 0}
    for _ in range(POINTS):
        back = way_back and (held == newest or chance.random() < 0.3)
        work, after = (rewind, held - 1) if back else (update, held + 1)
        finished = victim(work, chance.uniform(0, 1.1 * lasts_s[work]))
        was, held = held, check(*((after,) if finished else (held, after)))
        ends["before" if held == was else "after"] += 1
    assert min(ends.values()) > 0, ends
    for version in range(held + 1, min(held + 4, newest + 1)):
        assert victim(update, None)
        check(version)
