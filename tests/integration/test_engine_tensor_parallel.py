"""Weights of a real engine that is cut over two workers: every rank changes, or none does.

The model has what makes parts differ: biases, one key-value head that both ranks hold, a vocabulary that ends
in padding, and an output head that is the embedding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from engine_world import TOKEN, Engine, Gatekeeper, unused_port

from rose.boards import BoardPaths, BoardReader
from rose.config import Config, NodeConfig, ReplicaConfig
from rose.core.readings import KvHolding
from rose.engines.vllm.launch import rollout_command
from rose.units import JobId, ReplicaId, WeightVersion
from rose.weights import tensorfile
from rose.weights.bits import Bits
from rose.weights.checkpoint import open_checkpoint
from rose.weights.container import read_patches, write_version
from rose.weights.decoding import decode_staged
from rose.weights.digests import digest_state
from rose.weights.encoding import encode_coded

pytestmark = pytest.mark.engine

JOB = JobId("job-0")
PROMPTS = [[(7 * i + 3 * j) % 256 for j in range(24 + 8 * i)] for i in range(3)]
TOKENS = 24
State = dict[str, Bits]


def make_checkpoint(directory: Path) -> State:
    """A small model with a tied head; its parameters as the checkpoint names them."""
    from rose_daemon.demo.models import ModelShape, _write_checkpoint  # noqa: PLC0415 (imports torch)

    shape = ModelShape("qwen2", 128, 192, 2, 4, 1, 32, 0.16)
    _write_checkpoint(directory, shape, 11)
    state = {
        name: bits.copy()
        for name, bits in open_checkpoint(directory).state.items()
        if name != "lm_head.weight"
    }
    (directory / "model.safetensors").write_bytes(tensorfile.encode(state, {"format": "pt"}))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return state


def with_head(state: State) -> State:
    """As a trainer may name them: the tied head beside the embedding."""
    return {**state, "lm_head.weight": state["model.embed_tokens.weight"]}


class Cut(NamedTuple):
    """The engine, the trainer's state of every version, and where versions are written."""

    engine: Engine
    states: list[State]
    root: Path
    boards: BoardPaths

    @property
    def held(self) -> int:
        return len(self.states) - 1

    def next_version(self) -> tuple[Path, State]:
        """What a trainer publishes next, decoded as a host decodes it; nobody holds it yet."""
        version, before = len(self.states), self.states[-1]
        rng = np.random.default_rng(version)
        after = {name: bits.copy() for name, bits in before.items()}
        for bits in after.values():
            bits.words[rng.random(bits.words.size) < 0.03] ^= 5
        directory = self.root / f"v{version}"
        if not directory.exists():
            numbers = WeightVersion(version), WeightVersion(version - 1)
            write_version(directory, encode_coded(JOB, *numbers, with_head(before), with_head(after)))
        return decode_staged(directory, before), after

    def post(self, step: str, path: Path | None = None, **body: Any) -> httpx.Response:
        if path is not None:
            body |= {"path": str(path), "base_version": self.held}
        return self.engine.rose("POST", f"weights/{step}", body)

    def check(self, state: State, version: int) -> None:
        answer = self.engine.rose("GET", "weights/digests").json()
        assert answer == {"version": version, "digests": digest_state(state)}
        assert self.engine.rose("GET", "engine").json()["weight_version"] == version

    def greedy(self) -> list[list[int]]:
        return [self.engine.complete("rollout", prompt, TOKENS)["token_ids"] for prompt in PROMPTS]

    def order_fault(self, what: str) -> None:
        (self.root / "fault").write_text(what)

    def heal(self) -> None:
        (self.root / "fault").unlink()


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cut]:
    root = tmp_path_factory.mktemp("cut")
    run_dir, token_file, model = root / "run", root / "engine.token", root / "model"
    run_dir.mkdir()
    token_file.touch(mode=0o600)
    token_file.write_text(TOKEN)
    state = make_checkpoint(model)
    port = unused_port()
    replica = ReplicaConfig(
        id=ReplicaId("r0"),
        kind="dedicated",
        model=str(model),
        tensor_parallel=2,
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        kv_blocks=80,
        engine_args=("--worker-cls", "faulty_worker.FaultyWorker"),
    )
    node = NodeConfig(state_dir=str(root), run_dir=str(run_dir), token_file=str(token_file))
    config = Config(node=node, replicas=(replica,))
    paths = filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "ROSE_TEST_FAULT": str(root / "fault")}
    with ExitStack() as stack:
        command = rollout_command(replica, config, port=port, environ=environ)
        engine = Engine(command, port, root / "engine.log", TOKEN)
        stack.callback(engine.stop)
        engine.wait_ready()
        gate = Gatekeeper(BoardPaths(run_dir), "r0")
        stack.callback(gate.close)
        yield Cut(engine, [state], root, BoardPaths(run_dir))


def test_every_rank_is_a_worker_with_a_share_of_the_cores(cut: Cut) -> None:
    workers = cut.engine.rose("GET", "engine").json()["workers"]
    assert len({worker["pid"] for worker in workers}) == 2
    cores = [set(worker["cpus"]) for worker in workers]
    if len(os.sched_getaffinity(0)) > 1:
        assert not cores[0] & cores[1]
    for rank in range(2):
        holding = BoardReader(cut.boards.kv_holding("r0", rank), KvHolding).read()
        assert isinstance(holding, KvHolding), rank


def test_digests_over_all_ranks_are_those_of_the_checkpoint(cut: Cut) -> None:
    cut.check(cut.states[0], 0)


def test_an_update_gives_every_rank_its_part(cut: Cut) -> None:
    before = cut.greedy()
    path, after = cut.next_version()
    answer = cut.post("update", path, version=cut.held + 1)
    assert answer.status_code == 200, answer.text
    entries = sum(patch.values.size for patch in read_patches(path))
    assert answer.json()["changed"] == entries, "of the whole model, not of one rank"
    cut.states.append(after)
    cut.check(after, cut.held)
    assert cut.greedy() != before


def test_what_was_applied_is_taken_back_on_every_rank(cut: Cut) -> None:
    tokens = cut.greedy()
    path, after = cut.next_version()
    assert cut.post("stage", path, version=cut.held + 1).status_code == 200
    assert cut.post("apply", version=cut.held + 1).status_code == 200
    cut.check(after, cut.held + 1)
    assert cut.post("undo").json() == {"version_held": cut.held}
    cut.check(cut.states[-1], cut.held)
    assert cut.greedy() == tokens


def test_where_one_rank_cannot_write_no_rank_changes(cut: Cut) -> None:
    tokens = cut.greedy()
    path, after = cut.next_version()
    cut.order_fault("apply")
    answer = cut.post("update", path, version=cut.held + 1)
    assert (answer.status_code, answer.json()["error"]) == (500, "apply_failed")
    assert answer.json()["version_held"] == cut.held
    cut.check(cut.states[-1], cut.held)
    assert cut.greedy() == tokens
    cut.heal()
    assert cut.post("update", path, version=cut.held + 1).status_code == 200
    cut.states.append(after)
    cut.check(after, cut.held)


def test_a_damaged_version_is_refused_by_all_ranks(cut: Cut) -> None:
    path, _ = cut.next_version()
    bucket = next(path.glob("bucket-*"))
    whole = bucket.read_bytes()
    bucket.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    answer = cut.post("update", path, version=cut.held + 1)
    assert (answer.status_code, answer.json()["error"]) == (422, "corrupt_delta")
    cut.check(cut.states[-1], cut.held)


def test_an_engine_that_cannot_be_taken_back_generates_nothing_more(cut: Cut) -> None:
    """Last of all: this engine is of no use afterwards."""
    path, _ = cut.next_version()
    cut.order_fault("undo")
    answer = cut.post("update", path, version=cut.held + 1)
    assert (answer.status_code, answer.json()["error"]) == (500, "weights_mixed")
    assert "version_held" not in answer.json()
    cut.heal()
    assert cut.post("update", path, version=cut.held + 1).json()["error"] == "weights_mixed"
    body = {"model": "rollout", "prompt": [1, 2, 3], "max_tokens": 2}
    with pytest.raises(httpx.TimeoutException):
        cut.engine.http.post("/v1/completions", json=body, timeout=3)
