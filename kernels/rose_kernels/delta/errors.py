"""What can be wrong with bytes that claim to be a delta."""

from __future__ import annotations


class CorruptDelta(ValueError):
    """The bytes are not what an encoder writes, or do not fit the base they are decoded against."""
