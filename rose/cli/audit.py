"""`rose audit`: what lending did to serving, how sure that is, and what could be lent."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import typer

from rose import audit as records
from rose import config as configuration
from rose.cli.options import ConfigOption, JsonOption
from rose.cli.times import SinceOption, clock, seconds
from rose.core.evidence import Difference, difference
from rose.core.lender import harm_interval
from rose.core.readings import GateReason
from rose.errors import Exit, NotFound, RoseError
from rose.units import MIB

app = typer.Typer(rich_markup_mode=None, add_completion=False)
SCHEMA = 1
_LATE_SHOWN = 20
_SPENT = GateReason.ERROR_BUDGET_SPENT.name.lower()


@app.command()
def audit(since: SinceOption = "24h", as_json: JsonOption = False, config: ConfigOption = None) -> None:
    """Show what lending did to serving.  Exit code 5 if it spent the error budget in that time.

    Exit code 4 if there is no record.
    """
    directory = Path(configuration.load(config).node.state_dir)
    now_s = time.time()
    found = records.summary(recorded(directory, now_s - seconds(since)))
    body = report(found, now_s)
    print(json.dumps(body, indent=2) if as_json else "\n".join(lines(body)))
    spent = any(decision.closed == _SPENT for decision in found.decisions)
    raise typer.Exit(Exit.SLO_BREACH if spent else Exit.OK)


def recorded(directory: Path, since_s: float) -> list[records.AnyLine]:
    """The lines of rosed's audit.  Raises NotFound if there is none: nothing measured is not nothing late."""
    path = directory / records.NAME
    try:
        lines = records.read(directory, since_s)
        if not lines and not path.exists():
            raise NotFound(f"{path}: there is no audit", "has rosed run here?  see node.state_dir")
    except OSError as error:
        raise RoseError(f"{path}: {error.strerror}", "run as rosed's user") from None
    return lines


def report(found: records.Summary, now_s: float) -> dict[str, Any]:
    """The audit as JSON; what is not known is null."""
    counts = found.counts
    compared = difference(
        [window.tally for window in found.windows if not window.off],
        [window.tally for window in found.windows if window.off],
    )
    return {
        "schema": SCHEMA,
        "command": "audit",
        "at": datetime.fromtimestamp(now_s, UTC).isoformat(timespec="seconds"),
        "minutes": {"measured": found.minutes, "lent": found.minutes_lent},
        "requests": {
            "judged": counts.requests,
            "late_by_rollout": counts.rollout,
            "late_by_unknown": counts.unknown,
            "late_by_serving": counts.serving,
        },
        "harm_share": counts.harmed / counts.requests if counts.requests else None,
        "harm_interval": list(harm_interval(counts)) if counts.requests else None,
        "switchback": _compared(compared, found),
        "take_back_ms": {
            "drills": len(found.drills_ms),
            "p50": _at(found.drills_ms, 0.5),
            "p99": _at(found.drills_ms, 0.99),
        },
        "could_lend": {
            "idle_share_p10": _at(found.idle_shares, 0.1),
            "idle_share_p50": _at(found.idle_shares, 0.5),
            "spare_bytes_p10": _at(found.spare_bytes, 0.1),
            "spare_bytes_p50": _at(found.spare_bytes, 0.5),
        },
        "decisions": [msgspec.to_builtins(each) for each in found.decisions],
        "late": [msgspec.to_builtins(each) for each in found.late],
    }


def _compared(compared: Difference | None, found: records.Summary) -> dict[str, Any]:
    off = sum(window.off for window in found.windows)
    body: dict[str, Any] = {"windows_on": len(found.windows) - off, "windows_off": off}
    if compared is None:
        return {**body, "late_more": None, "interval": None}
    return {
        **body,
        "late_share_on": compared.on.share,
        "late_share_off": compared.off.share,
        "late_more": compared.difference,
        "interval": list(compared.interval),
    }


def _at(ascending: Sequence[float], share: float) -> float | None:
    """A quantile: the order statistic."""
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))] if ascending else None


def lines(body: dict[str, Any]) -> list[str]:
    """The audit to read."""
    requests, minutes = body["requests"], body["minutes"]
    if not minutes["measured"] and not body["decisions"]:
        return ["nothing was measured in that time"]
    out = [
        f"time       {minutes['measured']} minutes measured, {minutes['lent']} of them lent",
        f"requests   {requests['judged']} judged; {_late(requests)}",
    ]
    if body["harm_share"] is not None:
        low, high = body["harm_interval"]
        share = f"{body['harm_share']:.3%} late by rollout"
        out.append(f"harm       {share}, by replay ({low:.3%} to {high:.3%})")
    out += [f"compared   {_switchback(body['switchback'])}", f"take-back  {_drills(body['take_back_ms'])}"]
    out.append(f"could lend {_could(body['could_lend'])}")
    out += [
        f"{clock(each['at_s'])}  {each['closed'] or 'lends'}: {each['text']}" for each in body["decisions"]
    ]
    for late in body["late"][-_LATE_SHOWN:]:
        out.append(f"{clock(late['at_s'])}  {late_line(late)}")
    return out


def _late(requests: dict[str, int]) -> str:
    by = (requests[f"late_by_{cause}"] for cause in ("rollout", "unknown", "serving"))
    return "late by rollout {}, may be {}, by serving itself {}".format(*by)


def late_line(late: dict[str, Any]) -> str:
    """A late request and the verdict on it."""
    why = f"{late['budget']} over by {late['overshoot_ms']:.0f} ms"
    return (
        f"request {late['number']} late by {late['cause']}: {why},"
        f" {late['rollout_ms']:.0f} ms of rollout in its wait"
    )


def _switchback(body: dict[str, Any]) -> str:
    windows = f"{body['windows_on']} windows with rollout, {body['windows_off']} without"
    if body["late_more"] is None:
        return f"{windows}: nothing to compare yet"
    low, high = body["interval"]
    return f"{windows}: {body['late_more']:+.3%} late with it ({low:+.3%} to {high:+.3%})"


def _drills(body: dict[str, Any]) -> str:
    if not body["drills"]:
        return "no drill"
    return f"p50 {body['p50']:.0f} ms, p99 {body['p99']:.0f} ms in {body['drills']} drills"


def _could(body: dict[str, Any]) -> str:
    idle, spare = body["idle_share_p50"], body["spare_bytes_p10"]
    texts = ["idle time unknown" if idle is None else f"serving idle {idle:.0%} of the time (median)"]
    texts.append("memory unknown" if spare is None else f"{spare / MIB:,.0f} MiB beyond the headroom (p10)")
    return ", ".join(texts)
