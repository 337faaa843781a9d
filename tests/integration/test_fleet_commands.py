"""`rose jobs|nodes|trajectories|explain` against the real scheduler."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from aiohttp import web
from gateway_world import MESSAGES, MODEL, world

from rose.errors import Exit


async def rose(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rose.cli.main", *arguments, stdout=-1, stderr=-1
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_what_the_scheduler_knows(tmp_path: Path) -> None:
    async with world(tmp_path, engines=2) as made:
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
        headers = {"x_rose_trajectory": "episode-1", "x_rose_turn_id": "turn/1"}
        status, answer = await made.post("/v1/chat/completions", body, **headers)
        assert status == 200
        replica = answer["rose"]["attempts"][0]["replica"]

        code, text, _ = await rose("jobs", "--url", made.url)
        assert (code, text.splitlines()[0].split()[:3]) == (0, ["job", "model", "step"])
        assert MODEL in text

        code, text, _ = await rose("nodes", "--json", "--url", made.url)
        assert code == 0
        assert sum(row["turns_finished"] for row in json.loads(text)) == 1

        _, text, _ = await rose("nodes", "--url", made.url)
        assert "vNone" not in text

        code, text, _ = await rose("trajectories", "--json", "--limit", "5", "--url", made.url)
        (trajectory,) = json.loads(text)
        assert (trajectory["trajectory"], trajectory["replica"]) == ("episode-1", replica)
        assert trajectory["prefix_tokens"] > 0
        _, text, _ = await rose("trajectories", "--job", "other", "--url", made.url)
        assert text == "none\n"

        code, text, _ = await rose("explain", "turn/1", "--url", made.url)
        assert code == 0
        assert f"to {replica}, attempt 1" in text
        assert "finished" in text
        code, _, err = await rose("explain", "never", "--url", made.url)
        assert (code, "never" in err) == (Exit.NOT_FOUND, True)
        assert "Traceback" not in err


@pytest.mark.parametrize("command", [("jobs",), ("nodes",), ("trajectories",), ("explain", "x")])
async def test_without_a_scheduler(command: tuple[str, ...]) -> None:
    code, _, err = await rose(*command, "--url", "http://127.0.0.1:9")
    assert code == Exit.NOT_READY
    assert err.startswith("rose: http://127.0.0.1:9: ")


async def test_what_is_no_scheduler_is_said_to_be_none() -> None:
    """The relay's port, an engine's, any server's: whatever shape their 404 has."""

    async def answer(http: web.Request) -> web.Response:
        return web.Response(status=404, body=bodies[-1], content_type="application/json")

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    bodies = [b'{"detail":"Not Found"}', b'{"error":"not_found","message":"no"}', b"404: Not Found", b""]
    try:
        while bodies:
            code, _, err = await rose("jobs", "--url", url)
            assert code == Exit.NOT_FOUND
            assert f"{url} is no gateway of a rose-scheduler" in err
            bodies.pop()
    finally:
        await runner.cleanup()


async def test_a_token_that_is_missing_says_where_to_name_it(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    async with world(tmp_path, job=False, token_file=str(token)) as made:
        code, _, err = await rose("jobs", "--url", made.url)
    assert code == Exit.USAGE
    assert "scheduler.token_file" in err
