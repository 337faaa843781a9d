"""Spans of turns, by OpenTelemetry: one a turn, and below it one an attempt.

    client's span -> turn (SERVER) -> attempt (CLIENT) -> the engine's own span

Names are those of OpenTelemetry's conventions for generative AI where there is one, `rose.*` otherwise.  No
prompt and no output is in them.  Nothing here waits: spans are put in a bounded queue, and a thread of the
SDK sends them; what does not fit is dropped, and the log says so.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rose import __version__
from rose.units import ReplicaId, WeightVersion
from rose_daemon.scheduler.errors import Failure
from rose_daemon.scheduler.output import Answer
from rose_daemon.scheduler.tracing import Tracer, TurnTrace

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer as SpanMaker

    from rose_daemon.scheduler.turns import Outcome

SERVICE = "rose-scheduler"
_CLOSE_S = 3.0
_NO_FAULT = frozenset({"finished", "cancelled", "aborted_by_client"})
"""Ends of attempts that are nobody's fault; so are those that an engine names `rose:...`: it was told to."""
_USAGE = (
    ("gen_ai.usage.input_tokens", "prompt_tokens"),
    ("gen_ai.usage.output_tokens", "completion_tokens"),
)

_propagator = TraceContextTextMapPropagator()


def exporting(endpoint: str, instance: str) -> SpanTracer:
    """A tracer that sends to a collector.  OTEL_* variables set all that is not said here."""
    attributes = {"service.instance.id": instance, "service.version": __version__}
    if "OTEL_SERVICE_NAME" not in os.environ:
        attributes["service.name"] = SERVICE
    # At the exit of the process it would wait for a collector that may be gone: `close` does, for a while.
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return SpanTracer(provider)


class SpanTracer(Tracer):
    """Makes a span for each turn."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._spans = provider.get_tracer("rose", __version__)

    def begin(self, context: Mapping[str, str], name: str, attributes: Mapping[str, str | int]) -> TurnTrace:
        """As `Tracer`."""
        parent = _propagator.extract(dict(context))
        span = self._spans.start_span(name, parent, SpanKind.SERVER, dict(attributes))
        return _SpannedTurn(self._spans, span, context)

    async def close(self) -> None:
        """As `Tracer`."""
        ending = threading.Thread(target=self._provider.shutdown, name="spans-close", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, _CLOSE_S)


class _SpannedTurn(TurnTrace):
    def __init__(self, spans: SpanMaker, span: Span, context: Mapping[str, str]) -> None:
        super().__init__(context)
        self._spans = spans
        self._turn = span
        self._attempt: Span | None = None
        self._replica = ""
        """Where the attempt before ran."""

    @property
    def context(self) -> Mapping[str, str]:
        """As `TurnTrace`; a turn that is not sampled says so to the engine."""
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, set_span_in_context(self._attempt or self._turn))
        return carrier

    def attempt_began(
        self, replica: ReplicaId, number: int, version: WeightVersion | None, kept: int
    ) -> None:
        """As `TurnTrace`."""
        if self._replica not in ("", replica):
            self._turn.add_event("rerouted", {"rose.replica.from": self._replica, "rose.replica": replica})
        self._replica = replica
        attributes: dict[str, str | int] = {
            "rose.replica": replica, "rose.attempt": number, "rose.tokens.kept": kept,
        }  # fmt: skip
        if version is not None:
            attributes["rose.weight_version"] = version
        self._attempt = self._spans.start_span(
            "attempt", set_span_in_context(self._turn), SpanKind.CLIENT, attributes
        )

    def attempt_ended(self, end: str, tokens: int) -> None:
        """As `TurnTrace`."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        attempt.set_attributes({"rose.end": end, "gen_ai.usage.output_tokens": tokens})
        if end not in _NO_FAULT and not end.startswith("rose:"):
            attempt.set_attribute("error.type", end)
            attempt.set_status(Status(StatusCode.ERROR, end))
        attempt.end()

    def happened(self, what: str, **attributes: str | int) -> None:
        """As `TurnTrace`."""
        self._turn.add_event(what, {f"rose.{name}": value for name, value in attributes.items()})

    def ended(self, outcome: Outcome) -> None:
        """As `TurnTrace`."""
        match outcome:
            case Answer(usage=usage, choices=choices, aborted=aborted):
                reasons = [choice.finish_reason or "" for choice in choices]
                self._turn.set_attributes(
                    {
                        "rose.outcome": "aborted" if aborted else "finished",
                        "rose.attempts": len(outcome.attempts),
                        "gen_ai.response.finish_reasons": reasons,
                    }
                )
                for name, key in _USAGE:
                    if isinstance(count := usage.get(key), int):
                        self._turn.set_attribute(name, count)
            case Failure(status=status, code=code, text=text):
                self._turn.set_attributes(
                    {"rose.outcome": "failed", "error.type": code, "http.response.status_code": status}
                )
                self._turn.set_status(Status(StatusCode.ERROR, text))
            case _:
                self._turn.set_attribute("rose.outcome", "cancelled")
        self._turn.end()
