"""What comes from outside, and must be refused in words whatever it is: one target for each kind of input.

A target names valid inputs to begin with, what to call, and the errors that are answers.  Anything else that
is raised is a finding.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from multidict import CIMultiDict
from rose_daemon.scheduler import sglang_engine
from rose_daemon.scheduler.dialects import parse as parse_turn
from rose_daemon.scheduler.engine_streams import DONE, EngineError, EventSplitter, Garbage, OpenAiReader
from rose_daemon.scheduler.errors import Refused
from rose_daemon.scheduler.requests import Dialect
from rose_daemon.scheduler.tracing import context_of
from rose_daemon.service.tokens import Keyring
from rose_daemon.telemetry import engine_metrics

from rose import config, traces, wire
from rose.config import Config
from rose.core.events import ReplicaReport
from rose.errors import ConfigError, CorruptDelta, NotReady
from rose.units import JobId, NodeId, ReplicaId, WeightVersion
from rose.weights import manifest
from rose.weights.bits import Bits
from rose.weights.encoding import encode_version
from rose.weights.relay import control
from rose.weights.relay.http import BulkReply

INTERESTING = (
    b"", b"\x00", b"\xff", b"\xff\xfe", b"\x80", b"\r\n", b"\n\n", b"{}", b"[]", b"null", b"-1", b"1e999",
    b"NaN", b"9" * 40, b'"', b"\\u0000", b"\\ud800", b"../..", b"%2e%2e", b"\xf0\x9f\x98\x80", b"'", b",",
    b"\xc1", b"\xdf\xff\xff\xff\xff",
)  # fmt: skip
_DEEP = 60_000


class Target(NamedTuple):
    """One kind of input."""

    seeds: tuple[bytes, ...]
    call: Callable[[bytes], object]
    answers: tuple[type[Exception], ...]


class Finding(AssertionError):
    """An input that was not answered in words."""


def damaged(seeds: tuple[bytes, ...], rng: random.Random) -> bytes:
    """One of the seeds, damaged in one to eight places."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0:
                del data[at : at + rng.randint(1, 16)]
            case 1:
                data[at:at] = rng.choice(INTERESTING)
            case 2 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 3 if data:
                data[at % len(data)] = rng.randrange(256)
            case 4:
                other = rng.choice(seeds)
                begin = rng.randrange(len(other) + 1)
                data[at : at + rng.randrange(32)] = other[begin : begin + rng.randrange(64)]
            case 5:
                data[at:at] = data[at : at + rng.randint(1, 64)] * rng.randint(1, 4)
            case 6:
                del data[at:]
            case _ if rng.random() < 0.002:
                data[at:at] = rng.choice((b"[", b"{", b'{"a":', b"\x91", b"\x81\xa1a")) * rng.randrange(_DEEP)
    return bytes(data)


def run(target: Target, inputs: int, seed: int) -> int:
    """Feed so many inputs; answers how many were accepted.  Raises Finding."""
    rng = random.Random(seed)
    accepted = 0
    for number in range(inputs):
        data = target.seeds[number] if number < len(target.seeds) else damaged(target.seeds, rng)
        try:
            target.call(data)
        except target.answers:
            continue
        except Exception as error:
            shown = data if len(data) < 2000 else data[:1000] + b"..." + data[-200:]
            raise Finding(
                f"input {number} of seed {seed}: {type(error).__name__}: {error}\n{shown!r}"
            ) from error
        accepted += 1
    return accepted


def _reports() -> tuple[ReplicaReport, ...]:
    report = ReplicaReport(
        ReplicaId("r"), "dedicated", "ready", "http://h:1", "m", WeightVersion(3), gate_open=True
    )
    return (report, msgspec.structs.replace(report, replica=ReplicaId("s"), weight_version=None))


def _to_scheduler() -> tuple[bytes, ...]:
    node = NodeId("host-a")
    return tuple(
        wire.pack(message)
        for message in (
            wire.Register(wire.PROTOCOL, node, "s", _reports()),
            wire.Heartbeat(node, "s", 7, _reports()),
            wire.Goodbye(node, "s"),
        )
    )


def _to_node() -> tuple[bytes, ...]:
    return tuple(
        wire.pack(message)
        for message in (
            wire.Welcome("s", "x"),
            wire.HeartbeatAck(1, {ReplicaId("r"): 2}),
            wire.Unregistered("s"),
            wire.Step(JobId("j"), 1, WeightVersion(2)),
            wire.Lease(ReplicaId("r"), JobId("j"), 1, granted=True),
        )
    )


def _control() -> tuple[bytes, ...]:
    return tuple(
        wire.pack_line(message)
        for message in (
            wire.StatusRequest(),
            wire.ReclaimRequest(ReplicaId("r")),
            wire.GateRequest(ReplicaId("r"), "strict", 5),
            wire.DrainRequest(ReplicaId("r")),
            wire.PinRequest(JobId("j"), WeightVersion(1)),
        )
    )


def _manifests() -> tuple[bytes, ...]:
    words = Bits("BF16", (64,), np.arange(64, dtype="<u2"))
    other = Bits("BF16", (64,), np.arange(64, dtype="<u2") ^ (np.arange(64) % 7 == 0).astype("<u2"))
    anchor = encode_version(JobId("j"), WeightVersion(1), None, None, {"w": words})
    delta = encode_version(JobId("j"), WeightVersion(2), WeightVersion(1), {"w": words}, {"w": other})
    return tuple(manifest.encode(each.manifest) for each in (anchor, delta))


def _json(document: Any) -> bytes:
    return json.dumps(document).encode()


_CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 5,
    "stream": True,
    "seed": 1,
}
_TRACE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
    b"2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,110,27\n"
)
_CONFIG = b"""schema = 1
[node]
id = "a"
tick_ms = 50
[[replicas]]
id = "r"
kind = "dedicated"
model = "/m"
"""
_METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="m"} 1200.0
vllm:generation_tokens_total{engine="0",model_name="m"} 300.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 3.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 4.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 0.3
"""


_TRACE_CONTEXT = f"00-{'0af76519' * 4}-{'b7ad6b71' * 2}-01|vendor=1,other=x".encode()
_CHAT_STREAM = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}],"prompt_token_ids":[1,2]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"a"},"token_ids":[7],"logprobs":{"content":'
    b'[{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[{"token":"a","logprob":-0.5}]}]}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop","stop_reason":null}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
)
_COMPLETION_STREAM = (
    b'data: {"choices":[{"index":0,"text":"a","token_ids":[7],"prompt_token_ids":[1],"logprobs":'
    b'{"tokens":["a"],"token_logprobs":[-0.5],"top_logprobs":[{"a":-0.5}]},"finish_reason":"length"}]}\n\n'
    b"data: [DONE]\n\n"
)


_RELAY_REPLY = b'{"state":"refused","refusal":{"error":"gone","detail":"no such version"},"ticket":"t"}'
_SGLANG_CHUNK = (
    b'{"text":"ab","output_ids":[7],"index":0,"meta_info":{"finish_reason":{"type":"stop","matched":2},'
    b'"prompt_tokens":1,"completion_tokens":1,"output_token_logprobs":[[-0.5,7,"a"]]}}'
)


def _read_trace(directory: Path) -> Callable[[bytes], object]:
    path = directory / "trace.csv"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return traces.read_azure(path)

    return read


def _read_config(directory: Path) -> Callable[[bytes], Config]:
    path = directory / "rose.toml"

    def read(data: bytes) -> Config:
        path.write_bytes(data)
        return config.load(path, {})

    return read


def _scope_of(header: bytes) -> object:
    return Keyring.of("0123456789abcdef").scope_of(header.decode("utf-8", "surrogateescape"))


def _trace_context(header: bytes) -> None:
    """Whatever is handed on can stand in a request to an engine."""
    text = header.decode("utf-8", "surrogateescape")
    parent, _, state = text.partition("|")
    headers = CIMultiDict([("traceparent", parent), ("tracestate", state)])
    for name, value in context_of(headers).items():
        assert name in ("traceparent", "tracestate"), name
        assert value.isascii(), value
        assert value.isprintable(), value


def _engine_stream(dialect: Dialect) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        splitter, reader = EventSplitter(), OpenAiReader(dialect)
        for block in (data[: len(data) // 2], data[len(data) // 2 :]):
            for event in splitter.feed(block):
                if event != DONE:
                    reader.read(event)
        reader.usage()

    return read


def _sglang_reader() -> sglang_engine.Reader:
    return sglang_engine.Reader({"prompt": [1], "logprobs": 1})


def _turn(dialect: Dialect) -> Callable[[bytes], object]:
    return lambda data: parse_turn(dialect, data)


def targets(directory: Path) -> Iterator[tuple[str, Target]]:
    """All of them, by name; `directory` is for files."""
    decode = (msgspec.DecodeError,)
    yield "to_scheduler", Target(_to_scheduler(), wire.unpack_to_scheduler, decode)
    yield "to_node", Target(_to_node(), wire.unpack_to_node, decode)
    yield "control", Target(_control(), wire.unpack_request, decode)
    yield "reply", Target((wire.pack_line(wire.Reply("e", "h", 2, {"a": [1]})),), wire.unpack_reply, decode)
    yield "manifest", Target(_manifests(), manifest.decode, (CorruptDelta,))
    yield "trace", Target((_TRACE,), _read_trace(directory), (ConfigError,))
    yield (
        "metrics",
        Target((_METRICS,), lambda data: engine_metrics.parse(data.decode("utf-8", "replace")), ()),
    )
    yield "config", Target((_CONFIG,), _read_config(directory), (ConfigError,))
    yield "token", Target((b"Bearer 0123456789abcdef",), _scope_of, ())
    yield "trace_context", Target((_TRACE_CONTEXT,), _trace_context, ())
    broken = (Garbage, EngineError)
    yield "engine_chat", Target((_CHAT_STREAM,), _engine_stream(Dialect.CHAT), broken)
    yield "engine_completion", Target((_COMPLETION_STREAM,), _engine_stream(Dialect.COMPLETION), broken)
    yield "engine_sglang", Target((_SGLANG_CHUNK,), lambda data: _sglang_reader().read(data), broken)
    yield "relay_reply", Target((_RELAY_REPLY,), lambda data: control.decode(data, BulkReply), (NotReady,))
    completion = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 3, "logprobs": 2, "stop": ["x"], "n": 1}
    generate = {
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": 3, "temperature": 0.5},
        "stream": False,
    }
    sglang = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3, "top_k": 4}, "rid": "a"}
    bodies = {
        Dialect.CHAT: _CHAT,
        Dialect.COMPLETION: completion,
        Dialect.GENERATE: generate,
        Dialect.SGLANG: sglang,
    }
    for dialect, body in bodies.items():
        yield f"http_{dialect.name.lower()}", Target((_json(body),), _turn(dialect), (Refused,))
