"""Errors of the gateway, in the shape that the caller's dialect gives them."""

from __future__ import annotations

from enum import StrEnum
from http import HTTPStatus
from typing import Any

import msgspec

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_ENGINE_TYPES = {
    400: "BadRequestError",
    401: "UnauthorizedError",
    404: "NotFoundError",
    409: "ConflictError",
    413: "BadRequestError",
    429: "RateLimitError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class Shape(StrEnum):
    """How an error looks on the wire."""

    OPENAI = "openai"
    """`{"error": {message, type, param, code}}`, the code a word."""
    VLLM = "vllm"
    """The same members; the code is the status."""
    SGLANG = "sglang"
    """`{"error": {message, type, code}}`, the code again the status."""


class Failure(msgspec.Struct, frozen=True):
    """Why a request is answered with an error; also the stored outcome of a failed turn.

    `code` is a stable snake_case word for programs (every error carries it in the header x-rose-error too),
    `text` one line for people.  `body` is set when an engine's own refusal is passed on as it came.
    """

    status: int
    code: str
    text: str
    param: str | None = None
    body: dict[str, Any] | None = None

    def document(self, shape: Shape = Shape.OPENAI) -> dict[str, Any]:
        """The JSON body."""
        if self.body is not None:
            return self.body
        if shape is Shape.OPENAI:
            kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
            return {"error": {"message": self.text, "type": kind, "param": self.param, "code": self.code}}
        kind = _ENGINE_TYPES.get(
            self.status, "InternalServerError" if self.status >= 500 else "BadRequestError"
        )
        error: dict[str, Any] = {"message": self.text, "type": kind, "code": self.status}
        return {"error": error | {"param": self.param} if shape is Shape.VLLM else error}


class Refused(Exception):
    """Raised while handling a request; the HTTP layer answers with `failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


def bad_request(text: str, *, code: str = "bad_request", param: str | None = None) -> Refused:
    """The request is malformed: 400."""
    return Refused(Failure(HTTPStatus.BAD_REQUEST, code, text, param))


def not_found(text: str, *, code: str, param: str | None = None) -> Refused:
    """The thing named does not exist: 404."""
    return Refused(Failure(HTTPStatus.NOT_FOUND, code, text, param))


def conflict(text: str, *, code: str) -> Refused:
    """The request contradicts what is already there: 409."""
    return Refused(Failure(HTTPStatus.CONFLICT, code, text))
