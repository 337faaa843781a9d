"""The update endpoint of an engine, over a stand-in for vLLM: what happens when a step of it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from rose.engines.vllm import endpoints
from rose.engines.vllm.endpoints import RoseEndpoints
from rose.engines.vllm.settings import PluginSettings

BODY = {"version": 1, "base_version": 0, "path": "/v1", "abort_in_flight": True}


class Core:
    """The calls that the endpoint makes, in order; `fail` names one that raises, `hold` one that waits."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail = ""
        self.hold = ""
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        self.stagings = 0
        self.engine_core = self

    async def _call(self, name: str, answer: Any = None) -> Any:
        self.calls.append(name)
        if name == self.hold:
            self.reached.set()
            await self.go_on.wait()
        if name == self.fail:
            raise RuntimeError(name)
        return answer

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        await asyncio.sleep(0)
        if method == "rose_stage_state" and self.stagings:
            self.stagings -= 1
            return [{"state": "staging"}]
        answers = {
            "rose_stage_weights": {"state": "staging"},
            "rose_stage_state": {"state": "staged", "changed": 3, "stage_ms": 1.0},
            "rose_apply_weights": {"version": 1, "changed": 3, "apply_ms": 1.0},
        }
        return [await self._call(method.removeprefix("rose_"), answers.get(method, {}))]

    async def pause_scheduler_async(self, **_: Any) -> None:
        await self._call("pause")

    async def update_weight_version(self, version: str) -> None:
        await self._call(f"version {version}")

    async def resume_generation(self) -> None:
        await self._call("resume")


CYCLE = ["discard_weights", "stage_weights", "stage_state", "pause", "apply_weights", "version 1", "resume"]


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def client(core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> httpx.AsyncClient:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    settings = PluginSettings(
        role="rollout", name="r", run_dir=str(tmp_path), token_file=str(tmp_path / "token")
    )
    for name, value in settings.to_environ().items():
        monkeypatch.setenv(name, value)
    routes = RoseEndpoints()
    routes._engine = core
    app = FastAPI()
    routes.attach_router(app)
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False),
        base_url="http://engine",
        headers={"authorization": "Bearer secret"},
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_an_update_stages_before_it_pauses(core: Core, client: httpx.AsyncClient) -> None:
    answer = await client.post("/rose/v1/weights/update", json=BODY)
    assert (answer.status_code, answer.json()["version"]) == (200, 1)
    assert core.calls == CYCLE


@pytest.mark.parametrize("fail", ["pause", "apply_weights", "version 1"])
async def test_generation_goes_on_whatever_fails(core: Core, client: httpx.AsyncClient, fail: str) -> None:
    core.fail = fail
    answer = await client.post("/rose/v1/weights/update", json=BODY)
    assert answer.status_code == 500
    assert core.calls == [*CYCLE[: CYCLE.index(fail) + 1], "resume"]


@pytest.mark.parametrize("hold", ["stage_state", "pause", "apply_weights", "version 1"])
async def test_an_update_that_nobody_waits_for_is_still_made_whole(
    core: Core, client: httpx.AsyncClient, hold: str
) -> None:
    """Else weights could be new while prefixes are still kept under the old version."""
    core.hold = hold
    asking = asyncio.create_task(client.post("/rose/v1/weights/update", json=BODY))
    await core.reached.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    second = await asyncio.wait_for(client.post("/rose/v1/weights/update", json=BODY), 5)
    assert second.json()["error"] == "busy"
    core.go_on.set()
    await until(lambda: core.calls == CYCLE)


async def test_a_long_staging_rings_for_its_questions_only(
    core: Core, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring ends the wait of a closed gate: one every 2 ms would make an idle engine spin for minutes."""
    rings: list[int] = []
    monkeypatch.setattr(endpoints.GateBell, "ring", lambda self: rings.append(len(core.calls)))
    core.stagings = 12  # about a fifth of a second
    assert (await client.post("/rose/v1/weights/update", json=BODY)).status_code == 200
    questions = core.calls.index("pause") + 12
    assert 0 < sum(asked < core.calls.index("pause") for asked in rings) <= 2 * questions


async def test_a_call_that_waits_long_is_rung_for_less_and_less(
    core: Core, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings: list[int] = []
    monkeypatch.setattr(endpoints.GateBell, "ring", lambda self: rings.append(1))
    core.hold = "apply_weights"
    asking = asyncio.create_task(client.post("/rose/v1/weights/update", json=BODY))
    await core.reached.wait()
    rings.clear()
    await asyncio.sleep(0.3)
    assert 1 <= len(rings) < 30
    core.go_on.set()
    assert (await asking).status_code == 200
