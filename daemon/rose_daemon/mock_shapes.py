"""Requests and answers of the mock engine, in the shapes vLLM 0.32 gives them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rose_daemon import mock_model


@dataclass(frozen=True)
class Generation:
    """A generation request, understood."""

    chat: bool
    prompt: list[int]
    tokens_max: int
    logprobs: int | None
    stream: bool
    body: dict[str, Any]

    def wants(self, name: str) -> bool:
        """Whether a flag of the body is set."""
        return bool(self.body.get(name))


class Shaper:
    """Shows tokens as vLLM 0.32 does."""

    def __init__(self, name: str, model: str, generation: Generation) -> None:
        self._generation = generation
        self._text = mock_model.TextStream()
        self._shown: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[str, Any]] = []
        self._ending: tuple[str, str | None] = ("length", None)
        self._prompt_shown = False
        kind = "chat.completion.chunk" if generation.chat else "text_completion"
        self._head = {"id": name, "object": kind, "created": int(time.time()), "model": model}

    def opening(self) -> dict[str, Any]:
        """The first chunk of a chat."""
        chunk = self._chunk({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        return chunk | self._prompt_ids()

    def token(self, sampled: mock_model.Sample, finish_reason: str | None) -> dict[str, Any]:
        """The chunk of one token."""
        text = "" if finish_reason == "stop" else self._text.feed(sampled.token)
        self._shown.append(text)
        self._token_ids.append(sampled.token)
        if finish_reason is not None:
            self._ending = (finish_reason, None)
        choice: dict[str, Any] = {"finish_reason": finish_reason, "logprobs": None}
        if self._generation.logprobs is not None:
            self._logprobs.append(self._logprob(sampled))
            choice["logprobs"] = self._logprob_table(self._logprobs[-1:])
        if finish_reason is not None:
            choice["stop_reason"] = None
        return self._output(choice, text, [sampled.token])

    def end(self, finish_reason: str, stop_reason: str | None) -> dict[str, Any]:
        """A last chunk without a token."""
        self._ending = (finish_reason, stop_reason)
        choice = {"finish_reason": finish_reason, "stop_reason": stop_reason, "logprobs": None}
        return self._output(choice, "", [])

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk after the last one."""
        return self._head | {"choices": [], "usage": self._usage()}

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        finish_reason, stop_reason = self._ending
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "stop_reason": stop_reason}
        choice["logprobs"] = self._logprob_table(self._logprobs) if self._logprobs else None
        text = "".join(self._shown)
        body = dict(self._head)
        if self._generation.chat:
            body["object"] = "chat.completion"
            choice["message"] = {"role": "assistant", "content": text}
            body |= self._prompt_ids()
        else:
            choice["text"] = text
            choice |= self._prompt_ids()
        if self._generation.wants("return_token_ids"):
            choice["token_ids"] = self._token_ids
        return body | {"choices": [choice], "usage": self._usage()}

    def _output(self, choice: dict[str, Any], text: str, token_ids: list[int]) -> dict[str, Any]:
        if self._generation.chat:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
            choice |= self._prompt_ids()
        if self._generation.wants("return_token_ids"):
            choice["token_ids"] = token_ids
        return self._chunk(choice)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._head | {"choices": [{"index": 0} | choice]}

    def _prompt_ids(self) -> dict[str, Any]:
        if self._prompt_shown or not self._generation.wants("return_token_ids"):
            return {}
        self._prompt_shown = True
        return {"prompt_token_ids": self._generation.prompt}

    def _usage(self) -> dict[str, int]:
        prompt, output = len(self._generation.prompt), len(self._token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def _logprob(self, sampled: mock_model.Sample) -> dict[str, Any]:
        pairs = ((sampled.token, sampled.logprob), (sampled.second, sampled.second_logprob))
        texts = [(mock_model.decode([token]), logprob) for token, logprob in pairs]
        return {"token": texts[0][0], "logprob": texts[0][1], "top": texts}

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


def understand(chat: bool, body: dict[str, Any], context: int) -> Generation | str:
    """The request, or why it is refused."""
    if chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            return "messages: field required"
        prompt = mock_model.chat_prompt(messages)
        limit: int = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        logprobs = body.get("top_logprobs") or 0 if body.get("logprobs") else None
    else:
        given = body.get("prompt")
        if not given:
            return "Either prompt or prompt_embeds must be provided and non-empty."
        prompt = mock_model.encode(given) if isinstance(given, str) else list(given)
        limit = body.get("max_tokens") or 16
        logprobs = body.get("logprobs")
    if not 0 <= float(body.get("temperature") or 0) <= 100:
        return "temperature must be non-negative"
    room = context - len(prompt)
    if room <= 0:
        return f"This model's maximum context length is {context} tokens."
    return Generation(chat, prompt, min(limit or room, room), logprobs, bool(body.get("stream")), body)
