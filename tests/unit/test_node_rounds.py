"""Several engines of one host in lock-step: all of them change, or none does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from rose_daemon.node.engine_http import EngineClient
from rose_daemon.node.engines import Engines
from rose_daemon.node.rounds import Outcome, UpdateRounds
from waiting import until
from weight_states import delta

from rose.core.effects import ApplyVersion
from rose.units import ReplicaId, WeightVersion
from rose.weights.container import read_patches, write_version
from rose.weights.digests import digest_state
from rose.weights.patches import apply_to_state

A, B = ReplicaId("a"), ReplicaId("b")
V0, V1 = WeightVersion(0), WeightVersion(1)
BASE, TARGET, ENCODED = delta()
CORRUPT = (422, {"error": "corrupt_delta", "version_held": 0})
FAILED = (500, {"error": "apply_failed", "version_held": 0})
MIXED = (500, {"error": "weights_mixed", "detail": "half of it"})


@dataclass
class SteppedEngine:
    """The endpoints of an engine, by steps; `refuse` answers a step so, `hold` has it wait."""

    state: Any = field(default_factory=lambda: BASE)
    version: int = 0
    before: Any = None
    staged: dict[str, Any] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    refuse: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    lose: str = ""
    """The answer to this step is lost, though it was done."""
    hold: str = ""
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def post(self, request: web.Request) -> web.Response:
        step = request.match_info["step"]
        self.calls.append(step)
        if step == self.hold:
            self.reached.set()
            await self.go_on.wait()
        if step in self.refuse:
            status, body = self.refuse[step]
            return web.json_response(body, status=status)
        answer = getattr(self, step)(await request.json())
        if step == self.lose:
            assert request.transport is not None
            request.transport.close()
        return cast("web.Response", answer)

    def stage(self, body: dict[str, Any]) -> web.Response:
        if body["base_version"] != self.version:
            return web.json_response({"error": "wrong_base", "version_held": self.version}, status=409)
        self.staged, self.before = body, None
        return web.json_response({"version": body["version"], "changed": 1, "ms": {"stage": 1.0}})

    def apply(self, body: dict[str, Any]) -> web.Response:
        assert body["version"] == self.staged["version"]
        self.before = self.version, self.state
        self.state = apply_to_state(self.state, read_patches(Path(self.staged["path"])))
        self.version = body["version"]
        return web.json_response({"version": self.version, "changed": 1, "ms": {"pause": 2.0, "apply": 0.5}})

    def undo(self, _: dict[str, Any]) -> web.Response:
        if self.before is not None:
            (self.version, self.state), self.before = self.before, None
        return web.json_response({"version_held": self.version})

    def settle(self, _: dict[str, Any]) -> web.Response:
        self.before = None
        return web.json_response({"version_held": self.version})

    async def digests(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version, "digests": digest_state(self.state)})


@dataclass
class Host:
    rounds: UpdateRounds
    engines: dict[ReplicaId, SteppedEngine]
    path: str

    async def go(self, *replicas: ReplicaId) -> dict[ReplicaId, Outcome]:
        orders = [
            ApplyVersion(replica, V1, V0, self.path, abort_in_flight=True, together=(A, B))
            for replica in replicas or (A, B)
        ]
        outcomes = await asyncio.gather(*(self.rounds.go(order) for order in orders))
        return dict(zip(replicas or (A, B), outcomes, strict=True))

    def check_all_at(self, version: int) -> None:
        state = TARGET if version else BASE
        for engine in self.engines.values():
            assert engine.version == version
            assert digest_state(engine.state) == digest_state(state)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    engines = {replica: SteppedEngine() for replica in (A, B)}
    write_version(tmp_path / "v1", ENCODED)
    runners, urls = [], {}
    for replica, engine in engines.items():
        application = web.Application()
        application.router.add_post("/rose/v1/weights/{step}", engine.post)
        application.router.add_get("/rose/v1/weights/digests", engine.digests)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        urls[replica] = f"http://127.0.0.1:{runner.addresses[0][1]}"
        runners.append(runner)
    async with aiohttp.ClientSession() as session:
        clients = {
            replica: SimpleNamespace(client=EngineClient(session, url, "secret"))
            for replica, url in urls.items()
        }
        rounds = UpdateRounds(cast("Engines", clients), 20, time.monotonic_ns)
        yield Host(rounds, engines, str(tmp_path / "v1"))
        assert not rounds._open
    for runner in runners:
        await runner.cleanup()


async def test_all_stage_before_any_writes(host: Host) -> None:
    host.engines[B].hold = "stage"
    going = asyncio.create_task(host.go())
    await host.engines[B].reached.wait()
    await until(lambda: host.engines[A].calls == ["stage"])
    await asyncio.sleep(0.05)
    assert host.engines[A].calls == ["stage"], "it waits for the other"
    host.engines[B].go_on.set()
    outcomes = await going
    assert {replica: outcome.reason for replica, outcome in outcomes.items()} == {A: "", B: ""}
    host.check_all_at(1)
    for engine in host.engines.values():
        assert engine.calls == ["stage", "apply", "settle"]
        assert engine.before is None
    answer = outcomes[A].answer
    assert answer is not None
    assert answer.ms == {"stage": 1.0, "pause": 2.0, "apply": 0.5, "total": 3.0}


@pytest.mark.parametrize(("step", "answer"), [("stage", CORRUPT), ("apply", FAILED)])
async def test_where_one_cannot_the_other_stays(
    host: Host, step: str, answer: tuple[int, dict[str, Any]]
) -> None:
    host.engines[A].refuse[step] = answer
    outcomes = await host.go()
    assert outcomes[A].reason.startswith(str(answer[1]["error"]))
    assert (outcomes[A].held, outcomes[A].held_back) == (0, False)
    assert (outcomes[B].held, outcomes[B].held_back) == (0, True)
    host.check_all_at(0)
    host.engines[A].refuse.clear()
    assert not any(outcome.reason for outcome in (await host.go()).values()), "the next attempt works"
    host.check_all_at(1)


async def test_where_one_does_not_reach_the_digests_both_are_taken_back(host: Host) -> None:
    engine = host.engines[A]
    apply = engine.apply

    def lying(body: dict[str, Any]) -> web.Response:
        answer = apply(body)
        engine.state = BASE
        return answer

    engine.apply = lying  # type: ignore[method-assign]
    outcomes = await host.go()
    assert outcomes[A].reason.startswith("digest_mismatch")
    assert (outcomes[A].held, outcomes[A].held_back) == (0, False)
    assert outcomes[B].held_back
    host.check_all_at(0)


async def test_an_answer_that_was_lost_is_made_up_for_in_the_next_round(host: Host) -> None:
    host.engines[A].lose = "apply"
    outcomes = await host.go()
    assert outcomes[A].reason.startswith("engine_unreachable")
    assert outcomes[A].held is None, "nobody knows whether it wrote"
    assert outcomes[B].held_back
    assert (host.engines[A].version, host.engines[B].version) == (1, 0)
    host.engines[A].lose = ""
    assert not any(outcome.reason for outcome in (await host.go()).values())
    host.check_all_at(1)


async def test_an_engine_that_holds_a_mixture_says_so(host: Host) -> None:
    host.engines[A].refuse |= {"apply": FAILED}
    host.engines[B].refuse |= {"undo": MIXED}
    outcomes = await host.go()
    assert (outcomes[B].mixed, outcomes[B].held) == (True, None)
    assert not outcomes[A].mixed


async def test_an_engine_that_is_gone_holds_the_other_back_once(host: Host) -> None:
    gone = cast("dict[ReplicaId, Any]", host.rounds._engines).pop(A)
    outcomes = await host.go()
    assert outcomes[A].reason == "engine_gone"
    assert outcomes[B].held_back
    host.check_all_at(0)
    cast("dict[ReplicaId, Any]", host.rounds._engines)[A] = gone


async def test_a_round_that_is_cut_short_lets_the_others_go(host: Host) -> None:
    """rosed stops, or an engine's order is dropped: whoever is left stays at what it holds."""
    host.engines[A].hold = "stage"
    first = asyncio.create_task(host.go(A))
    await host.engines[A].reached.wait()
    second = asyncio.create_task(host.go(B))
    await until(lambda: host.engines[B].calls == ["stage"])
    first.cancel()
    outcome = (await second)[B]
    assert (outcome.held, outcome.held_back) == (0, True)
    await asyncio.gather(first, return_exceptions=True)
    host.engines[A].go_on.set()
    host.check_all_at(0)
