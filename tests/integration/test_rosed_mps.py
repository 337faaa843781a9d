"""rosed on a host whose GPU cannot be read, with MPS through a fake control daemon."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_mps_control
import httpx
import pytest
from test_rosed_process import OPPORTUNISTIC, Host, ready, running, until

from rose.boards import BoardReader
from rose.core.readings import GateMode, GatePolicy, GateReason

UUID = "GPU-5d2ab4c1-0000-0000-0000-000000000001"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    made.write(serving=True, replicas="")
    mps = f'enabled = true\nrun_dir = "{tmp_path}"\ncontrol = "{fake_mps_control.__file__}"\n'
    lent = f'id = "{OPPORTUNISTIC}"\nkind = "opportunistic"\nmodel = "{made.model}"\n'
    device = f'[device]\nkind = "cuda"\ngpu = "{UUID}"\n'
    made.config.write_text(f"{made.config.read_text()}{device}[mps]\n{mps}[[replicas]]\n{lent}")
    yield made
    made.end()


def the_child(host: Host, word: str) -> int:
    """The process whose command line names it: rosed also runs the control binary, for moments."""

    def found() -> list[int]:
        commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in host.children()}
        return [pid for pid, command in commands.items() if word in command_line(command)]

    until(lambda: len(found()) == 1, host.explain)
    return found()[0]


def command_line(path: Path) -> str:
    try:
        return path.read_text().split("\0--", maxsplit=1)[0]
    except OSError:
        return ""  # it ended meanwhile


def environ(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def test_turns_are_ended_before_the_engine_is_and_it_leaves_mps_before_it_is_killed(
    host: Host, tmp_path: Path
) -> None:
    home = tmp_path / UUID
    home.mkdir()
    (home / "servers").write_text(json.dumps({"100": []}))
    host.start("mock")
    until(ready(host, OPPORTUNISTIC), host.explain)
    status = host.status()
    assert status is not None
    assert status["devices"][0]["sharing"] == "time-slice", "the serving engine is not on the daemon"
    until(lambda: "memory_unknown" in host.explain(), host.explain)
    policy = BoardReader(host.paths.gate(OPPORTUNISTIC), GatePolicy).read()
    assert isinstance(policy, GatePolicy)
    assert (policy.mode, policy.closed_reason) == (GateMode.CLOSED, GateReason.MEMORY_UNKNOWN)

    warden, engine = (the_child(host, word) for word in ("warden.py", "rose_daemon.mock_engine"))
    assert environ(engine)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
    assert host.process is not None
    assert not any(name.startswith("CUDA_MPS") for name in environ(host.process.pid))

    url = host.replica(OPPORTUNISTIC)["url"]
    httpx.post(f"{url}/mock/v1/stall", json={"on": True})
    body = {"model": "rollout", "prompt": [1, 2], "max_tokens": 50, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        turn = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=20)
        until(lambda: (host.replica(OPPORTUNISTIC)["running"] or 0) == 1, host.explain)
        (home / "servers").write_text(json.dumps({"100": [engine]}))
        host.process.send_signal(signal.SIGTERM)
        answer = turn.result()
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    assert host.process.wait(60) == 0, host.explain()
    assert running([warden, engine]) == []
