"""Structured logs: one logfmt line an event, with a stable reason code, on standard error."""

from __future__ import annotations

import logging
import sys

import structlog

LEVELS = ("debug", "info", "warning", "error")


def configure(level: str) -> None:
    """Set structlog up for this process."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _without_empty,
            structlog.processors.LogfmtRenderer(
                key_order=("timestamp", "level", "code", "subject", "event"), drop_missing=True
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _without_empty(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    return {key: _one_line(value) for key, value in event.items() if value not in ("", None)}


def _one_line(value: object) -> object:
    return value.replace("\n", " | ") if isinstance(value, str) else value
