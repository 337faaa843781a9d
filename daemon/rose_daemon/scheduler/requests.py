"""What a client asks for, understood: the same for all dialects.

A turn's first attempt asks an engine for the whole of it, through one of OpenAI's two endpoints, with
streaming and token ids switched on: a chat as the client sent it, anything else as `/v1/completions`.  A
later attempt continues it: `/v1/completions` over the prompt's token ids plus the tokens so far, with the
rest of the token budget.  That is only sound where sampling keeps no state across tokens, so a request with
any field outside the lists below starts again from its prompt instead (`Request.restart_reason`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from rose.core.versions import VersionWish

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


class Dialect(StrEnum):
    """Which API the client speaks."""

    CHAT = "chat"
    """OpenAI's /v1/chat/completions."""
    COMPLETION = "completion"
    """OpenAI's /v1/completions."""
    GENERATE = "generate"
    """vLLM's /inference/v1/generate."""
    SGLANG = "sglang"
    """SGLang's /generate."""

    @property
    def path(self) -> str:
        """The gateway's endpoint; the same on an engine that speaks the dialect."""
        return _PATHS[self]


_PATHS = {
    Dialect.CHAT: "/v1/chat/completions",
    Dialect.COMPLETION: "/v1/completions",
    Dialect.GENERATE: "/inference/v1/generate",
    Dialect.SGLANG: "/generate",
}


class GenerateView(msgspec.Struct, frozen=True):
    """How vLLM's dialect wants its answer."""

    request_id: str
    text: bool
    """`output_mode` is `text`."""
    logprobs: int | None


class SglangView(msgspec.Struct, frozen=True):
    """How SGLang's dialect wants its answer."""

    rids: tuple[str, ...]
    """One a prompt, or none."""
    batch: bool
    """The answer is a list."""
    per_prompt: int
    """Samples of each prompt."""
    logprob: bool
    top_logprobs: int
    logprob_text: bool


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One client request, checked."""

    dialect: Dialect
    body: dict[str, Any]
    """For the endpoint that engines are asked at (`asks`)."""
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
    versions: VersionWish = VersionWish()
    names: tuple[str, ...] = ()
    """Ids the client gave the request, by which it may abort it."""
    trajectory: str | None = None
    """Named in the body."""
    user: str = ""
    opening: str = ""
    """A digest of how the prompt begins: all turns of a trajectory share it, and so may others."""
    view: GenerateView | SglangView | None = None

    @property
    def asks(self) -> Dialect:
        """The dialect of the first attempt."""
        return Dialect.CHAT if self.dialect is Dialect.CHAT else Dialect.COMPLETION

    def first_body(self, model: str, cache_salt: str = "") -> dict[str, Any]:
        """The body that asks a replica for the whole turn."""
        body = {key: value for key, value in self.body.items() if key != "request_id"}
        return body | self._salt(cache_salt) | _asked(model)

    def resumed_body(
        self,
        model: str,
        prompt_token_ids: list[int],
        token_ids: list[int],
        tokens_left: int,
        cache_salt: str = "",
    ) -> dict[str, Any]:
        """The body that continues the turn after `token_ids`, for `/v1/completions`."""
        body: dict[str, Any] = {key: self.body[key] for key in _CARRIED if self.body.get(key) is not None}
        seed = self.body.get("seed")
        if seed is not None:
            body["seed"] = derived_seed(seed, len(token_ids))
        if self.logprobs is not None:
            body["logprobs"] = self.logprobs
        body |= {"prompt": [*prompt_token_ids, *token_ids], "max_tokens": tokens_left}
        return body | self._salt(cache_salt) | _asked(model)

    def _salt(self, cache_salt: str) -> dict[str, str]:
        """The gateway's salt of prefix hashes joined to the client's own."""
        if not cache_salt:
            return {}
        return {"cache_salt": f"{self.body.get('cache_salt') or ''}|{cache_salt}"}


def _asked(model: str) -> dict[str, Any]:
    return {
        "model": model,
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


def neutral(name: str, value: Any) -> bool:
    """Whether a field of that value asks for nothing."""
    return value is None or value in ("", 0, False) or value in ([], {}) or value in _NEUTRAL.get(name, ())


def restart_reason(body: Mapping[str, Any], prompts: int, messages: Sequence[Mapping[str, Any]] = ()) -> str:
    """The first field of an engine's body that cannot straddle a cut, or an empty string.

    `messages` are those of a chat.
    """
    if prompts > 1:
        return "prompt"
    for name in sorted(body):
        if name not in _ANSWERED_ONCE and name not in _CARRIED and not neutral(name, body[name]):
            return name
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(
            not isinstance(part, dict) or part.get("type") != "text" for part in content
        ):
            return "messages"
    return ""
