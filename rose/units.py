"""Typed quantities used at the borders of every module.

They are `NewType`s: no cost at run time, and mypy refuses to mix them.  Names of plain
variables carry the unit last (`ttft_slo_ms`, `budget_blocks`).
"""

from __future__ import annotations

from typing import NewType

Nanos = NewType("Nanos", int)
"""A point on, or a span of, CLOCK_MONOTONIC in nanoseconds (shared by all processes of a host)."""

Tokens = NewType("Tokens", int)
Blocks = NewType("Blocks", int)
"""KV-cache blocks of one engine."""

Bytes = NewType("Bytes", int)

WeightVersion = NewType("WeightVersion", int)
"""Version of a job's weights; 0 is the checkpoint the job started from."""

NodeId = NewType("NodeId", str)
ReplicaId = NewType("ReplicaId", str)
JobId = NewType("JobId", str)
TrajectoryId = NewType("TrajectoryId", str)
TurnId = NewType("TurnId", str)

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
MIB = 1 << 20
GIB = 1 << 30


def ms_to_ns(value_ms: float) -> Nanos:
    """Milliseconds to nanoseconds, rounded to the nearest one."""
    return Nanos(round(value_ms * NS_PER_MS))


def s_to_ns(value_s: float) -> Nanos:
    """Seconds to nanoseconds, rounded to the nearest one."""
    return Nanos(round(value_s * NS_PER_S))
