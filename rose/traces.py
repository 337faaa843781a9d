"""Request traces: the Azure LLM inference CSVs, and a generated stand-in for when there is no file.

A `Trace` is what was recorded; `window` cuts and scales a stretch of it to the requests that a small
machine can replay.  Instants are integers: 100 ns ticks of the 2023 files survive.
"""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rose.errors import ConfigError
from rose.units import NS_PER_S

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
TOKENS_MAX = 10_000_000
"""More than any context window: a larger figure is a damaged row."""
YEAR_MAX = 2200
"""Nanoseconds since 1970 fit until 2262: a later year is a damaged row, and so is one before 1970."""
FIELD_CHARS_MAX = 200
_HINT = f"the file must be an Azure LLM inference trace: a CSV with the columns {', '.join(COLUMNS)}"
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d):(\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", flags=re.ASCII
)

# Quantiles (at _SHARES) of the 2023 conversation trace, Azure/AzurePublicDataset, CC-BY 4.0; Patel et al.,
# "Splitwise", ISCA 2024.  Their means by linear interpolation are 3% and 2% above the trace's.
_SHARES = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)
_PROMPT_QUANTILES = (
    2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 14050,
)  # fmt: skip
_OUTPUT_QUANTILES = (7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 1000)


class Trace(NamedTuple):
    """Requests in order of arrival; three arrays of one length."""

    source: str
    at_ns: NDArray[np.int64]
    """Arrival after the first request (or after the start of a generated trace), ns, ascending."""
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    notes: tuple[str, ...] = ()
    """What a reader of results should know, such as rows that were out of order."""

    @property
    def span_ns(self) -> int:
        """From the start to the last arrival."""
        return int(self.at_ns[-1]) if len(self.at_ns) else 0


class TraceRequest(NamedTuple):
    """One request to replay."""

    at_ns: int
    """After the start of the window, at the window's speed."""
    prompt_tokens: int
    output_tokens: int


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a trace to replay, and how much of it a small machine is given."""

    offset_s: float = 0.0
    duration_s: float | None = None
    """None: to the end of the trace."""
    rate_scale: float = 1.0
    """Share of the requests kept (independent thinning, which keeps a Poisson trace Poisson)."""
    speed: float = 1.0
    """How much faster the trace's clock runs: a stretch of 60 s takes 30 s at 2."""
    size_divisor: float = 1.0
    """Prompts become this much shorter, and outputs too unless `output_divisor` says otherwise."""
    output_divisor: float | None = None
    prompt_tokens_min: int = 1
    prompt_tokens_max: int = TOKENS_MAX
    output_tokens_min: int = 1
    output_tokens_max: int = TOKENS_MAX

    def __post_init__(self) -> None:
        for name, ok in (
            ("offset_s", self.offset_s >= 0 and math.isfinite(self.offset_s)),
            (
                "duration_s",
                self.duration_s is None or (self.duration_s > 0 and math.isfinite(self.duration_s)),
            ),
            ("rate_scale", 0 < self.rate_scale <= 1),
            ("speed", self.speed > 0 and math.isfinite(self.speed)),
            ("size_divisor", self.size_divisor > 0 and math.isfinite(self.size_divisor)),
            ("output_divisor", self.outputs_divided_by > 0 and math.isfinite(self.outputs_divided_by)),
            ("prompt_tokens_min", 1 <= self.prompt_tokens_min <= self.prompt_tokens_max),
            ("output_tokens_min", 1 <= self.output_tokens_min <= self.output_tokens_max),
        ):
            if not ok:
                raise ConfigError(f"trace window: {name} = {getattr(self, name)} is out of range")

    @property
    def outputs_divided_by(self) -> float:
        """How much shorter outputs become."""
        return self.size_divisor if self.output_divisor is None else self.output_divisor


def read_azure(path: Path) -> Trace:
    """Read an Azure LLM inference trace (2023: naive times, 7 fraction digits; 2024: times with an offset).

    Rows out of order are sorted (ties keep the file's order) and counted in `notes`.  Raises ConfigError
    naming file and line for anything else that is not as it should be.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            return _read_rows(str(path), csv.reader(stream, strict=True))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", _HINT) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file: {error.reason} at byte {error.start}", _HINT) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _read_rows(source: str, reader: Iterator[list[str]]) -> Trace:
    rows = _numbered(source, reader)
    columns, fields = _columns(source, rows)
    width = max(columns) + 1
    clock = _Clock(source)
    at, prompts, outputs = array("q"), array("q"), array("q")
    for line, row in rows:
        if not row:
            continue
        if len(row) < width:
            raise ConfigError(f"{source}:{line}: {len(row)} fields, expected at least {width}")
        if len(row) > fields:
            raise ConfigError(f"{source}:{line}: {len(row)} fields, the header has {fields}")
        time, prompt, output = (row[index] for index in columns)
        at.append(clock.parse(line, time))
        prompts.append(_tokens(source, line, COLUMNS[1], prompt))
        outputs.append(_tokens(source, line, COLUMNS[2], output))
    if not at:
        raise ConfigError(f"{source}: no rows", _HINT)
    return _in_order(source, at, prompts, outputs)


def _numbered(source: str, reader: Iterator[list[str]]) -> Iterator[tuple[int, list[str]]]:
    """Rows with the number of the line they end on; raises ConfigError where the CSV is malformed."""
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            line = reader.line_num  # type: ignore[attr-defined]
            raise ConfigError(f"{source}:{line}: malformed CSV: {error}") from None
        yield reader.line_num, row  # type: ignore[attr-defined]


def _columns(source: str, rows: Iterator[tuple[int, list[str]]]) -> tuple[tuple[int, int, int], int]:
    """Where the three columns are, and how many there are; the others are ignored."""
    _, header = next(rows, (0, []))
    names = [name.strip() for name in header]
    if not names:
        raise ConfigError(f"{source}: empty file", _HINT)
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise ConfigError(f"{source}:1: no column {', '.join(missing)}", _HINT)
    time, prompt, output = (names.index(name) for name in COLUMNS)
    return (time, prompt, output), len(names)


class _Clock:
    """Reads times of one file; they must be all with an offset or all without."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._aware: bool | None = None
        self._minutes: dict[tuple[str, str, str | None], int] = {}

    def parse(self, line: int, text: str) -> int:
        """Nanoseconds since 1970 (naive times count as UTC).  Raises ConfigError."""
        match = _TIME.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"{self._source}:{line}: TIMESTAMP {_quoted(text)} is not a time",
                "expected YYYY-MM-DD HH:MM:SS[.fraction][offset]",
            )
        date, minute, second, fraction, offset = match.groups()
        if self._aware is None:
            self._aware = offset is not None
        elif self._aware != (offset is not None):
            has, others = ("an", "have none") if offset else ("no", "have one")
            raise ConfigError(
                f"{self._source}:{line}: TIMESTAMP {_quoted(text)} has {has} offset, the rows before {others}"
            )
        if int(second) > 59:
            raise ConfigError(
                f"{self._source}:{line}: TIMESTAMP {_quoted(text)} is not a time: second {second}"
            )
        start_ns = self._minute_ns(line, text, (date, minute, offset))
        return start_ns + int(second) * NS_PER_S + int((fraction or "0").ljust(9, "0"))

    def _minute_ns(self, line: int, text: str, key: tuple[str, str, str | None]) -> int:
        """Start of a minute; remembered, as the week of 2024 has 44 million rows in 10 thousand minutes."""
        known = self._minutes.get(key)
        if known is not None:
            return known
        date, minute, offset = key
        try:
            start = datetime.fromisoformat(f"{date}T{minute}:00{offset or '+00:00'}")
        except ValueError as error:
            raise ConfigError(
                f"{self._source}:{line}: TIMESTAMP {_quoted(text)} is not a time: {error}"
            ) from None
        if not 1970 <= start.year <= YEAR_MAX:
            raise ConfigError(
                f"{self._source}:{line}: TIMESTAMP {_quoted(text)} is not of the years 1970 to {YEAR_MAX}"
            )
        since = start - datetime(1970, 1, 1, tzinfo=UTC)
        return self._minutes.setdefault(key, (since.days * 86_400 + since.seconds) * NS_PER_S)


def _tokens(source: str, line: int, column: str, text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 12):
        raise ConfigError(f"{source}:{line}: {column} {_quoted(text)} is not a whole number of tokens")
    if int(digits) > TOKENS_MAX:
        raise ConfigError(f"{source}:{line}: {column} {digits} is above {TOKENS_MAX}")
    return int(digits)


def _quoted(text: str) -> str:
    return repr(text if len(text) <= FIELD_CHARS_MAX else text[:FIELD_CHARS_MAX] + "...")


def _in_order(source: str, at: array[int], prompts: array[int], outputs: array[int]) -> Trace:
    at_ns = np.array(at, dtype=np.int64)
    late = int(np.count_nonzero(np.diff(at_ns) < 0))
    order = np.argsort(at_ns, kind="stable")
    at_ns = at_ns[order]
    notes = (f"{late} of {len(at_ns)} rows were earlier than the row before them; sorted",) if late else ()
    prompt_tokens = np.array(prompts, dtype=np.int64)[order]
    return Trace(source, at_ns - at_ns[0], prompt_tokens, np.array(outputs, dtype=np.int64)[order], notes)


def generate(
    rng: np.random.Generator,
    *,
    duration_s: float,
    rate_rps: float = 5.0,
    amplitude: float = 0.5,
    period_s: float = 86_400.0,
) -> Trace:
    """Stand-in for a day of serving: Poisson arrivals on a sinusoid, sizes of the 2023 conversation trace.

    Rate(t) = rate_rps * (1 + amplitude * sin(2 pi t / period_s)); the defaults give the paper's burstiness
    over a day (per-minute peak about 1.7 times the mean, per-second about 4.2).  Drawn by thinning of the
    peak rate (Lewis and Shedler, 1979).  Raises ConfigError for figures out of range.
    """
    if not (duration_s > 0 and rate_rps > 0 and 0 <= amplitude <= 1 and period_s > 0):
        raise ConfigError(
            f"generated trace: duration {duration_s} s, rate {rate_rps} rps, amplitude {amplitude}, "
            f"period {period_s} s are out of range"
        )
    peak_rps = rate_rps * (1 + amplitude)
    count = rng.poisson(peak_rps * duration_s)
    at_s = np.sort(rng.uniform(0, duration_s, count))
    rate = rate_rps * (1 + amplitude * np.sin(2 * np.pi * at_s / period_s))
    at_s = at_s[rng.uniform(0, peak_rps, count) < rate]
    sizes = [
        np.interp(rng.uniform(0, 1, len(at_s)), _SHARES, quantiles).round().astype(np.int64)
        for quantiles in (_PROMPT_QUANTILES, _OUTPUT_QUANTILES)
    ]
    source = f"generated: {rate_rps:g} rps, amplitude {amplitude:g}, {duration_s:g} s"
    return Trace(source, (at_s * NS_PER_S).astype(np.int64), sizes[0], sizes[1])


def window(trace: Trace, cut: Window, rng: np.random.Generator) -> list[TraceRequest]:
    """The requests of a stretch of the trace, thinned and shortened; `rng` decides which are kept.

    Raises ConfigError when the stretch holds no request.
    """
    start_ns = round(cut.offset_s * NS_PER_S)
    end_ns = trace.span_ns + 1 if cut.duration_s is None else start_ns + round(cut.duration_s * NS_PER_S)
    first, last = (int(index) for index in np.searchsorted(trace.at_ns, (start_ns, end_ns), side="left"))
    chosen = np.arange(first, last)
    if cut.rate_scale < 1:
        chosen = chosen[rng.uniform(0, 1, len(chosen)) < cut.rate_scale]
    if not len(chosen):
        raise ConfigError(
            f"{trace.source}: no request left between {cut.offset_s:g} s and {end_ns / NS_PER_S:g} s "
            f"at rate scale {cut.rate_scale:g}",
            f"the trace is {trace.span_ns / NS_PER_S:.0f} s long",
        )
    prompts = _scaled(
        trace.prompt_tokens[chosen], cut.size_divisor, cut.prompt_tokens_min, cut.prompt_tokens_max
    )
    outputs = _scaled(
        trace.output_tokens[chosen], cut.outputs_divided_by, cut.output_tokens_min, cut.output_tokens_max
    )
    at_ns = ((trace.at_ns[chosen] - start_ns) / cut.speed).astype(np.int64)
    return [TraceRequest(*row) for row in zip(at_ns.tolist(), prompts, outputs, strict=True)]


def _scaled(tokens: NDArray[np.int64], divisor: float, low: int, high: int) -> list[int]:
    scaled = np.clip(np.rint(tokens / divisor).astype(np.int64), low, high)
    return [int(value) for value in scaled]
