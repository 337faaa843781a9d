"""The systems that are compared, one small policy each; `get` finds one by name."""

from __future__ import annotations

from rose.errors import ConfigError
from rose_sim.systems.base import System
from rose_sim.systems.elastic import LambdaRl, RlBoostPlus
from rose_sim.systems.fixed import AReal, Roll, RollArt, RollArtFlat
from rose_sim.systems.rose_system import Rose
from rose_sim.systems.shared import Naive, Prism, ServerlessLlm, ServerlessLlmRollout, StaticPartition

SYSTEMS: dict[str, type[System]] = {
    each.name: each
    for each in (
        Rose, Roll, AReal, RlBoostPlus, LambdaRl,
        ServerlessLlm, ServerlessLlmRollout, Prism, StaticPartition, Naive, RollArt, RollArtFlat,
    )
}  # fmt: skip


def get(name: str) -> type[System]:
    """A system by name.  Raises ConfigError."""
    if name not in SYSTEMS:
        raise ConfigError(f"unknown system {name!r}", f"known: {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
