"""`rose doctor`: what this host lacks, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from rose import __version__
from rose import config as configuration
from rose.cli.options import ConfigOption, JsonOption
from rose.config import Config
from rose.errors import ConfigError, Exit
from rose_daemon.doctor import gpu, machine, peers, software
from rose_daemon.doctor.finding import Finding, Status, error, ok

SCHEMA = 1
app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def doctor(as_json: JsonOption = False, config: ConfigOption = None) -> None:
    """Check this host.  Reads only, so it is safe beside live serving.  Exit code 3 if something is wrong."""
    loaded, about_it = _load(config)
    found = [about_it, *examine(loaded)]
    print(json.dumps(report(found), indent=2) if as_json else "\n".join(lines(found)))
    raise typer.Exit(Exit.OK if healthy(found) else Exit.NOT_READY)


def _load(path: Path | None) -> tuple[Config, Finding]:
    """The configuration; the defaults where there is none, so that the host is examined all the same."""
    try:
        loaded = configuration.load(path)
    except ConfigError as refused:
        return Config(), error("config", refused.what, refused.hint)
    return loaded, ok(
        "config", f"node {loaded.node.id}, {len(loaded.replicas)} replicas, {loaded.device.kind}"
    )


def examine(config: Config) -> list[Finding]:
    """Every check but that of the configuration."""
    return [*software.checks(config), *machine.checks(config), *gpu.checks(config), *peers.checks(config)]


def healthy(found: Iterable[Finding]) -> bool:
    """Whether ROSE would run as configured."""
    return not any(each.status is Status.ERROR for each in found)


def report(found: list[Finding]) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "schema": SCHEMA,
        "command": "doctor",
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "rose": __version__,
        "checks": [
            {"name": each.name, "status": each.status.value, "detail": each.detail, "advice": each.advice}
            for each in found
        ],
        "ok": healthy(found),
    }


def lines(found: list[Finding]) -> list[str]:
    """The report to read: what is wrong comes last, where it is seen."""
    order = (Status.OK, Status.ABSENT, Status.WARNING, Status.ERROR)
    width = max(len(each.name) for each in found)
    out = []
    for each in sorted(found, key=lambda finding: order.index(finding.status)):
        out.append(f"{each.status.value:7}  {each.name:{width}}  {each.detail}")
        if each.advice:
            out.append(f"{'':7}  {'':{width}}  -> {each.advice}")
    counts = ", ".join(f"{sum(each.status is status for each in found)} {status.value}" for status in order)
    return [*out, counts]
