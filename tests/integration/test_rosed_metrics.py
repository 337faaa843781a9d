"""rosed beside a serving engine without the plugin (a mock one): slack is inferred from its metrics."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rose_daemon.node.engines import free_port
from test_rosed_process import OPPORTUNISTIC, Host, ready, until

from rose.boards import BoardReader, BoardWriter
from rose.core.readings import GateMode, GatePolicy, SlackReading


def beside(host: Host, url: str) -> None:
    lent = f'[[replicas]]\nid = "{OPPORTUNISTIC}"\nkind = "opportunistic"\nmodel = "{host.model}"\n'
    host.write(replicas=f'{lent}profile = "p"\n', serving=True)
    text = host.config.read_text()
    more = f'url = "{url}"\nmode = "metrics"\nttft_slo_ms = 200\nmetrics_ms = 200\nquiet_ms = 400\n'
    host.config.write_text(text.replace('url = "http://127.0.0.1:9"\n', more))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.end()


@pytest.fixture
def engine() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port("127.0.0.1")
    argv = [sys.executable, "-m", "rose_daemon.mock_engine", "--port", str(port)]
    process = subprocess.Popen([*argv, "--served-model-name", "serving"], stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline().startswith(b"ready")
    yield process, f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def board(host: Host) -> SlackReading | None:
    try:
        reading = BoardReader(host.paths.slack("serving"), SlackReading).read()
    except (OSError, ValueError):
        return None
    return reading if isinstance(reading, SlackReading) else None


def test_an_idle_engine_lends_and_a_dead_one_does_not(
    host: Host, engine: tuple[subprocess.Popen[bytes], str]
) -> None:
    process, url = engine
    beside(host, url)
    host.start("mock")
    until(ready(host, OPPORTUNISTIC), host.explain)
    until(lambda: (seen := board(host)) is not None and not seen.in_step, host.explain)
    until(lambda: (host.status() or {})["serving"]["state"] == "idle", host.explain)
    serving = (host.status() or {})["serving"]
    assert (serving["mode"], serving["metrics"]["running"]) == ("metrics", 0)
    until(lambda: (host.status() or {})["memory"]["serving_bytes"], host.explain)
    policy = BoardReader(host.paths.gate(OPPORTUNISTIC), GatePolicy).read()
    assert isinstance(policy, GatePolicy)
    assert policy.mode == GateMode.STRICT

    process.kill()
    process.wait()
    until(lambda: (host.status() or {})["serving"]["state"] == "unhealthy", host.explain)
    last = board(host)
    time.sleep(0.6)
    assert board(host) == last, "nothing is published of what cannot be read"
    until(lambda: policy_mode(host) == GateMode.CLOSED, host.explain)  # whose memory is whose is not known
    assert host.process is not None
    host.process.terminate()
    assert host.process.wait(60) == 0
    assert board(host) is None


def policy_mode(host: Host) -> int:
    policy = BoardReader(host.paths.gate(OPPORTUNISTIC), GatePolicy).read()
    return policy.mode if isinstance(policy, GatePolicy) else -1


def test_an_engine_with_the_plugin_is_not_written_over(host: Host) -> None:
    beside(host, "http://127.0.0.1:9")
    host.run_dir.mkdir(parents=True, exist_ok=True)
    words = dict.fromkeys(SlackReading._fields, 0)
    BoardWriter(host.paths.slack("serving"), SlackReading).publish(SlackReading(**words))
    refused = host.refuse()
    assert refused.returncode == 3
    assert f"process {os.getpid()} writes" in refused.stderr
    assert "set serving.mode to plugin" in refused.stderr
