"""Several prompts in one request of `/v1/completions`: each is a turn of its own.

So each runs where there is room, goes on elsewhere after a cut, and is kept under an id of its own (the
request's, a dot, and its number), while the client is answered as by one engine: choices are numbered prompt
by prompt, and the usage is that of all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from rose_daemon.scheduler.dialects import fields, openai
from rose_daemon.scheduler.errors import Failure, Refused
from rose_daemon.scheduler.output import Answer
from rose_daemon.scheduler.requests import Dialect, Request
from rose_daemon.scheduler.streams import DONE, Follower, begun, head_of, write_again
from rose_daemon.scheduler.turns import Turn

Part = Turn | Answer
"""A turn that is answered, or was before."""


def split(request: Request) -> list[Request]:
    """One request for each prompt; empty where there is one, or they are embeddings."""
    prompts = request.body.get("prompt")
    if request.dialect is not Dialect.COMPLETION or request.body.get("prompt_embeds"):
        return []
    if not isinstance(prompts, list) or len(prompts) < 2 or fields.is_token(prompts[0]):
        return []
    bodies = (msgspec.json.encode(request.body | {"prompt": prompt}) for prompt in prompts)
    return [openai.parse(Dialect.COMPLETION, body) for body in bodies]


async def whole(request: Request, parts: Sequence[Part], name: str) -> web.Response:
    """The answer to all of them.  Raises Refused as soon as one fails."""
    answers = await _all(parts)
    bodies = [
        openai.whole_body(answer, request, first=number * _each(request, parts))
        for number, answer in enumerate(answers)
    ]
    body = bodies[0] | {
        "id": f"cmpl-{name}",
        "choices": [choice for each in bodies for choice in each["choices"]],
        "usage": _usage(answers),
        "rose": _record(answers, name),
    }
    return web.Response(
        body=msgspec.json.encode(body),
        content_type="application/json",
        headers={"x-rose-turn-id": name, "x-rose-replica": answers[0].replica},
    )


async def show(
    http: web.Request, request: Request, parts: Sequence[Part], name: str, created: int
) -> web.StreamResponse:
    """Show all of them as they grow, chunk by chunk.  Raises Refused while nothing was sent."""
    await begun([part for part in parts if isinstance(part, Turn)])
    for part in parts:
        if isinstance(part, Turn) and isinstance(part.outcome, Failure) and not part.pieces:
            raise Refused(part.outcome)
    response = head_of(name, None)
    with contextlib.suppress(ConnectionResetError):
        await response.prepare(http)
        try:
            await _Merged(http, response, request, parts, name, created).follow()
        except Refused as refused:
            await response.write(fields.event(refused.failure.document()))
        else:
            await response.write(DONE)
        await response.write_eof()
    return response


class _Merged:
    """One stream of all parts: their chunks as they come, and the record of all in the last one."""

    def __init__(
        self,
        http: web.Request,
        response: web.StreamResponse,
        request: Request,
        parts: Sequence[Part],
        name: str,
        created: int,
    ) -> None:
        self._http = http
        self._response = response
        self._include_usage = request.include_usage
        self._parts = parts
        self._name = name
        each = _each(request, parts)
        alone = msgspec.structs.replace(request, choices=each, include_usage=False)
        self._writers = [
            openai.ChunkWriter(alone, name, part.model, created, number * each)
            for number, part in enumerate(parts)
        ]
        self._open = len(parts)

    async def follow(self) -> None:
        """Write all of them.  Raises Refused as soon as one fails."""
        answers = await _together([self._one(*each) for each in zip(self._parts, self._writers, strict=True)])
        if self._include_usage:
            record = {"rose": _record(answers, self._name)}
            await self._response.write(self._writers[0].usage(_usage(answers), record))

    async def _one(self, part: Part, writer: openai.ChunkWriter) -> Answer:
        if isinstance(part, Answer):
            await write_again(self._response, writer, part)
        else:
            await Follower(self._http, self._response, writer, part).follow()
        answer = await _settled(part)
        self._open -= 1
        last = self._open == 0 and not self._include_usage
        answers = await _all(self._parts) if last else []  # they are there: this was the last one
        await self._response.write(writer.ending({"rose": _record(answers, self._name)} if last else {}))
        return answer


async def _all(parts: Sequence[Part]) -> list[Answer]:
    return await _together([_settled(part) for part in parts])


async def _together(work: Sequence[Any]) -> list[Answer]:
    """All results; the first refusal or lost connection ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except* (Refused, ConnectionResetError) as errors:
        found: BaseException = errors.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise found


async def _settled(part: Part) -> Answer:
    """The answer, once it is complete.  Raises Refused for a failed turn."""
    return part if isinstance(part, Answer) else await part.settled()


def _each(request: Request, parts: Sequence[Part]) -> int:
    """Choices of each prompt."""
    return request.choices // len(parts)


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: sum(int(answer.usage.get(name) or 0) for answer in answers) for name in names}


def _record(answers: Sequence[Answer], name: str) -> dict[str, Any]:
    return {"turn_id": name, "turns": [answer.rose_member() for answer in answers]}
