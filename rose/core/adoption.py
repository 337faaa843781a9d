"""Whether an engine of a former rosed may be taken over, or has to be ended and started afresh.

What a rosed writes down when it starts an engine is compared with what it would start now.  Anything that
differs, or cannot be told, is a reason to refuse: a fresh engine costs a minute, a wrong one spoils answers.
"""

from __future__ import annotations

import msgspec

from rose.units import WeightVersion


class EngineIdentity(msgspec.Struct, frozen=True):
    """What makes an engine the one that this host's configuration asks for."""

    node: str
    replica: str
    port: int
    command: str
    """Digest of the replica's configuration, and of command line and environment of its engine."""
    boards: str
    """Digest of the layouts of the boards that it shares with rosed."""


def refusal(found: EngineIdentity, wanted: EngineIdentity | None) -> str:
    """Why the engine cannot be the one that is wanted (None: it is wanted no more); empty if it can."""
    if wanted is None:
        return "replica_removed"
    for name, code in (
        ("node", "other_node"),
        ("replica", "other_replica"),
        ("port", "port_changed"),
        ("command", "configuration_changed"),
        ("boards", "boards_changed"),
    ):
        if getattr(found, name) != getattr(wanted, name):
            return code
    return ""


def weights_refusal(version: WeightVersion, verified: bool | None) -> str:
    """Why its weights cannot be trusted; empty if they can.

    `verified`: its live parameters are what somebody who knows the version says; None: nobody could tell.
    That is enough for version 0 alone, as at the start of an engine.
    """
    if verified is False:
        return "weights_mismatch"
    return "version_unknown" if verified is None and version != 0 else ""
