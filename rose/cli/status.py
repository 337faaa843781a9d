"""`rose status`: what this host lends, and why it does or does not."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

from rose import wire
from rose.cli.control import ask
from rose.cli.options import ConfigOption, JsonOption, SocketOption, socket_path
from rose.errors import Exit, NotReady
from rose.units import MIB

if TYPE_CHECKING:
    from rich.console import RenderableType

_WIDTH_PIPED = 160
_NOTHING_LENT = "no opportunistic replica on this host"

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def status(as_json: JsonOption = False, config: ConfigOption = None, socket: SocketOption = None) -> None:
    """Show this host.  Exit code 0 when healthy, 3 when not ready or rosed does not answer."""
    body = ask(socket_path(config, socket), wire.StatusRequest())
    try:
        text = json.dumps(body, indent=2) if as_json else _rendered(body)
        healthy = bool(body["healthy"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise NotReady(
            f"{socket_path(config, socket)}: the answer is not one of this release's rosed: {error!r}",
            "compare `rose version` here with the rosed that listens there",
        ) from None
    print(text)
    raise typer.Exit(Exit.OK if healthy else Exit.NOT_READY)


def _rendered(body: dict[str, Any]) -> str:
    # rich takes longer to import than the rest of this command.
    from rich.console import Console, Group  # noqa: PLC0415

    parts: list[RenderableType] = [_host(body), _replicas(body["replicas"])]
    if body["problems"]:
        parts.append("\n".join(["not ready:", *(f"  {problem}" for problem in body["problems"])]))
    width = None if sys.stdout.isatty() else _WIDTH_PIPED
    console = Console(highlight=False, markup=False, width=width)
    with console.capture() as capture:
        console.print(Group(*parts))
    return capture.get().rstrip("\n")


def _host(body: dict[str, Any]) -> RenderableType:
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    host = body["host"]
    table.add_row("node", f"{body['node']} on {host['name']}, rosed up {host['uptime_s']:.0f} s")
    for device in body["devices"]:
        use = _or_unknown(device, "utilisation", lambda share: f"{share:.0%} busy")
        sharing = f"shared by {device['sharing']}"
        table.add_row("device", f"{device['name']}  {_mib(device, 'memory_bytes')}  {use}  {sharing}")
    serving = body["serving"]
    table.add_row("serving", f"{serving['state']}  {_slack(serving)}".rstrip())
    table.add_row("memory", _memory(body["memory"]))
    gate = body["gate"]
    table.add_row("gate", _gate(gate))
    if "lending" in body:
        table.add_row("lending", lending_line(body["lending"]))
    job, scheduler = body["job"], body["scheduler"]
    table.add_row("scheduler", f"{scheduler['state']} at {scheduler['address']}")
    table.add_row(
        "job", f"{job['id']}  step {_dash(job['rl_step'])}  needs version {_dash(job['required_version'])}"
    )
    table.add_row("last version", _staging(body["last_staging"]))
    table.add_row("last update", _update(body["last_update"]))
    return table


def _replicas(replicas: list[dict[str, Any]]) -> RenderableType:
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in (
        "replica",
        "kind",
        "state",
        "version",
        "gate",
        "KV blocks used/budget/total",
        "turns",
        "why",
    ):
        table.add_column(heading, overflow="fold")
    for replica in replicas:
        kv = replica["kv_blocks"]
        table.add_row(
            replica["id"],
            replica["kind"],
            replica["state"],
            _dash(replica["weight_version"]),
            _gate(replica["gate"]),
            f"{_dash(kv['used'])}/{_dash(kv['budget'])}/{_dash(kv['total'])}",
            _dash(replica["turns_in_flight"]),
            replica["reason"],
        )
    return table


def _unknown(section: dict[str, Any], signal: str) -> str:
    for entry in section.get("unknown", ()):
        if entry["signal"] == signal:
            age = "" if entry["age_s"] is None else f", {entry['age_s']:.1f} s old"
            return f"unknown ({entry['reason']}{age})"
    return "unknown"


def _or_unknown(section: dict[str, Any], signal: str, text: Any) -> str:
    value = section[signal]
    return _unknown(section, signal) if value is None else str(text(value))


def _mib(section: dict[str, Any], signal: str) -> str:
    return _or_unknown(section, signal, lambda value: f"{value / MIB:,.0f} MiB")


def _slack(serving: dict[str, Any]) -> str:
    if serving["state"] == "none":
        return "no serving engine on this host"
    if serving.get("unknown"):
        return _unknown(serving, "slack")
    if serving["mode"] == "metrics":
        return "by its metrics only: when it was idle for a while, one capped rollout step for each reading"
    texts = [
        f"{name} slack " + ("no deadline" if serving[key] is None else f"{serving[key]:.0f} ms")
        for name, key in (("TTFT", "ttft_slack_ms"), ("TPOT", "tpot_slack_ms"))
    ]
    return "  ".join(texts)


def _memory(memory: dict[str, Any]) -> str:
    if memory["state"] == "none":
        return _NOTHING_LENT
    shares = [f"{name} {_mib(memory, f'{name}_bytes')}" for name in ("headroom", "serving", "budget")]
    return "  ".join([memory["state"], *shares])


def _gate(gate: dict[str, Any]) -> str:
    if gate["open"] is None:
        return _NOTHING_LENT
    return f"{'open' if gate['open'] else 'closed'} ({gate['reason']})"


def lending_line(lending: dict[str, Any]) -> str:
    """Whether the host lends, what harm was done, and how soon memory is back."""
    parts = [f"stopped ({lending['closed']}): {lending['text']}" if lending["closed"] else "lends"]
    harm = lending["late_by_rollout"] + lending["late_by_unknown"]
    left = lending["budget_left_share"]
    budget = "only measured" if left is None else f"{left:.0%} of the error budget left"
    parts.append(f"{harm} of {lending['requests']} requests late by rollout ({budget})")
    if lending["take_back_p99_ms"] is not None:
        parts.append(f"memory back within {lending['take_back_p99_ms']:.0f} ms (p99)")
    return "  ".join(parts)


def _update(update: dict[str, Any] | None) -> str:
    if update is None:
        return "none yet"
    outcome = "applied" if update["ok"] else f"refused ({update['reason']})"
    when = f"{update['age_s']:.0f} s ago, {update['ms']:.0f} ms"
    phases = ", ".join(f"{phase} {took_ms:.0f}" for phase, took_ms in update["engine_ms"].items())
    return f"{update['replica']} v{update['version']} {outcome} {when}" + (f" ({phases})" if phases else "")


def _staging(staging: dict[str, Any] | None) -> str:
    if staging is None:
        return "none yet"
    size = f"{staging['delta_bytes'] / 1e6:.1f} MB"
    if staging["bytes_per_changed"] is not None:
        size += f", {staging['density']:.2%} changed, {staging['bytes_per_changed']:.2f} B each"
    phases = {phase: staging[f"{phase}_ms"] for phase in ("encode", "push", "pull", "verify", "decode")}
    took = ", ".join(f"{phase} {ms:.0f} ms" for phase, ms in phases.items() if ms is not None)
    return f"v{staging['version']} staged {staging['age_s']:.0f} s ago: {size}; {took}"


def _dash(value: Any) -> str:
    return "-" if value is None else str(value)
