"""Weights between trainer and engines: sparse, verified, all or nothing.

A trainer uses `Publisher`; everything else is for hosts and engines.  Importing this package loads neither
torch nor an HTTP client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rose.weights.background import BackgroundPublisher
    from rose.weights.publisher import Publisher, PublishReport

__all__ = ["BackgroundPublisher", "PublishReport", "Publisher"]


def __getattr__(name: str) -> object:
    if name == "BackgroundPublisher":
        from rose.weights import background  # noqa: PLC0415

        return background.BackgroundPublisher
    if name in __all__:
        from rose.weights import publisher  # noqa: PLC0415 - loads aiohttp, which most users of the package lack need of

        return getattr(publisher, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
