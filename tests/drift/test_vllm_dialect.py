"""What the gateway reads and writes in vLLM's dialect is what vLLM's own models write and read."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import msgspec
import pytest
from rose_daemon.scheduler.dialects import chunk_writer, parse, vllm, whole_body
from rose_daemon.scheduler.fleet import VLLM_REFUSED
from rose_daemon.scheduler.output import Alternative, Answer, AttemptRecord, Choice, Piece, TokenLogprob
from rose_daemon.scheduler.requests import Dialect

from rose.units import ReplicaId, WeightVersion

pytestmark = pytest.mark.engine

PROTOCOL = "vllm.entrypoints.scale_out.token_in_token_out.protocol"


@pytest.fixture(scope="module")
def protocol() -> Any:
    return importlib.import_module(PROTOCOL)


def entry(text: bool) -> TokenLogprob:
    name = "a" if text else "token_id:7"
    return TokenLogprob(name, -0.5, [97], (Alternative(name, -0.5, [97]),))


def answer(text: bool) -> Answer:
    choice = Choice("a", [7], [entry(text)], finish_reason="length", prompt_token_ids=[1, 2])
    return Answer(
        turn_id="t",
        trajectory="walk",
        dialect=Dialect.GENERATE,
        model="m",
        created=1,
        choices=[choice],
        usage={"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
        replica=ReplicaId("r"),
        attempts=[AttemptRecord(ReplicaId("r"), 1, "finished")],
        weight_versions=[(0, 0, WeightVersion(3))],
    )


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_answers_are_vllms(protocol: Any, mode: str) -> None:
    text = mode == "text"
    asked = protocol.GenerateRequest(
        token_ids=[1, 2], sampling_params={"logprobs": 1, "seed": 5}, output_mode=mode, return_token_ids=True
    )
    document = asked.model_dump(mode="json", exclude={"sampling_params"})
    document["sampling_params"] = msgspec.to_builtins(asked.sampling_params)
    request = parse(Dialect.GENERATE, msgspec.json.encode(document))
    assert (request.body["prompt"], request.body["seed"], request.logprobs) == ([1, 2], 5, 1)
    kind = protocol.GenerateTextResponse if text else protocol.GenerateTokensResponse
    whole = kind.model_validate(whole_body(answer(text), request))
    (choice,) = whole.choices
    assert choice.weight_versions[0].version == "3"
    assert (choice.token_ids, choice.finish_reason, whole.prompt_token_ids) == ([7], "length", [1, 2])
    writer = chunk_writer(request, "t", "m", 1)
    first = Piece(text="", token_ids=[], prompt_token_ids=[1, 2])
    last = Piece(text="a", token_ids=[7], logprobs=[entry(text)], finish_reason="length")
    chunk = protocol.GenerateTextStreamResponse if text else protocol.GenerateTokensStreamResponse
    events = writer.events(first, 3) + writer.events(last, 3) + writer.last(answer(text))
    data = [one.removeprefix(b"data: ") for one in events.split(b"\n\n") if one]
    chunks = [chunk.model_validate_json(one) for one in data]
    assert chunks[0].prompt_token_ids == [1, 2]
    assert chunks[-1].choices[0].weight_versions[0].end == 1


def test_no_sampling_option_is_lost_in_silence() -> None:
    """Every field of SamplingParams is one of a completion, or taken care of, or refused if it is set."""
    params = importlib.import_module("vllm.sampling_params").SamplingParams
    completion = importlib.import_module("vllm.entrypoints.openai.completion.protocol").CompletionRequest
    known = set(params.__struct_fields__)
    assert vllm._SAMPLING - known == set()
    assert vllm._SAMPLING - set(completion.model_fields) == set()
    assert {"max_tokens", "logprobs", "extra_args"} <= known


def test_the_endpoints_are_vllms() -> None:
    router = importlib.import_module("vllm.entrypoints.rl.online.api_router").router
    paths = {route.path for route in router.routes}
    answered = {"/pause", "/resume", "/is_paused", "/abort_requests", "/weight_info", "/get_world_size"}
    answered |= {"/finish_weight_update", "/update_weight_version"}
    assert paths == answered | {f"/{name}" for name in VLLM_REFUSED if name not in ("sleep", "wake_up")}


def test_an_engine_takes_the_trace_context_that_the_gateway_sends() -> None:
    tracing = importlib.import_module("vllm.tracing")
    sent = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "v=1"}
    assert tracing.extract_trace_headers(sent | {"x-request-id": "r"}) == sent
    context = importlib.import_module("opentelemetry.trace").get_current_span(
        tracing.extract_trace_context(sent)
    )
    assert context.get_span_context().trace_id == int("a" * 32, 16)
    engine = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
    assert "otlp_traces_endpoint" in {field.name for field in dataclasses.fields(engine)}
