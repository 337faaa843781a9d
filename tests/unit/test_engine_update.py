"""The update endpoints of an engine, over a stand-in for vLLM: what happens when a step of them fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from waiting import until

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
        self.ranks: dict[str, list[Any]] = {}
        """Answers of several ranks to one method, in place of the usual one."""
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
            "rose_undo_weights": {"version_held": 0},
            "rose_weight_digests": {"version": 0, "digests": {}},
        }
        if method in self.ranks:
            await self._call(method.removeprefix("rose_"))
            return self.ranks[method]
        return [await self._call(method.removeprefix("rose_"), answers.get(method, {}))]

    async def pause_scheduler_async(self, **_: Any) -> None:
        await self._call("pause")

    async def update_weight_version(self, version: str) -> None:
        await self._call(f"version {version}")

    async def resume_generation(self) -> None:
        await self._call("resume")


CYCLE = [
    "discard_weights",
    "stage_weights",
    "stage_state",
    "pause",
    "apply_weights",
    "version 1",
    "resume",
    "discard_weights",
]
FAILED = {"error": "apply_failed", "detail": "no", "version_held": 0}
APPLIED = {"version": 1, "changed": 3, "apply_ms": 2.0}
MIXED = {"error": "weights_mixed", "detail": "half of it"}


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
    routes._engine = routes._cycle.engine = core
    app = FastAPI()
    routes.attach_router(app)
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False),
        base_url="http://engine",
        headers={"authorization": "Bearer secret"},
    )


async def test_an_update_stages_before_it_pauses(core: Core, client: httpx.AsyncClient) -> None:
    answer = await client.post("/rose/v1/weights/update", json=BODY)
    assert (answer.status_code, answer.json()["version"]) == (200, 1)
    assert core.calls == CYCLE


async def test_generation_goes_on_where_the_pause_fails(core: Core, client: httpx.AsyncClient) -> None:
    core.fail = "pause"
    assert (await client.post("/rose/v1/weights/update", json=BODY)).status_code == 500
    assert core.calls == [*CYCLE[:4], "resume"]


@pytest.mark.parametrize("fail", ["apply_weights", "version 1"])
async def test_an_engine_whose_weights_are_not_known_stays_paused(
    core: Core, client: httpx.AsyncClient, fail: str
) -> None:
    """It would generate from a mixture, or keep prefixes of new weights under the old version."""
    core.fail = fail
    answer = await client.post("/rose/v1/weights/update", json=BODY)
    assert answer.status_code == 500
    assert core.calls == CYCLE[: CYCLE.index(fail) + 1]
    core.fail = ""
    for path, body in (("update", BODY), ("undo", {}), ("settle", {}), ("apply", {"version": 1})):
        answer = await client.post(f"/rose/v1/weights/{path}", json=body)
        assert (answer.status_code, answer.json()["error"]) == (500, "weights_mixed"), path
        assert "version_held" not in answer.json()
    assert "resume" not in core.calls


async def test_one_rank_that_fails_takes_the_others_back(core: Core, client: httpx.AsyncClient) -> None:
    core.ranks["rose_apply_weights"] = [APPLIED, FAILED]
    answer = await client.post("/rose/v1/weights/update", json=BODY)
    assert (answer.status_code, answer.json()) == (500, FAILED)
    assert core.calls == [*CYCLE[:5], "undo_weights", "resume"], "and the old version stays what it was told"
    core.ranks["rose_apply_weights"] = [APPLIED, {**APPLIED, "apply_ms": 5.0}]
    answer = await client.post("/rose/v1/weights/update", json=BODY)
    assert answer.json()["ms"]["apply"] == 5.0, "the slowest rank's"


@pytest.mark.parametrize(
    ("apply", "undo"),
    [
        ([APPLIED, MIXED], [{"version_held": 0}, MIXED]),
        ([APPLIED, FAILED], [MIXED, {"version_held": 0}]),
        ([APPLIED, FAILED], [{"version_held": 0}, {"version_held": 7}]),
    ],
)
async def test_ranks_that_cannot_all_be_taken_back_stay_paused(
    core: Core, client: httpx.AsyncClient, apply: list[Any], undo: list[Any]
) -> None:
    core.ranks |= {"rose_apply_weights": apply, "rose_undo_weights": undo}
    answer = await client.post("/rose/v1/weights/update", json=BODY)
    assert (answer.status_code, answer.json()["error"]) == (500, "weights_mixed")
    assert "resume" not in core.calls


async def test_one_rank_that_refuses_ends_the_staging_of_all(core: Core, client: httpx.AsyncClient) -> None:
    refused = {"state": "refused", "error": "wrong_base", "detail": "no", "version_held": 4}
    staged = {"state": "staged", "changed": 3, "stage_ms": 1.0}
    core.ranks["rose_stage_state"] = [staged, refused]
    answer = await client.post("/rose/v1/weights/stage", json={k: BODY[k] for k in BODY if k[0] != "a"})
    assert (answer.status_code, answer.json()["version_held"]) == (409, 4)
    assert "pause" not in core.calls


async def test_digests_on_which_ranks_differ_fit_nothing(core: Core, client: httpx.AsyncClient) -> None:
    core.ranks["rose_weight_digests"] = [
        {"version": 2, "digests": {"norm": "aa", "q": "bb"}},
        {"version": 2, "digests": {"norm": "ab", "k": "cc"}},
    ]
    answer = (await client.get("/rose/v1/weights/digests")).json()
    assert answer == {"version": 2, "digests": {"norm": "ranks_differ", "q": "bb", "k": "cc"}}
    core.ranks["rose_weight_digests"][1]["version"] = 3
    answer = await client.get("/rose/v1/weights/digests")
    assert (answer.status_code, answer.json()["error"]) == (500, "weights_mixed")


async def test_an_update_in_steps_can_be_taken_back(core: Core, client: httpx.AsyncClient) -> None:
    async def post(what: str, **body: Any) -> Any:
        answer = await client.post(f"/rose/v1/weights/{what}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    staged = await post("stage", version=1, base_version=0, path="/v1")
    assert (staged["changed"], staged["ms"]) == (3, {"stage": 1.0})
    assert "pause" not in core.calls
    assert set((await post("apply", version=1, abort_in_flight=True))["ms"]) == {"pause", "apply"}
    assert core.calls == CYCLE[:-1]
    core.calls.clear()
    assert await post("undo") == {"version_held": 0}
    assert core.calls == ["pause", "undo_weights", "version 0", "resume"]
    await post("settle")
    assert core.calls[-1] == "discard_weights"


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
    async with asyncio.timeout(60):
        second = await client.post("/rose/v1/weights/update", json=BODY)
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
    await until(lambda: rings)
    assert len(rings) < 30
    core.go_on.set()
    assert (await asking).status_code == 200
