"""The lending audit: what is read back, and how it is shown."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rose import audit
from rose.cli import main as cli
from rose.cli.times import seconds
from rose.core.harm import Counts
from rose.errors import ConfigError, Exit

NOW_S = time.time()


def minute(age_s: float, requests: int = 100, closed: str = "", **late: int) -> audit.Minute:
    fields = {"late_by_rollout": 0, "late_by_unknown": 0, "late_by_serving": 0} | late
    return audit.Minute(
        at_s=NOW_S - age_s, requests=requests, closed=closed, idle_share=0.5, spare_bytes=2 << 30, **fields
    )


def late(age_s: float, cause: str = "rollout") -> audit.Late:
    return audit.Late(
        at_s=NOW_S - age_s, number=7, cause=cause, budget="ttft", overshoot_ms=20, rollout_ms=30, wait_ms=300,
        tokens=9,
    )  # fmt: skip


def write(directory: Path, *lines: audit.AnyLine, name: str = audit.NAME) -> None:
    with (directory / name).open("ab") as file:
        for line in lines:
            file.write(msgspec.json.encode(line) + b"\n")


def run(monkeypatch: pytest.MonkeyPatch, directory: Path, *arguments: str) -> int:
    config = directory / "rose.toml"
    config.write_text(f'[node]\nstate_dir = "{directory}"\n')
    monkeypatch.setattr(sys, "argv", ["rose", "audit", "--config", str(config), *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_both_files_are_read_and_what_cannot_be_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, minute(500), minute(400), name=f"{audit.NAME}.1")
    write(tmp_path, minute(300))
    with (tmp_path / audit.NAME).open("ab") as file:
        file.write(b'{"type":"Later","at_s":1}\nnothing\n')
    write(tmp_path, minute(200))
    with (tmp_path / audit.NAME).open("ab") as file:
        file.write(b'{"type":"Minute","at_s":')
    read = audit.read(tmp_path, NOW_S - 450)
    assert [round(NOW_S - line.at_s) for line in read] == [400, 300, 200]
    assert audit.read(tmp_path / "nowhere", 0) == []


def test_lines_before_a_reset_do_not_count() -> None:
    reset = audit.Reset(at_s=NOW_S)
    assert audit.since_reset([minute(3), reset, minute(2)]) == [reset, minute(2)]


def test_the_sum_of_it() -> None:
    lines: list[audit.AnyLine] = [
        minute(180, late_by_rollout=1),
        minute(120, closed="outside_hours", late_by_serving=2, late_by_unknown=1),
        late(150),
        audit.Compared(at_s=NOW_S, off=True, requests=10, late=0),
        audit.Drilled(at_s=NOW_S, replica="r", blocks=3, ms=55.0),
        audit.Drilled(at_s=NOW_S, replica="r", blocks=3, ms=45.0),
        audit.Decided(at_s=NOW_S, closed="outside_hours", text="why"),
    ]
    found = audit.summary(lines)
    assert found.counts == Counts(200, rollout=1, unknown=1, serving=2)
    assert (found.minutes, found.minutes_lent) == (2, 1)
    assert found.drills_ms == [45.0, 55.0]
    assert [(window.off, window.requests) for window in found.windows] == [(True, 10)]
    assert late(1, "unknown").counts == Counts(1, unknown=1)


def test_for_people_and_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    write(tmp_path, minute(90_000, late_by_rollout=50), minute(300, late_by_rollout=2), late(300))
    for number in range(20):
        write(tmp_path, audit.Compared(at_s=NOW_S - 9, off=number % 10 == 0, requests=50, late=number % 2))
    write(tmp_path, audit.Drilled(at_s=NOW_S - 5, replica="r", blocks=3, ms=55.0))
    assert run(monkeypatch, tmp_path) == Exit.OK
    text = capsys.readouterr().out
    assert "1 minutes measured, 1 of them lent" in text
    assert "100 judged; late by rollout 2, may be 0, by serving itself 0" in text
    assert "18 windows with rollout, 2 without: +" in text
    assert "p50 55 ms, p99 55 ms in 1 drills" in text
    assert "serving idle 50% of the time (median), 2,048 MiB beyond the headroom (p10)" in text
    assert "request 7 late by rollout: ttft over by 20 ms, 30 ms of rollout in its wait" in text

    assert run(monkeypatch, tmp_path, "--since", "7d", "--json") == Exit.OK
    body = json.loads(capsys.readouterr().out)
    assert body["requests"]["late_by_rollout"] == 52
    low, high = body["harm_interval"]
    assert low < body["harm_share"] == 52 / 200 < high


def test_a_spent_budget_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    write(tmp_path, audit.Decided(at_s=NOW_S - 7000, closed="error_budget_spent", text="error budget spent"))
    assert run(monkeypatch, tmp_path) == Exit.SLO_BREACH
    assert "error_budget_spent: error budget spent" in capsys.readouterr().out
    assert run(monkeypatch, tmp_path, "--since", "1h") == Exit.OK
    assert capsys.readouterr().out == "nothing was measured in that time\n"
    assert run(monkeypatch, tmp_path, "--since", "yesterday") == Exit.USAGE


def test_a_host_that_measured_nothing_is_not_a_host_without_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for arguments in ((), ("--json",)):
        assert run(monkeypatch, tmp_path, *arguments) == Exit.NOT_FOUND
        said = capsys.readouterr()
        assert said.out == ""
        assert "there is no audit" in said.err


def test_times() -> None:
    assert [seconds(text) for text in ("90s", "15m", "1.5h", "7d")] == [90, 900, 5400, 604800]
    for text in ("", "h", "-1h", "10", "1w"):
        with pytest.raises(ConfigError):
            seconds(text)
