"""Sampling options of the mock engine: enough of each that a wrongly continued request shows.

Options with memory depend on the tokens that this very request has made, as in an engine: a continuation
that starts with an empty memory takes another way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from rose_daemon import mock_model

_WITH_MEMORY = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words",
    "structured_outputs", "response_format", "tools", "thinking_token_budget", "vllm_xargs", "watermarking",
    "repetition_detection",
)  # fmt: skip
_NEUTRAL: tuple[Any, ...] = (None, 0, 1, [], {}, {"type": "text"})


class Step(NamedTuple):
    """One sampled token, the text it completes, and how it ends the choice, if it does."""

    sample: mock_model.Sample
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    delta: dict[str, Any] | None = None
    """What a chat shows in place of the text: part of a tool call."""


class Sampler:
    """The tokens of one choice after `prompt`; `index` sets the samples of one prompt apart."""

    def __init__(self, prompt: Sequence[int], body: dict[str, Any], index: int, tokens_max: int) -> None:
        self._tokens = list(prompt)
        self._body = body
        self._tokens_max = tokens_max
        self._memory = [f"{name}={body[name]}" for name in _WITH_MEMORY if body.get(name) not in _NEUTRAL]
        self._index = f"choice {index}" if index else ""
        self._stream = mock_model.TextStream()
        self._text = ""
        self.output: list[int] = []
        stop = body.get("stop") or []
        self._stops = [stop] if isinstance(stop, str) else list(stop)

    def step(self, version: int) -> Step:
        """Sample the next token under weights `version`."""
        sampled = self._allowed(mock_model.sample(self._tokens, version, self._state()))
        self._tokens.append(sampled.token)
        self.output.append(sampled.token)
        ends = sampled.token == mock_model.EOS and not self._body.get("ignore_eos")
        if ends:
            return Step(sampled, "", "stop", None)
        if sampled.token in (self._body.get("stop_token_ids") or ()):
            return Step(sampled, "", "stop", sampled.token)
        text = self._stream.feed(sampled.token)
        self._text += text
        for stop in self._stops:
            place = self._text.find(stop)
            if place >= 0:
                kept = place + len(stop) if self._body.get("include_stop_str_in_output") else place
                cut = len(self._text) - kept
                return Step(sampled, text[: max(0, len(text) - cut)], "stop", stop)
        return Step(sampled, text, "length" if len(self.output) == self._tokens_max else None, None)

    def _state(self) -> str:
        """What the draw depends on beside the tokens and the weights."""
        parts = [self._index]
        if self._memory:
            parts += [*self._memory, hashlib.blake2b(str(self.output).encode()).hexdigest()]
        if self._body.get("seed") is not None and self._body.get("temperature"):
            parts.append(f"seed {self._body['seed']} draw {len(self.output)}")
        return "|".join(part for part in parts if part)

    def _allowed(self, sampled: mock_model.Sample) -> mock_model.Sample:
        """The token, or another one where an option forbids it."""
        allowed = self._body.get("allowed_token_ids")
        if allowed:
            return sampled._replace(token=sorted(allowed)[sampled.token % len(allowed)])
        least = self._body.get("min_tokens") or 0
        if sampled.token == mock_model.EOS and len(self.output) < least:
            return sampled._replace(token=sampled.second)
        return sampled
