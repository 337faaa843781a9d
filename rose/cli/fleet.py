"""`rose jobs`, `rose nodes`, `rose trajectories`, `rose explain TURN`: what rose-scheduler knows, and why."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import click
import typer

from rose import config as configuration
from rose.cli.options import ConfigOption, JsonOption
from rose.client import Scheduler
from rose.errors import NotReady
from rose.secret import read_secret

UrlOption = Annotated[
    str | None, typer.Option("--url", help="rose-scheduler's gateway; default: as rose.toml says.")
]
WatchOption = Annotated[
    float | None, typer.Option("--watch", "-w", min=0.1, help="Show it again every so many seconds.")
]
_WIDTH_PIPED = 160

jobs_app = typer.Typer(rich_markup_mode=None, add_completion=False)
nodes_app = typer.Typer(rich_markup_mode=None, add_completion=False)
trajectories_app = typer.Typer(rich_markup_mode=None, add_completion=False)


def scheduler_of(config: Path | None, url: str | None) -> Scheduler:
    """The scheduler to ask.  Raises ConfigError when that takes a rose.toml and it is bad."""
    if url is not None and config is None:
        return Scheduler(url)
    section = configuration.load(config).scheduler
    token = read_secret(section.token_file, "scheduler.token_file") if section.token_file else ""
    scheme = "https" if section.tls_cert or section.tls_ca else "http"
    default = f"{scheme}://{_reachable(section.gateway_host)}:{section.gateway_port}"
    return Scheduler(url or default, token, tls_ca=section.tls_ca)


def _reachable(host: str) -> str:
    """An address to connect to, for one to listen on."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


@jobs_app.command("jobs")
def jobs(
    horizon_s: Annotated[
        float | None,
        typer.Option("--forecast", help="Also what each may expect over the next so many seconds."),
    ] = None,
    as_json: JsonOption = False,
    watch: WatchOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Show the jobs: their versions, replicas and turns."""
    scheduler = scheduler_of(config, url)

    def rows() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = scheduler.status()["jobs"]
        if horizon_s is not None:
            for job in found:
                path = f"/rose/v1/jobs/{quote(job['job'], safe='')}/forecast?horizon_s={horizon_s:g}"
                job["forecast"] = scheduler.call("GET", path)
        return found

    headings = _JOB_HEADINGS if horizon_s is None else (*_JOB_HEADINGS, "slots then", "tokens/s then")
    _show(rows, headings, _job_row, as_json, watch)


@nodes_app.command("nodes")
def nodes(
    as_json: JsonOption = False, watch: WatchOption = None, url: UrlOption = None, config: ConfigOption = None
) -> None:
    """Show the replicas of all nodes, whom they are lent to, and what they run."""
    scheduler = scheduler_of(config, url)

    def rows() -> list[dict[str, Any]]:
        status = scheduler.status()
        bare = {node["node"] for node in status["nodes"]} - {row["node"] for row in status["replicas"]}
        states = {node["node"]: node["state"] for node in status["nodes"]}
        return [*status["replicas"], *({"node": name, "node_state": states[name]} for name in sorted(bare))]

    _show(rows, _NODE_HEADINGS, _node_row, as_json, watch)


@trajectories_app.command("trajectories")
def trajectories(
    job: Annotated[str | None, typer.Option("--job", help="Only those of this job.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="At most so many.")] = 100,
    as_json: JsonOption = False,
    watch: WatchOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Show the trajectories that ran last, and which replica holds their prefix."""
    scheduler = scheduler_of(config, url)
    query = f"/rose/v1/trajectories?limit={limit}" + (f"&job={quote(job, safe='')}" if job else "")
    _show(
        lambda: scheduler.call("GET", query)["trajectories"],
        _TRAJECTORY_HEADINGS,
        _trajectory_row,
        as_json,
        watch,
    )


def explain_turn(turn: str, as_json: bool, url: str | None, config: Path | None) -> None:
    """Print why a turn went where it did, and what ended its attempts.  Raises NotFound."""
    found = scheduler_of(config, url).call("GET", f"/rose/v1/turns/{quote(turn, safe='')}")
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for run in found["runs"]:
        print(f"turn {run['turn']} of trajectory {run['trajectory']}, job {run['job']}")
        for line in run["lines"]:
            print(f"  {_clock(line['at_s'])}  {line['code']:11} {line['text']}")


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S.%f")[:-3]


_JOB_HEADINGS = ("job", "model", "step", "needs", "latest", "replicas", "queued", "in flight", "stale")
_NODE_HEADINGS = (
    "node", "state", "replica", "kind", "state", "gate", "version", "job", "in flight", "finished", "tokens",
)  # fmt: skip
_TRAJECTORY_HEADINGS = ("trajectory", "job", "replica", "prefix", "idle")


def _job_row(job: dict[str, Any]) -> list[str]:
    eligible = sum(bool(replica["eligible"]) for replica in job["replicas"])
    step = "-" if job["rl_step"] is None else f"{job['rl_step']}{'' if job['rolling'] else ' (over)'}"
    held = f"{eligible} of {len(job['replicas'])} take turns"
    asked = f"{job['n_rl']}+{job['n_serving_max']} asked"
    forecast = job.get("forecast") or {}
    return [
        *(job["job"], job["model"], step, f"v{job['required_version']}", f"v{job['latest_version']}"),
        *(f"{held}, {asked}", str(job["turns_queued"]), str(job["turns_in_flight"])),
        "-" if job["trajectory_staleness_max"] is None else str(job["trajectories_stale"]),
        *(_estimate(forecast[name]) for name in ("slots", "tokens_per_s") if forecast),
    ]


def _estimate(estimate: dict[str, Any]) -> str:
    """`32 (20 to 48, 80%)`."""
    expected, high = estimate["expected"], estimate["high"]
    if expected is None:
        return "unknown"
    upper = "any" if high is None else f"{high:.0f}"
    return f"{expected:.0f} ({estimate['low']:.0f} to {upper}, {estimate['coverage']:.0%})"


def _node_row(row: dict[str, Any]) -> list[str]:
    if "replica" not in row:
        return [row["node"], row["node_state"], "-", *[""] * (len(_NODE_HEADINGS) - 3)]
    state = row["state"] + (", drained" if row["drained"] else "") + (", updating" if row["updating"] else "")
    gate = "open" if row["gate_open"] else "held" if row["gate_held"] else "closed"
    return [
        *(row["node"], row["node_state"], row["replica"], row["kind"], state, gate),
        *("?" if row["weight_version"] is None else f"v{row['weight_version']}", row["job"] or "-"),
        *(str(row["turns_in_flight"]), str(row["turns_finished"]), str(row["tokens"])),
    ]


def _trajectory_row(row: dict[str, Any]) -> list[str]:
    prefix = str(row["prefix_tokens"] or "-")
    return [row["trajectory"], row["job"], row["replica"], prefix, f"{row['idle_ms'] / 1000:.1f} s"]


def _show(
    read: Callable[[], list[dict[str, Any]]],
    headings: Sequence[str],
    row: Callable[[dict[str, Any]], list[str]],
    as_json: bool,
    watch: float | None,
) -> None:
    """Print once, or again and again until interrupted; with JSON, one line a time."""
    while True:
        try:
            rows = read()
            text = (
                json.dumps(rows, indent=None if watch else 2) if as_json else _table(headings, map(row, rows))
            )
        except (KeyError, TypeError) as error:
            raise NotReady(
                f"the answer is not one of this release's rose-scheduler: {error!r}", "compare `rose version`"
            ) from None
        if watch and not as_json and sys.stdout.isatty():
            click.clear()
        print(text, flush=True)
        if not watch:
            return
        time.sleep(watch)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    # rich takes longer to import than the rest of these commands.
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(*headings, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    if not table.row_count:
        return "none"
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _WIDTH_PIPED)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")
