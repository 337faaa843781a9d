"""Figures of `rose bench memory`, from made-up samples."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rose_daemon.bench import memory_report
from rose_daemon.bench.memory import Activation, BurstRun, MemoryMeasured, MemoryOptions
from rose_daemon.bench.memory_watch import (
    BurstMemory,
    Sample,
    anonymous_bytes,
    burst_memory,
    pss_bytes,
)
from rose_daemon.harness.load import RequestRecord

from rose.units import MIB, NS_PER_MS

HEADROOM = 20 * MIB


def sample(ms: int, free: int, serving: int, rollout: int, rss: int = 500) -> Sample:
    return Sample(ms * NS_PER_MS, free * MIB, serving * MIB, rollout * MIB, 900 * MIB, rss * MIB)


BURST = [
    sample(0, 30, 10, 80, rss=500),
    sample(10, 22, 18, 80, rss=500),
    sample(20, 18, 22, 80, rss=500),
    sample(30, 10, 30, 60, rss=480),
    sample(40, 5, 35, 40, rss=460),
    sample(90, 40, 60, 20, rss=441),
]


def test_a_burst_is_timed_from_the_headroom_to_half_of_what_was_lent() -> None:
    found = burst_memory(BURST, HEADROOM)
    assert found.take_back_ms == 20
    assert (found.lent_bytes, found.taken_bytes) == (80 * MIB, 60 * MIB)
    assert found.taken_share == 0.75
    assert found.rss_fell_bytes == 59 * MIB
    assert found.serving_grew_bytes == 50 * MIB


def test_a_burst_that_never_gets_half_back_has_no_time() -> None:
    assert burst_memory(BURST[:4], HEADROOM).take_back_ms is None
    assert burst_memory(BURST[:2], HEADROOM).take_back_ms is None  # the headroom was never touched
    assert burst_memory(BURST[:1], HEADROOM).taken_bytes == 0


def test_memory_that_was_not_known_counts_as_nothing_back() -> None:
    unknown = [BURST[0], sample(20, 5, -1, -1), sample(30, 5, -1, 70)]
    found = burst_memory(unknown, HEADROOM)
    assert found.take_back_ms is None
    assert found.taken_bytes == 10 * MIB
    nothing = burst_memory([sample(0, 30, -1, -1), sample(9, 5, -1, -1)], HEADROOM)
    assert (nothing.lent_bytes, nothing.taken_share) == (0, 0.0)


def test_memory_of_processes() -> None:
    assert anonymous_bytes(os.getpid()) > MIB
    assert pss_bytes(os.getpid()) > MIB
    assert anonymous_bytes(2**22 - 1) == 0


def run(ttft_ms: int, *, preemptions: int = 0, share: float | None = None) -> BurstRun:
    token_ns = [ttft_ms * NS_PER_MS, (ttft_ms + 10) * NS_PER_MS]
    record = RequestRecord(0, 0, 100, 2, token_ns=token_ns)
    memory = None
    if share is not None:
        memory = BurstMemory(
            lent_bytes=100 * MIB,
            taken_bytes=round(share * 100 * MIB),
            rss_fell_bytes=40 * MIB,
            serving_grew_bytes=50 * MIB,
            take_back_ms=50.0 if share >= 0.5 else None,
        )
    return BurstRun(records=[record], preemptions=preemptions, shortages=0, memory=memory)


FAILED = BurstRun(records=[RequestRecord(0, 0, 1, 1, error="HTTP 500")], preemptions=0, shortages=0)


def measured(**changes: Any) -> MemoryMeasured:
    found: dict[str, Any] = {
        "alone": [run(100), run(120)],
        "shared": [run(110, share=0.6), run(130, share=0.9)],
        "static": [run(500, preemptions=3)],
        "activation": Activation(
            pss_active_bytes=300 * MIB,
            pss_inactive_bytes=200 * MIB,
            kv_inactive_bytes=MIB // 8,
            active_ms=[90.0, 120.0],
            first_answer_ms=[100.0, 160.0],
        ),
    }
    options = MemoryOptions(directory=Path("out"))
    return MemoryMeasured(started_at=datetime.now(UTC), options=options, **(found | changes))


def test_the_report_has_every_mode_and_says_that_all_was_reached() -> None:
    report = memory_report.build(measured())
    assert report["exit_code"] == 0
    assert report["modes"]["static"]["preemptions"] == 3
    assert report["modes"]["shared"]["tpot_ms"]["p99"] == 10
    assert report["memory"]["taken_share_min"] == 0.6
    assert report["memory"]["take_back_ms"] == {"p50": 50.0, "p99": 50.0, "max": 50.0}
    assert report["activation"]["active_ms"]["max"] == 120
    text = StringIO()
    memory_report.show(report, Console(file=text, width=100))
    assert "static" in text.getvalue()
    assert "not reached" not in text.getvalue()


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"shared": [run(110, share=0.6), run(110, share=0.4)]}, "every_burst_took_half_back"),
        ({"shared": []}, "every_burst_took_half_back"),
        ({"shared": [run(110, share=0.6, preemptions=1)]}, "no_more_preemptions_than_alone"),
        ({"activation": None}, "active_within_a_second"),
        ({"static": [FAILED]}, "no_request_failed"),
    ],
)
def test_what_was_not_reached_is_said(changes: dict[str, Any], missed: str) -> None:
    report = memory_report.build(measured(**changes))
    assert report["exit_code"] == 1
    assert [name for name, good in report["reached"].items() if not good] == [missed]
    text = StringIO()
    memory_report.show(report, Console(file=text, width=100))
    assert missed.replace("_", " ") in text.getvalue()
