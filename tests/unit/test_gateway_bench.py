"""The gateway benchmark: its report, and that it runs."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rose_daemon.bench import gateway, gateway_report
from rose_daemon.bench.gateway_load import Ask, Figures, Stream, hang_up, request_of, run_for, run_turns

from rose.errors import EngineFailed


def figures(tokens: int, ttft: list[float], seconds: float = 1.0) -> Figures:
    return Figures(ttft_ms=ttft, tokens=tokens, tokens_all=2 * tokens, turns=len(ttft), elapsed_s=seconds)


LEFT_OVER = ("in_flight", "queued", "running_on_engines", "cancelled", "unaccounted")


def steps(*found: tuple[int, int, float]) -> list[tuple[int, Figures]]:
    return [(streams, figures(tokens, [ttft])) for streams, tokens, ttft in found]


def measured(**changes: object) -> gateway.Measured:
    made = gateway.Measured(gateway.GatewayOptions(Path("x")), datetime.now(UTC))
    made.direct = [figures(6400, [10.0, 11.0])]
    made.through = [figures(6000, [12.0, 14.0])]
    made.cpu_direct_s = {"scheduler": 0.0, "engines": 0.064, "client": 0.128}
    made.cpu_through_s = {"scheduler": 0.3, "engines": 0.06, "client": 0.12}
    made.knee_direct = [
        (32, figures(3200, [10.0])),
        (512, figures(40_000, [15.0])),
        (768, figures(41_000, [60.0])),
    ]
    made.knee_through = [
        (32, figures(3200, [12.0])),
        (256, figures(20_000, [20.0])),
        (512, figures(22_000, [80.0])),
    ]
    made.memory = [(0, 100), (50, 200), (100, 202)]
    made.left_over = dict.fromkeys(
        ("in_flight", "queued", "running_on_engines", "cancelled", "unaccounted"), 0
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_the_report_compares_both_ways() -> None:
    report = gateway_report.build(measured())
    assert report["figures"] == {
        "throughput_ratio": 0.9375,
        "added_ttft_p50_ms": 2.5,
        "added_ttft_p99_ms": pytest.approx(2.99, abs=0.05),
        "knee_ratio": 0.5,
        "memory_growth": 0.01,
    }
    assert report["knees"]["gateway"]["streams"] == 256
    assert report["gateway"]["cpu_us_per_chunk"] == {"scheduler": 25, "engines": 5, "client": 10}
    assert report["direct"]["cpu_us_per_chunk"] == {"scheduler": 0, "engines": 5, "client": 10}
    met = {name: goal["met"] for name, goal in report["goals"].items()}
    assert met == dict.fromkeys(met, True) | {"added_ttft_p50_ms": False}
    assert (report["ok"], report["exit_code"]) == (True, 0)
    json.dumps(report)


def test_a_machine_too_busy_for_any_load_has_no_knee() -> None:
    late = gateway_report.build(measured(knee_through=steps((32, 3200, 90.0))))
    assert late["knees"]["gateway"]["chunks_per_s"] == late["figures"]["knee_ratio"] == 0
    assert not late["goals"]["knee_ratio"]["met"]
    nothing = gateway_report.build(measured(knee_direct=steps((32, 3200, 90.0))))
    assert nothing["figures"]["knee_ratio"] is None


def test_a_turn_left_over_is_a_failure() -> None:
    left = dict.fromkeys(LEFT_OVER, 0) | {"in_flight": 1}
    assert gateway_report.build(measured(left_over=left))["exit_code"] == 1


def test_no_knee_is_told_as_not_measured() -> None:
    report = gateway_report.build(measured(knee_direct=[], knee_through=[]))
    assert report["goals"]["knee_ratio"] == {"goal": 0.4, "met": None}


async def test_tokens_are_counted_wherever_reads_end() -> None:
    answer = b"HTTP/1.1 200 OK\r\n\r\n" + b'data: {"text":"x"}\n\n' * 5 + b"data: [DONE]\n\n\r\n0\r\n\r\n"
    for size in range(1, 40):
        counted = Figures()
        stream = Stream(counted)
        stream._done = done = asyncio.get_running_loop().create_future()
        for start in range(0, len(answer), size):
            stream.data_received(answer[start : start + size])
        assert counted.tokens == stream.tokens == 5
        assert done.done()


def test_a_request_is_http() -> None:
    head, _, body = request_of("http://h:1", Ask(3, 4), random.Random(1), "walk").partition(b"\r\n\r\n")
    assert b"x-rose-trajectory: walk" in head
    assert f"Content-Length: {len(body)}".encode() in head
    assert len(json.loads(body)["prompt"]) == 3


async def test_it_runs_small(tmp_path: Path) -> None:
    options = gateway.GatewayOptions(
        directory=tmp_path, streams=4, engines=2, token_ms=2, rounds=1, duration_s=1, turns=40,
        disconnects=20, knee=False,
    )  # fmt: skip
    report = gateway_report.build(await gateway.GatewayBench(options, lambda _: None).run())
    assert report["ok"], report
    assert report["direct"]["errors"] == report["gateway"]["errors"] == 0
    assert report["gateway"]["turns"] > 0
    assert report["disconnects"]["cancelled"] > 0
    assert report["gateway"]["cpu_us_per_chunk"]["scheduler"] > 0


@pytest.mark.parametrize("phase", ["starting", "round 1", "clients hang up"])
def test_an_interrupt_ends_it_in_order(tmp_path: Path, phase: str) -> None:
    """Whatever it was at: no traceback, exit code 130, nothing left running."""
    command = [sys.executable, "-m", "rose.cli.main", "bench", "gateway", "--out", str(tmp_path / "out")]
    command += ["--streams", "4", "--engines", "2", "--token-ms", "2", "--rounds", "1", "--duration", "1"]
    command += ["--turns", "40", "--disconnects", "400", "--no-knee"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if phase in line:
                process.send_signal(signal.SIGINT)
                break
        rest, _ = process.communicate(timeout=60)
    said = "".join(lines) + rest
    assert process.returncode == 130, said
    assert "Traceback" not in said, said
    assert "interrupted; everything that was started has ended" in said
    for log in (tmp_path / "out").glob("*.log"):
        assert "Traceback" not in log.read_text()


async def test_a_load_of_which_nothing_ends_says_what_to_change(tmp_path: Path) -> None:
    options = gateway.GatewayOptions(
        directory=tmp_path, streams=2, engines=1, token_ms=500, rounds=1, duration_s=0.5, knee=False
    )
    with pytest.raises(EngineFailed, match="no turn ended"):
        await gateway.GatewayBench(options, lambda _: None).run()


async def test_a_gateway_that_dies_is_an_error_and_not_an_interrupt() -> None:
    """Whatever was under way."""
    with pytest.raises(EngineFailed, match="takes no connection"):
        await run_turns(["http://127.0.0.1:9"], 2, Ask(3, 4), 4, 1)
    with pytest.raises(EngineFailed, match="takes no connection"):
        await run_for(["http://127.0.0.1:9"], 2, Ask(3, 4), 5, 1)
    with pytest.raises(EngineFailed, match="takes no connection"):
        await hang_up("http://127.0.0.1:9", 3, Ask(3, 4), at_once=2, within_s=0.1, seed=1)
