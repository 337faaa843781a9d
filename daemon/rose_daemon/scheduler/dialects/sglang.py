"""SGLang's dialect: `POST /generate`.

Engines are asked through `/v1/completions` with SGLang's defaults written out.  As in SGLang, a streamed
chunk repeats the whole text and all ids so far.
"""

from __future__ import annotations

from typing import Any

from rose_daemon.scheduler.dialects import fields
from rose_daemon.scheduler.errors import bad_request
from rose_daemon.scheduler.output import Answer, Choice, Piece, TokenLogprob, token_id_of, version_label
from rose_daemon.scheduler.requests import Dialect, Request, SglangView, neutral, restart_reason

TOKENS_DEFAULT = 128
"""SGLang's `max_new_tokens` of a request that names none."""
_UNSUPPORTED = (
    "input_embeds", "image_data", "audio_data", "video_data", "lora_path", "token_ids_logprob",
    "custom_logit_processor", "return_hidden_states", "session_params", "bootstrap_host",
)  # fmt: skip
_SAMPLING_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_SAME_NAME = frozenset(
    {
        "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "n",
        "logit_bias", "stream_interval", *_SAMPLING_DEFAULTS,
    }
)  # fmt: skip
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""SGLang's name -> the member of vLLM's `structured_outputs`."""

# ---- requests -------------------------------------------------------------------------------------


def parse(data: bytes) -> Request:
    """Check a request body.  Raises Refused (400)."""
    body = fields.decode(data)
    digest = fields.digest(Dialect.SGLANG, body)
    for name in _UNSUPPORTED:
        if not neutral(name, body.get(name)):
            text = f"`{name}` is not supported through the gateway"
            raise bad_request(text, code="unsupported", param=name)
    versions = fields.wish(body)
    prompt, batch, prompt_tokens = _prompt(body)
    prompts = len(prompt) if batch else 1
    params = _params(body)
    asked = _sampling(params) | {"prompt": prompt}
    per_prompt = fields.choices(params)
    tokens_max = fields.number(asked, "max_tokens", 0, fields.TOKENS_MAX, None)
    if tokens_max is None:
        asked.pop("max_tokens", None)
        if batch or isinstance(prompt, str):
            text = "`max_new_tokens` must be a number, unless the prompt is one list of token ids"
            raise bad_request(text, param="max_new_tokens")
    logprobs = _logprobs(body)
    logprob_text = fields.typed(body, "return_text_in_logprobs", bool, False)
    if logprobs is not None:
        asked |= {"logprobs": logprobs, "return_tokens_as_token_ids": not logprob_text}
        if logprobs and logprob_text:
            text = "`return_text_in_logprobs` cannot be combined with `top_logprobs_num`"
            raise bad_request(text, code="unsupported", param="return_text_in_logprobs")
    rids = _rids(body, prompts)
    return Request(
        dialect=Dialect.SGLANG,
        body=asked,
        model=fields.typed(body, "model", str, None),
        stream=fields.typed(body, "stream", bool, False),
        include_usage=False,
        return_token_ids=True,
        logprobs=logprobs,
        tokens_max=tokens_max,
        choices=prompts * per_prompt,
        prompt_tokens=prompt_tokens,
        restart_reason=restart_reason(asked, prompts),
        digest=digest,
        versions=versions,
        names=rids,
        trajectory=rids[0] if len(rids) == 1 else None,
        opening=fields.opening(prompt[0] if batch else prompt),
        view=SglangView(
            rids, batch or per_prompt > 1, per_prompt, logprobs is not None, logprobs or 0, logprob_text
        ),
    )


def _prompt(body: dict[str, Any]) -> tuple[Any, bool, int]:
    """(prompt, whether it is a list of prompts, tokens of all, as far as known)."""
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise bad_request("give either `text` or `input_ids`", param="text")
    if ids is None:
        if isinstance(text, str) and text:
            return text, False, max(1, len(text) // 4)
        if isinstance(text, list) and text and all(isinstance(part, str) and part for part in text):
            return text, True, max(1, sum(map(len, text)) // 4)
        raise bad_request("`text` must be a non-empty string or list of such", param="text")
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        prompts = [fields.token_list(part, "input_ids") for part in ids]
        return prompts, True, sum(map(len, prompts))
    return fields.token_list(ids, "input_ids"), False, len(ids)


def _params(body: dict[str, Any]) -> dict[str, Any]:
    """`sampling_params`: one object, or as many equal ones as there are prompts."""
    value = body.get("sampling_params")
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        value = value[0]
    if value is None:
        return {}
    if not isinstance(value, dict):
        text = "`sampling_params` must be an object, the same for all prompts"
        raise bad_request(text, param="sampling_params")
    return value


def _sampling(params: dict[str, Any]) -> dict[str, Any]:
    """SGLang's sampling parameters as fields of a completion.  Raises Refused (400)."""
    asked = _SAMPLING_DEFAULTS | {"max_tokens": TOKENS_DEFAULT}
    grammar: dict[str, Any] = {}
    for name, value in params.items():
        if name in _RENAMED:
            asked[_RENAMED[name]] = value
        elif name in _SAME_NAME:
            if value is not None:
                asked[name] = value
        elif name in _GRAMMARS and not neutral(name, value):
            grammar[_GRAMMARS[name]] = value
        elif not neutral(name, value):
            where = f"sampling_params.{name}"
            raise bad_request(
                f"`{where}` is not supported through the gateway", code="unsupported", param=where
            )
    if grammar:
        asked["structured_outputs"] = grammar
    return asked


def _logprobs(body: dict[str, Any]) -> int | None:
    """Alternatives a token, or None if no logprobs are wanted.  Raises Refused (400)."""
    wanted = body.get("return_logprob")
    if isinstance(wanted, list):
        wanted = any(wanted)
    if not wanted:
        return None
    start = body.get("logprob_start_len")
    if start not in (None, -1):
        text = "logprobs of the prompt (`logprob_start_len`) are not supported through the gateway"
        raise bad_request(text, code="unsupported", param="logprob_start_len")
    return fields.number(body, "top_logprobs_num", 0, 1024, 0)


def _rids(body: dict[str, Any], prompts: int) -> tuple[str, ...]:
    value = body.get("rid")
    if isinstance(value, list):
        if len(value) != prompts:
            raise bad_request("`rid` must name as many requests as there are prompts", param="rid")
        return tuple(fields.name({"rid": one}, "rid") for one in value)
    rid = fields.name(body, "rid")
    return (rid,) if rid else ()


# ---- answers --------------------------------------------------------------------------------------


def whole_body(answer: Answer, request: Request) -> dict[str, Any] | list[dict[str, Any]]:
    """The body of a plain (not streamed) answer: a list for several prompts or samples."""
    view = _view(request)
    outputs = [_output(answer, view, index, choice) for index, choice in enumerate(answer.choices)]
    return outputs if view.batch else outputs[0]


class ChunkWriter:
    """Renders one client's stream.

    The chunk that ends a choice waits for the end of the turn, when its weight versions are known.
    """

    def __init__(self, request: Request, turn_id: str) -> None:
        self._view = _view(request)
        self._turn_id = turn_id
        self._choices = [Choice() for _ in range(request.choices)]

    def events(self, piece: Piece, version: int | None) -> bytes:
        """The chunk that shows one piece, if it is time for it."""
        choice = self._choices[piece.index]
        choice.add(piece)
        if piece.finish_reason is not None:
            return b""
        meta = _meta(self._view, self._turn_id, piece.index, choice) | {
            "weight_version": version_label(version)
        }
        return fields.event(self._numbered(piece.index, _shown(choice, meta)))

    def last(self, answer: Answer) -> bytes:
        """The chunks that end the choices."""
        return b"".join(
            fields.event(self._numbered(index, _output(answer, self._view, index, choice)))
            for index, choice in enumerate(answer.choices)
        )

    def _numbered(self, index: int, document: dict[str, Any]) -> dict[str, Any]:
        return document | {"index": index} if self._view.batch else document


def _view(request: Request) -> SglangView:
    assert isinstance(request.view, SglangView), "a request of another dialect"
    return request.view


def _output(answer: Answer, view: SglangView, index: int, choice: Choice) -> dict[str, Any]:
    version = answer.weight_versions[-1][2] if answer.weight_versions else None
    meta = _meta(view, answer.turn_id, index, choice) | {"weight_version": version_label(version)}
    if choice.prompt_token_ids is None and len(answer.choices) == 1:
        meta["prompt_tokens"] = answer.usage.get("prompt_tokens")
    if (cached := _cached_tokens(answer)) is not None:
        meta["cached_tokens"] = cached
    return _shown(choice, meta | {"rose": answer.rose_member()})


def _shown(choice: Choice, meta: dict[str, Any]) -> dict[str, Any]:
    return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}


def _meta(view: SglangView, turn_id: str, index: int, choice: Choice) -> dict[str, Any]:
    prompt = index // view.per_prompt
    rid = view.rids[prompt] if prompt < len(view.rids) else ""
    tokens = len(choice.token_ids)
    meta: dict[str, Any] = {
        "id": rid or (f"{turn_id}-{index}" if view.batch else turn_id),
        "finish_reason": _finish_reason(choice),
        "prompt_tokens": None if choice.prompt_token_ids is None else len(choice.prompt_token_ids),
        "completion_tokens": tokens,
    }
    if view.logprob:
        entries = choice.logprobs or []
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [
            [entry.logprob, token, entry.token if view.logprob_text else None]
            for token, entry in zip(choice.token_ids, entries, strict=True)
        ]
        if view.top_logprobs:
            meta["input_top_logprobs"] = []
            meta["output_top_logprobs"] = [_best(entry, view.top_logprobs) for entry in entries]
    return meta


def _best(entry: TokenLogprob, count: int) -> list[list[Any]]:
    """The best alternatives, best first; a completion names the sampled token before them."""
    ranked = sorted(entry.top, key=lambda other: -other.logprob)
    return [[other.logprob, token_id_of(other.token), None] for other in ranked[:count]]


def _finish_reason(choice: Choice) -> dict[str, Any] | None:
    match choice.finish_reason:
        case None:
            return None
        case "stop":
            # An engine of vLLM names no stop reason where its end token stopped it.
            last = choice.token_ids[-1] if choice.token_ids else None
            return {"type": "stop", "matched": last if choice.stop_reason is None else choice.stop_reason}
        case "length":
            return {"type": "length", "length": len(choice.token_ids)}
        case "abort":
            text = str(choice.stop_reason or "Aborted by its client")
            return {"type": "abort", "message": text, "status_code": None, "err_type": None}
        case other:
            return {"type": other}


def _cached_tokens(answer: Answer) -> int | None:
    """Prompt tokens found in the prefix cache, where the engine tells, and of a turn with one attempt."""
    details = answer.usage.get("prompt_tokens_details") or {}
    return details.get("cached_tokens") if len(answer.choices) == 1 else None
