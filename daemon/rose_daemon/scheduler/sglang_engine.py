"""SGLang as an engine behind the gateway: a completion asked for through its `/generate`, and read back.

SGLang's own `/v1/completions` shows no token ids, `/generate` does.  Chats go to its `/v1/chat/completions`
as they are; without ids such a turn begins again after a cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from rose_daemon.scheduler.engine_streams import EngineError, Garbage
from rose_daemon.scheduler.output import ABORTED, Alternative, Piece, TokenLogprob

PATH = "/generate"
_RENAMED = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "seed": "sampling_seed",
}
_SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "n",
    "logit_bias", "stream_interval",
)  # fmt: skip
_GRAMMARS = {"json": "json_schema", "regex": "regex", "grammar": "ebnf", "structural_tag": "structural_tag"}
_OF_NO_EFFECT = frozenset(
    {
        "model", "prompt", "stream", "stream_options", "return_token_ids", "logprobs", "user", "session_id",
        "request_id", "return_tokens_as_token_ids", "structured_outputs", "cache_salt", "add_special_tokens",
    }
)  # fmt: skip
"""Taken care of here, or about the answer only.  SGLang has no salt for its cache: see `workers.flush`."""


def untranslatable(body: Mapping[str, Any], neutral: Any) -> str:
    """The first field of a completion that SGLang has no counterpart for, or an empty string."""
    known = {*_RENAMED, *_SAME_NAME, *_OF_NO_EFFECT}
    return next((name for name in sorted(body) if name not in known and not neutral(name, body[name])), "")


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat as its `/v1/chat/completions` takes it, which refuses to stream token ids."""
    return {name: value for name, value in body.items() if name != "return_token_ids"}


def generate_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a completion as one for `/generate`."""
    sampling = {_RENAMED[name]: body[name] for name in _RENAMED if body.get(name) is not None}
    sampling |= {name: body[name] for name in _SAME_NAME if body.get(name) is not None}
    if sampling.get("top_k") == 0:
        sampling["top_k"] = -1  # vLLM's word for "all"
    for name, value in (body.get("structured_outputs") or {}).items():
        sampling[_GRAMMARS.get(name, name)] = value
    prompt = body["prompt"]
    first = prompt[0] if isinstance(prompt, list) else prompt
    text = isinstance(first, str)
    asked: dict[str, Any] = {
        "text" if text else "input_ids": prompt,
        "sampling_params": sampling,
        "stream": True,
    }
    if (logprobs := body.get("logprobs")) is not None:
        asked |= {"return_logprob": True, "top_logprobs_num": logprobs, "return_text_in_logprobs": True}
    return asked


class _Chunk(msgspec.Struct, gc=False):
    """A chunk: all of it must be there, what it says of errors apart."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
    index: int | None = None


class _ErrorChunk(msgspec.Struct, gc=False):
    error: dict[str, Any]


_decode = msgspec.json.Decoder(_Chunk).decode
_decode_error = msgspec.json.Decoder(_ErrorChunk).decode


def _chunk(data: bytes) -> _Chunk:
    """Raises EngineError, and DecodeError (RecursionError) for another shape."""
    try:
        return _decode(data)
    except msgspec.ValidationError:
        with contextlib.suppress(msgspec.ValidationError):
            raise EngineError(_decode_error(data).error) from None
        raise


class Reader:
    """Makes pieces of the chunks of one stream, which repeat everything so far (or, where the server streams
    increments, only what is new).
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        prompt = body["prompt"]
        ids = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
        self._prompt_token_ids: list[int] | None = prompt if ids else None
        self._shown: dict[int, tuple[int, int]] = {}
        """Characters and tokens shown of each choice."""
        self._totals: dict[int, tuple[int, int, int]] = {}

    def read(self, data: bytes) -> list[Piece]:
        """The piece in a chunk.  Raises EngineError, and Garbage when it has not SGLang's shape."""
        try:
            return [self._piece(_chunk(data))]
        except (
            msgspec.DecodeError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
        ) as error:
            raise Garbage(str(error)) from None

    def _piece(self, chunk: _Chunk) -> Piece:
        index, meta, ids, text = chunk.index or 0, chunk.meta_info, chunk.output_ids, chunk.text
        characters, tokens = self._shown.get(index, (0, 0))
        total = meta["completion_tokens"]
        new = total - tokens
        repeats = len(ids) == total
        piece = Piece(
            index=index,
            text=text[characters:] if repeats else text,
            token_ids=tuple(ids[len(ids) - new :]) if new else (),
            logprobs=self._logprobs(meta, new),
            prompt_token_ids=None if index in self._shown else self._prompt_token_ids,
        )
        if len(piece.token_ids) != new:
            raise ValueError(f"{new} new tokens, but {len(piece.token_ids)} ids")
        self._shown[index] = (len(text) if repeats else characters + len(text), total)
        self._totals[index] = (meta.get("prompt_tokens") or 0, total, meta.get("cached_tokens") or 0)
        self._end(piece, meta.get("finish_reason"))
        return piece

    def usage(self) -> dict[str, Any] | None:
        """What was counted, as OpenAI's `usage`."""
        if not self._totals:
            return None
        prompt, output, cached = (sum(column) for column in zip(*self._totals.values(), strict=True))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _end(self, piece: Piece, reason: dict[str, Any] | None) -> None:
        if reason is None:
            return
        piece.finish_reason = reason["type"]
        if piece.finish_reason == ABORTED:
            piece.stop_reason = "sglang_abort"
        elif piece.finish_reason == "stop":
            matched = reason.get("matched")
            # As in vLLM: the model's own end token is no stop reason.
            asked = isinstance(matched, str) or matched in (self._body.get("stop_token_ids") or ())
            piece.stop_reason = matched if asked else None

    def _logprobs(self, meta: dict[str, Any], new: int) -> list[TokenLogprob] | None:
        if self._body.get("logprobs") is None:
            return None
        if not new:
            return []
        entries = meta["output_token_logprobs"][-new:]
        tops = (meta.get("output_top_logprobs") or [None] * new)[-new:]
        return [self._logprob(entry, top) for entry, top in zip(entries, tops, strict=True)]

    def _logprob(self, entry: list[Any], top: list[list[Any]] | None) -> TokenLogprob:
        """An entry as a completion of vLLM has it: the sampled token first, then the best ones."""
        sampled = self._alternative(entry)
        others = [self._alternative(other) for other in top or ()]
        rest = (other for other in others if other.token != sampled.token)
        return TokenLogprob(sampled.token, sampled.logprob, sampled.bytes, (sampled, *rest))

    def _alternative(self, entry: list[Any]) -> Alternative:
        logprob, token_id, text = entry
        if self._body.get("return_tokens_as_token_ids") or text is None:
            return Alternative(f"token_id:{token_id}", logprob, None)
        return Alternative(text, logprob, list(text.encode("utf-8", errors="replace")))
