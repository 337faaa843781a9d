"""A serving and a rollout scheduler share KV memory: any interleaving of load, cuts, aborts and slow workers.

vLLM's own schedulers and block pools, without a device.  After every move: no more pages are held than there
are, no more memory is mapped than pages are held, and no step touches a block without memory.  In the end
every request has had exactly one end.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from rose.boards import BoardPaths, BoardWriter
from rose.core.readings import GateMode, GatePolicy, GateReason, KvHolding
from rose.engines.vllm.kv_orders import KvOrder, OrderReader
from rose.engines.vllm.settings import PluginSettings

pytestmark = pytest.mark.engine

BLOCKS, BLOCK_BYTES, PAGE = 128, 32 * 2 * 1024 * 4, 2 << 20
CAPACITY = 27
"""Pages, of eight blocks each: the two caches together could take 34."""
WINDOW_NS = 1_000_000_000


class Books:
    """The ledger, in one process."""

    def __init__(self) -> None:
        self.capacity_pages = self.free_pages = CAPACITY

    def acquire(self, pages: int) -> int:
        if pages > self.free_pages:
            return 0
        self.free_pages -= pages
        return pages

    def release(self, pages: int) -> None:
        self.free_pages += pages
        assert self.free_pages <= self.capacity_pages


class Worker:
    """Holds memory for blocks, as orders say; gives back only when told to."""

    def __init__(self, boards: BoardPaths, engine: str, page_bytes: int) -> None:
        self._board = BoardWriter(boards.kv_holding(engine), KvHolding)
        self._orders = OrderReader(boards, engine)
        self._page_bytes = page_bytes
        self.mapped = np.ones(BLOCKS + 1, np.bool_)
        self.steps: deque[set[int]] = deque()
        """Blocks that each step in flight may read or write."""
        self.eager = False
        """Whether it gives back what it can as soon as a step has begun."""
        self._say(0)

    def _say(self, revision: int) -> None:
        size = (BLOCKS + 1) * BLOCK_BYTES
        self._board.publish(KvHolding(time.monotonic_ns(), revision, self._page_bytes, size, 0, 0, 0, 0))

    def _order(self) -> tuple[int, Any]:
        order = self._orders.read()
        assert isinstance(order, KvOrder)
        parked = np.zeros(BLOCKS + 1, np.bool_)
        for first, end in order.parked:
            parked[first:end] = True
        return order.revision, parked

    def before_step(self) -> None:
        self.mapped |= ~self._order()[1]

    def give_back(self) -> None:
        revision, parked = self._order()
        self.mapped = ~parked
        for blocks in self.steps:
            assert self.mapped[list(blocks)].all(), "memory was taken from under a step"
        self._say(revision)


class Engine:
    """A scheduler, its worker, and what became of its requests."""

    def __init__(self, loop: Any, worker: Worker, elastic: Any) -> None:
        self.loop, self.worker, self.elastic = loop, worker, elastic
        self.added: list[str] = []
        self.ends: dict[str, int] = {}
        loop.device = self._device
        worker.give_back()

    def add(self, tokens: int, tokens_max: int, prefix: int) -> None:
        name = f"request-{len(self.added)}"
        self.added.append(name)
        self.loop.add(name, [prefix] * tokens, tokens_max)

    def _device(self) -> None:
        self.worker.before_step()
        (manager,) = self.loop.scheduler.kv_cache_manager.coordinator.single_type_managers
        step = {
            block.block_id
            for request_id in self.loop.in_flight[-1][0].num_scheduled_tokens
            for block in manager.req_to_blocks.get(request_id, ())
        }
        assert self.worker.mapped[list(step)].all(), "a step without memory"
        self.worker.steps.append(step)
        if self.worker.eager:
            self.worker.give_back()

    def step(self) -> None:
        scheduler = self.loop.scheduler
        if scheduler.has_requests():
            self._note(self.loop.step())
        elif self.loop.in_flight:
            self._note(self.loop.end_oldest())

    def _note(self, outputs: Any) -> None:
        while len(self.worker.steps) > len(self.loop.in_flight):
            self.worker.steps.popleft()
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                if output.finish_reason is not None:
                    self.ends[output.request_id] = self.ends.get(output.request_id, 0) + 1

    def abort(self, number: int) -> None:
        from vllm.v1.request import RequestStatus  # noqa: PLC0415

        live = sorted(self.loop.scheduler.requests)
        if live:
            name = live[number % len(live)]
            for request in self.loop.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED):
                self.ends[request.request_id] = self.ends.get(request.request_id, 0) + 1

    @property
    def busy(self) -> bool:
        return bool(self.loop.scheduler.requests or self.loop.in_flight or self.loop.scheduler.has_requests())


def machine_of(configs: tuple[Any, Any], kind: str, page_bytes: int) -> type[RuleBasedStateMachine]:
    """The state machine for engines with one step in flight or two, and pages of that size in the arena."""
    from rose.engines.vllm import kv_elastic, rollout_scheduler, serving_scheduler  # noqa: PLC0415
    from rose.engines.vllm.step_loop import StepLoop  # noqa: PLC0415

    suffix, in_flight = {"sync": ("Scheduler", 1), "async": ("AsyncScheduler", 2)}[kind]

    class Sharing(RuleBasedStateMachine):
        @initialize()
        def start(self) -> None:
            self._directory = tempfile.TemporaryDirectory()
            self.boards = BoardPaths(Path(self._directory.name))
            self.books, self.now_ns, self.revision = Books(), 0, 0
            self.gate = BoardWriter(self.boards.gate("r0"), GatePolicy)
            self.budget(0)
            self.serving = self._engine("serving", "s")
            self.rollout = self._engine("rollout", "r0")

        def _engine(self, role: Any, name: str) -> Engine:
            worker = Worker(self.boards, name, page_bytes)
            given = PluginSettings(
                role=role,
                name=name,
                run_dir=self._directory.name,
                token_file="",
                board_stale_ms=1e8,  # no heartbeats: every move is the machine's
                kv_shared_bytes=CAPACITY * PAGE,
            )

            def join(settings: PluginSettings, block_bytes: int, group_blocks: int) -> Any:
                leave = 0.2 if settings.role == "rollout" else 0.0
                return kv_elastic.SharedPages(
                    self.books,
                    self.books,
                    block_bytes=block_bytes,
                    group_blocks=group_blocks,
                    leave_share=leave,
                )

            module = serving_scheduler if role == "serving" else rollout_scheduler
            scheduler = getattr(module, role.capitalize() + suffix)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kv_elastic.SharedPages, "join", staticmethod(join))
                loop = StepLoop(scheduler, configs[in_flight - 1], given, in_flight_max=in_flight)
            if role == "rollout":
                return Engine(loop, worker, loop.scheduler._rose_elastic)
            return Engine(loop, worker, loop.scheduler._rose_lender._kv)

        @rule(
            tokens=st.integers(1, 900), more=st.integers(1, 60), prefix=st.integers(1, 3), lent=st.booleans()
        )
        def arrive(self, tokens: int, more: int, prefix: int, lent: bool) -> None:
            (self.rollout if lent else self.serving).add(tokens, more, prefix)

        @rule(steps=st.integers(1, 12), lent=st.booleans())
        def run(self, steps: int, lent: bool) -> None:
            for _ in range(steps):
                (self.rollout if lent else self.serving).step()

        @rule(number=st.integers(0, 9), lent=st.booleans())
        def abort(self, number: int, lent: bool) -> None:
            (self.rollout if lent else self.serving).abort(number)

        @rule(blocks=st.sampled_from([0, 4, 20, 40, 60]))
        def budget(self, blocks: int) -> None:
            self.revision += 1
            alive_ns = time.monotonic_ns() + 50_000_000_000
            self.gate.publish(
                GatePolicy(self.revision, GateMode.OPEN, 0, blocks, 0, alive_ns, 250_000_000, 60_000_000, 0)
            )

        @rule()
        def replica_is_switched_off(self) -> None:
            self.revision += 1
            alive_ns = time.monotonic_ns() + 50_000_000_000
            reason = GateReason.INACTIVE
            self.gate.publish(GatePolicy(self.revision, GateMode.CLOSED, 0, 1, 0, alive_ns, 0, 0, 0, reason))
            self.rollout.loop.scheduler._rose_heartbeat()
            for _ in range(3):
                self.rollout.step()
            assert not self.rollout.loop.scheduler.requests

        @rule(lent=st.booleans())
        def worker_gives_back(self, lent: bool) -> None:
            (self.rollout if lent else self.serving).worker.give_back()

        @rule(lent=st.booleans(), eager=st.booleans())
        def worker_changes(self, lent: bool, eager: bool) -> None:
            (self.rollout if lent else self.serving).worker.eager = eager

        @rule(windows=st.sampled_from([0.2, 1.1]))
        def serving_looks(self, windows: float) -> None:
            self.now_ns += int(windows * WINDOW_NS)
            self.serving.loop.scheduler._rose_lender.look(self.now_ns)

        @rule()
        def caches_are_reset(self) -> None:
            for engine in (self.serving, self.rollout):
                parked = engine.elastic.budget.parked.copy()
                engine.loop.scheduler.reset_prefix_cache()
                assert np.array_equal(engine.elastic.budget.parked, parked)

        @invariant()
        def memory_is_accounted_for(self) -> None:
            if not hasattr(self, "rollout"):
                return
            held = 0
            for engine in (self.serving, self.rollout):
                pages = engine.elastic.pages
                assert pages.charge(~engine.worker.mapped) <= pages.held
                held += pages.held
                budget = engine.elastic.budget
                free = budget._pool.get_num_free_blocks()
                assert free + budget.used_blocks + budget.parked_blocks == BLOCKS
            assert held + self.books.free_pages == CAPACITY

        def teardown(self) -> None:
            if not hasattr(self, "rollout"):
                return
            self._drain(self.rollout)
            self.budget(4)
            for _ in range(3):
                self.rollout.step()
                self.rollout.loop.scheduler._rose_heartbeat()
                self.rollout.worker.give_back()
                self.rollout.elastic.memory._looked_ns = 0
            self._drain(self.serving)
            for engine in (self.serving, self.rollout):
                assert engine.ends == dict.fromkeys(engine.added, 1)
            self._directory.cleanup()

        def _drain(self, engine: Engine) -> None:
            for _ in range(3000):
                if not engine.busy:
                    return
                engine.step()
                for each in (self.serving, self.rollout):
                    each.worker.give_back()
                    each.elastic.look(time.monotonic_ns())
                self.memory_is_accounted_for()
            raise AssertionError("requests never end")

    return Sharing


@pytest.fixture(scope="module")
def configs(demo_models: Any) -> tuple[Any, Any]:
    from rose.engines.vllm.step_loop import engine_config  # noqa: PLC0415 (imports vLLM)

    shape = {"sequences_max": 8, "kv_blocks": BLOCKS + 1}
    return (
        engine_config(demo_models.serving, **shape),
        engine_config(demo_models.serving, **shape, asynchronous=True),
    )


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("page_bytes", [4096, 4 * BLOCK_BYTES])
def test_sharing_loses_no_request_and_no_page(
    configs: tuple[Any, Any], kind: str, page_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rose.engines.vllm import (  # noqa: PLC0415
        elastic_serving,
        kv_orders,
        replica_board,
        rollout_scheduler,
        slack_board,
    )

    # Threads would hold their schedulers, and a dozen open boards of each, to the end of the process.
    monkeypatch.setattr(elastic_serving.ElasticServingMixin, "_rose_look", lambda self: None)
    for board in (slack_board.SlackBoard, replica_board.ReplicaBoard):
        monkeypatch.setattr(board, "_beat", lambda self: None)
    monkeypatch.setattr(rollout_scheduler, "_GROW_NS", 0)
    monkeypatch.setattr(kv_orders, "_LOOK_NS", 0)
    try:
        run_state_machine_as_test(
            machine_of(configs, kind, page_bytes),
            settings=settings(
                max_examples=30,
                stateful_step_count=80,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        gc.collect()  # schedulers are cycles
