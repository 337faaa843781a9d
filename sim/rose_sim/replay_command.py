"""`rose replay`: other policies on a recorded journal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rose_sim.command import Json

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def replay(
    journal: Annotated[Path, typer.Argument(help="journal.jsonl of a rosed, from its state directory.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="MODE[,KEY=VALUE]..., as in slack,margin_ms=10; given again: side by side."),
    ] = None,
    json_file: Json = None,
) -> None:
    """Say what other gate and memory policies would have decided on what rosed saw.

    MODE is recorded, strict, slack, open or closed; keys are token_cap, margin_ms, ttft_ms, headroom_share,
    cut_share.  Without --policy: recorded, strict and slack.
    """
    from rose_sim.replay import parse  # noqa: PLC0415 (the core's machines: not for --help)
    from rose_sim.replay import replay as play  # noqa: PLC0415
    from rose_sim.reports import write_json  # noqa: PLC0415

    report = play(journal, [parse(text) for text in policy or ("recorded", "strict", "slack")])
    if json_file is not None:
        write_json(json_file, report)
    if str(json_file) != "-":
        show(report, Console(highlight=False))


def show(report: dict[str, Any], console: Console) -> None:
    """A table for each replica."""
    damaged = f", {report['lines_damaged']} damaged lines left out" if report["lines_damaged"] else ""
    console.print(f"{report['entries']} entries, {report['span_s']:.0f} s{damaged}")
    for name, found in report["replicas"].items():
        seen = found["gate_open_share_seen"]
        table = Table(
            "policy", "gate open", "tokens a step", "transitions", "KV cuts", "least KV blocks", title=name
        )
        for row in found["policies"]:
            table.add_row(
                row["policy"],
                f"{row['open_share']:.1%}",
                f"{row['tokens_mean']:.0f}",
                str(row["transitions"]),
                str(row["cuts"]),
                "-" if row["kv_blocks_min"] is None else str(row["kv_blocks_min"]),
            )
        console.print(table)
        console.print("gate seen open: " + ("unknown" if seen is None else f"{seen:.1%}"))
        if not found["latency_known"]:
            console.print("no gates.jsonl tells how long rollout steps take: slack decides as strict does")
