"""`rose reclaim`, `rose gate`, `rose activate`, `rose drain` and their opposites: orders to rosed."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from rose import wire
from rose.cli.control import ask
from rose.cli.options import ConfigOption, SocketOption, socket_path
from rose.units import ReplicaId

reclaim_app = typer.Typer(rich_markup_mode=None, add_completion=False)
gate_app = typer.Typer(rich_markup_mode=None, add_completion=False)
activate_app = typer.Typer(rich_markup_mode=None, add_completion=False)
deactivate_app = typer.Typer(rich_markup_mode=None, add_completion=False)
drain_app = typer.Typer(rich_markup_mode=None, add_completion=False)
undrain_app = typer.Typer(rich_markup_mode=None, add_completion=False)

ReplicaArgument = Annotated[str, typer.Argument(metavar="REPLICA", help="Id of a replica of this host.")]


class Mode(StrEnum):
    """What a gate can be forced to; `auto` takes the override back."""

    closed = "closed"
    strict = "strict"
    slack = "slack"
    open = "open"
    auto = "auto"


@reclaim_app.command()
def reclaim(
    replica: ReplicaArgument,
    reason: Annotated[str, typer.Option(help="Why, for the journal.")] = "operator",
    config: ConfigOption = None,
    socket: SocketOption = None,
) -> None:
    """Cut the replica's KV budget once, as if serving had come under memory pressure."""
    body = ask(socket_path(config, socket), wire.ReclaimRequest(ReplicaId(replica), reason))
    print(f"{replica}: KV budget is now {body['kv_budget_blocks']} blocks")


@gate_app.command()
def gate(
    replica: ReplicaArgument,
    mode: Annotated[Mode, typer.Argument(help="`open` harms serving; `auto` follows the policy again.")],
    tokens: Annotated[
        int, typer.Option(min=0, help="Most tokens of a step meanwhile; 0: as configured.")
    ] = 0,
    config: ConfigOption = None,
    socket: SocketOption = None,
) -> None:
    """Force the replica's gate, or give it back to the policy."""
    wanted = None if mode is Mode.auto else mode.value
    body = ask(socket_path(config, socket), wire.GateRequest(ReplicaId(replica), wanted, tokens))
    print(f"{replica}: gate mode is now {body['mode']}")


@drain_app.command()
def drain(replica: ReplicaArgument, config: ConfigOption = None, socket: SocketOption = None) -> None:
    """Send the replica no new turns; those in flight finish."""
    ask(socket_path(config, socket), wire.DrainRequest(ReplicaId(replica), drain=True))
    print(f"{replica}: draining")


@undrain_app.command()
def undrain(replica: ReplicaArgument, config: ConfigOption = None, socket: SocketOption = None) -> None:
    """Send the replica turns again."""
    ask(socket_path(config, socket), wire.DrainRequest(ReplicaId(replica), drain=False))
    print(f"{replica}: in use")


@deactivate_app.command()
def deactivate(replica: ReplicaArgument, config: ConfigOption = None, socket: SocketOption = None) -> None:
    """Have the replica give its KV memory back; its engine stays up, its turns move elsewhere."""
    ask(socket_path(config, socket), wire.ActivityRequest(ReplicaId(replica), active=False))
    print(f"{replica}: giving its memory back")


@activate_app.command()
def activate(replica: ReplicaArgument, config: ConfigOption = None, socket: SocketOption = None) -> None:
    """Take an inactive replica into use again."""
    ask(socket_path(config, socket), wire.ActivityRequest(ReplicaId(replica), active=True))
    print(f"{replica}: in use")
