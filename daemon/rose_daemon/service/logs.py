"""Structured logs of all daemons: one line an event on standard error, each with a stable reason code.

A fault that repeats fills no disk: of one code and subject, some lines in a row are written and then one a
minute, which says how many were left out.  Lines of libraries come along, their code is the library's name.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog
from structlog.typing import EventDict, Processor

LEVELS = ("debug", "info", "warning", "error")
Form = Literal["logfmt", "json"]

BURST = 20
"""Lines of one code and subject that are written in a row."""
PERIOD_S = 60.0
"""Then one for each such period; a subject that was silent for so long has its burst back."""
KEYS_MAX = 1024
_CODE = re.compile(r"[a-z][a-z0-9_]*")
_NEVER_DROPPED = {"critical"}


def configure(level: str, form: Form) -> None:
    """Set structlog and the logs of libraries up for this process."""
    renderer: Processor = structlog.processors.JSONRenderer()
    if form == "logfmt":
        renderer = structlog.processors.LogfmtRenderer(
            key_order=("timestamp", "level", "code", "subject", "event"), drop_missing=True
        )
    elif sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            with_code,
            RateLimit(time.monotonic),
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            without_empty,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(handlers=[_FromLibraries()], level=logging.WARNING, force=True)


def with_code(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Name the reason: where no `code` was given, the event's own word is it."""
    if not event.get("code"):
        word = str(event.get("event", ""))
        event["code"] = word if _CODE.fullmatch(word) else "unnamed"
    return event


def without_empty(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Leave out what says nothing, and keep every event on one line."""
    return {key: _one_line(value) for key, value in event.items() if value not in ("", None)}


def _one_line(value: object) -> object:
    return value.replace("\n", " | ") if isinstance(value, str) else value


@dataclass
class _Bucket:
    tokens: float
    at_s: float
    suppressed: int = 0


class RateLimit:
    """A processor that drops what repeats too often; `clock_s` answers seconds that do not run backwards."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()

    def __call__(self, _logger: object, _method: str, event: EventDict) -> EventDict:
        """The event, if it may be written.  Raises structlog.DropEvent."""
        if event.get("level") in _NEVER_DROPPED:
            return event
        bucket = self._bucket((str(event.get("code")), str(event.get("subject", ""))))
        if bucket.tokens < 1:
            bucket.suppressed += 1
            raise structlog.DropEvent
        bucket.tokens -= 1
        if bucket.suppressed:
            event["suppressed"], bucket.suppressed = bucket.suppressed, 0
        return event

    def _bucket(self, key: tuple[str, str]) -> _Bucket:
        now_s = self._clock_s()
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            bucket = _Bucket(BURST, now_s)
            if len(self._buckets) >= KEYS_MAX:
                self._buckets.popitem(last=False)
        self._buckets[key] = bucket  # the one used last stands last
        silent_s = now_s - bucket.at_s
        if bucket.tokens >= 1 and silent_s >= PERIOD_S:
            bucket.tokens = BURST
        elif bucket.tokens < 1:
            bucket.tokens = min(1.0, bucket.tokens + silent_s / PERIOD_S)
        bucket.at_s = now_s
        return bucket


class _FromLibraries(logging.Handler):
    """Hands a library's line on as one of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        code = re.sub(r"[^a-z0-9_]+", "_", record.name.lower())
        structlog.get_logger().log(
            record.levelno, record.getMessage(), code=code, exc_info=record.exc_info or None
        )
