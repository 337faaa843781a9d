"""What all dialects share: reading fields of a client's body, and writing events."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from rose.core.versions import VersionWish
from rose_daemon.scheduler.errors import bad_request
from rose_daemon.scheduler.requests import Dialect

COMPLETION_TOKENS_DEFAULT = 16
"""OpenAI's and vLLM's `max_tokens` of a completion that names none."""
TOKENS_MAX = (1 << 31) - 1
"""No model has room for more; what the journal cannot hold must not get that far."""
CHOICES_MAX = 128
WISH = "weight_version"
"""The body's member `{min_version, exact_version}`, in every dialect."""
_VERSION_MAX = 10**15
_OPENING_TOKENS = 64
_OPENING_CHARACTERS = 256
_NAME_MAX = 256


def decode(data: bytes) -> dict[str, Any]:
    """A JSON object.  Raises Refused (400)."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    return body


def typed(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """A field of that type, `default` if it is absent or null.  Raises Refused (400)."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise bad_request(f"`{name}` must be of type {kind.__name__}", param=name)
    return value


def number(body: dict[str, Any], name: str, low: int, high: int, default: int | None) -> int | None:
    """An integer within bounds, `default` if it is absent or null.  Raises Refused (400)."""
    value: int | None = typed(body, name, int, None)
    if value is None:
        return default
    if not low <= value <= high:
        raise bad_request(f"`{name}` must lie between {low} and {high}", param=name)
    return value


def choices(body: dict[str, Any]) -> int:
    """`n`.  Raises Refused (400)."""
    return number(body, "n", 1, CHOICES_MAX, 1) or 1


def token_list(value: Any, name: str) -> list[int]:
    """A prompt of token ids.  Raises Refused (400)."""
    if not isinstance(value, list) or not value or not all(map(is_token, value)):
        raise bad_request(f"`{name}` must be a non-empty list of token ids", param=name)
    return value


def is_token(value: Any) -> bool:
    """Whether a value can be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= TOKENS_MAX


def name(body: dict[str, Any], field: str) -> str:
    """A field that names something, empty if absent.  Raises Refused (400)."""
    value: str = typed(body, field, str, "")
    if len(value) > _NAME_MAX or not value.isprintable():
        raise bad_request(f"`{field}` must be at most {_NAME_MAX} printable characters", param=field)
    return value


def wish(body: dict[str, Any]) -> VersionWish:
    """`weight_version`, taken out of the body: engines know nothing of it.  Raises Refused (400)."""
    asked = typed(body, WISH, dict, {})
    body.pop(WISH, None)
    if unknown := asked.keys() - {"min_version", "exact_version"}:
        raise bad_request(f"`{WISH}` has no member {min(unknown)!r}", param=WISH)
    floor = number(asked, "min_version", 0, _VERSION_MAX, None)
    return VersionWish(floor, number(asked, "exact_version", 0, _VERSION_MAX, None))


def opening(prompt: str | Sequence[int]) -> str:
    """A digest of how a prompt begins, short enough to be the same in every turn of a trajectory."""
    start = prompt[: _OPENING_CHARACTERS if isinstance(prompt, str) else _OPENING_TOKENS]
    return _digest(start if isinstance(start, str) else list(start))


def chat_opening(messages: Sequence[dict[str, Any]]) -> str:
    """A digest of the messages up to the first one of the user."""
    for index, message in enumerate(messages):
        if message.get("role") == "user":
            return _digest(messages[: index + 1])
    return _digest(messages)


def digest(dialect: Dialect, body: dict[str, Any]) -> str:
    """Identifies what is asked for, however it is to be shown."""
    shown = ("stream", "stream_options")
    return _digest([dialect, {name: value for name, value in body.items() if name not in shown}])


def _digest(content: Any) -> str:
    image = msgspec.json.encode(content, order="deterministic")
    return hashlib.blake2b(image, digest_size=16).hexdigest()


def event(document: object) -> bytes:
    """A JSON document as a server-sent event."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"
