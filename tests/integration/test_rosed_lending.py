"""rosed's lending with a mock rollout engine: the test plays the serving engine and the device."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_rosed_process import DEDICATED, OPPORTUNISTIC, Host, ready, until

from rose import audit, wire
from rose.boards import BoardReader, BoardWriter
from rose.cli.control import ask
from rose.core.readings import (
    NEVER,
    GateMode,
    GatePolicy,
    GateReason,
    ServedRequest,
    SlackReading,
    StepRecord,
)
from rose.rings import RingWriter
from rose.units import NS_PER_MS

MS = NS_PER_MS
STILL = "switchback_share = 0\ndrill_period_s = 0\n"


class Serving:
    """The serving engine and the rollout engine's step log, as the plugin would write them."""

    def __init__(self, host: Host) -> None:
        self.board = BoardWriter(host.paths.slack("serving"), SlackReading)
        self.served = RingWriter(host.paths.served("serving"), ServedRequest)
        self.steps = RingWriter(host.paths.lent_steps(OPPORTUNISTIC), StepRecord)
        self.number = 0
        self.beat()

    def beat(self) -> None:
        words = dict.fromkeys(SlackReading._fields, 0) | {
            "ttft_deadline_ns": NEVER,
            "tpot_deadline_ns": NEVER,
        }
        words |= {"stamp_ns": time.monotonic_ns(), "kv_total_blocks": 100}
        self.board.publish(SlackReading(**words))

    def requests(self, count: int, *, late: bool) -> None:
        """So many requests that end now; late ones waited for a rollout step."""
        now_ns = time.monotonic_ns()
        arrival_ns = now_ns - (400 if late else 100) * MS
        if late:
            self.steps.write(StepRecord(1, arrival_ns, now_ns - MS, 8))
        for _ in range(count):
            self.number += 1
            self.served.write(ServedRequest(self.number, arrival_ns, now_ns, now_ns, 1, 250 * MS, 60 * MS))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.end()


def configure(host: Host, lending: str) -> None:
    host.write(serving=True)
    host.config.write_text(f"{host.config.read_text()}[memory]\nheadroom_share = 0.01\n[lending]\n{lending}")


def policy(host: Host) -> GatePolicy:
    found = BoardReader(host.paths.gate(OPPORTUNISTIC), GatePolicy).read()
    assert isinstance(found, GatePolicy)
    return found


def lending(host: Host) -> dict[str, Any]:
    status = host.status()
    assert status is not None
    found: dict[str, Any] = status["lending"]
    return found


def restart(host: Host) -> None:
    assert host.process is not None
    host.process.terminate()
    assert host.process.wait(60) == 0, host.explain()
    host.start("mock")


def rose(host: Host, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "rose.cli.main", *arguments, "--config", str(host.config)]
    return subprocess.run(argv, env=host.environ, capture_output=True, text=True, timeout=60, check=False)


def test_harm_by_rollout_spends_the_budget_stops_lending_and_is_told(host: Host) -> None:
    configure(host, STILL)
    serving = Serving(host)
    host.start("mock")
    until(ready(host, OPPORTUNISTIC), host.explain)
    until(lambda: policy(host).mode == GateMode.STRICT, host.explain)
    time.sleep(0.5)  # requests that arrived before rosed are nobody's
    serving.requests(50, late=False)
    until(lambda: lending(host)["requests"] == 50, host.explain)
    assert (lending(host)["closed"], lending(host)["budget_left_share"]) == ("", 1.0)

    serving.requests(10, late=True)
    until(lambda: lending(host)["late_by_rollout"] == 10, host.explain)
    assert lending(host)["closed"] == "error_budget_spent"
    stopped = policy(host)
    assert (stopped.mode, stopped.closed_reason) == (GateMode.CLOSED, GateReason.ERROR_BUDGET_SPENT)
    assert host.replica(DEDICATED)["state"] == "ready"
    assert "code=error_budget_spent" in host.explain()
    shown = rose(host, "status")
    assert "stopped (error_budget_spent): error budget spent: of 60 requests 10 were late" in shown.stdout

    restart(host)
    assert not host.paths.lent_steps(OPPORTUNISTIC).exists()
    until(lambda: lending(host)["late_by_rollout"] == 10, host.explain)
    assert lending(host)["closed"] == "error_budget_spent", "a restart refills nothing"
    found = rose(host, "audit", "--since", "1h", "--json")
    assert found.returncode == 5, found.stderr
    body = json.loads(found.stdout)
    assert body["requests"]["late_by_rollout"] == len(body["late"]) == 10
    assert body["late"][0]["rollout_ms"] > 300
    assert [each["closed"] for each in body["decisions"]][:2] == ["", "error_budget_spent"]

    on = rose(host, "lend", "on", "--reset")
    assert on.returncode == 0, on.stderr
    assert lending(host)["closed"] == ""
    assert policy(host).mode == GateMode.STRICT


def test_late_requests_of_servings_own_cost_nothing(host: Host) -> None:
    configure(host, STILL)
    serving = Serving(host)
    host.start("mock")
    until(ready(host, OPPORTUNISTIC), host.explain)
    now_ns = time.monotonic_ns()
    for number in range(20):
        serving.served.write(ServedRequest(number, now_ns, now_ns + 900 * MS, now_ns + 900 * MS, 1, 1, 1))
    until(lambda: lending(host)["late_by_serving"] == 20, host.explain)
    assert lending(host)["closed"] == ""


def test_the_switch_takes_effect_at_once_and_outlives_rosed(host: Host) -> None:
    configure(host, STILL)
    Serving(host)
    host.start("mock")
    until(ready(host, OPPORTUNISTIC), host.explain)
    until(lambda: policy(host).mode == GateMode.STRICT, host.explain)
    ask(host.socket, wire.GateRequest(OPPORTUNISTIC, "open"))
    bell = BoardReader(host.paths.gate(OPPORTUNISTIC), GatePolicy).bell
    rings = bell.rings
    ask(host.socket, wire.LendRequest(on=False))
    off = policy(host)
    assert (off.mode, off.closed_reason) == (GateMode.CLOSED, GateReason.LENDING_OFF), "when it is answered"
    assert bell.rings != rings, "an engine that waits looks at it now"

    restart(host)
    assert lending(host)["switched_off"]
    assert policy(host).mode == GateMode.CLOSED
    (host.base / "state" / "lending.json").write_text("{")
    restart(host)
    assert lending(host)["switched_off"], "what cannot be read is off"
    assert "code=lending_switch_unreadable" in host.explain()
    ask(host.socket, wire.LendRequest(on=True))
    restart(host)
    assert not lending(host)["switched_off"]


def test_off_while_rosed_is_down_holds_for_the_next_that_starts(host: Host) -> None:
    configure(host, STILL)
    host.start("mock")
    until(ready(host, OPPORTUNISTIC), host.explain)
    assert host.process is not None
    host.process.kill()
    host.process.wait(60)
    off = rose(host, "lend", "off")
    assert off.returncode == 0, off.stderr
    assert "lends nothing" in off.stdout
    Serving(host)
    host.start("mock")
    assert lending(host)["switched_off"]
    until(
        lambda: policy(host).mode == GateMode.CLOSED, host.explain
    )  # the killed one's board may still be there
    on = rose(host, "lend", "on")
    assert on.returncode == 0, on.stderr
    assert not lending(host)["switched_off"]


def test_sighup_takes_lending_over(host: Host) -> None:
    configure(host, STILL)
    Serving(host)
    host.start("mock")
    until(ready(host, OPPORTUNISTIC), host.explain)
    configure(host, f'{STILL}harm_share_max = 0.5\nmode = "observe"\n')
    assert host.process is not None
    host.process.send_signal(signal.SIGHUP)
    until(lambda: lending(host)["closed"] == "lending_off", host.explain)
    assert lending(host)["harm_share_max"] == 0.5
    until(lambda: policy(host).mode == GateMode.CLOSED, host.explain)
    until(lambda: "code=reloaded" in host.explain(), host.explain)
    (line,) = [line for line in host.explain().splitlines() if "code=reloaded" in line]
    assert "lending.mode" in line, "what is started differs"
    assert "lending.harm_share_max" not in line
    configure(host, STILL)
    host.process.send_signal(signal.SIGHUP)
    until(lambda: lending(host)["closed"] == "", host.explain)


def test_a_host_that_observes_lends_nothing_and_says_what_it_could(host: Host) -> None:
    configure(host, f'mode = "observe"\n{STILL}')
    serving = Serving(host)
    host.start("mock")
    until(ready(host, DEDICATED), host.explain)
    status = host.status()
    assert status is not None
    assert [each["id"] for each in status["replicas"]] == [DEDICATED]
    assert not host.paths.gate(OPPORTUNISTIC).exists()
    deadline = time.monotonic() + 4
    while time.monotonic() < deadline:
        serving.beat()
        time.sleep(0.05)
    assert host.process is not None
    host.process.terminate()
    assert host.process.wait(60) == 0
    found = audit.summary(audit.read(host.base / "state", 0))
    assert found.minutes_lent == 0
    assert found.idle_shares
    assert found.idle_shares[0] > 0.9
    assert found.spare_bytes
    shown = rose(host, "audit")
    assert shown.returncode == 0
    assert "serving idle" in shown.stdout
    assert "MiB beyond the headroom" in shown.stdout


def test_windows_without_rollout(host: Host) -> None:
    """They come by chance; here every other one is."""
    configure(host, "switchback_share = 0.5\nswitchback_window_s = 1\ndrill_period_s = 0\n")
    serving = Serving(host)
    host.start("mock")
    until(ready(host, OPPORTUNISTIC), host.explain)
    seen: set[int] = set()

    def both() -> bool:
        serving.beat()
        now = policy(host)
        seen.add(now.closed_reason if now.mode == GateMode.CLOSED else -1)
        told = lending(host)
        return {-1, GateReason.ROLLOUT_OFF_WINDOW} <= seen and bool(told["off_windows"])

    until(both, host.explain, limit_s=60)


def test_drills_measure_how_soon_memory_is_back(host: Host) -> None:
    configure(host, "switchback_share = 0\ndrill_period_s = 0.3\n")
    serving = Serving(host)
    host.start("obedient")
    until(ready(host, OPPORTUNISTIC), host.explain)

    def measured() -> bool:
        serving.beat()
        return int(lending(host)["drills"]) >= 3

    until(measured, host.explain)
    told = lending(host)
    assert 0 < told["take_back_p50_ms"] <= told["take_back_p99_ms"]
    assert host.replica(OPPORTUNISTIC)["memory_state"] == "normal", "a drill is no cut"
    drills = [line for line in audit.read(host.base / "state", 0) if isinstance(line, audit.Drilled)]
    assert all(1 <= drill.blocks <= 51 and drill.replica == OPPORTUNISTIC for drill in drills)
    until(lambda: policy(host).kv_budget_blocks == 0, host.explain)


def test_a_host_that_is_switched_off_gives_its_memory_back(host: Host) -> None:
    configure(host, STILL)
    Serving(host)
    host.start("obedient")
    until(ready(host, OPPORTUNISTIC), host.explain)
    ask(host.socket, wire.LendRequest(on=False))
    until(lambda: host.replica(OPPORTUNISTIC)["state"] == "inactive", host.explain)
    assert policy(host).kv_budget_blocks == 1
    ask(host.socket, wire.LendRequest(on=True))
    until(ready(host, OPPORTUNISTIC), host.explain)
