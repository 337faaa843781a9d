"""What a client asks for: checked, classified, and turned into the body of each attempt.

A turn's first attempt is the client's own request with streaming and token ids switched on.  A later one
continues it: `/v1/completions` over the prompt's token ids plus the tokens so far, with the rest of the
token budget.  That is only sound where sampling keeps no state across tokens, so a request with any field
outside the lists below starts again from its prompt instead (`Request.restart_reason`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from rose_daemon.scheduler.errors import bad_request

COMPLETION_TOKENS_DEFAULT = 16
"""OpenAI's and vLLM's `max_tokens` of a completion that names none."""

TOKENS_MAX = (1 << 31) - 1
"""No model has room for more; what the journal cannot hold must not get that far."""

_CARRIED = (
    "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "allowed_token_ids", "priority",
    "cache_salt", "user", "session_id", "return_tokens_as_token_ids", "stream_interval",
)  # fmt: skip
"""Sampling of each token depends on these and the tokens before it, nothing else: sent again as they are."""

_ANSWERED_ONCE = frozenset(
    {
        "model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens",
        "logprobs", "top_logprobs", "seed", "return_token_ids", "add_generation_prompt",
        "continue_final_message", "add_special_tokens", "chat_template", "chat_template_kwargs", "documents",
        "request_id", "reasoning_effort", "metadata", "store", "truncate_prompt_tokens", "truncation_side",
        "parallel_tool_calls", "include_reasoning",
    }
)  # fmt: skip
"""These shape the prompt or the answer, not the sampling; the prompt's token ids contain their effect."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}
"""Values, beside the empty ones, that ask for nothing."""

_UNSUPPORTED = ("use_beam_search", "prompt_logprobs", "prompt_embeds", "best_of")


class Dialect(StrEnum):
    """Which of OpenAI's two APIs the client speaks."""

    CHAT = "chat"
    COMPLETION = "completion"

    @property
    def path(self) -> str:
        """The endpoint, the same on the gateway and on an engine."""
        return "/v1/chat/completions" if self is Dialect.CHAT else "/v1/completions"


class Request(msgspec.Struct, frozen=True):
    """One client request, checked."""

    dialect: Dialect
    body: dict[str, Any]
    model: str | None
    stream: bool
    include_usage: bool
    return_token_ids: bool
    logprobs: int | None
    """Alternatives a token asked for (0: the sampled one only), or None."""
    tokens_max: int | None
    """The client's limit; None leaves it to the model's context."""
    choices: int
    prompt_tokens: int
    """Estimate: token ids counted, text at four characters a token."""
    restart_reason: str
    """The first field that cannot straddle a cut, or empty when the turn can resume from its tokens."""
    digest: str
    """Identifies the content, so that a turn id used for something else is noticed."""

    def first_body(self, model: str) -> dict[str, Any]:
        """The body that asks a replica for the whole turn."""
        body = {key: value for key, value in self.body.items() if key != "request_id"}
        return body | {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }

    def resumed_body(
        self, model: str, prompt_token_ids: list[int], token_ids: list[int], tokens_left: int
    ) -> dict[str, Any]:
        """The body that continues the turn after `token_ids`, for `/v1/completions`."""
        body: dict[str, Any] = {key: self.body[key] for key in _CARRIED if self.body.get(key) is not None}
        seed = self.body.get("seed")
        if seed is not None:
            body["seed"] = derived_seed(seed, len(token_ids))
        if self.logprobs is not None:
            body["logprobs"] = self.logprobs
        return body | {
            "model": model,
            "prompt": [*prompt_token_ids, *token_ids],
            "max_tokens": tokens_left,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }


def derived_seed(seed: int, tokens: int) -> int:
    """Seed of the attempt that begins after `tokens` tokens: fixed by both, within int64.

    Using `seed` again would make the continuation draw the numbers the first tokens were drawn with.
    """
    image = hashlib.blake2b(f"{seed}:{tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(image, "little") >> 1


def parse(dialect: Dialect, data: bytes) -> Request:
    """Check a request body.  Raises Refused (400)."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    for name in _UNSUPPORTED:
        if not _neutral(name, body.get(name)):
            raise bad_request(
                f"`{name}` is not supported through the gateway", code="unsupported", param=name
            )
    stream = _typed(body, "stream", bool, False)
    options = _typed(body, "stream_options", dict, {})
    count = _typed(body, "n", int, 1)
    if not 1 <= count <= 128:
        raise bad_request("`n` must lie between 1 and 128", param="n")
    if dialect is Dialect.CHAT:
        prompts, prompt_tokens = 1, _chat_tokens(body)
        tokens_max = _tokens_max(body, "max_completion_tokens") or _tokens_max(body, "max_tokens")
        logprobs = _typed(body, "top_logprobs", int, 0) if _typed(body, "logprobs", bool, False) else None
    else:
        prompts, prompt_tokens = _prompt_size(body)
        limit = _tokens_max(body, "max_tokens")
        tokens_max = COMPLETION_TOKENS_DEFAULT if limit is None else limit
        logprobs = _typed(body, "logprobs", int, None)
    return Request(
        dialect=dialect,
        body=body,
        model=_typed(body, "model", str, None),
        stream=stream,
        include_usage=options.get("include_usage") is True,
        return_token_ids=_typed(body, "return_token_ids", bool, False),
        logprobs=logprobs,
        tokens_max=tokens_max,
        choices=count * prompts,
        prompt_tokens=prompt_tokens,
        restart_reason=_restart_reason(dialect, body, prompts),
        digest=_digest(dialect, body),
    )


def _typed(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise bad_request(f"`{name}` must be of type {kind.__name__}", param=name)
    return value


def _tokens_max(body: dict[str, Any], name: str) -> int | None:
    value: int | None = _typed(body, name, int, None)
    if value is not None and not 0 <= value <= TOKENS_MAX:
        raise bad_request(f"`{name}` must lie between 0 and {TOKENS_MAX}", param=name)
    return value


def _chat_tokens(body: dict[str, Any]) -> int:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("`messages` must be a non-empty list", param="messages")
    characters = 0
    for message in messages:
        if not isinstance(message, dict):
            raise bad_request("each of `messages` must be an object", param="messages")
        content = message.get("content")
        characters += len(content) if isinstance(content, str) else 0
        if isinstance(content, list):
            characters += sum(len(str(part.get("text", ""))) for part in content if isinstance(part, dict))
    return max(1, characters // 4)


def _prompt_size(body: dict[str, Any]) -> tuple[int, int]:
    """(number of prompts, tokens of all of them, as far as known)."""
    prompt = body.get("prompt")
    if isinstance(prompt, str) and prompt:
        return 1, max(1, len(prompt) // 4)
    if isinstance(prompt, list) and prompt:
        if all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            return 1, len(prompt)
        if all(isinstance(part, str) for part in prompt):
            return len(prompt), max(1, sum(map(len, prompt)) // 4)
        if all(isinstance(part, list) for part in prompt):
            return len(prompt), sum(map(len, prompt))
    raise bad_request(
        "`prompt` must be a non-empty string, list of token ids, or list of either", param="prompt"
    )


def _neutral(name: str, value: Any) -> bool:
    return value is None or value in ("", 0, False) or value in ([], {}) or value in _NEUTRAL.get(name, ())


def _restart_reason(dialect: Dialect, body: dict[str, Any], prompts: int) -> str:
    if prompts > 1:
        return "prompt"
    for name in sorted(body):
        if name not in _ANSWERED_ONCE and name not in _CARRIED and not _neutral(name, body[name]):
            return name
    for message in body["messages"] if dialect is Dialect.CHAT else ():
        content = message.get("content")
        if isinstance(content, list) and any(
            not isinstance(part, dict) or part.get("type") != "text" for part in content
        ):
            return "messages"
    return ""


def _digest(dialect: Dialect, body: dict[str, Any]) -> str:
    content = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    image = msgspec.json.encode([dialect, content], order="deterministic")
    return hashlib.blake2b(image, digest_size=16).hexdigest()
