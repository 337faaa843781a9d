"""OpenAI's dialect, as vLLM speaks it: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rose_daemon.scheduler.dialects import fields
from rose_daemon.scheduler.errors import bad_request
from rose_daemon.scheduler.output import Answer, Choice, Piece, TokenLogprob
from rose_daemon.scheduler.requests import Dialect, Request, neutral, restart_reason

_UNSUPPORTED = ("use_beam_search", "prompt_logprobs", "best_of")
_EMBEDS_BYTES_A_TOKEN = 4096
"""To weigh a prompt of embeddings, whose width the gateway does not know."""
_encode = msgspec.json.encode

# ---- requests -------------------------------------------------------------------------------------


def parse(dialect: Dialect, data: bytes) -> Request:
    """Check a request body.  Raises Refused (400)."""
    body = fields.decode(data)
    digest = fields.digest(dialect, body)
    for name in _UNSUPPORTED:
        if not neutral(name, body.get(name)):
            raise bad_request(
                f"`{name}` is not supported through the gateway", code="unsupported", param=name
            )
    versions = fields.wish(body)
    stream = fields.typed(body, "stream", bool, False)
    options = fields.typed(body, "stream_options", dict, {})
    count = fields.choices(body)
    tokens_max = fields.number(body, "max_tokens", 0, fields.TOKENS_MAX, None)
    if dialect is Dialect.CHAT:
        prompts, prompt_tokens, opening = 1, *_chat_size(body)
        limit = fields.number(body, "max_completion_tokens", 0, fields.TOKENS_MAX, None)
        tokens_max = limit or tokens_max
        alternatives = fields.typed(body, "top_logprobs", int, 0)
        logprobs = alternatives if fields.typed(body, "logprobs", bool, False) else None
    else:
        prompts, prompt_tokens, opening = _prompt_size(body)
        tokens_max = fields.COMPLETION_TOKENS_DEFAULT if tokens_max is None else tokens_max
        logprobs = fields.typed(body, "logprobs", int, None)
    return Request(
        dialect=dialect,
        body=body,
        model=fields.typed(body, "model", str, None),
        stream=stream,
        include_usage=options.get("include_usage") is True,
        return_token_ids=fields.typed(body, "return_token_ids", bool, False),
        logprobs=logprobs,
        tokens_max=tokens_max,
        choices=count * prompts,
        prompt_tokens=prompt_tokens,
        restart_reason=restart_reason(body, prompts, body["messages"] if dialect is Dialect.CHAT else ()),
        digest=digest,
        versions=versions,
        names=tuple(filter(None, [fields.name(body, "request_id")])),
        trajectory=fields.name(body, "session_id") or None,
        user=fields.typed(body, "user", str, ""),
        opening=opening,
    )


def _chat_size(body: dict[str, Any]) -> tuple[int, str]:
    """(tokens of all messages, as far as known; how they begin)."""
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
    return max(1, characters // 4), fields.chat_opening(messages)


def _prompt_size(body: dict[str, Any]) -> tuple[int, int, str]:
    """(number of prompts, tokens of all of them, as far as known; how the first begins)."""
    embeds = _embeds(body)
    weight = sum(len(part) * 3 // 4 // _EMBEDS_BYTES_A_TOKEN + 1 for part in embeds)
    prompt = body.get("prompt")
    if isinstance(prompt, str) and prompt:
        return 1 + len(embeds), weight + max(1, len(prompt) // 4), fields.opening(prompt)
    if isinstance(prompt, list) and prompt:
        if all(map(fields.is_token, prompt)):
            return 1 + len(embeds), weight + len(prompt), fields.opening(prompt)
        if all(isinstance(part, str) for part in prompt):
            size = max(1, sum(map(len, prompt)) // 4)
            return len(prompt) + len(embeds), weight + size, fields.opening(prompt[0])
        if all(isinstance(part, list) and all(map(fields.is_token, part)) for part in prompt):
            return len(prompt) + len(embeds), weight + sum(map(len, prompt)), fields.opening(prompt[0])
    if embeds and prompt in (None, "", []):
        return len(embeds), weight, fields.opening(embeds[0])
    raise bad_request(
        "`prompt` must be a non-empty string, list of token ids, or list of either", param="prompt"
    )


def _embeds(body: dict[str, Any]) -> list[str]:
    """`prompt_embeds`: base64 of a tensor as torch saves it, or a list of those; passed through as it is."""
    value = body.get("prompt_embeds")
    parts = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(part, str) and part for part in parts):
        raise bad_request("`prompt_embeds` must be base64 text or a list of such", param="prompt_embeds")
    return parts


# ---- answers --------------------------------------------------------------------------------------


def whole_body(answer: Answer, request: Request, first: int = 0) -> dict[str, Any]:
    """The body of a plain (not streamed) answer, whose choices are numbered from `first` on."""
    chat = answer.dialect is Dialect.CHAT
    choices = []
    for index, choice in enumerate(answer.choices, first):
        part: dict[str, Any] = {
            "index": index,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if chat:
            part["message"] = _message(choice)
            part["logprobs"] = chat_logprobs(choice.logprobs)
        else:
            part["text"] = choice.text
            part["logprobs"] = _completion_logprobs(choice.logprobs, 0)
        if request.return_token_ids:
            part["token_ids"] = choice.token_ids
            if not chat:
                part["prompt_token_ids"] = choice.prompt_token_ids
        choices.append(part)
    head = _head(answer.turn_id, request, answer.model, answer.created)
    body = head | {"object": "chat.completion" if chat else "text_completion", "choices": choices}
    if chat and request.return_token_ids:
        body["prompt_token_ids"] = answer.choices[0].prompt_token_ids
    return body | {"usage": answer.usage, "rose": answer.rose_member()}


class ChunkWriter:
    """Renders one client's stream, piece by piece.

    It carries what a stream must carry along: where in its text each choice stands (completions give the
    text offset of every logprob), and which choices are open.  The chunk that ends the last of them waits for
    the end of the turn, whose record it carries: a chunk without choices, which has room for that too, is
    what only clients that asked for the usage expect.  `created` is in seconds since the epoch; choices are
    numbered from `first` on.
    """

    def __init__(self, request: Request, turn_id: str, model: str, created: int, first: int = 0) -> None:
        self._request = request
        self._first = first
        self._chat = request.dialect is Dialect.CHAT
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        self._head = _head(turn_id, request, model, created) | {"object": kind}
        self._offsets: dict[int, int] = {}
        self._open = request.choices
        self._ending: Piece | None = None
        text = b'"delta":{"content":%s}' if self._chat else b'"text":%s'
        choice = b'{"index":%d,"finish_reason":%s,' + text + b',"logprobs":null%s}'
        head = msgspec.json.encode(self._head).replace(b"%", b"%%").removesuffix(b"}")
        self._frame = b"data: " + head + b',"choices":[' + choice + b"]}\n\n"

    def events(self, piece: Piece, version: int | None) -> bytes:
        """The chunk that shows one piece; `version` is the one its tokens were sampled from."""
        if piece.finish_reason is not None:
            self._open -= 1
            if self._open == 0 and not self._request.include_usage:
                self._ending = piece
                return b""
        if piece.extra or piece.logprobs is not None or piece.prompt_token_ids is not None:
            return fields.event(self._chunk(piece))
        # Nearly all chunks are of this kind, and this is what a token costs most: only what differs from the
        # chunk before is encoded.
        ending = b"null"
        if piece.finish_reason is not None:
            ending = b'%s,"stop_reason":%s' % (_encode(piece.finish_reason), _encode(piece.stop_reason))
        ids = b',"token_ids":' + _encode(piece.token_ids) if self._request.return_token_ids else b""
        return self._frame % (self._first + piece.index, ending, _encode(piece.text), ids)

    def _chunk(self, piece: Piece) -> dict[str, Any]:
        index = self._first + piece.index
        choice: dict[str, Any] = {"index": index, "finish_reason": piece.finish_reason}
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        document = dict(self._head)
        if self._chat:
            choice["delta"] = piece.extra | {"content": piece.text}
            choice["logprobs"] = chat_logprobs(piece.logprobs)
        else:
            offset = self._offsets.get(piece.index, 0)
            choice["text"] = piece.text
            choice["logprobs"] = _completion_logprobs(piece.logprobs, offset)
            self._offsets[piece.index] = offset + sum(len(entry.token) for entry in piece.logprobs or ())
        if self._request.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if piece.prompt_token_ids is not None:
                (document if self._chat else choice)["prompt_token_ids"] = piece.prompt_token_ids
        document["choices"] = [choice]
        return document

    def last(self, answer: Answer) -> bytes:
        """The last chunk: the usage if asked for, and the member `rose`."""
        record = {"rose": answer.rose_member()}
        return self.usage(answer.usage, record) if self._ending is None else self.ending(record)

    def ending(self, more: dict[str, Any]) -> bytes:
        """The chunk that ends the last choice, with these members besides."""
        document = self._head | {"choices": []} if self._ending is None else self._chunk(self._ending)
        return fields.event(document | more)

    def usage(self, usage: Mapping[str, Any], more: dict[str, Any]) -> bytes:
        """The chunk without choices that tells the usage."""
        return fields.event(self._head | {"choices": [], "usage": usage} | more)


def _head(turn_id: str, request: Request, model: str, created: int) -> dict[str, Any]:
    """Members that every body and chunk of a turn begins with."""
    prefix = "chatcmpl" if request.dialect is Dialect.CHAT else "cmpl"
    return {"id": f"{prefix}-{turn_id}", "created": created, "model": model}


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.reasoning:
        message["reasoning"] = choice.reasoning
    if choice.tool_calls:
        calls = [{key: value for key, value in call.items() if key != "index"} for call in choice.tool_calls]
        message |= {"content": choice.text or None, "tool_calls": calls}
    return message


def chat_logprobs(entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """Logprobs as a chat shows them."""
    if entries is None:
        return None
    return {
        "content": [
            {
                "token": entry.token,
                "logprob": entry.logprob,
                "bytes": entry.bytes,
                "top_logprobs": [other._asdict() for other in entry.top],
            }
            for entry in entries
        ]
    }


def _completion_logprobs(entries: Sequence[TokenLogprob] | None, offset: int) -> dict[str, Any] | None:
    if entries is None:
        return None
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return {
        "text_offset": offsets,
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{other.token: other.logprob for other in entry.top} or None for entry in entries],
    }
