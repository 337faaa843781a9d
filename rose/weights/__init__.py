"""Weights between trainer and engines: sparse, verified, all or nothing.

A trainer uses `Publisher`, or `ShardedPublisher` on every rank; everything else is for hosts and engines.
Importing this package loads neither torch nor an HTTP client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rose.weights.background import BackgroundPublisher
    from rose.weights.publisher import Publisher
    from rose.weights.reports import PublishReport
    from rose.weights.sharded import ShardedPublisher
    from rose.weights.sharding import Sharding

__all__ = ["BackgroundPublisher", "PublishReport", "Publisher", "ShardedPublisher", "Sharding"]

_MODULES = {
    "BackgroundPublisher": "background",
    "PublishReport": "reports",
    "Publisher": "publisher",
    "ShardedPublisher": "sharded",
    "Sharding": "sharding",
}


def __getattr__(name: str) -> object:
    """What a trainer uses loads an HTTP client, which most users of the package have no need of."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"rose.weights.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
