"""Times on the command line: how far back, and when."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

import typer

from rose.errors import ConfigError

_SINCE = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

SinceOption = Annotated[str, typer.Option("--since", help="How far back: 90s, 15m, 24h, 7d.")]


def seconds(text: str) -> float:
    """A time such as `24h` in seconds.  Raises ConfigError."""
    match = _SINCE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--since {text!r} is no time", "such as 90s, 15m, 24h or 7d")
    return float(match[1]) * _UNIT_S[match[2]]


def clock(at_s: float) -> str:
    """A Unix time to read, in UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
