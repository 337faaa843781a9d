"""Turns in the traces of their clients (W3C Trace Context).

What a client says of its trace goes on to the engines that work for it.  Where
`scheduler.otlp_traces_endpoint` is set, spans of the gateway's own stand in between
(`rose_daemon.scheduler.spans`, the extra `otel`); without, nothing is recorded and OpenTelemetry is not
imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from rose.errors import ConfigError
from rose.units import ReplicaId, WeightVersion

if TYPE_CHECKING:
    from rose_daemon.scheduler.turns import Outcome

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_STATE = re.compile(r"[\x20-\x7e]{1,512}")


class Headers(Protocol):
    """What is used of a request's headers."""

    def getall(self, key: str, default: Sequence[str], /) -> Sequence[str]:
        """All headers of that name."""


def context_of(headers: Headers) -> dict[str, str]:
    """The trace context that a request carries, as headers; empty without one.

    One that is malformed counts as none, as the standard wants it: it is no reason to refuse a turn, and not
    a byte of it reaches an engine.
    """
    parents = headers.getall("traceparent", ())
    if len(parents) != 1 or not _PARENT.fullmatch(parents[0]):
        return {}
    state = ",".join(headers.getall("tracestate", ()))
    return {"traceparent": parents[0]} | ({"tracestate": state} if _STATE.fullmatch(state) else {})


class TurnTrace:
    """What a trace learns of a turn: nothing, here; its engines get its client's context."""

    def __init__(self, context: Mapping[str, str]) -> None:
        self._context = context

    @property
    def context(self) -> Mapping[str, str]:
        """Headers for the engine of the present attempt."""
        return self._context

    def attempt_began(
        self, replica: ReplicaId, number: int, version: WeightVersion | None, kept: int
    ) -> None:
        """An attempt begins, with `kept` tokens of those before it."""

    def attempt_ended(self, end: str, tokens: int) -> None:
        """It ended, with so many tokens of its own."""

    def happened(self, what: str, **attributes: str | int) -> None:
        """Something else that matters."""

    def ended(self, outcome: Outcome) -> None:
        """The turn has its outcome."""


UNTRACED = TurnTrace({})


class Tracer:
    """Makes the traces of turns; this one records none."""

    def begin(self, context: Mapping[str, str], name: str, attributes: Mapping[str, str | int]) -> TurnTrace:
        """The trace of a turn that arrives now; `context` is its client's."""
        return TurnTrace(context) if context else UNTRACED

    async def close(self) -> None:
        """Send what is left, for some seconds at most."""


def open_tracer(endpoint: str, instance: str) -> Tracer:
    """The tracer that sends to `endpoint` (OTLP over HTTP), or for an empty one the one that records nothing.

    `instance` names this process.  Raises ConfigError where OpenTelemetry is not installed.
    """
    if not endpoint:
        return Tracer()
    try:
        from rose_daemon.scheduler import spans  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"scheduler.otlp_traces_endpoint needs {error.name}, which is not installed",
            "pip install 'rose-coserve[otel]'",
        ) from error
    make: Callable[[str, str], Tracer] = spans.exporting
    return make(endpoint, instance)
