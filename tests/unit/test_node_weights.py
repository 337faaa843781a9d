"""The weight agent: from the relay to verified weights in an engine, and every way that can fail."""

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
from rose_daemon.node.keeper import CopyKeeper
from rose_daemon.node.weights import WeightAgent
from waiting import until
from weight_states import JOB, MemoryRelay, delta, fail_once, same

from rose.config import Config, JobConfig, NodeConfig
from rose.core.effects import ApplyVersion, PullVersion
from rose.core.events import (
    NodeEvent,
    VersionAvailable,
    VersionsPruned,
    VersionStaged,
    VersionStageFailed,
    WeightsApplied,
    WeightsRefused,
)
from rose.units import JobId, ReplicaId, WeightVersion
from rose.weights import tensorfile
from rose.weights.container import read_manifest, read_patches
from rose.weights.digests import digest_state
from rose.weights.encoding import encode_coded
from rose.weights.hostcopy import HostCopy
from rose.weights.manifest import squashed_job
from rose.weights.patches import apply_to_state
from rose.weights.store import WeightStore

REPLICA = ReplicaId("r")
V0, V1 = WeightVersion(0), WeightVersion(1)
BASE, TARGET, ENCODED = delta()


class PollingRelay(MemoryRelay):
    """Waits a little where a real relay would wait for news."""

    async def latest(self, job: JobId, after: WeightVersion, wait_s: float = 0) -> WeightVersion | None:
        await asyncio.sleep(0.01)
        return await super().latest(job, after, wait_s)


@dataclass
class FakeEngine:
    """The plugin's endpoints over a state held in memory."""

    state: Any = field(default_factory=lambda: BASE)
    version: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    refusal: web.Response | None = None
    forget_to_apply: bool = False
    hang: bool = False
    url: str = ""

    async def update(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        body = await request.json()
        self.asked.append(body)
        if self.hang:
            await asyncio.sleep(60)
        if self.refusal is not None:
            return web.Response(status=self.refusal.status, body=self.refusal.body)
        patches = read_patches(Path(body["path"]))
        if not self.forget_to_apply:
            self.state = apply_to_state(self.state, patches)
        self.version = body["version"]
        ms = {"stage": 1.0, "pause": 2.0, "apply": 0.5, "total": 3.5}
        return web.json_response({"version": self.version, "changed": len(patches), "ms": ms})

    async def digests(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version, "digests": digest_state(self.state)})


@dataclass
class Bench:
    agent: WeightAgent
    relay: PollingRelay
    engine: FakeEngine
    events: list[NodeEvent]
    keeper: CopyKeeper
    root: Path

    async def staged(self) -> VersionStaged:
        self.relay.publish(ENCODED)
        await self.agent.pull(PullVersion(JOB, V1, V0))
        event = self.events.pop()
        assert isinstance(event, VersionStaged), event
        return event

    async def apply(self) -> NodeEvent:
        staged = await self.staged()
        await self.agent.apply(ApplyVersion(REPLICA, V1, V0, staged.path, abort_in_flight=True))
        (event,) = self.events
        return event


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    engine, relay, events = FakeEngine(), PollingRelay(), []
    application = web.Application()
    application.router.add_post("/rose/v1/weights/update", engine.update)
    application.router.add_get("/rose/v1/weights/digests", engine.digests)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = Config(
        node=NodeConfig(state_dir=str(tmp_path), weights_timeout_s=4),
        job=JobConfig(id=JOB),
    )
    async with aiohttp.ClientSession() as session:
        running = SimpleNamespace(client=EngineClient(session, engine.url, "secret"))
        engines = SimpleNamespace(get=lambda replica: running if replica == REPLICA else None)
        keeper = CopyKeeper(config, relay, events.append)
        agent = WeightAgent(config, relay, cast("Engines", engines), events.append, time.monotonic_ns, keeper)
        yield Bench(agent, relay, engine, events, keeper, tmp_path)
    await runner.cleanup()


async def test_an_update_is_applied_and_verified(bench: Bench) -> None:
    assert await bench.apply() == WeightsApplied(REPLICA, V1)
    assert bench.engine.asked == [
        {
            "version": 1,
            "base_version": 0,
            "path": bench.engine.asked[0]["path"],
            "abort_in_flight": True,
        }
    ]
    update = bench.agent.history.latest(REPLICA)
    assert update is not None
    assert update.ok
    assert update.engine_ms["pause"] == 2.0
    assert update.delta_bytes == ENCODED.manifest.delta_bytes
    assert update.parameters_verified == len(ENCODED.manifest.parameters)


async def test_an_engine_that_says_done_without_doing_it_is_found_out(bench: Bench) -> None:
    bench.engine.forget_to_apply = True
    event = await bench.apply()
    assert isinstance(event, WeightsRefused)
    assert event.reason.startswith("digest_mismatch: ")
    assert event.version_held is None  # nobody knows what it runs
    assert (bench.agent.history.applied, bench.agent.history.refused) == (0, 1)


async def test_a_wrong_base_is_told_with_what_is_held(bench: Bench) -> None:
    body = {"error": "wrong_base", "version_held": 7}
    bench.engine.refusal = web.json_response(body, status=409)
    event = await bench.apply()
    assert isinstance(event, WeightsRefused)
    assert event.version_held == 7
    assert event.reason.startswith("wrong_base")


@pytest.mark.parametrize(
    ("status", "text"), [(422, '{"error": "corrupt_delta"}'), (500, "oops"), (200, "[]")]
)
async def test_other_refusals(bench: Bench, status: int, text: str) -> None:
    bench.engine.refusal = web.Response(status=status, text=text)
    event = await bench.apply()
    assert isinstance(event, WeightsRefused)
    assert event.version_held is None


async def test_an_engine_that_hangs_is_given_up(bench: Bench) -> None:
    bench.engine.hang = True
    event = await bench.apply()
    assert isinstance(event, WeightsRefused)
    assert event.reason.startswith("engine_unreachable")


async def test_an_update_whose_answer_was_lost_is_believed_by_its_digests(bench: Bench) -> None:
    bench.engine.version, bench.engine.state = 1, TARGET
    bench.engine.refusal = web.json_response({"error": "wrong_base", "version_held": 1}, status=409)
    assert await bench.apply() == WeightsApplied(REPLICA, V1)


async def test_a_claim_to_hold_the_version_is_not_believed_without_its_digests(bench: Bench) -> None:
    bench.engine.version = 1  # and has the bytes of version 0
    bench.engine.refusal = web.json_response({"error": "wrong_base", "version_held": 1}, status=409)
    event = await bench.apply()
    assert isinstance(event, WeightsRefused)
    assert event.version_held == 1  # which has the machine restart it
    assert event.reason.startswith("digest_mismatch")


async def test_an_engine_that_is_busy_with_an_earlier_update_is_asked_again(bench: Bench) -> None:
    bench.engine.refusal = web.json_response({"error": "busy", "detail": "under way"}, status=409)
    applying = asyncio.create_task(bench.apply())
    await until(lambda: bench.engine.asked)
    bench.engine.refusal = None
    assert await applying == WeightsApplied(REPLICA, V1)


async def test_an_engine_that_stays_busy_is_given_up(bench: Bench) -> None:
    bench.engine.refusal = web.json_response({"error": "busy"}, status=409)
    event = await bench.apply()
    assert isinstance(event, WeightsRefused)
    assert event.reason.startswith("busy")


async def test_an_engine_that_is_gone(bench: Bench) -> None:
    order = ApplyVersion(ReplicaId("other"), V1, V0, "/nowhere", abort_in_flight=False)
    await bench.agent.apply(order)
    assert bench.events == [WeightsRefused(ReplicaId("other"), V1, None, "engine_gone")]


async def test_files_that_vanished_or_rotted_are_not_sent_to_the_engine(bench: Bench) -> None:
    staged = await bench.staged()
    (Path(staged.path) / "manifest.json").write_bytes(b"{}")
    for path in (staged.path, "/no/such/version"):
        await bench.agent.apply(ApplyVersion(REPLICA, V1, V0, path, abort_in_flight=True))
        event = bench.events.pop()
        assert isinstance(event, WeightsRefused)
        assert event.reason.startswith("corrupt_version")
    assert bench.engine.asked == []


async def test_pulls_that_fail_say_why(bench: Bench) -> None:
    await bench.agent.pull(PullVersion(JOB, V1, V0))
    bench.relay.publish(ENCODED)
    bench.relay.before = fail_once("get_into")
    await bench.agent.pull(PullVersion(JOB, V1, V0))
    bench.relay.before = fail_once("get_into", OSError(28, "No space left on device"))
    await bench.agent.pull(PullVersion(JOB, V1, V0))
    reasons = [event.reason.split(":")[0] for event in bench.events if isinstance(event, VersionStageFailed)]
    assert reasons == ["relay", "relay", "store"]
    await bench.agent.pull(PullVersion(JOB, V1, V0))
    assert isinstance(bench.events[-1], VersionStaged)


async def test_every_version_is_reported_once_whatever_the_relay_does(bench: Bench) -> None:
    bench.relay.before = fail_once("latest")
    watching = asyncio.create_task(bench.agent.watch())
    await until(lambda: bench.agent.relay_error)
    first, second = delta(1)[2], delta(2)[2]
    bench.relay.publish(first)
    bench.relay.publish(second)
    sizes = [sum(bucket.size for bucket in each.manifest.buckets) for each in (first, second)]
    wanted = [
        VersionAvailable(JOB, V1, V0, nbytes=sizes[0], more=True),
        VersionAvailable(JOB, WeightVersion(2), V1, nbytes=sizes[1]),
    ]
    await until(lambda: bench.events == wanted)
    assert bench.agent.relay_error == ""
    await asyncio.sleep(0.1)
    assert bench.events == wanted
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_job_id_that_is_used_anew_is_noticed(bench: Bench) -> None:
    """Versions only grow: what another run of the job publishes could follow nothing that is here."""
    for version in range(1, 4):
        bench.relay.publish(delta(version)[2])
    watching = asyncio.create_task(bench.agent.watch())
    await until(lambda: len(bench.events) == 3)
    bench.relay.restart()
    bench.relay.publish(delta(1, seed=7)[2])
    await until(lambda: "began anew" in bench.agent.relay_error)
    for version in range(2, 4):
        bench.relay.publish(delta(version)[2])
    await until(lambda: not bench.agent.relay_error)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_squashed_delta_is_reported_and_fetched_under_its_own_name(bench: Bench) -> None:
    squashed = squashed_job(JOB)
    bench.relay.publish(ENCODED)
    bench.relay.publish(delta(job=squashed)[2])
    watching = asyncio.create_task(bench.agent.watch())
    await until(lambda: len(bench.events) == 2)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert [(event.version, event.squashed) for event in bench.events] == [(1, False), (1, True)]  # type: ignore[union-attr]
    bench.events.clear()
    await bench.agent.pull(PullVersion(JOB, V1, V0, squashed=True))
    (event,) = bench.events
    assert isinstance(event, VersionStaged), event
    assert event.job == JOB
    assert read_manifest(Path(event.path)).job == squashed


async def test_a_coded_version_is_handed_to_engines_as_patches(bench: Bench, tmp_path: Path) -> None:
    """Decoded once, on the host; what is reported is what travelled."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(tensorfile.encode(BASE, {}))
    bench.keeper._model = tmp_path / "model"
    keeping = asyncio.create_task(bench.keeper.run())
    coded = encode_coded(JOB, V1, V0, BASE, TARGET)
    bench.relay.publish(coded)
    await bench.agent.pull(PullVersion(JOB, V1, V0))
    staged = bench.events.pop(0)
    assert isinstance(staged, VersionStaged), staged
    assert not read_manifest(Path(staged.path)).coded
    await bench.agent.apply(ApplyVersion(REPLICA, V1, V0, staged.path, abort_in_flight=True))
    assert WeightsApplied(REPLICA, V1) in bench.events
    assert same(bench.engine.state, TARGET)
    update = bench.agent.history.latest(REPLICA)
    assert update is not None
    assert update.delta_bytes == coded.manifest.delta_bytes
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_coded_version_on_a_base_that_nobody_has_says_so(bench: Bench) -> None:
    bench.keeper._looked.set()
    bench.relay.publish(encode_coded(JOB, V1, V0, BASE, TARGET))
    await bench.agent.pull(PullVersion(JOB, V1, V0))
    (event,) = bench.events
    assert isinstance(event, VersionStageFailed)
    assert event.reason.startswith("wrong_base: ")


async def test_what_nobody_needs_is_deleted(bench: Bench) -> None:
    """Engines hold 5 or more and the copy 6: versions up to 5 may go, but for the newest four."""
    store = WeightStore(bench.root)
    for version in range(1, 9):
        store.destination(JOB, WeightVersion(version)).mkdir(parents=True)
    await bench.agent.prune(WeightVersion(5))
    assert len(store.versions(JOB)) == 8, "no copy: the newest is decoded on top of all"
    bench.keeper._copy = cast("HostCopy", SimpleNamespace(version=WeightVersion(6)))
    await bench.agent.prune(WeightVersion(5))
    assert store.versions(JOB) == (5, 6, 7, 8)
    assert bench.events == [VersionsPruned(JOB, (1, 2, 3, 4))]
    await bench.agent.prune(WeightVersion(5))
    assert len(bench.events) == 1
