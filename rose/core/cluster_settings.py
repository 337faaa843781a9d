"""Times and bounds of the scheduler's machine."""

from __future__ import annotations

import msgspec

from rose.units import NS_PER_MS, NS_PER_S


class RoutingSlack(msgspec.Struct, frozen=True, kw_only=True):
    """How much more loaded (1: full) a replica may be than the best, and still be preferred."""

    group: float = 0.1875
    """For holding the prompt of the turn's group (GRPO samples one prompt many times): 3 turns of 16.  With
    more, groups fill replicas up, and their later turns find no room where their own prefix is."""
    guess: float = 0.25
    """For holding the prefix of what is guessed to be the turn's trajectory: a share of the best's load."""
    hardware: float = 0.25
    """For being of the kind of device that suits the turn's task."""


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The first five come from `[scheduler]` of rose.toml."""

    stall_after_ns: int = 2 * NS_PER_S
    suspect_after_ns: int = 3 * NS_PER_S
    dead_after_ns: int = 6 * NS_PER_S
    turn_stall_ns: int = 120 * NS_PER_S
    """An attempt without a token for this long, counted while the gate is reported open, is moved."""
    queue_max: int = 4096
    """Most turns that wait, over all jobs."""
    turn_held_ns: int = 600 * NS_PER_S
    """An attempt without a token for this long is moved even from behind a closed gate."""
    attempts_max: int = 16
    """Attempts in a row that an engine ended without a token, after which a turn fails."""
    backoff_ns: int = 250 * NS_PER_MS
    """A turn avoids the replica that interrupted it for this long; doubles while attempts are fruitless."""
    backoff_max_ns: int = 5 * NS_PER_S
    failures_max: int = 3
    """Attempts in a row that fail on a replica without a token, whatever its health says, before it gets no
    turns for `suspension_ns`; that doubles with each further one."""
    suspension_ns: int = NS_PER_S
    suspension_max_ns: int = 60 * NS_PER_S
    gate_patience_ns: int = 10 * NS_PER_S
    """A gate not seen open for this long counts against its replica (see `rose.core.routing`)."""
    lease_grace_ns: int = 30 * NS_PER_S
    """A leased replica may be unfit for this long before another takes its place."""
    lease_min_ns: int = 60 * NS_PER_S
    """Least time for which a replica is lent, before fairness between jobs may take it back."""
    borrow_kv_share_max: float = 0.8
    """Serving devices whose recent KV use is at or above that are not borrowed; those lent stay lent."""
    switch_cost_ns: int = 5 * NS_PER_S
    """From a grant to a replica that takes turns, until that was measured."""
    switch_gain_min: float = 2.0
    """A replica is borrowed in mid-step if what is left of the rollout is so many times the switch cost."""
    slack: RoutingSlack = RoutingSlack()
    prefill_heavy_ratio: float = 10.0
    """Tasks with more fresh prompt tokens per generated token go to compute-rich devices."""
    forget_node_after_ns: int = 3600 * NS_PER_S
    pins_max: int = 100_000
    pin_ttl_ns: int = 1800 * NS_PER_S
