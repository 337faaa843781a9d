"""Which trajectory a turn belongs to.

Names are compared whole, never by prefix or hash of a part.  In this order:

0. in the path: `/rose/v1/jobs/{job}/sessions/{session}/...`
1. header `x-rose-trajectory`
2. in the body: `session_id` (vLLM), `rid` (SGLang)
3. header `X-Session-ID` (vLLM), then `X-SMG-Routing-Key` (SGLang's gateway)

A turn without any is guessed at, by OpenAI's `user` or else by how its prompt begins: a guess prefers the
replica that holds the prefix, but does not crowd it, and says nothing to who reads the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import structlog

from rose_daemon.scheduler.errors import bad_request
from rose_daemon.scheduler.requests import Request

_NAME_MAX = 256

log = structlog.get_logger()


class Identity(NamedTuple):
    """The trajectory of a turn."""

    trajectory: str
    guessed: bool = False


class Identifier:
    """Finds the trajectory of each turn; says once that clients leave it out."""

    def __init__(self) -> None:
        self._said = False

    def identify(self, headers: Mapping[str, str], request: Request, session: str = "") -> Identity | None:
        """The trajectory, or None for a turn that shows no sign of one; `session` is that of its path.

        Raises Refused (400).
        """
        named = (
            session
            or header_name(headers, "x-rose-trajectory")
            or request.trajectory
            or header_name(headers, "X-Session-ID")
            or header_name(headers, "X-SMG-Routing-Key")
        )
        if named:
            return Identity(named)
        if not self._said:
            self._said = True
            text = "turns name no trajectory; their replica is guessed from user or the prompt's beginning"
            log.info("trajectory_unnamed", text=text)
        if request.user:
            return Identity(f"user:{request.user}", guessed=True)
        return Identity(f"opening:{request.opening}", guessed=True) if request.opening else None


def header_name(headers: Mapping[str, str], header: str) -> str | None:
    """A header that names something.  Raises Refused (400) for one that cannot be a name."""
    value = headers.get(header, "").strip()
    if not value:
        return None
    if not _is_name(value):
        raise bad_request(
            f"{header} must be at most {_NAME_MAX} printable ASCII characters", code="bad_header"
        )
    return value


def path_name(parts: Mapping[str, str], part: str) -> str:
    """A part of the path that names something, empty if the path has none.  Raises Refused (400)."""
    value = parts.get(part, "")
    if value and not _is_name(value):
        raise bad_request(f"the {part} in the path must be at most {_NAME_MAX} printable ASCII characters")
    return value


def _is_name(value: str) -> bool:
    return len(value) <= _NAME_MAX and value.isprintable() and value.isascii()
