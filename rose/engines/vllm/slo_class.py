"""Request classes of a serving engine: from a caller's header to the budgets that the scheduler goes by.

A front end that the operator trusts sends `x-rose-slo-class: NAME`, and proves itself by the token in
`x-rose-token` (or as the bearer token, where vLLM itself asks for none).  Without the token, or with a class
that is not configured, a request has the budgets of all: nobody talks himself into a better class.

The class travels with vLLM's own request, among its trace headers: callers cannot write there (vLLM takes
`traceparent` and `tracestate` alone from them), and every path from HTTP to the scheduler keeps them.
"""

from __future__ import annotations

import hmac
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rose.core.slo import SloBudgets, SloTable
from rose.engines.vllm.settings import PluginSettings, read_token

HEADER = "x-rose-slo-class"
TOKEN_HEADER = "x-rose-token"
_class_of_this_request: ContextVar[str] = ContextVar("rose_slo_class", default="")


class SloClassMiddleware:
    """ASGI middleware (`--middleware`) of a serving engine: reads the header of those who may send it."""

    def __init__(self, app: Any) -> None:
        self._app = app
        settings = PluginSettings.require("serving")
        self._table = settings.slo_table
        self._token = read_token(Path(settings.slo_token_file or settings.token_file))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, with its class in the context."""
        slo_class = self._class_of(scope["headers"]) if scope["type"] == "http" else ""
        if not slo_class:
            await self._app(scope, receive, send)
            return
        before = _class_of_this_request.set(slo_class)
        try:
            await self._app(scope, receive, send)
        finally:
            _class_of_this_request.reset(before)

    def _class_of(self, headers: list[tuple[bytes, bytes]]) -> str:
        """The class that a request is to have; empty for that of all."""
        asked, token, bearer = b"", b"", b""
        for name, value in headers:  # ASGI has their names in lower case
            if name == HEADER.encode():
                asked = value
            elif name == TOKEN_HEADER.encode():
                token = value
            elif name == b"authorization":
                scheme, _, given = value.partition(b" ")
                bearer = given if scheme.lower() == b"bearer" else b""
        if not asked or not hmac.compare_digest(token or bearer, self._token):
            return ""
        slo_class = asked.decode("latin-1")
        return slo_class if self._table.knows(slo_class) else ""


def carry_classes() -> None:
    """Have the API server write the class of each request among its trace headers."""
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415 (only engines have vLLM)

    if hasattr(AsyncLLM, "_rose_original_add_request"):
        return
    original = AsyncLLM._add_request

    async def _add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        slo_class = _class_of_this_request.get()
        if slo_class:
            request.trace_headers = {**(request.trace_headers or {}), HEADER: slo_class}
        await original(self, request, *args, **kwargs)

    AsyncLLM._rose_original_add_request = original
    AsyncLLM._add_request = _add_request


def budgets_of(request: Any, table: SloTable) -> SloBudgets:
    """Those of a request of vLLM's scheduler."""
    slo_class = request.trace_headers.get(HEADER, "") if request.trace_headers else ""
    model = request.lora_request.lora_name if request.lora_request is not None else ""
    return table.budgets(slo_class, model)
