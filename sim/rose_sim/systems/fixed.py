"""Systems with a fixed pool of rollout GPUs."""

from __future__ import annotations

from typing import ClassVar

from rose_sim.systems.base import System


class Roll(System):
    """ROLL: synchronous steps on dedicated GPUs (GRPO, or DAPO by the scenario's algorithm)."""

    name = "roll"
    source = "ROLL (alibaba/ROLL); the paper's resource-fixed baseline"
    assumptions: ClassVar[tuple[str, ...]] = (
        "dedicated GPUs only; weights by broadcast inside the cluster",
        "DAPO launches as many groups as its acceptance rate calls for, and stops when enough are useful",
    )


class AReal(System):
    """AReaL on ROLL: rollout overlaps training, within a staleness bound."""

    name = "areal"
    source = "AReaL (arXiv 2505.24298), as re-implemented on ROLL by RollArt (arXiv 2512.22560)"
    assumptions: ClassVar[tuple[str, ...]] = (
        "staleness bound 1, as in RollArt's re-implementation",
        "engines take a new version at once; trajectories under way go on with it, their KV is computed anew",
        "the paper's ratio is read as one on the DAPO workload: only so do its ratios to ROLL agree",
    )
    staleness = 1


class RollArtFlat(AReal):
    """RollArt without its hardware affinity: the same asynchronous pipeline over whatever GPUs there are."""

    name = "rollart-flat"
    source = "RollArt (arXiv 2512.22560, OSDI'26), hardware affinity off"
    assumptions: ClassVar[tuple[str, ...]] = (
        "staleness bound 1, its default; trajectories under way go on with a new version",
        "turns go to the least loaded engine of any kind, and then where their prefix is",
    )


class RollArt(RollArtFlat):
    """RollArt: prefill-heavy tasks on GPUs rich in compute, decode-heavy ones on those rich in bandwidth."""

    name = "rollart"
    source = "RollArt (arXiv 2512.22560, OSDI'26); rose.core.tokenmix and its routing"
    assumptions: ClassVar[tuple[str, ...]] = (
        "staleness bound 1, its default; trajectories under way go on with a new version",
        "affinity is ROSE's own: the measured token mix of a task, as a preference and not a partition",
    )
    hardware_affinity = True
