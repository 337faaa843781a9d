"""A rosed that was killed, and the next one: engines that outlived it are taken over, or ended in order."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from rose_daemon.node.warden import descendants
from test_rosed_process import DEDICATED, Host, ready, running, until

GRACE_S = 120
"""Longer than any test waits: what ends before it did not end for it."""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    left = engines(made)
    made.end()
    for pid in running(left):  # a test failed between two daemons
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def engines(host: Host) -> list[int]:
    """Wardens and engines, by the records in the run directory."""
    wardens = [json.loads(path.read_bytes())["pid"] for path in host.run_dir.glob("engine-*.json")]
    return [pid for warden in wardens for pid in (warden, *descendants(warden))]


def begin(host: Host, extra: str = "", builder: str = "mock") -> list[int]:
    host.write(extra=f"adopt_grace_s = {GRACE_S}\n{extra}")
    host.start(builder)
    until(ready(host, DEDICATED), host.explain)
    found = engines(host)
    assert sorted(found) == sorted(host.children())
    return found


def kill(host: Host) -> None:
    assert host.process
    host.process.kill()
    host.process.wait()


def ended_in_order(host: Host) -> None:
    assert host.process
    host.process.terminate()
    assert host.process.wait(60) == 0, host.explain()
    assert not [path for path in host.run_dir.iterdir() if path.name.startswith(("engine-", "warden-"))]


def test_an_engine_outlives_two_killed_daemons_with_its_turn_and_ends_in_order(host: Host) -> None:
    found = begin(host, builder="steady")
    url = host.replica(DEDICATED)["url"]
    answers: list[dict[str, object]] = []

    def turn() -> None:
        body = {"model": "rollout", "prompt": "a b c", "max_tokens": 40, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            answers.append(json.load(answer))

    asking = threading.Thread(target=turn)
    asking.start()
    for _ in range(2):
        kill(host)
        assert sorted(running(found)) == sorted(found)
        host.start("steady")
        until(ready(host, DEDICATED), host.explain)
        assert host.replica(DEDICATED)["pid"] == found[0]
        assert host.replica(DEDICATED)["attempts"] == 0
        assert host.replica(DEDICATED)["url"] == url
    asking.join(120)
    assert len(answers) == 1
    ended_in_order(host)
    assert running(found) == []


@pytest.mark.parametrize("change", ["configuration", "token", "replica removed"])
def test_an_engine_that_does_not_match_is_ended_in_order(host: Host, change: str) -> None:
    found = begin(host)
    kill(host)
    text = host.config.read_text()
    match change:
        case "configuration":
            text = text.replace('kind = "dedicated"', 'kind = "dedicated"\nkv_blocks = 77')
        case "token":
            token = host.base / "state" / "engine.token"
            token.write_text("another-secret-of-the-same-kind-0123456789\n")
        case "replica removed":
            text = text.replace(f'id = "{DEDICATED}"', 'id = "other-0"')
    host.config.write_text(text)
    host.start("mock")
    replica = "other-0" if change == "replica removed" else DEDICATED
    until(ready(host, replica), host.explain)
    assert running(found) == []
    assert host.replica(replica)["pid"] not in found
    assert "adoption_refused" in host.errors.read_text()
    ended_in_order(host)


@pytest.mark.parametrize("victim", ["warden", "engine"])
def test_an_engine_that_died_meanwhile_is_started_again(host: Host, victim: str) -> None:
    found = begin(host)
    kill(host)
    os.kill(found[0 if victim == "warden" else 1], signal.SIGKILL)
    until(lambda: not running(found), host.explain)
    host.start("mock")
    until(ready(host, DEDICATED), host.explain)
    assert host.replica(DEDICATED)["pid"] not in found
    ended_in_order(host)


def test_the_end_of_an_adopted_engine_is_noticed(host: Host) -> None:
    found = begin(host)
    kill(host)
    host.start("mock")
    until(ready(host, DEDICATED), host.explain)
    os.kill(found[1], signal.SIGKILL)
    until(lambda: host.replica(DEDICATED)["attempts"] >= 1, host.explain)
    until(ready(host, DEDICATED), host.explain)
    assert "exited_code_137" in host.errors.read_text()
    ended_in_order(host)


def test_an_engine_that_nobody_comes_for_ends_after_the_grace(host: Host) -> None:
    host.write(extra="adopt_grace_s = 0.5")
    host.start("mock")
    until(ready(host, DEDICATED), host.explain)
    found = host.children()
    kill(host)
    until(lambda: not running(found), host.explain)
    assert not list(host.run_dir.glob("engine-*"))
    assert not list(host.run_dir.glob("warden-*"))
    log = (host.base / "state" / "logs" / f"{DEDICATED}.log").read_text()
    assert "none came" in log


def test_a_fixed_port_is_no_obstacle(host: Host) -> None:
    begin(host)
    port = int(host.replica(DEDICATED)["url"].rpartition(":")[2])
    ended_in_order(host)
    text = host.config.read_text().replace('kind = "dedicated"', f'kind = "dedicated"\nport = {port}')
    host.config.write_text(text)
    host.start("mock")
    until(ready(host, DEDICATED), host.explain)
    pid = host.replica(DEDICATED)["pid"]
    kill(host)
    host.start("mock")
    until(ready(host, DEDICATED), host.explain)
    assert host.replica(DEDICATED)["pid"] == pid
    ended_in_order(host)
