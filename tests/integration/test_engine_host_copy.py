"""A real engine that starts from the host's copy, goes back without a download, and forward again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from engine_world import TOKEN, Engine, Gatekeeper, unused_port

from rose.boards import BoardPaths
from rose.config import Config, NodeConfig, ReplicaConfig
from rose.engines.vllm.launch import rollout_command
from rose.engines.vllm.settings import PluginSettings
from rose.units import JobId, ReplicaId, WeightVersion
from rose.weights.bits import Bits
from rose.weights.checkpoint import open_checkpoint
from rose.weights.container import write_version
from rose.weights.digests import digest_state
from rose.weights.encoding import encode_version
from rose.weights.hostcopy import HostCopy

pytestmark = pytest.mark.engine

JOB = JobId("job-0")
PROMPT = list(range(2, 60))


class Host(NamedTuple):
    engine: Engine
    states: list[dict[str, Bits]]
    forward: Path
    back: Path


@pytest.fixture(scope="module")
def host(demo_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    root = tmp_path_factory.mktemp("host")
    before = {name: bits.copy() for name, bits in open_checkpoint(demo_models.rollout).state.items()}
    after = {name: bits.copy() for name, bits in before.items()}
    rng = np.random.default_rng(1)
    for bits in after.values():
        bits.words[rng.random(bits.words.size) < 0.02] ^= 0x40
    write_version(root / "v1", encode_version(JOB, WeightVersion(1), WeightVersion(0), before, after))
    copy = HostCopy.create(root / "copy", JOB, demo_models.rollout)
    undo = copy.advance(root / "v1")

    token_file = root / "engine.token"
    token_file.touch(mode=0o600)
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    (root / "run").mkdir()
    core = (min(os.sched_getaffinity(0)),)
    replica = ReplicaConfig(
        id=ReplicaId("r0"), kind="dedicated", model=str(copy.checkpoint), cpus=core, kv_blocks=256
    )
    config = Config(
        node=NodeConfig(state_dir=str(root), run_dir=str(root / "run"), token_file=str(token_file)),
        replicas=(replica,),
    )
    port = unused_port()
    command = rollout_command(replica, config, port=port)
    command.env[f"{PluginSettings.PREFIX}WEIGHT_VERSION"] = "1"
    gate = Gatekeeper(BoardPaths(root / "run"), "r0")
    engine = Engine(command, port, root / "engine.log", TOKEN)
    try:
        engine.wait_ready()
        yield Host(engine, [before, after], root / "v1", undo.path)
    finally:
        engine.stop()
        gate.close()
        copy.close()


def digests(host: Host) -> dict[str, Any]:
    answer: dict[str, Any] = host.engine.rose("GET", "weights/digests").json()
    return answer


def go(host: Host, version: int, base: int, path: Path) -> dict[str, Any]:
    body = {"version": version, "base_version": base, "path": str(path), "abort_in_flight": False}
    answer = host.engine.rose("POST", "weights/update", body)
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = answer.json()
    return report


def test_it_starts_at_the_copys_version_and_goes_back_and_forth(host: Host) -> None:
    assert host.engine.rose("GET", "engine").json()["weight_version"] == 1
    assert digests(host) == {"version": 1, "digests": digest_state(host.states[1])}
    with_v1 = host.engine.complete("rollout", PROMPT, 24)["token_ids"]

    report = go(host, 0, 1, host.back)
    print("rollback ms:", report["ms"])
    assert host.engine.rose("GET", "engine").json()["weight_version"] == 0
    assert digests(host) == {"version": 0, "digests": digest_state(host.states[0])}
    with_v0 = host.engine.complete("rollout", PROMPT, 24)["token_ids"]

    go(host, 1, 0, host.forward)
    assert digests(host) == {"version": 1, "digests": digest_state(host.states[1])}
    assert host.engine.complete("rollout", PROMPT, 24)["token_ids"] == with_v1
    assert with_v0 != with_v1, "the prompt tells the versions apart, so no KV was mixed up"
