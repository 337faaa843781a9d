"""Finished turns of a job, for a trainer that wants them as data: pages of what the store keeps."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from rose.units import JobId
from rose_daemon.scheduler.errors import Shape, bad_request
from rose_daemon.scheduler.jobs import JobDesk
from rose_daemon.scheduler.store import AnswerRow, Store

PAGE_MAX = 500
_DIGITS_MAX = 15


class ExportApi:
    """GET /rose/v1/jobs/{job}/answers."""

    def __init__(self, desk: JobDesk, store: Store) -> None:
        self._desk = desk
        self._store = store

    def routes(self) -> list[tuple[web.RouteDef, Shape]]:
        """For `build_app`."""
        return [(web.get("/rose/v1/jobs/{job}/answers", self.answers), Shape.OPENAI)]

    async def answers(self, http: web.Request) -> web.Response:
        """A page in order of their ends; query: `after` (a `next`), `limit`, `trajectory`, `logprobs`."""
        job = self._desk.resolve(http.match_info["job"]).spec.job
        after, limit = _number(http, "after", 0), _number(http, "limit", PAGE_MAX)
        trajectory = http.query.get("trajectory") or None
        rows = self._store.answers(JobId(job), after, min(max(1, limit), PAGE_MAX), trajectory)
        logprobs = http.query.get("logprobs") == "1"
        page = {
            "answers": [exported(row, logprobs=logprobs) for row in rows],
            "next": rows[-1].sequence if rows else None,
        }
        return web.Response(
            body=msgspec.json.encode(page), content_type="application/json", status=HTTPStatus.OK
        )


def exported(row: AnswerRow, *, logprobs: bool) -> dict[str, Any]:
    """One finished turn as plain data."""
    answer = row.answer
    choices = [
        {
            "prompt_token_ids": choice.prompt_token_ids,
            "token_ids": choice.token_ids,
            "text": choice.text,
            "tool_calls": choice.tool_calls,
            "finish_reason": choice.finish_reason,
        }
        | ({"logprobs": _logprobs(choice.logprobs)} if logprobs else {})
        for choice in answer.choices
    ]
    return {
        **answer.rose_member(),
        "model": answer.model,
        "created": answer.created,
        "replica": answer.replica,
        "request_digest": row.digest,
        "seed": answer.seed,
        "usage": answer.usage,
        "choices": choices,
    }


def _logprobs(entries: list[Any] | None) -> list[float | None] | None:
    return None if entries is None else [entry.logprob for entry in entries]


def _number(http: web.Request, name: str, default: int) -> int:
    text = http.query.get(name, str(default))
    if not text.isdecimal() or len(text) > _DIGITS_MAX:
        raise bad_request(f"{text[:32]!r} is not a number", param=name)
    return int(text)
