"""Client requests: what is kept across a cut, what begins again."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rose_daemon.scheduler.dialects import parse
from rose_daemon.scheduler.errors import Refused
from rose_daemon.scheduler.requests import Dialect, Request, derived_seed

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def read(body: Any, dialect: Dialect = Dialect.CHAT) -> Request:
    return parse(dialect, msgspec.json.encode(body))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3},
        {"stop": None, "stop_token_ids": [2], "ignore_eos": True},
        {"stop": [], "tools": [], "tool_choice": "auto", "logit_bias": {}, "presence_penalty": 0},
        {"n": 1, "repetition_penalty": 1.0, "min_tokens": 0, "response_format": {"type": "text"}},
        {"logprobs": True, "top_logprobs": 3, "max_completion_tokens": 7, "stream": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    ],
)
def test_stateless_sampling_can_resume(more: dict[str, Any]) -> None:
    assert read(CHAT | more).restart_reason == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ["\n"]),
        ("stop", "\n"),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("min_tokens", 3),
        ("logit_bias", {"5": 1}),
        ("n", 2),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "a+"}),
        ("bad_words", ["x"]),
        ("echo", True),
        ("thinking_token_budget", 5),
        ("something_new", 1),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ],
)
def test_sampling_with_memory_starts_again(name: str, value: Any) -> None:
    assert read(CHAT | {name: value}).restart_reason == name


def test_a_batch_of_prompts_starts_again() -> None:
    request = read({"prompt": ["a", "b"], "n": 2}, Dialect.COMPLETION)
    assert (request.choices, request.restart_reason) == (4, "prompt")


def test_the_first_body_is_the_clients_own_with_tokens_shown() -> None:
    body = read(CHAT | {"temperature": 0.5, "request_id": "mine", "stop": ["x"]}).first_body("served")
    assert body == CHAT | {
        "model": "served",
        "temperature": 0.5,
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def test_a_resumed_body_carries_sampling_and_the_rest_of_the_budget() -> None:
    request = read(
        CHAT | {"temperature": 0.5, "seed": 9, "logprobs": True, "top_logprobs": 2, "max_tokens": 10}
    )
    body = request.resumed_body("served", [1, 2], [3, 4, 5], 7)
    assert body["prompt"] == [1, 2, 3, 4, 5]
    assert body["max_tokens"] == 7
    assert body["temperature"] == 0.5
    assert body["logprobs"] == 2
    assert body["seed"] == derived_seed(9, 3)
    assert "messages" not in body
    assert "top_logprobs" not in body


def test_the_limit_of_tokens() -> None:
    assert read(CHAT).tokens_max is None
    assert read(CHAT | {"max_tokens": 5}).tokens_max == 5
    assert read(CHAT | {"max_tokens": 5, "max_completion_tokens": 6}).tokens_max == 6
    assert read({"prompt": "x"}, Dialect.COMPLETION).tokens_max == 16


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 100_000))
def test_derived_seeds_are_int64_and_differ(seed: int, tokens: int) -> None:
    derived = derived_seed(seed, tokens)
    assert 0 <= derived < 2**63
    assert derived == derived_seed(seed, tokens)
    assert derived != derived_seed(seed, tokens + 1)


def test_the_digest_is_of_content_not_of_form() -> None:
    one = read(CHAT | {"top_p": 1.0, "temperature": 1.0})
    other = read(
        {"temperature": 1.0, "top_p": 1.0}
        | CHAT
        | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert one.digest == other.digest
    assert one.digest != read(CHAT | {"temperature": 0.9, "top_p": 1.0}).digest


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
            st.sampled_from(["messages", "prompt", "n", "max_tokens", "stream", "stop", "content", "x"]),
            inner, max_size=5,
        ),
        max_leaves=15,
    ),
    st.sampled_from(list(Dialect)),
)  # fmt: skip
def test_any_json_is_understood_or_refused(body: Any, dialect: Dialect) -> None:
    with contextlib.suppress(Refused):
        assert read(body, dialect).choices >= 1


def test_a_completion_may_carry_what_only_chat_reads() -> None:
    assert read({"prompt": "x", "messages": "not a list"}, Dialect.COMPLETION).restart_reason == ""


@given(st.binary(max_size=200))
def test_any_bytes_are_understood_or_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        parse(Dialect.CHAT, data)
