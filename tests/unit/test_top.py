"""`rose top`, driven by Textual's pilot on a screen that is not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_cli import LENDING, STATUS
from textual.widgets import DataTable, Static

from rose import wire
from rose.cli.screen import Snapshot, Top
from rose.cli.top import document, top
from rose.errors import ConfigError, NotFound

FLEET = {
    "nodes": [
        {"node": "node-0", "state": "alive", "session": "s", "silent_ms": 420.0},
        {"node": "node-1", "state": "suspect", "session": "t", "silent_ms": 3200.0},
    ],
    "replicas": [
        {"node": "node-0", "eligible": True, "job": "job-0", "weight_version": 3, "turns_in_flight": 4},
        {"node": "node-0", "eligible": False, "job": None, "weight_version": 2, "turns_in_flight": 1},
    ],
    "jobs": [
        {
            "job": "job-0", "rl_step": 4, "required_version": 3, "latest_version": 3, "turns_queued": 1,
            "turns_in_flight": 5, "replicas": [{"eligible": True}, {"eligible": False}],
        }
    ]
}  # fmt: skip
GOLDEN = Path(__file__).parents[1] / "golden" / "top.txt"
BRACKETS = "engine_failed: [rank 1] said [/bold]"
NODE = STATUS | {"lending": LENDING | {"switched_off": False}}


class Desk:
    """Answers looks, and notes orders."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.orders: list[wire.ControlRequest] = []
        self.refusal: NotFound | None = None

    def look(self) -> Snapshot:
        return self.snapshot

    def order(self, request: wire.ControlRequest) -> None:
        if self.refusal:
            raise self.refusal
        self.orders.append(request)


def cells(app: Top, table: str) -> list[list[Any]]:
    shown = app.query_one(table, DataTable)
    return [[str(cell) for cell in shown.get_row_at(index)] for index in range(shown.row_count)]


async def settled(app: Top, pilot: Any) -> None:
    await app.workers.wait_for_complete()
    await pilot.pause()


async def test_it_shows_host_replicas_and_jobs() -> None:
    desk = Desk(Snapshot(NODE, "", FLEET, ""))
    app = Top(desk.look, desk.order, 3600)
    async with app.run_test(size=(160, 40)) as pilot:
        await settled(app, pilot)
        host = str(app.query_one("#host", Static).content)
        assert "node-0 on alpha   healthy   CPU cores 0 (50% busy)" in host
        assert "gate closed (serving_running)" in host
        assert "2 of 100 requests late by rollout" in host
        (replica,) = cells(app, "#replicas")
        assert replica[:3] == ["opp-0", "opportunistic", "ready"]
        assert replica[5] == "7/20/40"
        assert cells(app, "#hosts") == [
            ["node-0", "alive", "0.4 s ago", "1/2", "job-0", "v2 v3", "5"],
            ["node-1", "suspect", "3.2 s ago", "0/0", "-", "-", "0"],
        ]
        assert cells(app, "#jobs") == [["job-0", "4", "v3", "v3", "1", "5", "1/2"]]


async def test_the_whole_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    app = Top(Desk(Snapshot(NODE, "", FLEET, "")).look, None, 3600)
    async with app.run_test(size=(150, 26)) as pilot:
        await settled(app, pilot)
        if os.environ.get("ROSE_GOLDEN_WRITE"):
            await pilot.pause(2)
            text = "\n".join(text_of(app.export_screenshot())) + "\n"
            GOLDEN.write_text(text, encoding="utf-8")
        golden = GOLDEN.read_text(encoding="utf-8").splitlines()
        for _ in range(100):  # tables find their widths a while after they were filled
            if (lines := text_of(app.export_screenshot())) == golden:
                break
            await pilot.pause(0.1)
    assert lines == golden, "ROSE_GOLDEN_WRITE=1 writes it anew"


def text_of(svg: str) -> list[str]:
    """The lines of a screenshot, without what is only space."""
    parts: dict[float, list[tuple[float, str]]] = {}
    for part in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        if "clip-path" in part.attrib:  # the others are the window around it
            text = (part.text or "").replace("\xa0", " ")
            parts.setdefault(float(part.attrib["y"]), []).append((float(part.attrib["x"]), text))
    lines = ("".join(text for _, text in sorted(parts[y])).rstrip() for y in sorted(parts))
    return [line for line in lines if line]


def test_as_json_it_prints_both_answers_once() -> None:
    body = document((NODE, "", None, "no scheduler"))
    assert json.loads(json.dumps(body)) == body
    assert (body["host"]["node"], body["scheduler"], body["scheduler_error"]) == (
        NODE["node"],
        None,
        "no scheduler",
    )


async def test_what_looks_like_markup_is_shown_as_it_is() -> None:
    (replica,) = STATUS["replicas"]
    app = Top(Desk(Snapshot(NODE | {"replicas": [replica | {"reason": BRACKETS}]})).look, None, 3600)
    async with app.run_test() as pilot:
        await settled(app, pilot)
        assert cells(app, "#replicas")[0][-1] == BRACKETS


async def test_keys_give_orders() -> None:
    desk = Desk(Snapshot(NODE))
    app = Top(desk.look, desk.order, 3600)
    async with app.run_test() as pilot:
        await settled(app, pilot)
        for key in ("d", "u", "l"):
            await pilot.press(key)
            await settled(app, pilot)
        desk.snapshot = Snapshot(NODE | {"lending": LENDING | {"switched_off": True}})
        app.refresh_snapshot()
        await settled(app, pilot)
        await pilot.press("l")
        await settled(app, pilot)
    assert desk.orders == [
        wire.DrainRequest("opp-0", drain=True),  # type: ignore[arg-type]
        wire.DrainRequest("opp-0", drain=False),  # type: ignore[arg-type]
        wire.LendRequest(on=False),
        wire.LendRequest(on=True),
    ]


async def test_readonly_has_no_such_keys() -> None:
    desk = Desk(Snapshot(NODE))
    app = Top(desk.look, None, 3600)
    async with app.run_test() as pilot:
        await settled(app, pilot)
        for key in ("d", "u", "l"):
            await pilot.press(key)
        await settled(app, pilot)
        assert not {"drain", "lend"} & {each.binding.action for each in app.active_bindings.values()}
    assert desk.orders == []


async def test_what_rosed_refuses_is_said() -> None:
    desk = Desk(Snapshot(NODE))
    desk.refusal = NotFound("this host has no replica opp-0")
    app = Top(desk.look, desk.order, 3600)
    async with app.run_test() as pilot:
        await settled(app, pilot)
        await pilot.press("d")
        await settled(app, pilot)
        assert any("no replica opp-0" in str(each.message) for each in app._notifications)


@pytest.mark.parametrize("fleet", [None, FLEET])
async def test_a_rosed_that_is_gone_and_comes_back(fleet: dict[str, Any] | None) -> None:
    desk = Desk(Snapshot(None, "connection refused", fleet, "" if fleet else "no scheduler"))
    app = Top(desk.look, desk.order, 3600)
    async with app.run_test() as pilot:
        await settled(app, pilot)
        assert "rosed does not answer: connection refused" in str(app.query_one("#host", Static).content)
        assert cells(app, "#replicas") == []
        for key in ("d", "l"):
            await pilot.press(key)
        await settled(app, pilot)
        desk.snapshot = Snapshot(NODE)
        app.refresh_snapshot()
        await settled(app, pilot)
        assert len(cells(app, "#replicas")) == 1
    assert desk.orders == []


def test_without_a_terminal_it_says_what_else_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="needs a terminal") as raised:
        top()
    assert "rose status" in raised.value.hint
    assert capsys.readouterr().out == ""
