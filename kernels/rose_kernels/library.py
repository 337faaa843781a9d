"""Where the compiled libraries of this package lie."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def built_library(name: str) -> Path | None:
    """The library of that name as built for this Python, or None if there is none."""
    folder = Path(__file__).resolve().parent
    return next(
        (path for suffix in EXTENSION_SUFFIXES if (path := folder / f"{name}{suffix}").is_file()), None
    )
