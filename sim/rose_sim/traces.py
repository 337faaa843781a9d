"""Readers of serving traces in the formats of the field; all answer a `rose.traces.Trace`.

    .csv    Azure LLM inference 2023 and 2024 (TIMESTAMP, ContextTokens, GeneratedTokens)
            BurstGPT (Timestamp, Request tokens, Response tokens; seconds)
    .jsonl  Mooncake (timestamp in ms, input_length, output_length)
            vLLM bench, custom data set (prompt_len or input_len, output_len or output_tokens; arrival in s)

Rows out of order are sorted and counted.  Anything else that is not as it should be raises ConfigError with
file, line and reason.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import msgspec
import numpy as np

from rose.errors import ConfigError
from rose.traces import COLUMNS, TOKENS_MAX, Trace, read_azure
from rose.units import NS_PER_MS, NS_PER_S

BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
_MOONCAKE = ("timestamp", "input_length", "output_length")
_ARRIVALS = ("arrival_s", "arrival_time", "timestamp_s", "start_time")
_PROMPTS = ("prompt_len", "input_len", "prompt_tokens", "input_tokens")
_OUTPUTS = ("output_len", "output_tokens", "expected_output_len")
_HINT = "see rose_sim.traces: Azure and BurstGPT CSV, Mooncake and vLLM bench JSONL are read"

_Row = tuple[int, int, int]


def read_trace(path: Path) -> Trace:
    """Read a trace; its format is told from its first line.  Raises ConfigError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            first = stream.readline()
            if not first.strip():
                raise ConfigError(f"{path}: empty file", _HINT)
            stream.seek(0)
            if first.lstrip().startswith("{"):
                return _trace(path, list(_json_rows(path, stream)))
            names = [name.strip() for name in first.split(",")]
            if set(BURSTGPT_COLUMNS) <= set(names):
                return _trace(path, list(_burstgpt_rows(path, stream)))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", _HINT) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file: {error.reason} at byte {error.start}", _HINT) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if not set(COLUMNS) & set(names):
        raise ConfigError(f"{path}:1: columns of no known trace: {', '.join(names)[:200]}", _HINT)
    return read_azure(path)


def _burstgpt_rows(path: Path, stream: TextIO) -> Iterator[_Row]:
    reader = csv.DictReader(stream, strict=True, skipinitialspace=True)
    try:
        for row in reader:
            where = f"{path}:{reader.line_num}"
            at, prompt, output = (row.get(name) for name in BURSTGPT_COLUMNS)
            if at is None or prompt is None or output is None:
                raise ConfigError(f"{where}: fewer fields than columns")
            yield _row(where, at, prompt, output, NS_PER_S)
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num}: malformed CSV: {error}") from None


def _json_rows(path: Path, stream: TextIO) -> Iterator[_Row]:
    decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{where}: not a JSON object: {error}") from None
        if set(_MOONCAKE) <= record.keys():
            at, prompt, output = (_text(record[name]) for name in _MOONCAKE)
            yield _row(where, at, prompt, output, NS_PER_MS)
        else:
            at, prompt, output = (_member(where, record, names) for names in (_ARRIVALS, _PROMPTS, _OUTPUTS))
            yield _row(where, at, prompt, output, NS_PER_S)


def _member(where: str, record: dict[str, msgspec.Raw], names: tuple[str, ...]) -> str:
    for name in names:
        if name in record:
            return _text(record[name])
    raise ConfigError(f"{where}: none of {', '.join(names)} is there", _HINT)


def _text(raw: msgspec.Raw) -> str:
    return bytes(raw).decode().strip('"')


def _row(where: str, at: str, prompt: str, output: str, unit_ns: int) -> _Row:
    try:
        instant = float(at)
    except ValueError:
        raise ConfigError(f"{where}: {at[:80]!r} is not a time") from None
    if not (math.isfinite(instant) and 0 <= instant * unit_ns < 1 << 62):
        raise ConfigError(f"{where}: time {at[:80]} is out of range")
    return round(instant * unit_ns), _tokens(where, prompt), _tokens(where, output)


def _tokens(where: str, text: str) -> int:
    digits = text.strip().removesuffix(".0")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 12):
        raise ConfigError(f"{where}: {text[:80]!r} is not a whole number of tokens")
    if int(digits) > TOKENS_MAX:
        raise ConfigError(f"{where}: {digits} tokens are more than {TOKENS_MAX}")
    return int(digits)


def _trace(path: Path, rows: list[_Row]) -> Trace:
    if not rows:
        raise ConfigError(f"{path}: no rows", _HINT)
    table = np.array(rows, dtype=np.int64)
    late = int(np.count_nonzero(np.diff(table[:, 0]) < 0))
    table = table[np.argsort(table[:, 0], kind="stable")]
    notes = (f"{late} of {len(rows)} rows were earlier than the row before them; sorted",) if late else ()
    return Trace(str(path), table[:, 0] - table[0, 0], table[:, 1], table[:, 2], notes)
