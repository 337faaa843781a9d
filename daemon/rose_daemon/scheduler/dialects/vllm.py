"""vLLM's own dialect: `POST /inference/v1/generate`, token ids in and out (vLLM 0.32, `scale_out`).

Engines are asked through `/v1/completions`, which every engine has, and with the sampling defaults of this
endpoint written out: a completion would fill them in from the model's generation config.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rose_daemon.scheduler.dialects import fields
from rose_daemon.scheduler.dialects.openai import chat_logprobs
from rose_daemon.scheduler.errors import bad_request
from rose_daemon.scheduler.output import (
    Answer,
    Choice,
    Piece,
    TokenLogprob,
    in_chat_form,
    token_id_of,
    version_label,
)
from rose_daemon.scheduler.requests import Dialect, GenerateView, Request, neutral, restart_reason

_SAMPLING_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_SAMPLING = frozenset(
    {
        "n", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens",
        "spaces_between_special_tokens", "include_stop_str_in_output", "structured_outputs", "logit_bias",
        "allowed_token_ids", "bad_words", "logprob_token_ids", "stream_interval", "thinking_token_budget",
        "repetition_detection", "watermarking", *_SAMPLING_DEFAULTS,
    }
)  # fmt: skip
"""Fields of SamplingParams that a completion has under the same name."""
_OF_NO_EFFECT = frozenset(
    {"max_tokens", "logprobs", "detokenize", "output_kind", "skip_clone", "flat_logprobs", "extra_args"}
)
"""Taken care of here, or overridden by vLLM's own endpoint too."""
_UNSUPPORTED = ("features", "content_parts", "kv_transfer_params", "ec_transfer_params")
_ID_PREFIX = "generate-tokens-"

# ---- requests -------------------------------------------------------------------------------------


def parse(data: bytes) -> Request:
    """Check a request body.  Raises Refused (400)."""
    body = fields.decode(data)
    digest = fields.digest(Dialect.GENERATE, body)
    for name in _UNSUPPORTED:
        if not neutral(name, body.get(name)):
            text = f"`{name}` is not supported through the gateway"
            raise bad_request(text, code="unsupported", param=name)
    versions = fields.wish(body)
    tokens = fields.token_list(body.get("token_ids"), "token_ids")
    params = fields.typed(body, "sampling_params", dict, None)
    if params is None:
        raise bad_request("`sampling_params` is missing", param="sampling_params")
    sampling = _sampling(params)
    logprobs = fields.number(params, "logprobs", -1, fields.TOKENS_MAX, None)
    mode = fields.typed(body, "output_mode", str, "tokens")
    if mode not in {"tokens", "text"}:
        raise bad_request("`output_mode` must be `tokens` or `text`", param="output_mode")
    text = mode == "text"
    asked: dict[str, Any] = sampling | {"prompt": tokens}
    if logprobs is not None:
        asked |= {"logprobs": logprobs, "return_tokens_as_token_ids": not text}
    for name in ("cache_salt", "priority"):
        if not neutral(name, body.get(name)):
            asked[name] = body[name]
    tokens_max = fields.number(params, "max_tokens", 1, fields.TOKENS_MAX, None)
    if tokens_max is not None:
        asked["max_tokens"] = tokens_max
    options = fields.typed(body, "stream_options", dict, {})
    request_id = fields.name(body, "request_id")
    return Request(
        dialect=Dialect.GENERATE,
        body=asked,
        model=fields.typed(body, "model", str, None),
        stream=fields.typed(body, "stream", bool, False),
        include_usage=options.get("include_usage") is True,
        return_token_ids=fields.typed(body, "return_token_ids", bool, False),
        logprobs=logprobs,
        tokens_max=tokens_max,
        choices=fields.choices(params),
        prompt_tokens=len(tokens),
        restart_reason=restart_reason(asked, 1),
        digest=digest,
        versions=versions,
        names=(request_id, _ID_PREFIX + request_id) if request_id else (),
        opening=fields.opening(tokens),
        view=GenerateView(request_id, text, logprobs),
    )


def _sampling(params: dict[str, Any]) -> dict[str, Any]:
    """SamplingParams as fields of a completion.  Raises Refused (400) for what a completion cannot ask."""
    for name in sorted(params.keys() - _SAMPLING - _OF_NO_EFFECT):
        if not neutral(name, params[name]):
            where = f"sampling_params.{name}"
            raise bad_request(
                f"`{where}` is not supported through the gateway", code="unsupported", param=where
            )
    sampling = _SAMPLING_DEFAULTS | {
        name: value for name, value in params.items() if name in _SAMPLING and value is not None
    }
    if extra := fields.typed(params, "extra_args", dict, {}):
        sampling["vllm_xargs"] = extra
    return sampling


# ---- answers --------------------------------------------------------------------------------------


def whole_body(answer: Answer, request: Request) -> dict[str, Any]:
    """The body of a plain (not streamed) answer: vLLM's GenerateResponse."""
    view = _view(request)
    return {
        "request_id": _request_id(view, answer.turn_id),
        "model": answer.model,
        "created": answer.created,
        "usage": answer.usage,
        "prompt_logprobs": None,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": answer.choices[0].prompt_token_ids if request.return_token_ids else None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "text" if view.text else "tokens",
        "choices": [
            _choice(view, index, choice) | {"weight_versions": _spans(answer, choice)}
            for index, choice in enumerate(answer.choices)
        ],
        "rose": answer.rose_member(),
    }


class ChunkWriter:
    """Renders one client's stream: vLLM's GenerateStreamResponse.

    The chunk that ends a choice names its weight versions, so it waits for the end of the turn.
    """

    def __init__(self, request: Request, turn_id: str) -> None:
        self._request = request
        self._view = _view(request)
        mode = "text" if self._view.text else "tokens"
        self._head: dict[str, Any] = {
            "request_id": _request_id(self._view, turn_id),
            "usage": None,
            "output_mode": mode,
        }
        self._endings: dict[int, Piece] = {}
        self._prompt_shown = not request.return_token_ids

    def events(self, piece: Piece, version: int | None) -> bytes:
        """The chunk that shows one piece, if it is time for it."""
        if piece.finish_reason is not None:
            self._endings[piece.index] = piece
            return b""
        return fields.event(self._chunk(piece, None))

    def last(self, answer: Answer) -> bytes:
        """The chunks that end the choices, and the usage if asked for."""
        documents = [
            self._chunk(piece, _spans(answer, answer.choices[index]))
            for index, piece in sorted(self._endings.items())
        ]
        if self._request.include_usage:
            documents.append(self._head | {"usage": answer.usage, "choices": []})
        documents[-1]["rose"] = answer.rose_member()
        return b"".join(map(fields.event, documents))

    def _chunk(self, piece: Piece, spans: list[dict[str, Any]] | None) -> dict[str, Any]:
        document = dict(self._head)
        if not self._prompt_shown and piece.prompt_token_ids is not None:
            document["prompt_token_ids"] = piece.prompt_token_ids
            self._prompt_shown = True
        document["choices"] = [_choice(self._view, piece.index, piece) | {"weight_versions": spans}]
        return document


def _view(request: Request) -> GenerateView:
    assert isinstance(request.view, GenerateView), "a request of another dialect"
    return request.view


def _request_id(view: GenerateView, turn_id: str) -> str:
    return _ID_PREFIX + (view.request_id or turn_id)


def _choice(view: GenerateView, index: int, output: Choice | Piece) -> dict[str, Any]:
    logprobs: dict[str, Any] | None = None
    if output.logprobs is not None:
        entries = [in_chat_form(entry, max(view.logprobs or 0, 1)) for entry in output.logprobs]
        if view.text:
            logprobs = chat_logprobs(entries)
        else:
            logprobs = {"content": _token_logprobs(entries, output.token_ids)}
    choice: dict[str, Any] = {
        "index": index,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "token_ids": output.token_ids,
        "routed_experts": None,
        "sampling_mask": None,
        "logprobs": logprobs,
    }
    return choice | {"text": output.text} if view.text else choice


def _token_logprobs(entries: Sequence[TokenLogprob], token_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Logprobs by token id.  A completion does not tell ranks, which this schema allows to be null."""
    return [
        {
            "token_id": token_id,
            "logprob": entry.logprob,
            "rank": None,
            "top_logprobs": [
                {"token_id": token_id_of(other.token), "logprob": other.logprob, "rank": None}
                for other in entry.top
            ],
        }
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]


def _spans(answer: Answer, choice: Choice) -> list[dict[str, Any]] | None:
    """vLLM's WeightVersionSpan: half open, and the version a string.

    None where the samples of one prompt ran on several versions: which token of which is not known then.
    """
    versions = {version for *_, version in answer.weight_versions}
    if len(answer.choices) == 1:
        return [
            {"version": version_label(version), "start": first, "end": last + 1}
            for first, last, version in answer.weight_versions
        ]
    if len(versions) == 1:
        return [{"version": version_label(versions.pop()), "start": 0, "end": len(choice.token_ids)}]
    return None
