"""How long a new weight version takes to reach the engines.

End hosts, not the wire, are the bottleneck of a relay (RollArt, arXiv 2512.22560, table 3: 0.44 to 0.51 GB/s
pushed, 2.0 to 2.4 GB/s pulled over 200 GbE): both limits are modelled, and the lower one counts.
"""

from __future__ import annotations

from rose_sim.episodes import density
from rose_sim.hardware import BF16_BYTES, ModelShape
from rose_sim.scenario import Network, Scenario

INDEX_BYTES = 4
"""Of one change in coordinate form, beside its value."""
REBUILD_S = 1.0
"""Turning a delta into weights on the host (paper: about 1 s)."""
COMPARE_GB_S = 20.0
"""Trainer: finding what changed reads old and new weights."""
RDMA_GB_S = {16: 3.0, 32: 5.2, 66: 6.9}
"""Intra-cluster broadcast over 400 Gbps RDMA, by size in GB (RollArt, table 3)."""


def relay_s(size_bytes: float, network: Network) -> float:
    """Push then pull, as RollArt's naive path (its end-to-end figure is the sum)."""
    wire_gb_s = network.gbps / 8 * 0.9
    size_gb = size_bytes / 1e9
    return size_gb / min(network.push_gb_s, wire_gb_s) + size_gb / min(network.pull_gb_s, wire_gb_s)


def dense_relay_s(model: ModelShape, network: Network) -> float:
    """The whole model through the relay."""
    return relay_s(model.weight_bytes, network)


def sparse_bytes(model: ModelShape, scenario: Scenario, step: int) -> float:
    """A step's delta in coordinate form; never more than the dense model."""
    changed = density(scenario, step) * model.parameters
    return min(changed * (INDEX_BYTES + BF16_BYTES), float(model.weight_bytes))


def sparse_relay_s(model: ModelShape, scenario: Scenario, step: int) -> float:
    """A step's delta through the relay: compare, push, pull, rebuild."""
    compare = 2 * model.weight_bytes / 1e9 / COMPARE_GB_S
    return compare + relay_s(sparse_bytes(model, scenario, step), scenario.network) + REBUILD_S


def broadcast_s(model: ModelShape) -> float:
    """Inside the trainer's cluster, over RDMA."""
    size_gb = model.weight_bytes / 1e9
    nearest = min(RDMA_GB_S, key=lambda known: abs(known - size_gb))
    return size_gb / RDMA_GB_S[nearest]
