"""`rose`: the command line.

Commands load when they are called: `rose --help` and `rose status` import neither torch, vllm, zmq nor
aiohttp.  Commands of the daemon and the simulator come from the entry-point group `rose.commands`; each
names a `typer.Typer`.  A `RoseError` is printed as two lines, what is wrong and what to do, never as a
traceback.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from rose import __version__
from rose.errors import RoseError

GROUP = "rose.commands"
_OUTPUT_ERRNOS = {errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT}
"""How a full or failing disk behind standard output shows; a closed pipe is typer's to handle."""

_BUILT_IN = {
    "init": "rose.cli.init:app",
    "status": "rose.cli.status:app",
    "top": "rose.cli.top:app",
    "reclaim": "rose.cli.operate:reclaim_app",
    "gate": "rose.cli.operate:gate_app",
    "activate": "rose.cli.operate:activate_app",
    "deactivate": "rose.cli.operate:deactivate_app",
    "lend": "rose.cli.lend:app",
    "audit": "rose.cli.audit:app",
    "drain": "rose.cli.operate:drain_app",
    "undrain": "rose.cli.operate:undrain_app",
    "jobs": "rose.cli.fleet:jobs_app",
    "nodes": "rose.cli.fleet:nodes_app",
    "trajectories": "rose.cli.fleet:trajectories_app",
    "events": "rose.cli.events:app",
    "explain": "rose.cli.explain:app",
    "weights": "rose.cli.weights:app",
    "version": "rose.cli.version:app",
    "man": "rose.cli.manual:man_app",
    "completion": "rose.cli.manual:completion_app",
}
_SUMMARY = {
    "init": "Write a commented rose.toml.",
    "status": "Show this host: device, gate, memory, replicas.",
    "top": "Watch this host and its job: gate, lending, replicas, turns.",
    "reclaim": "Take KV memory back from a replica now.",
    "gate": "Force a replica's gate, or give it back to the policy.",
    "activate": "Take an inactive replica into use again.",
    "deactivate": "Have a replica give its KV memory back, its engine staying up.",
    "lend": "Lend nothing from now on, or lend again.",
    "audit": "Show what lending did to serving, and what could be lent.",
    "drain": "Send a replica no new turns.",
    "undrain": "Send a drained replica turns again.",
    "jobs": "Show the scheduler's jobs.",
    "nodes": "Show all nodes and their replicas.",
    "trajectories": "Show the trajectories that ran last.",
    "events": "Show what rosed decided on this host, and why.",
    "explain": "Say why a gate is closed, a request was late, a turn went where it did.",
    "weights": "List, check, pull, compare, publish weight versions; take them back.",
    "version": "Show the versions of ROSE and of what it runs on.",
    "man": "Print the manual page.",
    "completion": "Print the completion of a shell.",
    "doctor": "Check this host: what it lacks, and what to do about it.",
    "scheduler": "Run rose-scheduler with its gateway.",
    "relay": "Run the relay that weight versions go through.",
    "keys": "Make keys for the control plane between hosts.",
    "demo": "Run the whole system on this machine and report.",
    "bench": "Measure: co-serving, memory sharing, weight deltas, the relay, a long link.",
    "profile": "Measure how long the steps of a model take on this host.",
    "mps": "Share the GPU through NVIDIA MPS: serving and rollout at once, instead of in turns.",
    "install": "Make ROSE's daemons services of this machine.",
    "uninstall": "Take them away again, and put back what was found.",
    "token": "Make a token for a user of the gateway or the relay.",
    "sim": "Run or reproduce experiments in the simulator.",
    "replay": "Say what other policies would have decided on a rosed's journal.",
}
"""One line a command, here so that help need not import the commands."""


class RoseGroup(TyperGroup):
    """A group that knows its commands by name and imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names, our own first."""
        return [*_BUILT_IN, *sorted(_installed())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one command; None if there is none of that name."""
        if cmd_name in _BUILT_IN:
            module, _, attribute = _BUILT_IN[cmd_name].partition(":")
            found = getattr(importlib.import_module(module), attribute)
        elif cmd_name in (installed := _installed()):
            found = _load(installed[cmd_name])
        else:
            return None
        command = get_command(found)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list in `rose --help`, without importing what it lists."""
        rows = [(name, _SUMMARY.get(name, "")) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a RoseError ends it with two lines."""
        try:
            return super().invoke(ctx)
        except RoseError as error:
            fail(error)


def fail(error: RoseError, program: str = "rose") -> NoReturn:
    """Print what is wrong and what to do, and exit with the error's code."""
    print(f"{program}: {error.what}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    raise SystemExit(int(error.code))


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _load(point: EntryPoint) -> typer.Typer:
    try:
        loaded = point.load()
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        raise RoseError(
            f"`rose {point.name}` needs {missing}, which is not installed",
            "install what the command needs; see README.md on extras",
        ) from error
    if not isinstance(loaded, typer.Typer):
        raise RoseError(f"`rose {point.name}`: {point.value} is not a typer.Typer")
    return loaded


app = typer.Typer(
    cls=RoseGroup,
    help="ROSE: agentic-RL rollouts on serving GPUs, without hurting the serving SLO.",
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rose {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Options before the command."""


def main() -> None:
    """Entry point of `rose`."""
    try:
        try:
            get_command(app).main(prog_name="rose")
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRNOS:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        fail(RoseError(f"the output cannot be written: {error.strerror}"))


if __name__ == "__main__":
    main()
