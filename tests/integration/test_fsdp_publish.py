"""Two processes with an FSDP2 module on gloo publish together; a host gets the whole model, bit for bit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from rose.config import RelayConfig
from rose.units import JobId, WeightVersion
from rose.weights import receiver
from rose.weights.bits import State
from rose.weights.checkpoint import open_checkpoint
from rose.weights.container import read_manifest, read_patches
from rose.weights.decoding import decode_staged
from rose.weights.digests import digest_state
from rose.weights.patches import apply_to_state
from rose.weights.relay.local import RelayClient
from rose.weights.store import WeightStore

pytest.importorskip("torch.distributed.fsdp")

JOB = JobId("fsdp")
WORLD = 2
VERSIONS = 3


def test_an_fsdp_module_is_published_without_a_gather(tmp_path: Path) -> None:
    config = tmp_path / "rose.toml"
    config.write_text("schema = 1\n")
    command = [sys.executable, "-m", "rose.cli.main", "relay", "--config", str(config), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as relay:
        try:
            assert relay.stderr is not None
            url = relay.stderr.readline().split()[-1]
            script = Path(__file__).with_name("fsdp_trainer.py")
            told = [sys.executable, str(script), url, str(tmp_path / "meet")]
            ranks = [
                subprocess.Popen(
                    [*told, str(rank), str(WORLD), str(tmp_path)], stderr=subprocess.PIPE, text=True
                )
                for rank in range(WORLD)
            ]
            errors = [rank.communicate(timeout=120)[1] for rank in ranks]
            assert [rank.returncode for rank in ranks] == [0] * WORLD, errors
            check(url, tmp_path)
        finally:
            relay.kill()


def check(url: str, root: Path) -> None:
    """Every version, pulled and decoded as a host does, is what the trainer gathered for us."""
    store = WeightStore(root)
    state: State = whole(root, 0)
    for number in range(1, VERSIONS + 1):
        staged = asyncio.run(pull(url, store, WeightVersion(number)))
        sent = read_manifest(staged)
        cut = {each.name: len(each.slices) for each in sent.parameters if each.target_digest is None}
        assert cut == {"embed.weight": 2, "up.weight": 2, "up.bias": 2, "down.weight": 2}
        assert len(sent.buckets) == WORLD, "each rank pushed its own"
        patches = decode_staged(staged, state)
        state = apply_to_state(state, read_patches(patches))
        expected = whole(root, number)
        assert digest_state(state) == digest_state(expected) == read_manifest(patches).target_digests


async def pull(url: str, store: WeightStore, version: WeightVersion) -> Path:
    async with RelayClient.from_config(RelayConfig(url=url)) as client:
        return (await receiver.pull(client, JOB, version, store.destination(JOB, version))).path


def whole(root: Path, version: int) -> State:
    directory = root / f"whole-{version}"
    directory.mkdir(exist_ok=True)
    if (source := root / f"v{version}.safetensors").exists():
        source.rename(directory / "model.safetensors")
    return open_checkpoint(directory).state
