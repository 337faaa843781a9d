"""What requests to the relay ask for, checked; and how refusals are answered."""

from __future__ import annotations

import math
import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rose.errors import CorruptDelta, RoseError
from rose.units import JobId, WeightVersion
from rose.weights.digests import DIGEST_PATTERN
from rose.weights.manifest import BUCKET_BYTES_MAX, BUCKET_PATTERN, VERSION_MAX, valid_job
from rose.weights.relay.http import STATUS_BY_ERROR, WAIT_MAX_S, BadRequest, Refusal
from rose_daemon.relay.vault import Key

TRANSFER_MAX_S = 300.0
"""A bucket that takes longer in either direction is given up, so that no peer holds memory for ever."""

_T = TypeVar("_T")


def job(request: web.Request) -> JobId:
    """The job in the path.  All of these raise BadRequest."""
    return job_named(request.match_info["job"])


def key(request: web.Request) -> Key:
    """The job and the version in the path."""
    return key_named(request.match_info["job"], integer(request.match_info["version"]))


def bucket(request: web.Request) -> str:
    """The bucket in the path."""
    return bucket_named(request.match_info["bucket"])


def job_named(name: str) -> JobId:
    """A job by its name."""
    if not valid_job(name):
        raise BadRequest("not a job id")
    return JobId(name)


def key_named(job_name: str, version: int) -> Key:
    """A version of a job."""
    if not 0 <= version <= VERSION_MAX:
        raise BadRequest("not a version")
    return job_named(job_name), WeightVersion(version)


def bucket_named(name: str) -> str:
    """A bucket by its name."""
    if not re.match(BUCKET_PATTERN, name):
        raise BadRequest("not a bucket's name")
    return name


def integer(text: str) -> WeightVersion:
    """A version, or -1 for "before all"."""
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise BadRequest("not a version")
    return WeightVersion(int(text))


def wait_s(request: web.Request) -> float:
    """How long a poll may wait."""
    try:
        seconds = float(request.query.get("wait_s", "0"))
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= WAIT_MAX_S:
        raise BadRequest(f"wait_s lies between 0 and {WAIT_MAX_S:.0f}")
    return seconds


def milliseconds(request: web.Request, header: str) -> float | None:
    """A duration in a header; None where it is not told."""
    if (text := request.headers.get(header)) is None:
        return None
    try:
        duration_ms = float(text)
    except ValueError:
        duration_ms = math.nan
    if not 0 <= duration_ms < math.inf:
        raise BadRequest(f"{header} is a number of milliseconds")
    return duration_ms


def content(size: int | None, digest: str) -> tuple[int, str]:
    """Size and digest that a writer promises."""
    if size is None or not 0 < size <= BUCKET_BYTES_MAX:
        raise BadRequest(f"a bucket has a length of 1 to {BUCKET_BYTES_MAX}")
    if not re.match(DIGEST_PATTERN, digest):
        raise BadRequest("a bucket's digest must be an xxh3-128 in hex")
    return size, digest


async def body(request: web.Request, kind: type[_T]) -> _T:
    """A small body."""
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (
        msgspec.MsgspecError,
        UnicodeDecodeError,
        RecursionError,
        web.HTTPRequestEntityTooLarge,
    ) as error:
        raise BadRequest(f"the body cannot be read: {error}") from None


def byte_range(request: web.Request, size: int) -> tuple[int, int]:
    """The bytes asked for, [start, stop).  Raises CorruptDelta if the bucket has no such bytes."""
    try:
        asked = request.http_range
    except ValueError:
        raise BadRequest("Range cannot be read") from None
    start, stop, _ = asked.indices(size)
    if start >= stop or (asked.stop or 0) > size:
        raise CorruptDelta(f"the bucket has {size} bytes, not those of the Range")
    return start, stop


def refusal(error: RoseError) -> Refusal:
    """What makes the client raise the same error."""
    for code, (_, kind) in STATUS_BY_ERROR.items():
        if isinstance(error, kind):
            return Refusal(code, str(error))
    return Refusal("failed", str(error))


def refuse(error: RoseError) -> web.Response:
    """The answer that makes the client raise the same error."""
    refused = refusal(error)
    status, _ = STATUS_BY_ERROR.get(refused.error, (500, RoseError))
    return answer(refused, status=status)


def answer(value: Any, status: int = 200) -> web.Response:
    """An answer in JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
