"""`rose events`: what rosed decided, and why, from its journal; it need not run."""

from __future__ import annotations

import json
import time
from collections import deque
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from rose import config as configuration
from rose import journals
from rose.cli.options import ConfigOption, JsonOption
from rose.cli.times import SinceOption, clock, seconds
from rose.journals import Happening

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_LEVELS = ("debug", "info", "warning", "error", "critical")


class Level(StrEnum):
    """The least to show."""

    info = "info"
    warning = "warning"
    error = "error"


@app.command()
def events(
    since: SinceOption = "24h",
    code: Annotated[list[str] | None, typer.Option("--code", help="Only these; may be repeated.")] = None,
    subject: Annotated[str, typer.Option("--subject", "-s", help="Only about this replica or job.")] = "",
    level: Annotated[Level, typer.Option("--level", help="At least as grave.")] = Level.info,
    gates: Annotated[bool, typer.Option("--gates", help="Transitions of the gates, instead.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=100_000, help="At most so many.")] = 100,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Show what rosed decided on this host, oldest first.  Exit code 4 if there is no journal."""
    directory = Path(configuration.load(config).node.state_dir)
    since_s = time.time() - seconds(since)
    if gates:
        changes = (
            change
            for change in journals.gate_changes(directory, since_s)
            if (not subject or change.replica == subject) and (not code or change.reason in code)
        )
        _print([change._asdict() for change in deque(changes, limit)], as_json, _gate_line)
        return
    grave = _LEVELS.index(level.value)
    found = (
        each
        for each in journals.happenings(directory, since_s)
        if _grave(each) >= grave
        and (not code or each.code in code)
        and (not subject or each.subject == subject)
    )
    _print([msgspec.to_builtins(each) for each in deque(found, limit)], as_json, _line)


def _grave(happening: Happening) -> int:
    return _LEVELS.index(happening.level) if happening.level in _LEVELS else len(_LEVELS)


def _print(rows: list[dict[str, Any]], as_json: bool, line: Any) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print("\n".join(map(line, rows)) or "nothing happened in that time")


def _line(row: dict[str, Any]) -> str:
    about = f" {row['subject']}:" if row["subject"] else ""
    return f"{clock(row['at_s'])}  {row['level']:7}  {row['code']:22} {about} {row['text']}  ({row['cause']})"


def _gate_line(row: dict[str, Any]) -> str:
    state = f"open for {row['tokens']} tokens" if row["tokens"] else "closed"
    serving = f"serving: {row['waiting']} waiting, {row['running']} running"
    return f"{clock(row['at_s'])}  {row['replica']}  {state} ({row['reason']}); {serving}"
