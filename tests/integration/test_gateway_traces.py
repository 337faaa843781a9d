"""Traces from a client over the gateway to the engines: what is passed on, and the spans in between."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from gateway_world import MESSAGES, MODEL, World, world
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from rose_daemon.scheduler import process
from rose_daemon.scheduler.spans import SpanTracer
from rose_daemon.scheduler.tracing import open_tracer
from waiting import until

from rose.errors import ConfigError

CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "ignore_eos": True}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What a scheduler started in this test records."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(process, "open_tracer", lambda *_: SpanTracer(provider))
    yield exporter
    provider.shutdown()


def by_name(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The only turn, and its attempts in the order of their ends."""
    found = exporter.get_finished_spans()
    attempts = [span for span in found if span.name == "attempt"]
    (turn,) = [span for span in found if span.name != "attempt"]
    for attempt in attempts:
        assert attempt.parent is not None
        assert attempt.parent.span_id == turn.context.span_id
        assert attempt.context.trace_id == turn.context.trace_id
    return turn, attempts


def named(span: ReadableSpan) -> str:
    """The traceparent of what happens below a span."""
    flags = int(span.context.trace_flags)
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{flags:02x}"


def events(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


async def test_a_turn_is_a_span_between_its_client_and_its_engine(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with world(tmp_path, engines=1) as made:
        await made.post(
            "/v1/chat/completions", CHAT | {"max_tokens": 7},
            traceparent=SAMPLED, tracestate="v=1", x_rose_turn_id="t1", x_rose_trajectory="walk",
        )  # fmt: skip
    turn, (attempt,) = by_name(spans)
    assert turn.name == f"chat {MODEL}"
    assert turn.kind is SpanKind.SERVER
    assert turn.parent is not None
    assert (f"{turn.parent.trace_id:032x}", f"{turn.parent.span_id:016x}") == (TRACE, PARENT)
    assert turn.context.trace_state.get("v") == "1"
    said = dict(turn.attributes or {})
    assert (
        said.items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": MODEL,
            "gen_ai.conversation.id": "walk",
            "gen_ai.usage.output_tokens": 7,
            "gen_ai.response.finish_reasons": ("length",),
            "rose.job": "job-0",
            "rose.turn_id": "t1",
            "rose.outcome": "finished",
            "rose.attempts": 1,
        }.items()
    )
    assert events(turn) == ["first_token"]
    assert attempt.kind is SpanKind.CLIENT
    assert dict(attempt.attributes or {}).items() >= {
        "rose.replica": "replica-0", "rose.weight_version": 0, "rose.tokens.kept": 0, "rose.end": "finished",
    }.items()  # fmt: skip
    assert {turn.status.status_code, attempt.status.status_code} == {StatusCode.UNSET}
    assert made.engines[0].state.traceparents == [named(attempt)]
    texts = [str(value) for span in (turn, attempt) for value in (span.attributes or {}).values()]
    assert not [text for text in texts if MESSAGES[0]["content"] in text], "a prompt is in a span"


async def test_a_turn_that_moves_has_a_span_for_each_attempt(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with world(tmp_path, token_ms=5.0) as made:
        asking = asyncio.create_task(made.post("/v1/chat/completions", CHAT, traceparent=SAMPLED))
        first = await made.running_turn()
        second = next(engine for engine in made.engines if engine is not first)
        first.state.fail_status, first.state.fail_count = 503, 1000  # it goes on elsewhere, in the end
        first.state.abort("rose:kv_budget_cut")
        status, _ = await asking
        assert status == 200
    turn, attempts = by_name(spans)
    ends = [(span.attributes or {})["rose.end"] for span in attempts]
    assert ends[0] == "rose:kv_budget_cut"
    assert ends[-1] == "finished"
    assert attempts[0].status.status_code is StatusCode.UNSET, "the engine did as it was told"
    for span, end in zip(attempts, ends, strict=True):
        failed = span.status.status_code is StatusCode.ERROR
        assert failed == str(end).startswith("engine_status"), end
    assert (attempts[-1].attributes or {})["rose.tokens.kept"] != 0
    assert [event for event in events(turn) if event != "rerouted"] == ["first_token"]
    moved = [event.attributes or {} for event in turn.events if event.name == "rerouted"]
    assert moved[-1]["rose.replica"] == second.state.name
    assert second.state.traceparents == [named(attempts[-1])]
    assert first.state.traceparents == [named(attempts[0])]


async def test_outcomes_that_are_no_answer(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    async with world(tmp_path, engines=1, turn_stall_timeout_s=600) as made:
        made.engines[0].state.fail_status, made.engines[0].state.fail_count = 400, 1
        status, _ = await made.post("/v1/chat/completions", CHAT)
        assert status == 400
        turn, _ = by_name(spans)
        assert turn.parent is None, "a client without a trace begins none: it is the gateway's"
        assert dict(turn.attributes or {}).items() >= {
            "rose.outcome": "failed", "error.type": "engine_refused", "http.response.status_code": 400,
        }.items()  # fmt: skip
        assert turn.status.status_code is StatusCode.ERROR
        spans.clear()
        asking = asyncio.create_task(made.post("/v1/chat/completions", CHAT | {"max_tokens": 1500}))
        await made.running_turn()
        asking.cancel()
        await until(lambda: len(spans.get_finished_spans()) == 2)
        turn, (attempt,) = by_name(spans)
        assert (turn.attributes or {})["rose.outcome"] == "cancelled"
        assert (attempt.attributes or {})["rose.end"] == "cancelled"
        assert attempt.status.status_code is StatusCode.UNSET


async def test_who_joins_or_begins_again_is_told_of(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    async with world(tmp_path, engines=2, token_ms=5.0) as made:
        # A penalty over all tokens so far cannot straddle a cut: such a turn begins again.
        body = CHAT | {"repetition_penalty": 1.2}
        both = [
            asyncio.create_task(made.post("/v1/chat/completions", body, x_rose_turn_id="t")) for _ in range(2)
        ]
        engine = await made.running_turn()
        engine.state.stalled = True
        await until(lambda: made.scheduler.dispatcher.book.counts.joined == 1)
        engine.state.abort("rose:kv_budget_cut")
        engine.state.stalled = False
        assert [status for status, _ in await asyncio.gather(*both)] == [200, 200]
    turn, attempts = by_name(spans)
    assert len(attempts) == 2
    assert {"joined", "restarted"} <= set(events(turn))
    assert (attempts[-1].attributes or {})["rose.tokens.kept"] == 0


async def test_a_client_that_does_not_sample_is_followed(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    async with world(tmp_path, engines=1) as made:
        await made.post("/v1/chat/completions", CHAT, traceparent=f"00-{TRACE}-{PARENT}-00")
        (sent,) = made.engines[0].state.traceparents
    assert spans.get_finished_spans() == ()
    assert sent is not None
    assert sent.startswith(f"00-{TRACE}-")
    assert sent.endswith("-00")


BAD = [
    "", "junk", SAMPLED.upper(), SAMPLED[:-1], f"{SAMPLED}-more", f"ff{SAMPLED[2:]}",
    f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", "é" * 55, "x" * 4000,
]  # fmt: skip


@pytest.mark.parametrize("recording", [False, True])
async def test_a_context_goes_on_unless_it_is_malformed(
    tmp_path: Path, request: pytest.FixtureRequest, recording: bool
) -> None:
    if recording:
        request.getfixturevalue("spans")
    async with world(tmp_path, engines=1) as made:
        sent = made.engines[0].state.traceparents
        url = made.url + "/v1/chat/completions"
        for number, parents in enumerate([[SAMPLED], *([text] for text in BAD), [SAMPLED, SAMPLED], []]):
            headers = [("traceparent", text) for text in parents]
            async with made.http.post(url, json=CHAT | {"max_tokens": 2}, headers=headers) as response:
                assert response.status == 200, (await response.text(), parents)
            assert len(sent) == number + 1
            if recording:
                assert sent[-1] is not None
                assert (TRACE in sent[-1]) == (parents == [SAMPLED])
            else:
                assert sent[-1] == (SAMPLED if parents == [SAMPLED] else None)


class Collector:
    """Takes spans in as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.services: set[str] = set()
        self.names: list[str] = []

    async def take(self, http: web.Request) -> web.Response:
        batch = ExportTraceServiceRequest.FromString(await http.read())
        for resource in batch.resource_spans:
            attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.services.add(attributes["service.name"])
            self.names += [span.name for scope in resource.scope_spans for span in scope.spans]
        return web.Response()


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, Collector]]:
    made, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", made.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces", made
    finally:
        await runner.cleanup()


async def asked_once(made: World) -> None:
    status, _ = await made.post("/v1/chat/completions", CHAT | {"max_tokens": 3})
    assert status == 200


async def test_spans_reach_a_collector_before_the_scheduler_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    async with collector() as (url, got):
        async with world(tmp_path, engines=1, otlp_traces_endpoint=url) as made:
            await asked_once(made)
        await until(lambda: len(got.names) == 2)
        assert sorted(got.names) == ["attempt", f"chat {MODEL}"]
        assert got.services == {"rose-scheduler"}


async def test_a_collector_that_is_gone_costs_spans_and_no_turn(tmp_path: Path) -> None:
    async with collector() as (url, got):
        pass
    async with world(tmp_path, engines=1, otlp_traces_endpoint=url) as made:
        await asked_once(made)
        async with aiohttp.ClientSession() as session, session.get(f"{made.url}/health") as response:
            assert response.status == 200
    assert got.names == []


def test_without_the_library_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rose_daemon.scheduler.spans", raising=False)
    monkeypatch.delattr("rose_daemon.scheduler.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint needs opentelemetry.*rose-coserve\[otel\]"):
        open_tracer("http://127.0.0.1:4318/v1/traces", "a")


def test_switched_off_it_is_not_even_imported() -> None:
    code = (
        "import sys, rose_daemon.scheduler.process\n"
        "from rose_daemon.scheduler.tracing import open_tracer\n"
        "open_tracer('', 'a')\n"
        "sys.exit(any(name.partition('.')[0] == 'opentelemetry' for name in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
