"""A real rollout engine gives memory back to the host in mid-generation, and takes it again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine_world import TOKEN, Engine, Gatekeeper, unused_port

from rose.boards import BoardPaths, WatchedBoard
from rose.config import Config, NodeConfig, ReplicaConfig
from rose.core.readings import LimitStatus, ReplicaReading, Unknown
from rose.engines.vllm.launch import rollout_command
from rose.units import ReplicaId

pytestmark = pytest.mark.engine

BLOCKS, BLOCK_TOKENS, BLOCK_BYTES = 1024, 32, 5 * 2 * 3 * 32 * 32 * 2
"""Bytes: layers, K and V, KV heads, their size, tokens, bfloat16."""
PROMPTS = [[9 + number, 30 + number, 3, 4] for number in range(8)]
"""Short: vLLM itself may answer otherwise when it computes the same long prompt in pieces of other sizes."""
TOKENS = 600
LONG = [[(7 * number + 3 * position) % 250 for position in range(1500)] for number in range(24)]
"""Together they fill the cache."""


class Replica(NamedTuple):
    engine: Engine
    gate: Gatekeeper
    board: WatchedBoard[ReplicaReading]
    worker_pid: int

    def reading(self) -> ReplicaReading:
        reading = self.board.read(time.monotonic_ns(), None)
        assert not isinstance(reading, Unknown), reading
        return reading

    def rss(self) -> int:
        """Anonymous memory of the worker, as the kernel counts it."""
        for line in Path(f"/proc/{self.worker_pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon")

    def until(self, good: Callable[[ReplicaReading], bool], seconds: float = 30) -> ReplicaReading:
        deadline = time.monotonic() + seconds
        while not good(reading := self.reading()):
            assert time.monotonic() < deadline, reading
            time.sleep(0.002)
        return reading

    def budget(self, blocks: int) -> ReplicaReading:
        """Set it; the engine's report once it obeys, memory included."""
        self.gate.set(kv_budget_blocks=blocks)
        revision = self.gate.policy.revision
        return self.until(
            lambda now: now.policy_revision == revision and now.limit_status == LimitStatus.APPLIED
        )


@pytest.fixture(scope="module")
def replica(demo_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    root = tmp_path_factory.mktemp("memory")
    (root / "run").mkdir()
    token_file = root / "engine.token"
    token_file.touch(mode=0o600)
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    section = ReplicaConfig(
        id=ReplicaId("r0"),
        kind="dedicated",
        model=str(demo_models.rollout),
        cpus=(min(os.sched_getaffinity(0)),),
        kv_blocks=BLOCKS + 1,
        block_tokens=BLOCK_TOKENS,
    )
    config = Config(
        node=NodeConfig(state_dir=str(root), run_dir=str(root / "run"), token_file=str(token_file)),
        replicas=(section,),
    )
    port = unused_port()
    boards = BoardPaths(root / "run")
    gate = Gatekeeper(boards, "r0")
    engine = Engine(rollout_command(section, config, port=port), port, root / "engine.log", TOKEN)
    try:
        engine.wait_ready()
        (worker,) = engine.rose("GET", "engine").json()["workers"]
        yield Replica(engine, gate, WatchedBoard(boards.replica("r0"), ReplicaReading), worker["pid"])
    finally:
        engine.stop()
        gate.close()


def generate(replica: Replica, pool: ThreadPoolExecutor) -> list[Any]:
    return [pool.submit(replica.engine.complete, "rollout", prompt, TOKENS) for prompt in PROMPTS]


def test_memory_falls_on_a_cut_in_mid_generation_and_tokens_stay(replica: Replica) -> None:
    with ThreadPoolExecutor(16) as pool:
        fresh = replica.rss()
        assert replica.reading().kv_resident_bytes < BLOCKS * BLOCK_BYTES // 4  # nobody wrote there yet
        list(pool.map(lambda prompt: replica.engine.complete("rollout", prompt, 2), LONG))
        reference = [future.result()["token_ids"] for future in generate(replica, pool)]
        full = replica.rss()
        assert full - fresh > 0.8 * BLOCKS * BLOCK_BYTES
        replica.until(lambda now: now.kv_resident_bytes > 0.95 * BLOCKS * BLOCK_BYTES)

        running = generate(replica, pool)
        replica.until(lambda now: now.running == 8 and now.kv_used_blocks >= 8 * 17)
        budget = 5 * 19  # blocks that five of them need to the end
        after = replica.budget(budget)
        cut = replica.rss()
        outcomes = [future.result() for future in running]
        ended = [each for each in outcomes if each["stop_reason"] == "rose:kv_budget_cut"]
        assert len(ended) == 3
        for outcome, tokens in zip(outcomes, reference, strict=True):
            assert outcome["token_ids"] == tokens[: len(outcome["token_ids"])]
            assert outcome in ended or len(outcome["token_ids"]) == TOKENS

        given_back = (BLOCKS - budget) * BLOCK_BYTES
        assert full - cut > 0.8 * given_back
        assert after.kv_resident_bytes <= (budget + 2) * BLOCK_BYTES

        assert replica.budget(0).kv_resident_bytes <= (budget + 2) * BLOCK_BYTES  # granted is not yet touched
        again = [future.result()["token_ids"] for future in generate(replica, pool)]
        assert again == reference
        list(pool.map(lambda prompt: replica.engine.complete("rollout", prompt, 2), LONG))
        assert replica.rss() - cut > 0.8 * given_back


def test_free_blocks_are_given_back_without_ending_anybody(replica: Replica) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(replica.engine.complete, "rollout", LONG[0], 100)
        replica.until(lambda now: now.running == 1 and now.kv_used_blocks > 40)
        before = replica.reading()
        after = replica.budget(64)
        assert running.result()["finish_reason"] == "length"
        assert after.aborted_requests == before.aborted_requests
        assert after.kv_resident_bytes <= 66 * BLOCK_BYTES
        replica.budget(0)
