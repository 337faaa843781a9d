"""Requests and answers of the mock engine, in the shapes vLLM 0.32 gives them."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rose_daemon import mock_model
from rose_daemon.mock_sampling import Sampler, Step
from rose_daemon.mock_script import Reply, ScriptedSampler, reply_to


@dataclass(frozen=True)
class Generation:
    """A generation request, understood."""

    chat: bool
    prompts: list[list[int]]
    per_prompt: int
    tokens_max: list[int]
    """A prompt."""
    logprobs: int | None
    stream: bool
    body: dict[str, Any]
    scripted: tuple[Reply, int] | None = None
    """The reply that a script has for it, and its number."""

    def wants(self, name: str) -> bool:
        """Whether a flag of the body is set."""
        return bool(self.body.get(name))

    def choices(self) -> list[tuple[list[int], int]]:
        """(prompt, most tokens) of each choice, in order of their index."""
        pairs = zip(self.prompts, self.tokens_max, strict=True)
        return [pair for pair in pairs for _ in range(self.per_prompt)]


class Shaper:
    """Shows the output of a request as vLLM 0.32 does."""

    def __init__(self, name: str, model: str, generation: Generation) -> None:
        self._generation = generation
        kind = "chat.completion.chunk" if generation.chat else "text_completion"
        self._head = {"id": name, "object": kind, "created": int(time.time()), "model": model}
        self.cached_tokens = 0
        self.choices = [
            ChoiceShaper(generation, index, prompt, tokens_max)
            for index, (prompt, tokens_max) in enumerate(generation.choices())
        ]

    def opening(self) -> dict[str, Any]:
        """The first chunk of a chat."""
        delta = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        chunk = self._chunk(delta | {"index": 0})
        if self._generation.wants("return_token_ids"):
            chunk["prompt_token_ids"] = self._generation.prompts[0]
        return chunk

    def token(self, choice: ChoiceShaper, step: Step) -> dict[str, Any]:
        """The chunk of one token."""
        return self._chunk(choice.token(step))

    def end(self, choice: ChoiceShaper, finish_reason: str, stop_reason: str | None) -> dict[str, Any]:
        """A last chunk without a token."""
        return self._chunk(choice.end(finish_reason, stop_reason))

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk after the last one."""
        return self._head | {"choices": [], "usage": self._usage()}

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        body = dict(self._head) | {"choices": [choice.whole() for choice in self.choices]}
        if self._generation.chat:
            body["object"] = "chat.completion"
            if self._generation.wants("return_token_ids"):
                body["prompt_token_ids"] = self._generation.prompts[0]
        return body | {"usage": self._usage()}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._head | {"choices": [choice]}

    def _usage(self) -> dict[str, Any]:
        prompt = sum(map(len, self._generation.prompts))
        output = sum(len(choice.sampler.output) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class ChoiceShaper:
    """One choice of a request."""

    def __init__(self, generation: Generation, index: int, prompt: list[int], tokens_max: int) -> None:
        self._generation = generation
        self.index = index
        self.prompt = prompt
        self.sampler: Sampler | ScriptedSampler
        if generation.scripted is not None:
            self.sampler = ScriptedSampler(*generation.scripted, tokens_max)
        else:
            self.sampler = Sampler(prompt, generation.body, index % generation.per_prompt, tokens_max)
        self.open = True
        self._shown: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._ending: tuple[str, int | str | None] = ("length", None)
        self._prompt_shown = generation.chat

    def token(self, step: Step) -> dict[str, Any]:
        """The choice of a chunk with one token."""
        self._shown.append(step.text)
        choice: dict[str, Any] = {"finish_reason": step.finish_reason, "logprobs": None}
        if self._generation.logprobs is not None:
            self._logprobs.append(self._logprob(step.sample))
            choice["logprobs"] = self._logprob_table(self._logprobs[-1:])
        if step.finish_reason is not None:
            self.open = False
            self._ending = (step.finish_reason, step.stop_reason)
            choice["stop_reason"] = step.stop_reason
        return self._output(choice, step.text, [step.sample.token], step.delta)

    def end(self, finish_reason: str, stop_reason: str | None) -> dict[str, Any]:
        """The choice of a last chunk without a token."""
        self.open = False
        self._ending = (finish_reason, stop_reason)
        choice = {"finish_reason": finish_reason, "stop_reason": stop_reason, "logprobs": None}
        return self._output(choice, "", [])

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        finish_reason, stop_reason = self._ending
        choice: dict[str, Any] = {
            "index": self.index,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "logprobs": self._logprob_table(self._logprobs) if self._logprobs else None,
        }
        text = "".join(self._shown)
        if self._generation.chat:
            choice["message"] = {"role": "assistant", "content": text}
            if isinstance(self.sampler, ScriptedSampler) and (calls := self.sampler.calls()):
                choice["message"] |= {"content": None, "tool_calls": calls}
        else:
            choice["text"] = text
        if self._generation.wants("return_token_ids"):
            choice["token_ids"] = self.sampler.output
            if not self._generation.chat:
                choice["prompt_token_ids"] = self.prompt
        return choice

    def _output(
        self, choice: dict[str, Any], text: str, token_ids: list[int], delta: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice["index"] = self.index
        if self._generation.chat:
            choice["delta"] = {"content": text} if delta is None else delta
        if not self._generation.chat:
            choice["text"] = text
        if self._generation.wants("return_token_ids"):
            choice["token_ids"] = token_ids
            if not self._prompt_shown:
                self._prompt_shown = True
                choice["prompt_token_ids"] = self.prompt
        return choice

    def _logprob(self, sampled: mock_model.Sample) -> dict[str, Any]:
        pairs = ((sampled.token, sampled.logprob), (sampled.second, sampled.second_logprob))
        texts = [(self._name(token), logprob) for token, logprob in pairs]
        return {"token": texts[0][0], "logprob": texts[0][1], "top": texts}

    def _name(self, token: int) -> str:
        if self._generation.wants("return_tokens_as_token_ids"):
            return f"token_id:{token}"
        return mock_model.decode([token])

    def _logprob_table(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        alternatives = self._generation.logprobs or 0
        if self._generation.chat:
            return {
                "content": [
                    _chat_entry(entry["token"], entry["logprob"])
                    | {"top_logprobs": [_chat_entry(*other) for other in entry["top"][:alternatives]]}
                    for entry in entries
                ]
            }
        return {
            "text_offset": [0] * len(entries),
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [dict(entry["top"][: alternatives + 1]) for entry in entries],
        }


def _chat_entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", errors="replace"))}


def understand(
    chat: bool, body: dict[str, Any], context: int, script: Sequence[Reply] = ()
) -> Generation | str:
    """The request, or why it is refused."""
    if chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            return "messages: field required"
        prompts = [mock_model.chat_prompt(messages)]
        limit: int = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        logprobs = body.get("top_logprobs") or 0 if body.get("logprobs") else None
    else:
        prompts = _prompts(body)
        if not prompts:
            return "Either prompt or prompt_embeds must be provided and non-empty."
        limit = body.get("max_tokens") or 16
        logprobs = body.get("logprobs")
    if not 0 <= float(body.get("temperature") or 0) <= 100:
        return "temperature must be non-negative"
    rooms = [context - len(prompt) for prompt in prompts]
    if min(rooms) <= 0:
        return f"This model's maximum context length is {context} tokens."
    tokens_max = [min(limit or room, room) for room in rooms]
    stream = bool(body.get("stream"))
    scripted = reply_to(script, body["messages"]) if chat else None
    return Generation(chat, prompts, body.get("n") or 1, tokens_max, logprobs, stream, body, scripted)


def _prompts(body: dict[str, Any]) -> list[list[int]]:
    """Prompts of a completion; an embedding stands for the bytes of its tensor."""
    embeds = body.get("prompt_embeds") or []
    prompts = [list(base64.b64decode(part)) for part in ([embeds] if isinstance(embeds, str) else embeds)]
    given = body.get("prompt") or []
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    return prompts + [mock_model.encode(part) if isinstance(part, str) else list(part) for part in given]
