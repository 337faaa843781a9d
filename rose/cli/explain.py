"""`rose explain`: why a gate is closed, why serving requests were late, why a turn went where it did."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from rose import audit as records
from rose import config as configuration
from rose import journals, wire
from rose.cli.audit import late_line, recorded
from rose.cli.control import ask
from rose.cli.fleet import UrlOption, explain_turn
from rose.cli.options import ConfigOption, JsonOption, SocketOption
from rose.cli.times import clock
from rose.core.attribution import Cause
from rose.core.readings import GateReason
from rose.errors import ConfigError, NotFound, RoseError

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_HISTORY_S = 300.0
_LATE_SHOWN = 10


class Meaning(NamedTuple):
    """Of a gate's reason."""

    text: str
    advice: str = ""


MEANINGS = {
    GateReason.OPEN_IDLE: Meaning("the serving engine has nothing to do"),
    GateReason.OPEN_FORCED: Meaning(
        "it is forced open, or the replica is dedicated", "`rose gate REPLICA auto` ends an override"
    ),
    GateReason.OPEN_SLACK: Meaning("the next rollout step fits in the slack of all decoding requests"),
    GateReason.CLOSED_BY_OPERATOR: Meaning(
        "an operator or admission.mode closed it, or the replica is drained, failed or ending",
        "`rose gate REPLICA auto`, `rose undrain REPLICA`",
    ),
    GateReason.SERVING_WAITING: Meaning("a serving request waits for its prefill; it goes first"),
    GateReason.SERVING_RUNNING: Meaning(
        "serving requests run, and the gate is strict or the latency models are not calibrated yet",
        'admission.mode = "slack" lends beside decoding requests too',
    ),
    GateReason.SLACK_TOO_SMALL: Meaning("no useful step would end before the earliest deadline of serving"),
    GateReason.BOARD_UNKNOWN: Meaning(
        "the serving engine's board is missing, stale or contradictory, and unknown is not idle",
        "start the serving engine with the plugin; `rose doctor` looks for its board",
    ),
    GateReason.ROSED_GONE: Meaning("rosed stopped renewing the gate's lease", "see rosed's log"),
    GateReason.POLICY_UNKNOWN: Meaning("the engine has not seen a policy of rosed yet", "is rosed running?"),
    GateReason.CLOCK_JUMPED: Meaning("a board is stamped in the future: a clock moved; it heals by itself"),
    GateReason.MEMORY_UNKNOWN: Meaning(
        "nobody knows how much memory serving needs", "`rose status` says which signal is unknown"
    ),
    GateReason.DEVICE_TROUBLE: Meaning(
        "the device is lost, out of reach or recovering", "`rose status` and dmesg say more"
    ),
    GateReason.INACTIVE: Meaning(
        "the replica has given its memory back: no job holds a lease, or it was deactivated",
        "`rose activate REPLICA`, or submit a job",
    ),
    GateReason.LENDING_OFF: Meaning("lending is switched off on this host", "`rose lend on`"),
    GateReason.ERROR_BUDGET_SPENT: Meaning(
        "rollout made more serving requests late than it may",
        "`rose audit` shows them; `rose lend on --reset` starts anew, knowing of them",
    ),
    GateReason.OUTSIDE_HOURS: Meaning("it is outside lending.hours"),
    GateReason.ROLLOUT_OFF_WINDOW: Meaning("a randomised window without rollout, to compare with; soon over"),
}

_VERDICTS = {
    Cause.ROLLOUT: "Rollout's fault: without the rollout steps in its wait it would have been in time.",
    Cause.SERVING: "Serving's own: without the rollout steps in its wait it would still have been late.",
    Cause.UNKNOWN: "Not known: rollout steps that nobody logged may explain it, so it counts as rollout's.",
}


@app.command()
def explain(
    what: Annotated[
        str, typer.Argument(metavar="gate|late|TURN", help="A turn id: answers carry it in x-rose-turn-id.")
    ],
    which: Annotated[
        str, typer.Argument(help="With `gate` a replica, with `late` the number of a request.")
    ] = "",
    as_json: JsonOption = False,
    url: UrlOption = None,
    config: ConfigOption = None,
    socket: SocketOption = None,
) -> None:
    """Say why a gate is closed, why requests were late, or why a turn went where it did.

    Exit code 4 if the replica, the request or the turn is not known.
    """
    if what == "gate":
        _gate(which, as_json, config, socket)
    elif what == "late":
        _late(which, as_json, config)
    elif which:
        raise ConfigError(f"{which!r} is one argument too many", "`rose explain TURN`")
    else:
        explain_turn(what, as_json, url, config)


# ---- gates --------------------------------------------------------------------------------------


def _gate(replica: str, as_json: bool, config: Path | None, socket: Path | None) -> None:
    loaded = None if socket and config is None else configuration.load(config)
    path = socket or (loaded.control_socket if loaded else Path())
    status = ask(path, wire.StatusRequest())
    lent = [each for each in status["replicas"] if not replica or each["id"] == replica]
    if not lent:
        known = ", ".join(each["id"] for each in status["replicas"]) or "none"
        raise NotFound(f"this host has no replica {replica or 'at all'}", f"it has: {known}")
    shares = _shares(Path(loaded.node.state_dir)) if loaded else {}
    found = [_explained(each, status, shares.get(each["id"], {})) for each in lent]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for each in found:
        state = "open" if each["open"] else "closed"
        print(f"{each['replica']}: {state} ({each['reason']}): {each['means']}")
        for line in each["evidence"]:
            print(f"  {line}")
        if each["advice"]:
            print(f"  -> {each['advice']}")


def _explained(replica: dict[str, Any], status: dict[str, Any], shares: dict[str, float]) -> dict[str, Any]:
    gate = replica["gate"]
    meaning = _meaning(gate["reason"])
    return {
        "replica": replica["id"],
        "open": gate["open"],
        "reason": gate["reason"],
        "means": meaning.text,
        "advice": meaning.advice.replace("REPLICA", replica["id"]),
        "evidence": _evidence(replica, status, shares),
        "shares": shares,
    }


def _meaning(reason: str) -> Meaning:
    if reason.startswith("unknown: "):
        text = f"its engine does not say ({reason.removeprefix('unknown: ')}), so it counts as closed"
        return Meaning(text, "`rose status` shows the state of the replica; its log is in <state_dir>/logs")
    known = GateReason.__members__.get(reason.upper())
    return Meaning("a reason of another release") if known is None else MEANINGS[known]


def _evidence(replica: dict[str, Any], status: dict[str, Any], shares: dict[str, float]) -> list[str]:
    serving, lending = status["serving"], status.get("lending", {})
    out = [f"replica {replica['state']}" + (f": {replica['reason']}" if replica["reason"] else "")]
    text = f"serving {serving['state']}"
    if serving.get("waiting") is not None:
        text += f", {serving['waiting']} waiting, {serving['running']} running"
    slack = [
        f"{name} slack {serving[key]:.0f} ms"
        for name, key in (("TTFT", "ttft_slack_ms"), ("TPOT", "tpot_slack_ms"))
        if serving.get(key) is not None
    ]
    out.append(", ".join([text, *slack]) + (f" ({serving['reason']})" if serving.get("reason") else ""))
    if lending.get("closed"):
        out.append(f"lending stopped ({lending['closed']}): {lending['text']}")
    for device in status["devices"]:
        if device.get("trouble"):
            out.append(f"device trouble: {device['trouble']}")
        blocking = (each for each in device["unknown"] if each["blocks"])
        out += [f"{each['signal']} unknown ({each['reason']})" for each in blocking]
    if shares:
        longest = sorted(shares.items(), key=lambda each: -each[1])
        out.append("last five minutes: " + ", ".join(f"{reason} {share:.0%}" for reason, share in longest))
    return out


def _shares(state_dir: Path) -> dict[str, dict[str, float]]:
    """Per replica, the share of the last minutes that its gate spent with each reason."""
    now_s = time.time()
    spent: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    before: dict[str, journals.GateChange] = {}
    try:
        for change in journals.gate_changes(state_dir, now_s - _HISTORY_S):
            if (last := before.get(change.replica)) is not None:
                spent[change.replica][last.reason] += change.at_s - last.at_s
            before[change.replica] = change
    except RoseError:  # no journal yet, or not ours to read: explain without
        return {}
    for replica, last in before.items():
        spent[replica][last.reason] += now_s - last.at_s
    return {
        replica: {reason: seconds / total for reason, seconds in counts.items()}
        for replica, counts in spent.items()
        if (total := sum(counts.values())) > 0
    }


# ---- late requests ------------------------------------------------------------------------------


def _late(number: str, as_json: bool, config: Path | None) -> None:
    directory = Path(configuration.load(config).node.state_dir)
    if number and not number.isdigit():
        raise ConfigError(f"{number!r} is no number of a request", "`rose explain late` lists them")
    found = [line for line in recorded(directory, 0) if isinstance(line, records.Late)]
    shown = [line for line in found if str(line.number) == number] if number else found[-_LATE_SHOWN:]
    if number and not shown:
        raise NotFound(f"no late request {number} is known", "`rose explain late` lists the latest")
    if as_json:
        rows = [{**msgspec.to_builtins(line), "means": _verdict(line)} for line in shown]
        print(json.dumps(rows, indent=2))
        return
    for line in shown:
        print(f"{clock(line.at_s)}  {late_line(msgspec.to_builtins(line))}")
        print(f"  {_verdict(line)}")
    if not shown:
        print("no serving request was late, as far as is known")


def _verdict(line: records.Late) -> str:
    known = {str(cause): text for cause, text in _VERDICTS.items()}
    return known.get(line.cause, line.cause)
