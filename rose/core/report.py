"""What a node says of its replicas to the scheduler."""

from __future__ import annotations

import msgspec

from rose.units import ReplicaId, WeightVersion


class ReplicaReport(msgspec.Struct, frozen=True):
    """What a node says of one replica, in its registration and in every heartbeat."""

    replica: ReplicaId
    kind: str
    """`dedicated` or `opportunistic`."""
    state: str
    """A `rose.core.node.ReplicaState` value; turns are sent only to `ready` ones."""
    url: str
    model: str
    weight_version: WeightVersion | None
    """None: not known, as of an engine that ROSE does not manage."""
    updating: bool = False
    gate_open: bool | None = None
    """None: not known (counts as closed)."""
    kv_budget_tokens: int = 0
    kv_used_tokens: int = 0
    context_tokens_max: int = 0
    serving_kv_used_share: float | None = None
    device: str = ""
    """Identity of the serving device lent (for `at most one job per serving GPU`); empty if dedicated."""
    hardware: str = ""
    """What the device is rich in for its price, `compute` or `bandwidth`; empty: not told."""
    engine: str = "vllm"
    """Whose API it speaks: `vllm` or `sglang`."""
