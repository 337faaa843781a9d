"""`[lending]` of `rose.toml`: how far this host goes with lending, and what stops it."""

from __future__ import annotations

from typing import Literal

import msgspec


class LendingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How far this host goes with lending, and what stops it (docs/lending.md)."""

    mode: Literal["observe", "lend"] = "lend"
    """observe: measure and report what could be lent (`rose audit`); opportunistic replicas are not started.
    lend: lend it."""
    hours: tuple[str, ...] = ()
    """When to lend, in this host's local time, such as "Mon-Fri 20:00-07:00"; empty means always."""
    kv_share_max: float = 1.0
    """Most of its KV blocks that an opportunistic replica may use."""
    harm_share_max: float = 0.001
    """Error budget: share of the serving requests that may be late because of rollout.  When more are,
    lending stops.  1 only measures it."""
    harm_requests_min: int = 3
    """So many requests may be in any case: one of a few proves nothing."""
    harm_window_s: float = 3600
    """Time that the error budget looks back over."""
    switchback_share: float = 0.02
    """Share of the time, in windows drawn at random, without rollout, to compare serving with and without it;
    0: no such windows."""
    switchback_window_s: float = 30
    """Length of such a window."""
    drill_period_s: float = 600
    """Mean time between reclaim drills, which measure how long it takes to have lent memory back; 0: none."""
    drill_share_max: float = 0.05
    """Most of a replica's KV blocks that a drill takes, for a moment."""
